"""Feature store `mooncake` for draftcore."""

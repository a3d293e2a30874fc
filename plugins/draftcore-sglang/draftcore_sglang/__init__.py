"""Channel `redis` for draftcore."""

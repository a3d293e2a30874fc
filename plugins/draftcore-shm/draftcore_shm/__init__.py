"""Store `shm` for draftcore."""

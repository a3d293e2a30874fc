"""Channel `dir` for draftcore."""

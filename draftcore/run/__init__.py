"""A configured run: its parts (`parts`), and the work that is done with them.

`capture` fills a durable store, `trainer` trains, `producing` captures for a trainer elsewhere,
`evaluate` decodes held-out prompts, `drafts` loads and exports what was trained.
"""

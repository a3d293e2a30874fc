"""What a run learns from: answers by the target, rows to look at, `draftcore data`.

`plugin` holds the commands, `api` the same as functions.
"""

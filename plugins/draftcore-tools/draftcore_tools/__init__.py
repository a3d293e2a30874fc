"""What is asked before a draft costs days: `draftcore plan`, `verify` and `overfit`.

`plugin` holds the commands, `api` the same as functions, `plan` says what a run takes and `suggest` writes
one, `verify` compares an export with the trained draft, `overfit` takes one conversation through a run.
"""

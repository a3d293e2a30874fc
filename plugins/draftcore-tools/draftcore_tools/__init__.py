"""Checks before a draft costs days: `draftcore verify` and `draftcore overfit`.

`plugin` holds the commands, `api` the same as functions, `verify` compares an export with the trained
draft, `reference` decodes with that draft on some prompts, `overfit` takes one conversation
through a whole run.
"""

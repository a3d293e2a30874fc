"""Gates that a draft passes before it costs days: `draftcore verify` and `draftcore overfit`.

`plugin` holds the commands, `witness` what the trained draft does on some prompts, `verify` the
comparison with what a server would do, `overfit` the way of one conversation through everything.
"""

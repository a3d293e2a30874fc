"""The draft algorithm echo for draftcore.

`plugin` holds the hooks, `options` what a run may set, `model` the draft with its loss and its
files, `drafter` the decoder that `draftcore eval` measures.
"""

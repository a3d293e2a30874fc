"""Medusa draft heads (arXiv 2401.10774) for draftcore, with nothing of draftcore's tree edited.

`plugin` holds the hooks, as functions, `options` what can be set, `model` the heads with their loss,
`drafter` the decoder, `serving` the layout that vLLM reads.
"""

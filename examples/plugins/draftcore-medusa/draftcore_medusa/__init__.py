"""Medusa draft heads (arXiv 2401.10774) for draftcore, with nothing of draftcore's tree edited.

`plugin` holds the hooks, `options` what can be set, `model` the heads with their loss, `loss` its
cross entropy, `drafter` the decoder, `serving` the layout that vLLM reads.
"""

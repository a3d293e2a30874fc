"""MLP speculators (arXiv 2404.19124) for draftcore, with nothing of draftcore's tree edited.

`plugin` says what is offered, `options` what can be set, `algorithm` answers the hooks; `model` is the
draft with its loss, `drafter` decodes a chain or a tree, `served` reads an export as vLLM does.
"""

"""EAGLE-3 draft models (arXiv 2503.01840) for draftcore.

`plugin` says what is offered, `algorithm` answers the hooks, `options` what can be set, `config` the
draft's shape, `model` the draft and its training-time test, `attention` the fused attention of that test,
`loss` its rows and losses, `drafter` the cached decoder, `serving` the layout that sglang and vLLM
read, `served` the same export as these servers compute it.
"""

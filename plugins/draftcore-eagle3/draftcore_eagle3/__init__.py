"""EAGLE-3 draft models (arXiv 2503.01840) for draftcore.

`plugin` holds the hooks, `options` what can be set, `model` the draft, `attention` its fused
attention, `loss` the training-time test, `drafter` the cached decoder, `serving` the layout that
sglang and vLLM read, `vocabulary` the draft vocabulary.
"""

"""DFlash block-diffusion draft models (arXiv 2602.06036) for draftcore.

`plugin` says what is offered, `algorithm` answers the hooks, `options` what can be set, `config` the
draft's shape, `blocks` anchors and what their blocks are to predict, `model` the backbone and the draft
with its loss, `attention` its attention, `loss` the objectives, `drafter` the cached decoder, `serving` the
layout that sglang, vLLM and llama.cpp read, `served` the same export as the first two compute it.
"""

"""DSpark draft models (arXiv 2607.05147) for draftcore: the DFlash backbone, a Markov and a confidence head.

The backbone is draftcore-dflash's; here is what DSpark adds. `plugin` says what is offered, `algorithm`
names the parts, `options` what can be set, `config` the heads' shape, `heads` the two heads, `model` the
draft with its loss, `drafter` the sequential decoder, `serving` the layout that servers read, `served` the
same export as sglang and vLLM compute it, `gguf` its names in llama.cpp.
"""

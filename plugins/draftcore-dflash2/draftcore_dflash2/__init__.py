"""DFlash2 draft models for draftcore: DFlash's backbone, short convolutions, and a candidate selector.

The backbone is draftcore-dflash's; here is what DFlash2 adds. `plugin` says what is offered, `algorithm`
names the parts, `options` what can be set, `config` the sizes, `convolution` what mixes the rows of a
block, `selector` what scores the best tokens of a row, `model` the draft with its loss, `loss` both losses
from one head product, `drafter` the decoder, `serving` the layout that sglang and vLLM read, `served` the
same export as they compute it, `gguf` what llama.cpp calls its parts.
"""

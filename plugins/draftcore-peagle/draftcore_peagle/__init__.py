"""P-EAGLE draft models (arXiv 2602.01469) for draftcore: EAGLE-3 that drafts a round in one forward.

The network is draftcore-eagle3's; here is what P-EAGLE adds. `plugin` says what is offered, `algorithm`
names the parts, `options` what can be set, `pairs` draws what a step trains on, `attention` says what
these see of each other, `model` is the draft with its loss, `loss` that loss and the head's gradients,
`drafter` the parallel decoder, `serving` the layout that vLLM reads, `served` the same export as vLLM
computes it.
"""

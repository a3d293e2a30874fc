"""Domino draft models (arXiv 2605.29707) for draftcore: the DFlash backbone and a causal head.

The backbone is draftcore-dflash's; here is what Domino adds. `plugin` says what is offered, `algorithm`
names the parts, `options` what can be set, `config` the head's shape, `model` the head and the draft with
its loss, `loss` the schedule of base and final loss, `head` both losses from one head product, `drafter`
the causal decoder, `serving` the layout that sglang reads, `served` the same export as sglang computes it.
"""

"""Domino draft models (arXiv 2605.29707) for draftcore: the DFlash backbone and a causal head.

Everything of the backbone is draftcore-dflash's; here is what Domino adds. `plugin` holds the
hooks, `options` what can be set, `config` the head's shape, `model` the head, `loss` base and final
loss with their schedule, `head` both losses from one head product, `drafter` the causal decoder,
`serving` sglang's contract.
"""

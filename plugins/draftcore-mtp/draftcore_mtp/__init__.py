"""Fine-tuning of the multi-token-prediction (MTP) layer that a target brings, for draftcore.

`plugin` says what is offered, `algorithm` answers the hooks, `options` what can be set, `config` the
layer's shape and the kinds of targets that have one, `stored` reads it from the target's own files,
`model` the layer with its chain of steps and the loss, `drafter` the cached decoder, `serving` the copy of
the target with the trained layer, `served` the same export as sglang and vLLM compute it.
"""

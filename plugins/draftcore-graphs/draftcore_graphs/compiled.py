"""The runner `compiled`: the target's layers through torch.compile in capture, without CUDA graphs.

A decoder layer runs its norms, rotary embedding and activations one kernel at a time, between matrix
products. Compiled over shapes that may change, one program serves every layer and every batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from draftcore_eval.decode import Eager
from draftcore_hf.decoder import DecoderModel, decoder_model
from torch import Tensor

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.target import PrefillRunner, TargetModel


class Compiled(Eager):
    """Compiles the target for capture; decoding is eager. See `contracts.runner.Runner`."""

    def __init__(self) -> None:
        if torch.cuda.is_available():  # torch starts what compiles kernels too late for the first
            from torch._inductor.async_compile import maybe_warm_pool

            maybe_warm_pool()

    def prefill(self, model: TargetModel) -> PrefillRunner:
        return CompiledLayers(decoder_model(model, "the runner 'compiled'"))


class CompiledLayers:
    """Runs the target for capture with its layers compiled, as the first batch comes."""

    def __init__(self, model: DecoderModel) -> None:
        self.model = model
        self.compiled = [torch.compile(layer.forward, dynamic=True) for layer in model.layers]

    def features(
        self, tokens_BT: Tensor, lengths_B: Tensor, request: FeatureRequest
    ) -> dict[str, Tensor]:
        with self._in_place():
            return self.model.features(tokens_BT, lengths_B, request)

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        """Put the compiled layers in, for a capture alone: decoding keeps the layers as they are."""
        for layer, compiled in zip(self.model.layers, self.compiled, strict=True):
            layer.forward = compiled
        try:
            yield
        finally:
            for layer in self.model.layers:
                del layer.forward

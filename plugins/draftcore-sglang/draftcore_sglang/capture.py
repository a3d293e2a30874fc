"""The capture `sglang`: the target runs through sglang on this process's device, group by group.

The target is started at the first group, not when a capture is opened: before it takes the device's
memory, transformers is asked for the features of a short prompt.

Shape letters: T tokens of a prompt, H width.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from draftcore.contracts.capture import CapturedGroup, CaptureInput, FeatureRequest
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError
from draftcore.tensors import resolve_device
from draftcore_sglang import selftest
from draftcore_sglang.engine import open_engine
from draftcore_sglang.internals import MAX_PROMPTS, SIGNATURES, Settings, require_arguments
from draftcore_sglang.internals.signatures import require_sglang
from draftcore_sglang.options import SglangOptions


class SglangCapture:
    """Runs each capture group as one batch, without padding."""

    def __init__(self, target: TargetSpec, request: FeatureRequest, options: SglangOptions) -> None:
        target.require_layers(request)
        require_text(target)
        require_sglang(SIGNATURES)
        require_arguments(options.args)
        self.target, self.request, self.options = target, request, options
        self.engine = open_engine(settings_of(target, options))
        self.closed = False

    def features(self, groups: Iterable[CaptureInput]) -> Iterator[CapturedGroup]:
        """Yield features of the request's dtype on the target's device.

        Raises DraftcoreError for a group that is larger than sglang's pool, and where sglang and
        transformers disagree about a short prompt.
        """
        for group in groups:
            if not self.engine.running:
                self._start([int(token) for token in group.token_ids[0][:32]])
            yield CapturedGroup(group.group, self._rows(group))

    def _start(self, prompt: list[int]) -> None:
        expected = None
        if self.options.self_test:
            expected = selftest.reference(
                self.target, replace(self.request, last_hidden=True), prompt
            )
        self.engine.start()
        try:
            found = self.engine.forward([prompt], self.request.layers)
            selftest.require_own_head(self.target, found)
            if expected is not None:
                selftest.require_same(self.target, found, expected)
        except BaseException:
            self.engine.stop()
            raise

    def _rows(self, group: CaptureInput) -> tuple[dict[str, Tensor], ...]:
        self._require_room(group)
        prompts = [[int(token) for token in tokens] for tokens in group.token_ids]
        dtype, lengths = getattr(torch, self.request.dtype), [len(prompt) for prompt in prompts]
        states = self.engine.forward(prompts, self.request.layers)
        taken = {name: states[name].to(dtype) for name in self.request.names}
        split = {name: torch.split(value, lengths) for name, value in taken.items()}
        return tuple({name: split[name][row] for name in split} for row in range(len(lengths)))

    def _require_room(self, group: CaptureInput) -> None:
        limits = self.engine.limits
        lengths = [len(tokens) for tokens in group.token_ids]
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        if lengths[longest] > limits.context:
            raise UsageError(
                f"dataset row {group.group.rows[longest]} (sample {group.group.feature_ids[longest]}) "
                f"has {lengths[longest]} tokens, the target as sglang runs it takes {limits.context}\n"
                "  lower data.max_length, or raise capture.options.max_tokens up to the model's length"
            )
        need = sum(-(-length // limits.page) * limits.page for length in lengths)
        if need > limits.tokens or len(lengths) > MAX_PROMPTS:
            raise UsageError(
                f"the capture group of dataset rows {list(group.group.rows)} has {len(lengths)} prompts "
                f"with {need} tokens\n  sglang's pool holds {limits.tokens} tokens of at most "
                f"{MAX_PROMPTS} prompts\n  lower capture.batch, or raise capture.options.max_tokens"
            )

    def close(self) -> None:
        """Let go of the target; the last capture that does so frees the device's memory."""
        if not self.closed:
            self.closed = True
            self.engine.leave()


def settings_of(target: TargetSpec, options: SglangOptions) -> Settings:
    """Return what sglang runs this target with."""
    positions = getattr(target.text_config, "max_position_embeddings", None)
    return Settings(
        path=target.path,
        revision=target.revision,
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(resolve_device(target.device)),
        tp=options.tp,
        max_tokens=options.max_tokens,
        context=min(options.max_tokens, positions or options.max_tokens),
        args=json.dumps(options.args, sort_keys=True),
    )


def require_text(target: TargetSpec) -> None:
    """Raise UsageError for a target that also takes images."""
    if getattr(target.config, "vision_config", None) is not None:
        raise UsageError(
            f"target {target.path!r} is a vision-language model ({target.config.model_type}), and a "
            "capture by sglang would\n  take its prompts without their images\n"
            "  train on a text model, or on the text model that it was made from"
        )

"""The capture `sglang`: the target runs through sglang on this process's device, batch by batch.

The target is started when a capture is opened, which shows whether it can work: before sglang takes
the device's memory, transformers is asked for the features of a short prompt.

Shape letters: T tokens of a prompt, H width.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from draftcore_eval import selftest
from torch import Tensor

from draftcore.contracts.capture import BadRows, CaptureBatch, CapturedBatch, FeatureRequest
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError
from draftcore.tensors import require_devices, resolve_device
from draftcore_sglang.engine import open_engine
from draftcore_sglang.internals import MAX_PROMPTS, SIGNATURES, Settings, require_arguments
from draftcore_sglang.internals.signatures import require_sglang
from draftcore_sglang.options import SglangOptions


class SglangCapture:
    """Runs each batch without padding; images as the target's processor reads them.

    Raises UsageError where sglang is not there or does not compute what transformers does, and
    DraftcoreError where the target cannot be started now. What ends sglang later is another error: it
    ends this process, and who restarts it has an engine again.
    """

    def __init__(self, target: TargetSpec, request: FeatureRequest, options: SglangOptions) -> None:
        target.require_layers(request)
        require_sglang(SIGNATURES)
        require_arguments(options.args)
        self.target, self.request, self.options = target, request, options
        self.tests_images = options.self_test  # with the first row that has some
        self.engine, self.closed = open_engine(settings_of(target, options)), False
        try:
            if self.engine.model is None:
                self._start(selftest.prompt_of(target))
        except BaseException:
            self.close()
            raise

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        """Yield features of the request's dtype on the target's device.

        Raises BadRows for rows that are longer than the target takes, or with images that cannot be
        read, and UsageError for a batch that is larger than sglang's pool.
        """
        for batch in batches:
            yield CapturedBatch(batch, self._rows(batch))

    def _start(self, prompt: list[int]) -> None:
        expected = None
        if self.options.self_test:
            expected = selftest.reference(
                self.target, replace(self.request, last_hidden=True), prompt, "sglang"
            )
        self.engine.start()
        try:
            found = self.engine.forward([prompt], self.request.layers, {})
            logits_V = found["logits"][-1][: self.target.vocab_size].double()
            selftest.require_own_head(
                self.target, found["last_hidden"][-1], torch.log_softmax(logits_V, -1), "sglang"
            )
            if expected is not None:
                selftest.require_same(self.target, found, expected, "sglang")
        except BaseException:
            self.engine.stop()
            raise

    def _rows(self, batch: CaptureBatch) -> tuple[dict[str, Tensor], ...]:
        self._require_room(batch)
        prompts = [list(map(int, tokens)) for tokens in batch.token_ids]
        dtype, lengths = getattr(torch, self.request.dtype), [len(prompt) for prompt in prompts]
        made = batch.image_inputs(self.target.images)
        if made and self.tests_images:
            self._test_images(prompts[min(made)], made[min(made)])
        pictures = {at: dict(inputs) for at, inputs in made.items()}
        states = self.engine.forward(prompts, self.request.layers, pictures)
        taken = {name: states[name].to(dtype) for name in self.request.names}
        split = {name: torch.split(value, lengths) for name, value in taken.items()}
        return tuple({name: split[name][row] for name in split} for row in range(len(lengths)))

    def _test_images(self, prompt: list[int], made: Any) -> None:
        """Compare a row with images with transformers. Raises UsageError where they differ."""
        request = replace(self.request, last_hidden=True)
        expected = selftest.reference(self.target, request, prompt, "sglang", made)
        if expected is not None:
            found = self.engine.forward([prompt], self.request.layers, {0: dict(made)})
            selftest.require_same(self.target, found, expected, "sglang", selftest.SEEN)
        self.tests_images = False

    def _require_room(self, batch: CaptureBatch) -> None:
        limits = self.engine.limits
        lengths = [len(tokens) for tokens in batch.token_ids]
        too_long = {
            at: f"dataset row {batch.rows[at]} (sample {batch.ids[at]}) has {length} tokens, the "
            f"target as sglang runs it takes {limits.context}\n"
            "  lower data.max_length, or raise capture.options.max_tokens up to the model's length"
            for at, length in enumerate(lengths)
            if length > limits.context
        }
        if too_long:
            raise BadRows(too_long)
        need = sum(-(-length // limits.page) * limits.page for length in lengths)
        if need > limits.tokens or len(lengths) > MAX_PROMPTS:
            raise UsageError(
                f"the batch of dataset rows {list(batch.rows)} has {len(lengths)} prompts "
                f"with {need} tokens\n  sglang's pool holds {limits.tokens} tokens of at most "
                f"{MAX_PROMPTS} prompts\n  lower train.batch, or raise capture.options.max_tokens"
            )

    def close(self) -> None:
        """Let go of the target; the last capture that does so frees the device's memory."""
        if not self.closed:
            self.closed = True
            self.engine.leave()


def settings_of(target: TargetSpec, options: SglangOptions) -> Settings:
    """Return what sglang runs this target with. Raises UsageError for more devices than there are."""
    device = resolve_device(target.device)
    require_devices(device, options.tp, "capture.options.tp")
    positions = getattr(target.text_config, "max_position_embeddings", None)
    return Settings(
        path=target.path, revision=target.revision,
        dtype=str(target.dtype).removeprefix("torch."), device=str(device),
        tp=options.tp, max_tokens=options.max_tokens,
        context=min(options.max_tokens, positions or options.max_tokens),
        args=json.dumps(options.args, sort_keys=True),
    )  # fmt: skip

"""The graph runner of prefill: replays the target's forward over padded prompts, for its features.

Only the stack of decoder layers is in the graph. The runner returns the requested features in their
stored type and in memory of their own.

Shape letters: B batch, T tokens, H width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from draftcore_hf.decoder import DecoderModel, decoder_model
from torch import Tensor, nn

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.runner import Batch, GraphBackend, Outputs, ShapeKey
from draftcore.contracts.target import TargetModel
from draftcore_graphs.breaks import run_eager
from draftcore_graphs.buckets import pad_to
from draftcore_graphs.buffers import Slot, StaticBuffers
from draftcore_graphs.divided import DividedRow
from draftcore_graphs.graph_plugin import GraphPlugin, Work
from draftcore_graphs.resolve import MASKS, Phase
from draftcore_graphs.runners import GraphRunner

SLOTS = (
    Slot("tokens_BT", lambda key: (key.rows, key.length), torch.long, "tokens"),
    Slot("lengths_B", lambda key: (key.rows,), torch.long, "rows"),
    Slot("live_B", lambda key: (key.rows,), torch.bool, "rows"),
)
ATTENTION = ("self_attn", "attn", "attention", "self_attention")
# The largest difference between masks of ours and of the model, relative to the largest number of a
# feature. Where the model means other masks, features differ by as much as they are large.
SAME_MASKS = {torch.float32: 1e-4, torch.float64: 1e-4}
SAME_MASKS_IN_HALF = 0.05


@torch.inference_mode()
def static_features(
    target: DecoderModel,
    tokens_BT: Tensor,
    request: FeatureRequest,
    ends: DividedRow | None = None,
    begins: DividedRow | None = None,
) -> dict[str, Tensor]:
    """Return the target's features of right-padded rows by a forward that graphs can hold.

    transformers makes its masks on the host, from a mask of the padding. Right-padded rows need none,
    as the padding comes after every token that counts. `ends` and `begins` are the row that this part
    of a batch shares with another; see `draftcore.contracts.runner.Work`.
    """
    span = tokens_BT.shape[1]
    positions_BT = torch.arange(span, device=tokens_BT.device)[None]
    cache = None
    assert ends is None or begins is None
    if ends is not None:
        cache = ends.beginning(len(target.layers))
    if begins is not None:
        cache, span, positions_BT = begins.rest(), begins.length, begins.positions(tokens_BT)
    return target.run(
        request,
        input_ids=tokens_BT,
        position_ids=positions_BT,
        attention_mask=target.masks(positions_BT, span),
        past_key_values=cache,
        use_cache=cache is not None,
    )


class PrefillGraphRunner(GraphRunner):
    """Replays a batch in the smallest bucket of rows and length that holds it.

    A batch that no bucket holds runs eagerly. With `breaks`, for backends of that capability, attention
    is a break in the graphs.
    """

    def __init__(
        self, target: TargetModel, phase: Phase, backend: GraphBackend,
        plugins: Sequence[GraphPlugin] = (), *, breaks: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(phase, backend, plugins)
        self.target, self.breaks = decoder_model(target, "a graph of the target"), breaks
        self.requests: dict[str, FeatureRequest] = {}
        # From those of the model; None before the first batch.
        self.masks_differ: bool | None = None
        largest = ShapeKey(phase.rows[-1], phase.lengths[-1])
        self.buffers = StaticBuffers(SLOTS, [largest], target.device)

    @torch.inference_mode()
    def features(
        self, tokens_BT: Tensor, lengths_B: Tensor, request: FeatureRequest
    ) -> dict[str, Tensor]:
        B, T = tokens_BT.shape
        key = self._bucket(B, T, request)
        if key is None or self.masks_differ:
            self.counts["no bucket" if key is None else "rule masks"] += 1
            return self.target.features(tokens_BT, lengths_B, request)
        self.ready(
            ShapeKey(rows, length, key.variant)
            for rows in self.phase.rows
            for length in self.phase.lengths
        )
        live_B = torch.ones_like(lengths_B, dtype=torch.bool)
        live = {"tokens_BT": tokens_BT, "lengths_B": lengths_B, "live_B": live_B}
        outputs = self.run(key, live)
        live = {name: value[:B, :T] for name, value in outputs.items()}
        found = request.select(live, copy=True)
        if self.masks_differ is None:
            return self._checked(found, tokens_BT, lengths_B, request)
        return found

    def work(self, key: ShapeKey) -> Work:
        request = self.requests[key.variant]

        def forward(
            batch: Batch, *, ends: DividedRow | None = None, begins: DividedRow | None = None
        ) -> Outputs:
            taken = static_features(self.target, batch["tokens_BT"], request, ends, begins)
            return {name: taken[name] for name in request.names}

        return forward

    def weights(self) -> Iterable[Tensor]:
        decoder = self.target.decoder
        return [*decoder.parameters(), *decoder.buffers()]

    def before_capture(self, key: ShapeKey) -> None:
        """Fill all rows with tokens 0."""
        batch = self.buffers.view(key)
        for name, value in (("tokens_BT", 0), ("lengths_B", key.length), ("live_B", True)):
            batch[name].fill_(value)

    def _capture(self, keys: Sequence[ShapeKey]) -> None:
        with ExitStack() as stack:
            if self.breaks:
                stack.enter_context(eager_attention(self.target.layers))
            super()._capture(keys)

    def _bucket(self, rows: int, length: int, request: FeatureRequest) -> ShapeKey | None:
        padded = pad_to(length, self.phase.lengths, padding=self.phase.padding)
        bucket = self.rows(rows)
        if bucket is None or padded is None:
            return None
        variant = f"{','.join(request.names)} {request.topk}"
        self.requests[variant] = request
        return ShapeKey(bucket, padded, variant)

    def _checked(
        self, found: dict[str, Tensor], tokens_BT: Tensor, lengths_B: Tensor,
        request: FeatureRequest,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Compare the first batch with the model under its own masks, and return the right features.

        Raises UsageError where they differ and the user named the backend.
        """
        own = self.target.features(tokens_BT, lengths_B, request)
        states = [name for name in own if name != "topk_ids"]  # rounding swaps near neighbours
        gap, worst = max((_gap(found[name], own[name], lengths_B), name) for name in states)
        bound = SAME_MASKS.get(self.target.dtype, SAME_MASKS_IN_HALF)
        self.masks_differ = gap > bound
        if self.masks_differ and self.phase.decided.get("backend") == "you":
            fault = (
                f"{worst} of {self.target.spec.path!r} differs from the model's own by {gap:.3g} "
                f"of its largest number (bound {bound:.3g})"
            )
            raise MASKS.error("prefill", self.phase.backend, {MASKS.name: fault})
        return own if self.masks_differ else found


def _gap(found_BTH: Tensor, own_BTH: Tensor, lengths_B: Tensor) -> float:
    """Return the largest difference in tokens that count, relative to their largest number."""
    counts_BT = torch.arange(found_BTH.shape[1], device=lengths_B.device) < lengths_B[:, None]
    ours, theirs = (x_BTH.double().nan_to_num()[counts_BT] for x_BTH in (found_BTH, own_BTH))
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))


@contextmanager
def eager_attention(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Make the attention of every layer a break in the graphs that the block records."""
    modules = [m for layer in layers for n, m in layer.named_children() if n in ATTENTION]
    for module in modules:
        module.forward = _broken(module.forward)
    try:
        yield
    finally:
        for module in modules:
            del module.forward  # the instance's, which hid that of the class


def _broken(forward: Callable[..., Any]) -> Callable[..., Any]:
    def broken(*args: Any, **kwargs: Any) -> Any:
        names, count = tuple(kwargs), len(args)  # a closure over `args` would keep them alive

        def call(*values: Any) -> Any:
            return forward(*values[:count], **dict(zip(names, values[count:], strict=True)))

        return run_eager(call, *args, *kwargs.values())

    return broken

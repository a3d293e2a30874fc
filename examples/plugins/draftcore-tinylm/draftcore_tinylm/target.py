"""The model as a target: a description to train against, and what runs it.

The cache of a layer has the state after each token of a row by its position, as attention's would have
keys and values: the state before a token is that of the slot behind it. So a drafted token that is
refused is overwritten by the next round, and nothing has to be undone.

Shape letters: B rows, T tokens, S cache slots, H width, V vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.target import (
    PrefillRunner,
    TargetCache,
    TargetModel,
    TargetSpec,
)
from draftcore.errors import UsageError
from draftcore.tensors import resolve_device
from draftcore_tinylm.model import TinyConfig, load

WEIGHTS = "model.safetensors"


class TinyTarget:
    """A folder that `make` wrote; the contract says what each method does.

    Raises UsageError for a folder that holds no such model.
    """

    config: Any
    text_config: Any
    settings: Mapping[str, Any]
    source: dict[str, Any]
    revision: str | None = None
    images: Any = None  # it takes text alone
    logit_softcap: float | None = None
    logit_scale, devices, is_multimodal = 1.0, 1, False

    def __init__(self, path: str, dtype: str = "float32", device: str = "auto") -> None:
        self.path, self.folder, self.device = path, Path(path), device
        self.settings, self.source = {}, {}
        self.dtype: torch.dtype = getattr(torch, dtype)
        try:
            self.config = self.text_config = TinyConfig.read(self.folder)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"no target at {path!r}: {error}\n  python -m draftcore_tinylm.make {path}"
            ) from None
        self.num_layers = self.config.num_hidden_layers
        self.vocab_size = self.config.vocab_size
        self.prefill_with: Callable[[TargetModel], PrefillRunner] = lambda model: model
        self._model: TinyModel | None = None

    def load_tokenizer(self) -> Any:
        raise UsageError(
            f"target {self.path!r} has no tokenizer, it knows token ids only\n"
            "  set data.name=token-rows"
        )

    def load_model(self) -> TargetModel:
        self._model = self._model or TinyModel(self)
        return self._model

    def fingerprint(self) -> str:
        files = [(self.folder / name).read_bytes() for name in ("config.json", WEIGHTS)]
        digests = [hashlib.sha256(data).digest() for data in files]
        return hashlib.blake2b(b"".join(digests), digest_size=12).hexdigest()

    def weight_bytes(self) -> int:
        return (self.folder / WEIGHTS).stat().st_size

    def require_layers(self, request: FeatureRequest, here: bool = False) -> None:
        if beyond := [layer for layer in request.layers if not 0 <= layer < self.num_layers]:
            raise UsageError(
                f"target {self.path!r} has layers 0..{self.num_layers - 1}, and {beyond} were asked for\n"
                "  set the algorithm's layers within that range"
            )
        if request.topk > self.vocab_size:
            raise UsageError(
                f"target {self.path!r} has {self.vocab_size} tokens, and the {request.topk} largest logits "
                "were asked for"
            )

    def embedding(self) -> Tensor:
        return self._read("embedding.weight")

    def head(self) -> Tensor:
        return self._read("head.weight")

    def capped(self, logits: Tensor) -> Tensor:
        return logits

    def _read(self, name: str) -> Tensor:
        with safe_open(self.folder / WEIGHTS, framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
        return tensor


class TinyModel:
    """The running target, frozen; the contract says what each method does."""

    def __init__(self, spec: TinyTarget) -> None:
        self.spec: TargetSpec = spec
        self.dtype, self.device = spec.dtype, resolve_device(spec.device)
        self.end_tokens = frozenset(spec.config.end_tokens)
        self.model = load(spec.folder).to(self.device, self.dtype).eval().requires_grad_(False)

    @torch.inference_mode()
    def features(
        self, tokens_BT: Tensor, lengths_B: Tensor, request: FeatureRequest
    ) -> dict[str, Tensor]:
        taken, _ = self.model(tokens_BT.to(self.device))
        if request.topk:  # of equal logits the lower id comes first
            logits_BTV = self.logits(taken["last_hidden"]).float()
            values, ids = logits_BTV.sort(descending=True, stable=True)
            taken |= {"topk_logits": values, "topk_ids": ids}
        return request.select(taken)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.head(hidden)
        return logits

    def allocate(self, batch: int, max_len: int) -> TargetCache:
        size = batch, 1 + max_len, self.spec.config.hidden_size
        return [
            [torch.zeros(size, dtype=self.dtype, device=self.device)] for _ in self.model.layers
        ]

    @torch.inference_mode()
    def forward(
        self, cache: TargetCache, tokens_BT: Tensor, starts_B: Tensor, span: int,
        request: FeatureRequest, seen_BTT: Tensor | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        if seen_BTT is not None:
            raise UsageError(
                f"the algorithm drafts trees, and target {self.spec.path!r} reads one token after the "
                "other\n  choose an algorithm that drafts chains"
            )
        B, T = tokens_BT.shape
        rows = torch.arange(B, device=self.device)
        after_BT = starts_B[:, None] + torch.arange(1, T + 1, device=self.device)
        taken: dict[str, Tensor]
        taken, states = self.model(tokens_BT, [slots[rows, starts_B] for (slots,) in cache])
        for (slots_BSH,), states_BTH in zip(cache, states, strict=True):
            slots_BSH[rows[:, None], after_BT] = states_BTH
        return taken

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Continue prompts greedily, one by one, from a state that is carried from token to token."""
        return [self._continue(prompt, max_new_tokens) for prompt in prompts]

    def _continue(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        new, states, read = list[int](), None, list(prompt)
        while len(new) < max_new_tokens and not (new and new[-1] in self.end_tokens):
            taken, after = self.model(torch.tensor([read], device=self.device), states)
            states = [states_BTH[:, -1] for states_BTH in after]
            read = [int(self.logits(taken["last_hidden"][0, -1]).argmax())]
            new += read
        return new

    @torch.inference_mode()
    def top2_gap(self, tokens: Sequence[int]) -> float:
        wide = copy.deepcopy(self.model).to(torch.float64)
        taken, _ = wide(torch.tensor([list(tokens)], device=self.device))
        best, second = wide.head(taken["last_hidden"][0, -1]).topk(2).values.tolist()
        return float(best - second)

    def check(self) -> None:
        own = self.model.embedding.weight, self.model.head.weight
        for own_VH, stored_VH in zip(own, (self.spec.embedding(), self.spec.head()), strict=True):
            if not stored_VH.to(own_VH).equal(own_VH):
                raise UsageError(f"the weights of {self.spec.path!r} are not what it computes with")

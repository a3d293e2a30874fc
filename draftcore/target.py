"""The target model by transformers: a description to train against, a model to run.

`TransformersTarget` is what algorithms and training see: config, tokenizer and lazily read tensors, so
a trainer on another host never loads the target. `TransformersModel` runs it, for capture and decoding
only. Both implement `contracts.target`. The KV cache is indexed by position, one slot per token of a row,
so a rejected draft token is overwritten by the next round and rows of different lengths need no
padding, cropping or compaction.

Shape letters: B batch, T tokens, S cache slots, H hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.target import PrefillRunner, TargetModel, TargetSpec
from draftcore.errors import DraftcoreError, UsageError
from draftcore.files import write_atomic
from draftcore.tensors import resolve_device
from draftcore.uris import format_size

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
HEADS = ("lm_head.weight", "embed_out.weight")
SAID = 1 << 28  # bytes of a file whose reading takes so long that one is told


class EagerPrefillRunner:
    """Runs every batch of prefill as it comes."""

    def __init__(self, target: TargetModel) -> None:
        self.target = target

    def features(
        self, tokens_BT: Tensor, lengths_B: Tensor, request: FeatureRequest
    ) -> dict[str, Tensor]:
        taken = self.target.features(tokens_BT, lengths_B, request)
        return {name: taken[name].to(getattr(torch, request.dtype)) for name in request.names}


class TransformersTarget:
    """Reads a target's config, tokenizer and tensors when they are first needed.

    Raises UsageError where the folder or model id is unknown or holds no causal language model.
    """

    def __init__(
        self, path: str, revision: str | None = None, dtype: str = "auto", device: str = "auto"
    ) -> None:
        self.path, self.revision, self.device = path, revision, device
        self.prefill_with: Callable[[TargetModel], PrefillRunner] = EagerPrefillRunner
        if not Path(path).is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
            raise UsageError(
                f"no target model at {path!r}: there is no such folder\n"
                "  set target.path to a folder with config.json or to a Hugging Face model id"
            )
        try:
            self.config: Any = AutoConfig.from_pretrained(path, revision=revision)
        except (OSError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise UsageError(
                f"no target model at {path!r}: it is no folder here, and as a Hugging Face id: {reason}\n"
                "  set target.path to a folder with config.json or to a Hugging Face model id"
                if not Path(path).is_dir()
                else f"cannot read the config of the target in {path!r}: {reason}\n"
                "  its config.json must be one that this version of transformers knows"
            ) from None
        name = dtype if dtype != "auto" else str(self.config.dtype or "float32")
        self.dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))

    @property
    def text_config(self) -> Any:
        return self.config.get_text_config()

    @property
    def num_layers(self) -> int:
        return int(self.text_config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        return int(self.text_config.vocab_size)

    def require_layers(self, request: FeatureRequest) -> None:
        beyond = [layer for layer in request.layers if not 0 <= layer < self.num_layers]
        if beyond:
            raise UsageError(
                f"features of layers {beyond} were asked for, target {self.path!r} has layers "
                f"0..{self.num_layers - 1}\n  set the algorithm's layers within that range"
            )

    @functools.cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.path, revision=self.revision)

    @functools.cached_property
    def model(self) -> TargetModel:
        return TransformersModel(self)

    def embedding(self) -> Tensor:
        return self._read(EMBEDDINGS)

    def head(self) -> Tensor:
        tied = bool(self.text_config.tie_word_embeddings)
        return self.embedding() if tied else self._read(HEADS)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of all that is computed with: every weight file, the config, the tokenizer.

        The chat template is the data's: it is kept with a run's summary, and its rows differ.

        Files of a Hub cache are known by their blobs' names, which are SHA-256 digests. Any other
        file is read once, and its digest kept in the user's cache folder while the file is the same.
        """
        fetch = functools.partial(cached_file, self.path, revision=self.revision)
        files = [str(fetch("config.json")), *sorted(set(self._weight_files.values()))]
        told = [file_digest(Path(file)) for file in files]
        told.append(self.tokenizer.backend_tokenizer.to_str())
        return hashlib.blake2b(json.dumps(told).encode(), digest_size=12).hexdigest()

    @property
    def weight_bytes(self) -> int:
        return sum(Path(file).stat().st_size for file in set(self._weight_files.values()))

    def _read(self, endings: Sequence[str]) -> Tensor:
        for name, file in self._weight_files.items():
            if any(name == ending or name.endswith("." + ending) for ending in endings):
                with safe_open(file, framework="pt") as tensors:
                    return tensors.get_tensor(name)  # type: ignore[no-any-return]
        raise DraftcoreError(
            f"target {self.path!r} holds no tensor named {' or '.join(endings)}\n"
            f"  tensors there: {', '.join(list(self._weight_files)[:6])}, ...\n"
            "  draftcore reads the embedding and the head from the model's safetensors files"
        )

    @functools.cached_property
    def _weight_files(self) -> dict[str, str]:
        """Map tensor name to safetensors file."""
        fetch = functools.partial(
            cached_file,
            self.path,
            revision=self.revision,
            _raise_exceptions_for_missing_entries=False,
        )
        index = fetch("model.safetensors.index.json")
        if index is not None:
            names: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
            local = {file: str(fetch(file)) for file in set(names.values())}
            return {name: local[file] for name, file in names.items()}
        single = fetch("model.safetensors")
        if single is None:
            raise DraftcoreError(
                f"target {self.path!r} has no model.safetensors\n"
                "  draftcore reads safetensors only; convert the weights with save_pretrained"
            )
        with safe_open(single, framework="pt") as tensors:
            return dict.fromkeys(tensors.keys(), str(single))


def file_digest(file: Path) -> str:
    """Return a file's SHA-256; one of a large file is kept by its path, size and time of change."""
    real = file.resolve()
    if real.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", real.name):
        return real.name
    status = real.stat()
    identity = f"{real} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
    folder = (
        Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "draftcore" / "digests"
    )
    kept = folder / hashlib.sha256(identity.encode()).hexdigest()
    if kept.exists():
        return kept.read_text()
    if status.st_size > SAID:
        size = format_size(status.st_size)
        print(f"reading {real} once for its digest, {size}", file=sys.stderr, flush=True)
    with real.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if status.st_size > SAID:
        with contextlib.suppress(OSError):  # a home that cannot be written costs time alone
            write_atomic(kept, digest)
    return digest


@dataclass
class SlotState:
    """KV slots of a batch: layer tensors [B, heads, S, D], slot index = position in the row."""

    cache: Cache
    max_len: int

    def tensors(self) -> list[Tensor]:
        return [t for layer in self.cache.layers for t in (layer.keys, layer.values)]

    def narrow(self, rows: int) -> SlotState:
        return SlotState(Cache(layers=[x.narrow(rows) for x in self.cache.layers]), self.max_len)


class TransformersModel:
    """Runs the target, frozen; the contract says what each method does."""

    def __init__(self, spec: TargetSpec) -> None:
        self.spec, self.device, self.dtype = spec, resolve_device(spec.device), spec.dtype
        transformers_logging.disable_progress_bar()  # loading has no place beside our own bar
        try:
            self.model: Any = AutoModelForCausalLM.from_pretrained(
                spec.path, revision=spec.revision, dtype=spec.dtype
            )
        except (OSError, ValueError) as error:
            raise DraftcoreError(f"cannot load target {spec.path!r}: {error}") from None
        self.model.to(self.device).eval().requires_grad_(False)
        self.decoder: nn.Module = self.model.get_decoder()
        self.head: nn.Module = self.model.get_output_embeddings()
        self.layers = _decoder_layers(self.decoder, spec)

    @torch.inference_mode()
    def features(
        self, tokens_BT: Tensor, lengths_B: Tensor, request: FeatureRequest
    ) -> dict[str, Tensor]:
        mask_BT = torch.arange(tokens_BT.shape[1], device=self.device) < lengths_B[:, None]
        with self.tapped(request) as taken:
            output = self.decoder(
                input_ids=tokens_BT, attention_mask=mask_BT.long(), use_cache=False
            )
        return {**taken, "last_hidden": output.last_hidden_state}

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)  # type: ignore[no-any-return]

    def allocate(self, batch: int, max_len: int) -> SlotState:
        layers = [_SlotLayer(batch, max_len) for _ in self.layers]
        return SlotState(Cache(layers=layers), max_len)

    @torch.inference_mode()
    def forward(
        self,
        state: SlotState,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        span: int,
        request: FeatureRequest,
    ) -> dict[str, Tensor]:
        for layer in state.cache.layers:
            layer.place(positions_BT, span)
        with self.tapped(request) as taken:
            output = self.decoder(
                input_ids=tokens_BT,
                position_ids=positions_BT,
                attention_mask=self.masks(positions_BT, span),
                past_key_values=state.cache,
                use_cache=True,
            )
        return {**taken, "last_hidden": output.last_hidden_state}

    def select(self, state: SlotState, rows_B: Tensor) -> SlotState:
        for layer in state.cache.layers:
            layer.select(rows_B)
        return state

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        tokens_BT = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask_BT = torch.zeros_like(tokens_BT)
        for row, prompt in enumerate(prompts):
            tokens_BT[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask_BT[row, longest - len(prompt) :] = 1
        output = self.model.generate(
            input_ids=tokens_BT.to(self.device),
            attention_mask=mask_BT.to(self.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            temperature=None,
            top_k=None,
            top_p=None,
            pad_token_id=next(iter(self.end_tokens), 0),
        )
        return [_cut(row, self.end_tokens) for row in output[:, longest:].tolist()]

    @torch.inference_mode()
    def top2_gap(self, tokens: Sequence[int]) -> float:
        tokens_1T = torch.tensor([list(tokens)], device=self.device)
        best, second = self._wider(input_ids=tokens_1T).logits[0, -1].topk(2).values.tolist()
        return float(best - second)

    @functools.cached_property
    def _wider(self) -> Any:
        """A copy in fp64 (of an fp32 model) or fp32, made at the first tie that has to be judged."""
        dtype = torch.float64 if self.dtype == torch.float32 else torch.float32
        return copy.deepcopy(self.model).to(dtype)

    @functools.cached_property
    def end_tokens(self) -> frozenset[int]:
        end = self.model.generation_config.eos_token_id
        return frozenset() if end is None else frozenset([end] if isinstance(end, int) else end)

    @torch.inference_mode()
    def check(self, request: FeatureRequest, prompt: Sequence[int]) -> None:
        """Raise unless last hidden x head gives the model's own log-probabilities on a prompt.

        A model that caps or scales its logits fails here: a draft trained on hidden states times
        the head would learn another distribution than the server samples from.
        """
        tokens_BT = torch.tensor([list(prompt)], device=self.device)
        lengths_B = torch.tensor([len(prompt)], device=self.device)
        hidden_TH = self.features(tokens_BT, lengths_B, request)["last_hidden"][0]
        ours = torch.log_softmax(self.logits(hidden_TH).double(), -1)
        theirs = torch.log_softmax(self.model(input_ids=tokens_BT).logits[0].double(), -1)
        gap = float((ours - theirs).abs().max())
        bound = 1e-3 if self.dtype == torch.float32 else 0.1
        if not gap <= bound:
            raise UsageError(
                f"the last hidden state times the head of {self.spec.path!r} is not the model's own\n"
                f"  prediction: log-probabilities differ by {gap:.3g} (bound {bound:.3g})\n"
                "  models that scale or cap their logits are not supported as targets"
            )

    @contextmanager
    def tapped(self, request: FeatureRequest) -> Iterator[dict[str, Tensor]]:
        taken: dict[str, Tensor] = {}

        def take(name: str, _: nn.Module, __: Any, output: Any) -> None:
            taken[name] = output[0] if isinstance(output, tuple) else output

        hooks = [
            self.layers[layer].register_forward_hook(functools.partial(take, f"hidden.{layer}"))
            for layer in request.layers
        ]
        try:
            yield taken
        finally:
            for hook in hooks:
                hook.remove()

    def masks(self, positions_BT: Tensor, span: int) -> Tensor | dict[str, Tensor]:
        slots_S = torch.arange(span, device=positions_BT.device)
        seen = slots_S <= positions_BT[..., None]
        config = self.spec.text_config
        kinds = set(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None)
        full = self._additive(seen)
        if window is None or kinds == {"full_attention"}:
            return full
        near = self._additive(seen & (slots_S > positions_BT[..., None] - window))
        return {"full_attention": full, "sliding_attention": near} if kinds else near

    def _additive(self, seen_BTS: Tensor) -> Tensor:
        mask = torch.zeros(seen_BTS.shape, dtype=self.dtype, device=seen_BTS.device)
        return mask.masked_fill_(~seen_BTS, torch.finfo(self.dtype).min)[:, None]


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values, written at given positions of each row."""

    def __init__(self, batch: int, max_len: int) -> None:
        super().__init__()
        self.batch, self.max_len, self.span = batch, max_len, 0
        self.keys: Tensor
        self.values: Tensor
        self.rows_B1: Tensor
        self.positions_BT: Tensor

    def place(self, positions_BT: Tensor, span: int) -> None:
        """Say where the next update goes."""
        self.positions_BT, self.span = positions_BT, span
        self.rows_B1 = torch.arange(self.batch, device=positions_BT.device)[:, None]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate [B, S, heads, D], so that a position's heads are written in one piece."""
        for name, like in (("keys", key_states), ("values", value_states)):
            shape = (self.batch, self.max_len, like.shape[1], like.shape[3])
            setattr(self, name, torch.zeros(shape, dtype=like.dtype, device=like.device))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys[self.rows_B1, self.positions_BT] = key_states.transpose(1, 2)
        self.values[self.rows_B1, self.positions_BT] = value_states.transpose(1, 2)
        return self.keys[:, : self.span].transpose(1, 2), self.values[:, : self.span].transpose(
            1, 2
        )

    def select(self, rows_B: Tensor) -> None:
        self.batch = len(rows_B)
        self.keys, self.values = self.keys[rows_B], self.values[rows_B]

    def narrow(self, rows: int) -> _SlotLayer:
        layer = _SlotLayer(rows, self.max_len)
        layer.keys, layer.values = self.keys[:rows], self.values[:rows]
        layer.is_initialized = True
        return layer

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.span, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.max_len

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` before transformers 5.2x."""
        return self.max_len


def _decoder_layers(decoder: nn.Module, spec: TargetSpec) -> nn.ModuleList:
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == spec.num_layers:
            return module
    raise DraftcoreError(
        f"target {spec.path!r}: found no list of {spec.num_layers} decoder layers in "
        f"{type(decoder).__name__}\n  draftcore captures from decoder-only transformers models"
    )


def _cut(tokens: list[int], end: frozenset[int]) -> list[int]:
    for position, token in enumerate(tokens):
        if token in end:
            return tokens[: position + 1]
    return tokens

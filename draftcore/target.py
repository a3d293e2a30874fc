"""The target model by transformers: a description to train against, a model to run.

`TransformersTarget` is what algorithms and training see: config, tokenizer and lazily read tensors, so
a trainer on another host never loads the target. `TransformersModel` runs it, for capture and decoding
only. Both implement `contracts.target`. `SharedModel` runs one that no single device holds, for capture
alone. The KV cache is indexed by position, one slot per token of a row,
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
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, cast

import torch.multiprocessing
from safetensors import safe_open
from torch import Tensor, nn
from torch import distributed as dist
from transformers import AutoConfig, AutoTokenizer, cache_utils
from transformers.models.auto import modeling_auto
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.target import (
    ImageProcessor,
    PrefillRunner,
    TargetCache,
    TargetModel,
    TargetSpec,
)
from draftcore.errors import DraftcoreError, UsageError
from draftcore.files import write_atomic
from draftcore.tensors import resolve_device
from draftcore.uris import format_size

EMBEDDINGS = ["embed_tokens", "wte", "embed_in", "word_embeddings", "embeddings"]
HEADS = ["lm_head", "embed_out", "head"]
# What transformers keeps of the tokens it has read, by layer, that decoding here can take back.
KEPT = ["Dynamic", "DynamicSlidingWindow", "DynamicIndexed", "Dummy", "LinearAttention"]
KEPT += ["LinearAttentionAndFullAttention"]
GREEDY = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
SHA_256 = "[0-9a-f]{64}"
SAID = 1 << 28  # bytes of a file whose reading takes so long that one is told
LOGITS = 1 << 24  # that are held at a time; each takes some 20 bytes until the largest are found


class TransformersTarget:
    """Reads a target's config, and its tokenizer and tensors when they are first needed.

    Raises UsageError where the folder or model id is unknown or holds no causal language model.
    """

    def __init__(
        self, path: str, revision: str | None = None, dtype: str = "auto", device: str = "auto",
        trust_remote_code: bool = False, tensor_parallel: int = 1,
        prefill_with: Callable[[TargetModel], PrefillRunner] = lambda model: model,
        open_images: Callable[[TargetSpec], ImageProcessor] | None = None,
    ) -> None:  # fmt: skip
        self.path, self.revision, self.device = path, revision, device
        self.tensor_parallel = tensor_parallel
        # Never None, with which transformers asks standard input.
        self.source = {"revision": revision, "trust_remote_code": trust_remote_code}
        self.prefill_with = prefill_with
        with read_target(path, "config"):
            self.config: Any = AutoConfig.from_pretrained(path, **self.source)
            self.text_config: Any = self.config.get_text_config()
            self.sees = type(self.config) in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
            self.num_layers = int(self.text_config.num_hidden_layers)
            self.vocab_size = int(self.text_config.vocab_size)
            self.logit_scale = logit_scale(self.text_config)
            cap = getattr(self.text_config, "final_logit_softcapping", None)
            self.logit_softcap = float(cap) if cap else None
            if min(self.num_layers, self.vocab_size, int(self.text_config.hidden_size)) < 1:
                raise ValueError("its layers, tokens or width are below 1")
            said = self.config.dtype or self.text_config.dtype or "float32"
            name = dtype if dtype != "auto" else str(said)
            self.dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
        self.images = open_images(self) if open_images and self.sees else None

    def require_layers(self, request: FeatureRequest) -> None:
        beyond = [layer for layer in request.layers if not 0 <= layer < self.num_layers]
        if beyond:
            raise UsageError(
                f"features of layers {beyond} were asked for, target {self.path!r} has layers "
                f"0..{self.num_layers - 1}\n  set the algorithm's layers within that range"
            )
        if request.topk > self.vocab_size:
            raise UsageError(
                f"the {request.topk} largest logits were asked for, target {self.path!r} has "
                f"{self.vocab_size} tokens"
            )

    @functools.cached_property
    def tokenizer(self) -> Any:
        with read_target(self.path, "tokenizer"):
            found = AutoTokenizer.from_pretrained(self.path, **self.source)
            found("a")  # some of what it was given is first read here
            return found

    @functools.cached_property
    def model(self) -> TargetModel:
        shared = self.tensor_parallel > 1
        return cast(TargetModel, SharedModel(self)) if shared else TransformersModel(self)

    def embedding(self) -> Tensor:
        return self._read(EMBEDDINGS + HEADS)

    def head(self) -> Tensor:
        # Whatever the configs say of `tie_word_embeddings`, transformers ties the two where the files
        # hold one of them; where they hold both, these are equal, or are not tied.
        return self._read(HEADS + EMBEDDINGS)

    def capped(self, logits: Tensor) -> Tensor:
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        if cap := self.logit_softcap:
            logits = cap * torch.tanh(logits / cap)
        return logits

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of all that is computed with: every weight file, the config, the tokenizer.

        The chat template is the data's: it is kept with a run's summary, and its rows differ.

        Files of a Hub cache are known by their blobs' names, which are SHA-256 digests. Any other
        file is read once, and its digest kept in the user's cache folder while the file is the same.
        """
        files = [str(fetch(self, "config.json")), *sorted(set(self._weight_files.values()))]
        told = [file_digest(Path(file)) for file in files]
        told.append(self.tokenizer.backend_tokenizer.to_str())
        return hashlib.blake2b(json.dumps(told).encode(), digest_size=12).hexdigest()

    @functools.cached_property
    def weight_bytes(self) -> int:
        return sum(Path(file).stat().st_size for file in set(self._weight_files.values()))

    def _read(self, modules: Sequence[str]) -> Tensor:
        """Read the weight of the first of these; of several, the outermost: MTP layers have their own."""
        for module in modules:
            ending = f".{module}.weight"
            named = [name for name in self._weight_files if f".{name}".endswith(ending)]
            for name in sorted(named, key=lambda name: name.count("."))[:1]:
                file = self._weight_files[name]
                with read_target(self.path, file), safe_open(file, framework="pt") as tensors:
                    return self._of_vocabulary(name, tensors.get_tensor(name))
        raise DraftcoreError(
            f"target {self.path!r} holds no weight of {' or '.join(modules)}\n"
            f"  tensors there: {', '.join(list(self._weight_files)[:6])}, ...\n"
            "  draftcore reads the embedding and the head from the model's safetensors files"
        )

    def _of_vocabulary(self, name: str, tensor: Tensor) -> Tensor:
        wanted = self.vocab_size, int(self.text_config.hidden_size)
        if tensor.shape != wanted:
            raise ValueError(f"{name} has the shape {(*tensor.shape,)}, config.json says {wanted}")
        return tensor

    @functools.cached_property
    def _weight_files(self) -> dict[str, str]:
        """Map tensor name to safetensors file."""
        with read_target(self.path, "weights"):
            if index := fetch(self, "model.safetensors.index.json"):
                names: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
                local = {file: str(fetch(self, file)) for file in set(names.values())}
                return {name: local[file] for name, file in names.items()}
            if single := fetch(self, "model.safetensors"):
                with safe_open(single, framework="pt") as tensors:
                    return dict.fromkeys(tensors.keys(), single)
        raise DraftcoreError(
            f"target {self.path!r} has no model.safetensors\n"
            "  draftcore reads safetensors only; convert the weights with save_pretrained"
        )


def logit_scale(text: Any) -> float:
    """Return what a config multiplies logits by; the name that Granite divides by, others multiply by."""
    for name in ("logit_scale", "lm_head_multiplier", "logits_scaling"):
        if value := getattr(text, name, None):
            divides = name == "logits_scaling" and text.model_type.startswith("granite")
            return 1 / value if divides else float(value)
    return 1.0


def fetch(target: TargetSpec, file: str) -> str | None:
    """Return where a file of a target lies here, downloaded if it has to be; None if it has none."""
    return cached_file(  # type: ignore[no-any-return]
        target.path, file, revision=target.revision, _raise_exceptions_for_missing_entries=False
    )


@contextlib.contextmanager
def read_target(path: str, what: str) -> Iterator[None]:
    """Turn whatever a library raises over a target's files into a UsageError that says what to do."""
    try:
        yield
    except DraftcoreError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise UsageError(
                f"the {what} of {path!r} needs Python code that comes with the model\n"
                "  set target.trust_remote_code=true to run it here, or target.path to a model that this "
                "version of transformers has the code of"
            ) from None
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UsageError(
            f"no target model at {path!r}: its {what} cannot be read: {reason}\n"
            "  set target.path to a folder, or a Hugging Face model id, of a language model that this "
            "version of transformers knows; what is damaged has to be downloaded again"
            + "\n  or install what is named there, or take the model before it was quantised"
            * ("quantised" in what)
            + "\n  or leave out target.tensor_parallel" * ("shared" in what)
        ) from error


def file_digest(file: Path) -> str:
    """Return a file's SHA-256; one of a large file is kept by its path, size and time of change."""
    real = file.resolve()
    if real.parent.name == "blobs" and re.fullmatch(SHA_256, real.name):
        return real.name
    status = real.stat()
    identity = f"{real} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    kept = cache / "draftcore" / "digests" / hashlib.sha256(identity.encode()).hexdigest()
    if kept.exists() and re.fullmatch(SHA_256, text := kept.read_text(errors="replace")):
        return text
    if large := status.st_size > SAID:
        size = format_size(status.st_size)
        print(f"reading {real} once for its digest, {size}", file=sys.stderr, flush=True)
    with real.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if large:
        with contextlib.suppress(OSError):  # a home that cannot be written costs time alone
            write_atomic(kept, digest)
    return digest


class TransformersModel:
    """Runs the target, frozen; the contract says what each method does."""

    def __init__(self, spec: TargetSpec, parts: int = 1) -> None:
        self.spec, self.device, self.dtype = spec, resolve_device(spec.device), spec.dtype
        transformers_logging.disable_progress_bar()  # loading has no place beside our own bar
        how = getattr(spec.config, "quantization_config", None) or {}
        what = f"weights, quantised by {how.get('quant_method')}," if how else "weights"
        shared, text = {"tp_size": parts} if parts > 1 else None, spec.text_config
        with read_target(spec.path, f"weights, shared by {parts} devices," if shared else what):
            self.model: Any
            name = "AutoModelForImageTextToText" if spec.sees else "AutoModelForCausalLM"
            if (heads := getattr(text, "num_key_value_heads", 0) or 0) % parts:
                raise ValueError(f"it has {heads} heads of keys, no multiple of {parts}")
            self.model, found = getattr(modeling_auto, name).from_pretrained(
                spec.path, dtype=spec.dtype, output_loading_info=True, distributed_config=shared,
                **spec.source,
            )  # fmt: skip
            split = [n for n, p in self.model.named_parameters() if hasattr(p, "placements")]
            if shared and not any("layers." in name for name in split):
                raise ValueError(f"{type(self.model).__name__} has no tp_plan for its layers")
            if lacking := sorted(found["missing_keys"]):  # transformers makes random ones
                raise ValueError(
                    f"they lack {', '.join(lacking[:4])}, which config.json says are there"
                )
            kept = getattr(self.model.config, "quantization_config", None)
            if kept and not getattr(self.model, "hf_quantizer", None):
                raise ValueError("transformers knows no such quantisation")
        with read_target(spec.path, "generation_config.json"):
            if file := fetch(spec, "generation_config.json"):
                json.loads(Path(file).read_text())  # transformers takes one that is torn for none
            end = self.model.generation_config.eos_token_id
            self.end_tokens = frozenset(end if isinstance(end, list) else {end} - {None})
        self.model.to(self.device).eval().requires_grad_(False)
        within = self.model.get_decoder()  # which of some models has the head, or wraps a decoder
        stacks = [
            (decoder, layers)
            for decoder in within.modules()
            for layers in decoder.children()
            if isinstance(layers, nn.ModuleList) and len(layers) == spec.num_layers
        ]
        if not stacks:
            raise DraftcoreError(
                f"target {spec.path!r}: found no list of {spec.num_layers} decoder layers in "
                f"{type(within).__name__}\n"
                "  draftcore captures from decoder-only transformers models"
            )
        self.decoder, self.layers = stacks[0]

    @torch.inference_mode()
    def features(
        self, tokens_BT: Tensor, lengths_B: Tensor, request: FeatureRequest
    ) -> dict[str, Tensor]:
        # Rows are padded on the right and attention is causal, so no token sees padding. A mask would
        # say so again, and attention with one takes 7 times as long (docs/performance.md, 2026-11-23).
        taken = self.run(request, input_ids=tokens_BT.to(self.device), use_cache=False)
        return request.select(taken)

    @torch.inference_mode()
    def see(self, inputs: Any, request: FeatureRequest) -> dict[str, Tensor]:
        whole, given = self.model.base_model, inputs.to(self.device, self.dtype)
        taken = self.run(request, whole, **given, use_cache=False)
        if hasattr(whole, "rope_deltas"):
            whole.rope_deltas = None  # else it goes on from here when it generates
        return request.select(taken)

    @torch.inference_mode()
    def run(self, request: FeatureRequest, model: Any = None, **inputs: Any) -> dict[str, Tensor]:
        """Run the decoder, or a model around it, and take what the request names."""
        taken: dict[str, Any] = {}

        def take(name: str, _: nn.Module, __: Any, output: Any) -> None:
            taken[name] = output[0] if isinstance(output, tuple) else output

        def given(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            taken[name] = args[0] if args else kwargs["hidden_states"]

        with contextlib.ExitStack() as hooks:
            for layer in request.layers:
                hook = functools.partial(take, f"hidden.{layer}")
                hooks.enter_context(self.layers[layer].register_forward_hook(hook))
            read = [("embeddings", 0)] * request.embeddings  # with what is done to them before
            if model is not None:  # which need not end with the decoder
                end = functools.partial(take, "last_hidden")
                hooks.enter_context(self.decoder.register_forward_hook(end))
                # What some models see is added between layers, too (Qwen3-VL's deep stack): servers
                # capture what the next layer is given, and so does this.
                read += [(f"hidden.{k}", k + 1) for k in request.layers if k + 1 < len(self.layers)]
            for name, layer in read:
                hook = functools.partial(given, name)
                hooks.enter_context(
                    self.layers[layer].register_forward_pre_hook(hook, with_kwargs=True)
                )
            output = (model or self.decoder)(**inputs)
        taken["last_hidden"] = taken.get("last_hidden", output).last_hidden_state
        if request.topk:
            taken |= self._largest(taken["last_hidden"], request.topk)
        return taken

    def _largest(self, hidden_BTH: Tensor, k: int) -> dict[str, Tensor]:
        """Return the k largest logits and their ids, of a slice of the tokens at a time."""
        rows = max(1, LOGITS // self.spec.vocab_size)
        slices = torch.split(hidden_BTH.flatten(0, -2), rows)
        found = [largest_logits(self.logits(part_RH), k) for part_RH in slices]
        logits_RK, ids_RK = (torch.cat(parts) for parts in zip(*found, strict=True))
        shape = (*hidden_BTH.shape[:-1], k)
        return {"topk_logits": logits_RK.view(shape), "topk_ids": ids_RK.view(shape)}

    def logits(self, hidden: Tensor) -> Tensor:
        return self.spec.capped(self.model.get_output_embeddings()(hidden))

    def allocate(self, batch: int, max_len: int) -> TargetCache:
        cache = []
        for layer in self._blank:
            slots = [x.new_zeros(batch, max_len, *x[0, :, 0].shape) for x in slots_of(layer)]
            cache.append(slots + [x.new_zeros(batch, *x.shape[1:]) for x in states_of(layer)])
        if any(map(states_of, self._blank)):  # tokens by slot, and how many the states have read
            read_BS = torch.zeros(batch, max_len, dtype=torch.long, device=self.device)
            cache.append([read_BS, torch.zeros_like(read_BS[:, 0])])
        return cache

    @functools.cached_property
    @torch.inference_mode()
    def _blank(self) -> list[Any]:
        """What transformers keeps of a single token, by layer: only a model knows its kinds and shapes."""
        token_1T = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        output = self.decoder(input_ids=token_1T, use_cache=True)
        layers: list[Any] = getattr(getattr(output, "past_key_values", None), "layers", [output])
        kept = [getattr(cache_utils, f"{kind}Layer", None) for kind in KEPT]  # some are new
        unread = {x for x in layers if isinstance(x, cache_utils.DynamicLayer) and x.keys is None}
        strange = [x for x in layers if type(x) not in kept or x in unread]
        # The first kind of Mamba begins anew where it reads several tokens; ALiBi takes no such masks.
        strange += [x for x in self.decoder.modules() if hasattr(x, "use_mambapy")]
        strange += [self.decoder] * ("alibi_tensor" in " ".join(dir(self.decoder)))
        if strange:
            raise UsageError(
                f"draftcore cannot decode with target {self.spec.path!r}: it has "
                f"{type(strange[0]).__name__}, which does not read on from tokens that were taken back\n"
                "  train, export, and measure the acceptance length on your server"
            )
        return layers

    @torch.inference_mode()
    def forward(
        self,
        cache: TargetCache,
        tokens_BT: Tensor,
        starts_B: Tensor,
        span: int,
        request: FeatureRequest,
        seen_BTT: Tensor | None = None,
    ) -> dict[str, Tensor]:
        if len(cache) > len(self._blank):
            if seen_BTT is not None:
                raise UsageError(
                    f"the algorithm drafts trees, and target {self.spec.path!r} has recurrent layers, "
                    "which read one token after the other\n  choose an algorithm that drafts chains"
                )
            cache = self._catch_up(cache, tokens_BT, starts_B)
        B, T = tokens_BT.shape
        slots_BT = positions_BT = starts_B[:, None] + torch.arange(T, device=self.device)
        if seen_BTT is not None:
            positions_BT = starts_B[:, None] + seen_BTT.sum(-1) - 1
        at = torch.arange(B, device=self.device)[:, None], slots_BT
        held = zip(self._blank, cache, strict=True)
        layers = [layer_of(blank, tensors, at, span) for blank, tensors in held]
        return self.run(
            request,
            input_ids=tokens_BT,
            position_ids=positions_BT,
            attention_mask=self.masks(positions_BT, span, seen_BTT),
            past_key_values=cache_utils.Cache(layers=layers),
            use_cache=True,
        )

    def _catch_up(self, cache: TargetCache, tokens_BT: Tensor, starts_B: Tensor) -> TargetCache:
        """Let the states read the tokens before `starts_B`, and return a copy to read the next with.

        Which of those are accepted is not known yet, so what comes of them is dropped, and they are
        read a second time when it is. Rows with equally many new tokens are read together.
        """
        *layers, (read_BS, held_B) = cache
        new_B, request = starts_B - held_B, FeatureRequest((), True, "float32")
        for count in set(new_B.tolist()) - {0}:
            rows_R = (new_B == count).nonzero()[:, 0]
            slots_RT = held_B[rows_R, None] + torch.arange(count, device=self.device)
            part = [[x[rows_R] for x in layer] for layer in layers]
            tokens_RT, span = read_BS[rows_R[:, None], slots_RT], int(slots_RT.max()) + 1
            self.forward(part, tokens_RT, held_B[rows_R], span, request)
            for layer, new in zip(layers, part, strict=True):
                for x, value in zip(layer, new, strict=True):
                    x[rows_R] = value
        held_B.copy_(starts_B)
        slots_BT = starts_B[:, None] + torch.arange(tokens_BT.shape[1], device=self.device)
        read_BS.scatter_(1, slots_BT, tokens_BT)
        return [[x.clone() for x in layer] for layer in layers]

    def masks(
        self, positions_BT: Tensor, span: int, seen_BTT: Tensor | None = None
    ) -> Tensor | dict[str, Tensor | None]:
        slots_S = torch.arange(span, device=positions_BT.device)
        held, seen_BTS = slots_S, slots_S <= positions_BT[..., None]  # held: the slots' positions
        if seen_BTT is not None:
            B, T = positions_BT.shape
            slots_BT = positions_BT[:, :1] + slots_S[:T]
            held = slots_S.repeat(B, 1).scatter(1, slots_BT, positions_BT)[:, None]
            past_BTS = (slots_S < positions_BT[:, :1, None]).repeat(1, T, 1)
            seen_BTS = past_BTS.scatter(2, slots_BT[:, None].expand(-1, T, -1), seen_BTT)
        config = self.spec.text_config
        kinds = set(getattr(config, "layer_types", None) or ())
        window: Any = getattr(config, "sliding_window", None)
        chunk = getattr(config, "attention_chunk_size", None)
        full, at_BT1 = self._additive(seen_BTS), positions_BT[..., None]
        if not (window or chunk) or kinds == {"full_attention"}:
            return full
        first_BT1 = at_BT1 - at_BT1 % chunk if chunk else at_BT1 - window + 1
        near = self._additive(seen_BTS & (held >= first_BT1))
        if not kinds:
            return near
        return dict.fromkeys(kinds) | {
            "full_attention": full, "sliding_attention": near, "chunked_attention": near
        }  # fmt: skip

    def _additive(self, seen_BTS: Tensor) -> Tensor:
        mask = torch.zeros(seen_BTS.shape, dtype=self.dtype, device=seen_BTS.device)
        return mask.masked_fill_(~seen_BTS, torch.finfo(self.dtype).min)[:, None]

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        pad = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
        tokens_BT = pad([torch.tensor(prompt) for prompt in prompts]).to(self.device)
        output = self.model.generate(
            input_ids=tokens_BT,
            attention_mask=pad([torch.ones(len(p)) for p in prompts]).long().to(self.device),
            max_new_tokens=max_new_tokens,
            **GREEDY,
            pad_token_id=next(iter(self.end_tokens), 0),
        )
        new = output[:, tokens_BT.shape[1] :].tolist()
        return [cut_after(row, self.end_tokens) for row in new]

    @torch.inference_mode()
    def top2_gap(self, tokens: Sequence[int]) -> float:
        tokens_1T = torch.tensor([list(tokens)], device=self.device)
        best, second = self._wider(input_ids=tokens_1T).logits[0, -1].topk(2).values.tolist()
        return float(best - second)

    @functools.cached_property
    def _wider(self) -> Any:
        """A copy in fp64 (of an fp32 model) or fp32, made at the first tie that has to be judged."""
        dtype = torch.float64 if self.dtype == torch.float32 else torch.float32
        wider = copy.deepcopy(self.model).to(dtype)
        wider.set_experts_implementation("eager")  # others know no fp64
        return wider

    @torch.inference_mode()
    def check(self) -> None:
        """Raise unless embedding and head, as algorithms are given them, are what the model computes with.

        The last hidden state x the head, scaled and capped, gives the model's own log-probabilities: else
        a draft would learn another distribution than the server samples from.
        """
        spec, tokens_1T = self.spec, torch.arange(10, 42, device=self.device)[None]
        tokens_1T %= spec.vocab_size
        request = FeatureRequest((0,), True, str(self.dtype).removeprefix("torch."))
        layer_THs, hidden_TH = (x[0] for x in self.run(request, input_ids=tokens_1T).values())
        if layer_THs.shape != hidden_TH.shape:
            raise UsageError(
                f"a layer of {spec.path!r} gives states of shape {(*layer_THs.shape,)}, its norm of "
                f"{(*hidden_TH.shape,)}\n  drafts are trained on states that are alike in all layers: "
                "set target.path to another model"
            )
        head_VH, embedding_VH = (x.to(hidden_TH) for x in (spec.head(), spec.embedding()))
        ours = torch.log_softmax(spec.capped(hidden_TH @ head_VH.T).double(), -1)
        theirs = torch.log_softmax(self.model(input_ids=tokens_1T).logits[0].double(), -1)
        gap = float((ours - theirs).abs().max())
        bound = 1e-3 if self.dtype == torch.float32 else 0.1
        if not gap <= bound:
            raise UsageError(
                f"the last hidden state times the head of {spec.path!r} is not the model's own\n"
                f"  prediction: log-probabilities differ by {gap:.3g} (bound {bound:.3g})\n"
                f"  {type(self.model).__name__} computes its logits in a way that draftcore does not know:\n"
                "  set target.path to another model"
            )
        own_VH = self.model.get_input_embeddings().weight
        if hasattr(own_VH, "full_tensor"):  # each part of the model has some tokens'
            own_VH = own_VH.full_tensor()
        if not torch.equal(own_VH, embedding_VH):
            raise UsageError(
                f"the embedding in the files of {spec.path!r} is not what {type(self.model).__name__} "
                "computes with\n  save the model again with save_pretrained"
            )


class SharedModel:
    """The target on several devices, a process for each, by transformers' own plan: for capture alone.

    None of them is this process: one that dies while others wait for it would take a trainer along, and
    torch.distributed's default group is that of the ranks. Their end is RuntimeError: no batch is at
    fault, and only a process begun anew has the target again.
    """

    def __init__(self, spec: TransformersTarget) -> None:
        self.spec, self.dtype = spec, spec.dtype
        self.device = torch.device("cpu")  # where it is given tokens

    def __getattr__(self, name: str) -> Any:
        if name in ("features", "see", "check"):
            return functools.partial(self._all, self.parts, on_part, name)
        raise UsageError(
            f"{self.spec.tensor_parallel} devices share target {self.spec.path!r}, to capture and no more: "
            f"{name!r} needs it on one\n  set target.tensor_parallel=1 to decode, or for graphs"
        )

    @functools.cached_property
    def parts(self) -> dict[int, ProcessPoolExecutor]:
        """The processes by their ids, each with its part of the target."""
        spec, spawn = self.spec, torch.multiprocessing.get_context("spawn")
        pools = [ProcessPoolExecutor(1, spawn) for _ in range(spec.tensor_parallel)]
        parts = {pool.submit(os.getpid).result(): pool for pool in pools}
        self.memory = os.memfd_create("draftcore-parts")  # where they meet, and nobody else can
        meeting, device = f"/proc/{os.getpid()}/fd/{self.memory}", resolve_device(spec.device)
        given = {"path": spec.path, "dtype": str(spec.dtype), **spec.source}
        self._all(parts, load_part, len(parts), meeting, device, given)
        return parts

    def _all(self, parts: Mapping[int, ProcessPoolExecutor], work: Any, *given: Any) -> Any:
        """Let all parts work; returns the tensors that the first of them does."""
        try:
            asked = [pool.submit(work, part, *given) for part, pool in enumerate(parts.values())]
            wait(asked, return_when=FIRST_EXCEPTION)
            found, *_ = [one.result() or {} for one in asked if one.done()]
            # A copy: what was handed over is the part's memory, and goes when it goes.
            return {name: value.clone() for name, value in found.items()}
        except BaseException as error:
            for pid in parts:  # who is left may wait for who is gone
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not isinstance(error, RuntimeError):
                raise
            what = f"target {self.spec.path!r}, which {len(parts)} devices share, has ended"
            raise RuntimeError(f"{what}: {error}") from None


PARTS = list[TransformersModel]()  # in a process of SharedModel: the part that it holds


def load_part(
    part: int, count: int, meeting: str, device: torch.device, given: dict[str, Any]
) -> None:
    """Load what one of `count` devices holds of a target, where the others load theirs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the run decides on it
    parent: Any = multiprocessing.parent_process()  # which may be killed
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    place = (device.index or 0) + part
    os.environ |= {"RANK": f"{part}", "WORLD_SIZE": f"{count}", "LOCAL_RANK": f"{place}"}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if cuda := device.type == "cuda":
        torch.cuda.set_device(device := resolve_device(f"cuda:{place}"))
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # which transformers would take
    store = dist.FileStore(meeting, count)  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=part, world_size=count)
    PARTS.append(TransformersModel(TransformersTarget(**given, device=str(device)), count))


def on_part(part: int, method: str, *given: Any) -> Any:
    """Call a method of this process's part; what it returns the first one passes on."""
    found = getattr(PARTS[0], method)(*given)
    return None if part else found


def slots_of(layer: Any) -> list[Tensor]:
    """Return what one of transformers' cache layers keeps by token: [B, heads, S, D] each."""
    found = getattr(layer, "indexer_keys", None)  # of sparse attention; one head
    kept = [getattr(layer, "keys", None), getattr(layer, "values", None)]
    return [x for x in (*kept, found if found is None else found[:, None]) if x is not None]


def states_of(layer: Any) -> list[Tensor]:
    """Return what it keeps of all tokens together, and changes with each: [B, ...] each."""
    kinds = getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})
    return [x for states in kinds for x in states.values() if x is not None]


def layer_of(blank: Any, tensors: Sequence[Tensor], at: tuple[Tensor, Tensor], span: int) -> Any:
    """Return a cache layer like `blank` that reads and writes these slots and states."""
    by_token = len(slots_of(blank))
    slots, states = _Slots(tensors[:by_token], at, span), iter(tensors[by_token:])
    if not states_of(blank):
        return slots
    layer = copy.copy(blank)
    if by_token:
        layer.update = slots.update
    for name in ("conv_states", "recurrent_states"):
        held = getattr(blank, name).items()
        setattr(layer, name, {i: None if x is None else next(states) for i, x in held})
    return layer


class _Slots(cache_utils.DynamicLayer):  # type: ignore[misc]
    """One layer's slots in one forward: written `at` rows and positions, read up to `span`."""

    def __init__(self, slots: Sequence[Tensor], at: tuple[Tensor, Tensor], span: int) -> None:
        super().__init__()
        self.slots, self.at, self.span = slots, at, span

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        for slots, states in zip(self.slots, (key_states, value_states), strict=False):
            slots[self.at] = states.transpose(1, 2)
        return tuple(slots[:, : self.span].transpose(1, 2) for slots in self.slots[:2])

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        self.slots[2][self.at] = indexer_key_states[:, :, None]
        return self.slots[2][:, : self.span, 0]


def largest_logits(logits_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest logits in fp32, descending, and their ids; the lower of equal ones first.

    `topk` leaves open which of equal logits it takes, and in bfloat16 many are. So a logit and its
    id become one integer: the logit's bits, ordered as its value is, over the id.
    """

    def ordered(bits: Tensor) -> Tensor:  # and back
        return bits ^ (bits >> 31 & 0x7FFFFFFF)

    keys_RV = ordered(logits_RV.float().view(torch.int32)).long().bitwise_left_shift_(32)
    keys_RV -= torch.arange(logits_RV.shape[1], device=logits_RV.device)
    keys_RK = keys_RV.topk(k).values
    ids_RK = -keys_RK & 0xFFFFFFFF
    return ordered((keys_RK + ids_RK >> 32).int()).view(torch.float32), ids_RK.int()


def cut_after(tokens: list[int], end: Collection[int]) -> list[int]:
    """Return tokens up to the first end token, that one included."""
    at = next((i for i, token in enumerate(tokens) if token in end), len(tokens))
    return tokens[: at + 1]

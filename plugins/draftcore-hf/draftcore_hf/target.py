"""A target by transformers: a description to train against, a model to run.

`TransformersTarget` is what algorithms and training see: config, tokenizer and lazily read tensors, so
a trainer on another host never loads the target. `TransformersModel` runs it, for capture and decoding
only. Both implement `contracts.target`. `SharedModel` runs one that no single device holds, for capture
alone. What is loaded or computed is asked for by a method, which keeps it. The KV cache is indexed by
position, one slot per token of a row, so a rejected draft token is overwritten by the next round and rows
of different lengths need no padding, cropping or compaction.

Shape letters: B batch, T tokens, S cache slots, H hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, ThreadPoolExecutor, wait
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

from draftcore.contracts.capture import FeatureRequest, ImageProcessor
from draftcore.contracts.target import PrefillRunner, TargetCache, TargetModel, TargetSpec
from draftcore.errors import DraftcoreError, UsageError, nearest, raised
from draftcore.files import regular, write_atomic
from draftcore.tensors import require_devices, resolve_device
from draftcore.uris import format_size

EMBEDDINGS = ["embed_tokens", "wte", "embed_in", "word_embeddings", "embeddings"]
HEADS = ["lm_head", "embed_out", "head"]
# Kinds of transformers' cache layers that decoding here can take tokens back from.
CACHE_LAYERS = ["Dynamic", "DynamicSlidingWindow", "DynamicIndexed", "Dummy", "LinearAttention"]
CACHE_LAYERS += ["LinearAttentionAndFullAttention"]
HUB_ID = r"[^./~][^/]*(/[^/]+)?"
GREEDY = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
SLOW_DIGEST_BYTES = 1 << 28  # a file of more takes so long to read that a line says so
DIGESTS_AT_A_TIME = 8  # a processor digests 2 GB/s at most, and a disk or memory reads more
LOGITS_AT_A_TIME = 1 << 24  # each takes some 20 bytes until the largest are found


class TransformersTarget:
    """Reads a target's config, and its tokenizer and tensors when they are first needed.

    Raises UsageError where the folder or model id is unknown or holds no causal language model.
    """

    def __init__(
        self, path: str, revision: str | None = None, dtype: str = "auto", device: str = "auto",
        trust_remote_code: bool = False, tensor_parallel: int = 1,
        prefill_with: Callable[[TargetModel], PrefillRunner] = lambda model: model,
    ) -> None:  # fmt: skip
        self.path, self.revision, self.device = path, revision, device
        self.devices, self.images = tensor_parallel, cast(ImageProcessor | None, None)
        shared = tensor_parallel > 1  # by devices, which add up in another order than one does
        settings = {"target.tensor_parallel": tensor_parallel} if shared else {}
        self.settings: Mapping[str, Any] = settings
        # Never None, with which transformers asks standard input.
        self.source = {"revision": revision, "trust_remote_code": trust_remote_code}
        self.prefill_with = prefill_with
        with read_target(path, "config"):
            self.config: Any = AutoConfig.from_pretrained(path, **self.source)
            self.text_config: Any = self.config.get_text_config()
            bidirectional = getattr(self.text_config, "is_decoder", True) is False
            if (
                bidirectional
                and type(self.text_config) in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING
            ):
                raise ValueError("it is an encoder, whose tokens see those that come after them")
            with_images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
            self.is_multimodal = type(self.config) in with_images
            self.num_layers = int(self.text_config.num_hidden_layers)
            self.vocab_size = int(self.text_config.vocab_size)
            self.logit_scale = logit_scale(self.text_config)
            caps = ("final_logit_softcapping", "logits_soft_cap")
            cap = next((c for name in caps if (c := getattr(self.text_config, name, None))), None)
            self.logit_softcap = None if cap is None else float(cap)
            if min(self.num_layers, self.vocab_size, int(self.text_config.hidden_size)) < 1:
                raise ValueError("its layers, tokens or width are below 1")
            stored = self.config.dtype or self.text_config.dtype or "float32"
            name = dtype if dtype != "auto" else str(stored)
            self.dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
        self._tokenizer: Any = None
        self._model: TransformersModel | None = None
        self._fingerprint = ""
        self._files = dict[str, str]()

    def require_layers(self, request: FeatureRequest, here: bool = False) -> None:
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
        if here and self._model is None:
            require_devices(resolve_device(self.device), self.devices, "target.tensor_parallel")
            require_loadable(self)

    def load_tokenizer(self) -> Any:
        if self._tokenizer is None:
            with read_target(self.path, "tokenizer"):
                self._tokenizer = AutoTokenizer.from_pretrained(self.path, **self.source)
                self._tokenizer("a")  # some of its files are first read here
        return self._tokenizer

    def load_model(self) -> TransformersModel:
        if self._model is None:
            kind: Any = SharedModel if self.devices > 1 else TransformersModel
            self._model = kind(self)
        return self._model

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

    def fingerprint(self) -> str:
        """Digest of weights, config and tokenizer. The chat template is left out: it belongs to the data.

        Files of a Hub cache are known by their blobs' names, which are SHA-256 digests and are compared
        when weights are loaded. Any other file is read once, and its digest kept in the user's cache
        folder while the file is the same.
        """
        if not self._fingerprint:
            files = [str(fetch(self, "config.json")), *sorted({*self.weight_files().values()})]
            with ThreadPoolExecutor(DIGESTS_AT_A_TIME) as pool:  # they leave the interpreter's lock
                parts = [*pool.map(file_digest, map(Path, files))]
            parts.append(self.load_tokenizer().backend_tokenizer.to_str())
            text = json.dumps(parts).encode()
            self._fingerprint = hashlib.blake2b(text, digest_size=12).hexdigest()
        return self._fingerprint

    def weight_bytes(self) -> int:
        return sum(Path(file).stat().st_size for file in set(self.weight_files().values()))

    def weight_files(self) -> dict[str, str]:
        """Map the names of tensors to their safetensors files, downloaded if they have to be."""
        if self._files:
            return self._files
        with read_target(self.path, "weights"):
            index = fetch(self, "model.safetensors.index.json")
            names: dict[str, str] = (
                json.loads(Path(index).read_text())["weight_map"] if index else {}
            )
            found = {f: fetch(self, f) for f in sorted({*names.values()}) or ["model.safetensors"]}
            if index and (absent := [file for file, here in found.items() if here is None]):
                raise ValueError(
                    f"of the {len(found)} files that the index names, {len(absent)} are not there: "
                    f"{', '.join(absent[:3])}"
                )
        files = dict[str, str]()
        for file, here in found.items():
            if here is None:
                raise DraftcoreError(
                    f"target {self.path!r} has no {file}\n"
                    "  draftcore reads safetensors only; convert the weights with save_pretrained"
                    + f"\n  or, if the Hub is not reached from here, hf download {self.path}"
                    * (not Path(self.path).exists())
                )
            with (
                read_target(self.path, f"weights in {file}"),  # one that is cut off does not open
                safe_open(regular(Path(here)), framework="pt") as tensors,
            ):
                stored = [*tensors.keys()]
                held = [name for name, at in names.items() if at == file] if index else stored
                if lacking := sorted({*held} - {*stored}):
                    raise ValueError(f"{lacking[0]} is not there, and the index names it")
            files |= dict.fromkeys(held, here)
        self._files = files
        return files

    def _read(self, modules: Sequence[str], whole: bool = True) -> Tensor:
        """Read the weight of the first of these; of several, the outermost: MTP layers have their own.

        Its header alone if not `whole`.
        """
        files, shape = self.weight_files(), (self.vocab_size, int(self.text_config.hidden_size))
        outermost = sorted(files, key=lambda name: name.count("."))
        names = [n for m in modules for n in outermost if f".{n}".endswith(f".{m}.weight")]
        if not names:
            raise DraftcoreError(
                f"target {self.path!r} holds no weight of {' or '.join(modules)}\n"
                f"  tensors there: {', '.join(list(files)[:6])}, ...\n"
                "  draftcore reads the embedding and the head from the model's safetensors files"
            )
        name, file = names[0], files[names[0]]
        with (
            read_target(self.path, file),
            safe_open(regular(Path(file)), framework="pt") as tensors,
        ):
            stored = (*tensors.get_slice(name).get_shape(),)
            if stored != shape:
                raise ValueError(f"{name} has the shape {stored}, config.json says {shape}")
            tensor: Tensor = tensors.get_tensor(name) if whole else torch.empty(0)
        return tensor


def logit_scale(text: Any) -> float:
    """Return what a config multiplies logits by; the name that Granite divides by, others multiply by."""
    for name in ("logit_scale", "lm_head_multiplier", "logits_scaling"):
        if value := getattr(text, name, None):
            granites = text.model_type.startswith(("granite", "minicpm"))
            divides = name == "logits_scaling" and granites
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
        if not (folder := Path(path)).exists() and not re.fullmatch(HUB_ID, path):
            near = nearest(folder.name, [each.name for each in folder.parent.glob("*")])
            raise ValueError(f"there is no such folder{near}")
        for file in folder.glob("*"):
            regular(file)
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


def is_blob(real: Path) -> bool:
    """Say whether a file lies in a Hub cache under its SHA-256, as all large ones do."""
    return real.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", real.name) is not None


def file_digest(file: Path) -> str:
    """Return a file's SHA-256, by which a Hub cache names it."""
    real = file.resolve()
    return real.name if is_blob(real) else read_digest(real)


def read_digest(real: Path) -> str:
    """Read a file for its SHA-256; that of a large one is kept by its path, size and time of change."""
    status = real.stat()
    identity = f"{real} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    cached = cache / "draftcore" / "digests" / hashlib.sha256(identity.encode()).hexdigest()
    if cached.exists():
        return cached.read_text()
    if large := status.st_size > SLOW_DIGEST_BYTES:
        size = format_size(status.st_size)
        print(f"reading {real} once for its digest, {size}", file=sys.stderr, flush=True)
    with regular(real).open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if large:
        with contextlib.suppress(OSError):  # a home that cannot be written costs time alone
            write_atomic(cached, digest)
    return digest


@contextlib.contextmanager
def digested_beside(files: Iterable[str]) -> Iterator[None]:
    """Digest those of some files that a Hub cache has while they are loaded here.

    Raises ValueError where one is not what its name says.
    """
    blobs = [real for real in {Path(file).resolve() for file in files} if is_blob(real)]
    with ThreadPoolExecutor(DIGESTS_AT_A_TIME) as pool:
        digests = [pool.submit(read_digest, real) for real in blobs]
        yield
    for real, digest in zip(blobs, digests, strict=True):
        if digest.result() != real.name:
            raise ValueError(f"{real} is damaged: its name is its SHA-256, and that is another")


def weights_text(spec: TransformersTarget) -> str:
    """Name a target's weights in an error."""
    method = (getattr(spec.config, "quantization_config", None) or {}).get("quant_method")
    return f"weights, quantised by {method}," if method else "weights"


def from_pretrained(spec: TransformersTarget, **more: Any) -> tuple[Any, Mapping[str, Any]]:
    """Let transformers make the model of a target; returns what it says of its tensors, too."""
    kind = "AutoModelForImageTextToText" if spec.is_multimodal else "AutoModelForCausalLM"
    settings = {"dtype": spec.dtype, "output_loading_info": True, **spec.source, **more}
    model, report = getattr(modeling_auto, kind).from_pretrained(spec.path, **settings)
    return model, report


def require_all(report: Mapping[str, Any]) -> None:
    """Raise ValueError for tensors that a model lacks; transformers would make random ones."""
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"they lack {', '.join(missing[:4])}, which config.json says are there")


def require_loadable(spec: TransformersTarget) -> None:
    """Raise UsageError for weights that transformers would not load, by all that their headers tell.

    The model is made without its weights, which takes a second; that needs accelerate. Of one that is
    quantised, what its method needs is asked for. What else transformers meets is left to loading.
    """
    for modules in (EMBEDDINGS + HEADS, HEADS + EMBEDDINGS):
        spec._read(modules, whole=False)
    with read_target(spec.path, weights_text(spec)):
        if getattr(spec.config, "quantization_config", None):
            # It brings what loads models, which takes seconds.
            from transformers.quantizers.auto import get_hf_quantizer

            if not get_hf_quantizer(copy.deepcopy(spec.config), None, None, True, {})[0]:
                raise ValueError("transformers knows no such quantisation")
            return
        if importlib.util.find_spec("accelerate") is None:
            return
        before = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()  # loading says it
        transformers_logging.disable_progress_bar()
        try:
            report = from_pretrained(spec, device_map="meta", ignore_mismatched_sizes=True)[1]
        except Exception:
            return
        finally:
            transformers_logging.set_verbosity(before)
        require_all(report)
        for name, stored, made in sorted(report["mismatched_keys"]):
            shapes = (*stored,), (*made,)
            raise ValueError("{} has the shape {}, config.json says {}".format(name, *shapes))


def load_weights(spec: TransformersTarget, parts: int) -> Any:
    """Load a target by transformers, or the part of it that this process has of several.

    Raises UsageError where transformers would go on with weights that are not the target's.
    """
    transformers_logging.disable_progress_bar()  # loading has no place beside our own bar
    what = f"weights, shared by {parts} devices," if parts > 1 else weights_text(spec)
    first = parts == 1 or os.environ["RANK"] == "0"  # the others load the same files
    with (
        read_target(spec.path, what),
        digested_beside(spec.weight_files().values() if first else ()),
    ):
        if (heads := getattr(spec.text_config, "num_key_value_heads", 0) or 0) % parts:
            raise ValueError(f"it has {heads} heads of keys, no multiple of {parts}")
        shared = {"tp_size": parts} if parts > 1 else None
        model, report = from_pretrained(spec, distributed_config=shared)
        split = [name for name, p in model.named_parameters() if hasattr(p, "placements")]
        if parts > 1 and not any("layers." in name for name in split):
            raise ValueError(f"{type(model).__name__} has no tp_plan for its layers")
        require_all(report)
        quantised = getattr(model.config, "quantization_config", None)
        if quantised and not getattr(model, "hf_quantizer", None):
            raise ValueError("transformers knows no such quantisation")
        # transformers < 5.23 makes bfloat16 of MXFP4 in any case.
        for weight in () if quantised else model.parameters():
            if weight.dtype == torch.bfloat16 != spec.dtype:
                weight.data = weight.data.to(spec.dtype)
    return model


class TransformersModel:
    """Runs the target, frozen; the contract says what each method does."""

    def __init__(self, spec: TransformersTarget, parts: int = 1) -> None:
        self.spec: TargetSpec = spec
        self.device, self.dtype = resolve_device(spec.device), spec.dtype
        self.model: Any = self.load(spec, parts)
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
        self._empty_cache = list[Any]()  # what transformers keeps of a single token, by layer
        self._wider: Any = None

    def load(self, spec: TransformersTarget, parts: int) -> Any:
        """Return the model, or this process' part of it."""
        return load_weights(spec, parts)

    @torch.inference_mode()
    def features(
        self, tokens_BT: Tensor, lengths_B: Tensor, request: FeatureRequest
    ) -> dict[str, Tensor]:
        # Rows are padded on the right and attention is causal, so no token sees padding. A mask would
        # say so again, and attention with one takes 7 times as long (docs/log.md, 2026-11-23).
        taken = self.run(request, input_ids=tokens_BT.to(self.device), use_cache=False)
        return request.select(taken)

    @torch.inference_mode()
    def forward_images(self, inputs: Any, request: FeatureRequest) -> dict[str, Tensor]:
        model, inputs = self.model.base_model, inputs.to(self.device, self.dtype)
        taken = self.run(request, model, **inputs, use_cache=False)
        if hasattr(model, "rope_deltas"):
            model.rope_deltas = None  # else it goes on from here when it generates
        return request.select(taken)

    @torch.inference_mode()
    def run(self, request: FeatureRequest, model: Any = None, **inputs: Any) -> dict[str, Tensor]:
        """Run the decoder, or a model around it, and take what the request names."""
        taken: dict[str, Any] = {}

        def take_output(name: str, _: nn.Module, __: Any, output: Any) -> None:
            taken[name] = output[0] if isinstance(output, tuple) else output

        def take_input(name: str, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            taken[name] = args[0] if args else kwargs["hidden_states"]

        outputs = [(f"hidden.{layer}", self.layers[layer]) for layer in request.layers]
        inputs_of = [("embeddings", 0)] * request.embeddings  # with what is done to them before
        if model is not None:  # which need not end with the decoder
            outputs.append(("last_hidden", self.decoder))
            # What some models see is added between layers, too (Qwen3-VL's deep stack): servers
            # capture what the next layer is given, and so does this.
            last = len(self.layers) - 1
            inputs_of += [(f"hidden.{k}", k + 1) for k in request.layers if k < last]
        with contextlib.ExitStack() as hooks:
            for name, module in outputs:
                take = functools.partial(take_output, name)
                hooks.enter_context(module.register_forward_hook(take))
            for name, layer in inputs_of:
                take = functools.partial(take_input, name)
                before = self.layers[layer].register_forward_pre_hook(take, with_kwargs=True)
                hooks.enter_context(before)
            output = (model or self.decoder)(**inputs)
        taken["last_hidden"] = taken.get("last_hidden", output).last_hidden_state
        if request.topk:
            taken |= self._largest(taken["last_hidden"], request.topk)
        return taken

    def _largest(self, hidden_BTH: Tensor, k: int) -> dict[str, Tensor]:
        """Return the k largest logits and their ids, of a slice of the tokens at a time."""
        rows = max(1, LOGITS_AT_A_TIME // self.spec.vocab_size)
        slices = torch.split(hidden_BTH.flatten(0, -2), rows)
        largest = [largest_logits(self.logits(part_RH), k) for part_RH in slices]
        logits_RK, ids_RK = (torch.cat(parts) for parts in zip(*largest, strict=True))
        shape = (*hidden_BTH.shape[:-1], k)
        return {"topk_logits": logits_RK.view(shape), "topk_ids": ids_RK.view(shape)}

    def logits(self, hidden: Tensor) -> Tensor:
        return self.spec.capped(self.model.get_output_embeddings()(hidden))

    def allocate(self, batch: int, max_len: int) -> TargetCache:
        layers, cache = self.empty_cache(), []
        for layer in layers:
            slots = [x.new_zeros(batch, max_len, *x[0, :, 0].shape) for x in slots_of(layer)]
            cache.append(slots + [x.new_zeros(batch, *x.shape[1:]) for x in states_of(layer)])
        if any(map(states_of, layers)):  # tokens by slot, and how many the states have read
            read_BS = torch.zeros(batch, max_len, dtype=torch.long, device=self.device)
            cache.append([read_BS, torch.zeros_like(read_BS[:, 0])])
        return cache

    @torch.inference_mode()
    def empty_cache(self) -> list[Any]:
        """What transformers keeps of a single token, by layer: only a model knows its kinds and shapes.

        Raises UsageError for a target that cannot take tokens back. A forward, the first time.
        """
        if self._empty_cache:
            return self._empty_cache
        token_1T = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        output = self.decoder(input_ids=token_1T, use_cache=True)
        layers: list[Any] = getattr(getattr(output, "past_key_values", None), "layers", [output])
        # Some are new.
        known = [getattr(cache_utils, f"{kind}Layer", None) for kind in CACHE_LAYERS]
        unread = {x for x in layers if isinstance(x, cache_utils.DynamicLayer) and x.keys is None}
        strange = [x for x in layers if type(x) not in known or x in unread]
        # The first kind of Mamba begins anew where it reads several tokens; ALiBi takes no such masks.
        strange += [x for x in self.decoder.modules() if hasattr(x, "use_mambapy")]
        strange += [self.decoder] * ("alibi_tensor" in " ".join(dir(self.decoder)))
        if strange:
            raise UsageError(
                f"draftcore cannot decode with target {self.spec.path!r}: it has "
                f"{type(strange[0]).__name__}, which does not read on from tokens that were taken back\n"
                "  train, export, and measure the acceptance length on your server"
            )
        self._empty_cache = layers
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
        empty = self.empty_cache()
        if len(cache) > len(empty):
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
        pairs = zip(empty, cache, strict=True)
        layers = [layer_of(layer, tensors, at, span) for layer, tensors in pairs]
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
        slot_positions, seen_BTS = slots_S, slots_S <= positions_BT[..., None]
        if seen_BTT is not None:
            B, T = positions_BT.shape
            slots_BT = positions_BT[:, :1] + slots_S[:T]
            positions_BS = slots_S.repeat(B, 1).scatter(1, slots_BT, positions_BT)
            slot_positions = positions_BS[:, None]
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
        near = self._additive(seen_BTS & (slot_positions >= first_BT1))
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
        if self._wider is None:  # made at the first tie that has to be judged
            dtype = torch.float64 if self.dtype == torch.float32 else torch.float32
            self._wider = copy.deepcopy(self.model).to(dtype)
            self._wider.set_experts_implementation("eager")  # others know no fp64
        tokens_1T = torch.tensor([list(tokens)], device=self.device)
        best, second = self._wider(input_ids=tokens_1T).logits[0, -1].topk(2).values.tolist()
        return float(best - second)

    @torch.inference_mode()
    def check(self) -> None:
        """Raise unless embedding and head, as algorithms are given them, are what the model computes with.

        The last hidden state x the head, scaled and capped, gives the model's own log-probabilities: else
        a draft would learn another distribution than the server samples from.
        """
        spec, tokens_1T = self.spec, torch.arange(10, 42, device=self.device)[None]
        tokens_1T %= spec.vocab_size
        request = FeatureRequest((0,), True, str(self.dtype).removeprefix("torch."))
        try:
            layer_THs, hidden_TH = (x[0] for x in self.run(request, input_ids=tokens_1T).values())
        except Exception as error:  # also one of memory, which the run explains
            raise UsageError(
                f"{type(self.model).__name__} of {spec.path!r} cannot read a prompt of "
                f"{tokens_1T.shape[1]} tokens: {raised(error)}\n  its config.json, or transformers' code "
                "for it, is at fault: correct it, or set target.path to another model"
            ) from error
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
        own = self.model.get_input_embeddings()
        own_VH = own.weight
        if hasattr(own_VH, "full_tensor"):  # each part of the model has some tokens'
            own_VH = own_VH.full_tensor()
        if torch.equal(own_VH, embedding_VH):
            return
        others = (own_VH != embedding_VH).any(-1).nonzero().flatten().tolist()
        if others != [getattr(own, "padding_idx", None)]:  # which some make zeros: no text has it
            raise UsageError(
                f"the embedding in the files of {spec.path!r} is not what {type(self.model).__name__} "
                f"computes with: that of {len(others)} tokens, the first of them {others[0]}\n"
                "  save the model again with save_pretrained, or set target.path to another model"
            )


class SharedModel:
    """The target on several devices, a process for each, by transformers' own plan: for capture alone.

    The parts run in child processes, which start with the first call. If one dies, RuntimeError is raised
    and the process must be restarted. None of them is this process: it would be lost with the others, and
    torch.distributed's default group is that of the ranks.
    """

    def __init__(self, spec: TransformersTarget) -> None:
        require_devices(resolve_device(spec.device), spec.devices, "target.tensor_parallel")
        self.spec, self.dtype = spec, spec.dtype
        self.device = torch.device("cpu")  # where it takes tokens
        self.parts = dict[int, ProcessPoolExecutor]()  # by process id

    def __getattr__(self, name: str) -> Any:
        raise UsageError(
            f"{self.spec.devices} devices share target {self.spec.path!r}, to capture and no more: "
            f"{name!r} needs it on one\n  set target.tensor_parallel=1 to decode, or for graphs"
        )

    def _run(self, method: str, *arguments: Any) -> dict[str, Tensor]:
        """Let all parts run a method of the model; returns the tensors that the first of them does."""
        spec, count = self.spec, self.spec.devices
        if not self.parts:
            spawn = torch.multiprocessing.get_context("spawn")
            pools = [ProcessPoolExecutor(1, spawn) for _ in range(count)]
            self.parts = {pool.submit(os.getpid).result(): pool for pool in pools}
            self.memory = os.memfd_create("draftcore-parts")  # where they meet, and nobody else can
        meeting, device = f"/proc/{os.getpid()}/fd/{self.memory}", resolve_device(spec.device)
        target = {"path": spec.path, "dtype": str(spec.dtype), **spec.source}
        try:
            tasks = [
                pool.submit(run_part, (part, count, meeting, device, target), method, *arguments)
                for part, pool in enumerate(self.parts.values())
            ]
            wait(tasks, return_when=FIRST_EXCEPTION)
            first, *_ = [task.result() for task in tasks if task.done()]
            # A copy: what was handed over is the part's memory, and goes when it goes.
            return {name: value.clone() for name, value in first.items()}
        except BaseException as error:
            for pid in self.parts:  # who is left may wait for who is gone
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not isinstance(error, RuntimeError):
                raise
            what = f"target {spec.path!r}, which {count} devices share, has ended"
            raise RuntimeError(f"{what}: {error}") from None

    features = functools.partialmethod(_run, "features")
    forward_images = functools.partialmethod(_run, "forward_images")
    check = functools.partialmethod(_run, "check")


part_of_process = list[TransformersModel]()  # in a process of SharedModel: its part of the target


def run_part(loading: tuple[Any, ...], method: str, *arguments: Any) -> dict[str, Tensor]:
    """Call a method of this process' part, which is loaded first; the first part returns tensors."""
    if not part_of_process:
        part_of_process.append(load_part(*loading))
    result = getattr(part_of_process[0], method)(*arguments)
    return {} if loading[0] else result or {}


def load_part(
    part: int, count: int, meeting: str, device: torch.device, target: dict[str, Any]
) -> TransformersModel:
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
    return TransformersModel(TransformersTarget(**target, device=str(device)), count)


def slots_of(layer: Any) -> list[Tensor]:
    """Return what one of transformers' cache layers keeps by token: [B, heads, S, D] each."""
    keys_BSD = getattr(layer, "indexer_keys", None)  # of sparse attention; one head
    slots = [getattr(layer, "keys", None), getattr(layer, "values", None)]
    return [x for x in slots if x is not None] + ([] if keys_BSD is None else [keys_BSD[:, None]])


def states_of(layer: Any) -> list[Tensor]:
    """Return what it keeps of all tokens together, and changes with each: [B, ...] each."""
    kinds = getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})
    return [x for states in kinds for x in states.values() if x is not None]


def layer_of(empty: Any, tensors: Sequence[Tensor], at: tuple[Tensor, Tensor], span: int) -> Any:
    """Return a cache layer like `empty` that reads and writes these slots and states."""
    by_token = len(slots_of(empty))
    slots, states = _Slots(tensors[:by_token], at, span), iter(tensors[by_token:])
    if not states_of(empty):
        return slots
    layer = copy.copy(empty)
    if by_token:
        layer.update = slots.update
    for name in ("conv_states", "recurrent_states"):
        kept = getattr(empty, name).items()
        setattr(layer, name, {i: None if x is None else next(states) for i, x in kept})
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

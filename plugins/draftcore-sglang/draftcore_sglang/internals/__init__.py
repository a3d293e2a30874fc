"""Call sglang: the only package that imports it, and all that this dist knows of its insides.

sglang has no interface for what capture needs, so each name used here may move with any release.
Hence the range of versions that was tested, and a check of every signature before the first use
(`signatures`): a name that moved is an error that says which, never a wrong tensor. This module runs
a model in this process; `server` hooks into a running server, `disagg` into one that takes requests
over.

A model is built and run as `sglang.benchmark.one_batch` does it, sglang's own program of one
process without a scheduler: there is no chunked prefill, prefix cache or overlap that could shorten
or reorder rows. Hidden states are taken where the model passes them to its logits processor.

sglang keeps its configuration and process groups in globals of the process, so a process has one
runner at a time. sglang takes a layer's output at the *next* layer's input, so the last layer's
output is not among those it captures: it is what the final norm adds up.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import io
import json
import logging
import os
import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from draftcore.errors import DraftcoreError, UsageError, nearest, raised

Pictures = Mapping[int, Mapping[str, Any]]  # by prompt, what the target's processor makes of images
# Of one forward: rows of the table that maps a prompt's tokens to its cache slots.
MAX_PROMPTS = 256
LAUNCHER = "sglang.launch_server"  # the module that starts a server

# What is called here, with its parameters.
SIGNATURES = {
    "sglang.benchmark.one_batch:load_model": "server_args port_args gpu_id tp_rank",
    "sglang.benchmark.one_batch:prepare_synthetic_inputs_for_latency_test": (
        "batch_size input_len custom_inputs"
    ),
    "sglang.benchmark.one_batch:_TorchBenchRunner": "model_runner",
    "sglang.benchmark.one_batch:_TorchBenchRunner.extend": "self reqs",
    "sglang.benchmark.one_batch:_TorchBenchRunner.clear": "self",
    "sglang.srt.layers.logits_processor:LogitsProcessor.forward": (
        "self input_ids hidden_states lm_head "
        "logits_metadata aux_hidden_states hidden_states_before_norm"
    ),
    "sglang.srt.managers.multimodal_processor:get_mm_processor": (
        "hf_config server_args processor transport_mode model_config kwargs"
    ),
    "sglang.srt.managers.mm_utils:init_mm_embedding_cache": "max_size",
    "sglang.srt.server_args:PortArgs.init_new": "server_args dp_rank worker_ports",
    "sglang.srt.plugins:load_plugins": "",
    "sglang.srt.distributed.parallel_state:destroy_model_parallel": "",
    "sglang.srt.distributed.parallel_state:destroy_distributed_environment": "",
}

LORA = "a capture's prompts name no adapter: merge it into the target"
# What a user may not set, with the value that changes nothing and the reason.
REFUSED: dict[str, tuple[Any, str]] = {
    "enable_dp_attention": (False, "with DP attention a rank holds the rows of some prompts only"),
    "dp_size": (1, "with data parallelism a rank runs some of the prompts only"),
    "pp_size": (1, "with pipeline parallelism no rank holds all layers"),
    "attn_cp_size": (1, "with context parallelism a rank holds part of each prompt"),
    "dcp_size": (1, "with context parallelism a rank holds part of each prompt"),
    "nnodes": (1, "all ranks of this capture run on one machine"),
    "speculative_algorithm": (None, "capture runs the target alone"),
    "disaggregation_mode": ("null", "capture runs whole prompts in one place"),
    "enable_two_batch_overlap": (False, "it cuts a batch in two"),
    "enable_lora": (False, LORA),
    "lora_paths": (None, LORA),
}
OURS = {  # what the settings below decide, and by which key of a run's configuration
    "model_path": "target.path",
    "revision": "target.revision",
    "dtype": "target.dtype",
    "device": "target.device",
    "base_gpu_id": "target.device",
    "tp_size": "capture.options.tp",
    "max_total_tokens": "capture.options.max_tokens",
    "context_length": "capture.options.max_tokens",
}


@dataclass(frozen=True)
class Settings:
    """What a model is run with, in plain values: they go to the processes of other ranks.

    `args` are further arguments of sglang's ServerArgs, as JSON with sorted keys.
    """

    path: str
    revision: str | None
    dtype: str
    device: str
    tp: int
    max_tokens: int
    context: int
    args: str


@dataclass(frozen=True)
class Limits:
    """What one forward may hold: tokens of the cache, in pages of so many; tokens of a prompt."""

    tokens: int
    page: int
    context: int


# ---------------------------------------------------------------- what may be asked


def require_arguments(args: Mapping[str, Any]) -> None:
    """Raise UsageError for an argument that sglang does not know or that capture cannot have."""
    from sglang.srt.server_args import ServerArgs

    known = inspect.signature(ServerArgs).parameters
    for name in args:
        if name in OURS:
            raise UsageError(
                f"capture.options.args.{name} is set, but draftcore sets it\n  set {OURS[name]}"
            )
        if name not in known:
            raise UsageError(
                f"capture.options.args.{name}: sglang {metadata.version('sglang')} has no such "
                f"argument{nearest(name, known)}\n  `python -m sglang.launch_server --help` lists them"
            )
    _require_whole_rows(args)


def _require_whole_rows(values: Mapping[str, Any]) -> None:
    for name, (neutral, reason) in REFUSED.items():
        if (values.get(name) or neutral) != neutral:
            raise UsageError(
                f"sglang's {name}={values[name]!r} cannot be captured with: {reason}\n"
                f"  leave {name} at {neutral!r}, and use capture.options.tp for several devices"
            )


# ---------------------------------------------------------------- which layers


def sglang_layers(layers: Sequence[int], num_layers: int) -> list[int]:
    """Return the layer ids that sglang is given for these of draftcore, in the order it returns them.

    Ids are converted here alone. Both mean the output of layer k, counted from 0; sglang returns
    each once, in the model's order, and never the last. It must capture one at least.
    """
    return sorted({layer for layer in layers if layer < num_layers - 1}) or [0]


# ---------------------------------------------------------------- a model that runs


class Runner:
    """Runs a target in this process, or one rank of it.

    Raises UsageError where sglang refuses the settings, where torch.distributed is in use by
    somebody else, or where the model has no such place to take states from.
    """

    def __init__(
        self, settings: Settings, rank: int = 0, port: int | None = None, meeting: str = ""
    ) -> None:
        from sglang.benchmark import one_batch
        from sglang.srt.platforms import current_platform
        from sglang.srt.plugins import load_plugins

        if torch.distributed.is_initialized():
            raise UsageError(
                "sglang needs torch.distributed for itself, and this process uses it already\n"
                "  capture in processes of their own: set topology.producers, or start draftcore produce"
            )
        device = torch.device(settings.device)
        if current_platform.device_type != device.type:
            raise UsageError(
                f"the target is to run on {device.type!r}, and sglang runs on "
                f"{current_platform.device_type!r} here\n"
                "  set target.device, or capture with capture.name=hf, which runs on any"
            )
        logging.getLogger("sglang").setLevel(logging.ERROR)
        load_plugins()
        gpu = (device.index or 0) + rank
        try:
            with _same_randomness(), redirect_stdout(io.StringIO()):
                _meet(settings.tp, rank, device, meeting)
                args, ports = _configure(settings, rank, gpu, port)
                self._bench, _ = one_batch.load_model(args, ports, gpu, rank)
        except BaseException as error:
            _leave_groups()
            if isinstance(error, DraftcoreError) or not isinstance(error, Exception):
                raise
            raise DraftcoreError(
                f"sglang cannot run target {settings.path!r}: {error}\n  see capture.options"
            ) from error
        self._one_batch, self._runner = one_batch, self._bench.torch_runner
        self.model: nn.Module = self._runner.model
        self.num_layers = int(self._runner.model_config.num_hidden_layers)
        self.limits = Limits(
            tokens=int(self._runner.max_total_num_tokens),
            page=int(self._runner.page_size),
            context=int(self._runner.model_config.context_len),
        )

    @torch.no_grad()
    def forward(
        self, prompts: Sequence[Sequence[int]], layers: Sequence[int], pictures: Pictures
    ) -> dict[str, Tensor]:
        """Run prompts as one batch; return [all tokens, H] per `hidden.<k>` and `last_hidden`.

        Rows are in the order of the prompts, without padding. Beside them, `logits` holds the
        logits [prompts, V] after each prompt's last token.
        """
        given = [list(prompt) for prompt in prompts]
        seen = {at: self._see(given[at], pictures[at]) for at in pictures}
        for at, (marked, _) in seen.items():
            given[at] = marked
        requests = self._one_batch.prepare_synthetic_inputs_for_latency_test(len(given), 0, given)
        for at, (_, images) in seen.items():
            requests[at].multimodal_inputs = images
        with self._states(layers) as taken:
            try:
                _, logits, _ = self._bench.extend(requests)
            finally:
                self._bench.clear()
        names = [f"hidden.{layer}" for layer in dict.fromkeys(layers)]
        found = {name: taken[name] for name in [*names, "last_hidden"] if name in taken}
        total = sum(map(len, prompts))
        short = [name for name in [*names, "last_hidden"] if len(found.get(name, ())) != total]
        if short:
            raise DraftcoreError(
                f"sglang returned {[len(found.get(name, ())) for name in short]} rows of {short} "
                f"for {total} tokens\n  capture this target with another backend (capture.name=hf)"
            )
        return {**found, "logits": logits}

    def _see(self, tokens: list[int], made: Mapping[str, Any]) -> tuple[list[int], Any]:
        """Return tokens with sglang's own marks in the places of images, and what goes there.

        sglang works positions out, as a server's tokenizer process does, and reads no image by itself.
        """
        from sglang.srt.managers.schedule_batch import MultimodalInputs

        try:
            reading = self._images.process_mm_data_async(
                image_data=[{**made, "format": "processor_output"}],
                audio_data=None,
                input_text=tokens,
                request_obj=SimpleNamespace(video_data=None, audio_data=None, rid=""),
                max_req_input_len=None,
            )
            # In a thread, as this one may have a loop of its own: a notebook's.
            with ThreadPoolExecutor(1) as thread:
                found = thread.submit(asyncio.run, reading).result()
            if list(found.input_ids) != tokens:
                raise ValueError("it writes other tokens for them than the target's processor")
            images = MultimodalInputs.from_processor_output(found)
            marked = images.padded_input_ids
            if marked is None:  # some families leave it to the model
                marked = self._runner.model.pad_input_ids(array("q", tokens), images)
            return list(marked), images
        except Exception as error:  # of sglang's code for a family, which nobody may have run
            raise UsageError(
                f"sglang cannot give {type(self.model).__name__} images: {raised(error)}\n"
                "  capture rows with images with another backend (capture.name=hf)"
            ) from error

    @functools.cached_property
    def _images(self) -> Any:
        """What places a target's images among its tokens; a scheduler's process has it elsewhere."""
        from sglang.srt.managers import mm_utils, multimodal_processor
        from transformers import AutoProcessor

        config, args = self._runner.model_config, self._runner.server_args
        mm_utils.init_mm_embedding_cache(0)
        multimodal_processor.import_processors("sglang.srt.multimodal.processors")
        own = AutoProcessor.from_pretrained(
            args.model_path, revision=args.revision, trust_remote_code=args.trust_remote_code
        )
        return multimodal_processor.get_mm_processor(
            config.hf_config, args, own, "default", model_config=config, skip_mm_pool=True
        )

    @contextmanager
    def _states(self, layers: Sequence[int]) -> Iterator[dict[str, Tensor]]:
        """Collect states while a forward runs."""
        taken: dict[str, Tensor] = {}
        last, asked = self.num_layers - 1, sglang_layers(layers, self.num_layers)

        def before_logits(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            values = dict(
                zip(("input_ids", "hidden_states", "head", "batch", "aux"), given, strict=False)
            )
            taken["last_hidden"] = values["hidden_states"]
            for layer, hidden in zip(asked, values["aux"] or (), strict=True):
                taken[f"hidden.{layer}"] = hidden

        def after_norm(_: Any, given: tuple[Any, ...], output: Any) -> None:
            # With a residual, the norm adds first and returns the sum beside its own result.
            state = output[1] if isinstance(output, tuple) else given[0]
            taken[f"hidden.{last}"] = state.clone()

        hooks = [
            place(self.model, "logits_processor").register_forward_pre_hook(
                before_logits, with_kwargs=True
            )
        ]
        if last in layers:
            hooks.append(place(self.model, "model", "norm").register_forward_hook(after_norm))
        if last > 0:
            self.layer_setter()(asked)
        try:
            yield taken
        finally:
            for hook in hooks:
                hook.remove()

    def layer_setter(self) -> Callable[[list[int]], None]:
        return layer_setter(self.model)

    def close(self) -> None:
        """Give back memory and process groups, so that another runner may be made."""
        del self._bench, self._runner, self.model
        vars(self).pop("_images", None)
        _leave_groups()
        gc.collect()
        torch.cuda.empty_cache()


def place(model: nn.Module, *names: str) -> nn.Module:
    """Return a part of a model, or of the language model in it. Raises UsageError for none."""
    for found in (model, getattr(model, "language_model", None)):
        for name in names:
            found = getattr(found, name, None)
        if isinstance(found, nn.Module):
            return found
    raise UsageError(
        f"sglang's {type(model).__name__} has no {'.'.join(names)} to take states from\n"
        "  capture this target with another backend (capture.name=hf)"
    )


def layer_setter(model: nn.Module) -> Callable[[list[int]], None]:
    """Return the model's method that sets its layers; the two that exist agree on explicit ids.

    Of Qwen3-VL the second calls what only its mixtures of experts have.
    """
    for name in ("set_eagle3_layers_to_capture", "set_dflash_layers_to_capture"):
        if hasattr(model, name):
            return getattr(model, name)  # type: ignore[no-any-return]
    raise UsageError(
        f"sglang's {type(model).__name__} cannot return the states of chosen layers\n"
        "  capture this target with another backend (capture.name=hf)"
    )


def _meet(size: int, rank: int, device: torch.device, file: str) -> None:
    """Begin torch's groups before sglang does, whose ranks meet at a port that obeys any stranger."""
    for library in ("GLOO", "NCCL"):  # all ranks are on this machine
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    groups: Any = torch.distributed
    store = groups.FileStore(file, size) if file else groups.HashStore()
    backend = groups.get_default_backend_for_device(device)
    groups.init_process_group(backend, store=store, rank=rank, world_size=size)


def _leave_groups() -> None:
    from sglang.srt.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def _configure(settings: Settings, rank: int, gpu: int, port: int | None) -> tuple[Any, Any]:
    """Make sglang's configuration and install it in this process."""
    from sglang.srt.server_args import PortArgs, ServerArgs

    given = {
        "model_path": settings.path,
        "revision": settings.revision,
        "dtype": settings.dtype,
        "device": torch.device(settings.device).type,
        "tp_size": settings.tp,
        "max_total_tokens": settings.max_tokens,
        "mem_fraction_static": 0.9,  # of what is free, at most; max_total_tokens decides
        "context_length": settings.context,
        "max_running_requests": MAX_PROMPTS,
        "disable_radix_cache": True,
        "chunked_prefill_size": -1,
        "disable_cuda_graph": True,
        "grammar_backend": "none",
        "random_seed": 0,
        "nccl_port": port,
        "log_level": "error",
        **json.loads(settings.args),
    }
    try:
        args = ServerArgs(**given)
        resolved = _publish(args, rank, gpu)
    except (ValueError, AssertionError) as error:
        raise UsageError(f"sglang refuses its arguments: {error}\n  see capture.options") from None
    _require_whole_rows({name: getattr(resolved, name) for name in REFUSED})
    return args, PortArgs.init_new(args)


def _publish(args: Any, rank: int, gpu: int) -> Any:
    """Resolve and install the configuration; return a view of it. Here the releases differ most."""
    from sglang.benchmark import one_batch

    names = ("moe", "fp8_gemm", "bf16_gemm", "fp4_gemm")
    found = (getattr(one_batch, f"initialize_{name}_config", None) for name in names)
    initializers = [initialize for initialize in found if initialize]
    if not hasattr(one_batch, "publish"):  # to 0.5.18 there is no configuration of a process
        for initialize in initializers:
            initialize(args)
        return args
    args.resolve_once()
    ranks = {}
    if hasattr(one_batch, "SpawnRanks"):  # from 0.5.21 on
        place = one_batch.spawn_world_rank(args, tp_rank=rank, pp_rank=0)
        ranks["ranks"] = one_batch.SpawnRanks(world_rank=place, gpu_id=gpu)
    one_batch.publish(args, role="scheduler", **ranks)
    for initialize in initializers:
        initialize()
    return one_batch.resolving_view(args)


@contextmanager
def _same_randomness() -> Iterator[None]:
    """Keep the random states of this process, which sglang seeds: training draws from them."""
    python, arrays = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield
    random.setstate(python)
    numpy.random.set_state(arrays)

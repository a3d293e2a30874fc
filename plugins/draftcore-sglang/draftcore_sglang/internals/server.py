"""Hook a running server for capture: what that knows of sglang's insides; see `internals`.

Five methods are hooked, the same ones in all tested releases:

    ModelRunner.load_model             ask the model for its layers' outputs
    LogitsProcessor.forward            keep the states of a prefill: a copy, as a CUDA graph's
                                       buffers are written again by the next batch
    process_batch_result_prefill       give each request's rows to `capture_requests`
    SchedulerOutputStreamer            hold the answers of requests that are being written
    Scheduler.process_input_requests   send those whose receipt is there; called in every turn

Nothing here waits, and no exception leaves a hook: it would end the server.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from draftcore.errors import DraftcoreError
from draftcore_sglang import internals as capture
from draftcore_sglang.capture_requests import CaptureRequests, Slice
from draftcore_sglang.internals.signatures import require_sglang
from draftcore_sglang.staging import Staging
from draftcore_sglang.wire import FIELD, VERSION

logger = logging.getLogger(__name__)
SRT = "sglang.srt."
LOAD = SRT + "model_executor.model_runner:ModelRunner.load_model"
LOGITS = SRT + "layers.logits_processor:LogitsProcessor.forward"
COMPONENTS = SRT + "managers.scheduler_components."
PREFILL = (
    COMPONENTS + "batch_result_processor:SchedulerBatchResultProcessor.process_batch_result_prefill"
)
STREAM = COMPONENTS + "output_streamer:SchedulerOutputStreamer.stream_output"
TURN = SRT + "managers.scheduler:Scheduler.process_input_requests"
SIGNATURES = {
    LOAD: "self",
    LOGITS: capture.SIGNATURES[LOGITS],
    PREFILL: "self batch result",
    STREAM: "self reqs return_logprob skip_req",
    TURN: "self recv_reqs",
    SRT + "plugins.hook_registry:HookRegistry.register": "target hook hook_type source",
    SRT + "runtime_context:get_parallel": "",
}
KEPT = "draftcore_states"  # attribute of a forward's output


def install(sink: str, layers: tuple[int, ...], buffer_bytes: int) -> None:
    """Hook this process. Raises UsageError where sglang is not as it was when this was tested."""
    require_sglang(SIGNATURES)
    hooks = importlib.import_module(SRT + "plugins.hook_registry")
    ours = ServerHooks(sink, layers, buffer_bytes)
    for target, hook, kind in (
        (LOAD, ours.after_load, "AFTER"),
        (LOGITS, ours.after_logits, "AFTER"),
        (PREFILL, ours.around_prefill, "AROUND"),
        (STREAM, ours.around_stream, "AROUND"),
        (TURN, ours.after_turn, "AFTER"),
    ):
        hooks.HookRegistry.register(target.replace(":", "."), hook, hooks.HookType[kind])


class ServerHooks:
    """The hooks of one process. Those of the scheduler run in its one thread.

    `sink` is the URI of the store that captured states go to.
    """

    def __init__(self, sink: str, layers: tuple[int, ...], buffer_bytes: int) -> None:
        self.sink, self.layers, self.buffer_bytes = sink, layers, buffer_bytes
        self.requests: CaptureRequests | None = None  # in a scheduler's process, with a model
        self._before_norm: tuple[Tensor, Tensor] | None = None  # normed, and what was normed

    # ------------------------------------------------------------ hooks

    def after_load(self, result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        if runner.is_draft_worker:
            return
        try:
            problem = self._ask_for_layers(runner)  # in all ranks: they must compute alike
        except Exception as error:
            problem = f"the model cannot be asked for states: {type(error).__name__}: {error}"
        try:
            if _writes():
                self.requests = self._open(runner, problem)
        except Exception:
            logger.exception("draftcore captures nothing here")

    def after_logits(
        self, result: Any, processor: Any, input_ids: Any, hidden_states: Any, lm_head: Any,
        logits_metadata: Any, aux_hidden_states: Any = None, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        before, self._before_norm = self._before_norm, None
        try:
            if self.requests is None or self.requests.problem or result is None:
                return
            if not logits_metadata.forward_mode.is_extend() or _is_recording(hidden_states):
                return
            states = {"last_hidden": hidden_states.clone()}
            inner = [k for k in self.layers if f"hidden.{k}" in self._inner]
            for layer, state in zip(inner, _one_by_one(aux_hidden_states, len(inner)), strict=True):
                states[f"hidden.{layer}"] = state.clone()
            if before is not None and before[0].data_ptr() == hidden_states.data_ptr():
                states[f"hidden.{self._last}"] = before[1]
            setattr(result, KEPT, (states, _event(hidden_states)))
        except Exception:
            logger.exception("draftcore kept no states of a forward")

    def around_prefill(
        self, original: Callable[..., Any], processor: Any, batch: Any, result: Any
    ) -> Any:
        try:
            if self.requests is not None:
                self._take(self.requests, batch, result)
        except Exception:  # nobody gets a receipt, which every client takes for a failure
            logger.exception("draftcore lost the captures of a batch")
        return original(processor, batch, result)

    def around_stream(
        self, original: Callable[..., Any], streamer: Any, reqs: Any, return_logprob: Any,
        skip_req: Any = None,
    ) -> Any:  # fmt: skip
        if self.requests is not None and (held := self.requests.held):
            held |= {req.rid: req for req in reqs if req.rid in held}
            reqs = [req for req in reqs if req.rid not in held]
        return original(streamer, reqs, return_logprob, skip_req)

    def after_turn(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        if self.requests is None or not self.requests.held:
            return
        try:
            answered: dict[bool, list[Any]] = {}
            for req, receipt in self.requests.receipts():
                _answer(req, receipt)
                answered.setdefault(req.return_logprob, []).append(req)
            for with_logprob, reqs in answered.items():  # a message costs as much as a request
                scheduler.output_streamer.stream_output(reqs, with_logprob)
        except Exception:
            logger.exception("draftcore could not send receipts")

    # ------------------------------------------------------------ pieces

    def _open(self, runner: Any, problem: str) -> CaptureRequests:
        config = runner.model_config.hf_text_config
        names = [*(f"hidden.{layer}" for layer in self.layers), "last_hidden"]
        about = {
            "version": VERSION,
            "sglang": importlib.metadata.version("sglang"),
            "sink": self.sink,
            "names": names,
            "layers": int(config.num_hidden_layers),
            "width": int(config.hidden_size),
            "vocabulary": int(config.vocab_size),
            "model": str(runner.model_config.model_path),
            "image_token": image_token(runner.model_config),
        }
        staging = None
        if not problem:
            device = next(runner.model.parameters()).device
            try:
                staging = Staging(self.sink, self.buffer_bytes, device)
            except (DraftcoreError, OSError, ValueError) as error:
                problem = str(error)
        if problem:
            logger.error("draftcore captures nothing here: %s", problem)
        return CaptureRequests(staging, about, names, problem)

    def _ask_for_layers(self, runner: Any) -> str:
        """Ask the model for its layers' outputs; return why it cannot, or ''."""
        args = runner.server_args
        num_layers = int(runner.model_config.hf_text_config.num_hidden_layers)
        self._last = num_layers - 1
        self._inner = {f"hidden.{layer}" for layer in self.layers if layer != self._last}
        if beyond := [layer for layer in self.layers if layer >= num_layers]:
            return f"DRAFTCORE_LAYERS has {beyond}, the model has layers 0..{self._last}"
        if args.pp_size > 1:
            return "pipeline parallelism spreads the layers over processes: use --pp-size 1"
        if args.speculative_algorithm is not None or getattr(
            args, "enable_return_aux_hidden_states", False
        ):
            return (
                "a draft, or --enable-return-aux-hidden-states, asks the model for layers of its "
                "own: start the server without"
            )
        model = runner.model
        inner = [layer for layer in self.layers if layer != self._last]
        if inner:
            capture.layer_setter(model)(inner)
        if self._last in self.layers:
            norm = capture.place(model, "model", "norm")
            norm.register_forward_hook(self._keep_before_norm)
        return ""

    def _keep_before_norm(self, norm: Any, args: Any, output: Any) -> None:
        """Keep the last layer's output, which the final norm returns beside the normed state."""
        try:
            if isinstance(output, tuple) and not _is_recording(output[0]):
                self._before_norm = output[0], output[1].clone()
            elif isinstance(output, Tensor):
                self._before_norm = output, args[0].clone()
        except Exception:
            self._before_norm = None

    def _take(self, requests: CaptureRequests, batch: Any, result: Any) -> None:
        if all(_asked(req) is None for req in batch.reqs):
            return
        states, ready = getattr(result.logits_output, KEPT, (None, None))
        lengths = batch.extend_lens
        if states is not None and len(states["last_hidden"]) != sum(lengths):
            states = None
        shares, first = [], 0
        for req, start, rows in zip(batch.reqs, batch.prefix_lens, lengths, strict=True):
            if (field := _asked(req)) is not None:
                share = Slice(
                    rid=req.rid, field=field, prompt=len(req.origin_input_ids),
                    start=start, first=first, rows=rows, last=req.inflight_middle_chunks <= 0,
                    new_tokens=req.sampling_params.max_new_tokens,
                    tokens=req.origin_input_ids_unpadded,
                )  # fmt: skip
                shares.append(share)
            first += rows
        answers = requests.take(shares, states, ready)
        for req in batch.reqs:
            if req.rid in answers:
                _answer(req, answers[req.rid])


def image_token(config: Any) -> int | None:
    """Return the token that stands for images; None where a server takes text alone."""
    if not config.is_image_understandable_model or config.image_token_id is None:
        return None
    return int(config.image_token_id)


def _asked(req: Any) -> Any:
    params = req.sampling_params.custom_params
    return params.get(FIELD) if isinstance(params, dict) else None


def _answer(req: Any, receipt: dict[str, Any]) -> None:
    """Put a receipt into sglang's customized info: one value for each new token, and there is one."""
    req.customized_info = {**(req.customized_info or {}), FIELD: [receipt]}


def _writes() -> bool:
    """Say whether this process is the one of its model's that puts: all have the same states."""
    context = importlib.import_module(SRT + "runtime_context")
    return int(context.get_parallel().attn_tp_rank) == 0


def _one_by_one(states: Any, count: int) -> Iterable[Tensor]:
    """Return a forward's layer states, [t, H] each, from a list or a tensor [t, count * H]."""
    if isinstance(states, Tensor):
        return states.chunk(count, dim=-1)
    return states or ()


def _is_recording(state: Tensor) -> bool:
    return state.is_cuda and torch.cuda.is_current_stream_capturing()


def _event(state: Tensor) -> Any:
    """Return an event after which the states are there, None where they are already."""
    if not state.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event

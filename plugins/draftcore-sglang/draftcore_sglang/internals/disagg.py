"""Hook a decode server that takes requests over: what that knows of sglang; see `internals`.

sglang asks its algorithm for a first draft input where a decode server builds a batch of requests
that a prefill server has computed. sglang compares the names of algorithms that it runs itself in
some forty places, so one of these keeps its name, and only that one method goes through sglang's
own hook registry; an algorithm with a worker of its own is registered as sglang means it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import torch
from torch import Tensor

from draftcore.contracts.serving import DraftInput
from draftcore.errors import UsageError
from draftcore_sglang.rows import DraftShape

METHOD = "build_disagg_draft_input"
SPECULATIVE = "sglang.srt.speculative."
ASKED = "self batch last_tokens_tensor future_map"
# What is called here, with its parameters; all of it first came together in 0.5.22.
SIGNATURES = {
    SPECULATIVE + "spec_info:SpeculativeAlgorithm." + METHOD: ASKED,
    SPECULATIVE + "spec_registry:CustomSpecAlgo." + METHOD: ASKED,
    SPECULATIVE + "spec_info:SpeculativeAlgorithm.register": (
        "name supports_overlap validate_server_args spec_class"
    ),
    SPECULATIVE + "spec_info:SpeculativeAlgorithm.is_dflash_family": "self",
    SPECULATIVE + "spec_info:SpeculativeAlgorithm.carries_draft_hidden_states": "self",
    SPECULATIVE + "eagle_utils:get_draft_recurrent_hidden_state_spec_from_config": (
        "model_config spec_algorithm"
    ),
    SPECULATIVE + "draft_worker_common:make_draft_input_v2": "bonus_tokens new_seq_lens",
    SPECULATIVE + "eagle_disaggregation:pd_first_draft_proposal": "topk_index vocab_size",
    SPECULATIVE + "eagle_disaggregation:_requires_dsa_seed_for_cuda_graph": "hf_config topk",
    "sglang.srt.plugins.hook_registry:HookRegistry.register": "target hook hook_type source",
    "sglang.srt.configs.model_config:ModelConfig.from_server_args": (
        "server_args model_path model_revision is_draft_model context_length kwargs"
    ),
    "sglang.srt.disaggregation.utils:_is_fake_transfer": "req",
    "sglang.srt.managers.schedule_batch:FINISH_ABORT": "message status_code err_type",
    "sglang.srt.managers.overlap_utils:RelayPayload.from_draft_input": "draft_input",
    "sglang.srt.runtime_context:get_spec": "",
    "sglang.srt.runtime_context:get_server_args": "",
}
Builder = Callable[[Any, Tensor, Any], Any]  # (batch, last_tokens, future_map) -> sglang's input

# ---------------------------------------------------------------- what is called


def builtin_algorithms() -> list[str]:
    """Return the names of the algorithms that sglang runs itself."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return sorted(name for name in SpeculativeAlgorithm.__members__ if name != "NONE")


def take_over_builtin(name: str, build: Builder) -> None:
    """Let `build` answer for sglang's algorithm `name`; all else stays sglang's."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    def around(original: Any, algorithm: Any, *args: Any, **kwargs: Any) -> Any:
        return (build if algorithm.name == name else functools.partial(original, algorithm))(
            *args, **kwargs
        )

    target = f"{SpeculativeAlgorithm.__module__}.{SpeculativeAlgorithm.__qualname__}.{METHOD}"
    HookRegistry.register(target, around, HookType.AROUND)


def add_algorithm(name: str, worker: str, build: Builder) -> None:
    """Register an algorithm that sglang does not have, run by the class at `worker`."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    spec = custom_algorithm(build)
    try:
        register = SpeculativeAlgorithm.register(name, supports_overlap=True, spec_class=spec)
    except ValueError as error:
        raise UsageError(f"{error}\n  offer the algorithm by another name") from None
    register(lambda server_args: _resolved(worker))


def custom_algorithm(build: Builder) -> type:
    """Make the class that stands for an algorithm of ours.

    sglang calls every method of its own algorithms on registered ones, and checks only those named
    is_ and supports_. What its base class lacks is taken from its own algorithms, where it is
    written in terms of these. Missing in 0.5.14 to 0.5.23: create_future_map, need_topk,
    carries_draft_hidden_states, get_platform_worker_cls.
    """
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    lacking = {
        name: method
        for name, method in vars(SpeculativeAlgorithm).items()
        if inspect.isfunction(method) and name[0] != "_" and not hasattr(CustomSpecAlgo, name)
    }

    def ours(self: Any, *args: Any, **kwargs: Any) -> Any:
        return build(*args, **kwargs)

    return type("DraftcoreAlgorithm", (CustomSpecAlgo,), {**lacking, METHOD: ours})


def _resolved(worker: str) -> type:
    module, _, name = worker.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"no worker at {worker!r}: {error}\n  name it module:Class") from error
    assert isinstance(found, type)
    return found


# ---------------------------------------------------------------- the batch


def served_shape(algorithm: Any) -> DraftShape:
    """Return the shape of the draft that this server runs; steps and top-k may change."""
    from sglang.srt.runtime_context import get_spec

    spec, width, dtype = get_spec(), 0, torch.float32
    if algorithm.carries_draft_hidden_states():
        path, revision = spec.speculative_draft_model_path, spec.speculative_draft_model_revision
        width, dtype = _draft_state(path, revision, algorithm)
    layers = spec.speculative_num_steps if spec.enable_multi_layer_eagle else 1
    name = str(dtype).removeprefix("torch.")
    return DraftShape(width, name, spec.speculative_eagle_topk or 1, layers)


@functools.cache
def _draft_state(path: str, revision: str | None, algorithm: Any) -> tuple[int, torch.dtype]:
    """Return width and dtype of a draft's state: those of its own config, as on the wire."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_server_args
    from sglang.srt.speculative.eagle_utils import get_draft_recurrent_hidden_state_spec_from_config

    config = ModelConfig.from_server_args(
        get_server_args(), model_path=path, model_revision=revision, is_draft_model=True
    )
    width, dtype = get_draft_recurrent_hidden_state_spec_from_config(config, algorithm)
    return int(width), dtype


def was_sent(request: Any) -> bool:
    """Say whether a prefill server stands behind a request; none does for warm-up and health."""
    from sglang.srt.disaggregation.utils import _is_fake_transfer

    return not _is_fake_transfer(request)


def abort(request: Any, message: str) -> None:
    """End a request of a batch that is being built, with an error for whoever sent it."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    request.to_finish = FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR)


# ---------------------------------------------------------------- sglang's own structures


def draft_input(found: DraftInput, batch: Any) -> Any:
    """Make sglang's first draft input: DFlashDraftInputV2 for its family, else EagleDraftInput."""
    from sglang.srt.speculative.draft_worker_common import make_draft_input_v2

    if batch.spec_algorithm.is_dflash_family():
        made = make_draft_input_v2(bonus_tokens=found.last_tokens_B, new_seq_lens=batch.seq_lens)
    else:
        made = _eagle_input(found, batch)
    if batch.enable_overlap:
        made.future_indices = batch.req_pool_indices
    return made


def _eagle_input(found: DraftInput, batch: Any) -> Any:
    """Do as sglang's own builder, without the seed of sparse attention: no draft of ours reads it."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative import eagle_disaggregation as eagle
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    spec, probs = get_spec(), None
    if spec.speculative_use_rejection_sampling:
        # The prefill side sends no distribution: what it proposes counts as certain.
        probs = eagle.pd_first_draft_proposal(found.topk_index_BK, batch.model_config.vocab_size)
        probs = probs if spec.enable_multi_layer_eagle else probs[:, 0]
    needs_seed = eagle._requires_dsa_seed_for_cuda_graph(
        batch.model_config.hf_config, spec.speculative_eagle_topk
    )
    return EagleDraftInput(
        topk_p=found.topk_p_BK, topk_index=found.topk_index_BK, draft_probs=probs,
        hidden_states=found.hidden_BH, bonus_tokens=found.last_tokens_B,
        capture_hidden_mode=CaptureHiddenMode.LAST, cuda_graph_compatible=not needs_seed,
    )  # fmt: skip


def relayed(made: Any) -> Any:
    """Return what the relay keeps of a draft input: only the token of DFlash's."""
    from sglang.srt.managers.overlap_utils import RelayPayload
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    if isinstance(made, EagleDraftInput):
        return RelayPayload.from_draft_input(made)
    return RelayPayload(bonus_tokens=made.bonus_tokens)

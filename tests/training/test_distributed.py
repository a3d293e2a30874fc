"""Several ranks: the update that one would have made, equal replicas, and an end for all.

Ranks are real processes over gloo, forked from one that has imported everything; what they do is one
of the functions under "what a rank does".
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftcore.config import TrainConfig
from draftcore.contracts.algorithm import Draft, DraftBatch, StepContext, TrainingDefaults
from draftcore.errors import DraftcoreError, UsageError
from draftcore.training.distributed import ALONE, Ranks, join, require_one, several
from draftcore.training.sharding import require_shardable

if TYPE_CHECKING:
    from tests.training.conftest import NewRun, Run

Server = subprocess.Popen[str]
SOON = 90.0  # seconds in which ranks end, however slow the machine
SERVER = """
import importlib.util, json, os, signal, sys, time
import torch.distributed.fsdp
def load(path):
    spec = importlib.util.spec_from_file_location("ranks_test", path)
    module = sys.modules["ranks_test"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
module = load(sys.argv[1])
for line in sys.stdin:
    order, pids = json.loads(line), []
    for env in order["ranks"]:
        if pid := os.fork():
            pids.append(pid)
            continue
        os.environ.update(env)
        output = open(os.path.join(order["folder"], "output." + env["RANK"]), "w")
        os.dup2(output.fileno(), 1), os.dup2(output.fileno(), 2)
        module.be_a_rank(order["work"], order["folder"], order["settings"])
    deadline, codes = time.monotonic() + order["seconds"], {}
    while len(codes) < len(pids):
        late = time.monotonic() > deadline
        for pid in pids:
            if pid not in codes:
                if late:
                    os.kill(pid, signal.SIGKILL)
                done, status = os.waitpid(pid, 0 if late else os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    print(json.dumps([codes[pid] for pid in pids]), flush=True)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command, pipe = [sys.executable, "-c", SERVER, __file__], subprocess.PIPE
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


class Ended:
    """How the ranks of a test ended, and what they left."""

    def __init__(self, folder: Path, codes: list[int]) -> None:
        self.folder, self.codes = folder, codes

    def output(self, rank: int) -> str:
        """What a rank printed, but for progress."""
        lines = (self.folder / f"output.{rank}").read_text().splitlines()
        return "".join(f"{line}\n" for line in lines if not line.startswith("training "))

    def said(self) -> list[Any]:
        """What each rank wrote of itself."""
        everything = "".join(map(self.output, range(len(self.codes))))
        assert set(self.codes) == {0}, everything
        return [
            json.loads((self.folder / f"said.{rank}").read_text())
            for rank in range(len(self.codes))
        ]

    def weights(self) -> list[dict[str, Tensor]]:
        return [
            load_file(self.folder / f"weights.{rank}.safetensors")
            for rank in range(len(self.codes))
        ]


Start = Callable[..., Ended]


@pytest.fixture
def start(server: Server, tmp_path: Path) -> Start:
    """Let so many ranks do some work, and wait for them."""

    def start(work: Callable[..., Any], ranks: int = 2, **settings: Any) -> Ended:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {"WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
        order = {
            "work": work.__name__,
            "folder": str(tmp_path),
            "settings": settings,
            "seconds": SOON,
            "ranks": [
                {**common, "RANK": f"{r}", "LOCAL_RANK": f"{r}", "GLOO_SOCKET_IFNAME": "lo"}
                for r in range(ranks)
            ],
        }
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        return Ended(tmp_path, json.loads(server.stdout.readline()))

    return start


# ---------------------------------------------------------------- what a rank does


def be_a_rank(work: str, folder: str, settings: dict[str, Any]) -> None:
    """Join the others, work, and say what came of it; ends the process."""
    code = 0
    try:
        with join(TrainConfig(device="cpu", rank_timeout=30)) as ranks:
            said = globals()[work](ranks, Path(folder), **settings)
            (Path(folder) / f"said.{ranks.rank}").write_text(json.dumps(said))
    except SystemExit as ended:
        code = int(ended.code or 0)
    except DraftcoreError as error:
        print(f"error: {error}", flush=True)
        code = error.exit_code
    except BaseException as error:
        print(repr(error), flush=True)
        code = 3
    os._exit(code)


def toy(folder: Path, ranks: Ranks = ALONE, **settings: Any) -> Run:
    path = Path(__file__).with_name("conftest.py")
    spec = importlib.util.spec_from_file_location("toy_run", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["toy_run"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    options = module.Options(settings.pop("dropout", 0.0))
    run: Run = module.Run(folder / "run", ranks=ranks, options=options, **settings)
    return run


def train(
    ranks: Ranks,
    folder: Path,
    *,
    bad: dict[str, str] | None = None,
    stop: list[int] | None = None,
    dry: list[int] | None = None,
    **settings: Any,
) -> Any:
    """Train the toy; `stop` and `dry` are for each rank after how many batches that happens."""
    run = toy(folder, ranks, **settings)
    run.bad = {int(row): why for row, why in (bad or {}).items()}
    run.stop_after = (stop or [10**9] * ranks.size)[ranks.rank]
    run.dry_after = (dry or [10**9] * ranks.size)[ranks.rank]
    reason, _ = run.train()
    save_file(run.weights(), folder / f"weights.{ranks.rank}.safetensors")
    return {
        "reason": reason,
        "step": run.trainers[0].step,
        "skipped": {str(row): why for row, why in run.skipped.items()},
        "read": run.read,
        "saved": [at for kind, _, at in run.observers.said if kind == "saved"],
        "grads": run.trainers[0].metrics,
    }


def fail(ranks: Ranks, folder: Path, *, rank: int, usage: bool, foreseen: bool) -> None:
    """Train until one rank meets an error of its own in a loss, as others wait for its gradient."""
    run = toy(folder, ranks, rows=40).build()

    def wrong(batch: DraftBatch, context: StepContext, loss: Tensor) -> Tensor:
        if context.step == 2 and ranks.rank == rank:
            if not foreseen:
                raise RuntimeError("out of memory")
            raise (UsageError if usage else DraftcoreError)(
                "this rank has had enough\n  let it rest"
            )
        return loss

    run.algorithms[""].wrong = wrong
    run.train()


def poisoned(ranks: Ranks, folder: Path, *, row: int) -> None:
    """Train with a row whose loss is not finite, on whichever rank has it."""
    run = toy(folder, ranks, rows=12).build()
    run.algorithms[""].wrong = lambda batch, context, loss: (
        loss * torch.inf if f"s{row}" in {one.feature_id for one in batch.ids} else loss
    )
    run.train()


def talk(ranks: Ranks, folder: Path) -> Any:
    """All that ranks say to each other."""
    found: dict[str, Any] = {}
    found["first"] = ranks.first(lambda: folder, pack=str, unpack=lambda text: Path(text)).name
    found["nothing"] = ranks.first(lambda: None)
    for name, size in (("short", 3), ("long", 5000), ("again", 3), ("huge", 200000)):
        said = ranks.agree({"rank": ranks.rank, "text": "é" * (size * (1 + ranks.rank))})
        found[name] = [[one["rank"], len(one["text"])] for one in said]
    errors: list[str] = []

    def refuse() -> None:
        raise UsageError("rank 0 refuses\n  ask another")

    try:
        ranks.first(refuse)
    except UsageError as error:
        errors.append(f"{ranks.agreed(error)} {error}")
    for rank in range(ranks.size):
        try:
            with ranks.together():
                if ranks.rank >= rank:
                    raise DraftcoreError(f"of rank {ranks.rank}")
        except DraftcoreError as error:
            errors.append(f"{ranks.agreed(error)} {error}")
    with ranks.together():
        pass
    found["errors"] = errors
    found["sum"] = ranks.sum(torch.tensor([1.0, ranks.rank])).tolist()
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor(7),
        "c": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
        "d": torch.zeros(0, 3),
        "e": torch.tensor([True, False]),
    }
    read = ranks.spread(lambda: tensors)
    found["spread"] = [
        read[k].dtype == t.dtype and read[k].shape == t.shape and torch.equal(read[k], t)
        for k, t in tensors.items()
    ]
    torch.manual_seed(3)
    ranks.reseed(3, 8)
    states = ranks.collect({"rng.cpu": torch.get_rng_state()})
    found["states"] = sorted(states)
    found["own"] = torch.equal(ranks.pick(states)["rng.cpu"], torch.get_rng_state())
    found["random"] = torch.rand(1).item()
    return found


def gradients(ranks: Ranks, folder: Path) -> Any:
    """Sum gradients over the ranks: one of which rank 1 lacks a part, one that nobody has."""
    weights = [
        nn.Parameter(torch.zeros(2)),
        nn.Parameter(torch.zeros(3)),
        nn.Parameter(torch.zeros(1)),
    ]
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    found = []
    for step in range(2):
        if step:
            for weight in weights:
                if weight.grad is not None:
                    weight.grad.zero_()
        (weights[0].sum() * (1 + ranks.rank + step)).backward()  # type: ignore[no-untyped-call]
        if ranks.rank == 0:
            (weights[1].sum() * 5).backward()  # type: ignore[no-untyped-call]
        scalars = ranks.add_up([weights[0], frozen, *weights[1:]], torch.tensor([1.0, ranks.rank]))
        grads = [None if w.grad is None else w.grad.tolist() for w in weights]
        found.append([grads, scalars.tolist(), frozen.grad is None])
    return found


# ---------------------------------------------------------------- the update


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_end_with_the_weights_of_one_and_equal_to_the_bit(
    start: Start, new_run: NewRun, ranks: int
) -> None:
    """Steps of five batches leave a rank with fewer than others, and the last, of one, with none."""
    settings: dict[str, Any] = {"rows": 21, "accumulate": 5, "batch": 1, "weight_decay": 0.1}
    one = new_run("one", **settings)
    one.train()
    assert len(one.plan.step(one.plan.total_steps - 1)) == 1
    ended = start(train, ranks, **settings)
    said = ended.said()
    assert {(one["reason"], one["step"]) for one in said} == {("complete", 5)}
    assert sum(one["read"] for one in said) == 21
    first, *others = ended.weights()
    for other in others:
        assert all(torch.equal(other[name], first[name]) for name in first)
    for name, wanted in one.weights().items():
        torch.testing.assert_close(first[name], wanted, rtol=1e-4, atol=1e-5)
    lines = [json.loads(x) for x in (ended.folder / "run/metrics.jsonl").read_text().splitlines()]
    for key in ("loss", "error", "grad_norm"):
        assert [x[key] for x in lines] == pytest.approx([x[key] for x in one.lines()], rel=1e-4)


def test_a_rank_without_a_gradient_adds_zero_and_a_weight_of_nobodys_use_has_none(
    start: Start,
) -> None:
    said = start(gradients).said()
    assert said[0] == said[1]
    assert said[0] == [
        [[[3.0, 3.0], [5.0, 5.0, 5.0], None], [2.0, 1.0], True],
        [[[5.0, 5.0], [5.0, 5.0, 5.0], None], [2.0, 1.0], True],
    ]


def test_rows_that_one_rank_skips_are_skipped_by_all_and_kept(
    start: Start, new_run: NewRun
) -> None:
    settings: dict[str, Any] = {"rows": 16, "accumulate": 4, "epochs": 2}
    bad = {str(row): f"row {row} is odd" for row in (1, 6, 12)}
    said = start(train, bad=bad, **settings).said()
    assert said[0]["skipped"] == said[1]["skipped"] == bad
    one = new_run("one", **settings)
    one.bad = {int(row): why for row, why in bad.items()}
    one.train()
    found = new_run("run", **settings).found()
    assert found is not None
    assert sorted(row for row, _ in found.state["skipped"]) == [1, 6, 12]
    for name, wanted in load_file(found.folder / "draft.safetensors").items():
        torch.testing.assert_close(wanted, one.weights()[name], rtol=1e-4, atol=1e-5)


def test_random_numbers_differ_between_ranks_and_weights_do_not(start: Start) -> None:
    ended = start(train, rows=16, accumulate=4, dropout=0.5)
    assert ended.said()[0]["saved"] == [2]
    first, second = ended.weights()
    assert all(torch.equal(second[name], first[name]) for name in first)
    kept = load_file(ended.folder / "run/checkpoints/step-00000002/optimizer.safetensors")
    assert not torch.equal(kept["rng.cpu"], kept["rng.cpu.1"])


def test_ranks_resume_each_with_its_own_random_numbers(start: Start, new_run: NewRun) -> None:
    settings: dict[str, Any] = {"rows": 32, "accumulate": 4, "dropout": 0.5}
    straight = start(train, **settings)
    wanted = straight.weights()[0]
    (straight.folder / "run").rename(straight.folder / "straight")
    stopped = start(train, stop=[10**9, 3], **settings)
    assert [one["step"] for one in stopped.said()] == [2, 2]
    resumed = start(train, **settings)
    assert [one["reason"] for one in resumed.said()] == ["complete"] * 2
    assert all(torch.equal(resumed.weights()[0][name], wanted[name]) for name in wanted)


def test_one_rank_goes_on_where_two_stopped(start: Start, new_run: NewRun) -> None:
    settings: dict[str, Any] = {"rows": 32, "accumulate": 4}
    straight = new_run("straight", **settings)
    straight.train()
    assert [one["step"] for one in start(train, stop=[3, 10**9], **settings).said()] == [2, 2]
    alone = new_run("run", **settings)
    assert alone.train() == ("complete", {})
    assert alone.losses() == pytest.approx(straight.losses(), rel=1e-4)
    for name, wanted in straight.weights().items():
        torch.testing.assert_close(alone.weights()[name], wanted, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_of_one_rank_ends_all_after_the_same_step(start: Start, rank: int) -> None:
    stop = [10**9, 10**9]
    stop[rank] = 3
    ended = start(train, rows=40, accumulate=4, stop=stop)
    said = ended.said()
    assert [(one["reason"], one["step"], one["saved"]) for one in said] == [
        ("interrupted", 2, [2])
    ] * 2
    first, second = ended.weights()
    assert all(torch.equal(second[name], first[name]) for name in first)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_for_which_one_rank_lacks_a_batch_is_taken_by_none(start: Start, rank: int) -> None:
    dry = [10**9, 10**9]
    dry[rank] = 3
    ended = start(train, rows=40, accumulate=4, dry=dry)
    assert [(one["reason"], one["step"]) for one in ended.said()] == [("interrupted", 1)] * 2
    first, second = ended.weights()
    assert all(torch.equal(second[name], first[name]) for name in first)


@pytest.mark.parametrize(("rank", "usage"), [(0, False), (1, True)])
def test_an_error_of_one_rank_ends_the_other_with_it(start: Start, rank: int, usage: bool) -> None:
    """Also with its exit status; gloo may add what it thinks of a peer that is gone."""
    ended = start(fail, rank=rank, usage=usage, foreseen=True)
    assert ended.codes == [1 + usage] * 2
    assert ended.output(rank) == "error: this rank has had enough\n  let it rest\n"
    assert ended.output(1 - rank).startswith(
        f"error: rank {rank} failed\n  this rank has had enough\n    let it rest\n"
    )


def test_an_error_that_nobody_foresaw_ends_the_other_with_its_name(start: Start) -> None:
    ended = start(fail, rank=1, usage=False, foreseen=False)
    assert ended.codes == [1, 3]
    assert "rank 1 failed\n  RuntimeError: out of memory" in ended.output(0)


def test_a_gradient_that_is_not_finite_is_refused_by_all_and_told_once(start: Start) -> None:
    """Whichever rank has the row: rank 0 tells of it."""
    for row in (0, 5):
        ended = start(poisoned, row=row)
        assert ended.codes == [1, 1]
        assert "is not finite" in ended.output(0)
        assert f"s{row}" in ended.output(0)
        assert ended.output(1) == ""


# ---------------------------------------------------------------- what ranks say


def test_what_ranks_say_reaches_all_of_them(start: Start) -> None:
    ended = start(talk, 3)
    said = ended.said()
    for one in said:
        assert one["first"] == ended.folder.name
        assert one["nothing"] is None
        for name, size in (("short", 3), ("long", 5000), ("again", 3), ("huge", 200000)):
            assert one[name] == [[rank, size * (1 + rank)] for rank in range(3)]
        assert one["errors"] == [
            "True rank 0 refuses\n  ask another",
            "True of rank 0",
            "True of rank 1",
            "True of rank 2",
        ]
        assert one["sum"] == [3.0, 3.0]
        assert one["spread"] == [True] * 5
        assert one["states"] == ["rng.cpu", "rng.cpu.1", "rng.cpu.2"]
        assert one["own"] is True
    assert len({one["random"] for one in said[:2]}) == 2


def test_random_numbers_of_any_two_ranks_differ(start: Start) -> None:
    assert len({one["random"] for one in start(talk, 3).said()}) == 3


def test_one_rank_says_the_same_to_itself() -> None:
    assert ALONE.first(lambda: 7, pack=str) == 7
    assert ALONE.agree({"stop": True}) == [{"stop": True}]
    with pytest.raises(DraftcoreError, match="mine"), ALONE.together():
        raise DraftcoreError("mine")
    assert ALONE.spread(lambda: {}) == {}
    with join(TrainConfig(device="cpu")) as ranks:
        assert ranks is ALONE


def test_a_half_environment_is_refused_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(
        UsageError, match=r"WORLD_SIZE is 2, but the environment lacks .*MASTER_PORT"
    ):
        several()
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    assert several() == 2
    with pytest.raises(UsageError, match="start this one without torchrun"):
        require_one()


# ---------------------------------------------------------------- drafts that cannot be sharded


def draft(module: nn.Module, *wrap_units: str) -> Draft:
    defaults = TrainingDefaults(lr=1e-3, warmup_ratio=0.0, clip=1.0)
    groups = [{"params": list(module.parameters())}]
    return Draft(module, {}, defaults, groups, wrap_units=wrap_units)


def test_a_weight_that_two_wrap_units_share_is_named() -> None:
    inner = nn.Linear(3, 3), nn.Linear(3, 3)
    inner[0].weight = inner[1].weight
    module = nn.Sequential(nn.Linear(3, 3), nn.Sequential(*inner))
    require_shardable(draft(module, "0", "1"))
    with pytest.raises(DraftcoreError, match=r"shared by the wrap units '1' and '1\.1'"):
        require_shardable(draft(module, "1.1", "1"))


def test_a_weight_without_a_dimension_is_named() -> None:
    module = nn.Linear(3, 3)
    module.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(DraftcoreError, match="parameter scale has no dimension"):
        require_shardable(draft(module))

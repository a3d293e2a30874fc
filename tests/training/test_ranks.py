"""Several ranks: the update that one would have made, equal replicas, and an end for all.

Ranks are real processes over gloo; what they do is one of the functions under "what a rank does".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftcore import hookimpl
from draftcore.config import TrainConfig
from draftcore.contracts.algorithm import DraftBatch, StepContext, Stop
from draftcore.contracts.run import Ranks
from draftcore.errors import DraftcoreError, UsageError
from draftcore.plugins.registry import Registry, load_plugins
from draftcore.training.ranks import SINGLE_RANK, join
from tests.ranks import start_rank
from tests.training.conftest import NewRun, Run, same

SOON = 90.0  # seconds in which ranks end, however slow the machine
NEVER = [10**9, 10**9]


class Ended:
    """How the ranks of a test ended, and what they left."""

    def __init__(self, folder: Path, codes: list[int | None]) -> None:
        self.folder, self.codes = folder, codes

    def output(self, rank: int) -> str:
        """What a rank printed, but for progress."""
        lines = (self.folder / f"output.{rank}").read_text().splitlines()
        return "".join(f"{line}\n" for line in lines if not line.startswith("training "))

    def said(self) -> list[Any]:
        """What each rank wrote of itself."""
        everyone = range(len(self.codes))
        assert set(self.codes) == {0}, "".join(map(self.output, everyone))
        return [json.loads((self.folder / f"said.{rank}").read_text()) for rank in everyone]

    def weights(self) -> dict[str, Tensor]:
        """The weights, which are equal on all ranks."""
        files = sorted(self.folder.glob("weights.*"))
        first, *others = [dict[str, Tensor](load_file(file)) for file in files]
        assert len(others) == len(self.codes) - 1
        assert all(same(other, first) for other in others)
        return first


Start = Callable[..., Ended]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Let so many ranks do some work, and wait for them."""

    def start(work: Callable[..., Any], ranks: int = 2, **settings: Any) -> Ended:
        what = be_a_rank, work, tmp_path, settings
        processes = [start_rank(tmp_path, rank, ranks, *what) for rank in range(ranks)]
        for process in processes:
            process.join(SOON)
            process.kill()
            process.join()
        return Ended(tmp_path, [process.exitcode for process in processes])

    return start


def be_a_rank(work: Callable[..., Any], folder: Path, settings: dict[str, Any]) -> None:
    """Join the others, work, and say what came of it; ends the process."""
    try:
        with join(TrainConfig(device="cpu", rank_timeout=30), load_plugins()) as ranks:
            said = work(ranks, folder, **settings)
            (folder / f"said.{ranks.rank}").write_text(json.dumps(said))
    except DraftcoreError as error:
        print(f"error: {error}", flush=True)
        raise SystemExit(error.exit_status) from None


def train(
    ranks: Ranks, folder: Path, *, bad: Any = (), stop: Any = NEVER, dry: Any = NEVER, **more: Any
) -> Any:
    """Train the toy; `stop` and `dry` are for each rank after how many batches that happens."""
    run = Run(folder / "run", ranks=ranks, **more)
    run.bad = dict(bad)
    run.stop_after, run.dry_after = [*stop, *NEVER][ranks.rank], [*dry, *NEVER][ranks.rank]
    reason, _ = run.train()
    save_file(run.weights(), folder / f"weights.{ranks.rank}")
    skipped = sorted(run.skipped.items())
    saved = [at for kind, _, at in run.observers.said if kind == "saved"]
    why = [[stop.plugin, stop.reason] for stop in run.stopped.values()]
    ended = [reason, run.trainers[0].step, *why]
    return {"ended": ended, "saved": saved, "skipped": skipped, "read": run.read}


def fail(ranks: Ranks, folder: Path, *, rank: int, error: Exception) -> None:
    """Train until one rank meets an error of its own in a loss, as others wait for its gradient."""
    run = Run(folder / "run", ranks=ranks, rows=40).build()

    def wrong(batch: DraftBatch, context: StepContext, loss: Tensor) -> Tensor:
        if context.step == 3 and ranks.rank == rank:
            raise error
        return loss

    run.algorithms[""].wrong = wrong
    run.train()


def talk(ranks: Ranks, folder: Path) -> Any:
    """All that ranks say to each other."""
    found: dict[str, Any] = {"rank 0": ranks.on_rank0(lambda: folder).name, "long": []}
    for size in (3, 200000, 3):
        said = ranks.all_gather("é" * (size * (1 + ranks.rank)))
        found["long"].append([len(one) for one in said])
    errors: list[str] = []

    def refuse() -> None:
        raise UsageError("rank 0 refuses")

    try:
        ranks.on_rank0(refuse)
    except UsageError as error:
        errors.append(f"{error is ranks.last_common_error} {error}")
    for rank in range(ranks.size):
        try:
            with ranks.raise_on_all():
                if ranks.rank >= rank:
                    raise DraftcoreError(f"of rank {ranks.rank}")
        except DraftcoreError as error:
            errors.append(f"{error is ranks.last_common_error} {error}")
    with ranks.raise_on_all():
        pass
    return {**found, "errors": errors}


@pytest.mark.parametrize(("ranks", "terms"), [(2, 1), (3, 1), (2, 3)])
def test_ranks_end_with_the_weights_of_one(
    start: Start, new_run: NewRun, ranks: int, terms: int
) -> None:
    """Steps of five batches leave a rank with fewer than others, and the last, of one, with none.

    Of several terms, of which each has gradients and a denominator of its own, as of one.
    """
    settings: dict[str, Any] = {"rows": 21, "accumulate": 5, "batch": 1, "weight_decay": 0.1}
    settings["terms"] = terms
    one = new_run("one", **settings).trained()
    assert len(one.plan.step(one.plan.total_steps - 1)) == 1
    ended = start(train, ranks, **settings)
    said = ended.said()
    assert [one["ended"] for one in said] == [["complete", 5]] * ranks
    assert said[0]["saved"] == [5]
    assert sum(one["read"] for one in said) == 21
    weights = ended.weights()
    for name, wanted in one.weights().items():
        torch.testing.assert_close(weights[name], wanted, rtol=1e-4, atol=1e-5)
    for key in ("loss", "error", "grad_norm"):
        ours, theirs = ([line[key] for line in run.lines()] for run in (new_run(), one))
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_rows_that_one_rank_skips_are_skipped_by_all(start: Start, new_run: NewRun) -> None:
    settings: dict[str, Any] = {"rows": 16, "accumulate": 4, "epochs": 2}
    bad = {row: f"row {row} is odd" for row in (1, 6, 12)}
    said = start(train, bad=bad, **settings).said()
    assert said[0]["skipped"] == said[1]["skipped"] == [list(item) for item in bad.items()]
    one = new_run("one", **settings)
    one.bad = bad
    one.train()
    found = new_run("run", **settings).last()
    assert [row for row, _ in found.state["skipped"]] == [1, 6, 12]
    for name, wanted in load_file(found.folder / "draft.safetensors").items():
        torch.testing.assert_close(wanted, one.weights()[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "step"),
    [({"stop": [3, NEVER[0]]}, 2), ({"dry": [NEVER[0], 3]}, 1), ({"dry": [3, NEVER[0]]}, 1)],
    ids=["asked to stop", "rank 1 lacks a batch", "rank 0 lacks a batch"],
)
def test_a_stop_of_one_rank_ends_all_after_one_step(
    start: Start, settings: dict[str, Any], step: int
) -> None:
    """The step at which it is asked; not one for which a batch does not come."""
    ended = start(train, rows=40, accumulate=4, **settings)
    said = ended.said()
    assert [one["ended"] for one in said] == [["interrupted", step]] * 2
    assert said[0]["saved"] == [step]
    assert ended.weights()


class Impatient:
    """Stops training after the second step; all ranks have it, and rank 0 alone asks it."""

    @hookimpl
    def gradients_ready(self, gradients: Mapping[str, Tensor]) -> dict[str, float]:
        return {"largest": max(float(one.abs().max()) for one in gradients.values())}

    @hookimpl
    def step_finished(self, step: int) -> Stop | None:
        return Stop("two are enough") if step == 2 else None


def test_an_observers_stop_ends_all_ranks_after_one_step(start: Start, new_run: NewRun) -> None:
    """And what observers see of gradients is the sum over ranks, divided."""
    settings: dict[str, Any] = {"rows": 21, "accumulate": 4, "batch": 1, "plugins": [Impatient()]}
    ended = start(train, **settings)
    said = ended.said()
    assert [one["ended"] for one in said] == [["stopped", 2, ["impatient", "two are enough"]]] * 2
    assert said[0]["saved"] == [2]
    largest = [line["largest"] for line in new_run("one", **settings).trained().lines()]
    assert [line["largest"] for line in new_run().lines()] == pytest.approx(largest, rel=1e-4)


@pytest.mark.parametrize(
    ("rank", "error", "code"), [(0, DraftcoreError, 1), (1, UsageError, 2), (1, RuntimeError, 1)]
)
def test_an_error_of_one_rank_ends_the_other(
    start: Start, rank: int, error: type[Exception], code: int
) -> None:
    """Also with its exit status; gloo may add what it thinks of a peer that is gone."""
    ended = start(fail, rank=rank, error=error("this rank has had enough\n  let it rest"))
    assert ended.codes == [code] * 2
    name = "" if issubclass(error, DraftcoreError) else f"{error.__name__}: "
    assert f"{name}this rank has had enough\n  let it rest\n" in ended.output(rank)
    assert f"rank {rank}" not in ended.output(rank)
    told = f"error: rank {rank} failed\n  {name}this rank has had enough\n    let it rest\n"
    assert ended.output(1 - rank).startswith(told)


def test_what_ranks_say_reaches_all_of_them_also_one_alone(start: Start, tmp_path: Path) -> None:
    def heard(ranks: int) -> dict[str, Any]:
        long = [[size * (1 + rank) for rank in range(ranks)] for size in (3, 200000, 3)]
        errors = ["True rank 0 refuses", *(f"True of rank {rank}" for rank in range(ranks))]
        return {"rank 0": tmp_path.name, "long": long, "errors": errors}

    assert start(talk, 3).said() == [heard(3)] * 3
    with join(TrainConfig(device="cpu"), load_plugins()) as ranks:
        assert ranks is SINGLE_RANK
    assert talk(SINGLE_RANK, tmp_path) == heard(1)


@pytest.mark.parametrize("name", ["RANK", "MASTER_PORT"])
def test_ranks_without_plugin_or_half_an_environment_say_what_is_lacking(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    lacking = "there is no ranks 'processes'\n(.*\n)*  pip install 'draftcore\\[standard\\]'"
    with pytest.raises(UsageError, match=lacking), join(TrainConfig(), Registry(())):
        pass
    for other in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(other, "0")
    monkeypatch.delenv(name)
    lacking = f"WORLD_SIZE is 2, but the environment lacks {name}\n"
    with pytest.raises(UsageError, match=lacking), join(TrainConfig(device="cpu"), load_plugins()):
        pass

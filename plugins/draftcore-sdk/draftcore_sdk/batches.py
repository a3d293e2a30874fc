"""What every kind of batches must do: bring what others capture. See `draftcore_sdk` for how to use it.

Runs of the small algorithm that `new-plugin` writes are trained here, as `draftcore train --trainer` does,
and what comes of them is that of runs that capture for themselves.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

import draftcore
from draftcore_sdk.algorithm_training import require_same_bits
from draftcore_sdk.example import STOP_AT, STOPPER
from draftcore_sdk.internals import Registry, load_plugins
from draftcore_sdk.running import SMALL, small_algorithm
from draftcore_sdk.suite import Suite, child_environment, offer_of, registry_of
from draftcore_sdk.targets import conversations, tiny_target

SOON = 60.0  # seconds within which it comes on a busy machine
BAD = 5  # a row that the second of these cannot capture
# Loose plugins around the run's capture: the first attempt at each batch fails; a row cannot be captured.
STUMBLES = """
from draftcore import hookimpl
from draftcore.contracts.capture import BadRows
from draftcore.errors import DraftcoreError
from pathlib import Path

class Capture:
    def __init__(self, capture):
        self.capture, self.close = capture, capture.close

    def features(self, batches):
        for batch in batches:
            {what}
            yield from self.capture.features([batch])

@hookimpl(wrapper=True)
def capture(target):
    return Capture((yield))
"""
FIRST = """seen = Path(target_folder, f"tried-{batch.index}")
            if batch.ids != ("check",) and not seen.exists():
                seen.touch()
                raise DraftcoreError("the capture stumbles")"""
ROW = f"""if {BAD} in batch.rows:
                raise BadRows({{batch.rows.index({BAD}): "it is torn"}})"""


@contextmanager
def by_producers(file: Path, plugins: Sequence[Path]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start `draftcore produce` on a run's YAML, with one-file plugins."""
    loose = [part for plugin in plugins for part in ("--plugin", str(plugin))]
    command = [sys.executable, "-m", "draftcore", *loose, "produce", str(file)]
    with open(file.with_suffix(".log"), "wb") as log:
        producer = subprocess.Popen(command, env=child_environment(), stdout=log, stderr=log)
    try:
        yield [producer]
    finally:
        producer.kill()
        producer.wait()


class BatchesSuite(Suite):
    """Standard tests of batches: the bits of a run that captures for itself, whatever fails.

    A subclass sets `plugin`, and `producing`.
    """

    def producing(
        self, file: Path, plugins: Sequence[Path]
    ) -> AbstractContextManager[list[subprocess.Popen[bytes]]]:
        """Start what captures for the run of a YAML file, with one-file plugins; yield its processes.

        Nothing, where the trainer starts it itself. Those for draftcore's own verb: `by_producers`.
        """
        pytest.skip("only a test file can say who captures: override producing")

    by_producers = staticmethod(by_producers)

    @pytest.fixture
    def base(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        base = tmp_path_factory.getbasetemp()
        if not (base / "batches-target").exists():
            tiny_target(base / "batches-target", num_hidden_layers=12)
        return base

    def train(self, base: Path, folder: Path, *plugins: Path, elsewhere: bool) -> dict[str, Any]:
        """Train a run, whose batches come from elsewhere; return what came of it."""
        offer, extras = offer_of(self.plugin, "batches", self.name), self.plugin.split()[1:]
        folder.mkdir(exist_ok=True)
        loose = [small_algorithm(base), *plugins, *filter(None, [self.loose])]
        installed = load_plugins(files=loose).installed
        modules = {plugin.module for plugin in installed}
        mine = registry_of(self.plugin).installed
        registry = Registry([*installed, *(p for p in mine if p.module not in modules)])
        names = {plugin.module: plugin.name for plugin in registry.installed}
        config = {
            "run": str(folder / "run"),
            "target": {"path": str(base / "batches-target"), "device": "cpu"},
            "data": {"train": str(conversations(folder / "train.jsonl", 8)), "max_skipped": 0.5},
            "algorithm": {"name": SMALL},
            "plugins": [names[module] for module in extras],
            "batches": offer.name if elsewhere else "queue",
            "train": {"batch": 2, "epochs": 2, "accumulate": 1, "device": "cpu", "log_every": 1},
        }
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(config))
        if not elsewhere:
            reason, codes = draftcore.train(file, registry=registry).reason, list[int]()
        else:
            with self.producing(file, loose) as processes:
                reason = draftcore.train(file, trainer=True, registry=registry).reason
                codes = [process.wait(SOON) for process in processes if reason == "complete"]
        lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
        last = sorted((folder / "run" / "checkpoints").glob("step-*"))[-1]
        skipped = json.loads((last / "state.json").read_text())["skipped"]
        weights = load_file(last / "draft.safetensors")
        return {
            "reason": reason, "codes": codes, "losses": losses, "skipped": skipped, "weights": weights
        }  # fmt: skip

    def require_same(self, found: dict[str, Any], right: dict[str, Any]) -> None:
        assert found["reason"] == right["reason"] == "complete"
        assert [row for row, _ in found["skipped"]] == [row for row, _ in right["skipped"]]
        assert found["losses"] == right["losses"]
        require_same_bits(found["weights"], right["weights"])

    def around(self, folder: Path, what: str) -> Path:
        """Write a wrapper of the run's capture."""
        file = folder / f"around_{abs(hash(str(folder)))}.py"
        text = STUMBLES.replace("{what}", what).replace("target_folder", repr(str(folder)))
        file.write_text(text)
        return file

    # ------------------------------------------------------------ bits

    def test_a_run_is_that_which_captures_for_itself(self, base: Path, tmp_path: Path) -> None:
        """To the bit: each row once an epoch, in the plan's order and in the plan's batches."""
        here = self.train(base, tmp_path / "here", elsewhere=False)
        self.require_same(self.train(base, tmp_path / "there", elsewhere=True), here)

    def test_a_batch_whose_capture_failed_is_tried_again(self, base: Path, tmp_path: Path) -> None:
        here = self.train(base, tmp_path / "here", elsewhere=False)
        stumbles = self.around(tmp_path, FIRST)
        found = self.train(base, tmp_path / "there", stumbles, elsewhere=True)
        assert list(tmp_path.glob("tried-*")), "the run's capture was not asked"
        self.require_same(found, here)

    def test_a_row_that_cannot_be_captured_is_left_out_alone(
        self, base: Path, tmp_path: Path
    ) -> None:
        torn = self.around(tmp_path, ROW)
        here = self.train(base, tmp_path / "here", torn, elsewhere=False)
        assert [row for row, _ in here["skipped"]] == [BAD]
        self.require_same(self.train(base, tmp_path / "there", torn, elsewhere=True), here)

    def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
        self, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here = self.train(base, tmp_path / "here", elsewhere=False)
        (stopper := base / "draftcore_batches_stop.py").write_text(STOPPER)
        monkeypatch.setenv(STOP_AT, "3")
        begun = self.train(base, tmp_path / "there", stopper, elsewhere=True)
        assert begun["reason"] == "interrupted"
        monkeypatch.delenv(STOP_AT)
        found = self.train(base, tmp_path / "there", stopper, elsewhere=True)
        self.require_same(found, here)

    # ------------------------------------------------------------ its end

    def test_who_captures_hears_the_end(self, base: Path, tmp_path: Path) -> None:
        threads = set(threading.enumerate())
        found = self.train(base, tmp_path / "there", elsewhere=True)
        assert not any(found["codes"]), f"what captured ended with {found['codes']}"
        for thread in set(threading.enumerate()) - threads:
            thread.join(0 if thread.daemon else SOON)
            assert thread.daemon or not thread.is_alive(), f"the thread {thread.name!r} goes on"

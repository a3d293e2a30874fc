"""What every kind of batches must do: bring what others capture. See `draftcore_sdk` for how to use it.

Runs of the small algorithm that `new-plugin` writes are trained here, as `draftcore train --trainer` does,
and what comes of them is that of runs that capture for themselves.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

import draftcore
from draftcore_sdk.internals import Registry, load_plugins
from draftcore_sdk.running import SMALL, small_algorithm
from draftcore_sdk.suite import Suite, child_environment, offer_of, registry_of, slow
from draftcore_sdk.targets import conversations, tiny_target
from draftcore_sdk.workbench import STOP_AT, STOPPER, require_same_bits

SOON = 60.0  # seconds within which it comes on a busy machine
HERE = dict[tuple[object, ...], dict[str, Any]]()
BATCH = 4  # rows, of which there are two batches
AHEAD = 3  # batches that wait, which are of several epochs
GOOD = 5  # the only row of its batch that can be captured
HELD = 48 << 20  # bytes of the batches that are held at once, in a run that is told so
# A loose plugin: the batches that are held take up as many bytes as in a large run, whose step takes long.
LARGE = f"""
import time
from dataclasses import replace
from draftcore import hookimpl
from draftcore.errors import UsageError

class Source:
    def __init__(self, source):
        self.source, self.open = source, source.open

    def open_store(self, needed, run_id):
        most = -(-{HELD} // needed.largest(needed.held_batches))
        try:
            bound, store = self.source.open_store(replace(needed, token_bytes=most), run_id)
        except UsageError:  # there is no such room here
            return self.source.open_store(needed, run_id)
        if (store.stats().limit_bytes or {HELD}) < {HELD}:
            store.close()
            held = f"the {{needed.held_batches}} batches that are held"
            raise UsageError(f"open_store: {{store.uri}} has no room for {{held}} at once")
        return bound, store

@hookimpl(wrapper=True)
def batches():
    source = yield
    return source and Source(source)

@hookimpl
def step_finished(step):
    time.sleep(0.5 * (step == 1))  # what waits meanwhile may be of several epochs
"""
# Loose plugins around a run's capture, which may fail, and its rows, each of which has an image.
STUMBLES = """
from draftcore import hookimpl
from draftcore.contracts.capture import BadRows, Image
from draftcore.errors import DraftcoreError, UsageError
from pathlib import Path

class Capture:
    def __init__(self, capture):
        self.capture, self.close = capture, capture.close

    def features(self, batches):
        for batch in batches:
            {what}
            seen = [int(image.uri) for (image,) in batch.images]
            if batch.ids != ("check",) and seen != [*batch.rows]:
                raise UsageError(f"rows {batch.rows} of a batch come with the images of {seen}")
            yield from self.capture.features([batch])

@hookimpl(wrapper=True)
def capture(target):
    return Capture((yield))

@hookimpl(wrapper=True)
def samples():
    found = yield
    opened = found.samples

    def samples(*given, **named):
        rows = opened(*given, **named)
        rows.images = lambda row: (Image(str(row), ""),)
        return rows

    found.samples = samples
    return found
"""
FIRST = """seen = Path(target_folder, f"tried-{batch.index}")
            if batch.ids != ("check",) and not seen.exists():
                seen.touch()
                raise DraftcoreError("the capture stumbles")"""
ROW = f"""bad = [at for at, row in enumerate(batch.rows) if row != {GOOD}]
            if {GOOD} in batch.rows and bad:
                raise BadRows({{bad[0]: f"{{batch.rows[bad[0]]}} is torn"}})"""


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
        pytest.skip("only a test file can say who captures: a BatchesSuite with `producing`")

    by_producers = staticmethod(by_producers)

    @pytest.fixture(scope="class")
    @classmethod
    def runs(cls, tmp_path_factory: pytest.TempPathFactory) -> Runs:
        base = tmp_path_factory.getbasetemp()
        if not (base / "batches-target").exists():
            tiny_target(base / "batches-target", num_hidden_layers=12)
        return Runs(cls(), base, tmp_path_factory.mktemp("batches"))

    def test_a_run_is_that_which_captures_for_itself(self, runs: Runs) -> None:
        """To the bit: each row once an epoch, in the plan's order and in the plan's batches."""
        require_same(runs.plain, runs.here)

    def test_a_batch_whose_capture_failed_is_tried_again(self, runs: Runs) -> None:
        found = runs.train("stumbling", runs.loose("stumbles", STUMBLES.replace("{what}", FIRST)))
        assert list(runs.folder.glob("tried-*")), "the run's capture was not asked"
        require_same(found, runs.here)

    def test_a_row_that_cannot_be_captured_is_left_out_alone(self, runs: Runs) -> None:
        """As many of a batch as there are, one after the other: the last row of it is trained on."""
        torn = runs.loose("torn", STUMBLES.replace("{what}", ROW))
        here = runs.train("torn-here", torn, elsewhere=False)
        assert len(here["skipped"]) == BATCH - 1
        require_same(runs.train("torn-there", torn), here)

    @slow
    def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
        self, runs: Runs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stopper = runs.loose("stops", STOPPER)
        monkeypatch.setenv(STOP_AT, "3")
        assert runs.train("stopped", stopper)["reason"] == "interrupted"
        monkeypatch.delenv(STOP_AT)
        require_same(runs.train("stopped", stopper), runs.here)

    def test_who_captures_hears_the_end(self, runs: Runs) -> None:
        found = runs.plain
        assert not any(found["codes"]), f"what captured ended with {found['codes']}"
        for thread in found["threads"]:
            thread.join(0 if thread.daemon else SOON)
            assert thread.daemon or not thread.is_alive(), f"the thread {thread.name!r} goes on"


class Runs:
    """Runs of one plugin's batches, and of a trainer that captures for itself; what came of each."""

    def __init__(self, suite: BatchesSuite, base: Path, folder: Path) -> None:
        self.suite, self.base, self.folder = suite, base, folder

    @property
    def here(self) -> dict[str, Any]:
        """A run that captures for itself, one for all plugins."""
        key = self.base, *self.suite.plugin.split()[1:]
        if key not in HERE:
            HERE[key] = self.train("here", elsewhere=False)
        return HERE[key]

    @cached_property
    def plain(self) -> dict[str, Any]:
        """A run in which nothing fails, as if it were a large one."""
        return self.train("plain", self.loose("large", LARGE))

    def loose(self, name: str, text: str) -> Path:
        """Write a plugin of one file, of a name of its own."""
        file = self.folder / f"{name}_{abs(hash(self.folder))}.py"
        file.write_text(text.replace("target_folder", repr(str(self.folder))))
        return file

    def train(self, name: str, *plugins: Path, elsewhere: bool = True) -> dict[str, Any]:
        """Train a run, whose batches may come from elsewhere."""
        suite, folder = self.suite, self.folder / name
        offer, extras = offer_of(suite.plugin, "batches", suite.name), suite.plugin.split()[1:]
        folder.mkdir(exist_ok=True)
        loose = [small_algorithm(self.base), *plugins, *filter(None, [suite.loose])]
        installed = load_plugins(files=loose).installed
        modules = {plugin.module for plugin in installed}
        mine = registry_of(suite.plugin).installed
        registry = Registry([*installed, *(p for p in mine if p.module not in modules)])
        names = {plugin.module: plugin.name for plugin in registry.installed}
        train = {"batch": BATCH, "epochs": 4, "accumulate": 1, "prefetch": AHEAD}
        config = {
            "run": str(folder / "run"), "algorithm": {"name": SMALL},
            "target": {"path": str(self.base / "batches-target"), "device": "cpu"},
            "data": {"train": str(conversations(folder / "train.jsonl", 8)), "max_skipped": 0.5},
            "plugins": [names[module] for module in extras],
            "batches": offer.name if elsewhere else "queue",
            "train": {**train, "device": "cpu", "log_every": 1},
        }  # fmt: skip
        file, codes, threads = folder / "run.yaml", list[int](), set(threading.enumerate())
        file.write_text(yaml.safe_dump(config))
        if not elsewhere:
            reason = draftcore.train(file, registry=registry).reason
        else:
            with suite.producing(file, loose) as processes:
                with watched(processes, file):
                    reason = draftcore.train(file, trainer=True, registry=registry).reason
                codes = [process.wait(SOON) for process in processes if reason == "complete"]
        lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        last = sorted((folder / "run" / "checkpoints").glob("step-*"))[-1]
        return {
            "reason": reason, "codes": codes, "threads": set(threading.enumerate()) - threads,
            "losses": {line["step"]: line["loss"] for line in lines if "loss" in line},
            "skipped": json.loads((last / "state.json").read_text())["skipped"],
            "weights": load_file(last / "draft.safetensors"),
        }  # fmt: skip


@contextmanager
def watched(processes: Sequence[subprocess.Popen[bytes]], file: Path) -> Iterator[None]:
    """Fail the test when a process has failed that a trainer would wait for."""
    over, log = threading.Event(), file.with_suffix(".log")

    def watch() -> None:
        while not over.wait(0.1):
            if any(process.poll() for process in processes):
                return os.kill(os.getpid(), signal.SIGUSR1)

    def fail(*_: object) -> None:
        said = log.read_text(errors="replace").strip() if log.exists() else ""
        pytest.fail(f"what captures ended before the run\n{said}")

    before, watcher = signal.signal(signal.SIGUSR1, fail), threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        signal.signal(signal.SIGUSR1, before)


def require_same(found: dict[str, Any], right: dict[str, Any]) -> None:
    assert found["reason"] == right["reason"] == "complete"
    assert found["skipped"] == right["skipped"]
    assert found["losses"] == right["losses"]
    require_same_bits(found["weights"], right["weights"])

"""What wrappers and observers must do, tried around a small algorithm: the one that `new-plugin` writes.

A wrapper of an algorithm's hooks passes what an algorithm must: `WrapperSuite` is the algorithm suite
with the wrapper around. An observer changes nothing: `ObserverSuite`. What wraps a store, a capture or
another kind is for the suite of that kind: `plugin = "draftcore_file.plugin my_wrapper"`.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from draftcore_sdk.algorithms import AlgorithmSuite
from draftcore_sdk.check import WRAPPED
from draftcore_sdk.internals import load_plugins
from draftcore_sdk.memory import of_the_process
from draftcore_sdk.project import SET_ASIDE, Project
from draftcore_sdk.running import small_algorithm
from draftcore_sdk.suite import Suite, bound, registry_of, slow
from draftcore_sdk.workbench import Bench, Example, require_same_bits, snapshot


class Around(Suite):
    """The small algorithm, with the plugin around it.

    `capabilities` are what the loss gives up or promises by the plugin, as an algorithm's offer
    would: `stop_gradient`, `split_dependent`, `compile`.
    """

    capabilities: ClassVar[Collection[str]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, tmp_path_factory: Any) -> Bench:
        base = tmp_path_factory.getbasetemp()
        small, example = small_algorithm(base), Example.of(base / "algorithm-suite")
        mine = [p.name for p in load_plugins().plugins if p.module == cls.plugin and not cls.loose]
        plugin = f"{small.stem} {cls.plugin}"
        own = bound(plugin, "algorithm")
        kept = {"layout:serving", *cls.capabilities}
        if not {"forward_loss", "collate"}.intersection(hooks_of(cls.plugin)):
            kept.add("cross_entropy")
        offer = dataclasses.replace(own.offer, capabilities=frozenset(kept))
        files, folder = [small], tmp_path_factory.mktemp("runs")
        files += [cls.loose] if cls.loose else []
        return Bench(own.hook, offer, own.options, example, folder, {}, files, mine, plugin)


class WrapperSuite(Around, AlgorithmSuite):
    """A wrapper's algorithm is an algorithm: its loss, its drafts, its runs."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Try it around one small algorithm, as that is."""


class ObserverSuite(Around):
    """An observer leaves a run, and what it is told, as they are; it may stop it."""

    def test_it_changes_nothing_that_it_is_told(
        self, bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Neither draft nor gradients nor figures nor files, and nothing of the process."""
        saved, weights = tmp_path / "step-1", {"model.safetensors": b"weights"}
        saved.mkdir()
        (saved / "model.safetensors").write_bytes(b"weights")
        figures, report = {"loss": 2.5, "lr": 1e-3, "grad_norm": 0.5}, {"acceptance_length": 2.0}
        gradients = {"cell.down.weight": torch.ones(2, 2)}
        calls: dict[str, dict[str, Any]] = {
            "run_started": {"run": tmp_path, "config": {"train": {"lr": 1e-3}}, "total_steps": 9},
            "gradients_ready": {"step": 1, "gradients": gradients, "draft": ""},
            "step_finished": {"step": 1, "metrics": figures, "draft": ""},
            "eval_metrics": {"draft": bench.draft, "report": report, "options": bench.options},
            "evaluated": {"step": 1, "report": report, "draft": ""},
            "checkpoint_saved": {"step": 1, "folder": saved, "draft": ""},
            "run_finished": {"run": tmp_path, "step": 9, "reason": "complete"},
        }
        threads = set(threading.enumerate())
        for name, told in [*calls.items()] * 2:  # a process may run twice, and train two drafts
            given, before = copy.deepcopy((told, snapshot(bench.draft))), around(bench) | self.began
            getattr(bench.hook, name)(**told)
            said = capsys.readouterr().err
            assert SET_ASIDE not in said, said
            changed = [what for what, state in around(bench).items() if state != before[what]]
            assert not changed, f"{name} changes {', '.join(changed)}"
            require_same_bits(snapshot(bench.draft), given[1], f"{name} changes the draft: ")
            for key in told.keys() - {"draft", "options"}:
                same = str(told[key]) == str(given[0][key])
                assert same, f"{name} changes its {key}: {told[key]}, not {given[0][key]}"
            files = {file.name: file.read_bytes() for file in saved.iterdir()}
            assert files == weights, f"{name} changes the files of a checkpoint: {[*files]}"
            told |= {"draft": "other"} if told.get("draft") == "" else {}
        for thread in set(threading.enumerate()) - threads:
            thread.join(0 if thread.daemon else 5)
            ends = thread.daemon or not thread.is_alive()
            assert ends, f"a run waits for the thread {thread.name!r}, which is no daemon"

    @slow
    def test_a_run_with_it_is_the_run_without_it(self, bench: Bench) -> None:
        """The same losses and weights to the bit, as far as it lets the run go."""
        if WRAPPED.intersection(hooks_of(self.plugin)):
            pytest.skip("it also wraps an algorithm: the run with it is another one")
        without = Project(dataclasses.replace(bench, loose=bench.loose[:1], extras=()), "without")
        watched = Project(bench, "watched")
        for project in (without, watched):
            project.cli("train", "train.eval_every=2")
        losses = watched.losses()
        expected = {step: loss for step, loss in without.losses().items() if step in losses}
        assert losses == expected, f"the losses are {losses}, without it {expected}"
        if len(losses) == len(without.losses()):
            require_same_bits(watched.weights(), without.weights())


# ---------------------------------------------------------------- pieces of the tests


def hooks_of(plugin: str) -> Sequence[str]:
    return registry_of(plugin).named(plugin).hooks


def around(bench: Bench) -> dict[str, Any]:
    """What is of the process, or of the draft beside its weights."""
    return {
        **of_the_process(), "the current folder": Path.cwd(), "the variables": dict(os.environ),
        "what Ctrl-C does": signal.getsignal(signal.SIGINT),
        "the draft's mode": bench.draft.module.training,
        "what is trained": [p.requires_grad for p in bench.draft.module.parameters()],
    }  # fmt: skip

"""What wrappers and observers must do, tried around a small algorithm: the one that `new-plugin` writes.

A wrapper of an algorithm's hooks passes what an algorithm must: `WrapperSuite` is the algorithm suite
with the wrapper around. An observer changes nothing: `ObserverSuite`.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftcore.plugins.binding import bind
from draftcore.plugins.dists import Plugin
from draftcore.plugins.registry import Registry, load
from draftcore_sdk.algorithm_training import require_same_bits
from draftcore_sdk.algorithms import AlgorithmSuite
from draftcore_sdk.example import Example
from draftcore_sdk.new_plugin import render, write
from draftcore_sdk.project import Project
from draftcore_sdk.suite import Suite
from draftcore_sdk.workbench import Bench, snapshot


class Around(Suite):
    """The small algorithm, with the plugin around it."""

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, tmp_path_factory: Any) -> Bench:
        base = tmp_path_factory.getbasetemp()
        small, example = small_algorithm(base), Example.of(base / "algorithm-suite")
        mine = [p.name for p in load().plugins if p.module == cls.plugin and not cls.loose]
        plugins = [Plugin(name, name, "", name, state="found") for name in (small.stem, cls.plugin)]
        own = bind(Registry(plugins), "algorithm", "wrapped-chain", {}, [cls.plugin])
        kept = {"layout:serving"}
        if "forward_loss" not in Registry(plugins).named(cls.plugin).hooks:
            kept.add("cross_entropy")
        offer = dataclasses.replace(own.offer, capabilities=frozenset(kept))
        files, folder = [small], tmp_path_factory.mktemp("runs")
        files += [cls.loose] if cls.loose else []
        return Bench(own.hook, offer, own.options, example, folder, {}, files, mine)


class WrapperSuite(Around, AlgorithmSuite):
    """A wrapper's algorithm is an algorithm: its loss, its drafts, its runs."""


class ObserverSuite(Around):
    """An observer leaves a run, and what it is told, as they are; it may stop it."""

    def test_a_run_with_it_is_the_run_without_it(self, bench: Bench) -> None:
        """The same losses and weights to the bit, as far as it lets the run go."""
        without = Project(dataclasses.replace(bench, loose=bench.loose[:1], extras=()), "without")
        watched = Project(bench, "watched")
        without.cli("train"), watched.cli("train")
        losses = watched.losses()
        expected = {step: loss for step, loss in without.losses().items() if step in losses}
        assert losses == expected, f"the losses are {losses}, without it {expected}"
        if len(losses) == len(without.losses()):
            require_same_bits(watched.weights(), without.weights())

    def test_it_changes_nothing_that_it_is_told(self, bench: Bench, tmp_path: Path) -> None:
        """Neither draft nor gradients nor figures nor files, and no random state of the process."""
        file = tmp_path / "model.safetensors"
        file.write_bytes(b"weights")
        figures, report = {"loss": 2.5, "lr": 1e-3, "grad_norm": 0.5}, {"acceptance_length": 2.0}
        gradients = {"cell.down.weight": torch.ones(2, 2)}
        calls: dict[str, dict[str, Any]] = {
            "run_started": {"run": tmp_path, "config": {"train": {"lr": 1e-3}}, "total_steps": 9},
            "gradients_ready": {"step": 1, "gradients": gradients},
            "step_finished": {"step": 1, "metrics": figures},
            "eval_metrics": {"draft": bench.draft, "report": report, "options": bench.options},
            "evaluated": {"step": 1, "report": report},
            "checkpoint_saved": {"step": 1, "folder": tmp_path},
            "run_finished": {"run": tmp_path, "step": 9, "reason": "complete"},
        }
        for name, told in [*calls.items()] * 2:  # a process may run twice
            given, state = copy.deepcopy((told, snapshot(bench.draft))), global_state(bench)
            getattr(bench.hook, name)(**told)
            assert global_state(bench) == state, (
                f"{name} draws from or seeds a global generator, or sets torch's dtype or a mode"
            )
            require_same_bits(snapshot(bench.draft), given[1])
            for key in told.keys() - {"draft", "options"}:
                same = str(told[key]) == str(given[0][key])
                assert same, f"{name} changes its {key}: {told[key]}, not {given[0][key]}"
            assert file.read_bytes() == b"weights", f"{name} changes a file of a checkpoint"


# ---------------------------------------------------------------- pieces of the tests


def small_algorithm(folder: Path) -> Path:
    """Write the algorithm that `new-plugin` writes, once; return a loose plugin that offers it."""
    file, package = folder / "small_chain.py", folder / "draftcore-wrapped-chain"
    if not file.exists():
        write(package, render("wrapped-chain", "algorithm"))
        file.write_text("from draftcore_wrapped_chain.plugin import *\n")
    for place in (str(folder), str(package)):
        if place not in sys.path:
            sys.path.append(place)
    return file


def global_state(bench: Bench) -> str:
    """Every global generator, torch's dtype, and the draft's mode."""
    states = (random.getstate(), repr(np.random.get_state()), torch.get_default_dtype())
    return str((states, torch.random.get_rng_state().tolist(), bench.draft.module.training))

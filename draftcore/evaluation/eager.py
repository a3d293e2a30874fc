"""The runner `eager`: runs every batch and every round as it comes."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from draftcore.contracts.algorithm import Drafter
from draftcore.contracts.runner import DecodeRunner
from draftcore.contracts.target import PrefillRunner, TargetModel, TargetSpec
from draftcore.evaluation.decode import EagerRunner
from draftcore.target import EagerPrefillRunner


class Eager:
    """Runs both phases without a plugin; see `contracts.runner.Runner`."""

    def check(self, target: TargetSpec) -> None:
        """Any target may be run as it comes."""

    def plan(self, target: TargetSpec) -> Iterator[tuple[str, str, str]]:
        yield from ()

    def prefill(self, model: TargetModel) -> PrefillRunner:
        return EagerPrefillRunner(model)

    def decode(self, model: TargetModel, drafter: Drafter, module: nn.Module) -> DecodeRunner:
        return EagerRunner(model, drafter)

    def report(self) -> Iterator[str]:
        yield from ()

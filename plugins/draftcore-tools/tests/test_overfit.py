"""`draftcore overfit`: a right algorithm learns one conversation, a wrong one says where it stopped."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

Overfit = Callable[..., Result]


@pytest.fixture
def overfit(tmp_path: Path, write_run: Any, cli: Callable[..., Result]) -> Overfit:
    """Overfit these algorithms, with a loose plugin if it is given."""

    def start(algorithms: list[str], *arguments: str, plugin: str = "") -> Result:
        run = write_run(tmp_path, 3, {name: {} for name in algorithms})
        (loose := tmp_path / f"{tmp_path.name}.py").write_text(plugin)
        return cli(*(["--plugin", loose] if plugin else []), "overfit", run, *arguments)

    return start


def test_every_algorithm_learns_one_conversation_one_draft_after_the_other(
    overfit: Overfit, tmp_path: Path
) -> None:
    names = ["eagle3", "dflash", "dflash2", "domino", "dspark", "peagle"]
    result = overfit(names, "--row", "2")
    assert result.exit_code == 0, result.output
    _, *parts = re.split(rf"^({'|'.join(names)}):\n", result.stdout, flags=re.MULTILINE)
    assert parts[::2] == sorted(names), "as YAML sorts them"
    for label, text in zip(parts[::2], parts[1::2], strict=True):
        lines = text.splitlines()
        assert lines[0] == "prompt of 22 tokens, the target's own answer has 49"
        looks = [line for line in lines if re.match(r"step +\d+: loss", line)]
        assert re.search(r"acceptance length (\d\.\d\d) of \1$", looks[-1])
        agrees = [line.partition(":")[0] for line in lines if ": agrees with" in line]
        alone = {"domino": ["sglang"], "peagle": ["vllm"]}
        assert agrees == alone.get(label, ["sglang", "vllm"])
        assert lines[-1].startswith("every draft is accepted")
    assert not (tmp_path / "run").exists(), "nothing is written into the run's folder"


LATE = """
from draftcore import hookimpl

@hookimpl(wrapper=True)
def drafter(draft, target, options):
    drafter = yield
    prefill, accept = drafter.prefill, drafter.accept

    def late(features):
        return {name: value.roll(1, 1) for name, value in features.items()}

    drafter.prefill = lambda state, tokens, lengths, given, last: prefill(
        state, tokens, lengths, late(given), last)
    drafter.accept = lambda state, tokens, given, counts: accept(state, tokens, late(given), counts)
    return drafter
"""
FORGETFUL = """
from draftcore import hookimpl

@hookimpl(wrapper=True)
def import_draft(folder, target, options):
    draft = yield
    draft.module.fc.weight.data.zero_()
    return draft
"""


@pytest.mark.parametrize(
    ("arguments", "plugin", "stage", "says"),
    [
        ("--row 3", "", "rendering", ["has 3 rows, and row 3 was asked for"]),
        ("--steps 2 --lr 1e-6", "", "training",
         ["dflash did not learn one conversation in 2 steps", "--lr"]),
        ("--steps 128", LATE, "decoding", ["accepted by position"]),
        ("--steps 64", FORGETFUL, "export", ["accepted by position"]),
    ],
    ids=["no such row", "few steps", "late features", "a lossy import"],
)  # fmt: skip
def test_what_stops_says_at_which_stage_and_why(
    overfit: Overfit, arguments: str, plugin: str, stage: str, says: list[str]
) -> None:
    result = overfit(["dflash"], *arguments.split(), plugin=plugin)
    assert result.exit_code == 1
    for words in (f"stopped at: {stage}", *says):
        assert words in result.output

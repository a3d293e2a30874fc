"""Drills: damage, wrong input, strangers and kills at random, and the table of what came of them.

`--cases`, `--kills`, `--seed`, `--minutes` and `--results FILE` are options of pytest. What a case is
depends on the seed, its class and its number, not on who tries it: workers share the cases, and so
may machines, with a seed each. `python tests/drills.py FILE...` makes docs/reliability.md's table of
all that they found.
"""

import json
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

OUTCOMES = ("refused in words", "recovered", "silently wrong", "traceback", "no end")
SHARD = 25  # cases of a class that one test tries
PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
BEGAN = time.monotonic()
OPTIONS: dict[str, tuple[type, Any, str]] = {
    "cases": (int, 6, "how many cases of each class are tried"),
    "kills": (int, 1, "in how many runs of each topology processes are killed"),
    "seed": (int, 0, "what cases are drawn by"),
    "minutes": (float, float("inf"), "no case begins later"),
    "results": (str, None, "a file for what came of each case"),
}

JUNK: list[Any] = [None, [], {}, "", "\x1b[2J" * 999, -1, 10**400, 1e999, True, [[]] * 99]
JUNK.append({"plain": [1]})


@dataclass
class Case:
    """What is tried in a `with`, which judges it: by `outcome`, or by what is raised."""

    what: str
    number: int
    dice: random.Random
    seconds: float
    outcome: str = "recovered"
    shown: object = ""  # where it ends badly
    times: int = 1
    late: bool = False

    def __enter__(self) -> Self:
        self.alarm = signal.signal(signal.SIGALRM, self.interrupt)
        self.timer = signal.setitimer(signal.ITIMER_REAL, self.seconds)
        return self

    def interrupt(self, *_: object) -> None:
        self.late = True
        raise KeyboardInterrupt

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        signal.setitimer(signal.ITIMER_REAL, *self.timer)
        signal.signal(signal.SIGALRM, self.alarm)
        if error is not None:
            self.outcome = "silently wrong" if isinstance(error, AssertionError) else "traceback"
            self.shown = f"{self.shown}\n{error!r}"
        if self.late or isinstance(error, pytest.fail.Exception):
            self.outcome = "no end"
        return isinstance(error, Exception | pytest.fail.Exception) or self.late


class Drill:
    """Cases of a class, by their numbers."""

    def __init__(self, config: pytest.Config, numbers: range) -> None:
        self.numbers, self.seed = numbers, config.getoption("seed")
        self.results: str | None = config.getoption("results")
        self.end = BEGAN + 60 * config.getoption("minutes")

    def draw(self, what: str, seconds: float = 60) -> list[Case]:
        return [
            Case(what, number, random.Random(f"{self.seed} {what} {number}"), seconds)
            for number in self.numbers
        ]

    def judge(self, cases: Iterable[Case], good: tuple[str, ...] = OUTCOMES[:2]) -> Iterator[Case]:
        """Yield cases until the time is over; then fail for those that ended badly."""
        bad = []
        for case in cases:
            if time.monotonic() > self.end:
                break
            yield case
            line = [case.what, self.seed, case.number, case.times, case.outcome]
            if case.outcome not in good:
                bad.append(f"{line}\n{case.shown}")
            if self.results:
                with Path(self.results).open("a") as stream:
                    stream.write(json.dumps([*line, str(case.shown)[-2000:]]) + "\n")
        assert not bad, "\n\n".join(bad)

    def cases(self, what: str) -> Iterator[Case]:
        return self.judge(self.draw(what))


def altered(dice: random.Random, data: Any) -> Any:
    """Return JSON data with something else in a place of it."""
    if isinstance(data, dict | list) and data and dice.random() < 0.8:
        keys = list(data) if isinstance(data, dict) else list(range(len(data)))
        key, changed = dice.choice(keys), data.copy()
        changed[key] = altered(dice, data[key])
        return changed
    return dice.choice(JUNK)


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, (kind, default, text) in OPTIONS.items():
        parser.getgroup("drills").addoption(f"--{name}", type=kind, default=default, help=text)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test that asks for a `drill` its share of the cases; of the kills those for one run."""
    if "drill" in metafunc.fixturenames:
        kills = metafunc.definition.get_closest_marker("long")
        count = metafunc.config.getoption("kills" if kills else "cases")
        size = 1 if kills else SHARD
        parts = [range(at, min(at + size, count)) for at in range(0, count, size)]
        metafunc.parametrize("drill", parts, indirect=True, ids=[f"from{p.start}" for p in parts])


@pytest.fixture
def drill(request: pytest.FixtureRequest) -> Drill:
    return Drill(request.config, request.param)


def write_table(files: list[str]) -> None:
    results: dict[tuple[Any, ...], tuple[int, str]] = {}
    for file in files:
        for what, seed, number, times, outcome, _ in map(
            json.loads, Path(file).read_text().splitlines()
        ):
            results[what, seed, number] = times, outcome
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for (what, *_), (times, outcome) in sorted(results.items()):
        counts[what][outcome] += times
    seeds = ", ".join(map(str, sorted({seed for _, seed, _ in results})))
    rows = [["class", "tried", *OUTCOMES], ["---"] * (2 + len(OUTCOMES))]
    rows += [[what, f"{c.total()}", *(f"{c[o]}" for o in OUTCOMES)] for what, c in counts.items()]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    head = PAGE.read_text().partition("Last tried on ")[0]
    PAGE.write_text(f"{head}Last tried on {time.strftime('%Y-%m-%d')}, seed {seeds}:\n\n{table}")


if __name__ == "__main__":
    write_table(sys.argv[1:])

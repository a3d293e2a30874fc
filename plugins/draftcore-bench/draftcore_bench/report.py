"""What was measured, as data, tables and plot: a line for each number of requests at once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from draftcore_eval.plots import figure, save

from draftcore.errors import plural
from draftcore.files import write_atomic
from draftcore_bench.drafts import Drafts, acceptance
from draftcore_bench.measure import Round
from draftcore_bench.server import Answer

DRAFT, PLAIN = "draft", "plain"  # the sides
BUSY = 0.7  # share of the time from which on this process may have held up the servers
HOW_TOLD = {  # by servers of which it is known that they can
    "vllm": "its /metrics does, unless it was started with --disable-log-stats",
    "sglang": "a newer one does, or its /metrics with --enable-metrics",
    "llamacpp": "it does where it has a draft",
}


@dataclass
class Report:
    """Rounds, as they ended; `about` says what was measured, `ended` why that ended early."""

    about: dict[str, Any]
    rounds: list[Round] = field(default_factory=list)
    ended: str = ""

    @property
    def failures(self) -> Counter[str]:
        """Requests that failed, by side and reason."""
        return sum((made.failures for made in self.rounds), Counter[str]())

    def of(self, side: str, level: int = 0) -> list[Round]:
        """Return the rounds of a side, with so many requests at once or with any number."""
        return [m for m in self.rounds if m.side == side and level in (0, m.concurrency)]

    def to_json(self) -> dict[str, Any]:
        levels = list(dict.fromkeys(made.concurrency for made in self.rounds))
        categories = dict.fromkeys(a.category for made in self.rounds for a in made.answers)
        return {
            "about": self.about,
            "acceptance": accepted(self.of(DRAFT)),
            "levels": [self._level(level) for level in levels],
            "categories": {name: self._category(name, levels[0]) for name in categories},
            "failures": self.failures,
            "notes": list(self._notes()),
        }

    def _level(self, level: int) -> dict[str, Any]:
        """Return the figures with so many requests at once. Rounds that follow each other are compared."""
        sides = {side: rounds for side in (DRAFT, PLAIN) if (rounds := self.of(side, level))}
        pairs = zip(*sides.values(), strict=False) if PLAIN in sides else ()
        gains = [speed([draft]) / speed([plain]) for draft, plain in pairs]
        figures = {side: side_figures(rounds) for side, rounds in sides.items()}
        return {"concurrency": level, **figures, "speed_up": spread(gains) if gains else None}

    def _category(self, name: str, level: int) -> dict[str, Any]:
        """Return what was accepted of a category, and how much faster its requests were at this level."""
        everywhere, drafted, plain = (
            [answer for made in rounds for answer in made.answers if answer.category == name]
            for rounds in (self.of(DRAFT), self.of(DRAFT, level), self.of(PLAIN, level))
        )
        gain = speed(drafted) / speed(plain) if drafted and plain else None
        return {"acceptance": accepted(everywhere), "speed_up": gain}

    def _notes(self) -> Iterator[str]:
        """Yield what a person should know before believing the figures."""
        if self.ended:
            yield f"measuring ended early: {self.ended}"
        for reason, count in self.failures.items():
            yield f"{plural(count, 'request')} failed and counts nowhere, {reason}"
        answers = [answer for made in self.rounds for answer in made.answers]
        if cached := sum(answer.cached_tokens for answer in answers):
            share = cached / sum(answer.prompt_tokens for answer in answers)
            yield f"{share:.0%} of the prompts' tokens came from a prefix cache: first tokens came sooner"
        for side in {DRAFT, PLAIN} & self.about.keys():
            url = self.about[side]["url"]
            if self.about[side]["engine"] not in HOW_TOLD:
                yield f"{url} may keep prompts that it has seen: first tokens may come sooner"
            if any(made.others for made in self.rounds if made.side == side):
                yield f"somebody else asked {url} meanwhile: measure a server that is alone"
        if (busiest := max(made.busy for made in self.rounds)) > BUSY:
            yield f"this process was busy for {busiest:.0%} of a round: the servers may be faster"
        if PLAIN not in self.about:
            yield "for the speed-up start the same server without its draft, and add --plain URL"
        elif self.about[PLAIN]["model"] != (model := self.about[DRAFT]["model"]):
            yield f"the models have two names: is {self.about[PLAIN]['model']} the same as {model}?"

    def write(self, folder: Path) -> None:
        """Write bench.json and bench.png."""
        write_atomic(folder / "bench.json", json.dumps(data := self.to_json(), indent=1))
        plot(data, folder / "bench.png")


def side_figures(rounds: Sequence[Round]) -> dict[str, Any]:
    answers = [answer for made in rounds for answer in made.answers]
    return {
        "tokens_per_second": spread(speed([made]) for made in rounds),
        "first_token_seconds": spread((answer.first for answer in answers), 10, 90),
        "request_seconds": spread((answer.seconds for answer in answers), 10, 90),
        "acceptance": accepted(rounds),
        "requests": len(answers),
        "failed": sum(made.failures.total() for made in rounds),
    }


def spread(values: Iterable[float], low: int = 0, high: int = 100) -> dict[str, float]:
    """Return the median, and the least and the greatest, or other percentiles."""
    found = np.percentile([*values], [low, 50, high])
    return dict(zip(("low", "median", "high"), map(float, found), strict=True))


def speed(measured: Sequence[Round | Answer]) -> float:
    """Return the tokens a second of rounds, or of answers."""
    return sum(x.tokens for x in measured) / sum(x.seconds for x in measured)


def accepted(measured: Iterable[Round | Answer]) -> dict[str, Any] | None:
    """Return what was accepted in rounds, or of answers, where that is told."""
    told = [(m.drafted_for, m.drafts) for m in measured if m.drafts is not None]
    drafts = sum((drafts for _, drafts in told), Drafts())
    return acceptance(drafts, sum(tokens for tokens, _ in told)) if told else None


def lines(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables that people read of a report's data."""
    head = ("requests at once", "tokens/s", "without draft", "speed-up", "first token", "accepted")
    rows = [head, *(cells(level) for level in data["levels"])]
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        yield "  ".join(map(str.ljust, row, widths)).rstrip()
    how = HOW_TOLD.get(data["about"][DRAFT]["engine"])
    unknown = "not told by this server" + (f": {how}" if how else "")
    told = data["acceptance"]
    named = {"acceptance length": f"{told['length']:.2f}" if told else unknown}
    if told:
        named["by position"] = "  ".join(f"{rate:.2f}" for rate in told["by_position"][:16])
    for category, figures in data["categories"].items():
        length, gain = figures["acceptance"], figures["speed_up"]
        parts = f"{length['length']:.2f}" if length else "", f"{gain:.2f}x" if gain else ""
        named[f"  {category}"] = "  ".join(filter(None, parts))
    yield from (f"{name:24}  {value}" for name, value in named.items() if value)
    yield from (f"{'note':24}  {note}" for note in data["notes"])


def cells(level: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a level's cells of the table."""
    draft, plain = level[DRAFT], level.get(PLAIN, {})
    return (
        str(level["concurrency"]),
        written(draft["tokens_per_second"], "{:.0f}"),
        written(plain.get("tokens_per_second"), "{:.0f}"),
        written(level["speed_up"], "{:.2f}x"),
        f"{1e3 * draft['first_token_seconds']['median']:.0f} ms",
        f"{draft['acceptance']['length']:.2f}" if draft["acceptance"] else "",
    )


def written(figures: Mapping[str, float] | None, form: str) -> str:
    """Write a median with the least and the greatest; nothing if there is none."""
    if figures is None:
        return ""
    low, median, high = map(form.format, figures.values())
    return median if low == high else f"{median} ({low} to {high})"


def plot(data: Mapping[str, Any], file: Path) -> None:
    """Draw tokens a second over requests at once, and below the speed-up where there are two sides."""
    levels = data["levels"]
    speeds = {label: {x["concurrency"]: x[side]["tokens_per_second"] for x in levels if side in x}
              for side, label in ((DRAFT, "with draft"), (PLAIN, "without"))}  # fmt: skip
    gains = {"speed-up": {x["concurrency"]: x["speed_up"] for x in levels if x["speed_up"]}}
    shown = {"tokens per second": speeds, **({"speed-up": gains} if gains["speed-up"] else {})}
    drawn, panels = figure(len(shown))
    for axes, (title, curves) in zip(panels, shown.items(), strict=True):
        for label, points in curves.items():
            low, median, high = np.array([[*s.values()] for s in points.values()]).reshape(-1, 3).T
            errors = [median - low, high - median]
            axes.errorbar([*points], median, errors, fmt="o-", capsize=3, label=label)
        axes.set_ylabel(title)
    panels[0].legend(loc="upper left")  # "best" takes seconds on a busy machine
    panels[0].set_title(data["about"][DRAFT]["model"].rsplit("/", 1)[-1], fontsize="medium")
    panels[-1].set_xscale("log", base=2)
    panels[-1].set_xticks(found := [level["concurrency"] for level in levels], map(str, found))
    panels[-1].set_xlabel("requests at once")
    save(drawn, file)

"""What an evaluation found: acceptance, its uncertainty and cost, as table, JSON and plot.

Acceptance length = tokens after the first ÷ verification rounds: the accepted drafts of a round
plus the target's own token. The first token comes from the prompt's prefill and counts nowhere.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draftcore.errors import plural
from draftcore.files import write_atomic
from draftcore_eval import serving
from draftcore_eval.plots import figure, fit_shares, save


@dataclass
class Decoded:
    """A prompt's continuation, with the accepted drafts of each round, and those that could count."""

    prompt: Sequence[int]
    tokens: list[int]
    accepted: list[int] = field(default_factory=list)
    room: list[int] = field(default_factory=list)

    def cut(self, position: int, token: int) -> None:
        """Put a token in the place of those from a position on, the end of a round."""
        self.tokens[position:] = [token]
        start = 1  # the position of a round's first token
        for number, accepted in enumerate(self.accepted):
            if start + accepted + 1 > position:
                self.accepted[number] = max(0, position - start)
                del self.accepted[number + 1 :], self.room[number + 1 :]
                return
            start += accepted + 1


@dataclass(frozen=True)
class Tie:
    """A difference that the next wider type calls a tie: token position, top-2 logit gap."""

    position: int
    gap: float


@dataclass(frozen=True)
class Report:
    """Figures of one evaluation; times are seconds per round of the whole batch.

    `lossless` is None where no output was compared with the target's own. `about` says what was
    evaluated: draft, target, data, settings, versions; `rows` has the figures and texts of each prompt.
    `served` is what a server would gain, by `serving.forecast`.
    """

    prompts: int
    tokens: int
    rounds: int
    num_drafts: int
    acceptance_length: float
    acceptance_length_95: tuple[float, float]
    acceptance_by_position: tuple[float, ...]
    acceptance_by_position_95: tuple[tuple[float, float], ...]
    lossless: bool | None
    ties: tuple[Tie, ...]
    draft_seconds: float
    verify_seconds: float
    plain_seconds: float
    rows: tuple[Mapping[str, Any], ...] = ()
    served: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, float] = field(default_factory=dict)  # what `eval_metrics` added
    about: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def count(
        cls, decoded: Sequence[Decoded], num_drafts: int, depth: int,
        text: Callable[[Sequence[int]], str] | None = None, **others: Any,
    ) -> Report:  # fmt: skip
        """Count what was decoded; `others` are the fields that are not counted.

        `text` writes tokens as text, where the target has a tokenizer.

        `depth` is how many of the drafts of a round can be accepted: all, unless they are a tree. A
        prompt whose first token ended it has no round. The interval of the length is a bootstrap over
        prompts (2.5th and 97.5th percentile, 1,000 draws, fixed seed).
        """
        tokens = np.array([len(d.tokens) - 1 for d in decoded], dtype=np.float64)
        rounds = np.array([len(d.accepted) for d in decoded], dtype=np.float64)
        # Per prompt and position k: rounds whose first k + 1 drafts were all accepted, and rounds in
        # which position k could count, before the end token and the length limit.
        ks = range(depth)
        hits = np.array([[sum(n > k for n in d.accepted) for k in ks] for d in decoded], float)
        chances = np.array([[sum(n > k for n in d.room) for k in ks] for d in decoded], float)
        draws = np.random.default_rng(0).integers(0, len(decoded), (1000, len(decoded)))
        by_position = np.clip(_ratio(hits.sum(0), chances.sum(0)), 0, 1)
        spread = _ratio(hits[draws].sum(1), chances[draws].sum(1))
        return cls(
            prompts=len(decoded),
            tokens=int(tokens.sum()),
            rounds=int(rounds.sum()),
            num_drafts=num_drafts,
            acceptance_length=float(_ratio(tokens.sum(), rounds.sum())),
            acceptance_length_95=_interval(_ratio(tokens[draws].sum(1), rounds[draws].sum(1))),
            acceptance_by_position=tuple(by_position.tolist()),
            acceptance_by_position_95=tuple(_interval(spread[:, k]) for k in ks),
            rows=tuple(
                {
                    "prompt_tokens": len(d.prompt),
                    "tokens": len(d.tokens),
                    "rounds": len(d.accepted),
                    "acceptance_length": (len(d.tokens) - 1) / max(1, len(d.accepted)),
                    **({"prompt": text(d.prompt), "continuation": text(d.tokens)} if text else {}),
                }
                for d in decoded
            ),
            **others,
        )

    @property
    def speed_here(self) -> float:
        """How many times as fast as the target alone this process decoded, as busy as it was."""
        round_seconds = self.draft_seconds + self.verify_seconds
        return self.acceptance_length * self.plain_seconds / round_seconds

    @property
    def acceptance_given_before(self) -> tuple[float, ...]:
        """By position, the share of accepted drafts where all before were accepted."""
        rates = (1.0, *self.acceptance_by_position)
        return tuple(rate / before if before else 0.0 for before, rate in itertools.pairwise(rates))

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        head = {"about": data.pop("about"), **data.pop("more")}
        given = {"acceptance_given_before": self.acceptance_given_before}
        return {**head, **data, **given, "speed_here": self.speed_here}

    def write(self, folder: Path) -> None:
        """Write report.json and acceptance.png."""
        write_atomic(folder / "report.json", json.dumps(self.to_json(), indent=1))
        plot({"": self}, folder / "acceptance.png")

    def lines(self) -> list[tuple[str, str]]:
        """Return the rows of the table that people read."""
        low, high = self.acceptance_length_95
        length = f"{self.acceptance_length:.2f}   (95 %: {low:.2f} to {high:.2f})"
        lossless = f"yes: {self.prompts} of {self.prompts} outputs are the target's own"
        if self.ties:
            lossless += f", {plural(len(self.ties), 'tie')} resolved"
        draft, verify, plain = (
            f"{1e3 * seconds:.1f}"
            for seconds in (self.draft_seconds, self.verify_seconds, self.plain_seconds)
        )
        here = f"{self.speed_here:.2f}x of the target alone: {draft} + {verify} ms to draft and verify "
        here += f"a round, {plain} ms a plain step"
        prompts = f"{self.prompts} ({self.tokens} tokens in {self.rounds} rounds)"
        if trained := self.about.get("trained_on"):
            prompts += f"; {trained} of them were trained on"
        return [
            ("acceptance length", length),
            ("by position", _rates(self.acceptance_by_position)),
            ("if those before it were", _rates(self.acceptance_given_before)),
            ("lossless", lossless if self.lossless else "not checked (sampling)"),
            ("prompts", prompts),
            ("speed here", here),
            *self.served_lines(),
            *((name, f"{value:.4g}") for name, value in self.more.items()),
        ]

    def served_lines(self) -> list[tuple[str, str]]:
        """Return the rows on a server, of which none was asked."""
        if not self.served:
            return []
        (name, *head), *rows = serving.table(self.served)
        title = f"on one {self.served['gpu']}, modelled"
        lines = [(title, "".join(f"{cell:7}" for cell in head) + name)]
        lines += [(f"  {name}", "".join(f"{c:7}" for c in cells).rstrip()) for name, *cells in rows]
        return [*lines, ("to serve", serving.advice(self.served))]


def plot(reports: Mapping[str, Report], file: Path) -> None:
    """Draw acceptance by position with its intervals, of one draft or of several by their labels."""
    drawn, (axes,) = figure()
    width, highest = 0.8 / len(reports), 0.0
    for number, (label, report) in enumerate(reports.items()):
        rates = np.array(report.acceptance_by_position)
        positions = np.arange(1, len(rates) + 1) + (number - (len(reports) - 1) / 2) * width
        errors = np.abs(np.array(report.acceptance_by_position_95).T - rates)
        highest = max(highest, *(rates + errors[1]))
        low, high = report.acceptance_length_95
        length = f"{report.acceptance_length:.2f} (95 %: {low:.2f} to {high:.2f})"
        name = f"{label} acceptance length {length}".lstrip()
        bars = axes.bar(positions, rates, width, yerr=errors, capsize=3, label=name)
        if len(reports) == 1:
            axes.bar_label(bars, fmt="%.2f")
    about = next(iter(reports.values())).about
    title = [f"{about[key]}" for key in ("algorithm", "target", "data") if key in about]
    axes.set(xlabel="drafted position", ylabel="share of rounds accepted up to here")
    fit_shares(axes, highest)
    axes.set_title(
        re.sub(r"[^\s,]*/", "", " · ".join(title[len(reports) > 1 :])), fontsize="medium"
    )
    axes.legend(loc="upper right")  # "best" takes seconds on a busy machine
    save(drawn, file)


def comparison(reports: Mapping[str, Report]) -> list[str]:
    """Return a table of several drafts side by side, a line each."""
    rows = [("draft", "acceptance length", "95 %", "to serve, modelled", "step", "lossless")]
    for label, report in reports.items():
        low, high = report.acceptance_length_95
        lossless = f"{report.prompts} of {report.prompts}" if report.lossless else "not checked"
        figures = f"{report.acceptance_length:.2f}", f"{low:.2f} to {high:.2f}"
        step = str(report.about.get("step", ""))
        gain = f"{serving.gain(report.served):.2f}x by {report.served['num_drafts']} drafts"
        rows.append((label, *figures, gain, step, lossless))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _rates(values: Sequence[float]) -> str:
    return "  ".join(f"{value:.2f}" for value in values)


def _ratio(top: Any, bottom: Any) -> Any:
    return np.asarray(top) / np.maximum(np.asarray(bottom), 1)


def _interval(values: Any) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)

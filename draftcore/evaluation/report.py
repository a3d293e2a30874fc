"""What an evaluation found: acceptance, its uncertainty and cost, as table, JSON and plot.

Acceptance length = tokens after the first ÷ verification rounds: the accepted drafts of a round
plus the target's own token. The first token comes from the prompt's prefill and counts nowhere.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draftcore.files import write_atomic


@dataclass
class Decoded:
    """One prompt's continuation; `accepted` holds the accepted drafts of each round."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    room: list[int] = field(default_factory=list)  # drafts of the round that could still count


@dataclass(frozen=True)
class Tie:
    """A difference that the next wider type calls a tie: token position, top-2 logit gap."""

    position: int
    gap: float


@dataclass(frozen=True)
class Report:
    """Figures of one evaluation; times are seconds per round of the whole batch."""

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
    break_even_length: float

    @classmethod
    def of(
        cls,
        decoded: Sequence[Decoded],
        *,
        ties: Sequence[Tie],
        checked: bool,
        draft_seconds: float,
        verify_seconds: float,
        plain_seconds: float,
        num_drafts: int,
    ) -> Report:
        """Count. `checked` says that every output was compared with the target's own.

        A prompt whose first token ended it has no round. The interval of the length is a
        bootstrap over prompts (2.5th and 97.5th percentile, 1,000 draws, fixed seed).
        """
        tokens = np.array([len(one.tokens) - 1 for one in decoded], dtype=np.float64)
        rounds = np.array([len(one.accepted) for one in decoded], dtype=np.float64)
        # Per prompt and position k: rounds whose first k + 1 drafts were all accepted, and rounds in
        # which position k could count, before the end token and the length limit.
        ks = range(num_drafts)
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
            acceptance_by_position_95=tuple(_interval(spread[:, k]) for k in range(num_drafts)),
            lossless=True if checked else None,
            ties=tuple(ties),
            draft_seconds=draft_seconds,
            verify_seconds=verify_seconds,
            plain_seconds=plain_seconds,
            break_even_length=(draft_seconds + verify_seconds) / plain_seconds,
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def write(self, folder: Path) -> None:
        """Write report.json and acceptance.png."""
        write_atomic(folder / "report.json", json.dumps(self.to_json(), indent=1))
        self.plot(folder / "acceptance.png")

    def lines(self) -> list[tuple[str, str]]:
        """The rows of the table that people read."""
        low, high = self.acceptance_length_95
        lossless = {True: "yes", None: "not checked (sampling)"}.get(self.lossless, "no")
        if self.ties:
            lossless += f", {len(self.ties)} ties resolved"
        return [
            ("acceptance length", f"{self.acceptance_length:.2f}   (95 %: {low:.2f} to {high:.2f})"),
            ("break-even length", f"{self.break_even_length:.2f}"),
            ("by position", "  ".join(f"{rate:.2f}" for rate in self.acceptance_by_position)),
            ("lossless", lossless),
            ("prompts", f"{self.prompts} ({self.tokens} tokens in {self.rounds} rounds)"),
            ("draft / verify / plain step", " / ".join(
                f"{1e3 * s:.1f}" for s in (self.draft_seconds, self.verify_seconds, self.plain_seconds)
            ) + " ms"),
        ]  # fmt: skip

    def plot(self, file: Path) -> None:
        """Draw acceptance by position with its intervals."""
        from matplotlib.figure import Figure  # 0.3 s; no pyplot, so no window system is touched

        positions = np.arange(1, self.num_drafts + 1)
        rates = np.array(self.acceptance_by_position)
        bounds = np.array(self.acceptance_by_position_95).T
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.add_subplot()
        axes.bar(positions, rates, color="#3b6ea5", width=0.7)
        errors = np.clip(np.abs(bounds - rates), 0, None)
        axes.errorbar(positions, rates, yerr=errors, fmt="none", ecolor="#222222", capsize=3, lw=1)
        for position, rate, high in zip(positions, rates, bounds[1], strict=True):
            axes.text(float(position), high + 0.02, f"{rate:.2f}", ha="center", fontsize=9)
        axes.set(xlabel="drafted position", ylabel="accepted up to here", ylim=(0, 1))
        axes.set_title(
            f"acceptance length {self.acceptance_length:.2f} "
            f"(break-even {self.break_even_length:.2f}, {self.prompts} prompts)"
        )
        axes.spines[["top", "right"]].set_visible(False)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=144)


def _ratio(top: Any, bottom: Any) -> Any:
    return np.asarray(top) / np.maximum(np.asarray(bottom), 1)


def _interval(values: Any) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)

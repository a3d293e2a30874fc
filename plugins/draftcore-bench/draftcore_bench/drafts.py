"""What servers tell of their drafts: with each answer, or in counters that only grow."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from typing import Any

# Of `/metrics`: vLLM and llama.cpp have the same names, of their drafts and of all tokens that they made.
COUNTER = re.compile(
    r"^(?:vllm|sglang|llamacpp):(spec_\w+|generation_tokens|tokens_predicted)_total"
    r"(?:\{(.*)\})? (\S+)",
    re.MULTILINE,
)
POSITION = re.compile(r'\bposition="(\d+)"')
GROWING = "drafts", "draft_tokens", "accepted_tokens"
MADE = "generation_tokens", "tokens_predicted"
# Where an answer tells of its drafts, and what rounds, drafted, accepted and rounds by accepted are there:
# llama.cpp, sglang where it was asked to, vLLM where a flag says so.
TOLD = {
    ("timings",): ("", "draft_n", "draft_n_accepted", ""),
    ("sglext", "spec_tokens_details"): (
        *("spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts"),
        "spec_correct_drafts_histogram",
    ),
    ("metrics", "speculative_decoding"): (
        *("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"),
        "acceptance_histogram",
    ),
}
Counters = Mapping[str, float]  # by name, of a position as `NAME 0`


@dataclass(frozen=True)
class Drafts:
    """Drafts that were verified: in how many rounds, how many were drafted and accepted, and where.

    `rounds` is 0 where a server does not tell it; `by_position` has how often each was accepted.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()

    def __add__(self, other: Drafts) -> Drafts:
        pairs = zip_longest(self.by_position, other.by_position, fillvalue=0)
        return Drafts(
            self.rounds + other.rounds,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            tuple(map(sum, pairs)),
        )

    def all_rounds(self, tokens: int) -> int:
        """Return the target's forwards that made so many tokens after the first ones, drafted for or not.

        A round makes its accepted drafts and one token more; some servers count drafts that lie
        behind an answer's end as accepted.
        """
        return max(self.rounds, tokens - self.accepted)

    @classmethod
    def told(cls, event: Mapping[str, Any]) -> Drafts | None:
        """Read what an event of an answer's stream tells; None if nothing."""
        for path, (rounds, drafted, accepted, histogram) in TOLD.items():
            found: Any = event
            for key in path:
                found = found.get(key) or {}
            if drafted in found:
                places = by_position(found.get(histogram) or ())
                return cls(found.get(rounds, 0), found[drafted], found[accepted], places)
        return None

    @classmethod
    def counted(cls, before: Counters, after: Counters, tokens: int) -> Drafts | None:
        """Read what counters grew by while so many tokens were made after the first ones."""
        grew = {name: int(value - before.get(name, 0.0)) for name, value in after.items()}
        if rounds := grew.get("spec_verify_calls"):  # sglang's, which has no more of them
            return cls(rounds, 0, tokens - rounds)
        rounds, drafted, accepted = (grew.get(f"spec_decode_num_{name}", 0) for name in GROWING)
        per = (
            grew.get(f"spec_decode_num_accepted_tokens_per_pos {k}", 0) for k in range(len(grew))
        )
        return cls(rounds, drafted, accepted, tuple(takewhile(bool, per))) if rounds else None


def by_position(histogram: Sequence[int]) -> tuple[int, ...]:
    """Return how often each position was accepted, of how many rounds accepted 0, 1, 2, ... drafts."""
    return tuple(sum(histogram[k:]) for k in range(1, len(histogram)))


def read_counters(text: str) -> Counters:
    """Read the counters of `/metrics`, summed over engines and models."""
    counters = defaultdict[str, float](float)
    for name, labels, value in COUNTER.findall(text):
        place = POSITION.search(labels)
        counters[f"{name} {place[1]}" if place else name] += float(value)
    return counters

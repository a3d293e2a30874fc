"""What servers tell of their drafts: with each answer, or in counters that only grow."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from itertools import count, takewhile
from typing import Any

# What was verified: `rounds`, where they are told, `drafted`, `accepted`, and how often the draft at each
# position was accepted, `at 0`, `at 1`, ...
Drafts = Counter[str]

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
# The counters of `/metrics`: vLLM's and llama.cpp's names are the same; the tokens are those of all answers.
COUNTER = re.compile(r"^\w+:(\w+)_total(?:\{(.*)\})? (\S+)", re.MULTILINE)
POSITION = re.compile(r'\bposition="(\d+)"')
COUNTERS = {
    "spec_decode_num_drafts": "rounds", "spec_decode_num_draft_tokens": "drafted",
    "spec_decode_num_accepted_tokens": "accepted", "spec_decode_num_accepted_tokens_per_pos": "at",
    "spec_verify_calls": "verified", "generation_tokens": "made", "tokens_predicted": "made",
}  # fmt: skip


def told(event: Mapping[str, Any]) -> Drafts | None:
    """Read what an event of an answer's stream tells; None if nothing."""
    for path, (rounds, drafted, accepted, histogram) in TOLD.items():
        found: Any = event
        for key in path:
            found = found.get(key) or {}
        if drafted in found:
            by_accepted = found.get(histogram) or ()
            places = {f"at {k}": sum(by_accepted[k + 1 :]) for k in range(len(by_accepted))}
            counts = {"drafted": found[drafted], "accepted": found[accepted], **places}
            return Counter({"rounds": found.get(rounds, 0), **counts})
    return None


def read_counters(text: str) -> Counter[str]:
    """Read the counters of `/metrics`, summed over engines and models."""
    counters = Counter[str]()
    for name, labels, value in COUNTER.findall(text):
        if name in COUNTERS:
            place = POSITION.search(labels)
            counters[COUNTERS[name] + (f" {place[1]}" if place else "")] += int(float(value))
    return counters


def counted(grew: Counter[str], tokens: int) -> Drafts | None:
    """Read what counters grew by while so many tokens were made after the first ones; None if nothing."""
    if rounds := grew["verified"]:  # sglang has no other
        return Counter(rounds=rounds, accepted=tokens - rounds)
    return grew if grew["rounds"] else None


def acceptance(drafts: Drafts, tokens: int) -> dict[str, Any]:
    """Return what was accepted of the drafts for so many tokens: the length as `draftcore eval` counts it.

    A round makes its accepted drafts and one token more; not each is drafted for, and some servers count
    accepted drafts that lie behind an answer's end.
    """
    rounds = max(1, drafts["rounds"], tokens - drafts["accepted"])
    places = takewhile(bool, (drafts[f"at {k}"] for k in count()))
    return {
        "length": tokens / rounds,
        "rounds": rounds,
        "of_drafted": drafts["accepted"] / drafts["drafted"] if drafts["drafted"] else None,
        "by_position": [accepted / rounds for accepted in places],
    }

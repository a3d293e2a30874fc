"""What serves a draft: an inference engine, started or found, that decodes prompts of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Serving:
    """What an engine is to serve, and how."""

    target: Path  # folder of weights, config and tokenizer
    export: Path | None  # folder of an exported draft; None: the target alone
    num_drafts: int  # drafts a round
    context: int  # the longest prompt and its answer together, in tokens
    dtype: str = "float32"  # of target and draft
    requests: int = 1  # at once
    url: str | None = None  # a server that runs already; None: the engine starts its own


@dataclass(frozen=True)
class Answer:
    """What an engine answered to a prompt.

    `tokens` end with the end token, where one was given. `rounds` are the target's forwards after the
    prefill, which gives the first token. `accepted` says of each position of a round how often a draft
    there was accepted; None where the engine does not say.
    """

    tokens: tuple[int, ...]
    rounds: int
    accepted: tuple[int, ...] | None = None


class Engine(Protocol):
    """Decodes greedily with the target, and with the draft if there is one.

    An engine that can change a draft's weights without a new start has a method
    `load_draft(export: Path) -> None` as well. One that people start by a command has `command() -> str`,
    which serves what this one does, with `<target>` and `<draft>` in place of folders.
    """

    def decode(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        """Continue a prompt until an end token or the limit. Several threads may call it at once."""

    def close(self) -> None:
        """End what was started. An engine that was found goes on."""

"""Ask the target in this process, by transformers: greedy answers, in batches of like length."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from draftcore.contracts.capture import RowError
from draftcore.contracts.target import TargetModel
from draftcore_data.conversations import Conversation, Message
from draftcore_data.conversing import Answer, Talk, converse
from draftcore_data.rendering import Renderer

AHEAD = 8  # batches of questions that are sorted by length together


def answer_here(
    model: TargetModel, renderer: Renderer, batch: int, longest: int, rows: Iterator[Conversation],
    answered: Callable[[Answer], None],
    ended: Callable[[Conversation, list[Message] | RowError], None],
) -> None:  # fmt: skip
    """Take all rows through their conversations by a model's own `generate`; tell answers and ends.

    An answer has up to `longest` tokens.
    """
    open_talks: list[tuple[Conversation, Talk, list[int]]] = []

    def go_on(row: Conversation, talk: Talk, answer: Answer | None) -> None:
        try:
            asked = next(talk) if answer is None else talk.send(answer)
            if row.tools:
                raise RowError("it has tools", "their calls are read by servers: --endpoint")
            messages = (*asked, {"role": "assistant", "content": ""})
            prompt = renderer.prompt_ids(Conversation(row.where, messages))
            open_talks.append((row, talk, prompt))
        except StopIteration as end:
            ended(row, end.value)
        except RowError as error:
            ended(row, error)

    while True:
        for row in itertools.islice(rows, AHEAD * batch - len(open_talks)):
            go_on(row, converse(row), None)
        if not open_talks:
            return
        window = sorted(open_talks, key=lambda one: len(one[2]))
        open_talks.clear()
        for at in range(0, len(window), batch):
            part = window[at : at + batch]
            answers = model.generate([prompt for _, _, prompt in part], longest)
            for (row, talk, prompt), tokens in zip(part, answers, strict=True):
                answer = read(model, tokens, len(prompt))
                answered(answer)
                go_on(row, talk, answer)


def read(model: TargetModel, tokens: list[int], asked: int) -> Answer:
    """Return generated tokens as a message; what stands before `</think>` is its reasoning."""
    whole = tokens[-1] in model.end_tokens
    text: str = model.spec.load_tokenizer().decode(tokens[:-1] if whole else tokens)
    reasoning, closed, content = text.rpartition("</think>")
    message = {"role": "assistant", "content": content.lstrip("\n") if closed else content}
    if closed:
        message["reasoning_content"] = reasoning.removeprefix("<think>").strip("\n")
    return Answer(message, "stop" if whole else "length", asked, len(tokens))

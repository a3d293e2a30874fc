"""Render conversations with the target's chat template, and find what the assistant itself wrote.

The loss mask is true for the tokens that the model produces when it answers: from the end of the
generation prompt to the end-of-turn token, not the newline that a template writes after that. Chat
templates are programs, so where an answer lies in their output is found by running them:

- A template with `{% generation %}` markers says it, and is believed.
- Otherwise the rendering of the messages before a turn, with generation prompt, has to be a prefix
  of the whole text: the turn starts where it ends. This holds for nearly every template.
- Where it does not hold (reasoning is dropped from history, or the generation prompt opens a think
  block that history lacks), a probe is put into the content and the conversation rendered again.
  Only if the probe comes out at one place and changes nothing else is that place believed.

What cannot be placed like this is a `BadRow`; no mask is ever guessed. The text is tokenized once,
as a whole, as `apply_chat_template(tokenize=True)` does, and a token belongs to an answer when its
first character does.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from draftcore.data.conversations import BadRow, Conversation, Message, RowError
from draftcore.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast

Span = tuple[int, int]
Tools = Sequence[Mapping[str, Any]]

# Private-use characters: no template treats them specially, no strip() removes them.
PROBE = "\ue0d7\ue0d8\ue0d9"
GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
CHUNK = 256  # rows tokenized in one call


@dataclass(frozen=True)
class Rendered:
    """A conversation as tokens, [T]; the mask is true where the assistant produced the token."""

    where: str
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]


@dataclass(frozen=True)
class Layout:
    """A rendered text and the spans of characters in it that the assistant produced."""

    where: str
    text: str
    spans: Sequence[Span]

    def mask(self, encoding: Encoding) -> Rendered:
        """Return the text's tokens; those are the assistant's whose first character is."""
        starts = np.array([start for start, _ in encoding.offsets], np.int64)
        mask = np.zeros(len(starts), bool)
        for start, end in self.spans:
            mask |= (starts >= start) & (starts < end)
        return Rendered(self.where, np.array(encoding.ids, np.int32), mask)


class Renderer:
    """Renders conversations for one tokenizer and its chat template.

    Raises `UsageError` when made, if the tokenizer has no chat template, is not a fast one, or has
    a template that cannot render a question and its answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, last_turn_only: bool = False) -> None:
        self._tokenizer, self._last_turn_only = tokenizer, last_turn_only
        self._template = _chat_template(tokenizer)
        self._backend = _exact_offsets(tokenizer)
        self._marked = GENERATION_MARKER.search(self._template) is not None
        self.template_hash = hashlib.blake2b(self._template.encode(), digest_size=16).hexdigest()
        self.added_tokens = tuple(filter(str.strip, tokenizer.get_added_vocab()))
        self._missing_header = ""
        self._learn_template()

    @property
    def identity(self) -> str:
        """All that tokens and spans depend on: tokenizer, template, special tokens."""
        specials = json.dumps(self._tokenizer.special_tokens_map, sort_keys=True)
        return "\0".join((self._backend.to_str(), self._template, specials))

    def render(self, rows: Iterable[Conversation | BadRow]) -> Iterator[Rendered | BadRow]:
        """Render rows in their order; one that cannot be rendered comes out as a `BadRow`."""
        waiting = iter(rows)
        # One call of the tokenizer for many rows is several times faster than one for each.
        while chunk := [self._lay_out(row) for row in itertools.islice(waiting, CHUNK)]:
            texts = [row.text for row in chunk if isinstance(row, Layout)]
            encodings = iter(self._backend.encode_batch(texts, add_special_tokens=False))
            for row in chunk:
                yield row.mask(next(encodings)) if isinstance(row, Layout) else row

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Token ids that ask for the last assistant turn again: all before it, then the header."""
        text = self.ask(messages[: _assistant_turns(messages)[-1]], tools)
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _lay_out(self, row: Conversation | BadRow) -> Layout | BadRow:
        """Write a conversation's text, and find the assistant's spans in it."""
        if isinstance(row, BadRow):
            return row
        turns = _assistant_turns(row.messages)
        try:
            text, spans = self.write(row.messages, row.tools)
            if not self._marked:
                chosen = turns[-1:] if self._last_turn_only else turns
                spans = [_Turn(self, text, row, turn).span() for turn in chosen]
            else:
                if self._last_turn_only and turns[-1] > 0:
                    spans = spans[len(self.write(row.messages[: turns[-1]], row.tools)[1]) :]
                spans = [self._without_trailing_space(text, *span) for span in spans]
        except RowError as error:
            return BadRow(row.where, *error.args)
        return Layout(row.where, text, spans)

    def _without_trailing_space(self, text: str, start: int, end: int) -> Span:
        """Markers often close after the newline that follows the end-of-turn token."""
        answer = text[start:end].rstrip()
        whole = self.end_of_turn and answer.endswith(self.end_of_turn)
        return (start, start + len(answer)) if whole else (start, end)

    # ------------------------------------------------------------ the template

    def _learn_template(self) -> None:
        """Learn from one exchange what the template writes before and after an answer."""
        question: list[Message] = [{"role": "user", "content": "Hello"}]
        try:
            exchange, _ = self.write([*question, {"role": "assistant", "content": PROBE}])
            prompt, asked = self.ask(question), self.write(question)[0]
            if exchange.count(PROBE) != 1:
                shown = repr(exchange.replace(PROBE, "<content>")[:200])
                raise RowError("it does not write an assistant's content as it stands, once", shown)
        except RowError as error:
            raise UsageError(
                f"the chat template of {self._tokenizer.name_or_path} cannot render a question and "
                f"its answer\n  {error}\n"
                "  use the tokenizer of a chat model, or correct its chat_template"
            ) from error
        before, self.tail = exchange.split(PROBE)
        longest_first = sorted(self.added_tokens, key=len, reverse=True)
        end = re.search("|".join(map(re.escape, longest_first)) or "(?!)", self.tail)
        self.end_of_turn = self.tail[: end.end()] if end else self.tail.rstrip()
        # A template without generation prompt still writes a header, which is no part of an answer.
        # A space at its end is: it belongs to the token of the answer's first word.
        ignored = prompt == asked and before.startswith(prompt)
        header = before[len(prompt) :].rstrip(" ") if ignored else ""
        self._missing_header = header if header.strip() else ""
        same = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(asked, prompt, strict=False)
        )
        self.header = prompt[len(list(same)) :] + self._missing_header

    def write(
        self, messages: Sequence[Message], tools: Tools = (), ask: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the text that the template writes, and the spans that its markers enclose.

        Raises `RowError` where the template refuses: it is a program written by others, and what
        it raises is about this row. `apply_chat_template(return_assistant_tokens_mask=True)` is no
        help: it maps spans to tokens by `char_to_token`, which is None for a space when the
        tokenizer trims offsets, and then masks to the end of the text (transformers 5.23).
        """
        from transformers.utils.chat_template_utils import render_jinja_template  # 1 s: with torch

        if not messages:
            raise RowError("the chat template refuses it", "no message comes before the answer")
        try:
            (text,), found = render_jinja_template(
                conversations=[list(messages)],
                tools=list(tools) or None,
                chat_template=self._template,
                return_assistant_tokens_mask=self._marked,
                add_generation_prompt=ask,
                **self._tokenizer.special_tokens_map,
            )
            text.encode()  # JSON can hold half of a surrogate pair, which no tokenizer takes
        except UnicodeEncodeError as error:
            raise RowError("the text is not valid Unicode", error.reason) from error
        except Exception as error:
            detail = str(error) or type(error).__name__
            raise RowError("the chat template refuses it", detail) from error
        return text, [span for spans in found for span in spans if span[0] < span[1]]

    def ask(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """Return the text that asks for an answer to `messages`. Raises `RowError`."""
        return self.write(messages, tools, ask=True)[0] + self._missing_header


class _Turn:
    """One assistant turn inside the rendered `text`; finds its span of characters."""

    def __init__(self, renderer: Renderer, text: str, row: Conversation, index: int) -> None:
        self.renderer, self.text, self.row, self.index = renderer, text, row, index
        self.message, self.before = row.messages[index], row.messages[:index]
        self.content: str = self.message["content"]
        self.tail, self.end_of_turn = renderer.tail, renderer.end_of_turn

    def span(self) -> Span:
        start = self._start()
        find_end = self._tool_call_end if self.message.get("tool_calls") else self._end
        return start, find_end(start)

    def _start(self) -> int:
        """Where the prompt ends, or else the content starts, if only a header stands before it.

        The header is what the template writes before a content that is only the probe. It is part
        of the generation prompt, or ends with the usual one; what follows it is, letter for letter,
        the end of the content. So whatever the template dropped, the rest is the answer.
        """
        prompt, usual = "", self.renderer.header
        try:
            prompt = self.renderer.ask(self.before, self.row.tools)
            if self.text.startswith(prompt):
                return len(prompt)
        except RowError:
            pass  # nothing to prompt with: the turn comes first, or follows a system turn
        head, found, _ = self._text_with(PROBE).partition(PROBE)
        visible, end = self._visible_content()
        known = prompt.startswith(head) or (usual.strip() and head.endswith(usual))
        verbatim = self.text.startswith(head) and visible.endswith(self.text[len(head) : end])
        if not (found and known and verbatim):
            raise self._error("the text before it is not the generation prompt")
        return len(head)

    def _end(self, start: int) -> int:
        """The end of the end-of-turn token, or of the content where the template writes none."""
        if self.index == len(self.row.messages) - 1 and self.text.endswith(self.tail):
            return len(self.text) - len(self.tail) + len(self.end_of_turn)
        for content in (self.content, self.content.strip()):  # the quick way, nearly always
            if self.text.startswith(content + self.end_of_turn, start):
                return start + len(content) + len(self.end_of_turn)
        _, end = self._visible_content()
        # Some templates end a turn in history otherwise than the model does; that end is theirs.
        return end + len(self.end_of_turn) if self.text.startswith(self.end_of_turn, end) else end

    def _tool_call_end(self, start: int) -> int:
        """The end of a turn whose calls follow its content, in the template's own notation."""
        shown, _ = self.renderer.write([*self.before, self.message], self.row.tools)
        if self.end_of_turn and shown.endswith(self.tail):
            shown = shown.removesuffix(self.tail) + self.end_of_turn
        else:
            shown = shown.rstrip()
            if not shown.endswith(self.renderer.added_tokens):
                raise self._error("its tool calls have no end-of-turn token")
        if len(shown) < start or not self.text.startswith(shown):
            raise self._error("later turns change how its tool calls are written")
        return len(shown)

    def _visible_content(self) -> tuple[str, int]:
        """The content up to the last character that is rendered, and where that is in the text."""
        for content in (self.content, self.content.rstrip()):
            before, found, after = self._text_with(content + PROBE).partition(PROBE)
            if found and before + after == self.text:
                return content, len(before)
        raise self._error("the template rewrites its content")

    def _text_with(self, content: str) -> str:
        messages = list(self.row.messages)
        messages[self.index] = {**self.message, "content": content}
        return self.renderer.write(messages, self.row.tools)[0]

    def _error(self, reason: str) -> RowError:
        return RowError(
            "an assistant turn cannot be placed exactly in the rendered text",
            f"message {self.index + 1}: {reason}",
        )


def _assistant_turns(messages: Sequence[Message]) -> list[int]:
    return [at for at, message in enumerate(messages) if message["role"] == "assistant"]


# ---------------------------------------------------------------- the tokenizer


def _chat_template(tokenizer: PreTrainedTokenizerFast) -> str:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        named = ", ".join(sorted(tokenizer.chat_template or ()))
        raise UsageError(
            f"the tokenizer of {tokenizer.name_or_path or 'the target'} has no chat template"
            f"{named and f' that is called default, but {named}'}\n"
            "  use a chat (instruct) model as the target, or put a chat_template.jinja file\n"
            "  with the format that the model was trained on beside its tokenizer"
        ) from error


def _exact_offsets(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """A copy of the backend whose offsets cover the text without gaps.

    Byte-level post-processors trim spaces off the offsets, which moves a space's token out of the
    header and into the answer. Without special tokens a post-processor does nothing else.
    """
    from tokenizers import Tokenizer

    if not tokenizer.is_fast:
        raise UsageError(
            f"{type(tokenizer).__name__} is not a fast tokenizer: it does not say where its tokens"
            " stand in the text\n  add a tokenizer.json to the target's folder"
        )
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = None
    backend.no_truncation()
    backend.no_padding()
    sample = "Hello, world!\n" + "\n".join(tokenizer.all_special_tokens)
    expected = tokenizer(sample, add_special_tokens=False)["input_ids"]
    if backend.encode(sample, add_special_tokens=False).ids != expected:
        raise UsageError(
            f"{type(tokenizer).__name__} does not tokenize as its own tokenizer.json does\n"
            "  load it without options that change tokenization, such as split_special_tokens"
        )
    return backend

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

Where a template writes an answer in history otherwise than when it was given (earlier reasoning is
dropped, tool calls are written anew), a conversation becomes several rows: the fewest texts in which
each answer stands as it was served. What is dropped all the same is counted in a row's notes.

Images are written into the text by the target's processor, whose tokens have to be those of the text.

What cannot be placed like this is a `BadRow`; no mask is ever guessed. The text is tokenized once,
as a whole, as `apply_chat_template(tokenize=True)` does, and a token belongs to an answer when its
first character does.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from draftcore.config import DataConfig
from draftcore.contracts.capture import Image
from draftcore.data.conversations import (
    REASONING,
    BadRow,
    Conversation,
    Message,
    Rendered,
    Row,
    RowError,
    is_learned,
)
from draftcore.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast

    from draftcore.contracts.target import ImageProcessor

Span = tuple[int, int]
Tools = Sequence[Mapping[str, Any]]

# Private-use characters: no template treats them specially, no strip() removes them.
PROBE = "\ue0d7\ue0d8\ue0d9"
GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
CHUNK = 256  # rows tokenized in one call
# What a row's notes say.
REASONING_LOST = "reasoning of {:,} answers is not in the rendered text"
CALLS_LOST = "tool calls of {:,} answers are not in the rendered text"
SPLIT = (
    "{:,} rows added: the template changes earlier answers, and each is learned as it was served"
)


@dataclass(frozen=True)
class Layout:
    """A rendered text and the spans of characters in it that the assistant produced.

    Its images lie at `uris`; once they are written into it, all its `token_ids` are known.
    """

    where: str
    text: str
    spans: Sequence[Span]
    notes: Mapping[str, int] = field(default_factory=dict)
    uris: Sequence[str] = ()
    images: tuple[Image, ...] = ()
    token_ids: Sequence[int] | None = None

    def with_images(self, processor: ImageProcessor | None) -> Layout | BadRow:
        """Let the target's processor write the images into the text, if there are some."""
        if not self.uris:
            return self
        if processor is None:
            return BadRow(self.where, "it holds images, and the target takes text alone")
        try:
            text, spans, ids, images = processor.write(self.text, self.spans, self.uris)
        except RowError as error:
            return BadRow(self.where, *error.args)
        return replace(self, text=text, spans=spans, token_ids=ids, images=images)

    def mask(self, encoding: Encoding) -> Rendered | BadRow:
        """Return the text's tokens; those are the assistant's whose first character is."""
        if self.token_ids not in (None, encoding.ids):
            return BadRow(self.where, "the target's processor makes other tokens of the text")
        starts = np.array([start for start, _ in encoding.offsets], np.int64)
        mask = np.zeros(len(starts), bool)
        for start, end in self.spans:
            mask |= (starts >= start) & (starts < end)
        ids = np.array(encoding.ids, np.int32)
        return Rendered(self.where, ids, mask, self.notes, self.images)


@dataclass(frozen=True)
class Blind:
    """Refuses rows with images, in the place of what would read them, and says why."""

    reason: str
    identity: str = ""

    def write(self, *given: Any) -> Any:
        raise UsageError(
            f"the data has rows with images, and here they cannot be read: {self.reason}\n"
            "  or leave such rows out of the data"
        )

    inputs = write


class Renderer:
    """Renders conversations for one tokenizer by `data.chat_template` and `data.template_options`.

    `date` is the time that a template is told, if it asks: without one, now. Rows with images are left
    out without the target's `processor`. Raises `UsageError` when made, if there is no chat template,
    the tokenizer is not a fast one, or the template cannot render a question and its answer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        config: DataConfig | None = None,
        date: str = "",
        processor: ImageProcessor | None = None,
    ) -> None:
        config, self.processor = config or DataConfig(), processor
        self._last_turn_only, self._options = config.last_turn_only, dict(config.template_options)
        self._template = _chat_template(tokenizer, config.chat_template)
        self._specials, self._vocabulary = tokenizer.special_tokens_map, len(tokenizer)
        self._backend = _exact_offsets(tokenizer)
        self._marked = GENERATION_MARKER.search(self._template) is not None
        now = datetime.now().isoformat(timespec="seconds")
        self.date = (date or now) if "strftime_now" in self._template else ""
        self._dating = _dating(self._template, self.date) if self.date else ""
        self.template_hash = hashlib.blake2b(self._template.encode(), digest_size=16).hexdigest()
        self.added_tokens = tuple(filter(str.strip, tokenizer.get_added_vocab()))
        self._missing_header, self._text_arguments = "", False
        self._learn_template(config.chat_template or tokenizer.name_or_path)

    @property
    def identity(self) -> str:
        """All that tokens and spans depend on, but options and date: tokenizer and template."""
        specials = json.dumps(self._specials, sort_keys=True)
        return "\0".join((self._backend.to_str(), self._template, specials))

    def render(self, rows: Iterable[Row]) -> Iterator[Rendered | BadRow]:
        """Render rows in their order; one that cannot be rendered comes out as a `BadRow`."""
        waiting = iter(rows)
        # One call of the tokenizer for many rows is several times faster than one for each.
        while chunk := [
            one for row in itertools.islice(waiting, CHUNK) for one in self._lay_out(row)
        ]:
            chunk = [
                row.with_images(self.processor) if isinstance(row, Layout) else row for row in chunk
            ]
            texts = [row.text for row in chunk if isinstance(row, Layout)]
            encodings = iter(self._backend.encode_batch(texts, add_special_tokens=False))
            for row in chunk:
                yield row.mask(next(encodings)) if isinstance(row, Layout) else row

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Token ids that ask for the last assistant turn again, or for the first: with its header.

        Raises `RowError` where the template refuses, and for messages with images.
        """
        if any(isinstance(message["content"], list) for message in messages):
            raise RowError("it asks about images, and here text alone is asked")
        turns = _assistant_turns(messages)
        text = self.ask(messages[: turns[-1]] if turns else messages, tools)
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _lay_out(self, row: Row) -> Sequence[Layout | Rendered | BadRow]:
        """Write a conversation's text, or texts, and find the assistant's spans in them."""
        if isinstance(row, BadRow):
            return [row]
        if isinstance(row, Rendered):
            return [self._checked(row)]
        turns = _assistant_turns(row.messages)
        chosen = [turn for turn in turns if is_learned(row.messages[turn])]
        chosen = [turn for turn in chosen if turn == turns[-1] or not self._last_turn_only]
        if not chosen:
            roles = ", ".join(message["role"] for message in row.messages)
            return [
                BadRow(row.where, "no assistant turn" + " to learn" * bool(turns), f"roles {roles}")
            ]
        found: list[Layout | BadRow]
        try:
            whole = self._place(row, chosen)
            found, lost = [whole], sum(whole.notes.values())
        except RowError as error:
            found, lost = [BadRow(row.where, *error.args)], len(row.messages) * 2
        # Where this fails too, the conversation as a whole says more of what is wrong.
        with contextlib.suppress(RowError):
            if lost:
                served, still = self._as_served(row, chosen)
                return served if still < lost else found
        return found

    def _checked(self, row: Rendered) -> Rendered | BadRow:
        """Take a row that came as tokens, if the tokens are the target's."""
        ids, size = row.token_ids, self._vocabulary
        if len(ids) and not 0 <= ids.min() <= ids.max() < size:
            return BadRow(row.where, f"a token id is not below {size}, as the target's are")
        mask = row.loss_mask.copy()
        mask[: row.last_answer() * self._last_turn_only] = False
        return replace(row, loss_mask=mask)

    def _as_served(self, row: Conversation, turns: Sequence[int]) -> tuple[list[Layout], int]:
        """Write the fewest texts in which each turn stands as when it was given, and count what is lost."""
        found: list[Layout] = []
        lost = 0
        for turn in reversed(turns):
            part = replace(row, messages=row.messages[: turn + 1])
            try:
                one = self._place(part, [turn])
            except RowError:
                one = self._put_together(part)
            lost += sum(one.notes.values())
            end = max((end for _, end in one.spans), default=0)
            if found and found[-1].text.startswith(one.text[:end]):
                notes = Counter(found[-1].notes) + Counter(one.notes)
                found[-1] = replace(found[-1], spans=[*one.spans, *found[-1].spans], notes=notes)
            else:
                found.append(one)
        more = {SPLIT: len(found) - 1} if len(found) > 1 else {}
        found[0] = replace(found[0], notes={**found[0].notes, **more})
        return found[::-1], lost

    def _put_together(self, row: Conversation) -> Layout:
        """Put the last answer after its prompt, where the template never writes both in one text.

        What is before the answer is what is before another one, up to the header: the rest is it.
        """
        *before, message = row.messages
        prompt, shown = self.ask(before, row.tools), self.write(row.messages, row.tools)[0]
        other, _ = self.write([*before, {"role": "assistant", "content": PROBE}], row.tools)
        head, shown = other.partition(PROBE)[0].removesuffix(self.opening), self.closed(shown)
        ends = THOUGHT.sub("", message["content"]).strip() + self.end_of_turn
        known = self.header.strip() and head.endswith(self.header) and prompt.endswith(self.header)
        whole = shown.startswith(head) and (message.get("tool_calls") or shown.endswith(ends))
        if self._marked or not (known and whole):
            raise RowError("an assistant turn cannot be placed exactly in the rendered text")
        answer = shown.removeprefix(head)
        lost = Counter(_lost(len(before), message, answer.removesuffix(self.end_of_turn)))
        span = (len(prompt), len(prompt) + len(answer))
        return Layout(row.where, prompt + answer, [span], lost, row.images)

    def closed(self, text: str) -> str:
        """Cut off what the template writes after the end-of-turn token of a last answer."""
        if text.endswith(self.tail):
            return text.removesuffix(self.tail) + self.end_of_turn
        text = text.rstrip()
        if not text.endswith(self.added_tokens):
            raise RowError("an answer has no end-of-turn token")
        return text

    def _place(self, row: Conversation, turns: Sequence[int]) -> Layout:
        """Write a conversation's text and find these turns in it. Raises `RowError`."""
        text, marked = self.write(row.messages, row.tools)
        if not self._marked:
            spans = [_Turn(self, text, row, turn).span() for turn in turns]
        else:
            if list(turns) != _assistant_turns(row.messages):
                ends = [(self._count(row, turn), self._count(row, turn + 1)) for turn in turns]
                marked = [span for start, end in ends for span in marked[start:end]]
            spans = [self._without_trailing_space(text, *span) for span in marked]
        written = [text[start:end] for start, end in spans]
        if len(written) != len(turns):  # markers need not enclose each turn once
            written = ["".join(written)] * len(turns)
        lost = Counter(
            note
            for turn, answer in zip(turns, written, strict=True)
            for note in _lost(turn, row.messages[turn], answer.removesuffix(self.end_of_turn))
        )
        return Layout(row.where, text, spans, lost, row.images)

    def _count(self, row: Conversation, turn: int) -> int:
        """How many spans the template marks in the messages before a turn."""
        return len(self.write(row.messages[:turn], row.tools)[1]) if turn else 0

    def _without_trailing_space(self, text: str, start: int, end: int) -> Span:
        """Markers often close after the newline that follows the end-of-turn token."""
        answer = text[start:end].rstrip()
        whole = self.end_of_turn and answer.endswith(self.end_of_turn)
        return (start, start + len(answer)) if whole else (start, end)

    # ------------------------------------------------------------ the template

    def _learn_template(self, whose: str) -> None:
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
                f"the chat template of {whose} cannot render a question and its answer\n"
                f"  {error}\n"
                "  use the tokenizer of a chat model, or name a template that can: data.chat_template"
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
        call = {"type": "function", "function": {"name": PROBE, "arguments": {PROBE: PROBE}}}
        called = [*question, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            self.write(called)
        except RowError:  # it may refuse all tools, too
            self._text_arguments = True
        self.header = prompt[len(list(same)) :] + self._missing_header
        self.opening = before.rpartition(self.header)[2] if self.header else ""

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
        given = [  # reasoning by each name that templates know it by
            {**dict.fromkeys(REASONING, reasoning), **one}
            if (reasoning := one.get("reasoning_content"))
            else one
            for one in messages
        ]
        if self._text_arguments:
            given = [_with_text_arguments(one) for one in given]
        try:
            (text,), found = render_jinja_template(
                conversations=[given],
                tools=list(tools) or None,
                chat_template=self._dating + self._template,
                return_assistant_tokens_mask=self._marked,
                add_generation_prompt=ask,
                **{**self._specials, **self._options},
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
        is_last = self.index == len(self.row.messages) - 1
        for content in (self.content, self.content.strip()):  # the quick way, nearly always
            if is_last and self.text.endswith(content + self.tail, start):
                return len(self.text) - len(self.tail) + len(self.end_of_turn)
            if self.text.startswith(content + self.end_of_turn, start):
                return start + len(content) + len(self.end_of_turn)
        _, end = self._visible_content()
        # Some templates end a turn in history otherwise than the model does; that end is theirs.
        return end + len(self.end_of_turn) if self.text.startswith(self.end_of_turn, end) else end

    def _tool_call_end(self, start: int) -> int:
        """The end of a turn whose calls follow its content, in the template's own notation."""
        shown, _ = self.renderer.write([*self.before, self.message], self.row.tools)
        shown = self.renderer.closed(shown)
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


def _with_text_arguments(message: Message) -> Message:
    """Return a message for templates that take the arguments of calls as JSON text."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": dict(call.get("function", call))} for call in message["tool_calls"]
    ]
    for call in calls:
        call["function"]["arguments"] = json.dumps(call["function"].get("arguments", {}))
    return {**message, "tool_calls": calls}


def _assistant_turns(messages: Sequence[Message]) -> list[int]:
    return [at for at, message in enumerate(messages) if message["role"] == "assistant"]


def _lost(turn: int, message: Message, written: str) -> Iterator[str]:
    """Say what of an answer is not in what the template wrote. Raises `RowError` if nothing is."""
    reasoning, said = message.get("reasoning_content", ""), message["content"]
    if thought := THOUGHT.match(said):
        reasoning, said = thought[1], said[thought.end() :]
    reasoning, said = reasoning.strip(), said.strip()
    calls = [str(call.get("function", call).get("name")) for call in message.get("tool_calls", ())]
    at = written.rfind(said)
    before, after = written[:at], written[at + len(said) :]
    if reasoning and (lost := reasoning not in before):
        yield REASONING_LOST
    if calls and (gone := any(name not in before + after for name in calls)):
        yield CALLS_LOST
    if not (said or (reasoning and not lost) or (calls and not gone)):
        raise RowError("an answer is empty in the rendered text", f"message {turn + 1}")


# ---------------------------------------------------------------- the tokenizer


def _chat_template(tokenizer: PreTrainedTokenizerFast, file: str | None) -> str:
    if file is not None:
        try:
            return Path(file).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"data.chat_template: {file} cannot be read\n  {error}") from error
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        named = ", ".join(sorted(tokenizer.chat_template or ()))
        raise UsageError(
            f"the tokenizer of {tokenizer.name_or_path or 'the target'} has no chat template"
            f"{named and f' that is called default, but {named}'}\n"
            "  use a chat (instruct) model as the target, or name a file with the format that the\n"
            "  model was trained on: data.chat_template"
        ) from error


def _dating(template: str, date: str) -> str:
    """Return a macro to put before a template, which tells it this date in the place of today's.

    A template is given plain data only, so what it calls is written in its own language.
    """
    told, given = "", datetime.fromisoformat(date)
    for directive in sorted({*re.findall(r"%-?[a-zA-Z]", template)}):
        told += f".replace({directive!r}, {given.strftime(directive)!r})"
    return f"{{% macro strftime_now(format) %}}{{{{ format{told} }}}}{{% endmacro %}}\n"


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

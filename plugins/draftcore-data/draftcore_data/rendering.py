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

In the code, `Renderer._find_answers` chooses: `_find_spans` writes one text and finds all answers in
it, by `_marked_spans` or by a `_Turn` for each; where that loses or cannot place one,
`_split_per_answer` writes a text for each, by `_join_prompt_and_answer` where no text has both.
`_spans_of_parts` finds the answers of a long conversation, where the template allows it.
Whoever changes what is rendered raises `FORMAT`.
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

from draftcore.contracts.capture import Image, ImageProcessor, RowError
from draftcore.errors import UsageError
from draftcore.files import regular
from draftcore_data.conversations import (
    REASONING,
    BadRow,
    Conversation,
    Message,
    Rendered,
    Row,
    is_learned,
)
from draftcore_data.options import DataOptions

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast

# Of rendered datasets: raise it when what is rendered, or what their files hold, changes.
FORMAT = 7

Span = tuple[int, int]
Tools = Sequence[Mapping[str, Any]]

# Private-use characters: no template treats them specially, no strip() removes them.
PROBE = "\ue0d7\ue0d8\ue0d9"
GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
ROWS_PER_CALL = 256  # of the tokenizer
LONG = 64  # messages of a conversation whose answers are found in parts of it
QUESTIONS = 8  # of such a part
NOT_PLACED = "an assistant turn cannot be placed exactly in the rendered text"
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

    def to_tokens(self, encoding: Encoding) -> Rendered | BadRow:
        """Return the text's tokens; those are the assistant's whose first character is."""
        if self.token_ids not in (None, encoding.ids):
            return BadRow(self.where, "the target's processor makes other tokens of the text")
        starts = np.array([start for start, _ in encoding.offsets], np.int64)
        mask = np.zeros(len(starts), bool)
        for first, last in np.searchsorted(starts, np.array(self.spans, np.int64).reshape(-1, 2)):
            mask[first:last] = True
        ids = np.array(encoding.ids, np.int32)
        return Rendered(self.where, ids, mask, self.notes, self.images)


class Renderer:
    """Renders conversations for one tokenizer by `data.chat_template` and `data.template_options`.

    `date` is what a template gets that asks for the time; without one, it is now. Rows with images are
    left out without the target's `processor`. Raises `UsageError` when made, if there is no chat template,
    the tokenizer is not a fast one, or the template cannot render a question and its answer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        config: DataOptions | None = None,
        date: str = "",
        processor: ImageProcessor | None = None,
    ) -> None:
        config, self.processor = config or DataOptions(), processor
        self._longest = config.max_length
        self._last_turn_only, self._options = config.last_turn_only, dict(config.template_options)
        self._template = _chat_template(tokenizer, config.chat_template)
        self._specials, self._vocabulary = tokenizer.special_tokens_map, len(tokenizer)
        self._backend = _exact_offsets(tokenizer)
        self._has_markers = GENERATION_MARKER.search(self._template) is not None
        now = datetime.now().isoformat(timespec="seconds")
        self.date = (date or now) if "strftime_now" in self._template else ""
        self._date_macro = _date_macro(self._template, self.date) if self.date else ""
        told = f"\0{sorted(self._options.items())}" if self._options else ""
        content = (self._template + told).encode()
        self.template_hash = hashlib.blake2b(content, digest_size=16).hexdigest()
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
        while chunk := list(itertools.islice(waiting, ROWS_PER_CALL)):
            parts = [part for row in chunk for part in self._find_answers(row)]
            parts = [p.with_images(self.processor) if isinstance(p, Layout) else p for p in parts]
            texts = [part.text for part in parts if isinstance(part, Layout)]
            encodings = iter(self._backend.encode_batch(texts, add_special_tokens=False))
            for part in parts:
                yield part.to_tokens(next(encodings)) if isinstance(part, Layout) else part

    def prompt_ids(self, row: Conversation | Rendered) -> list[int]:
        """Token ids that ask for the last assistant turn again, or for the first: with its header.

        Raises `RowError` where the template refuses, and for a conversation with images.
        """
        if isinstance(row, Rendered):
            return list(row.token_ids[: row.last_answer()].tolist())
        if row.images:
            raise RowError("it asks about images, and here text alone is asked")
        turns = _assistant_turns(row.messages)
        before = row.messages[: turns[-1]] if turns else row.messages
        text = self.render_prompt(before, row.tools)
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    # ------------------------------------------------------------ the strategies

    def _find_answers(self, row: Row) -> Sequence[Layout | Rendered | BadRow]:
        """Choose the strategy for a row: one text with all answers, or several with fewer each."""
        if isinstance(row, BadRow):
            return [row]
        if isinstance(row, Rendered):
            return [self._check_tokens(row)]
        turns = _assistant_turns(row.messages)
        chosen = [turn for turn in turns if is_learned(row.messages[turn])]
        chosen = [turn for turn in chosen if turn == turns[-1] or not self._last_turn_only]
        if not chosen:
            roles = ", ".join(message["role"] for message in row.messages)
            reason = "no assistant turn" + " to learn" * bool(turns)
            return [BadRow(row.where, reason, f"roles {roles}")]
        if len(row.messages) > LONG:
            with contextlib.suppress(RowError):
                spans = self._spans_of_parts(row, chosen)
                if spans and not (layout := self._find_spans(row, chosen, spans)).notes:
                    return [layout]
            row, chosen = self._cut_beyond_longest(row, chosen)
        whole: Layout | BadRow
        try:
            whole = self._find_spans(row, chosen)
            lost = sum(whole.notes.values())
        except RowError as error:
            whole, lost = BadRow(row.where, *error.args), len(row.messages) * 2
        # Where splitting fails too, the conversation as a whole says more of what is wrong.
        with contextlib.suppress(RowError):
            if lost:
                split, lost_by_split = self._split_per_answer(row, chosen)
                return split if lost_by_split < lost else [whole]
        return [whole]

    def _check_tokens(self, row: Rendered) -> Rendered | BadRow:
        """Used for a row that came as tokens: they are taken if they are the target's."""
        ids, size = row.token_ids, self._vocabulary
        if len(ids) and not 0 <= ids.min() <= ids.max() < size:
            return BadRow(row.where, f"a token id is not below {size}, as the target's are")
        mask = row.loss_mask.copy()
        mask[: row.last_answer() * self._last_turn_only] = False
        return replace(row, loss_mask=mask)

    def _find_spans(
        self, row: Conversation, turns: Sequence[int], spans: Sequence[Span] = ()
    ) -> Layout:
        """Used first, for every conversation: write it as one text, and find these turns in it.

        Raises `RowError` for a turn that cannot be found.
        """
        text, marked = self.render_text(row.messages, row.tools)
        spans = spans or self._spans_in(row, turns, text, marked)
        written = [text[start:end] for start, end in spans]
        if len(written) != len(turns):  # markers need not enclose each turn once
            written = ["".join(written)] * len(turns)
        lost = Counter(
            note
            for turn, answer in zip(turns, written, strict=True)
            for note in self._lost_parts(turn, row.messages[turn], answer)
        )
        return Layout(row.where, text, spans, lost, row.images)

    def _spans_in(
        self, row: Conversation, turns: Sequence[int], text: str, marked: list[Span]
    ) -> list[Span]:
        if self._has_markers:
            return self._marked_spans(row, turns, text, marked)
        return [_Turn(self, text, row, turn).span() for turn in turns]

    def _spans_of_parts(self, row: Conversation, turns: Sequence[int]) -> list[Span]:
        """Used for a long conversation: find its answers in parts of it, in time that grows as it does.

        A part is written behind the conversation's first answer, and before the message that follows it.
        None are found where these texts, put together, are not the whole text. Raises `RowError`.
        """
        messages, spans = row.messages, list[Span]()
        cuts = [*_questions(messages)[::QUESTIONS], len(messages)]
        first, follows = messages[: cuts[0]], messages[cuts[0] : cuts[0] + 1]
        head, _ = self._written_after(first, follows, row.tools)
        written = head
        for start, end in itertools.pairwise(cuts):
            follows = messages[end : end + 1]
            part = replace(row, messages=(*first, *messages[start:end], *follows))
            text, marked = self.render_text(part.messages, row.tools)
            next_head, rest = self._written_after(first, follows, row.tools)
            own = text[len(head) : len(text) - len(rest)]
            shift = start - len(first)  # of its messages
            inside = [turn - shift for turn in turns if start * (shift > 0) <= turn < end]
            at = len(written) - len(head)
            spans += [(a + at, b + at) for a, b in self._spans_in(part, inside, text, marked)]
            written, head = written + own, next_head
        return spans if written == self.render_text(messages, row.tools)[0] else []

    def _written_after(
        self, first: Sequence[Message], follows: Sequence[Message], tools: Tools
    ) -> tuple[str, str]:
        """Return what is written before the content of a message that follows these, and from there on."""
        if not follows:
            return "", ""
        text, _ = self.render_text([*first, *follows], tools)
        probed, _ = self.render_text([*first, {**follows[0], "content": PROBE}], tools)
        same = _common(text, probed)
        return text[:same], text[same:]

    def _cut_beyond_longest(
        self, row: Conversation, turns: list[int]
    ) -> tuple[Conversation, list[int]]:
        """Cut a long conversation behind the first answer whose prompt alone is longer than any row.

        All later ones are, too, and time grows as the square of what is looked at.
        """
        count = LONG
        for at in _questions(row.messages):
            if at < count:
                continue
            count = at * 3 // 2
            with contextlib.suppress(RowError):
                text, _ = self.render_text(row.messages[: at + 1], row.tools)
                if len(self._backend.encode(text, add_special_tokens=False).ids) > self._longest:
                    last = next((turn for turn in turns if turn > at), len(row.messages))
                    cut = replace(row, messages=row.messages[: last + 1])
                    return cut, [turn for turn in turns if turn <= last]
        return row, turns

    def _marked_spans(
        self, row: Conversation, turns: Sequence[int], text: str, marked: list[Span]
    ) -> list[Span]:
        """Used where the template has `{% generation %}` markers: take the spans of these turns."""

        def count_before(turn: int) -> int:
            return len(self.render_text(row.messages[:turn], row.tools)[1]) if turn else 0

        if list(turns) != _assistant_turns(row.messages):
            ends = [(count_before(turn), count_before(turn + 1)) for turn in turns]
            marked = [span for start, end in ends for span in marked[start:end]]
        return [self._cut_trailing_space(text, *span) for span in marked]

    def _cut_trailing_space(self, text: str, start: int, end: int) -> Span:
        """Markers often close after the newline that follows the end-of-turn token."""
        answer = text[start:end].rstrip()
        whole = self.end_of_turn and answer.endswith(self.end_of_turn)
        return (start, start + len(answer)) if whole else (start, end)

    def _split_per_answer(
        self, row: Conversation, turns: Sequence[int]
    ) -> tuple[list[Layout], int]:
        """Used where the text of all turns changes earlier answers: write a text for each of them.

        Returns the fewest texts in which each turn stands as when it was given, and how many parts of
        answers are lost all the same.
        """
        texts: list[Layout] = []  # the last answer's first
        lost = 0
        for turn in reversed(turns):
            until_turn = replace(row, messages=row.messages[: turn + 1])
            try:
                text = self._find_spans(until_turn, [turn])
            except RowError:
                text = self._join_prompt_and_answer(until_turn)
            lost += sum(text.notes.values())
            end = max((end for _, end in text.spans), default=0)
            if texts and texts[-1].text.startswith(text.text[:end]):
                notes = Counter(texts[-1].notes) + Counter(text.notes)
                texts[-1] = replace(texts[-1], spans=[*text.spans, *texts[-1].spans], notes=notes)
            else:
                texts.append(text)
        more = {SPLIT: len(texts) - 1} if len(texts) > 1 else {}
        texts[0] = replace(texts[0], notes={**texts[0].notes, **more})
        return texts[::-1], lost

    def _join_prompt_and_answer(self, row: Conversation) -> Layout:
        """Used where the template never writes a prompt and its answer in one text: join the two.

        The answer is what the template writes of the last message, without what it writes before the
        probe of another one: up to the header both are the same.
        """
        *before, message = row.messages
        prompt = self.render_prompt(before, row.tools)
        shown = self.cut_after_end_of_turn(self.render_text(row.messages, row.tools)[0])
        probe = {"role": "assistant", "content": PROBE}
        head, _, _ = self.render_text([*before, probe], row.tools)[0].partition(PROBE)
        head = head.removesuffix(self.opening)
        ends = THOUGHT.sub("", message["content"]).strip() + self.end_of_turn
        known = self.header.strip() and head.endswith(self.header) and prompt.endswith(self.header)
        whole = shown.startswith(head) and (message.get("tool_calls") or shown.endswith(ends))
        if self._has_markers or not (known and whole):
            raise RowError(NOT_PLACED)
        answer = shown.removeprefix(head)
        lost = Counter(self._lost_parts(len(before), message, answer))
        span = (len(prompt), len(prompt) + len(answer))
        return Layout(row.where, prompt + answer, [span], lost, row.images)

    def _lost_parts(self, turn: int, message: Message, answer: str) -> Iterator[str]:
        """Yield a note for what of a message its answer lacks. Raises `RowError` if it is all."""
        written = answer.removesuffix(self.end_of_turn)
        reasoning, content = message.get("reasoning_content", ""), message["content"]
        if thought := THOUGHT.match(content):
            reasoning, content = thought[1], content[thought.end() :]
        reasoning, content = reasoning.strip(), content.strip()
        calls = [call.get("function", call) for call in message.get("tool_calls", ())]
        at = written.rfind(content)
        before, after = written[:at], written[at + len(content) :]
        if reasoning and (no_reasoning := reasoning not in before):
            yield REASONING_LOST
        if calls and (
            no_calls := any(str(call.get("name")) not in before + after for call in calls)
        ):
            yield CALLS_LOST
        if not (content or (reasoning and not no_reasoning) or (calls and not no_calls)):
            raise RowError("an answer is empty in the rendered text", f"message {turn + 1}")

    def cut_after_end_of_turn(self, text: str) -> str:
        """Cut off what the template writes after the end-of-turn token of a last answer."""
        if text.endswith(self.tail):
            return text.removesuffix(self.tail) + self.end_of_turn
        text = text.rstrip()
        if not text.endswith(self.added_tokens):
            raise RowError("an answer has no end-of-turn token")
        return text

    # ------------------------------------------------------------ the template

    def _learn_template(self, name: str) -> None:
        """Learn from one exchange what the template writes before and after an answer.

        `header` is what it writes to ask for one, `opening` what it puts between that and an answer's
        content, `tail` what comes after the content: the `end_of_turn` token, and perhaps a newline.
        """
        question: list[Message] = [{"role": "user", "content": "Hello"}]
        try:
            exchange, _ = self.render_text([*question, {"role": "assistant", "content": PROBE}])
            prompt, asked = self.render_prompt(question), self.render_text(question)[0]
            if exchange.count(PROBE) != 1:
                shown = repr(exchange.replace(PROBE, "<content>")[:200])
                raise RowError("it does not write an assistant's content as it stands, once", shown)
        except RowError as error:
            raise UsageError(
                f"the chat template of {name} cannot render a question and its answer\n"
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
        self.header = prompt[_common(prompt, asked) :] + self._missing_header
        self.opening = before.rpartition(self.header)[2] if self.header else ""
        call = {"type": "function", "function": {"name": PROBE, "arguments": {PROBE: PROBE}}}
        called = [*question, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            self.render_text(called)
        except RowError:  # it may refuse all tools, too
            self._text_arguments = True

    def render_text(
        self, messages: Sequence[Message], tools: Tools = (), prompt: bool = False
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
        messages = [  # reasoning by each name that templates know it by
            {**dict.fromkeys(REASONING, reasoning), **message}
            if (reasoning := message.get("reasoning_content"))
            else message
            for message in messages
        ]
        if self._text_arguments:
            messages = [_with_text_arguments(message) for message in messages]
        try:
            (text,), marked = render_jinja_template(
                conversations=[messages],
                tools=list(tools) or None,
                chat_template=self._date_macro + self._template,
                return_assistant_tokens_mask=self._has_markers,
                add_generation_prompt=prompt,
                **{**self._specials, **self._options},
            )
            text.encode()  # JSON can hold half of a surrogate pair, which no tokenizer takes
        except UnicodeEncodeError as error:
            raise RowError("the text is not valid Unicode", error.reason) from error
        except Exception as error:
            detail = str(error) or type(error).__name__
            raise RowError("the chat template refuses it", detail) from error
        return text, [span for spans in marked for span in spans if span[0] < span[1]]

    def render_prompt(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """Return the text that asks for an answer to `messages`. Raises `RowError`."""
        return self.render_text(messages, tools, prompt=True)[0] + self._missing_header


class _Turn:
    """Used where the template has no markers: finds the span of one assistant turn in a text.

    It begins where its prompt ends, or else where a probe comes out that is put into its content.
    """

    def __init__(self, renderer: Renderer, text: str, row: Conversation, index: int) -> None:
        self.renderer, self.text, self.row, self.index = renderer, text, row, index
        self.message, self.before = row.messages[index], row.messages[:index]
        self.content: str = self.message["content"]
        self.tail, self.end_of_turn = renderer.tail, renderer.end_of_turn

    def span(self) -> Span:
        start = self._find_start()
        calls = self.message.get("tool_calls")
        return start, self._find_end_of_calls(start) if calls else self._find_end(start)

    def _find_start(self) -> int:
        """Where the prompt ends, or else the content starts, if only a header stands before it.

        The header is what the template writes before a content that is only the probe. It is part
        of the generation prompt, or ends with the usual one; what follows it is, letter for letter,
        the end of the content. So whatever the template dropped, the rest is the answer.
        """
        prompt, usual = "", self.renderer.header
        try:
            prompt = self.renderer.render_prompt(self.before, self.row.tools)
            if self.text.startswith(prompt):
                return len(prompt)
        except RowError:
            pass  # nothing to prompt with: the turn comes first, or follows a system turn
        head, probe, _ = self._text_with(PROBE).partition(PROBE)
        visible, end = self._visible_content()
        known = prompt.startswith(head) or (usual.strip() and head.endswith(usual))
        verbatim = self.text.startswith(head) and visible.endswith(self.text[len(head) : end])
        if not (probe and known and verbatim):
            raise self._error("the text before it is not the generation prompt")
        return len(head)

    def _find_end(self, start: int) -> int:
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

    def _find_end_of_calls(self, start: int) -> int:
        """The end of a turn whose calls follow its content, in the template's own notation."""
        shown, _ = self.renderer.render_text([*self.before, self.message], self.row.tools)
        shown = self.renderer.cut_after_end_of_turn(shown)
        if len(shown) < start or not self.text.startswith(shown):
            raise self._error("later turns change how its tool calls are written")
        return len(shown)

    def _visible_content(self) -> tuple[str, int]:
        """The content up to the last character that is rendered, and where that is in the text."""
        for content in (self.content, self.content.rstrip()):
            before, probe, after = self._text_with(content + PROBE).partition(PROBE)
            if probe and before + after == self.text:
                return content, len(before)
        raise self._error("the template rewrites its content")

    def _text_with(self, content: str) -> str:
        """Return the text of the conversation with another content of this turn."""
        messages = list(self.row.messages)
        messages[self.index] = {**self.message, "content": content}
        return self.renderer.render_text(messages, self.row.tools)[0]

    def _error(self, reason: str) -> RowError:
        return RowError(NOT_PLACED, f"message {self.index + 1}: {reason}")


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


def _common(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    differ = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def _questions(messages: Sequence[Message]) -> list[int]:
    """Return the places of the messages that follow an answer and are none."""
    roles = [message["role"] == "assistant" for message in messages]
    return [at for at in range(1, len(roles)) if roles[at - 1] > roles[at]]


def _assistant_turns(messages: Sequence[Message]) -> list[int]:
    return [at for at, message in enumerate(messages) if message["role"] == "assistant"]


# ---------------------------------------------------------------- the tokenizer


def _chat_template(tokenizer: PreTrainedTokenizerFast, file: str | None) -> str:
    if file is not None:
        try:
            return regular(Path(file)).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"data.chat_template: {file} cannot be read\n  {error}") from error
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        names = ", ".join(sorted(tokenizer.chat_template or ()))
        raise UsageError(
            f"the tokenizer of {tokenizer.name_or_path or 'the target'} has no chat template"
            f"{names and f' that is called default, but {names}'}\n"
            "  use a chat (instruct) model as the target, or name a file with the format that the\n"
            "  model was trained on: data.chat_template"
        ) from error


def _date_macro(template: str, date: str) -> str:
    """Return a macro to put before a template, which gives it this date in the place of today's.

    A template is given plain data only, so what it calls is written in its own language.
    """
    replacements, time = "", datetime.fromisoformat(date)
    for directive in sorted({*re.findall(r"%-?[a-zA-Z]", template)}):
        replacements += f".replace({directive!r}, {time.strftime(directive)!r})"
    return f"{{% macro strftime_now(format) %}}{{{{ format{replacements} }}}}{{% endmacro %}}\n"


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

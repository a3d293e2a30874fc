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
dropped, an empty think block that its prompt had, tool calls are written anew), a conversation becomes
several rows: the fewest texts in which each answer stands as it was served. What is dropped all the
same is counted in a row's notes. So are answers without reasoning where the template asks for some.

Images are written into the text by the target's processor, whose tokens have to be those of the text.

What cannot be placed like this is a `BadRow`; no mask is ever guessed. The text is tokenized once,
as a whole, as `apply_chat_template(tokenize=True)` does, and a token belongs to an answer when its
first character does.

In the code, `Renderer._find_answers` chooses: `_find_spans` writes one text and finds all answers in
it, by `_marked_spans` or by a `_Turn` for each; where that loses or cannot place one,
`_split_per_answer` writes a text for each, by `_join_prompt_and_answer` where no text has both.
`_find_in_parts` finds the answers of a long conversation, where the template allows it.
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
from draftcore.errors import UsageError, nearest
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
FORMAT = 8

Span = tuple[int, int]
Tools = Sequence[Mapping[str, Any]]

# Private-use characters: no template treats them specially, no strip() removes them.
PROBE = "\ue0d7\ue0d8\ue0d9"
GENERATION_MARKER = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
THOUGHT = re.compile(r"\s*(?:<think>)?(.*?)</think>", re.DOTALL)
SWITCH = re.compile("think|reason")  # is in the name of an option that turns reasoning on or off
# What a template reads that is no option of it: what renders it gives it, or takes it for itself.
GIVEN = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
GIVEN |= {"raise_exception", "strftime_now"}
ROWS_PER_CALL = 256  # of the tokenizer
LONG = 64  # messages of a conversation whose answers are found in parts of it
QUESTIONS = 8  # of such a part
NOT_PLACED = "an assistant turn cannot be placed exactly in the rendered text"
# What a row's notes say.
REASONING_LOST = "reasoning of {:,} answers is not in the rendered text"
CALLS_LOST = "tool calls of {:,} answers are not in the rendered text"
NOT_SERVED = "{:,} answers are learned after another prompt than the one that is served"
LOST = REASONING_LOST, CALLS_LOST, NOT_SERVED
SPLIT = (
    "{:,} rows added: the template changes earlier answers, and each is learned as it was served"
)
NO_END = "{:,} rows do not teach where an answer ends: the chat template writes no token there"
MARKED_QUESTION = (
    "{:,} rows have words of the user that are learned: the {{% generation %}} markers of the chat"
    " template enclose them"
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

    @property
    def lost(self) -> int:
        """How many parts of answers are not in it as they were served."""
        return sum(self.notes.get(note, 0) for note in LOST)

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
        self._notes = dict[str, int]()  # of every row
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
            parts = [
                replace(part, notes={**part.notes, **self._notes}).with_images(self.processor)
                if isinstance(part, Layout)
                else part
                for row in chunk
                for part in self._find_answers(row)
            ]
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
                in_parts = self._find_in_parts(row, chosen)
                if in_parts and not in_parts.lost:
                    return [in_parts]
            row, chosen = self._cut_beyond_longest(row, chosen)
        whole: Layout | BadRow
        try:
            whole = self._find_spans(row, chosen)
            lost = whole.lost
        except RowError as error:
            whole, lost = BadRow(row.where, *error.args), len(row.messages) * 2
        # Where splitting fails too, the conversation as a whole says more of what is wrong.
        with contextlib.suppress(RowError):
            if lost:
                split, lost_by_split = self._split_per_answer(row, chosen)
                return split if lost_by_split < lost else [whole]
        return [whole]

    def _check_tokens(self, row: Rendered) -> Rendered | BadRow:
        """Take a row that came as tokens, if they are the target's."""
        ids, size = row.token_ids, self._vocabulary
        if len(ids) and not 0 <= ids.min() <= ids.max() < size:
            return BadRow(row.where, f"a token id is not below {size}, as the target's are")
        mask = row.loss_mask.copy()
        mask[: row.last_answer() * self._last_turn_only] = False
        return replace(row, loss_mask=mask)

    def _find_spans(self, row: Conversation, turns: Sequence[int]) -> Layout:
        """Write a conversation as one text, and find these turns in it: what is tried first.

        Raises `RowError` for a turn that cannot be found.
        """
        text, marked = self.render_text(row.messages, row.tools)
        return self._layout(row, turns, text, *self._spans_in(row, turns, text, marked))

    def _layout(
        self, row: Conversation, turns: Sequence[int], text: str, spans: Sequence[Span],
        served: Sequence[bool],
    ) -> Layout:  # fmt: skip
        """Note what the answers at these spans lack. Raises `RowError` for an empty one."""
        written = [text[start:end] for start, end in spans]
        if len(written) != len(turns):  # markers need not enclose each turn once
            written = ["".join(written)] * len(turns)
        notes = Counter(
            note
            for turn, answer, as_served in zip(turns, written, served, strict=True)
            for note in self._notes_on(turn, row.messages[turn], answer, as_served)
        )
        return Layout(row.where, text, spans, notes, row.images)

    def _spans_in(
        self, row: Conversation, turns: Sequence[int], text: str, marked: list[Span]
    ) -> tuple[list[Span], list[bool]]:
        """Return the spans of these turns, and for each turn whether it stands as it was served."""
        answers = [_Turn(self, text, row, turn) for turn in turns]
        served = [answer.is_served for answer in answers]
        if not self._has_markers:
            return [answer.span() for answer in answers], served
        spans = self._marked_spans(row, turns, text, marked)
        if len(spans) == len(turns):
            spans = [turn.cut_prompt(*span) for turn, span in zip(answers, spans, strict=True)]
        return spans, served

    def _find_in_parts(self, row: Conversation, turns: Sequence[int]) -> Layout | None:
        """Find the answers of a long conversation in parts of it, in time that grows as it does.

        A part is written behind the conversation's first answer, and before the message that follows it.
        None are found where these texts, put together, are not the whole text. Raises `RowError`.
        """
        messages, spans, served = row.messages, list[Span](), list[bool]()
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
            spans_inside, served_inside = self._spans_in(part, inside, text, marked)
            spans += [(a + at, b + at) for a, b in spans_inside]
            served += served_inside
            written, head = written + own, next_head
        if written != self.render_text(messages, row.tools)[0]:
            return None
        return self._layout(row, turns, written, spans, served)

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
        """Take the spans of these turns that the template's `{% generation %}` markers enclose."""

        def count_before(turn: int) -> int:
            return len(self.render_text(row.messages[:turn], row.tools)[1]) if turn else 0

        if list(turns) != _assistant_turns(row.messages):
            ends = [(count_before(turn), count_before(turn + 1)) for turn in turns]
            marked = [span for start, end in ends for span in marked[start:end]]
        return [self._cut_trailing_space(text, *span) for span in marked]

    def _cut_trailing_space(self, text: str, start: int, end: int) -> Span:
        """End a span with its end-of-turn token: markers often close after the newline that follows it."""
        answer = text[start:end].rstrip()
        whole = self.end_of_turn and answer.endswith(self.end_of_turn)
        return (start, start + len(answer)) if whole else (start, end)

    def _split_per_answer(
        self, row: Conversation, turns: Sequence[int]
    ) -> tuple[list[Layout], int]:
        """Write a text for each answer, where the text of all turns changes earlier ones.

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
            if text.lost:
                with contextlib.suppress(RowError):
                    joined = self._join_prompt_and_answer(until_turn)
                    text = min(text, joined, key=lambda layout: layout.lost)
            lost += text.lost
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
        """Join a prompt and its answer, where the template never writes the two in one text.

        The answer is what the template writes of the last message, without what it writes before the
        probe of another one: up to the header both are the same. Where no reasoning is asked for, the
        prompt may go on behind that header: with a think block that is closed.
        """
        *before, message = row.messages
        prompt = self.render_prompt(before, row.tools)
        shown = self.cut_after_end_of_turn(self.render_text(row.messages, row.tools)[0])
        probe = {"role": "assistant", "content": PROBE}
        head, _, _ = self.render_text([*before, probe], row.tools)[0].partition(PROBE)
        head = head.removesuffix(self.opening)
        ends = THOUGHT.sub("", message["content"]).strip() + self.end_of_turn
        known = self.header.strip() and head.endswith(self.header) and prompt.endswith(self.header)
        known = known or (prompt.startswith(head) and not self.thinks)
        whole = shown.startswith(head) and (message.get("tool_calls") or shown.endswith(ends))
        if self._has_markers or not (known and whole):
            raise RowError(NOT_PLACED)
        answer = shown.removeprefix(head)
        span = (len(prompt), len(prompt) + len(answer))
        return self._layout(row, [len(before)], prompt + answer, [span], [True])

    def _notes_on(self, turn: int, message: Message, answer: str, as_served: bool) -> Iterator[str]:
        """Yield a note for what of a message its answer lacks. Raises `RowError` if it is all."""
        written = answer.removesuffix(self.end_of_turn)
        reasoning, content = _reasoning_and_content(message)
        calls = [call.get("function", call) for call in message.get("tool_calls", ())]
        at = written.rfind(content)
        before, after = written[:at], written[at + len(content) :]
        has_reasoning = bool(reasoning) and reasoning in before
        if reasoning and not has_reasoning:
            yield REASONING_LOST
        elif self.thinks and not reasoning:
            yield "{:,} answers have " + self.no_reasoning
        if not as_served and (has_reasoning or not self.thinks):  # else it was noted already
            yield NOT_SERVED
        if calls and (
            no_calls := any(str(call.get("name")) not in before + after for call in calls)
        ):
            yield CALLS_LOST
        if not (content or has_reasoning or (calls and not no_calls)):
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
            read, assigned = _options_read(self._template)
            if unread := sorted(self._options.keys() - read):
                raise UsageError(_unread_option(name, unread[0], read, read - assigned))
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
        a_token = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        end = a_token.search(self.tail)
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
        self._learn_thinking(question, before, sorted(filter(SWITCH.search, read)))
        if self.render_text(question)[1]:
            self._notes[MARKED_QUESTION] = 1
        # Where no token ends an answer, the next turn's first one may.
        answered = [*question, {"role": "assistant", "content": PROBE}, *question]
        with contextlib.suppress(RowError):
            _, _, after = self.render_text(answered)[0].partition(PROBE)
            if not (self.end_of_turn or a_token.search(after.partition("Hello")[0])):
                self._notes[NO_END] = 1

    def _learn_thinking(self, question: list[Message], before: str, names: Sequence[str]) -> None:
        """Learn whether the template asks for reasoning, and which of these options changes that.

        Such an option changes the prompt. A template without one asks for reasoning if its prompt opens
        a block that an answer without any lacks, or if it writes an empty one before such an answer.
        """
        prompt = self.render_prompt(question)

        def switches(value: bool) -> Iterator[str]:
            for name in names:
                with contextlib.suppress(RowError):
                    text = self.render_prompt(question, told={name: value})
                    if text != prompt and str(value) not in text:  # which would be no switch
                        yield name

        off, on = next(switches(False), ""), next(switches(True), "")
        asks = prompt.startswith(before) and bool(prompt[len(before) :].strip())
        if before.startswith(prompt) and (block := before[len(prompt) :].strip()):
            thought = PROBE[::-1]
            said = {"role": "assistant", "content": PROBE, "reasoning_content": thought}
            with contextlib.suppress(RowError):
                written = thought in self.render_text([*question, said])[0]
                asks = written or THOUGHT.match(block) is not None
        self.thinks = bool(off) or (asks and not on)
        without = f", or learn and serve without (data.template_options.{off}=false)" * bool(off)
        why = "and the chat template asks for it: make them anew (draftcore data regenerate)"
        self.no_reasoning = f"no reasoning, {why}{without}"
        self.switch = f"data.template_options.{on}=true" if on and not self.thinks else ""

    def render_text(
        self, messages: Sequence[Message], tools: Tools = (), prompt: bool = False,
        told: Mapping[str, Any] = {},
    ) -> tuple[str, list[Span]]:  # fmt: skip
        """Return the text that the template writes, and the spans that its markers enclose.

        It is told `told` beside its options. Raises `RowError` where the template refuses: it is a
        program written by others, and what it raises is about this row.
        `apply_chat_template(return_assistant_tokens_mask=True)` is no help: it maps spans to tokens by
        `char_to_token`, which is None for a space when the tokenizer trims offsets, and then masks to
        the end of the text (transformers 5.23).
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
                **{**self._specials, **self._options, **told},
            )
            text.encode()  # JSON can hold half of a surrogate pair, which no tokenizer takes
        except UnicodeEncodeError as error:
            raise RowError("the text is not valid Unicode", error.reason) from error
        except Exception as error:
            detail = str(error) or type(error).__name__
            raise RowError("the chat template refuses it", detail) from error
        return text, [span for spans in marked for span in spans if span[0] < span[1]]

    def render_prompt(
        self, messages: Sequence[Message], tools: Tools = (), told: Mapping[str, Any] = {}
    ) -> str:
        """Return the text that asks for an answer to `messages`. Raises `RowError`."""
        return self.render_text(messages, tools, True, told)[0] + self._missing_header


class _Turn:
    """Finds the span of one assistant turn in a text, for a template without markers.

    It begins where its prompt ends, or else where a probe comes out that is put into its content.
    """

    def __init__(self, renderer: Renderer, text: str, row: Conversation, index: int) -> None:
        self.renderer, self.text, self.row, self.index = renderer, text, row, index
        self.message, self.before = row.messages[index], row.messages[:index]
        self.content: str = self.message["content"]
        self.tail, self.end_of_turn = renderer.tail, renderer.end_of_turn
        self.prompt = ""  # nothing to prompt with: the turn comes first, or follows a system turn
        with contextlib.suppress(RowError):
            self.prompt = renderer.render_prompt(self.before, row.tools)
        self.is_served = text.startswith(self.prompt)

    def cut_prompt(self, start: int, end: int) -> Span:
        """Leave out of marked text what its prompt has already: an empty think block."""
        asked = len(self.prompt) if self.is_served else 0
        return (max(start, asked), end) if asked < end else (start, end)

    def span(self) -> Span:
        start = self._find_start()
        calls = self.message.get("tool_calls")
        return start, self._find_end_of_calls(start) if calls else self._find_end(start)

    def _find_start(self) -> int:
        """Return where the prompt ends, or else the content starts, if only a header stands before it.

        The header is what the template writes before a content that is only the probe. It is part
        of the generation prompt, or ends with the usual one; what follows it is, letter for letter,
        the end of the content. So whatever the template dropped, the rest is the answer.
        """
        if self.prompt and self.is_served:
            return len(self.prompt)
        usual = self.renderer.header
        head, probe, _ = self._text_with(PROBE).partition(PROBE)
        visible, end = self._visible_content()
        known = self.prompt.startswith(head) or (usual.strip() and head.endswith(usual))
        verbatim = self.text.startswith(head) and visible.endswith(self.text[len(head) : end])
        if probe and known and verbatim:
            return len(head)
        raise self._error("the text before it is not the generation prompt")

    def _find_end(self, start: int) -> int:
        """Return the end of the end-of-turn token, or of the content where the template writes none."""
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
        """Return the end of a turn whose calls follow its content, in the template's own notation."""
        shown, _ = self.renderer.render_text([*self.before, self.message], self.row.tools)
        shown = self.renderer.cut_after_end_of_turn(shown)
        if len(shown) < start or not self.text.startswith(shown):
            raise self._error("later turns change how its tool calls are written")
        return len(shown)

    def _visible_content(self) -> tuple[str, int]:
        """Return the content up to the last character that is rendered, and where that is in the text."""
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

    def _error(self, detail: str) -> RowError:
        """Say that the turn cannot be placed, or why its prompt is another one, if reasoning is."""
        reasoning, _ = _reasoning_and_content(self.message)
        where, renderer = f"message {self.index + 1}", self.renderer
        if not self.is_served and renderer.thinks and not reasoning:
            return RowError(f"an answer has {renderer.no_reasoning}", where)
        if not self.is_served and renderer.switch and reasoning:
            reason = (
                f"an answer has reasoning, and the chat template asks for none: {renderer.switch}"
            )
            return RowError(reason, where)
        return RowError(NOT_PLACED, f"{where}: {detail}")


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


def _reasoning_and_content(message: Message) -> tuple[str, str]:
    """Return what a message thinks, as a field or in its content, and what it says."""
    reasoning, content = message.get("reasoning_content", ""), message["content"]
    if thought := THOUGHT.match(content):
        reasoning, content = thought[1], content[thought.end() :]
    return reasoning.strip(), content.strip()


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


def _options_read(template: str) -> tuple[set[str], set[str]]:
    """Return the options that a chat template reads, and the names that it assigns to.

    Raises `RowError` for what is no template.
    """
    import jinja2
    from jinja2.meta import find_undeclared_variables

    try:
        parser = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
        tree = parser.parse(GENERATION_MARKER.sub("", template))
    except jinja2.TemplateSyntaxError as error:
        raise RowError("it is no template", str(error)) from error
    assigned = {name.name for name in tree.find_all(jinja2.nodes.Name) if name.ctx == "store"}
    return find_undeclared_variables(tree) - GIVEN, assigned


def _unread_option(name: str, option: str, read: set[str], likely: set[str]) -> str:
    """Say that a template does not read an option, and which it does."""
    options = sorted(other for other in likely if not other.endswith("_token"))
    return (
        f"data.template_options: the chat template of {name} does not read {option!r}"
        f"{nearest(option, read)}\n  it reads {', '.join(options) or 'none'}\n"
        "  correct the name, or leave it out"
    )


def _date_macro(template: str, date: str) -> str:
    """Return a macro to put before a template, which gives it this date in the place of today's.

    A template is given plain data only, so what it calls is written in its own language.
    """
    replacements, time = "", datetime.fromisoformat(date)
    for directive in sorted({*re.findall(r"%-?[a-zA-Z]", template)}):
        replacements += f".replace({directive!r}, {time.strftime(directive)!r})"
    return f"{{% macro strftime_now(format) %}}{{{{ format{replacements} }}}}{{% endmacro %}}\n"


def _exact_offsets(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """Copy the backend such that its offsets cover the text without gaps.

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

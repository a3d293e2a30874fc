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

What cannot be placed like this is a `RenderError` for its row; no mask is ever guessed. The text is
tokenized once, as a whole, as `apply_chat_template(tokenize=True)` does, and a token belongs to an
answer when its first character does.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from draftcore.data.conversations import Conversation, Message
from draftcore.errors import DraftcoreError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

Span = tuple[int, int]
Tools = Sequence[Mapping[str, Any]]

# Private-use characters: no template treats them specially, no strip() removes them.
PROBE = "\ue0d7\ue0d8\ue0d9"
GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class RenderError(DraftcoreError):
    """A conversation that the template refuses, or in which an answer cannot be placed exactly."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Rendered:
    """Token ids of a whole conversation; the mask is true where the assistant produced a token."""

    token_ids: list[int]
    loss_mask: list[bool]


@dataclass(frozen=True)
class Layout:
    """A rendered text and the spans of characters in it that the assistant produced."""

    text: str
    spans: tuple[Span, ...]


class Renderer:
    """Renders conversations for one tokenizer and its chat template.

    Raises `UsageError` when made, if the tokenizer has no chat template, is not a fast one, or has
    a template that cannot render a question and its answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, last_turn_only: bool = False) -> None:
        self._tokenizer = tokenizer
        self._last_turn_only = last_turn_only
        self._template = _chat_template(tokenizer)
        self._marked = GENERATION_MARKER.search(self._template) is not None
        self._backend = _exact_offsets(tokenizer)
        added = sorted(filter(str.strip, tokenizer.get_added_vocab()), key=len, reverse=True)
        self._added_token = re.compile("|".join(map(re.escape, added)) or "(?!)")
        self._learn_template()

    @property
    def identity(self) -> str:
        """A hash of all that rendering depends on: tokenizer, template, special tokens."""
        specials = json.dumps(self._tokenizer.special_tokens_map, sort_keys=True)
        parts = (self._backend.to_str(), self._template, specials, str(self._last_turn_only))
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()

    @property
    def template_hash(self) -> str:
        """A hash of the chat template alone."""
        return hashlib.blake2b(self._template.encode(), digest_size=16).hexdigest()

    # ------------------------------------------------------------ results

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> Rendered:
        """Token ids and loss mask of a conversation. Raises `RenderError`."""
        return self._tokenize([self.layout(messages, tools)])[0]

    def render_many(self, conversations: Sequence[Conversation]) -> list[Rendered | RenderError]:
        """Render a chunk: one call of the tokenizer is several times faster than one for each."""
        layouts = [self._try_layout(c) for c in conversations]
        rendered = iter(self._tokenize([x for x in layouts if isinstance(x, Layout)]))
        return [next(rendered) if isinstance(x, Layout) else x for x in layouts]

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Token ids that ask for the last assistant turn again: all before it, then the header."""
        last = _assistant_turns(messages)[-1]
        text = self.prompt_text(messages[:last], tools)
        return self._backend.encode(text, add_special_tokens=False).ids

    def layout(self, messages: Sequence[Message], tools: Tools = ()) -> Layout:
        """Text and assistant spans of a conversation. Raises `RenderError`."""
        if self._marked:
            text, marked = self._marked_text(messages, tools)
            last = _assistant_turns(messages)[-1]
            if self._last_turn_only and last > 0:
                marked = marked[len(self._marked_text(messages[:last], tools)[1]) :]
            spans = [self._without_trailing_space(text, span) for span in marked]
        else:
            text = self.text(messages, tools)
            turns = _assistant_turns(messages)[-1 if self._last_turn_only else 0 :]
            spans = [_Turn(self, text, messages, tools, turn).span() for turn in turns]
        return Layout(text, tuple(spans))

    def _try_layout(self, conversation: Conversation) -> Layout | RenderError:
        try:
            return self.layout(conversation.messages, conversation.tools)
        except RenderError as error:
            return error

    # ------------------------------------------------------------ the template

    def _learn_template(self) -> None:
        """Learn from one exchange what the template writes before and after an answer."""
        question: list[Message] = [{"role": "user", "content": "Hello"}]
        try:
            exchange = self.text([*question, {"role": "assistant", "content": PROBE}])
            prompt = self.text(question, add_generation_prompt=True)
            asked = self.text(question)
        except RenderError as error:
            raise UsageError(
                f"the chat template cannot render a question and its answer\n  {error}\n"
                "  use the tokenizer of a chat model, or correct its chat_template"
            ) from error
        if exchange.count(PROBE) != 1:
            raise UsageError(
                "the chat template does not write an assistant's content as it stands, once\n"
                f"  it renders: {exchange.replace(PROBE, '<content>')!r}\n"
                "  use the tokenizer of a chat model, or correct its chat_template"
            )
        before, self.tail = exchange.split(PROBE)
        end = self._added_token.search(self.tail)
        self.end_of_turn = self.tail[: end.end()] if end else self.tail.rstrip()
        # A template without generation prompt still writes a header, which is no part of an answer.
        # A space at its end is: it belongs to the token of the answer's first word.
        ignored = prompt == asked and before.startswith(prompt)
        header = before[len(prompt) :].rstrip(" ") if ignored else ""
        self._missing_header = header if header.strip() else ""
        self.header = prompt[_common_prefix(asked, prompt) :] + self._missing_header

    def text(
        self, messages: Sequence[Message], tools: Tools = (), add_generation_prompt: bool = False
    ) -> str:
        """The conversation as the template writes it. Raises `RenderError` if it refuses."""
        with _template_errors():
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                chat_template=self._template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        return _encodable(text)

    def prompt_text(self, messages: Sequence[Message], tools: Tools) -> str:
        """The text that asks for an answer to `messages`. Raises `RenderError`."""
        return self.text(messages, tools, add_generation_prompt=True) + self._missing_header

    def ends_with_added_token(self, text: str) -> bool:
        last = collections.deque(self._added_token.finditer(text), maxlen=1)
        return bool(last) and last[0].end() == len(text)

    def _marked_text(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list[Span]]:
        """Render with the template's own markers; spans in characters.

        `apply_chat_template(return_assistant_tokens_mask=True)` maps them to tokens through
        `char_to_token`, which is None for a space when the tokenizer trims offsets, and then
        masks to the end of the text (transformers 5.23).
        """
        from transformers.utils.chat_template_utils import render_jinja_template  # 1 s: with torch

        with _template_errors():
            texts, spans = render_jinja_template(
                conversations=[list(messages)],
                tools=list(tools) or None,
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        return _encodable(texts[0]), [span for span in spans[0] if span[0] < span[1]]

    def _without_trailing_space(self, text: str, span: Span) -> Span:
        """Markers often close after the newline that follows the end-of-turn token."""
        start, end = span
        answer = text[start:end].rstrip()
        whole = self.end_of_turn and answer.endswith(self.end_of_turn)
        return (start, start + len(answer)) if whole else span

    # ------------------------------------------------------------ tokens

    def _tokenize(self, layouts: Sequence[Layout]) -> list[Rendered]:
        texts = [layout.text for layout in layouts]
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        return [
            Rendered(encoding.ids, _token_mask(encoding.offsets, layout.spans))
            for encoding, layout in zip(encodings, layouts, strict=True)
        ]


@dataclass(frozen=True)
class _Turn:
    """One assistant turn inside the rendered `text`; finds its span of characters."""

    renderer: Renderer
    text: str
    messages: Sequence[Message]
    tools: Tools
    index: int

    def span(self) -> Span:
        start = self._start()
        end = self._tool_call_end(start) if self._message.get("tool_calls") else self._end(start)
        if end < start:
            raise self._error("its header and its content overlap")
        return start, end

    @property
    def _message(self) -> Message:
        return self.messages[self.index]

    @property
    def _content(self) -> str:
        content = self._message["content"]
        assert isinstance(content, str)
        return content

    def _start(self) -> int:
        try:
            prompt = self.renderer.prompt_text(self.messages[: self.index], self.tools)
        except RenderError:
            prompt = None  # nothing to prompt with: the turn comes first, or follows a system turn
        if prompt is not None and self.text.startswith(prompt):
            return len(prompt)
        return self._probed_start(prompt or "")

    def _probed_start(self, prompt: str) -> int:
        """Where the content starts, if nothing but a header stands before it.

        The header is what the template writes before a content that is only the probe. It is part
        of the generation prompt, or ends with the usual one; what follows it is, letter for letter,
        the end of the content. So whatever the template dropped, the rest is the answer.
        """
        head, found, _ = self._text_with(PROBE).partition(PROBE)
        visible, end = self._visible_content()
        known = prompt.startswith(head) or (
            bool(self.renderer.header.strip()) and head.endswith(self.renderer.header)
        )
        verbatim = self.text.startswith(head) and visible.endswith(self.text[len(head) : end])
        if not (found and known and verbatim):
            raise self._error("the text before it is not the generation prompt")
        return len(head)

    def _end(self, start: int) -> int:
        """The end of the end-of-turn token, or of the content where the template writes none."""
        end_of_turn, tail = self.renderer.end_of_turn, self.renderer.tail
        if self.index == len(self.messages) - 1 and self.text.endswith(tail):
            return len(self.text) - len(tail) + len(end_of_turn)
        for content in (self._content, self._content.strip()):  # the quick way, nearly always
            if self.text.startswith(content + end_of_turn, start):
                return start + len(content) + len(end_of_turn)
        _, end = self._visible_content()
        # Some templates end a turn in history otherwise than the model does; that end is theirs.
        return end + len(end_of_turn) if self.text.startswith(end_of_turn, end) else end

    def _tool_call_end(self, start: int) -> int:
        """The end of a turn whose calls follow its content, in the template's own notation."""
        shown = self.renderer.text(self.messages[: self.index + 1], self.tools)
        end_of_turn, tail = self.renderer.end_of_turn, self.renderer.tail
        if end_of_turn and shown.endswith(tail):
            end = len(shown) - len(tail) + len(end_of_turn)
        else:
            end = len(shown.rstrip())
            if not self.renderer.ends_with_added_token(shown[:end]):
                raise self._error("its tool calls have no end-of-turn token")
        if end < start or shown[:end] != self.text[:end]:
            raise self._error("later turns change how its tool calls are written")
        return end

    def _visible_content(self) -> tuple[str, int]:
        """The content up to the last character that is rendered, and where that is in the text."""
        for content in (self._content, self._content.rstrip()):
            before, found, after = self._text_with(content + PROBE).partition(PROBE)
            if found and before + after == self.text:
                return content, len(before)
        raise self._error("the template rewrites its content")

    def _text_with(self, content: str) -> str:
        messages = list(self.messages)
        messages[self.index] = {**self._message, "content": content}
        return self.renderer.text(messages, self.tools)

    def _error(self, reason: str) -> RenderError:
        return RenderError(
            "an assistant turn cannot be placed exactly in the rendered text",
            f"message {self.index + 1}: {reason}",
        )


def _assistant_turns(messages: Sequence[Message]) -> list[int]:
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise RenderError("no assistant turn")
    return turns


def _common_prefix(left: str, right: str) -> int:
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _token_mask(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """True for tokens whose first character lies in a span."""
    starts = np.fromiter((start for start, _ in offsets), np.int64, len(offsets))
    mask = np.zeros(len(offsets), bool)
    for start, end in spans:
        mask |= (starts >= start) & (starts < end)
    result: list[bool] = mask.tolist()
    return result


def _encodable(text: str) -> str:
    """JSON can hold half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RenderError("the text is not valid Unicode", error.reason) from error
    return text


@contextlib.contextmanager
def _template_errors() -> Iterator[None]:
    """A template is a program written by others: whatever it raises is about this row."""
    try:
        yield
    except Exception as error:
        detail = str(error) or type(error).__name__
        raise RenderError("the chat template refuses it", detail) from error


# ---------------------------------------------------------------- the tokenizer


def _chat_template(tokenizer: PreTrainedTokenizerFast) -> str:
    if not tokenizer.chat_template:
        raise UsageError(
            f"the tokenizer of {tokenizer.name_or_path or 'the target'} has no chat template\n"
            "  use a chat (instruct) model as the target, or put a chat_template.jinja file\n"
            "  with the format that the model was trained on beside its tokenizer"
        )
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise UsageError(
            f"{tokenizer.name_or_path} has several chat templates, and none is the default\n"
            f"  templates: {', '.join(sorted(tokenizer.chat_template))}\n"
            "  name one of them 'default' in its tokenizer_config.json"
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

"""Read a row of training data: a conversation, in the shapes that people keep them in, or its tokens.

Understood are OpenAI's `messages` of {role, content}, ShareGPT's `conversations` of {from, value},
prompt and completion, Alpaca's instruction and output, and token ids with a loss mask (`SHAPES` in
`source`); mixtures of them too, because real files mix them. A row that cannot be used comes out as a
`BadRow` with its place, so that the caller decides and nothing is lost silently.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftcore.contracts.capture import Image, RowError
from draftcore.errors import nearest
from draftcore_data.source import SHAPES

Message = Mapping[str, Any]

ROLE_NAMES = {
    "system": "system developer",
    "user": "user human",
    "assistant": "assistant gpt ai model chatgpt bing bard bot function_call",
    "tool": "tool observation function function_response ipython",
}
ROLES = {name: role for role, names in ROLE_NAMES.items() for name in names.split()}
REASONING = ("reasoning_content", "reasoning", "thinking")  # one thing, by whoever wrote it
IMAGE_TYPES = ("image", "image_url", "input_image")
IMAGE_UNREAD = "an image cannot be read"  # with where it lies
NO_PROCESSOR = "images need the target's processor, which cannot be loaded"
NOT_JSON, NOT_UTF8 = "not valid JSON", "not in UTF-8"
UNKNOWN_ROLE, UNKNOWN_SHAPE = "unknown role", "no known shape"
IGNORED_LABEL = -100  # a label that is not learned, as transformers marks it


@dataclass(frozen=True)
class Conversation:
    """A usable row: messages with `role` and `content`, other keys as they stood in the source."""

    where: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    category: str = ""

    @property
    def images(self) -> tuple[str, ...]:
        """Where its images lie, in their order: absolute paths, or data URIs."""
        lists = [turn["content"] for turn in self.messages if isinstance(turn["content"], list)]
        return tuple(part["image"] for parts in lists for part in parts if "image" in part)


@dataclass(frozen=True)
class Rendered:
    """A row as tokens, [T], and its images; the mask is true where the assistant produced the token.

    `notes` count what a person should know of how it was made, by sentences with a `{}`.
    """

    where: str
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    notes: Mapping[str, int] = field(default_factory=dict)
    images: tuple[Image, ...] = ()

    def last_answer(self) -> int:
        """Return the place of the last answer's first token, T if there is none."""
        starts = np.flatnonzero(np.diff(self.loss_mask, prepend=False) & self.loss_mask)
        return int(starts[-1]) if len(starts) else len(self.token_ids)


class BadRow(NamedTuple):
    """A row that cannot be used. `reason` is the same text for all rows of one kind."""

    where: str
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, self))


Row = Conversation | Rendered | BadRow


def is_learned(message: Message) -> bool:
    """Say whether an answer is learned: neither `weight: 0` nor `train: false` stands with it."""
    return bool(message.get("weight", 1)) and bool(message.get("train", True))


def parse_row(
    where: str,
    row: Any,
    columns: Mapping[str, str] = MappingProxyType({}),
    unread: Counter[str] | None = None,
) -> Row:
    """Check a row, which may be a line of JSON, and bring it into the shape {role, content}.

    `columns` are the names that keys have there, and `unread` counts the keys that are not read, but
    for `id`, which our own answers have.
    """
    folder: str = getattr(row, "folder", "")  # of the file that the line is of
    try:
        if isinstance(row, bytes):
            row = _parse_line(row)
        _require(isinstance(row, Mapping), "the row is not an object", type(row).__name__)
        row = {key: value for key, value in row.items() if value is not None}
        mapped = {key: row[column] for key, column in columns.items() if column in row}
        row = {key: row[key] for key in row if key not in columns.values()} | mapped
        shape = next((key for key in (*mapped, *SHAPES) if key in row and key in SHAPES), "")
        _require(shape, UNKNOWN_SHAPE, f"keys {str([*row])[1:-1]}")
        left = set(row) - {shape, "id", *SHAPES[shape]}
        parsed: Row
        if shape == "input_ids":
            parsed = _tokens(where, row)
        else:
            parsed = _conversation(where, row, shape, folder, left)
    except RowError as error:
        return BadRow(where, *error.args)
    if unread is not None:
        unread.update(left)
    return parsed


def _conversation(
    where: str, row: Mapping[str, Any], shape: str, folder: str, left: set[str]
) -> Conversation:
    turns = _turns(row, shape)
    _require(turns, "the conversation is empty")
    messages = tuple(
        _message(f"message {number}", turn, folder) for number, turn in enumerate(turns, 1)
    )
    for key in filter(row.get, ("system", "system_prompt")):
        system = _message(key, {"role": "system", "content": row[key]}, folder)
        if messages[0]["role"] != "system":
            messages = (system, *messages)
        elif messages[0]["content"] != system["content"]:
            left.add(key)  # a conversation's own system turn stays
    tools = _listed(row, "tools") if row.get("tools") else []
    _require(all(isinstance(t, Mapping) for t in tools), "tools is not a list of objects")
    return Conversation(where, messages, tuple(tools), str(row.get("category", "")))


def _listed(row: Mapping[str, Any], key: str) -> list[Any]:
    """Return a list that may be JSON text, as columnar files keep it."""
    value = row[key]
    if isinstance(value, str):
        value = _parse_json(value, f"{key} is not valid JSON") or []
    _require(isinstance(value, list), f"{key} is not a list", type(value).__name__)
    return list(value)


def _turns(row: Mapping[str, Any], shape: str) -> list[Any]:
    """Return the messages of a row in any shape, as they stand there."""
    if shape not in ("instruction", "prompt"):
        return _listed(row, shape)
    prompt, answer = row[shape], row.get("completion" if shape == "prompt" else "output")
    if shape == "instruction":
        prompt = "\n\n".join(map(str, filter(None, (prompt, row.get("input")))))
    asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    answered = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
    answered = [] if answer is None else answered  # a question that is to be answered
    before = [
        {**turn, "train": False}
        if isinstance(turn, Mapping) and _role(turn) == "assistant"
        else turn
        for turn in asked
    ]
    return [*before, *answered]


def _role(message: Message) -> str | None:
    """Return what a message's role is here, or None for one that is not known."""
    return ROLES.get(str(message.get("role") or message.get("from")).lower())


def _tokens(where: str, row: Mapping[str, Any]) -> Rendered:
    """Read a row that was rendered elsewhere, by its `loss_mask`, or by its `labels`."""
    keys = [key for key in ("loss_mask", "labels") if row.get(key) is not None]
    _require(keys, "input_ids without loss_mask or labels")
    ids, masks = _integers("input_ids", row["input_ids"]), list[NDArray[np.bool_]]()
    for key in keys:
        mask = _integers(key, row[key])
        lengths = f"{len(ids)} and {len(mask)}"
        _require(len(ids) == len(mask), "input_ids and its mask are not of one length", lengths)
        masks.append(learned := mask != (0 if key == "loss_mask" else IGNORED_LABEL))
        if key == "loss_mask":
            _require((mask == learned).all(), "a loss_mask has other numbers than 0 and 1")
        else:
            same = (mask == ids)[learned].all()
            _require(same, "labels are not the tokens of input_ids at their own places")
    _require((masks[0] == masks[-1]).all(), "labels and loss_mask contradict each other")
    return Rendered(where, ids.astype(np.int32), masks[0])


def _integers(key: str, values: Any) -> NDArray[np.int64]:
    try:
        numbers = np.array(values)
    except ValueError:  # a list of lists of several lengths
        numbers = np.array("")
    kinds = "iub" if key == "loss_mask" else "iu"
    fits = numbers.dtype.kind in kinds and (np.abs(numbers) < 2**31).all()
    _require(fits and numbers.ndim == 1, "a row of tokens is not a list of integers", key)
    return numbers.astype(np.int64)


def _message(name: str, message: Any, folder: str) -> Message:
    kind = type(message).__name__
    _require(isinstance(message, Mapping), "a message is not an object", f"{name}: {kind}")
    fields = {key: value for key, value in message.items() if value is not None}
    role = str(fields.pop("role", fields.pop("from", "")))
    meant = _role(message)
    content = fields.pop("content", fields.pop("value", None))
    _require(role, "a message has no role", name)
    if meant is None:
        raise RowError(UNKNOWN_ROLE, f"{name}: {role!r}{nearest(role, ROLES)}")
    name = f"{name} ({role})"
    call = fields.pop("function_call", None)  # as OpenAI wrote the only call, before tool_calls
    if role.lower() == "function_call":
        call, content = _parse_json(str(content), "a function_call is not valid JSON"), None
    if call is not None:
        calls = call if isinstance(call, list) else [call]
        fields["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    if "tool_calls" in fields:
        _require(isinstance(fields["tool_calls"], list), "tool_calls is not a list", name)
        fields["tool_calls"] = [_call(name, call) for call in fields["tool_calls"]]
    if isinstance(content, list):  # as Anthropic writes it
        thoughts = [p for p in content if isinstance(p, Mapping) and p.get("type") == "thinking"]
        if thoughts:
            content = [part for part in content if part not in thoughts]
            fields["reasoning_content"] = "\n".join(str(p.get("thinking", "")) for p in thoughts)
    if reasoning := next(filter(None, (fields.pop(key, None) for key in REASONING)), None):
        _require(isinstance(reasoning, str), "reasoning is not text", name)
        fields["reasoning_content"] = reasoning
    weight, train = fields.get("weight", 1), fields.get("train", True)
    _require(weight in (0, 1) and train in (0, 1), "weight is not 0 or 1, or train no bool", name)
    if content is None and fields.get("tool_calls"):
        content = ""  # an assistant that only calls tools has null content in OpenAI's shape
    _require(content is not None, "a message has no content", name)
    content = _content(name, content, folder)
    allowed = isinstance(content, str) or meant != "assistant"
    _require(allowed, "an answer holds images, and text alone is learned", name)
    return {"role": meant, "content": content, **fields}


def _content(name: str, content: Any, folder: str) -> str | list[Message]:
    """Return content as one text, or where some of it are images as the parts that templates know."""
    parts: list[Message] = []
    for part in content if isinstance(content, list) else [content]:
        part = part if isinstance(part, Mapping) else {"text": part}
        if part.get("type") in IMAGE_TYPES:
            parts.append({"type": "image", "image": _image(name, part, folder)})
            continue
        kind = part.get("type") or type(part.get("text")).__name__
        text = isinstance(part.get("text"), str)
        _require(text, "content is neither text nor an image", f"{name}: {kind}")
        parts.append({"type": "text", "text": part["text"]})
    if any("image" in part for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _image(name: str, part: Message, folder: str) -> str:
    """Return where an image lies: its path, which may be relative to `folder`, or a data URI."""
    uri = next(filter(None, map(part.get, (*IMAGE_TYPES, "url", "path"))), None)
    uri = uri.get("url") if isinstance(uri, Mapping) else uri
    if not isinstance(uri, str):
        raise RowError("an image is neither a path nor a URI", name)
    if uri.startswith("data:"):
        return uri
    path = uri.removeprefix("file://")
    _require("://" not in path, "an image is not on this machine", f"{name}: {uri}")
    return os.path.abspath(os.path.join(folder, path))


def _call(name: str, call: Any) -> Mapping[str, Any]:
    """Return a tool's call with arguments as an object, which is what servers give to templates."""
    function: Any = call.get("function", call) if isinstance(call, Mapping) else None
    _require(isinstance(function, Mapping), "a tool call is not an object", name)
    function = dict(function)
    if isinstance(arguments := function.get("arguments"), str):
        reason = "the arguments of a tool call are not valid JSON"
        function["arguments"] = _parse_json(arguments or "{}", reason)
    return {**call, "function": function} if "function" in call else function


def _parse_line(line: bytes) -> Any:
    try:
        text = line.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise RowError(NOT_UTF8, str(error)) from None
    begins = "" if text.startswith("{") else f"; it begins {text[:40]!r}"
    return _parse_json(text, NOT_JSON, begins)


def _parse_json(text: str, reason: str, more: str = "") -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError(reason, f"{error.msg}, column {error.colno}{more}") from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits
        raise RowError(reason, str(error)) from None


def _require(met: object, reason: str, detail: str = "") -> None:
    if not met:
        raise RowError(reason, detail)

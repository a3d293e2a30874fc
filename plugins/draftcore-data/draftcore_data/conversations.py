"""Read a row of training data: a conversation, in the shapes that people keep them in, or its tokens.

Understood are OpenAI's `messages` of {role, content}, ShareGPT's `conversations` of {from, value},
prompt and completion, Alpaca's instruction and output, and token ids with a loss mask; mixtures of
them too, because real files mix them. A row that cannot be used comes out as a `BadRow` with its
place, so that the caller decides and nothing is lost silently.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftcore.contracts.capture import Image, RowError
from draftcore.errors import nearest

Message = Mapping[str, Any]

LIST_KEYS = ("messages", "conversations")
# All that is read of a row.
ROW_KEYS: tuple[str, ...] = (*LIST_KEYS, "tools", "prompt", "completion", "instruction", "input")
ROW_KEYS += ("output", "input_ids", "loss_mask", "labels")
ROLE_NAMES = {
    "system": "system developer",
    "user": "user human",
    "assistant": "assistant gpt model chatgpt bing bard bot function_call",
    "tool": "tool observation function function_response ipython",
}
ROLES = {name: role for role, names in ROLE_NAMES.items() for name in names.split()}
REASONING = ("reasoning_content", "reasoning", "thinking")  # one thing, by whoever wrote it
IMAGE_TYPES = ("image", "image_url", "input_image")
IMAGE_UNREAD = "an image cannot be read"  # with where it lies
NO_PROCESSOR = "images need the target's processor, which cannot be loaded"
IGNORED_LABEL = -100  # a label that is not learned, as transformers marks it


@dataclass(frozen=True)
class Conversation:
    """A usable row: messages with `role` and `content`, other keys as they stood in the source."""

    where: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

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
        """The place of the last answer's first token, [T] if there is none."""
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


def parse_row(where: str, row: Any) -> Row:
    """Check a row, which may be a line of JSON, and bring it into the shape {role, content}."""
    folder: str = getattr(row, "folder", "")  # of the file that the line is of
    try:
        if isinstance(row, bytes):
            row = _parse_json(row, "not valid JSON")
        _require(isinstance(row, Mapping), "the row is not an object", type(row).__name__)
        if row.get("input_ids") is not None:
            return _tokens(where, row)
        turns = _turns(row)
        _require(turns, "the conversation is empty")
        messages = tuple(
            _message(f"message {number}", turn, folder) for number, turn in enumerate(turns, 1)
        )
        tools = row.get("tools") or []
        if isinstance(tools, str):  # as columnar files keep them
            tools = _parse_json(tools, "tools is not valid JSON") or []
        listed = isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)
        _require(listed, "tools is not a list of objects")
    except RowError as error:
        return BadRow(where, *error.args)
    return Conversation(where, messages, tuple(tools))


def _turns(row: Mapping[str, Any]) -> list[Any]:
    """Return the messages of a row in any shape, as they stand there."""
    keys = {key for key, value in row.items() if value is not None}
    if key := next((key for key in LIST_KEYS if key in keys), ""):
        _require(isinstance(row[key], list), f"{key} is not a list", type(row[key]).__name__)
        return list(row[key])
    if "instruction" in keys:
        question = "\n\n".join(map(str, filter(None, (row["instruction"], row.get("input")))))
        row = {"prompt": question, "completion": row.get("output")}
    prompt, answer = row.get("prompt"), row.get("completion")
    _require(prompt is not None, "no messages or conversations", f"keys {str([*row])[1:-1]}")
    asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    answered = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
    answered = [] if answer is None else answered  # a question that is to be answered
    before = [
        {**turn, "train": False}
        if isinstance(turn, Mapping) and turn.get("role") == "assistant"
        else turn
        for turn in asked
    ]
    return [*before, *answered]


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
    content = fields.pop("content", fields.pop("value", None))
    _require(role, "a message has no role", name)
    if role not in ROLES:
        raise RowError("unknown role", f"{name}: {role!r}{nearest(role, ROLES)}")
    name = f"{name} ({role})"
    call = fields.pop("function_call", None)  # as OpenAI wrote the only call, before tool_calls
    if role == "function_call":
        call, content = _parse_json(str(content), "a function_call is not valid JSON"), None
    if call is not None:
        calls = call if isinstance(call, list) else [call]
        fields["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    if "tool_calls" in fields:
        _require(isinstance(fields["tool_calls"], list), "tool_calls is not a list", name)
        fields["tool_calls"] = [_call(name, call) for call in fields["tool_calls"]]
    if reasoning := next(filter(None, (fields.pop(key, None) for key in REASONING)), None):
        _require(isinstance(reasoning, str), "reasoning is not text", name)
        fields["reasoning_content"] = reasoning
    weight, train = fields.get("weight", 1), fields.get("train", True)
    _require(weight in (0, 1) and train in (0, 1), "weight is not 0 or 1, or train no bool", name)
    if content is None and fields.get("tool_calls"):
        content = ""  # an assistant that only calls tools has null content in OpenAI's shape
    _require(content is not None, "a message has no content", name)
    content = _content(name, content, folder)
    allowed = isinstance(content, str) or ROLES[role] != "assistant"
    _require(allowed, "an answer holds images, and text alone is learned", name)
    return {"role": ROLES[role], "content": content, **fields}


def _content(name: str, content: Any, folder: str) -> str | list[Message]:
    """Return content as one text, or where some of it are images as the parts that templates know."""
    parts: list[Message] = []
    for part in content if isinstance(content, list) else [content]:
        part = part if isinstance(part, Mapping) else {"text": part}
        if part.get("type") in IMAGE_TYPES:
            parts.append({"type": "image", "image": _image(name, part, folder)})
            continue
        kind = type(part.get("text")).__name__
        _require(kind == "str", "content is not text", f"{name}: {kind}")
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


def _parse_json(text: str | bytes, reason: str) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except json.JSONDecodeError as error:
        raise RowError(reason, f"{error.msg}, column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # no Unicode, or a number of 5,000 digits
        raise RowError(reason, str(error)) from None


def _require(met: object, reason: str, detail: str = "") -> None:
    if not met:
        raise RowError(reason, detail)

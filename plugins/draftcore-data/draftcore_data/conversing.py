"""How a conversation is made anew with another's answers, whoever gives them."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

from draftcore_data.conversations import Conversation, Message, is_learned

ASKED = ("role", "content", "name", "tool_call_id", "reasoning_content")  # what servers read


class Answer(NamedTuple):
    """An assistant's message, why it ended (`length`: cut at its longest), and what it took."""

    message: Message
    finish: str
    prompt_tokens: int
    completion_tokens: int


Talk = Generator[list[Message], Answer, list[Message]]


def converse(row: Conversation) -> Talk:
    """Ask for each assistant turn of a row anew, in order, after the answers given before.

    Yields the messages to answer, is sent the answer, and returns the new conversation. It ends
    early with an answer that was cut, and with one that calls other tools than the old one did: the
    results that follow belong to calls that nobody made. A turn that is not learned stays, and so does
    one that nothing comes before, with weight 0. A last question gets its answer.
    """
    messages: list[Message] = []
    for message in row.messages:
        if message["role"] != "assistant" or not is_learned(message):
            messages.append(message)
        elif not messages:
            messages.append({**message, "weight": 0})
        elif messages[-1]["role"] != "assistant":
            answer = yield messages
            same = calls(answer.message) == calls(message)
            new = dict(answer.message)
            if same and "tool_calls" in new:
                new["tool_calls"] = message["tool_calls"]  # whose ids the results name
            messages.append(new)
            if answer.finish == "length" or not same:
                return messages
    if messages[-1]["role"] != "assistant":
        messages.append((yield messages).message)
    return messages


def functions(message: Message) -> list[dict[str, Any]]:
    """Return the functions that a message calls; OpenAI's shape wraps them, others do not."""
    return [dict(call.get("function", call)) for call in message.get("tool_calls") or ()]


def calls(message: Message) -> list[tuple[Any, Any]]:
    """Return the names and arguments of a message's calls, to compare them."""

    def plain(arguments: Any) -> Any:
        try:
            return json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            return arguments

    return [(one.get("name"), plain(one.get("arguments"))) for one in functions(message)]


def as_asked(message: Message) -> dict[str, Any]:
    """Return a message as OpenAI's API takes it: no keys of ours, arguments of calls as text."""
    sent: dict[str, Any] = {key: message[key] for key in ASKED if key in message}
    found = zip(message.get("tool_calls") or (), functions(message), strict=True)
    for at, (call, function) in enumerate(found):
        if not isinstance(arguments := function.get("arguments", {}), str):
            arguments = json.dumps(arguments)
        called = {"name": function.get("name"), "arguments": arguments}
        one = {"id": call.get("id", f"call_{at}"), "type": "function", "function": called}
        sent.setdefault("tool_calls", []).append(one)
    return sent


def tool_as_asked(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return tool if "function" in tool else {"type": "function", "function": tool}

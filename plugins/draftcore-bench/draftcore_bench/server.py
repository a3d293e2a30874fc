"""Ask one server with OpenAI's API: an answer is streamed, and its times and counts are kept."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
from draftcore_data.conversing import as_asked
from draftcore_data.endpoints import base_url

from draftcore.errors import UsageError, nearest, one_line, raised
from draftcore_bench.drafts import Drafts, read_counters, told
from draftcore_bench.prompts import Prompt

LONGEST = 600.0  # seconds of an answer
SPOKEN = "content", "reasoning_content", "reasoning", "tool_calls"  # what a token is of, in a delta
BAD_FORM = ValueError, LookupError, TypeError, AttributeError
# What the three engines are asked beside OpenAI's: to tell of their drafts, and to take nothing of a
# prompt from what they kept of an earlier one, which the salt keeps them from.
ASKED: Mapping[str, Mapping[str, Any]] = {
    "vllm": {"cache_salt": "{salt}"},
    "sglang": {"cache_salt": "{salt}", "return_spec_tokens_details": True},
    "llamacpp": {"cache_prompt": False},
}


class Failure(Exception):  # noqa: N818  it is counted, and measuring goes on
    """A request that was not answered whole, with the reason."""


@dataclass
class Answer:
    """An answer that came whole: seconds in all and until its first token, and the server's own counts."""

    category: str
    seconds: float
    first: float
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    drafts: Drafts | None

    @property
    def drafted_for(self) -> int:
        """Tokens that drafts may have brought: the first is its prompt's."""
        return self.tokens - 1


class Server:
    """A running server. `ask` may be called by many tasks at once."""

    def __init__(self, url: str, option: str, model: str, key_env: str) -> None:
        self.url, self.option, self.model, self.engine = base_url(url, option), option, model, ""
        self.key_env, self._key = key_env, os.environ.get(key_env, "")
        self._client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(LONGEST, connect=10, pool=None),
            # A connection each: a server may close one that is idle just when it is used again.
            limits=httpx2.Limits(max_keepalive_connections=0),
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def look(self) -> None:
        """Find the model, and the engine. Raises UsageError where there is no such server or model."""
        owners, said = dict[str, str](), ""
        try:
            response = await self._client.get(f"{self.url}/models")
            said = self._said(response)
            owners = {str(m["id"]): str(m.get("owned_by")) for m in response.json()["data"]}
        except httpx2.TransportError as error:
            said = raised(error)
        except BAD_FORM:
            pass
        if not owners:
            raise UsageError(
                f"{self.url}/models lists no model: {said}\n"
                f"  start the server, or have {self.option} be the address of one with OpenAI's API"
            )
        self.model = self.model or (next(iter(owners)) if len(owners) == 1 else "")
        if self.model not in owners:
            what = f"no model {self.model!r}{nearest(self.model, owners)}" * bool(self.model)
            raise UsageError(
                f"{self.url} has {what or 'several models'}; there are {one_line(', '.join(owners))}\n"
                "  name one of them: --model"
            )
        self.engine = owners[self.model]

    async def ask(self, prompt: Prompt, salt: str, sampling: Mapping[str, Any]) -> Answer:
        """Have a prompt answered. Raises Failure, and UsageError where the key is refused."""
        more = ASKED.get(self.engine, {}).items()
        body = {
            "model": self.model, "messages": [as_asked(message) for message in prompt.messages],
            "stream": True, "stream_options": {"include_usage": True}, **sampling,
            **{key: salt if value == "{salt}" else value for key, value in more},
        }  # fmt: skip
        began, first = time.perf_counter(), 0.0
        last = deque[str](maxlen=8)  # what stands behind the text: counts, an error, the end
        asked = self._client.stream("POST", f"{self.url}/chat/completions", json=body)
        try:
            async with asyncio.timeout(LONGEST), asked as response:
                if response.status_code != 200:
                    await response.aread()
                    raise Failure(self._said(response))
                async for line in response.aiter_lines():
                    if line.startswith("data:"):
                        last.append(line[5:].strip())
                        if not first and speaks(json.loads(last[-1])):
                            first = time.perf_counter() - began
            seconds = time.perf_counter() - began
            return Answer(prompt.category, seconds, first or seconds, *counts(last))
        except TimeoutError:
            raise Failure(f"no whole answer in {LONGEST:g} s") from None
        except httpx2.TransportError as error:
            raise Failure(raised(error)) from None
        except BAD_FORM as error:
            raise Failure(f"no stream of a chat completion: {raised(error)}") from None

    async def counters(self) -> Counter[str]:
        """Read the server's counters; none where it tells none."""
        try:
            response = await self._client.get(self.url.removesuffix("/v1") + "/metrics")
            return read_counters(response.text)
        except httpx2.TransportError:
            return Counter()

    def _said(self, response: httpx2.Response) -> str:
        """Return what a server says of an error; some repeat the key. Raises UsageError for a wrong key."""
        if response.status_code in (401, 403):
            raise UsageError(
                f"{self.url} refuses {'the API key' if self._key else 'who has no API key'}\n"
                f"  set {self.key_env} in the environment, or name another variable: --key-env"
            )
        said = f"HTTP {response.status_code}: {one_line(response.text, 200)}"
        return said.replace(self._key, "***") if self._key else said


def speaks(event: Any) -> bool:
    """Say whether an event of a stream brings a token."""
    deltas = [choice.get("delta") or {} for choice in event.get("choices") or ()]
    return any(delta.get(key) for delta in deltas for key in SPOKEN)


def counts(last: Sequence[str]) -> tuple[int, int, int, Drafts | None]:
    """Read the end of a stream. Raises Failure for an answer that is not whole, or not counted."""
    events = [json.loads(data) for data in last if data != "[DONE]"]
    if errors := [event["error"] for event in events if event.get("error")]:
        raise Failure(f"an error in the stream: {one_line(errors[0], 200)}")
    if "[DONE]" not in last:
        raise Failure("the answer was cut off")
    usage: Any = next((e["usage"] for e in reversed(events) if e.get("usage")), {})
    if not usage.get("completion_tokens"):
        raise Failure("an empty answer, or its stream has no usage, which counts its tokens")
    drafts = [found for event in events if (found := told(event)) is not None]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    prompt = usage.get("prompt_tokens") or 0
    return usage["completion_tokens"], prompt, cached, drafts[-1] if drafts else None

"""Ask servers with OpenAI's API: several at a time, each paused while it does not answer.

How many questions a server has at a time is found by asking: one more with each answer, up to a bound, and
half of them when it has too many.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx2

from draftcore.contracts.capture import RowError
from draftcore.errors import DraftcoreError, UsageError, one_line, raised
from draftcore.uris import holds_secret
from draftcore_data.conversations import Message
from draftcore_data.conversing import Answer, as_asked, tool_as_asked

KEY = "DRAFTCORE_API_KEY"
TRIES = 8  # of one question that servers fail at
FIRST, LONGEST = 0.25, 60.0  # seconds that a server is paused; doubled each time
BUSY = (408, 409, 425, 429, 503)  # says nothing of the question
FEW, MANY = 32, 256  # questions that a server has at a time: at first, and at most
FULL = (429, 503)  # it has too many questions
UNFIT = (400, 413, 422)  # the question is refused, others may not be


@dataclass
class Endpoint:
    """A server's address, its questions under way, and until when it is left alone after a failure.

    It has up to `limit` questions at a time, and never more than `most`.
    """

    url: str
    most: int
    limit: float
    slowed: bool = False
    asked: int = 0
    failures: int = 0
    away_until: float = 0.0

    def keep_up(self) -> None:
        """Let it have one question more, or a share of one since it had too many."""
        self.limit = min(self.most, self.limit + (1 / self.limit if self.slowed else 1))

    def pause(self, reason: str, seconds: float = 0.0, *, slower: bool = False) -> None:
        """Leave the server alone, longer each time; questions that were under way count once."""
        if (now := time.monotonic()) >= self.away_until:
            wait = max(seconds, FIRST * 2 ** min(self.failures, 16))
            if not self.failures:
                print(f"{self.url} is left alone for now: {reason}", file=sys.stderr)
            if slower:
                self.limit, self.slowed = max(1.0, self.limit / 2), True
            self.failures, self.away_until = self.failures + 1, now + min(wait, LONGEST)


class Endpoints:
    """Asks the servers at these URLs one question after another, in tasks of one event loop.

    `body` is what each request says besides messages and tools: model, sampling. `patience` is how
    many seconds pass without any answer until it gives up; `timeout` is that of one answer. `under_way`
    are the conversations that keep all servers at work. Where the first cannot be reached, `advise` says
    how one is started on its port.
    """

    def __init__(
        self, urls: Sequence[str], timeout: float, patience: float, concurrency: int | None,
        advise: Callable[[int], str],
    ) -> None:  # fmt: skip
        most, first = (concurrency, concurrency) if concurrency else (MANY, FEW)
        self.endpoints = [
            Endpoint(base_url(url, "--endpoint"), most, first) for url in dict.fromkeys(urls)
        ]
        self.under_way = concurrency or MANY * len(self.endpoints)
        self.body: dict[str, Any] = {}
        self.timeout, self.patience, self.answered = timeout, patience, time.monotonic()
        self._changed = asyncio.Event()  # a server can have one question more
        self._advise: Callable[[int], str] | None = advise
        self._key = os.environ.get(KEY, "")
        self._client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(timeout, connect=10, pool=None),
            limits=httpx2.Limits(max_connections=None),
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
        )

    async def __aenter__(self) -> Endpoints:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def find_model(self) -> str:
        """Return the name of the model that is served. Raises UsageError where there are several."""
        listed = await self._ask("GET", "/models")
        names = [str(one["id"]) for one in listed.get("data", ()) if "id" in one]
        if len(names) != 1:
            raise UsageError(
                f"the servers have {len(names)} models: {one_line(', '.join(names)) or 'none listed'}\n"
                "  name one with --model"
            )
        return names[0]

    async def answer(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> Answer:
        """Have a conversation answered. Raises RowError where the servers refuse or fail at this one."""
        body = {**self.body, "messages": [as_asked(message) for message in messages]}
        if tools:
            body["tools"] = [tool_as_asked(tool) for tool in tools]
        return _read(await self._ask("POST", "/chat/completions", body))

    async def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        tries, reason = 0, ""
        while tries < TRIES:
            endpoint, busy, slower = await self._free(), False, False
            endpoint.asked += 1
            try:
                began = time.monotonic()
                response = await self._client.request(method, endpoint.url + path, json=body)
                status, reason = response.status_code, f"HTTP {response.status_code}"
                busy = status in BUSY
                if status == 200:
                    found = response.json()
                    if not isinstance(found, dict):
                        raise ValueError("the answer is not an object")
                    self.answered, self._advise = time.monotonic(), None
                    if method == "POST" and self.answered - began < self.timeout / 4:
                        endpoint.keep_up()
                    endpoint.failures = 0
                    return found
                reason, slower = f"{reason}: {self._text(response)}", status in FULL
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                status, reason, busy = 0, raised(error), True
            except (httpx2.TransportError, ValueError) as error:
                status, reason = 0, raised(error)
                slower = isinstance(error, httpx2.ReadTimeout)
            finally:
                endpoint.asked -= 1
                self._changed.set()
            if status in UNFIT:
                self.answered = time.monotonic()
                raise RowError("the server refuses it", reason)
            if status and status < 500 and not busy:
                raise UsageError(
                    f"{endpoint.url}{path} cannot be asked: {reason}\n"
                    f"  check --endpoint and --model; a key is read from the environment: {KEY}"
                )
            tries += not busy
            endpoint.pause(reason, _retry_after(response) if status else 0.0, slower=slower)
            if busy and not status and self._advise is not None:
                port, advise, self._advise = httpx2.URL(endpoint.url).port, self._advise, None
                print(advise(port or 8000), file=sys.stderr)
            if time.monotonic() - self.answered > self.patience:
                raise DraftcoreError(
                    f"no server has answered for {self.patience:.0f} s; {endpoint.url}: {reason}\n"
                    "  when one does, the same command goes on"
                )
        raise RowError(f"no answer in {TRIES} tries", reason)

    async def _free(self) -> Endpoint:
        """Wait for a server that can have one more question; of several the one with the least to do."""
        while True:
            now = time.monotonic()
            away = [one.away_until - now for one in self.endpoints if one.away_until > now]
            here = [one for one in self.endpoints if one.away_until <= now]
            if ready := [one for one in here if one.asked < one.limit]:
                return min(ready, key=lambda one: one.asked)
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(away, default=None))

    def _text(self, response: httpx2.Response) -> str:
        """Return what a server says of an error; some repeat the key."""
        text = one_line(response.text, 300)
        return text.replace(self._key, "***") if self._key else text


def base_url(url: str, option: str) -> str:
    """Return the address that `/chat/completions` is added to; a bare host means its `/v1`.

    Raises UsageError, which names the option that has it.
    """
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        parsed = httpx2.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo or parsed.query:
        named = "" if holds_secret(url) else f" {url!r}"
        raise UsageError(
            f"{option}{named} is not a server's address\n"
            f"  write it like http://localhost:8000/v1; a key comes from the environment: {KEY}"
        )
    return url.rstrip("/") + ("/v1" if parsed.path in ("", "/") else "")


def _retry_after(response: httpx2.Response) -> float:
    try:
        return float(response.headers.get("Retry-After", 0))
    except ValueError:  # a date
        return 0.0


def _read(found: Mapping[str, Any]) -> Answer:
    """Read a chat completion; reasoning goes by two names."""
    try:
        choice, usage = found["choices"][0], found.get("usage") or {}
        given = choice["message"]
        reasoning = given.get("reasoning_content") or given.get("reasoning")
        message = {"role": "assistant", "content": given.get("content") or ""}
        if reasoning:
            message["reasoning_content"] = reasoning
        if given.get("tool_calls"):
            message["tool_calls"] = given["tool_calls"]
        told = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise RowError("the server's answer is not a chat completion", raised(error)) from None
    if len(message) == 2 and not message["content"]:
        raise RowError("the answer is empty", str(choice.get("finish_reason")))
    return Answer(message, str(choice.get("finish_reason")), told[0], told[1])

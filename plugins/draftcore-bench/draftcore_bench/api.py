"""The verb `bench` as a function. What is heavy is imported inside."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import draftcore
from draftcore.errors import DraftcoreError
from draftcore_bench.prompts import Prompt

if TYPE_CHECKING:
    from draftcore_bench.report import Report

LEVELS = 1, 2, 4, 8, 16, 32, 64
KEY = "DRAFTCORE_API_KEY"


def bench(
    url: str, *, plain: str | None = None, prompts: Sequence[str] = ("own",),
    concurrency: Sequence[int] = LEVELS, repeats: int = 3, limit: int = 80, max_tokens: int = 256,
    temperature: float = 0.0, model: str | None = None, key_env: str = KEY,
    out: Path | None = None, registry: Any = None,
) -> Report:  # fmt: skip
    """Measure a running server, and with `plain` another that serves the same model without its draft.

    Raises UsageError for what cannot be asked, DraftcoreError where nothing could be measured. What ended
    measuring later, Ctrl-C among it, is the report's `ended`.
    """
    import asyncio

    from draftcore.progress import Progress
    from draftcore_bench.measure import measure
    from draftcore_bench.report import DRAFT, PLAIN, Report
    from draftcore_bench.server import Server

    chosen = choose(prompts, limit, registry or draftcore.load_plugins())
    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    urls = {DRAFT: (url, "URL")} | ({PLAIN: (plain, "--plain")} if plain else {})
    about = {"prompts": [*prompts], "asked": len(chosen), "repeats": repeats, **sampling}
    report = Report(about)

    async def work() -> None:
        async with AsyncExitStack() as servers:
            sides = {}
            for side, (address, option) in urls.items():
                sides[side] = server = Server(address, option, model or "", key_env)
                servers.push_async_callback(server.close)
                await server.look()
                report.about[side] = {k: getattr(server, k) for k in ("url", "model", "engine")}
            with Progress(len(concurrency) * repeats * len(sides), verb="measured") as progress:
                async for made in measure(sides, chosen, concurrency, repeats, sampling, progress):
                    report.rounds.append(made)

    try:
        asyncio.run(work())
    except (DraftcoreError, KeyboardInterrupt) as error:
        if not report.rounds:
            raise
        report.ended = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
    if out is not None:
        report.write(out)
    return report


def choose(names: Sequence[str], limit: int, registry: Any) -> list[Prompt]:
    """Read prompt sets, at most `limit` prompts of each; what no offer is called is a file."""
    found: list[Prompt] = []
    for text in names:
        uri = f"files:{text}" if Path(text).exists() else text
        name = uri.partition(":")[0]
        found += draftcore.bind(registry, "prompts", name).hook.prompts(name=name, uri=uri)[:limit]
    return found

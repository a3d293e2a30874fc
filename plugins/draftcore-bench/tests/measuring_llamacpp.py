"""llama.cpp's own server, measured: run with those of draftcore-llamacpp, which brings its wheel.

It drafts by n-grams, so nothing is trained; a server tells of these drafts as of any.
"""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from draftcore_bench.api import bench
from draftcore_llamacpp.convert import write_target
from draftcore_sdk.serving import Serving

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
SCRIPT = """
import sys, time
import xllamacpp as x

file, port, *draft = sys.argv[1:]
params = x.CommonParams()
params.model.path, params.hostnames, params.port = file, ["127.0.0.1"], int(port)
params.n_ctx, params.n_parallel, params.use_jinja = 2048, 2, True
params.n_gpu_layers, params.fit_params, params.warmup = 0, False, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
if draft:
    speculative = params.speculative
    speculative.types = [x.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_CACHE]
    params.speculative = speculative
server = x.Server(params)
time.sleep(600)
"""


def test_llama_cpp_with_and_without_drafts_is_measured(tmp_path: Path) -> None:
    write_target(QUICKSTART / "target", file := tmp_path / "target.gguf")
    with ExitStack() as servers:
        urls = []
        for more in (["draft"], []):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            command = [sys.executable, "-c", SCRIPT, str(file), str(port), *more]
            log = tmp_path / f"{port}.log"
            urls.append(servers.enter_context(Serving(command, port, log, ready="/health")).url)
        asked: dict[str, Any] = {
            "prompts": [str(QUICKSTART / "data" / "eval.jsonl")], "limit": 4, "max_tokens": 64,
            "concurrency": (1, 2), "repeats": 1,
        }  # fmt: skip
        told = bench(urls[0], plain=urls[1], **asked).to_json()
    assert [told["about"][side]["engine"] for side in ("draft", "plain")] == 2 * ["llamacpp"]
    assert (told["failures"], told["notes"]) == ({}, []), "nothing came from a cache"
    assert [level["draft"]["requests"] for level in told["levels"]] == [4, 4]
    assert all(level["speed_up"]["median"] > 0 for level in told["levels"])
    assert told["acceptance"]["of_drafted"] is not None, "some was drafted"
    assert told["acceptance"]["length"] >= 1
    assert all(level["plain"]["acceptance"] is None for level in told["levels"])

"""Capture by a running sglang beside the same server's own prefill: tokens/s, and how far off.

    python benchmarks/sglang_capture.py            # one CUDA device, some 470 M random parameters
    python benchmarks/sglang_capture.py --small    # the same on a CPU, to try it

Two servers share the device, one with this project's plugin switched on (files in memory as its sink,
receipts) and one without; they run as the plugin's README says and answer the same prompts in turn, some
of 512 to 1,023 tokens and some of twice that, as many at a time: without a capture, with one for each prompt,
which is what it costs a server, and with captures in batches of 64 by several producers, which is what a run
gets. Prints one line for each figure, first those of the way into the store alone (`sglang_sink.py`), which
bound what follows.

The small model has few operations for each byte of its states, so that writing them matters as on a
GPU; there the device copies, here the scheduler's thread and the writer do, on whatever cores there are.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import sglang_sink
import torch
from draftcore_file.store import FileStore
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.serving import Serving
from draftcore_sdk.targets import tiny_target
from draftcore_sglang import client
from draftcore_sglang.options import ServerOptions
from draftcore_sglang.ranks import free_port
from draftcore_sglang.remote import PAUSE, ServerCapture, receipt_of, request_body
from draftcore_sglang.wire import BUSY, FIELD, Ask

from draftcore.contracts.capture import CaptureBatch, FeatureRequest
from draftcore.contracts.store import SampleRef
from draftcore.contracts.target import TargetSpec

Prompts = list[list[int]]
BATCH, PRODUCERS, ROUNDS = 64, 6, 3
TOKENS = 2_400_000  # of a round: what begins and ends alone is little of it
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
SMALL = {
    "hidden_size": 2048,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
CUDA = [
    "--attention-backend=triton",
    "--dtype=bfloat16",
    "--max-total-tokens=131072",  # 15 GiB: both servers measure the free memory at once
    "--mem-fraction-static=0.3",
    "--chunked-prefill-size=32768",
    "--max-prefill-tokens=65536",
    "--max-running-requests=512",
]
CPU = [
    "--device=cpu",
    "--attention-backend=torch_native",
    "--dtype=float32",
    "--max-total-tokens=8192",
    "--mem-fraction-static=0.1",
    "--max-running-requests=64",
]
COMMON = [
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--skip-server-warmup",
    "--disable-radix-cache",
    "--host=127.0.0.1",
    "--disable-cuda-graph",
]


def serving(model: Path, flags: list[str], log: Path, environment: dict[str, str]) -> Serving:
    """A server on loopback, up."""
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", f"--model-path={model}"]
    command += [f"--port={port}", *flags, *COMMON]
    return Serving(command, port, log, HF_HUB_OFFLINE="1", **environment)


def batch_of(prompts: Prompts) -> CaptureBatch:
    ids = tuple(uuid.uuid4().hex for _ in prompts)
    return CaptureBatch(0, tuple(range(len(prompts))), ids, tuple(prompts))


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def plain(url: str, prompts: Prompts) -> None:
    """What the capture asks for, without the capture."""
    ask = client.Server(url)
    with ThreadPoolExecutor(PRODUCERS * BATCH) as threads:
        list(threads.map(lambda tokens: ask.post(request_body(tokens, {}), 240), prompts))


def one_by_one(url: str, request: FeatureRequest, store: FileStore, prompts: Prompts) -> None:
    """A capture for each prompt, and no batch that is waited for."""
    server, lock, refs = client.Server(url), threading.Lock(), list[SampleRef]()

    def ask(tokens: list[int]) -> None:
        wanted = Ask(uuid.uuid4().hex, request.names, request.dtype, "benchmark", {})
        body = request_body(tokens, {FIELD: wanted.to_json()})
        while "ref" not in (receipt := receipt_of(server.post(body, 240)) or {}):
            if receipt.get("error") != BUSY:
                raise SystemExit(f"a sample was not stored: {receipt}")
            time.sleep(PAUSE)
        with lock:
            refs.append(SampleRef.from_json(receipt["ref"]))
            done = refs[:] if len(refs) >= BATCH else []
            del refs[: len(done)]
        store.free(done)

    with ThreadPoolExecutor(PRODUCERS * BATCH) as threads:
        list(threads.map(ask, prompts))
    store.free(refs)


def captured(captures: list[ServerCapture], store: FileStore, prompts: Prompts) -> None:
    """Producers take a batch each until none is left. What a batch stored is freed in its place."""
    batches = iter([prompts[at : at + BATCH] for at in range(0, len(prompts), BATCH)])
    lock = threading.Lock()

    def produce(capture: ServerCapture) -> None:
        while True:
            with lock:
                batch = next(batches, None)
            if batch is None:
                return
            refs = capture.deliver(batch_of(batch), [{} for _ in batch], "benchmark", store)
            store.free(refs)

    with ThreadPoolExecutor(len(captures)) as threads:
        list(threads.map(produce, captures))


def largest_difference(
    capture: ServerCapture, store: FileStore, target: TargetSpec, prompt: list[int]
) -> dict[str, float]:
    """By feature, the largest difference to transformers over the largest value."""
    model, request = target.load_model(), capture.request
    tokens_1T = torch.tensor([prompt], device=model.device)
    lengths = torch.tensor([len(prompt)], device=model.device)
    ours = model.features(tokens_1T, lengths, request)
    (ref,) = capture.deliver(batch_of([prompt]), [{}], "benchmark", store)
    with store.get(ref) as handle:
        found = {
            name: (
                (handle.tensors[name].float() - ours[name][0].float().cpu()).abs().max()
                / ours[name].float().abs().max().cpu()
            ).item()
            for name in request.names
        }
    store.free([ref])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    sglang_sink.ceilings(options.small)
    folder, memory = Path(tempfile.mkdtemp()), Path(f"/dev/shm/bench{os.getpid()}")
    model = tiny_target(folder / "model", std=0.02, **(SMALL if options.small else LARGE))
    flags, layers = (CPU, (0, 1, 2)) if options.small else (CUDA, (1, 13, 24))
    target = TransformersTarget(str(model))
    request = FeatureRequest(layers, True, "float32" if options.small else "bfloat16")
    kinds = ((16, 64),) if options.small else ((512, 1024), (1024, 2048))
    sink = {"DRAFTCORE_LAYERS": ",".join(map(str, layers))}
    if not options.small:
        sink["DRAFTCORE_BUFFER"] = "6GiB"  # what may be under way
    store = FileStore(memory, max_bytes=(1 if options.small else 8) << 30, volatile=True)
    sink["DRAFTCORE_SINK"] = store.uri
    # Both at once; a server ends with the thread that started it.
    with ThreadPoolExecutor(2) as starting, ExitStack() as running:
        logs, environments = (folder / "plain.log", folder / "capture.log"), ({}, sink)
        started = starting.map(partial(serving, model, flags), logs, environments)
        bare, capturing = map(running.enter_context, started)
        asked = ServerOptions(servers=(capturing.url,), in_flight=BATCH, self_test=False)
        captures = [ServerCapture(target, request, asked) for _ in range(PRODUCERS)]
        for low, high in kinds:
            prompts = prompts_of(low, high, 4000 if options.small else TOKENS)
            print(f"{len(prompts)} prompts of {low} to {high - 1} tokens", flush=True)
            rounds(
                {
                    "without capture": partial(plain, bare.url),
                    "captured": partial(one_by_one, capturing.url, request, store),
                    "captured in batches": partial(captured, captures, store),
                },
                prompts,
            )
        gaps = largest_difference(captures[0], store, target, prompts[0])
        for feature, gap in gaps.items():
            print(f"{feature}: largest difference to transformers {gap:.2g} of its largest value")
        for capture in captures:
            capture.close()
    store.close()


def prompts_of(low: int, high: int, tokens: int) -> Prompts:
    """Random prompts of low to high - 1 tokens, so many tokens in all."""
    random = torch.Generator().manual_seed(0)
    prompts: Prompts = []
    while tokens > 0:
        length = int(torch.randint(low, high, (), generator=random))
        prompts.append(torch.randint(0, 250, (length,), generator=random).tolist())
        tokens -= length
    return prompts


def rounds(works: Mapping[str, Callable[[Prompts], None]], prompts: Prompts) -> None:
    """All in turn, and the medians of their ratios to the first; a quarter before, to warm up."""
    for work in works.values():
        work(prompts[: len(prompts) // 4])
    tokens, ratios = sum(map(len, prompts)), dict[str, list[float]]()
    for _ in range(ROUNDS):
        base = 0.0
        for name, work in works.items():
            took = seconds(partial(work, prompts))
            base = base or took
            ratios.setdefault(name, []).append(base / took)
            print(f"{tokens / took:,.0f} tokens/s {name}: {base / took:.1%}", flush=True)
    for name, found in ratios.items():
        print(f"median {name}: {statistics.median(found):.1%}", flush=True)


if __name__ == "__main__":
    main()

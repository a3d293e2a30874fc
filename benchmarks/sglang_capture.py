"""Capture by a running sglang beside the same server's own prefill: tokens/s, and how far off.

    python benchmarks/sglang_capture.py            # one CUDA device, some 470 M random parameters
    python benchmarks/sglang_capture.py --small    # the same on a CPU, to try it

Two servers share the device, one with this project's plugin switched on (a `shm` sink, receipts) and one
without; they answer the same prompts in turn. Prints one line for each figure.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from draftcore_sglang.client import Server
from draftcore_sglang.options import ServerOptions
from draftcore_sglang.remote import ServerCapture, request_body

from draftcore.records import CaptureGroup, CaptureInput, FeatureRequest
from draftcore.stores.shm import ShmStore
from draftcore.supervisor import free_port
from draftcore.target import TargetSpec
from draftcore.testing.serving import Serving
from draftcore.testing.targets import tiny_target

LAYERS, IN_FLIGHT, ROUNDS = (1, 13, 24), 64, 4
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
CUDA = ["--attention-backend=triton", "--dtype=bfloat16", "--mem-fraction-static=0.3"]
CPU = [
    "--device=cpu",
    "--attention-backend=torch_native",
    "--dtype=float32",
    "--max-total-tokens=8192",
    "--mem-fraction-static=0.1",
]
COMMON = [
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--skip-server-warmup",
    "--disable-radix-cache",
    "--host=127.0.0.1",
    "--max-running-requests=64",
    "--disable-cuda-graph",
]


@contextmanager
def server(model: Path, flags: list[str], log: Path, **environment: str) -> Iterator[str]:
    """A server on loopback, up; its URL."""
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", f"--model-path={model}"]
    command += [f"--port={port}", *flags, *COMMON]
    offline = {"HF_HUB_OFFLINE": "1", **environment}
    with Serving(command, port, log, **offline) as started:
        yield started.url


def group_of(prompts: list[list[int]]) -> CaptureInput:
    ids = tuple(uuid.uuid4().hex for _ in prompts)
    longest = max(map(len, prompts))
    return CaptureInput(
        CaptureGroup(0, tuple(range(len(prompts))), ids, longest), tuple(map(tuple, prompts))
    )


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def plain(url: str, prompts: list[list[int]]) -> None:
    """What the capture asks for, without the capture."""
    ask = Server(url)
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        list(threads.map(lambda tokens: ask.post(request_body(tokens, {}), 240), prompts))


def captured(capture: ServerCapture, store: ShmStore, prompts: list[list[int]]) -> None:
    store.free(capture.deliver(group_of(prompts), [{} for _ in prompts], "benchmark", store))


def largest_difference(
    capture: ServerCapture, store: ShmStore, target: TargetSpec, prompt: list[int]
) -> dict[str, float]:
    """By feature, the largest difference to transformers over the largest value."""
    model, request = target.model, capture.request
    tokens_1T = torch.tensor([prompt], device=model.device)
    lengths = torch.tensor([len(prompt)], device=model.device)
    ours = model.features(tokens_1T, lengths, request)
    (ref,) = capture.deliver(group_of([prompt]), [{}], "benchmark", store)
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
    parser.add_argument("--prompts", type=int, default=256)
    options = parser.parse_args()
    folder, name = Path(tempfile.mkdtemp()), f"bench{os.getpid()}"
    shape = {"num_hidden_layers": 28} if options.small else LARGE
    model = tiny_target(folder / "model", std=0.02, **shape)
    flags = CPU if options.small else CUDA
    target = TargetSpec(str(model))
    request = FeatureRequest(LAYERS, True, "float32" if options.small else "bfloat16")
    random = torch.Generator().manual_seed(0)
    low, high = (16, 64) if options.small else (512, 1024)
    lengths = torch.randint(low, high, (options.prompts,), generator=random).tolist()
    prompts = [torch.randint(0, 250, (n,), generator=random).tolist() for n in lengths]
    tokens = sum(lengths)
    sink = {"DRAFTCORE_SINK": f"shm:{name}", "DRAFTCORE_LAYERS": ",".join(map(str, LAYERS))}
    store = ShmStore(name, max_bytes=(64 << 20) if options.small else (8 << 30))
    with (
        server(model, flags, folder / "plain.log") as bare,
        server(model, flags, folder / "capture.log", **sink) as capturing,
    ):
        asked = ServerOptions(servers=(capturing,), in_flight=IN_FLIGHT, self_test=False)
        capture = ServerCapture(target, request, asked)
        print(
            f"warm: {seconds(lambda: plain(bare, prompts)):.1f} s without, "
            f"{seconds(lambda: captured(capture, store, prompts)):.1f} s with capture",
            flush=True,
        )
        for feature, gap in largest_difference(capture, store, target, prompts[0]).items():
            print(f"{feature}: largest difference to transformers {gap:.2g} of its largest value")
        ratios = []
        for _ in range(ROUNDS):
            without = seconds(lambda: plain(bare, prompts))
            with_ = seconds(lambda: captured(capture, store, prompts))
            ratios.append(without / with_)
            print(
                f"{tokens / without:,.0f} tokens/s without, {tokens / with_:,.0f} with capture: "
                f"{without / with_:.1%}",
                flush=True,
            )
        print(f"median {statistics.median(ratios):.1%} of the prefill's throughput")
        capture.close()
    store.close()


if __name__ == "__main__":
    main()

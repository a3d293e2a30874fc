"""Time the channels: refs published and received, latency of a claim, a step of a colocated run.

    python benchmarks/channels.py [--batch 64] [--groups 300] [--folder FOLDER]
    python benchmarks/channels.py --plugin MODULE --uri URI    # of a channel that nobody has used

The producers are processes of their own, and a group is one batch of refs as an EAGLE-3 run of
Qwen3-8B has them (five tensors). `stream`: one producer publishes what it has claimed before, one
commit per group, until the trainer has received and released everything. `loop` adds the claims:
every producer claims, publishes, claims, so that a claim's latency counts. Figures of the `memory`
channel are the whole cost of a step in a colocated run: receive, claim, publish, advance.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from draftcore_sdk.channel_ends import open_through
from report import report

from draftcore.channels.memory import MemoryChannel
from draftcore.contracts.channel import CaptureTask, Channel, ChannelEnded
from draftcore.contracts.store import SampleRef, TensorSpec
from draftcore.data.plan import Plan

NAMES = ("hidden.2", "hidden.18", "hidden.33", "token_ids", "loss_mask")
MODES = (("stream", 1), ("loop", 1), ("loop", 3))
AIM = 5000  # refs per second of one producer, in batches of 64, through sqlite and redis
SPECS = tuple(TensorSpec(name, (512, 4096), "bfloat16") for name in NAMES)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64, help="refs per group and per step")
    parser.add_argument("--groups", type=int, default=300)
    parser.add_argument("--folder", type=Path, help="where the channels lie; a temporary folder")
    parser.add_argument("--plugin", help="the module of another plugin, to time its channel alone")
    parser.add_argument("--uri", help="of that channel; its last option names the place")
    parser.add_argument("--producer", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.producer:
        return produce(*options.producer, groups=options.groups)
    if options.plugin:
        for mode, producers in MODES:
            between(options.plugin, f"{options.uri}-{mode}-{producers}", mode, producers, options)
        return
    memory(options.batch, options.groups)
    for scheme, plugin in (("sqlite", "draftcore.builtin"), ("dir", "draftcore_sharedfs.plugin")):
        in_folder(scheme, plugin, options)


def in_folder(scheme: str, plugin: str, options: Any) -> None:
    for mode, producers in MODES:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            uri = f"{scheme}:{folder}/channel"
            between(plugin, uri, mode, producers, options)


def plan_of(batch: int, groups: int) -> Plan:
    ids = [f"{row:032x}" for row in range(batch * groups)]
    return Plan(ids, [512] * len(ids), capture_batch=batch, batch=batch, seed=0, window=1)


def refs_of(task: CaptureTask) -> tuple[SampleRef, ...]:
    made = json.dumps(["f" * 64, NAMES[:3], "bfloat16", "hf", 8])
    return tuple(
        SampleRef(name, "0" * 32, "shm:features", SPECS, 512, 3 * 2**22, made)
        for name in task.group.feature_ids
    )


def memory(batch: int, groups: int) -> None:
    plan, channel = plan_of(batch, groups), MemoryChannel("bench")
    channel.offer(plan.captures(0))
    seconds = 0.0
    for index in range(plan.total_steps):
        step = plan.step(index)
        began = time.perf_counter()
        while channel.receive(step) is None:
            claim = channel.claim("local")
            assert claim is not None
            seconds += time.perf_counter() - began
            made = refs_of(claim)
            began = time.perf_counter()
            channel.publish(claim, made)
        channel.advance(index + 1)
        seconds += time.perf_counter() - began
    report(f"memory: one step of {batch}", f"{seconds / plan.total_steps * 1e6:.0f} us")


def between(plugin: str, uri: str, mode: str, producers: int, options: Any) -> None:
    plan = plan_of(options.batch, options.groups)
    trainer = open_through(plugin, uri, {}, "bench", "trainer")
    trainer.offer(plan.captures(0))
    command = [sys.executable, __file__, "--groups", str(options.groups)]
    command += ["--producer", plugin, uri, mode]
    children = [
        subprocess.Popen(
            [*command, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for n in range(producers)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()  # it is ready
        child.stdin.write("go\n")
        child.stdin.flush()
    began = time.perf_counter()
    for index in range(plan.total_steps):
        while trainer.receive(plan.step(index)) is None:
            time.sleep(0.001)
        trainer.advance(index + 1)
    seconds = time.perf_counter() - began
    trainer.close()
    latencies = [ms for child in children for ms in json.loads(child.communicate()[0])]
    rate = options.batch * options.groups / seconds
    middle, high = statistics.median(latencies), sorted(latencies)[int(0.95 * len(latencies))]
    scheme = uri.partition(":")[0]
    what = f"{scheme}: {mode}, {producers} producer(s)"
    measured = f"{rate:.0f} refs/s, claim median {middle:.1f} ms, 95 % {high:.1f} ms"
    if mode == "stream" and scheme in ("sqlite", "redis"):
        report(what, measured, f">= {AIM} refs/s", rate >= AIM)
    else:
        report(what, measured)


def produce(plugin: str, uri: str, mode: str, name: str, *, groups: int) -> None:
    """Publish what is claimed; print how long each claim took, in ms."""
    channel = open_through(plugin, uri, {}, "bench", "producer")
    latencies: list[float] = []
    claims = [claim(channel, latencies) for _ in range(groups)] if mode == "stream" else []
    print("ready", flush=True)
    sys.stdin.readline()
    for claimed in claims:
        channel.publish(claimed, refs_of(claimed))
    try:
        while True:
            claimed = claim(channel, latencies)
            channel.publish(claimed, refs_of(claimed))
    except ChannelEnded:
        print(json.dumps(latencies))
    channel.close()


def claim(channel: Channel, latencies: list[float]) -> CaptureTask:
    began = time.perf_counter()
    task = channel.claim("bench", wait=600)
    assert task is not None
    latencies.append((time.perf_counter() - began) * 1e3)
    return task


if __name__ == "__main__":
    main()

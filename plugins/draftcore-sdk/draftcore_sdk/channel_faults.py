"""What every channel between processes must do: its two ends, and whoever is killed or frozen.

Other processes run the functions at the end of this file.
"""

import dataclasses
import json
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import pytest

from draftcore.contracts.capture import CaptureGroup
from draftcore.contracts.channel import CaptureTask, ChannelEnded
from draftcore.contracts.store import SampleRef
from draftcore.data.plan import Plan
from draftcore.errors import DraftcoreError, UsageError
from draftcore_sdk.channel_ends import (
    NEVER,
    SOON,
    OpenEnd,
    Opening,
    Waiting,
    eventually,
    ids,
    open_through,
    received,
    ref,
    refs_of,
    step,
    task,
)
from draftcore_sdk.suite import child_environment


class Faults(Opening):
    """The tests of a channel of capability `shared`; skipped for any other."""

    @pytest.fixture
    def child(self, channel_uri: str, shared: None) -> Iterator[Callable[..., "Child"]]:
        """Run a function of this module in another process, on the channel with a ttl of 1 s."""
        started: list[Child] = []

        def start(function: str, *arguments: str) -> Child:
            uri = self.with_faults(self.with_limits(channel_uri, 64, 10**12), 1, 60, 3)
            opening = (self.plugin, uri, json.dumps(dict(self.options)))
            started.append(Child(function, *opening, *arguments))
            return started[-1]

        yield start
        for process in started:
            process.end()

    # ------------------------------------------------------------ two ends

    def test_each_end_refuses_what_is_the_others(self, open_end: OpenEnd) -> None:
        trainer, producer = open_end("trainer"), open_end("producer")
        for use in (
            lambda: trainer.claim("one"),
            lambda: trainer.publish(task(0, 0), []),
            lambda: producer.offer([]),
            lambda: producer.receive(step(0)),
            lambda: producer.advance(1),
            lambda: producer.credit(),
            lambda: producer.given_up,
            lambda: producer.evict(step(0), []),
            lambda: trainer.wait_for_room(task(0, 0), 0.0),
        ):
            with pytest.raises(UsageError, match="end of the channel"):
                use()

    @pytest.mark.usefixtures("shared")
    def test_a_shared_channel_is_not_opened_as_both_ends(self, channel_uri: str) -> None:
        with pytest.raises(UsageError, match="two ends"):
            open_through(self.plugin, channel_uri, self.options)

    def test_a_producer_may_come_first(self, open_end: OpenEnd) -> None:
        producer = open_end("producer")
        assert producer.claim("one", wait=NEVER) is None
        open_end("trainer").offer([task(0, 0)])
        assert producer.claim("one", wait=SOON) == task(0, 0)

    @pytest.mark.parametrize("role", ["trainer", "producer"])
    def test_another_runs_channel_is_refused_naming_both(
        self, open_end: OpenEnd, role: str
    ) -> None:
        open_end("trainer", run_id="theirs")
        with pytest.raises(UsageError, match=r"(?s)theirs, running; this run: ours.*name another"):
            open_end(role, run_id="ours")

    @pytest.mark.parametrize("role", ["trainer", "producer"])
    def test_a_finished_runs_channel_is_refused_and_a_failed_ones_is_not(
        self, open_end: OpenEnd, role: str
    ) -> None:
        open_end("trainer").close("failed")
        open_end(role).close("failed")
        open_end("trainer").close("finished")
        with pytest.raises(UsageError, match=r"(?s)suite, finished; this run: suite.*name another"):
            open_end(role)

    def test_a_producer_that_names_no_run_takes_the_one_it_finds(self, open_end: OpenEnd) -> None:
        trainer = open_end("trainer", run_id="found")
        trainer.offer([task(0, 0)])
        assert open_end("producer", run_id="").claim("one", NEVER) == task(0, 0)

    @pytest.mark.parametrize(
        "name", ["", "../up", "/abs", "a/b", "..", "-rf", "x" * 65, "a b", "é"]
    )
    def test_a_name_that_is_no_plain_name_is_refused(self, open_end: OpenEnd, name: str) -> None:
        """It might become a path, a key or a pattern."""
        for role in ("trainer", "producer") if name else ("trainer",):
            with pytest.raises(UsageError, match="cannot be the name of a run"):
                open_end(role, run_id=name)
        with pytest.raises(UsageError, match="cannot be the name of a producer"):
            open_end("producer").claim(name)

    def test_a_failed_group_goes_to_another_producer_and_is_given_up_in_the_end(
        self, open_end: OpenEnd
    ) -> None:
        trainer = open_end("trainer", attempts=3, ttl=30)
        one, two = open_end("producer"), open_end("producer")
        trainer.offer([task(0, 0), task(0, 1), task(0, 2)])
        first, second = one.claim("x", wait=SOON), two.claim("x", wait=SOON)
        assert (first, second) == (task(0, 0), task(0, 1))
        assert first is not None
        one.publish(first, DraftcoreError("out of memory"))
        assert one.claim("x", wait=SOON) == task(0, 2)
        again = two.claim("x", wait=SOON)
        assert again == task(0, 0)
        assert again is not None
        assert trainer.receive(step(0)) is None
        two.publish(again, RuntimeError("broken"))
        last = one.claim("x", wait=SOON)  # both have failed it: any may have the last attempt
        assert last == task(0, 0)
        assert last is not None
        assert trainer.given_up == {}
        one.publish(last, RuntimeError("broken for good"))
        eventually(lambda: trainer.given_up.keys() == {"a", "b"})
        with pytest.raises(DraftcoreError, match="RuntimeError: broken for good"):
            trainer.receive(step(0))

    def test_a_producer_that_leaves_returns_its_claims_at_once(self, open_end: OpenEnd) -> None:
        trainer = open_end("trainer", ttl=600)
        one, two = open_end("producer"), open_end("producer")
        trainer.offer([task(0, 0), task(0, 1)])
        assert one.claim("x", wait=SOON) == task(0, 0)
        assert two.claim("x", wait=SOON) == task(0, 1)
        one.close()
        assert two.claim("x", wait=SOON) == task(0, 0)

    # ------------------------------------------------------------ ends of a run

    @pytest.mark.parametrize("state", ["finished", "failed"])
    def test_a_waiting_producer_returns_within_a_second_of_the_trainers_end(
        self, open_end: OpenEnd, state: str
    ) -> None:
        trainer, producer = open_end("trainer"), open_end("producer")
        trainer.offer([])
        with Waiting(lambda: producer.claim("one", wait=SOON)) as waiting:
            time.sleep(NEVER)
            closed = time.monotonic()
            trainer.close(state)
        assert time.monotonic() - closed < 1 + 1  # the second is for a busy machine
        assert isinstance(waiting.result, ChannelEnded)
        assert f"run suite is {state}" in str(waiting.result)
        with pytest.raises(ChannelEnded):
            producer.claim("one")

    def test_who_waits_for_room_hears_that_a_new_trainer_wants_no_old_claim(
        self, open_end: OpenEnd
    ) -> None:
        open_end("trainer").offer([task(0, 0)])
        producer = open_end("producer")
        claim = producer.claim("one", SOON)
        assert claim is not None
        with Waiting(lambda: producer.wait_for_room(claim, 2 * SOON)) as waiting:
            time.sleep(NEVER)
            open_end("trainer")
        assert waiting.result is False

    def test_who_waits_for_room_hears_of_the_runs_end(self, open_end: OpenEnd) -> None:
        trainer, producer = open_end("trainer"), open_end("producer")
        trainer.offer([task(0, 0)])
        claim = producer.claim("one", SOON)
        assert claim is not None
        with Waiting(lambda: producer.wait_for_room(claim, 2 * SOON)) as waiting:
            time.sleep(NEVER)
            trainer.close("failed")
        assert isinstance(waiting.result, ChannelEnded)

    def test_a_side_that_hears_nothing_of_the_other_gives_up(self, open_end: OpenEnd) -> None:
        producer = open_end("producer", patience=0.5)
        with pytest.raises(DraftcoreError, match=r"(?s)trainer of run suite was silent.*start it"):
            producer.claim("one", wait=SOON)
        trainer = open_end("trainer", patience=0.5)
        trainer.offer([task(0, 0), task(0, 1)])
        with pytest.raises(DraftcoreError, match=r"(?s)run suite waits .*start a producer"):
            eventually(lambda: trainer.receive(step(0)) is not None)

    # ------------------------------------------------------------ restarts and faults

    def test_a_new_trainer_voids_old_claims_and_producers_go_on(self, open_end: OpenEnd) -> None:
        old, producer = open_end("trainer"), open_end("producer")
        old.offer([task(0, 0), task(0, 1)])
        void, other = (producer.claim(name, wait=SOON) for name in ("x", "y"))
        assert void == task(0, 0)
        assert other == task(0, 1)
        assert void is not None
        new = open_end("trainer")
        with pytest.raises(DraftcoreError, match="another trainer has taken over"):
            eventually(lambda: old.receive(step(0)) is not None)
        new.offer([task(0, 0), task(0, 1)])
        claims = [producer.claim("x", wait=SOON) for _ in range(2)]
        assert claims == [task(0, 0), task(0, 1)]
        producer.publish(void, refs_of(void, "old"))
        for claim in claims:
            assert claim is not None
            producer.publish(claim, refs_of(claim, "new"))
        for index in (0, 1):
            assert {ref.generation for ref in received(new, step(index))} == {"new"}
        released = sorted((ref.feature_id, ref.generation) for ref in new.advance(2))
        assert released == sorted([*((i, "new") for i in "abcd"), ("a", "old"), ("b", "old")])
        old.close()
        assert producer.claim("x", wait=NEVER) is None  # the old trainer has not ended the run

    def test_a_dead_producers_claims_return(
        self, open_end: OpenEnd, child: Callable[..., "Child"]
    ) -> None:
        trainer, survivor = open_end("trainer"), open_end("producer")
        trainer.offer([task(0, 0), task(0, 1)])
        victim = child("obey")
        assert victim.ask(f"claim {SOON}") == "0"
        assert survivor.claim("x", wait=SOON) == task(0, 1)
        victim.process.kill()
        assert survivor.claim("x", wait=SOON) == task(0, 0)

    def test_a_frozen_producer_is_replaced_and_may_wake_up(
        self, open_end: OpenEnd, child: Callable[..., "Child"]
    ) -> None:
        """What it publishes late is not served, and its refs come back to be freed."""
        trainer, survivor = open_end("trainer"), open_end("producer")
        trainer.offer([task(0, 0), task(0, 1)])
        sleeper = child("obey")
        assert sleeper.ask(f"claim {SOON}") == "0"
        other = survivor.claim("x", wait=SOON)
        assert other == task(0, 1)
        assert other is not None
        with sleeper.frozen():
            again = survivor.claim("x", wait=SOON)
            assert again == task(0, 0)
            assert again is not None
        assert sleeper.ask("publish late") == "published"
        survivor.publish(other, refs_of(other, "in time"))
        time.sleep(NEVER)
        assert trainer.receive(step(0)) is None
        survivor.publish(again, refs_of(again, "in time"))
        for index in (0, 1):
            assert {ref.generation for ref in received(trainer, step(index))} == {"in time"}
        released = [(ref.feature_id, ref.generation) for ref in trainer.advance(2)]
        expected = [*((i, "in time") for i in "abcd"), ("a", "late"), ("b", "late")]
        assert sorted(released) == sorted(expected)
        trainer.offer([task(0, 2)])
        assert sleeper.ask(f"claim {SOON}") == "2"

    def test_a_frozen_trainer_finds_its_producers_alive(
        self, open_end: OpenEnd, child: Callable[..., "Child"], tmp_path: Path
    ) -> None:
        """Their beats of the meantime count: what they had claimed is theirs still."""
        trainer = child("lead", str(tmp_path / "run"), "1000")
        producer = open_end("producer")
        claim = producer.claim("one", wait=SOON)
        assert claim is not None
        with trainer.frozen():
            time.sleep(2.5)
        time.sleep(NEVER)
        others = [producer.claim(f"other{number}", wait=SOON) for number in range(3)]
        assert claim not in others
        assert None not in others

    def test_every_sample_is_received_once_whatever_is_killed(
        self, child: Callable[..., "Child"], tmp_path: Path
    ) -> None:
        """Three producers, one of them killed and replaced, and a trainer killed and restarted."""
        folder = tmp_path / "run"
        producers = [child("produce") for _ in range(3)]
        trainer = child("lead", str(folder), "5")
        eventually(lambda: len(trained(folder)) >= 30, trainer, *producers)
        producers[0].process.kill()
        producers[0] = child("produce")
        trainer.process.kill()
        trainer.process.wait()
        cursor = int((folder / "cursor").read_text())
        before = [line for line in trained(folder) if line[0] < cursor]
        seen = len(trained(folder))
        assert 0 < cursor < long_plan().total_steps
        trainer = child("lead", str(folder), "5")
        assert trainer.process.wait(timeout=60) == 0, trainer.errors()
        expected = [planned_step(index) for index in range(long_plan().total_steps)]
        assert before + trained(folder)[seen:] == expected
        for producer in producers:
            assert producer.process.wait(timeout=SOON) == 0, producer.errors()
            assert producer.output().endswith("run suite is finished: nothing is left to capture\n")

    def test_malformed_records_are_skipped_and_reported(
        self, open_end: OpenEnd, channel_uri: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        trainer, producer = open_end("trainer"), open_end("producer")
        trainer.offer([task(0, 0), task(0, 1)])
        first, second = (producer.claim(name, wait=SOON) for name in "xy")
        assert first is not None
        assert second is not None
        stolen = {"kind": "published", "task": first.to_json()}
        bad_ref = {**ref("a").to_json(), "nbytes": "many"}
        bodies = [
            b"{ not json",
            b"\xff\xfe",
            b"[1, 2]",
            b"17",
            b"{}",
            json.dumps({"kind": "conquer", "task": first.to_json()}).encode(),
            json.dumps({"kind": "beat", "wants": {"../x": 1}}).encode(),
            json.dumps({"kind": "beat", "wants": [1]}).encode(),
            json.dumps({"kind": "published", "task": {"epoch": 0}, "refs": []}).encode(),
            json.dumps({**stolen, "refs": [bad_ref, ref("b").to_json()]}).encode(),
            json.dumps({**stolen, "refs": [ref("b").to_json(), ref("a").to_json()]}).encode(),
        ]
        self.garble(channel_uri, bodies)
        for claim in (first, second):
            producer.publish(claim, refs_of(claim))
        assert ids(received(trainer, step(0))) == "ac"
        skipped = [r.getMessage() for r in caplog.records if "skipped a record" in r.getMessage()]
        assert len(skipped) == len(bodies), skipped

    def test_a_long_run_does_not_grow_the_log(self, open_end: OpenEnd, channel_uri: str) -> None:
        tasks, claimants, padding = 2000, 40, "p" * 2000
        trainer, producer = open_end("trainer", ttl=30), open_end("producer")
        trainer.offer(
            CaptureTask(
                0, CaptureGroup(index, (2 * index, 2 * index + 1), (f"a{index}", f"b{index}"), 8)
            )
            for index in range(tasks)
        )
        written = 0
        for number in range(tasks):
            claim = producer.claim(f"c{number % claimants}", wait=SOON)
            assert claim is not None
            refs = [dataclasses.replace(ref, provenance=padding) for ref in refs_of(claim)]
            producer.publish(claim, refs)
            producer.claim(f"c{number % claimants}")  # asks for what the next round fetches
            written += len(json.dumps([ref.to_json() for ref in refs]))
        assert written > 8e6
        eventually(lambda: self.footprint(channel_uri) < written / 2)


# ---------------------------------------------------------------- what other processes do


class Child:
    """Another process that runs one of the functions below."""

    def __init__(self, function: str, *arguments: str) -> None:
        program = f"import sys; from {__name__} import {function}; {function}(*sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )

    def ask(self, command: str) -> str:
        """Give `obey` a command and return its answer."""
        stdin, stdout = cast(IO[str], self.process.stdin), cast(IO[str], self.process.stdout)
        stdin.write(f"{command}\n")
        stdin.flush()
        return stdout.readline().strip() or pytest.fail(self.errors())

    @contextmanager
    def frozen(self) -> Iterator[None]:
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def output(self) -> str:
        return cast(IO[str], self.process.stdout).read()

    def errors(self) -> str:
        self.process.kill()
        return cast(IO[str], self.process.stderr).read()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def obey(plugin: str, uri: str, options: str) -> None:
    """Be a producer that does what it is told on stdin."""
    channel = open_through(plugin, uri, json.loads(options), role="producer")
    for line in sys.stdin:
        verb, argument = line.split()
        if verb == "claim":
            claim = channel.claim("child", wait=float(argument))
            print(None if claim is None else claim.group.index, flush=True)
        else:
            assert claim is not None
            channel.publish(claim, refs_of(claim, argument))
            print("published", flush=True)


def produce(plugin: str, uri: str, options: str) -> None:
    """Be a producer to the end of the run."""
    channel = open_through(plugin, uri, json.loads(options), role="producer")
    try:
        while True:
            claim = channel.claim("child", wait=1)
            if claim is not None:
                time.sleep(random.random() * 0.02)
                channel.publish(claim, refs_of(claim, uuid.uuid4().hex))
    except ChannelEnded as end:
        print(end, flush=True)
    channel.close()


def long_plan() -> Plan:
    ids, lengths = [f"s{row}" for row in range(160)], [5 + row % 7 for row in range(160)]
    return Plan(ids, lengths, capture_batch=3, batch=4, seed=0, epochs=2, window=4)


def lead(plugin: str, uri: str, options: str, folder: str, checkpoint_every: str) -> None:
    """Be a trainer, from the cursor of its last checkpoint on."""
    plan, at, freed = long_plan(), Path(folder), set[SampleRef]()
    at.mkdir(exist_ok=True)
    cursor = int((at / "cursor").read_text()) if (at / "cursor").exists() else 0
    channel = open_through(plugin, uri, json.loads(options), role="trainer")
    channel.offer(plan.captures(cursor))
    with (at / "trained").open("a") as log:
        for index in range(cursor, plan.total_steps):
            refs = received(channel, plan.step(index))
            assert freed.isdisjoint(refs)
            log.write(json.dumps([index, [ref.feature_id for ref in refs]]) + "\n")
            log.flush()
            freed |= set(channel.advance(index + 1))
            if (index + 1) % int(checkpoint_every) == 0:
                (at / "new").write_text(str(index + 1))
                (at / "new").replace(at / "cursor")
    channel.close("finished")


def planned_step(index: int) -> list[Any]:
    return [index, [sample.feature_id for sample in long_plan().step(index).samples]]


def trained(folder: Path) -> list[list[Any]]:
    """Return the steps that all trainers of a run have done, as (index, feature ids)."""
    file = folder / "trained"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

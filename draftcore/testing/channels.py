"""What every channel must do. See `draftcore.testing` for how to use it.

A subclass sets `plugin`, and the fixture `channel_uri` where a channel needs more than a folder;
one whose limits are not the URI options `limit_refs` and `limit_bytes` overrides `with_limits`.
A channel of capability `shared`, which several processes reach, has two ends. It takes the further
options of `draftcore.channels.logged.Settings`, and says how to `garble` its log and how much space
that takes (`footprint`).

Most tests use both ends as one (`Ends`), with a plan of 4 groups of 2 samples, in steps of 2 samples
that each need two groups:

    group    0: a b    1: c d    2: e f    3: g h
    step     0: a c    1: d b    2: e g    3: h f       (epoch 0; steps 4 to 7 are epoch 1)
"""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import pytest

from draftcore.channels import Channel, ChannelEnded, Credit
from draftcore.errors import DraftcoreError, UsageError
from draftcore.plan import Plan
from draftcore.records import (
    CaptureGroup,
    CaptureTask,
    PlannedStep,
    SampleId,
    SampleRef,
    TensorSpec,
)
from draftcore.testing import Suite, hooks_of, offer_of, options_of

OpenChannel = Callable[..., "Ends"]
OpenEnd = Callable[..., Channel]
NEVER = 0.3  # seconds after which what has not come will not come
SOON = 20.0  # seconds within which it comes on a busy machine
Found = TypeVar("Found")
GROUPS = ("ab", "cd", "ef", "gh")
STEPS = ("ac", "db", "eg", "hf")
NBYTES = 1000


class ChannelSuite(Suite):
    """The behaviour of a channel, opened through its plugin."""

    # ------------------------------------------------------------ what a subclass says

    @pytest.fixture
    def channel_uri(self, tmp_path: Path) -> str:
        """The URI of a fresh channel; by default in a fresh folder."""
        return f"{offer_of(self.plugin, 'channel', self.name).name}:{tmp_path / 'channel'}"

    def with_limits(self, uri: str, refs: int, nbytes: int) -> str:
        """Return the URI of a channel with this much credit."""
        return f"{uri}{'&' if '?' in uri else '?'}limit_refs={refs}&limit_bytes={nbytes}"

    def with_faults(self, uri: str, ttl: float, patience: float, attempts: int) -> str:
        """Return the URI of a shared channel with these times, in seconds, and attempts."""
        faults = f"ttl={ttl}&patience={patience}&attempts={attempts}"
        return f"{uri}{'&' if '?' in uri else '?'}{faults}"

    def garble(self, uri: str, bodies: Sequence[bytes]) -> None:
        """Put records with these bodies into the mailbox of a shared channel's trainer."""
        raise NotImplementedError("override garble: a shared channel must stand malformed records")

    def footprint(self, uri: str) -> int:
        """Return the bytes that a shared channel takes; by default, of the files at its path."""
        path = Path(uri.partition("?")[0].partition(":")[2])
        files = [*path.parent.glob(f"{path.name}*"), *path.rglob("*")]
        return sum(file.stat().st_size for file in files if file.is_file())

    # ------------------------------------------------------------ fixtures

    @property
    def is_shared(self) -> bool:
        return "shared" in offer_of(self.plugin, "channel", self.name).capabilities

    @pytest.fixture
    def shared(self) -> None:
        if not self.is_shared:
            pytest.skip("no other process reaches the channel (capability shared)")

    @pytest.fixture
    def open_channel(self, channel_uri: str) -> Iterator[OpenChannel]:
        """Open both ends; `refs` and `nbytes` limit its credit. They are closed at the end."""
        opened: list[Ends] = []

        def opener(*, refs: int = 10**6, nbytes: int = 10**12) -> Ends:
            uri, data = self.with_limits(channel_uri, refs, nbytes), self.options
            if self.is_shared:
                uri = self.with_faults(uri, 30, 600, 1)
                trainer = open_through(self.plugin, uri, data, role="trainer")
                opened.append(Ends(trainer, trainer))
                opened[-1].producer = open_through(self.plugin, uri, data, role="producer")
            else:
                channel = open_through(self.plugin, uri, data)
                opened.append(Ends(channel, channel))
            return opened[-1]

        yield opener
        for ends in opened:
            ends.close()

    @pytest.fixture
    def channel(self, open_channel: OpenChannel) -> "Ends":
        return open_channel()

    @pytest.fixture
    def open_end(self, channel_uri: str, shared: None) -> Iterator[OpenEnd]:
        """Open one end of a shared channel, any number of times; all are closed at the end."""
        opened: list[Channel] = []

        def opener(
            role: str,
            *,
            run_id: str = "suite",
            ttl: float = 1,
            patience: float = 60,
            attempts: int = 3,
            refs: int = 10**6,
        ) -> Channel:
            uri = self.with_limits(channel_uri, refs, 10**12)
            uri = self.with_faults(uri, ttl, patience, attempts)
            opened.append(open_through(self.plugin, uri, self.options, run_id, role))
            return opened[-1]

        yield opener
        for end in reversed(opened):
            with suppress(DraftcoreError):  # of an end that a test has made fail
                end.close()

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

    # ------------------------------------------------------------ order

    def test_tasks_are_handed_out_once_in_the_order_offered(self, channel: "Ends") -> None:
        tasks = [task(0, group) for group in (2, 0, 3, 1)]
        channel.offer(tasks)
        assert [channel.claim("one"), channel.claim("two"), channel.claim("one")] == tasks[:3]
        assert channel.claim("two") == tasks[3]
        assert channel.claim("one") is None

    def test_offered_tasks_are_consumed_lazily(self, channel: "Ends") -> None:
        asked = 0

        def many() -> Iterator[CaptureTask]:  # not endless: a wrong channel must fail, not hang
            nonlocal asked
            while asked < 1000:
                asked += 1
                yield task(asked, asked % 4)

        channel.offer(many())
        assert channel.claim("one") == task(1, 1)
        assert asked < 100

    def test_a_step_waits_for_all_its_samples_and_gets_them_in_plan_order(
        self, channel: "Ends"
    ) -> None:
        channel.offer([task(0, 0), task(0, 1)])
        first, second = claimed(channel), claimed(channel)
        assert channel.receive(step(1)) is None
        channel.publish(second, refs_of(second))  # out of order
        assert channel.receive(step(1)) is None
        channel.publish(first, refs_of(first))
        assert ids(channel.receive(step(1))) == "db"
        assert ids(channel.receive(step(0))) == "ac"

    def test_receiving_a_step_twice_gives_the_same_refs(self, channel: "Ends") -> None:
        publish_all(channel)
        assert channel.receive(step(2)) == channel.receive(step(2))

    # ------------------------------------------------------------ what is published

    def test_refs_come_back_as_they_were_published(self, channel: "Ends") -> None:
        channel.offer([task(0, 0), task(0, 1)])
        published: dict[str, SampleRef] = {}
        for _ in range(2):
            claim = claimed(channel)
            channel.publish(claim, refs_of(claim))
            published |= {ref.feature_id: ref for ref in refs_of(claim)}
        assert channel.receive(step(0)) == (published["a"], published["c"])

    @pytest.mark.parametrize("members", ["", "a", "abc", "ba", "ac"])
    def test_other_samples_than_the_groups_are_refused(self, channel: "Ends", members: str) -> None:
        channel.offer([task(0, 0)])
        claim = claimed(channel)
        with pytest.raises(DraftcoreError, match="group 0 was published with other samples"):
            channel.publish(claim, [ref(member) for member in members])
        channel.publish(claim, refs_of(claim))

    def test_a_tensor_in_a_ref_is_refused_and_its_field_named(self, channel: "Ends") -> None:
        import torch  # 1.6 s, which the processes that tests start do not pay

        channel.offer([task(0, 0)])
        claim = claimed(channel)
        spec = TensorSpec("x", cast(Any, (torch.tensor(3), 4)), "float32")
        smuggled = SampleRef("b", "1", "test:", (spec,), 1, NBYTES)
        with pytest.raises(TypeError, match=r"tensors\[0\]\.shape\[0\] is a Tensor"):
            channel.publish(claim, [ref("a"), smuggled])
        channel.publish(claim, refs_of(claim))

    def test_a_failed_task_raises_in_the_step_that_needs_it_only(self, channel: "Ends") -> None:
        channel.offer([task(0, group) for group in range(4)])
        for _ in range(4):
            claim = claimed(channel)
            broken = claim.group.index == 3
            channel.publish(claim, DraftcoreError("row g is broken") if broken else refs_of(claim))
        assert ids(channel.receive(step(0))) == "ac"
        assert ids(channel.receive(step(1))) == "db"
        with pytest.raises(DraftcoreError, match="row g is broken"):
            channel.receive(step(2))

    def test_a_failed_task_is_tried_again_when_it_is_offered_again(self, channel: "Ends") -> None:
        channel.offer([task(0, 0), task(0, 1)])
        channel.publish(claimed(channel), DraftcoreError("out of memory"))
        channel.offer([task(0, 0), task(0, 1)])
        for _ in range(2):
            claim = claimed(channel)
            channel.publish(claim, refs_of(claim))
        assert ids(channel.receive(step(0))) == "ac"

    # ------------------------------------------------------------ credit

    def test_credit_in_refs_limits_what_is_claimed(self, open_channel: OpenChannel) -> None:
        channel = open_channel(refs=4)
        channel.offer([task(0, group) for group in range(4)])
        assert channel.credit().refs == 4
        first, second = claimed(channel), claimed(channel)
        assert channel.claim("one") is None  # also before anything is published
        channel.publish(first, refs_of(first))
        channel.publish(second, refs_of(second))
        assert channel.claim("one") is None
        assert channel.credit().refs == 0

    def test_credit_in_bytes_limits_what_is_claimed(self, open_channel: OpenChannel) -> None:
        channel = open_channel(nbytes=2 * NBYTES)
        channel.offer([task(0, group) for group in range(4)])
        claim = claimed(channel)
        channel.publish(claim, refs_of(claim))
        assert channel.claim("one") is None
        assert channel.credit().nbytes == 0

    def test_an_advance_returns_credit(self, open_channel: OpenChannel) -> None:
        channel = open_channel(refs=4)
        channel.offer([task(0, group) for group in range(4)])
        for _ in range(2):
            claim = claimed(channel)
            channel.publish(claim, refs_of(claim))
        assert channel.claim("one") is None
        assert channel.receive(step(0)) is not None
        assert channel.receive(step(1)) is not None
        channel.advance(2)
        assert channel.claim("one") == task(0, 2)
        assert channel.credit().refs == 2  # of 4, after this claim: all had come back

    def test_a_failed_task_returns_its_credit(self, open_channel: OpenChannel) -> None:
        channel = open_channel(refs=2)
        channel.offer([task(0, 0), task(0, 1)])
        claim = claimed(channel)
        assert channel.claim("one") is None
        channel.publish(claim, DraftcoreError("broken"))
        assert channel.claim("one") == task(0, 1)

    @pytest.mark.parametrize("limit", [{"refs": 1}, {"refs": 3}, {"nbytes": 1}])
    def test_a_waiting_step_is_served_whatever_the_credit(
        self, open_channel: OpenChannel, limit: dict[str, int]
    ) -> None:
        """Nobody advances before the step is trained: a refusal would wait forever."""
        channel = open_channel(**limit)
        channel.offer([task(0, group) for group in range(4)])
        for index in range(4):
            assert ids(pumped(channel, step(index))) == STEPS[index]

    def test_need_beyond_credit_ends_with_the_samples_needed(
        self, open_channel: OpenChannel
    ) -> None:
        channel = open_channel(refs=1)
        channel.offer([task(0, group) for group in range(4)])
        assert channel.receive(step(0)) is None
        assert [claimed(channel).group.index, claimed(channel).group.index] == [0, 1]
        assert channel.claim("one") is None

    # ------------------------------------------------------------ release

    def test_an_advance_returns_what_only_earlier_steps_used_and_returns_it_once(
        self, channel: "Ends"
    ) -> None:
        publish_all(channel)
        released = set()
        for index in range(4):
            assert channel.receive(step(index)) is not None
            assert channel.advance(index) == () or index == 2
        for index in range(5):
            released |= set(ids(channel.advance(index)))
        assert released <= set("abcdefgh")
        assert set("efgh") <= released
        assert channel.advance(4) == ()

    def test_a_group_is_released_whole_and_not_before_its_last_use(self, channel: "Ends") -> None:
        """Half a group could not be captured again without superseding the other half."""
        publish_all(channel)
        assert channel.receive(step(0)) is not None
        assert channel.advance(1) == ()  # a and c are used, their neighbours b and d are not
        assert channel.receive(step(1)) is not None
        assert channel.advance(1) == ()
        assert sorted(ids(channel.advance(2))) == list("abcd")

    def test_a_step_that_is_received_but_not_passed_keeps_its_refs(self, channel: "Ends") -> None:
        publish_all(channel)
        for index in range(4):
            assert channel.receive(step(index)) is not None
        assert sorted(ids(channel.advance(2))) == list("abcd")
        assert channel.advance(3) == ()
        assert sorted(ids(channel.advance(4))) == list("efgh")

    def test_a_step_behind_the_cursor_is_refused(self, channel: "Ends") -> None:
        publish_all(channel)
        assert channel.receive(step(0)) is not None
        channel.advance(1)
        with pytest.raises(DraftcoreError, match="behind step 1"):
            channel.receive(step(0))

    # ------------------------------------------------------------ epochs

    def test_a_later_epoch_uses_what_was_not_released(self, channel: "Ends") -> None:
        publish_all(channel)
        for index in range(8):
            assert ids(channel.receive(step(index))) == STEPS[index % 4]

    def test_a_group_that_is_held_is_not_captured_again(self, channel: "Ends") -> None:
        """Its task of the next epoch is answered with what is there, and keeps it there."""
        channel.offer([task(epoch, group) for epoch in (0, 1) for group in range(4)])
        for _ in range(4):
            claim = claimed(channel)
            channel.publish(claim, refs_of(claim))
        assert channel.claim("one") is None
        for index in range(4):
            assert channel.receive(step(index)) is not None
        assert channel.advance(4) == ()
        for index in range(4, 8):
            assert ids(channel.receive(step(index))) == STEPS[index % 4]
        assert sorted(ids(channel.advance(8))) == list("abcdefgh")

    def test_a_later_epochs_uses_count_before_anybody_claims_for_it(self, channel: "Ends") -> None:
        channel.offer([task(epoch, group) for epoch in (0, 1) for group in range(4)])
        for _ in range(4):
            claim = claimed(channel)
            channel.publish(claim, refs_of(claim))
        for index in range(5):
            assert channel.receive(step(index)) is not None
        assert channel.advance(5) == ()
        for index in range(5, 8):
            assert channel.receive(step(index)) is not None
        assert sorted(ids(channel.advance(8))) == list("abcdefgh")

    def test_refs_in_hand_outlive_the_epoch_they_were_published_for(self, channel: "Ends") -> None:
        publish_all(channel)
        for index in range(5):
            assert channel.receive(step(index)) is not None
        assert sorted(ids(channel.advance(4))) == list("efgh")
        assert sorted(ids(channel.advance(5))) == list("abcd")

    def test_a_failure_belongs_to_its_epoch(self, channel: "Ends") -> None:
        channel.offer([task(0, 0), task(0, 1)])
        channel.publish(claimed(channel), DraftcoreError("out of memory"))
        claim = claimed(channel)
        channel.publish(claim, refs_of(claim))
        assert channel.receive(step(4)) is None
        with pytest.raises(DraftcoreError, match="waits for sample 'a' of epoch 1"):
            channel.claim("one")
        channel.offer([task(1, 0), task(1, 1)])
        assert ids(pumped(channel, step(4))) == "ac"

    def test_a_group_that_was_released_is_captured_again(self, channel: "Ends") -> None:
        channel.offer([task(epoch, group) for epoch in (0, 1) for group in range(4)])
        for index in range(8):
            refs = pumped(channel, step(index), generation=f"epoch {index // 4}")
            assert {ref.generation for ref in refs} == {f"epoch {index // 4}"}
            released = ids(channel.advance(index + 1))
            assert sorted(released) == [[], list("abcd"), [], list("efgh")][index % 4]

    def test_pumping_step_by_step_holds_no_more_than_is_needed(self, channel: "Ends") -> None:
        """As a colocated run does it: receive, train, advance. In the end nothing is held."""
        channel.offer([task(epoch, group) for epoch in range(3) for group in range(4)])
        for index in range(12):
            pumped(channel, step(index))
            assert channel.credit().refs >= 10**6 - 4
            channel.advance(index + 1)
        assert channel.credit().refs == 10**6

    def test_after_a_resume_half_used_groups_are_released_with_their_epoch(
        self, channel: "Ends"
    ) -> None:
        """A run resumed at step 1 never uses a and c in epoch 0."""
        channel.offer(
            [task(0, 1), task(0, 0), task(0, 2), task(0, 3)] + [task(1, group) for group in (0, 1)]
        )
        released = ""
        for index in (1, 2, 3, 4):
            pumped(channel, step(index))
            released += ids(channel.advance(index + 1))
        assert set("efgh") <= set(released)
        pumped(channel, step(5))
        assert set(released + ids(channel.advance(6))) == set("abcdefgh")

    # ------------------------------------------------------------ claims that are not current

    def test_a_second_publication_is_ignored_and_its_refs_come_back(self, channel: "Ends") -> None:
        channel.offer([task(0, 0), task(0, 1)])
        first, second = claimed(channel), claimed(channel)
        channel.publish(first, refs_of(first, "1"))
        channel.publish(first, refs_of(first, "2"))
        channel.publish(first, refs_of(first, "1"))
        channel.publish(first, DraftcoreError("too late to fail"))
        channel.publish(second, refs_of(second))
        assert [ref.generation for ref in channel.received(step(0))] == ["1", "1"]
        assert ids(channel.received(step(1))) == "db"
        released = sorted((ref.feature_id, ref.generation) for ref in channel.advance(2))
        assert released == sorted([*((i, "1") for i in "abcd"), ("a", "2"), ("b", "2")])

    def test_a_claim_may_wait_for_a_task(self, channel: "Ends") -> None:
        with Waiting(lambda: channel.producer.claim("one", wait=SOON)) as waiting:
            time.sleep(NEVER)
            channel.offer([task(0, 0)])
        assert waiting.result == task(0, 0)

    def test_a_waiting_claim_is_answered_when_credit_returns(
        self, open_channel: OpenChannel
    ) -> None:
        channel = open_channel(refs=4)
        channel.offer([task(0, group) for group in range(4)])
        for _ in range(2):
            claim = claimed(channel)
            channel.publish(claim, refs_of(claim))
        with Waiting(lambda: channel.producer.claim("one", wait=SOON)) as waiting:
            for index in (0, 1):
                channel.received(step(index))
            time.sleep(NEVER)
            assert not waiting.done
            channel.advance(2)
            channel.receive(step(2))
        assert waiting.result == task(0, 2)

    def test_what_was_given_up_is_told_with_its_reason_until_it_succeeds(
        self, channel: "Ends"
    ) -> None:
        channel.offer([task(0, 0), task(0, 1), task(1, 0)])
        assert channel.given_up == {}
        channel.publish(claimed(channel), DraftcoreError("out of memory"))
        assert channel.given_up.keys() == {"a", "b"}
        assert "out of memory" in channel.given_up["a"]
        assert claimed(channel) == task(0, 1)
        claim = claimed(channel)
        assert claim == task(1, 0)
        channel.publish(claim, refs_of(claim))
        assert channel.given_up == {}

    def test_a_group_is_not_handed_out_while_its_old_refs_are_being_freed(
        self, channel: "Ends"
    ) -> None:
        """Its producer would find them in the store, and publish what is about to go."""
        channel.offer([task(0, 0), task(0, 1), task(0, 2), task(1, 0)])
        for _ in range(2):
            claim = claimed(channel)
            channel.publish(claim, refs_of(claim))
        for index in (0, 1):
            channel.received(step(index))
        assert sorted(ids(channel.advance(2))) == list("abcd")
        assert claimed(channel) == task(0, 2)
        assert channel.claim("one") is None
        assert channel.receive(step(2)) is None
        assert claimed(channel) == task(1, 0)

    # ------------------------------------------------------------ what cannot be used

    def test_rejected_refs_are_captured_again_and_their_whole_group_is_to_be_freed(
        self, open_end: OpenEnd
    ) -> None:
        channel = Ends(open_end("trainer", attempts=2), open_end("producer"))
        channel.offer([task(0, 0), task(0, 1)])
        for _ in range(2):
            claim = claimed(channel)
            channel.publish(claim, refs_of(claim))
        refs = channel.received(step(0))
        bad = [ref for ref in refs if ref.feature_id == "a"]
        assert ids(channel.reject(dict.fromkeys(bad, "its seal is broken"))) == "ab"
        assert channel.reject(dict.fromkeys(bad, "once more")) == ()  # it is on its way already
        assert channel.receive(step(0)) is None
        again = claimed(channel)
        assert again.group.index == 0
        channel.publish(again, refs_of(again, "2"))
        assert [ref.generation for ref in channel.received(step(0))] == ["2", "1"]

    def test_what_is_rejected_to_the_last_attempt_is_given_up_and_no_other_sample(
        self, channel: "Ends"
    ) -> None:
        """The others come from the same forward pass of the whole group, and are served."""
        channel.offer([task(0, 0), task(0, 1)])
        for _ in range(2):
            claim = claimed(channel)
            channel.publish(claim, refs_of(claim))
        bad = channel.received(step(0))[:1]
        assert channel.reject({bad[0]: "its seal is broken"}) == bad
        with pytest.raises(DraftcoreError, match="its seal is broken"):
            channel.receive(step(0))
        assert channel.given_up == {"a": "its seal is broken"}
        assert ids(channel.received(step(1))) == "db"
        without_a = dataclasses.replace(step(0), samples=step(0).samples[1:], rows=step(0).rows[1:])
        assert ids(channel.received(without_a)) == "c"
        assert sorted(ids(channel.advance(2))) == list("bcd")

    def test_a_producer_learns_what_the_trainer_announced(self, channel: "Ends") -> None:
        if channel.both:
            pytest.skip("one process has nothing to tell itself")
        with pytest.raises(DraftcoreError, match="no trainer"):
            channel.about(0.0)
        channel.announce({"store": "shm:here"})
        assert channel.about(10.0) == {"store": "shm:here"}

    # ------------------------------------------------------------ a full store

    def test_what_a_waiting_step_does_not_need_is_evicted_where_it_finds_no_room(
        self, channel: "Ends"
    ) -> None:
        channel.offer(in_order())
        needed, other, ahead, late = (claimed(channel) for _ in range(4))
        for claim in (needed, ahead):
            channel.publish(claim, refs_of(claim))
        assert channel.receive(step(0)) is None
        assert channel.evict(step(0)) == ()  # nobody has said that there is no room
        assert channel.wait_for_room(late)
        assert channel.evict(step(0)) == ()  # what the step needs is on its way
        assert channel.wait_for_room(other)
        assert eventually(lambda: channel.evict(step(0))) == refs_of(ahead)
        assert channel.receive(step(0)) is None
        channel.publish(other, refs_of(other))
        assert ids(channel.received(step(0))) == "ac"

    def test_only_what_a_waiting_step_lacks_is_handed_out_while_room_is_made(
        self, channel: "Ends"
    ) -> None:
        channel.offer([task(0, group) for group in (2, 3, 0, 1)])
        ahead, late = claimed(channel), claimed(channel)
        channel.publish(ahead, refs_of(ahead))
        assert channel.receive(step(0)) is None
        assert channel.wait_for_room(late)
        assert eventually(lambda: channel.evict(step(0))) == refs_of(ahead)
        assert not channel.wait_for_room(late)  # drop it, and claim anew
        assert channel.receive(step(0)) is None
        claims = [claimed(channel), claimed(channel)]
        assert claims == [task(0, 0), task(0, 1)]
        assert channel.claim("another") is None
        for claim in claims:
            channel.publish(claim, refs_of(claim))
        assert ids(channel.received(step(0))) == "ac"
        assert channel.claim("another") == task(0, 3)  # what was claimed before comes first
        assert claimed(channel) == task(0, 2)

    def test_who_waits_for_room_is_woken_when_something_was_freed(self, channel: "Ends") -> None:
        channel.offer(in_order())
        for _ in range(2):
            claim = claimed(channel)
            channel.publish(claim, refs_of(claim))
        late = claimed(channel)
        for index in (0, 1):
            channel.received(step(index))
        with Waiting(lambda: channel.producer.wait_for_room(late, 2 * SOON)) as waiting:
            time.sleep(NEVER)
            assert not waiting.done
            assert sorted(ids(channel.advance(2))) == list("abcd")
            assert channel.receive(step(2)) is None
        assert waiting.result is True

    def test_who_waits_for_room_without_need_is_called_off(self, channel: "Ends") -> None:
        channel.offer([task(0, group) for group in (2, 0, 1)])
        late = claimed(channel)
        with Waiting(lambda: channel.producer.wait_for_room(late, 2 * SOON)) as waiting:
            time.sleep(NEVER)
            assert channel.receive(step(0)) is None
            assert channel.evict(step(0)) == ()  # nothing is held
        assert waiting.result is False

    def test_a_step_that_finds_no_room_at_all_is_refused_but_not_by_old_words(
        self, channel: "Ends"
    ) -> None:
        """Even what it needs is put anew, once, in case that free room lies scattered."""
        channel.offer(in_order())
        needed, other = claimed(channel), claimed(channel)
        channel.publish(needed, refs_of(needed))
        assert channel.receive(step(0)) is None
        assert channel.wait_for_room(other)
        assert eventually(lambda: channel.evict(step(0))) == refs_of(needed)
        assert channel.receive(step(0)) is None
        again = claimed(channel)
        assert again == task(0, 0)
        channel.publish(again, refs_of(again, "2"))
        assert channel.evict(step(0)) == ()
        assert channel.wait_for_room(other)  # tried before the room was made
        assert channel.evict(step(0)) == ()
        assert channel.wait_for_room(other)
        with pytest.raises(DraftcoreError, match=r"(?s)full with what step 0 needs.*raise max_b"):
            eventually(lambda: channel.evict(step(0)))

    # ------------------------------------------------------------ ends

    def test_a_sample_that_nobody_will_capture_is_named(self, channel: "Ends") -> None:
        channel.offer([task(0, 0)])
        assert channel.receive(step(0)) is None
        claim = claimed(channel)
        with pytest.raises(DraftcoreError, match="waits for sample 'c' of epoch 0"):
            channel.claim("one")
        channel.publish(claim, refs_of(claim))
        assert channel.receive(step(0)) is None
        with pytest.raises(DraftcoreError, match="waits for sample 'c' of epoch 0"):
            channel.claim("one")

    def test_a_step_in_flight_is_no_reason_to_complain(self, channel: "Ends") -> None:
        channel.offer([task(0, 0), task(0, 1)])
        claimed(channel), claimed(channel)
        assert channel.receive(step(0)) is None
        assert channel.claim("another") is None

    def test_a_failure_that_the_step_is_to_hear_of_is_no_reason_to_complain(
        self, channel: "Ends"
    ) -> None:
        channel.offer([task(0, 0), task(0, 1)])
        first, second = claimed(channel), claimed(channel)
        channel.publish(second, refs_of(second))
        assert channel.receive(step(0)) is None
        channel.publish(first, DraftcoreError("broken"))
        assert channel.claim("another") is None
        with pytest.raises(DraftcoreError, match="broken"):
            channel.receive(step(0))

    def test_publishing_without_a_claim_is_refused(self, channel: "Ends") -> None:
        channel.offer([task(0, 0)])
        with pytest.raises(DraftcoreError, match="group 0 was published without a claim"):
            channel.publish(task(0, 0), refs_of(task(0, 0)))

    def test_a_closed_channel_says_so(self, channel: "Ends") -> None:
        channel.offer([task(0, 0)])
        claim = claimed(channel)
        channel.close()
        channel.close()
        for use in (
            lambda: channel.offer([]),
            lambda: channel.claim("one"),
            lambda: channel.publish(claim, refs_of(claim)),
            lambda: channel.receive(step(0)),
            lambda: channel.advance(1),
            lambda: channel.wait_for_room(claim),
            lambda: channel.evict(step(0)),
        ):
            with pytest.raises(DraftcoreError, match="channel of run suite is closed"):
                use()

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


# ---------------------------------------------------------------- both ends as one


class Ends:
    """A channel with both its ends, or one that is both, used as one channel.

    Between processes a message takes its time, which these methods wait for: a claim for its
    answer, a publication until its trainer has taken note of it.
    """

    def __init__(self, trainer: Channel, producer: Channel) -> None:
        self.trainer, self.producer = trainer, producer

    @property
    def both(self) -> bool:
        return self.trainer is self.producer

    def offer(self, tasks: Iterable[CaptureTask]) -> None:
        self.trainer.offer(tasks)

    def claim(self, producer: str, wait: float = NEVER) -> CaptureTask | None:
        return self.producer.claim(producer) if self.both else self.producer.claim(producer, wait)

    def publish(self, task: CaptureTask, refs: Sequence[SampleRef] | Exception) -> None:
        before = None if self.both else self.trainer.credit()
        self.producer.publish(task, refs)
        until = time.monotonic() + NEVER
        while before == self.credit() and time.monotonic() < until:
            time.sleep(0.002)

    def receive(self, step: PlannedStep) -> tuple[SampleRef, ...] | None:
        return self.trainer.receive(step)

    def received(self, step: PlannedStep) -> tuple[SampleRef, ...]:
        return received(self.trainer, step)

    def advance(self, step_index: int) -> tuple[SampleRef, ...]:
        return self.trainer.advance(step_index)

    def credit(self) -> Credit:
        return self.trainer.credit()

    @property
    def given_up(self) -> Mapping[str, str]:
        return self.trainer.given_up

    def reject(self, wrong: Mapping[SampleRef, str]) -> tuple[SampleRef, ...]:
        return self.trainer.reject(wrong)

    def wait_for_room(self, task: CaptureTask, wait: float = NEVER) -> bool:
        return self.producer.wait_for_room(task, 0.0 if self.both else wait)

    def evict(
        self, step: PlannedStep, tasks: Iterable[CaptureTask] | None = None
    ) -> tuple[SampleRef, ...]:
        return self.trainer.evict(step, in_order() if tasks is None else tasks)

    def announce(self, about: Mapping[str, str]) -> None:
        self.trainer.announce(about)

    def about(self, wait: float) -> Mapping[str, str]:
        return self.producer.about(wait)

    def close(self, state: str = "finished") -> None:
        self.producer.close(state)
        self.trainer.close(state)


# ---------------------------------------------------------------- pieces of the tests


def open_through(
    plugin: str, uri: str, data: Mapping[str, Any], run_id: str = "suite", role: str = "both"
) -> Channel:
    """Open a channel through its plugin's hook, as a run does."""
    name = uri.partition(":")[0]
    options = options_of(offer_of(plugin, "channel", name), data)
    hook = hooks_of(plugin).channel
    channel = hook(name=name, uri=uri, run_id=run_id, options=options, role=role)
    assert channel is not None, f"{plugin} answers None to channel(name={name!r})"
    return channel


def received(trainer: Channel, step: PlannedStep) -> tuple[SampleRef, ...]:
    """Wait for the refs of a step."""
    return eventually(lambda: trainer.receive(step))


def eventually(condition: Callable[[], Found | None], *children: "Child") -> Found:
    """Wait for a condition and return what it returned."""
    until = time.monotonic() + SOON
    while not (found := condition()):
        if time.monotonic() > until:
            pytest.fail("\n".join(["waited in vain", *(child.errors() for child in children)]))
        time.sleep(0.005)
    return found


class Waiting:
    """Call something in a thread during the `with` block; `result` is what it returned or raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self.result = call, cast(Any, None)
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:
            self.result = error

    def __enter__(self) -> "Waiting":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.join(SOON)


def task(epoch: int, group: int) -> CaptureTask:
    members = tuple(GROUPS[group])
    rows = (2 * group, 2 * group + 1)
    return CaptureTask(epoch, CaptureGroup(group, rows, members, padded_length=8))


def in_order() -> list[CaptureTask]:
    """The tasks of the plan from step 0 on."""
    return [task(0, group) for group in range(4)]


def step(index: int) -> PlannedStep:
    epoch, members = index // 4, STEPS[index % 4]
    samples = tuple(SampleId(member, epoch) for member in members)
    return PlannedStep(index, epoch, samples, tuple("abcdefgh".index(m) for m in members))


def ref(feature_id: str, generation: str = "1") -> SampleRef:
    specs = (TensorSpec("x", (5, 100), "bfloat16"),)
    return SampleRef(feature_id, generation, "test:", specs, tokens=5, nbytes=NBYTES)


def refs_of(task: CaptureTask, generation: str = "1") -> tuple[SampleRef, ...]:
    return tuple(ref(member, generation) for member in task.group.feature_ids)


def ids(refs: tuple[SampleRef, ...] | None) -> str:
    assert refs is not None, "the step's samples are not there"
    return "".join(ref.feature_id for ref in refs)


def claimed(channel: Channel) -> CaptureTask:
    task = channel.claim("one")
    assert task is not None, "the channel hands out no task"
    return task


def pumped(channel: Channel, step: PlannedStep, generation: str = "1") -> tuple[SampleRef, ...]:
    """Receive a step as a colocated run does."""
    for _ in range(20):  # more than any test offers: a wrong channel must fail, not hang
        if (refs := channel.receive(step)) is not None:
            return refs
        claim = claimed(channel)
        channel.publish(claim, refs_of(claim, generation))
    pytest.fail(f"step {step.index} is not served, whatever is published")


def publish_all(channel: Channel) -> None:
    channel.offer([task(0, group) for group in range(4)])
    for _ in range(4):
        claim = claimed(channel)
        channel.publish(claim, refs_of(claim))


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
            env=self.environment(),
        )

    @staticmethod
    def environment() -> dict[str, str]:
        """Let a child import what this process can, such as a plugin next to the tests."""
        return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

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

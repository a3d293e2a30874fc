"""What every channel must do. See `draftcore.testing` for how to use it.

A subclass sets `plugin`, and the fixture `channel_uri` where a channel needs more than a folder;
one whose limits are not the URI options `limit_refs` and `limit_bytes` overrides `with_limits`.

The tests use a plan of 4 groups of 2 samples, in steps of 2 samples that each need two groups:

    group    0: a b    1: c d    2: e f    3: g h
    step     0: a c    1: d b    2: e g    3: h f       (epoch 0; steps 4 to 7 are epoch 1)
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from draftcore.channels import Channel
from draftcore.errors import DraftcoreError
from draftcore.records import (
    CaptureGroup,
    CaptureTask,
    PlannedStep,
    SampleId,
    SampleRef,
    TensorSpec,
)
from draftcore.testing import Suite, hooks_of, offer_of, options_of

OpenChannel = Callable[..., Channel]
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

    # ------------------------------------------------------------ fixtures

    @pytest.fixture
    def open_channel(self, channel_uri: str) -> Iterator[OpenChannel]:
        """Open the channel; `refs` and `nbytes` limit its credit. It is closed at the end."""
        opened: list[Channel] = []

        def opener(*, refs: int = 10**6, nbytes: int = 10**12) -> Channel:
            uri = self.with_limits(channel_uri, refs, nbytes)
            opened.append(open_through(self.plugin, uri, self.options))
            return opened[-1]

        yield opener
        for channel in opened:
            channel.close()

    @pytest.fixture
    def channel(self, open_channel: OpenChannel) -> Channel:
        return open_channel()

    # ------------------------------------------------------------ order

    def test_tasks_are_handed_out_once_in_the_order_offered(self, channel: Channel) -> None:
        tasks = [task(0, group) for group in (2, 0, 3, 1)]
        channel.offer(tasks)
        assert [channel.claim("one"), channel.claim("two"), channel.claim("one")] == tasks[:3]
        assert channel.claim("two") == tasks[3]
        assert channel.claim("one") is None

    def test_offered_tasks_are_consumed_lazily(self, channel: Channel) -> None:
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
        self, channel: Channel
    ) -> None:
        channel.offer([task(0, 0), task(0, 1)])
        first, second = claimed(channel), claimed(channel)
        assert channel.receive(step(1)) is None
        channel.publish(second, refs_of(second))  # out of order
        assert channel.receive(step(1)) is None
        channel.publish(first, refs_of(first))
        assert ids(channel.receive(step(1))) == "db"
        assert ids(channel.receive(step(0))) == "ac"

    def test_receiving_a_step_twice_gives_the_same_refs(self, channel: Channel) -> None:
        publish_all(channel)
        assert channel.receive(step(2)) == channel.receive(step(2))

    # ------------------------------------------------------------ what is published

    def test_refs_come_back_as_they_were_published(self, channel: Channel) -> None:
        channel.offer([task(0, 0), task(0, 1)])
        published: dict[str, SampleRef] = {}
        for _ in range(2):
            claim = claimed(channel)
            channel.publish(claim, refs_of(claim))
            published |= {ref.feature_id: ref for ref in refs_of(claim)}
        assert channel.receive(step(0)) == (published["a"], published["c"])

    @pytest.mark.parametrize("members", ["", "a", "abc", "ba", "ac"])
    def test_other_samples_than_the_groups_are_refused(
        self, channel: Channel, members: str
    ) -> None:
        channel.offer([task(0, 0)])
        claim = claimed(channel)
        with pytest.raises(DraftcoreError, match="group 0 was published with other samples"):
            channel.publish(claim, [ref(member) for member in members])
        channel.publish(claim, refs_of(claim))

    def test_a_tensor_in_a_ref_is_refused_and_its_field_named(self, channel: Channel) -> None:
        channel.offer([task(0, 0)])
        claim = claimed(channel)
        spec = TensorSpec("x", cast(Any, (torch.tensor(3), 4)), "float32")
        smuggled = SampleRef("b", "1", "test:", (spec,), 1, NBYTES)
        with pytest.raises(TypeError, match=r"tensors\[0\]\.shape\[0\] is a Tensor"):
            channel.publish(claim, [ref("a"), smuggled])
        channel.publish(claim, refs_of(claim))

    def test_a_failed_task_raises_in_the_step_that_needs_it_only(self, channel: Channel) -> None:
        channel.offer([task(0, group) for group in range(4)])
        for _ in range(4):
            claim = claimed(channel)
            broken = claim.group.index == 3
            channel.publish(claim, DraftcoreError("row g is broken") if broken else refs_of(claim))
        assert ids(channel.receive(step(0))) == "ac"
        assert ids(channel.receive(step(1))) == "db"
        with pytest.raises(DraftcoreError, match="row g is broken"):
            channel.receive(step(2))

    def test_a_failed_task_is_tried_again_when_it_is_offered_again(self, channel: Channel) -> None:
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
        assert channel.credit().refs == 4
        assert channel.claim("one") == task(0, 2)

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
        self, channel: Channel
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

    def test_a_group_is_released_whole_and_not_before_its_last_use(self, channel: Channel) -> None:
        """Half a group could not be captured again without superseding the other half."""
        publish_all(channel)
        assert channel.receive(step(0)) is not None
        assert channel.advance(1) == ()  # a and c are used, their neighbours b and d are not
        assert channel.receive(step(1)) is not None
        assert channel.advance(1) == ()
        assert sorted(ids(channel.advance(2))) == list("abcd")

    def test_a_step_that_is_received_but_not_passed_keeps_its_refs(self, channel: Channel) -> None:
        publish_all(channel)
        for index in range(4):
            assert channel.receive(step(index)) is not None
        assert sorted(ids(channel.advance(2))) == list("abcd")
        assert channel.advance(3) == ()
        assert sorted(ids(channel.advance(4))) == list("efgh")

    def test_a_step_behind_the_cursor_is_refused(self, channel: Channel) -> None:
        publish_all(channel)
        assert channel.receive(step(0)) is not None
        channel.advance(1)
        with pytest.raises(DraftcoreError, match="behind step 1"):
            channel.receive(step(0))

    # ------------------------------------------------------------ epochs

    def test_a_later_epoch_uses_what_was_not_released(self, channel: Channel) -> None:
        publish_all(channel)
        for index in range(8):
            assert ids(channel.receive(step(index))) == STEPS[index % 4]

    def test_a_group_that_is_held_is_not_captured_again(self, channel: Channel) -> None:
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

    def test_a_later_epochs_uses_count_before_anybody_claims_for_it(self, channel: Channel) -> None:
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

    def test_refs_in_hand_outlive_the_epoch_they_were_published_for(self, channel: Channel) -> None:
        publish_all(channel)
        for index in range(5):
            assert channel.receive(step(index)) is not None
        assert sorted(ids(channel.advance(4))) == list("efgh")
        assert sorted(ids(channel.advance(5))) == list("abcd")

    def test_a_failure_belongs_to_its_epoch(self, channel: Channel) -> None:
        channel.offer([task(0, 0), task(0, 1)])
        channel.publish(claimed(channel), DraftcoreError("out of memory"))
        claim = claimed(channel)
        channel.publish(claim, refs_of(claim))
        assert channel.receive(step(4)) is None
        with pytest.raises(DraftcoreError, match="waits for sample 'a' of epoch 1"):
            channel.claim("one")
        channel.offer([task(1, 0), task(1, 1)])
        assert ids(pumped(channel, step(4))) == "ac"

    def test_a_group_that_was_released_is_captured_again(self, channel: Channel) -> None:
        channel.offer([task(epoch, group) for epoch in (0, 1) for group in range(4)])
        for index in range(8):
            refs = pumped(channel, step(index), generation=f"epoch {index // 4}")
            assert {ref.generation for ref in refs} == {f"epoch {index // 4}"}
            released = ids(channel.advance(index + 1))
            assert sorted(released) == [[], list("abcd"), [], list("efgh")][index % 4]

    def test_pumping_step_by_step_holds_no_more_than_is_needed(self, channel: Channel) -> None:
        """As a colocated run does it: receive, train, advance. In the end nothing is held."""
        channel.offer([task(epoch, group) for epoch in range(3) for group in range(4)])
        for index in range(12):
            pumped(channel, step(index))
            assert channel.credit().refs >= 10**6 - 4
            channel.advance(index + 1)
        assert channel.credit().refs == 10**6

    def test_after_a_resume_half_used_groups_are_released_with_their_epoch(
        self, channel: Channel
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

    # ------------------------------------------------------------ ends

    def test_a_sample_that_nobody_will_capture_is_named(self, channel: Channel) -> None:
        channel.offer([task(0, 0)])
        assert channel.receive(step(0)) is None
        claim = claimed(channel)
        with pytest.raises(DraftcoreError, match="waits for sample 'c' of epoch 0"):
            channel.claim("one")
        channel.publish(claim, refs_of(claim))
        assert channel.receive(step(0)) is None
        with pytest.raises(DraftcoreError, match="waits for sample 'c' of epoch 0"):
            channel.claim("one")

    def test_a_step_in_flight_is_no_reason_to_complain(self, channel: Channel) -> None:
        channel.offer([task(0, 0), task(0, 1)])
        claimed(channel), claimed(channel)
        assert channel.receive(step(0)) is None
        assert channel.claim("another") is None

    def test_publishing_without_a_claim_is_refused(self, channel: Channel) -> None:
        channel.offer([task(0, 0)])
        with pytest.raises(DraftcoreError, match="group 0 was published without a claim"):
            channel.publish(task(0, 0), refs_of(task(0, 0)))

    def test_a_closed_channel_says_so(self, channel: Channel) -> None:
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
        ):
            with pytest.raises(DraftcoreError, match="channel of run suite is closed"):
                use()


# ---------------------------------------------------------------- pieces of the tests


def open_through(plugin: str, uri: str, data: Mapping[str, Any], run_id: str = "suite") -> Channel:
    """Open a channel through its plugin's hook, as a run does."""
    name = uri.partition(":")[0]
    options = options_of(offer_of(plugin, "channel", name), data)
    channel = hooks_of(plugin).channel(name=name, uri=uri, run_id=run_id, options=options)
    assert channel is not None, f"{plugin} answers None to channel(name={name!r})"
    return channel


def task(epoch: int, group: int) -> CaptureTask:
    members = tuple(GROUPS[group])
    rows = (2 * group, 2 * group + 1)
    return CaptureTask(epoch, CaptureGroup(group, rows, members, padded_length=8))


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

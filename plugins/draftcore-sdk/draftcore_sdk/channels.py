"""What every channel must do. See `draftcore_sdk` for how to use it.

A subclass sets `plugin`, and the fixture `channel_uri` where a channel needs more than a folder;
one whose limits are not the URI options `limit_refs` and `limit_bytes` overrides `with_limits`.
A channel of capability `shared`, which several processes reach, has two ends. It takes the further
options of `draftcore.channels.logged.Settings`, and says how to `garble` its log and how much space
that takes (`footprint`). What is overridden stands in `channel_ends.Opening`, with the plan of the
tests; here is what a run asks of the queue, in `channel_faults` what two ends owe each other.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from draftcore.contracts.channel import CaptureTask, Standing
from draftcore.contracts.store import SampleRef, TensorSpec
from draftcore.errors import DraftcoreError
from draftcore_sdk.channel_ends import (
    NBYTES,
    NEVER,
    SOON,
    STEPS,
    Ends,
    OpenChannel,
    OpenEnd,
    Waiting,
    claimed,
    eventually,
    ids,
    in_order,
    publish_all,
    pumped,
    ref,
    refs_of,
    step,
    task,
)
from draftcore_sdk.channel_faults import Faults


class ChannelSuite(Faults):
    """The behaviour of a channel, opened through its plugin."""

    # ------------------------------------------------------------ order

    def test_tasks_are_handed_out_once_in_the_order_offered(self, channel: Ends) -> None:
        tasks = [task(0, group) for group in (2, 0, 3, 1)]
        channel.offer(tasks)
        assert [channel.claim("one"), channel.claim("two"), channel.claim("one")] == tasks[:3]
        assert channel.claim("two") == tasks[3]
        assert channel.claim("one") is None

    def test_offered_tasks_are_consumed_lazily(self, channel: Ends) -> None:
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
        self, channel: Ends
    ) -> None:
        channel.offer([task(0, 0), task(0, 1)])
        first, second = claimed(channel), claimed(channel)
        assert channel.receive(step(1)) is None
        channel.publish(second, refs_of(second))  # out of order
        assert channel.receive(step(1)) is None
        channel.publish(first, refs_of(first))
        assert ids(channel.receive(step(1))) == "db"
        assert ids(channel.receive(step(0))) == "ac"

    def test_receiving_a_step_twice_gives_the_same_refs(self, channel: Ends) -> None:
        publish_all(channel)
        assert channel.receive(step(2)) == channel.receive(step(2))

    # ------------------------------------------------------------ what is published

    def test_refs_come_back_as_they_were_published(self, channel: Ends) -> None:
        channel.offer([task(0, 0), task(0, 1)])
        published: dict[str, SampleRef] = {}
        for _ in range(2):
            claim = claimed(channel)
            channel.publish(claim, refs_of(claim))
            published |= {ref.feature_id: ref for ref in refs_of(claim)}
        assert channel.receive(step(0)) == (published["a"], published["c"])

    @pytest.mark.parametrize("members", ["", "a", "abc", "ba", "ac"])
    def test_other_samples_than_the_groups_are_refused(self, channel: Ends, members: str) -> None:
        channel.offer([task(0, 0)])
        claim = claimed(channel)
        with pytest.raises(DraftcoreError, match="group 0 was published with other samples"):
            channel.publish(claim, [ref(member) for member in members])
        channel.publish(claim, refs_of(claim))

    def test_a_tensor_in_a_ref_is_refused_and_its_field_named(self, channel: Ends) -> None:
        import torch  # 1.6 s, which the processes that tests start do not pay

        channel.offer([task(0, 0)])
        claim = claimed(channel)
        spec = TensorSpec("x", cast(Any, (torch.tensor(3), 4)), "float32")
        smuggled = SampleRef("b", "1", "test:", (spec,), 1, NBYTES)
        with pytest.raises(TypeError, match=r"tensors\[0\]\.shape\[0\] is a Tensor"):
            channel.publish(claim, [ref("a"), smuggled])
        channel.publish(claim, refs_of(claim))

    def test_a_failed_task_raises_in_the_step_that_needs_it_only(self, channel: Ends) -> None:
        channel.offer([task(0, group) for group in range(4)])
        for _ in range(4):
            claim = claimed(channel)
            broken = claim.group.index == 3
            channel.publish(claim, DraftcoreError("row g is broken") if broken else refs_of(claim))
        assert ids(channel.receive(step(0))) == "ac"
        assert ids(channel.receive(step(1))) == "db"
        with pytest.raises(DraftcoreError, match="row g is broken"):
            channel.receive(step(2))

    def test_a_failed_task_is_tried_again_when_it_is_offered_again(self, channel: Ends) -> None:
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

    def test_the_trainer_sees_how_capture_stands(self, open_channel: OpenChannel) -> None:
        channel = open_channel()
        channel.offer([task(0, group) for group in range(4)])
        assert channel.standing().captured == channel.standing().refs == 0
        claim = claimed(channel)
        assert channel.standing() == Standing(producers=1, captured=0, refs=2, nbytes=0)
        channel.publish(claim, refs_of(claim))
        assert channel.standing() == Standing(producers=1, captured=2, refs=2, nbytes=2 * NBYTES)
        claim = claimed(channel)
        channel.publish(claim, refs_of(claim))
        assert channel.receive(step(0)) is not None
        assert channel.receive(step(1)) is not None
        channel.advance(2)
        assert channel.standing() == Standing(producers=1, captured=4, refs=0, nbytes=0)

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
        self, channel: Ends
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

    def test_a_group_is_released_whole_and_not_before_its_last_use(self, channel: Ends) -> None:
        """Half a group could not be captured again without superseding the other half."""
        publish_all(channel)
        assert channel.receive(step(0)) is not None
        assert channel.advance(1) == ()  # a and c are used, their neighbours b and d are not
        assert channel.receive(step(1)) is not None
        assert channel.advance(1) == ()
        assert sorted(ids(channel.advance(2))) == list("abcd")

    def test_a_step_that_is_received_but_not_passed_keeps_its_refs(self, channel: Ends) -> None:
        publish_all(channel)
        for index in range(4):
            assert channel.receive(step(index)) is not None
        assert sorted(ids(channel.advance(2))) == list("abcd")
        assert channel.advance(3) == ()
        assert sorted(ids(channel.advance(4))) == list("efgh")

    def test_a_step_behind_the_cursor_is_refused(self, channel: Ends) -> None:
        publish_all(channel)
        assert channel.receive(step(0)) is not None
        channel.advance(1)
        with pytest.raises(DraftcoreError, match="behind step 1"):
            channel.receive(step(0))

    # ------------------------------------------------------------ epochs

    def test_a_later_epoch_uses_what_was_not_released(self, channel: Ends) -> None:
        publish_all(channel)
        for index in range(8):
            assert ids(channel.receive(step(index))) == STEPS[index % 4]

    def test_a_group_that_is_held_is_not_captured_again(self, channel: Ends) -> None:
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

    def test_a_later_epochs_uses_count_before_anybody_claims_for_it(self, channel: Ends) -> None:
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

    def test_refs_in_hand_outlive_the_epoch_they_were_published_for(self, channel: Ends) -> None:
        publish_all(channel)
        for index in range(5):
            assert channel.receive(step(index)) is not None
        assert sorted(ids(channel.advance(4))) == list("efgh")
        assert sorted(ids(channel.advance(5))) == list("abcd")

    def test_a_failure_belongs_to_its_epoch(self, channel: Ends) -> None:
        channel.offer([task(0, 0), task(0, 1)])
        channel.publish(claimed(channel), DraftcoreError("out of memory"))
        claim = claimed(channel)
        channel.publish(claim, refs_of(claim))
        assert channel.receive(step(4)) is None
        with pytest.raises(DraftcoreError, match="waits for sample 'a' of epoch 1"):
            channel.claim("one")
        channel.offer([task(1, 0), task(1, 1)])
        assert ids(pumped(channel, step(4))) == "ac"

    def test_a_group_that_was_released_is_captured_again(self, channel: Ends) -> None:
        channel.offer([task(epoch, group) for epoch in (0, 1) for group in range(4)])
        for index in range(8):
            refs = pumped(channel, step(index), generation=f"epoch {index // 4}")
            assert {ref.generation for ref in refs} == {f"epoch {index // 4}"}
            released = ids(channel.advance(index + 1))
            assert sorted(released) == [[], list("abcd"), [], list("efgh")][index % 4]

    def test_pumping_step_by_step_holds_no_more_than_is_needed(self, channel: Ends) -> None:
        """As a colocated run does it: receive, train, advance. In the end nothing is held."""
        channel.offer([task(epoch, group) for epoch in range(3) for group in range(4)])
        for index in range(12):
            pumped(channel, step(index))
            assert channel.credit().refs >= 10**6 - 4
            channel.advance(index + 1)
        assert channel.credit().refs == 10**6

    def test_after_a_resume_half_used_groups_are_released_with_their_epoch(
        self, channel: Ends
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

    def test_a_second_publication_is_ignored_and_its_refs_come_back(self, channel: Ends) -> None:
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

    def test_a_claim_may_wait_for_a_task(self, channel: Ends) -> None:
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
        self, channel: Ends
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
        self, channel: Ends
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
        self, channel: Ends
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

    def test_a_producer_learns_what_the_trainer_announced(self, channel: Ends) -> None:
        if channel.both:
            pytest.skip("one process has nothing to tell itself")
        with pytest.raises(DraftcoreError, match="no trainer"):
            channel.about(0.0)
        channel.announce({"store": "shm:here"})
        assert channel.about(10.0) == {"store": "shm:here"}

    # ------------------------------------------------------------ a full store

    def test_what_a_waiting_step_does_not_need_is_evicted_where_it_finds_no_room(
        self, channel: Ends
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
        self, channel: Ends
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

    def test_who_waits_for_room_is_woken_when_something_was_freed(self, channel: Ends) -> None:
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

    def test_who_waits_for_room_without_need_is_called_off(self, channel: Ends) -> None:
        channel.offer([task(0, group) for group in (2, 0, 1)])
        late = claimed(channel)
        with Waiting(lambda: channel.producer.wait_for_room(late, 2 * SOON)) as waiting:
            time.sleep(NEVER)
            assert channel.receive(step(0)) is None
            assert channel.evict(step(0)) == ()  # nothing is held
        assert waiting.result is False

    def test_a_step_that_finds_no_room_at_all_is_refused_but_not_by_old_words(
        self, channel: Ends
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

    def test_a_sample_that_nobody_will_capture_is_named(self, channel: Ends) -> None:
        channel.offer([task(0, 0)])
        assert channel.receive(step(0)) is None
        claim = claimed(channel)
        with pytest.raises(DraftcoreError, match="waits for sample 'c' of epoch 0"):
            channel.claim("one")
        channel.publish(claim, refs_of(claim))
        assert channel.receive(step(0)) is None
        with pytest.raises(DraftcoreError, match="waits for sample 'c' of epoch 0"):
            channel.claim("one")

    def test_a_step_in_flight_is_no_reason_to_complain(self, channel: Ends) -> None:
        channel.offer([task(0, 0), task(0, 1)])
        claimed(channel), claimed(channel)
        assert channel.receive(step(0)) is None
        assert channel.claim("another") is None

    def test_a_failure_that_the_step_is_to_hear_of_is_no_reason_to_complain(
        self, channel: Ends
    ) -> None:
        channel.offer([task(0, 0), task(0, 1)])
        first, second = claimed(channel), claimed(channel)
        channel.publish(second, refs_of(second))
        assert channel.receive(step(0)) is None
        channel.publish(first, DraftcoreError("broken"))
        assert channel.claim("another") is None
        with pytest.raises(DraftcoreError, match="broken"):
            channel.receive(step(0))

    def test_publishing_without_a_claim_is_refused(self, channel: Ends) -> None:
        channel.offer([task(0, 0)])
        with pytest.raises(DraftcoreError, match="group 0 was published without a claim"):
            channel.publish(task(0, 0), refs_of(task(0, 0)))

    def test_a_closed_channel_says_so(self, channel: Ends) -> None:
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

"""The plan: exactly once, the same everywhere, seekable, little padding, short look-ahead."""

import itertools
import random
from collections import Counter
from typing import Any

import pytest

from draftcore.data.plan import Plan
from draftcore.errors import UsageError


def make_plan(samples: int = 50, **settings: Any) -> Plan:
    lengths = [random.Random(f"length {row}").randint(4, 400) for row in range(samples)]
    ids = [f"data:{row}" for row in range(samples)]
    return Plan(ids, lengths, **{"capture_batch": 4, "batch": 3, "seed": 7, **settings})


def rows_of_epoch(plan: Plan, epoch: int) -> list[int]:
    first = epoch * plan.steps_per_epoch
    steps = [plan.step(index) for index in range(first, first + plan.steps_per_epoch)]
    assert {step.epoch for step in steps} == {epoch}
    return [row for step in steps for row in step.rows]


@pytest.mark.parametrize("case", range(40))
def test_each_epoch_uses_each_sample_exactly_once(case: int) -> None:
    draw = random.Random(case)
    samples = draw.randint(1, 70)
    plan = make_plan(
        samples,
        capture_batch=draw.randint(1, 9),
        batch=draw.randint(1, 9),
        window=draw.randint(1, 5),
        seed=case,
        epochs=3,
    )
    for epoch in range(3):
        assert sorted(rows_of_epoch(plan, epoch)) == list(range(samples))
    in_groups = Counter(row for group in plan.groups for row in group.rows)
    assert in_groups == Counter(range(samples))


def test_samples_name_the_feature_and_the_epoch_of_their_row() -> None:
    plan = make_plan(epochs=2)
    step = plan.step(plan.steps_per_epoch + 1)
    assert [sample.feature_id for sample in step.samples] == [f"data:{row}" for row in step.rows]
    assert {sample.epoch for sample in step.samples} == {1}


def test_only_one_step_of_an_epoch_is_short() -> None:
    plan = make_plan(50, batch=8, window=3)
    sizes = Counter(len(plan.step(index).rows) for index in range(plan.total_steps))
    assert sizes == {8: 6, 2: 1}


def test_sample_uses_are_counted_at_every_step() -> None:
    plan, used = make_plan(20, batch=3, window=2, epochs=2), 0
    for index in range(plan.total_steps):
        assert plan.samples_before(index) == used
        used += len(plan.step(index).rows)
    assert plan.samples_before(plan.total_steps) == used == 40


def test_groups_depend_on_lengths_and_capture_batch_alone() -> None:
    groups = make_plan(seed=1, batch=2, epochs=1).groups
    assert make_plan(seed=9, batch=5, epochs=4, window=2).groups == groups
    assert make_plan(capture_batch=5).groups != groups


def test_a_group_is_padded_to_its_longest_member() -> None:
    plan = Plan(list("abcde"), [9, 3, 7, 3, 5], capture_batch=2, batch=2, seed=0)
    assert [(group.rows, group.padded_length) for group in plan.groups] == [
        ((1, 3), 3),
        ((4, 2), 7),
        ((0,), 9),
    ]
    assert plan.groups[1].feature_ids == ("e", "c")


def test_any_step_can_be_asked_for_directly() -> None:
    plan = make_plan(epochs=4)
    in_order = [plan.step(index) for index in range(plan.total_steps)]
    for index in random.Random(3).sample(range(plan.total_steps), 30):
        assert make_plan(epochs=4).step(index) == in_order[index]
        assert plan.step(index) == in_order[index]


def test_the_order_of_an_epoch_depends_on_seed_and_epoch_only() -> None:
    plan = make_plan(epochs=2)
    assert rows_of_epoch(plan, 0) != rows_of_epoch(plan, 1)
    assert rows_of_epoch(make_plan(seed=8), 0) != rows_of_epoch(plan, 0)
    assert rows_of_epoch(make_plan(epochs=9), 0) == rows_of_epoch(plan, 0)


def test_the_order_never_changes_between_versions() -> None:
    """A golden order: a checkpoint's cursor means this order on every machine, forever."""
    plan = Plan([str(row) for row in range(8)], [5] * 8, capture_batch=2, batch=3, seed=1, window=2)
    assert [plan.step(index).rows for index in range(3)] == GOLDEN_ORDER


GOLDEN_ORDER = [(5, 6, 0), (7, 4, 1), (2, 3)]


def test_a_step_holds_samples_of_like_length() -> None:
    plan = make_plan(800, batch=4, window=64)
    lengths = [random.Random(f"length {row}").randint(4, 400) for row in range(800)]
    steps = [plan.step(index).rows for index in range(plan.total_steps)]
    padded = sum(len(rows) * max(lengths[row] for row in rows) for rows in steps)
    assert padded < 1.1 * sum(lengths)  # in random order it is about 1.6


def test_steps_do_not_come_sorted_by_length() -> None:
    plan = make_plan(800, batch=4, window=64)
    first = [plan.step(index).rows[0] for index in range(64)]
    lengths = [random.Random(f"length {row}").randint(4, 400) for row in first]
    rising = sum(a < b for a, b in itertools.pairwise(lengths))
    assert 20 < rising < 44  # 63 when sorted; about half in random order


def test_captures_come_in_order_of_first_need_from_any_step() -> None:
    plan = make_plan(epochs=2)
    for start in (0, 5, plan.steps_per_epoch, plan.total_steps - 1):
        needed: list[tuple[int, int]] = []
        for index in range(start, plan.total_steps):
            step = plan.step(index)
            for row in step.rows:
                group = next(group.index for group in plan.groups if row in group.rows)
                if (step.epoch, group) not in needed:
                    needed.append((step.epoch, group))
        tasks = plan.captures(start)
        assert [(task.epoch, task.group.index) for task in tasks] == needed


def test_capture_looks_ahead_about_one_window() -> None:
    plan = make_plan(600, batch=4, capture_batch=5, window=10)
    window_groups = 10 * 4 // 5
    tasks = list(plan.captures(0))
    position = {task.group.index: at for at, task in enumerate(tasks)}
    for index in range(plan.total_steps):
        windows_begun = index // 10 + 1
        latest = max(
            position[group.index]
            for group in plan.groups
            if not set(group.rows).isdisjoint(plan.step(index).rows)
        )
        assert latest < windows_begun * (window_groups + 1)


def test_max_steps_cuts_the_run_short_and_changes_no_step() -> None:
    cut, whole = make_plan(epochs=3, max_steps=20), make_plan(epochs=3)
    assert cut.total_steps == 20
    assert [cut.step(index) for index in range(20)] == [whole.step(index) for index in range(20)]
    assert len(list(cut.captures(0))) < len(list(whole.captures(0)))
    assert make_plan(max_steps=10**6).total_steps == make_plan().total_steps


def test_the_key_tells_plans_of_another_order_apart() -> None:
    others = [
        make_plan(51),
        make_plan(seed=8),
        make_plan(batch=4),
        make_plan(capture_batch=5),
        make_plan(window=4),
        Plan([f"other:{row}" for row in range(50)], [5] * 50, capture_batch=4, batch=3, seed=7),
    ]
    keys = {plan.key for plan in [make_plan(), *others]}
    assert len(keys) == 1 + len(others)


def test_the_key_allows_a_run_to_be_made_longer() -> None:
    assert make_plan(epochs=5).key == make_plan(max_steps=3).key == make_plan().key


def test_a_step_outside_the_run_is_an_index_error() -> None:
    plan = make_plan(max_steps=4)
    for index in (-1, 4):
        with pytest.raises(IndexError, match="a plan of 4 steps"):
            plan.step(index)


def test_an_empty_dataset_is_explained() -> None:
    with pytest.raises(UsageError, match="no samples left"):
        Plan([], [], capture_batch=4, batch=3, seed=0)

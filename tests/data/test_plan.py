"""The plan: exactly once, the same everywhere, seekable, batches of like length in a step."""

import itertools
import random
from collections import Counter
from typing import Any

import pytest

from draftcore.data.plan import Plan, PlannedBatch
from draftcore.errors import UsageError


def length_of(row: int) -> int:
    return random.Random(f"length {row}").randint(4, 400)


def make_plan(rows: int = 50, **settings: Any) -> Plan:
    ids = [f"data:{row}" for row in range(rows)]
    given = {"batch": 4, "accumulate": 3, "seed": 7, **settings}
    return Plan(ids, [length_of(row) for row in range(rows)], **given)


def steps_of(plan: Plan) -> list[tuple[PlannedBatch, ...]]:
    return [plan.step(index) for index in range(plan.total_steps)]


def batches_of_epoch(plan: Plan, epoch: int) -> list[PlannedBatch]:
    return [one for one in plan.uses(0) if one.epoch == epoch]


# ---------------------------------------------------------------- exactly once


@pytest.mark.parametrize("case", range(40))
def test_each_epoch_uses_each_row_exactly_once(case: int) -> None:
    draw = random.Random(case)
    rows = draw.randint(1, 70)
    batch, accumulate = draw.randint(1, 9), draw.randint(1, 5)
    plan = make_plan(rows, batch=batch, accumulate=accumulate, seed=case, epochs=3)
    for epoch in range(3):
        used = [row for one in batches_of_epoch(plan, epoch) for row in one.rows]
        assert sorted(used) == list(range(rows))
    assert Counter(row for rows_ in plan.batches for row in rows_) == Counter(range(rows))


def test_a_step_has_accumulate_batches_and_the_last_of_an_epoch_may_have_fewer() -> None:
    plan = make_plan(50, batch=4, accumulate=3, epochs=2)
    assert [len(step) for step in steps_of(plan)] == [3, 3, 3, 3, 1] * 2


def test_all_batches_but_one_have_batch_rows() -> None:
    sizes = Counter(map(len, make_plan(50, batch=8).batches))
    assert sizes == {8: 6, 2: 1}


def test_positions_count_the_uses_of_batches_over_the_run() -> None:
    plan = make_plan(epochs=3)
    uses = list(plan.uses(0))
    assert [one.position for one in uses] == list(range(3 * len(plan.batches)))
    for step in steps_of(plan):
        assert [one.place for one in step] == list(range(len(step)))
    for one in uses:
        assert one.rows == plan.batches[one.index]


def test_uses_of_rows_are_counted_at_every_step() -> None:
    plan, used = make_plan(21, batch=2, accumulate=3, epochs=2), 0
    for index, step in enumerate(steps_of(plan)):
        assert plan.rows_before(index) == used
        used += sum(len(one.rows) for one in step)
    assert plan.rows_before(plan.total_steps) == used == 42


# ---------------------------------------------------------------- the cut


def test_the_cut_depends_on_rows_lengths_and_batch_alone() -> None:
    plan = make_plan()
    for changed in ({"seed": 9}, {"accumulate": 5}, {"epochs": 4}, {"max_steps": 2}):
        other = make_plan(**changed)
        assert (other.batches, other.cut) == (plan.batches, plan.cut)
    lengths = [*plan.lengths.tolist()[:-1], 401]
    longer = Plan(plan.feature_ids, lengths, batch=4, accumulate=3, seed=7)
    for other in (make_plan(51), make_plan(batch=5), longer):
        assert other.cut != plan.cut
        assert other.batches != plan.batches


def test_other_rows_of_the_same_lengths_are_cut_otherwise() -> None:
    """Where they are more than are sorted together."""
    rows = range(1200)
    one, other = (
        Plan([f"{name}:{row}" for row in rows], [length_of(row) for row in rows], **SMALLEST)
        for name in ("one", "other")
    )
    assert one.cut != other.cut
    assert one.batches != other.batches


SMALLEST: dict[str, int] = {"batch": 1, "accumulate": 1, "seed": 0}


def test_a_batch_holds_rows_of_like_length() -> None:
    plan = make_plan(800)
    padded = sum(len(rows) * max(map(length_of, rows)) for rows in plan.batches)
    assert padded < 1.05 * sum(map(length_of, range(800)))  # in random order it is about 1.6


def test_what_a_batch_takes_is_known_from_the_lengths() -> None:
    plan = Plan(list("abcde"), [9, 3, 7, 3, 5], batch=2, accumulate=1, seed=0)
    assert plan.padded((0, 3)) == 9
    assert sorted(map(plan.padded, plan.batches)) == [3, 7, 9]
    assert (plan.largest(1), plan.largest(2), plan.largest(9)) == (12, 21, 27)


# ---------------------------------------------------------------- the order


def test_any_step_can_be_asked_for_directly() -> None:
    plan = make_plan(epochs=4)
    in_order = steps_of(plan)
    for index in random.Random(3).sample(range(plan.total_steps), 15):
        assert make_plan(epochs=4).step(index) == in_order[index]
        assert plan.step(index) == in_order[index]
        assert next(plan.uses(index)) == in_order[index][0]


def test_the_order_of_an_epoch_depends_on_seed_and_epoch() -> None:
    def order(plan: Plan, epoch: int) -> list[int]:
        return [one.index for one in batches_of_epoch(plan, epoch)]

    plan = make_plan(epochs=2)
    assert order(plan, 0) != order(plan, 1)
    assert order(make_plan(seed=8), 0) != order(plan, 0)
    assert order(make_plan(epochs=9), 0) == order(plan, 0)


def test_the_batches_of_a_step_are_of_like_length() -> None:
    """Ranks that share a step finish together."""
    plan = make_plan(800, accumulate=4)
    waste = whole = 0
    for step in steps_of(plan):
        tokens = [len(one.rows) * plan.padded(one.rows) for one in step]
        waste += len(tokens) * max(tokens) - sum(tokens)
        whole += sum(tokens)
    assert waste < 0.05 * whole  # in random order it is about 0.6


def test_steps_do_not_come_sorted_by_length() -> None:
    plan = make_plan(800)
    first = [plan.padded(step[0].rows) for step in steps_of(plan)]
    rising = sum(a < b for a, b in itertools.pairwise(first))
    assert 0.3 * len(first) < rising < 0.7 * len(first)


def test_the_order_never_changes_between_versions() -> None:
    """Written out: a checkpoint's cursor means this order on every machine, forever."""
    lengths = [5, 9, 3, 7, 7, 2, 8, 4, 6, 5, 3]
    ids = [str(row) for row in range(11)]
    plan = Plan(ids, lengths, batch=2, accumulate=2, seed=1, epochs=2)
    assert plan.batches == CUT
    assert [[one.index for one in step] for step in steps_of(plan)] == ORDER


CUT = ((5, 2), (10, 7), (0, 9), (8, 3), (4, 6), (1,))
ORDER = [[5, 2], [3, 4], [0, 1], [0, 1], [5, 2], [3, 4]]


# ---------------------------------------------------------------- ranks


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_ranks_together_train_on_the_plan(ranks: int) -> None:
    """Rank r has the places of each step that leave r when divided by the number of ranks."""
    plan, start = make_plan(epochs=2), 3
    own = [list(plan.uses(start, rank, ranks)) for rank in range(ranks)]
    for rank, uses in enumerate(own):
        assert {one.place % ranks for one in uses} == {rank}
        assert [one.position for one in uses] == sorted(one.position for one in uses)
    together = sorted((one for uses in own for one in uses), key=lambda one: one.position)
    assert together == list(plan.uses(start))


# ---------------------------------------------------------------- length and key


def test_max_steps_cuts_the_run_short_and_changes_no_step() -> None:
    cut, whole = make_plan(epochs=5, max_steps=20), make_plan(epochs=5)
    assert cut.total_steps == 20
    assert steps_of(cut) == steps_of(whole)[:20]
    assert make_plan(max_steps=10**6).total_steps == make_plan().total_steps


def test_the_key_tells_plans_of_another_order_apart() -> None:
    others = [
        make_plan(51),
        make_plan(seed=8),
        make_plan(batch=5),
        make_plan(accumulate=4),
        Plan([f"other:{row}" for row in range(50)], [5] * 50, batch=4, accumulate=3, seed=7),
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
        Plan([], [], batch=4, accumulate=3, seed=0)

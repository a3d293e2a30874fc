"""The plan: exactly once, the same everywhere, seekable, batches of like length in a step."""

import itertools
import random
from typing import Any

import pytest

from draftcore.contracts.run import PlannedBatch
from draftcore.data.plan import Plan


def length_of(row: int) -> int:
    return random.Random(f"length {row}").randint(4, 400)


def make_plan(rows: int = 50, name: str = "data", **settings: Any) -> Plan:
    given = {"batch": 4, "accumulate": 3, "seed": 7, **settings}
    return Plan(
        [f"{name}:{row}" for row in range(rows)], list(map(length_of, range(rows))), **given
    )


def steps_of(plan: Plan) -> list[tuple[PlannedBatch, ...]]:
    return [plan.step(index) for index in range(plan.total_steps)]


@pytest.mark.parametrize("case", range(20))
def test_each_epoch_uses_each_row_exactly_once(case: int) -> None:
    draw = random.Random(case)
    rows, batch, accumulate = draw.randint(1, 70), draw.randint(1, 9), draw.randint(1, 5)
    given = {"batch": batch, "accumulate": accumulate, "seed": case, "epochs": 3}
    plan = make_plan(rows, "data", **given, batch_tokens=draw.choice([None, 900]))
    uses = list(plan.uses(0))
    for epoch in (1, 2, 3):
        used = [row for one in uses if one.epoch == epoch for row in one.rows]
        assert sorted(used) == list(range(rows))
    assert [one.position for one in uses] == list(range(3 * len(plan.batches)))
    assert [one.rows for one in uses] == [plan.batches[one.index] for one in uses]
    short = sum(len(rows) < batch for rows in plan.batches)
    assert short <= 1 or plan.batch_tokens  # the last of the cut
    whole, rest = divmod(len(plan.batches), accumulate)  # the last step of an epoch may have fewer
    places = [*[list(range(accumulate))] * whole, *[list(range(rest))] * (rest > 0)]
    assert [[one.place for one in step] for step in steps_of(plan)] == places * 3
    before = [plan.rows_before(index) for index in range(plan.total_steps + 1)]
    in_step = [sum(len(one.rows) for one in step) for step in steps_of(plan)]
    assert before == [0, *itertools.accumulate(in_step)]


def test_the_cut_depends_on_rows_lengths_and_size_alone() -> None:
    plan = make_plan(1200, batch=1)  # more rows than are sorted together
    for key, value in {"seed": 9, "accumulate": 5, "epochs": 4, "max_steps": 2}.items():
        settings: dict[str, Any] = {"batch": 1, key: value}
        other = make_plan(1200, **settings)
        assert (other.batches, other.cut) == (plan.batches, plan.cut)
    lengths = [*plan.lengths.tolist()[:-1], 401]
    longer = Plan(plan.feature_ids, lengths, batch=1, accumulate=3, seed=7)
    renamed, even = make_plan(1200, batch=1, name="other"), make_plan(1200, batch=1, batch_tokens=9)
    for other in (make_plan(1201, batch=1), make_plan(1200, batch=2), longer, renamed, even):
        assert other.cut != plan.cut
        assert other.batches != plan.batches


def test_what_a_batch_takes_is_known_from_the_lengths() -> None:
    plan = Plan(list("abcde"), [9, 3, 7, 3, 5], batch=2, accumulate=1, seed=0)
    assert plan.padded((0, 3)) == 9
    assert sorted(map(plan.padded, plan.batches)) == [3, 7, 9]
    assert (plan.largest(1), plan.largest(2), plan.largest(9)) == (12, 21, 27)


def test_a_batch_is_as_full_as_its_tokens_allow_and_a_longer_row_is_one_alone() -> None:
    """So batches of rows of any length are alike: they take the same time, and the same memory."""
    plan = make_plan(800, batch=99, batch_tokens=390)
    alone = [rows for rows in plan.batches if plan.padded(rows) > 390]
    assert {len(rows) for rows in alone} == {1}
    assert plan.tokens.max() <= 400  # the longest row
    for rows, after in itertools.pairwise(plan.batches):  # one more row would not have fitted
        assert (len(rows) + 1) * plan.lengths[after[0]] > 390
    assert max(map(len, make_plan(800, batch=7, batch_tokens=390).batches)) == 7


def test_any_step_can_be_asked_for_directly() -> None:
    plan = make_plan(epochs=4)
    in_order = steps_of(plan)
    for index in random.Random(3).sample(range(plan.total_steps), 15):
        assert make_plan(epochs=4).step(index) == plan.step(index) == in_order[index]
        assert next(plan.uses(index)) == in_order[index][0]
    for index in (-1, plan.total_steps):
        with pytest.raises(IndexError, match=f"a plan of {plan.total_steps} steps"):
            plan.step(index)


def test_a_batch_and_a_step_are_of_like_length_and_steps_come_in_any_order() -> None:
    """Ranks that share a step finish together, and short rows do not come first."""
    plan = make_plan(800, accumulate=4)
    padded = sum(len(rows) * plan.padded(rows) for rows in plan.batches)
    assert padded < 1.05 * sum(map(length_of, range(800)))  # in random order it is about 1.6
    tokens = [[len(one.rows) * plan.padded(one.rows) for one in step] for step in steps_of(plan)]
    waste = sum(len(step) * max(step) - sum(step) for step in tokens)
    assert waste < 0.05 * padded  # in random order it is about 0.6
    rising = sum(a[0] < b[0] for a, b in itertools.pairwise(tokens))
    assert 0.3 * len(tokens) < rising < 0.7 * len(tokens)


def test_the_order_never_changes_between_versions() -> None:
    """Written out: a checkpoint's cursor means this order on every machine, forever."""
    lengths = [5, 9, 3, 7, 7, 2, 8, 4, 6, 5, 3]
    ids = [str(row) for row in range(11)]
    plan = Plan(ids, lengths, batch=2, accumulate=2, seed=1, epochs=2)
    assert plan.batches == ((5, 2), (10, 7), (0, 9), (8, 3), (4, 6), (1,))
    order = [[one.index for one in step] for step in steps_of(plan)]
    assert order == [[5, 2], [3, 4], [0, 1], [0, 1], [5, 2], [3, 4]]
    by_tokens = Plan(ids, lengths, batch=4, batch_tokens=15, accumulate=2, seed=1)
    assert by_tokens.batches == ((5, 2, 10), (7, 0, 9), (8, 3), (4,), (6,), (1,))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_ranks_together_train_on_the_plan(ranks: int) -> None:
    """Rank r has the places of each step that leave r when divided by the number of ranks."""
    plan, start = make_plan(epochs=2), 3
    own = [list(plan.uses(start, rank, ranks)) for rank in range(ranks)]
    for rank, uses in enumerate(own):
        assert {one.place % ranks for one in uses} == {rank}
        assert [one.position for one in uses] == sorted(one.position for one in uses)
    together = sorted(itertools.chain(*own), key=lambda one: one.position)
    assert together == list(plan.uses(start))


def test_max_steps_cuts_the_run_short_and_changes_no_step() -> None:
    cut, whole = make_plan(epochs=9, max_steps=20), make_plan(epochs=5)
    assert cut.total_steps == 20
    assert steps_of(cut) == steps_of(whole)[:20]
    assert make_plan(max_steps=10**6).total_steps == make_plan().total_steps


def test_the_key_tells_plans_of_another_order_apart_and_allows_a_longer_run() -> None:
    assert steps_of(make_plan(seed=8)) != steps_of(make_plan())
    changed: dict[str, Any] = {"seed": 8, "batch": 5, "accumulate": 4, "rows": 51, "name": "other"}
    keys = {make_plan().key} | {make_plan(**{key: value}).key for key, value in changed.items()}
    assert len(keys) == 1 + len(changed)
    assert make_plan(epochs=5).key == make_plan(max_steps=3).key == make_plan().key

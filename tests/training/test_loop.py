"""The loop: the same update however a step is cut, steps that change nothing, and what ends it."""

from __future__ import annotations

import json
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from draftcore.errors import DraftcoreError
from draftcore.training.loop import stop_on_signal

if TYPE_CHECKING:
    from draftcore.contracts.algorithm import Draft, DraftBatch, StepContext
    from tests.training.conftest import NewRun


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)


def poison(*rows: int, step: int = 0) -> Any:
    """Make the loss of some rows at a step infinite."""
    ids = {f"s{row}" for row in rows}

    def wrong(batch: DraftBatch, context: StepContext, loss: Tensor) -> Tensor:
        hit = context.step == step and ids & {one.feature_id for one in batch.ids}
        return loss * torch.inf if hit else loss

    return wrong


# ---------------------------------------------------------------- the update


def test_the_gradient_is_that_of_the_mean_over_all_supervised_tokens(new_run: NewRun) -> None:
    """However it is cut into batches: by hand, for rows one after the other, without padding."""
    run = new_run(double=True, rows=6, accumulate=3, max_steps=1, clip=1e9).build()
    draft, total, tokens = run.draft(), torch.zeros((), dtype=torch.float64), 0
    for row in range(6):
        sample = run.sample(row, 0)
        guess = draft.module(sample.features["hidden.0"].double())
        total = total + ((guess - sample.token_ids_T) ** 2)[sample.loss_mask_T].sum()
        tokens += int(sample.loss_mask_T.sum())
    (total / tokens).backward()  # type: ignore[no-untyped-call]
    grads = [p.grad for p in draft.module.parameters() if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    run.train()
    assert run.trainers[0].metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-12)
    assert run.losses() == pytest.approx([float(total.detach() / tokens)], rel=1e-6)
    (line,) = run.lines()
    assert line["error"] == pytest.approx(line["loss"], rel=1e-6), "metrics are ratios of sums too"
    assert {"lr", "grad_norm", "seconds", "fetch_seconds"} <= line.keys()
    first = [0.1 * grad for grad in grads]  # what AdamW keeps of a first gradient
    for ours, theirs in zip(run.moments()[::3], first, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


def test_all_steps_are_trained_in_the_plans_order_and_each_batch_is_let_go(new_run: NewRun) -> None:
    run = new_run(epochs=2)
    assert run.train() == ("complete", {})
    total = run.plan.total_steps
    assert [line["step"] for line in run.lines()] == list(range(1, total + 1))
    assert run.finished == [run.plan.step(at)[-1].position + 1 for at in range(total)]
    assert run.let_gone == total
    assert run.losses()[-1] < run.losses()[0]
    assert ("saved", "", total) in run.observers.said
    assert next(run.uses, None) is None


# ---------------------------------------------------------------- steps that change nothing


@pytest.mark.parametrize("way", ["skipped", "masked"])
def test_a_step_without_anything_to_learn_changes_nothing_and_counts(
    new_run: NewRun, way: str
) -> None:
    """No weight decay, no momentum, no bias correction: to the bit."""
    run = new_run(dropout=0.5, weight_decay=0.1).build()
    trainer = run.trainers[0]
    nothing = {row for planned in run.plan.step(1) for row in planned.rows}
    if way == "skipped":
        run.skipped.add(dict.fromkeys(nothing, "bad"))
    else:
        run.masked |= nothing
    seen: list[tuple[dict[str, Tensor], list[Tensor]]] = []
    run.observers.step_finished = (  # type: ignore[method-assign]
        lambda step, metrics, draft: seen.append((run.weights(), run.moments()))
    )
    run.train()
    before, after = seen[0], seen[1]
    assert same(after[0], before[0])
    assert all(torch.equal(a, b) for a, b in zip(after[1], before[1], strict=True))
    assert not same(seen[2][0], after[0])
    assert len(seen) == run.plan.total_steps == trainer.step
    assert (run.lines()[1]["loss"], run.lines()[1]["grad_norm"]) == (0, 0)
    if way == "skipped":
        assert "error" not in run.lines()[1]


def test_a_batch_without_rows_leaves_its_step_to_the_others(new_run: NewRun) -> None:
    run = new_run(rows=8, accumulate=2, max_steps=1).build()
    empty, kept = run.plan.step(0)
    run.skipped.add(dict.fromkeys(empty.rows, "bad"))
    run.train()
    other = new_run("other", rows=8, accumulate=2, max_steps=1, skipped=dict(run.skipped)).build()
    other.step_on(kept.rows)
    assert same(run.weights(), other.weights())


def test_rows_that_turn_out_bad_are_left_out_and_kept_in_the_checkpoint(new_run: NewRun) -> None:
    run = new_run()
    run.bad = {3: "row 3 is odd", 11: "row 11 too"}
    run.train()
    last = run.found()
    assert last is not None
    assert last.state["skipped"] == [[3, "row 3 is odd"], [11, "row 11 too"]]
    again = new_run("again", skipped=run.bad)
    again.train()
    assert again.losses() == run.losses()
    assert same(again.weights(), run.weights())


# ---------------------------------------------------------------- gradients that are not finite


def test_a_gradient_that_is_not_finite_names_its_row_and_leaves_the_weights(
    new_run: NewRun,
) -> None:
    straight = new_run("straight").build()
    straight.stop_after = 3
    straight.train()
    run = new_run().build()
    row = run.plan.step(2)[-1].rows[-1]
    run.algorithms[""].wrong = poison(row, step=2)
    with pytest.raises(DraftcoreError, match="gradient of step 2 is not finite") as caught:
        run.train()
    text = str(caught.value)
    assert f"s{row}" in text
    assert "the weights were not changed" in text
    others = {other for planned in run.plan.step(2) for other in planned.rows} - {row}
    assert not any(f"(sample s{other})" in text for other in others)
    assert same(run.weights(), straight.weights())
    assert all(map(torch.equal, run.moments(), straight.moments()))
    assert run.trainers[0].step == 2
    assert run.found() is None, "no checkpoint is written of it"


def test_a_row_of_an_earlier_batch_of_the_step_is_in_what_is_named(new_run: NewRun) -> None:
    run = new_run(accumulate=3).build()
    planned = run.plan.step(0)[0]
    run.algorithms[""].wrong = poison(planned.rows[0])
    with pytest.raises(DraftcoreError, match=re.escape(str(list(planned.rows)))):
        run.train()


def test_one_of_several_drafts_that_fails_leaves_the_others_as_if_it_was_not_there(
    new_run: NewRun,
) -> None:
    labels = ("a", "b", "c")
    run = new_run(labels=labels, dropout=0.5).build()
    run.algorithms["b"].wrong = poison(*range(13), step=2)
    reason, failed = run.train()
    assert reason == "failed"
    assert list(failed) == ["b"]
    assert "step 2 is not finite" in str(failed["b"])
    alone = new_run("alone", dropout=0.5)
    alone.train()
    for at, label in ((0, "a"), (2, "c")):
        assert same(run.weights(at), alone.weights())
        assert run.losses(label) == alone.losses()
    assert run.losses("b") == alone.losses()[:2]
    assert run.found("b") is None


# ---------------------------------------------------------------- being stopped


def test_a_run_that_is_asked_to_stop_ends_its_step_and_saves(new_run: NewRun) -> None:
    run = new_run().build()
    run.stop_after = 3  # within the second step of two batches
    assert run.train() == ("interrupted", {})
    last = run.found()
    assert last is not None
    assert last.step == 2 == run.trainers[0].step
    assert run.read == 4


def test_a_step_whose_batch_does_not_come_is_not_taken(new_run: NewRun) -> None:
    """What it had of the others is forgotten, random numbers too: a resumed run has them again."""
    straight = new_run("straight", dropout=0.5)
    straight.train()
    run = new_run(dropout=0.5).build()
    run.dry_after = 3
    assert run.train() == ("interrupted", {})
    assert run.trainers[0].step == 1
    assert run.finished == [2]
    again = new_run(dropout=0.5)
    assert again.train() == ("complete", {})
    assert again.losses() == straight.losses()
    assert same(again.weights(), straight.weights())


def test_a_run_that_is_complete_takes_no_step(new_run: NewRun) -> None:
    new_run(max_steps=2).train()
    again = new_run(max_steps=2).build()
    before = again.weights()
    assert again.train() == ("complete", {})
    assert again.read == 0
    assert same(again.weights(), before)


def test_a_first_signal_is_noted_and_a_second_one_acts() -> None:
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored
    try:
        with stop_on_signal() as caught:
            signal.raise_signal(signal.SIGINT)
            assert caught == [signal.SIGINT]
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, inherited)


# ---------------------------------------------------------------- reporting, saving, evaluating


def test_checkpoints_and_lines_are_written_as_often_as_is_asked(new_run: NewRun) -> None:
    run = new_run(rows=20, accumulate=1, checkpoint_every=3, log_every=4)
    run.train()
    saved = [at for kind, _, at in run.observers.said if kind == "saved"]
    assert saved == [3, 6, 9, 10]
    assert [line["step"] for line in run.lines()] == [1, 4, 8]


def test_an_evaluation_is_written_beside_the_steps(new_run: NewRun) -> None:
    def evaluate(built: Draft, step: int, total_steps: int) -> dict[str, Any]:
        return {"loss": step / total_steps, "trained": built.module.training}

    run = new_run(eval_every=2, evaluate=evaluate)
    run.train()
    found = {line["step"]: line["evaluation"] for line in run.lines() if "evaluation" in line}
    assert list(found) == [2, 4]
    assert found[2]["loss"] == 2 / run.plan.total_steps
    assert [one for one in run.observers.said if one[0] == "evaluated"] == [
        ("evaluated", "", 2),
        ("evaluated", "", 4),
    ]


def test_a_disk_that_is_full_of_metrics_says_that_the_run_goes_on_with_room(
    new_run: NewRun,
) -> None:
    run = new_run().build()
    file = run.folder / "metrics.jsonl"
    file.unlink()
    file.symlink_to("/dev/full")
    with pytest.raises(DraftcoreError, match=r"(?s)metrics.jsonl.*No space left.*free space"):
        run.train()


def test_lines_past_the_step_that_is_resumed_are_dropped(new_run: NewRun) -> None:
    run = new_run().build()
    run.stop_after = 4
    run.train()
    file = run.folder / "metrics.jsonl"
    with file.open("a") as stream:
        stream.write(json.dumps({"step": 3, "loss": 7}) + '\n{"step": 4, "lo')
    again = new_run()
    again.train()
    straight = new_run("straight")
    straight.train()
    assert again.losses() == straight.losses()

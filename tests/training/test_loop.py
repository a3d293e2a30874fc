"""The loop: the same update however a step is cut, steps that change nothing, and what ends it."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Generator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from draftcore import hookimpl
from draftcore.contracts.algorithm import Draft, DraftBatch, StepContext, StepOutput, Stop
from draftcore.errors import DraftcoreError
from draftcore.stopping import stop_on_signal
from draftcore.training.optimizer import build_optimizer, learning_rate, scale_and_clip
from tests.training.conftest import NAME, NewRun, Run, same

Schedule = Literal["cosine", "constant"]
GOLDENS = Path(__file__).parents[1] / "goldens"


class Fused:
    """The optimizer of a GPU: it leaves out a step by itself, and nobody waits to know."""

    @hookimpl
    def optimizer(self, draft: Draft, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        weights = draft.parameter_groups[0]["params"]
        return torch.optim.AdamW(weights, lr=lr, weight_decay=weight_decay, fused=True)


both_optimizers = pytest.mark.parametrize("plugins", [[], [Fused()]], ids=["looks", "fused"])


def poison(*rows: int, step: int = 1) -> Any:
    """Make the loss of some rows at a step infinite."""
    ids = {f"s{row}" for row in rows}

    def wrong(batch: DraftBatch, context: StepContext, loss: Tensor) -> Tensor:
        hit = context.step == step and ids & {one.feature_id for one in batch.ids}
        return loss * torch.inf if hit else loss

    return wrong


def require_equal(run: Run, other: Run) -> None:
    """Losses and weights, to the bit."""
    assert run.losses() == other.losses()
    assert same(run.weights(), other.weights())


@pytest.mark.parametrize("terms", [1, 2, 3])
def test_the_gradient_is_that_of_each_terms_mean_over_all_tokens(
    new_run: NewRun, terms: int
) -> None:
    """By hand, rows one after the other, without padding, however a step is cut into batches.

    The third term is one that many batches have nothing of. Metrics are ratios of sums too.
    """
    settings: dict[str, Any] = {"double": True, "rows": 6, "max_steps": 1, "clip": 1e9}
    settings["terms"] = terms
    cuts = [{"batch": batch, "accumulate": 6 // batch} for batch in (6, 2, 1)]
    runs = [new_run(f"{n}", **cut, **settings).trained() for n, cut in enumerate(cuts)]
    draft, sums = runs[0].draft(), torch.zeros(3, 2, dtype=torch.float64)
    for sample in (runs[0].sample(row, 1) for row in range(6)):
        guess_T = draft.module(sample.features[NAME].double())
        error_T = ((guess_T - sample.token_ids_T) ** 2)[sample.loss_mask_T]
        for at, part_T in enumerate([error_T, guess_T**2, guess_T**2 * (len(guess_T) == 2)]):
            counted = len(part_T) if at < 2 or len(guess_T) == 2 else 0
            sums[at] = sums[at] + torch.stack([part_T.sum(), torch.tensor(float(counted))])
    weights = torch.tensor([1.0, 0.5, 3.0], dtype=torch.float64)[:terms]
    loss = (weights * sums[:terms, 0] / sums[:terms, 1]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    grads = [p.grad for p in draft.module.parameters() if p.grad is not None]
    norm = float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads])).detach())
    for run in runs:
        (line,) = run.lines()
        assert {"lr", "seconds", "fetch_seconds"} <= line.keys()
        assert line["loss"] == pytest.approx(float(loss.detach()), rel=1e-12)
        assert line["error"] == pytest.approx(float((sums[0, 0] / sums[0, 1]).detach()), rel=1e-6)
        assert run.trainers[0].metrics["grad_norm"] == line["grad_norm"]
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-12)
        for ours, theirs in zip(run.moments()[::3], grads, strict=True):
            # What AdamW keeps of a first gradient.
            torch.testing.assert_close(ours, 0.1 * theirs, rtol=1e-12, atol=1e-15)
        for ours, theirs in zip(run.moments(), runs[0].moments(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


def test_a_term_without_a_denominator_over_the_whole_step_adds_nothing(new_run: NewRun) -> None:
    """Rows of two tokens are left out: the third term has nothing, the others are as without it."""
    short = {0: "short", 5: "short", 10: "short"}
    require_equal(*(new_run(f"{n}", terms=n, skipped=short).trained() for n in (2, 3)))


class AsTerms:
    """Writes a ratio as the term that it is."""

    @hookimpl(wrapper=True)
    def forward_loss(self) -> Generator[None, StepOutput, StepOutput]:
        output = yield
        term = (output.numerator, output.denominator, 1.0)
        return StepOutput(terms=[term], counts=output.counts)


def test_a_loss_is_one_ratio_or_several_terms_and_one_term_is_a_ratio(new_run: NewRun) -> None:
    made = {"ratio": [], "term": [AsTerms()]}
    require_equal(*(new_run(n, dropout=0.5, plugins=p).trained() for n, p in made.items()))
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    ratio, terms = StepOutput(one, two, {}), StepOutput(terms=[(one, two, 0.5), (two, one, 1.0)])
    assert ratio.terms == ((one, two, 1.0),)
    assert replace(ratio, terms=[*ratio.terms, (two, one, 3.0)]).terms[1] == (two, one, 3.0)
    assert replace(terms, counts={"x": (one, two)}).terms == terms.terms
    with pytest.raises(AttributeError, match=r"has 2 terms: read output\.terms"):
        _ = terms.numerator
    either = r"StepOutput\(numerator, .* or StepOutput\(terms="
    for wrong in ({}, {"numerator": one}, {"numerator": one, "terms": terms.terms}):
        with pytest.raises(TypeError, match=either):
            StepOutput(**wrong)


def test_steps_are_trained_in_the_plans_order_and_batches_are_let_go(new_run: NewRun) -> None:
    """Steps and epochs in losses, of training and held out, in samples, and in what observers hear."""
    run = new_run(epochs=2, accumulate=3).build()  # three steps an epoch, of a batch to three each
    assert run.train() == ("complete", {})
    told = {(c.step, c.epoch, c.total_steps, c.training) for c in run.algorithms[""].contexts}
    assert told == {(step, 1 if step < 4 else 2, 6, True) for step in range(1, 7)}
    assert {planned.epoch for planned in run.plan.uses(0)} == {1, 2}
    assert [at for kind, _, at in run.observers.said if kind == "step"] == list(range(1, 7))
    assert [line["step"] for line in run.lines()] == list(range(1, 7))
    assert run.finished == [run.plan.step(at)[-1].position + 1 for at in range(6)]
    assert run.released == 6
    assert run.losses()[-1] < run.losses()[0]
    assert ("saved", "", 6) in run.observers.said
    assert next(run.uses, None) is None


class Descent:
    """Plain gradient descent, whose second group falls twice as fast; and a rate that halves."""

    @hookimpl
    def optimizer(self, draft: Draft, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        first, *others = draft.parameter_groups[0]["params"]
        groups = [{"params": others}, {"params": [first], "lr": 2 * lr}]
        return torch.optim.SGD(groups, lr=lr, weight_decay=weight_decay)

    @hookimpl
    def schedule(self, step: int, total_steps: int) -> float:
        assert 1 <= step <= total_steps
        return 0.5**step


class Watch:
    """Keeps the gradients that it is shown, spoils them, and counts their weights."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []

    @hookimpl
    def gradients_ready(self, gradients: Mapping[str, Tensor]) -> dict[str, float]:
        self.gradients.append({name: gradient.clone() for name, gradient in gradients.items()})
        for gradient in gradients.values():
            gradient.zero_()
        return {"weights": len(gradients), "loss": -1.0}


def test_an_optimizer_and_a_schedule_of_a_plugin_take_the_steps(new_run: NewRun) -> None:
    """By hand: weight - rate * gradient, with the peak rate of its group."""
    run = new_run(max_steps=2, plugins=[Descent(), seen := Watch()], lr=0.25, clip=1e9).build()
    wanted = run.weights()
    run.train()
    for step, gradients in enumerate(seen.gradients, 1):
        for name, gradient in gradients.items():
            rate = (0.5 if name == "first.weight" else 0.25) * 0.5**step
            wanted[name] -= rate * gradient
    wanted["second.bias"] = wanted["first.bias"]
    for name, weight in run.weights().items():
        torch.testing.assert_close(weight, wanted[name])
    assert [line["lr"] for line in run.lines()] == [0.125, 0.0625]


@pytest.mark.parametrize("terms", [1, 3])
def test_gradients_are_shown_divided_unclipped_and_copied(new_run: NewRun, terms: int) -> None:
    watch = Watch()
    settings: dict[str, Any] = {"dropout": 0.5, "clip": 1e-3, "terms": terms}
    shown = new_run("shown", plugins=[watch], **settings).trained()
    require_equal(shown, new_run("alone", **settings).trained())
    for line, gradients in zip(shown.lines(), watch.gradients, strict=True):
        norms = torch.stack([torch.linalg.vector_norm(one) for one in gradients.values()])
        assert line["grad_norm"] == pytest.approx(float(torch.linalg.vector_norm(norms)), rel=1e-5)
        assert line["weights"] == 3


def test_an_optimizer_that_leaves_out_a_weight_is_refused_with_its_name(new_run: NewRun) -> None:
    class Forgetful:
        @hookimpl
        def optimizer(self, draft: Draft, lr: float) -> torch.optim.Optimizer:
            return torch.optim.SGD(draft.parameter_groups[0]["params"][1:], lr=lr)

    with pytest.raises(DraftcoreError, match=r"parameter groups differ in first\.weight$"):
        new_run(plugins=[Forgetful()]).build()


class Stopper:
    """Stops a draft after a step, or by an evaluation of that step."""

    def __init__(self, step: int, draft: str = "", evaluation: bool = False) -> None:
        self.at, self.evaluation = (step, draft), evaluation

    @hookimpl
    def step_finished(self, step: int, draft: str) -> Stop | None:
        return Stop("enough") if (step, draft) == self.at and not self.evaluation else None

    @hookimpl
    def evaluated(self, step: int, draft: str) -> Stop | None:
        return Stop("enough") if (step, draft) == self.at and self.evaluation else None


@pytest.mark.parametrize("evaluation", [False, True])
def test_a_stop_ends_training_with_a_checkpoint_that_goes_on(
    new_run: NewRun, evaluation: bool
) -> None:
    """Also after a step whose checkpoint was there; and a stop after the last step is none."""
    settings: dict[str, Any] = {"dropout": 0.5, "checkpoint_every": 1, "eval_every": 1}
    settings["evaluate"] = lambda *_: {}
    run = new_run(plugins=[Stopper(3, evaluation=evaluation)], **settings)
    assert run.train() == ("stopped", {})
    assert run.stopped == {"": Stop("enough", "stopper")}
    assert (run.last().step, run.last().state["stopped"]) == (3, "enough")
    again = new_run(plugins=[Stopper(4, evaluation=evaluation)], **settings)
    assert again.train() == ("complete", {})
    assert same(again.weights(), new_run("straight", **settings).trained().weights())
    assert again.last().state["stopped"] is None


def test_a_stop_leaves_the_checkpoint_that_a_shorter_run_ends_with(new_run: NewRun) -> None:
    """To the bit, random numbers too: of the step that was begun after it nothing is in there."""
    found: list[dict[str, Tensor]] = []
    for name, more in (("stopped", {"plugins": [Stopper(2)]}), ("short", {"max_steps": 2})):
        last = new_run(name, dropout=0.5, schedule="constant", **more).trained().last()
        files = sorted(last.folder.glob("*.safetensors"))
        found.append({f"{f.stem}/{n}": t for f in files for n, t in load_file(f).items()})
    assert any(name.endswith("rng.cpu") for name in found[0])
    assert same(*found)


def test_a_stop_of_one_of_several_drafts_leaves_the_others_alone(new_run: NewRun) -> None:
    run = new_run(labels=("a", "b"), plugins=[Stopper(2, "a")])
    assert run.train() == ("stopped", {})
    assert [trainer.step for trainer in run.trainers] == [2, 4]
    assert list(run.stopped) == ["a"]
    assert [found.step for label in ("a", "b") if (found := run.found(label))] == [2, 4]


def test_a_first_step_of_loss_0_is_taken_where_tokens_count(new_run: NewRun) -> None:
    """A draft's own vocabulary may lack what the target likes best of all its rows."""
    run = new_run()
    run.algorithms[""].wrong = lambda batch, context, loss: loss * (context.step > 1)
    assert run.train() == ("complete", {})
    assert run.losses()[0] == 0 < run.losses()[1]


@both_optimizers
@pytest.mark.parametrize("way", ["skipped", "masked"])
def test_a_step_that_teaches_nothing_changes_nothing(
    new_run: NewRun, way: str, plugins: list[object]
) -> None:
    """No weight decay, no momentum, no bias correction: to the bit."""

    class Watcher:
        @hookimpl
        def step_finished(self) -> None:
            seen.append((run.weights(), run.moments()))

    run = new_run(dropout=0.5, weight_decay=0.1, plugins=[Watcher(), *plugins]).build()
    nothing = {row for planned in run.plan.step(1) for row in planned.rows}
    if way == "skipped":
        run.skipped.add(dict.fromkeys(nothing, "bad"))
    else:
        run.masked |= nothing
    seen: list[tuple[dict[str, Tensor], list[Tensor]]] = []
    run.train()
    before, after = seen[0], seen[1]
    assert same(after[0], before[0])
    assert all(torch.equal(a, b) for a, b in zip(after[1], before[1], strict=True))
    assert not same(seen[2][0], after[0])
    assert len(seen) == run.plan.total_steps == run.trainers[0].step
    assert (run.lines()[1]["loss"], run.lines()[1]["grad_norm"]) == (0, 0)
    assert "error" not in run.lines()[1]


def test_a_batch_without_rows_leaves_its_step_to_the_others(new_run: NewRun) -> None:
    settings: dict[str, Any] = {"rows": 8, "accumulate": 2, "max_steps": 1}
    run = new_run(**settings).build()
    empty, kept = run.plan.step(0)
    run.skipped.add(dict.fromkeys(empty.rows, "bad"))
    run.train()
    other = new_run("other", **settings, skipped=dict(run.skipped)).build()
    other.step_on(kept.rows)
    assert same(run.weights(), other.weights())


@both_optimizers
@pytest.mark.parametrize("terms", [1, 3])
def test_a_gradient_that_is_not_finite_names_its_row(
    new_run: NewRun, terms: int, plugins: list[object]
) -> None:
    straight = new_run("straight", terms=terms, plugins=plugins).build()
    straight.stop_after = 3
    straight.train()
    run = new_run(terms=terms, plugins=plugins).build()
    row = run.plan.step(2)[-1].rows[-1]
    run.algorithms[""].wrong = poison(row, step=3)
    with pytest.raises(DraftcoreError, match="gradient of step 3 is not finite") as caught:
        run.train()
    text = str(caught.value)
    assert "the weights were not changed" in text
    rows = {other for planned in run.plan.step(2) for other in planned.rows}
    assert [other for other in rows if f"(sample s{other})" in text] == [row]
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


@both_optimizers
def test_a_draft_that_fails_leaves_the_others_alone(new_run: NewRun, plugins: list[object]) -> None:
    run = new_run(labels=("a", "b", "c"), dropout=0.5, plugins=plugins).build()
    run.algorithms["b"].wrong = poison(*range(13), step=3)
    reason, failed = run.train()
    assert (reason, list(failed)) == ("failed", ["b"])
    assert "step 3 is not finite" in str(failed["b"])
    alone = new_run("alone", dropout=0.5, plugins=plugins).trained()
    for at, label in ((0, "a"), (2, "c")):
        assert same(run.weights(at), alone.weights())
        assert run.losses(label) == alone.losses()
    assert run.losses("b") == alone.losses()[:2]
    assert run.found("b") is None


class Reads(TorchFunctionMode):
    """Notes whenever a number of a tensor is read: on a device that is a wait."""

    def __init__(self, events: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self.events = events

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("tolist", "item", "__bool__", "__float__"):
            self.events.append(("read",))
        return func(*args, **(kwargs or {}))


def events_of(run: Run) -> list[str]:
    """Train, and say in which order forwards, reads and what observers are told of came."""
    said = run.observers.said

    def forward(batch: DraftBatch, context: StepContext, loss: Tensor) -> Tensor:
        said.append(("forward", context.step))
        return loss

    run.algorithms[""].wrong = forward
    with Reads(said):
        run.train()
    return [" ".join(map(str, (one[0], *one[1:][-1:]))) for one, _ in groupby(said)]


def test_no_number_of_a_step_is_read_before_the_forward_of_the_next_one(new_run: NewRun) -> None:
    """And then before its update, so that weights are those of the step that is told of."""
    events = events_of(new_run(rows=8, accumulate=1, max_steps=3, plugins=[Fused()]).build())
    wanted = "forward 1, forward 2, read, step 1, forward 3, read, step 2, read, step 3"
    assert events[:9] == wanted.split(", ")


def test_a_step_that_is_evaluated_is_so_before_the_next_one_begins(new_run: NewRun) -> None:
    """Nothing else lies on the device then."""
    run = new_run(rows=6, accumulate=1, eval_every=2, evaluate=lambda *_: {})
    found = [event for event in events_of(run.build()) if event != "read"]
    assert found[:6] == ["forward 1", "forward 2", "step 1", "step 2", "evaluated 2", "forward 3"]


def test_a_run_that_is_asked_to_stop_ends_its_step_and_saves(new_run: NewRun) -> None:
    run = new_run().build()
    run.stop_after = 3  # within the second step of two batches
    assert run.train() == ("interrupted", {})
    assert run.last().step == 2 == run.trainers[0].step
    assert run.read == 4


def test_a_step_whose_batch_does_not_come_is_not_taken(new_run: NewRun) -> None:
    """What it had of the others is forgotten, random numbers too: a resumed run has them again."""
    run = new_run(dropout=0.5).build()
    run.dry_after = 3
    assert run.train() == ("interrupted", {})
    assert run.trainers[0].step == 1
    assert run.finished == [2]
    again = new_run(dropout=0.5)
    assert again.train() == ("complete", {})
    require_equal(again, new_run("straight", dropout=0.5).trained())


def test_a_first_signal_is_noted_also_twice_and_a_later_one_acts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored
    try:
        with stop_on_signal() as caught:
            monkeypatch.setattr("draftcore.stopping.SIGNAL_WINDOW", 60)
            for noted in (1, 2):
                signal.raise_signal(signal.SIGINT)
                assert len(caught) == noted
            monkeypatch.setattr("draftcore.stopping.SIGNAL_WINDOW", 0)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, inherited)


def test_lines_checkpoints_and_evaluations_come_as_often_as_is_asked(new_run: NewRun) -> None:
    def evaluate(built: Draft, context: StepContext) -> dict[str, Any]:
        assert not context.training
        return {"loss": context.step / context.total_steps, "epoch": context.epoch}

    often = {"checkpoint_every": 3, "log_every": 4, "eval_every": 5}
    run = new_run(rows=20, accumulate=1, evaluate=evaluate, **often).trained()
    said = run.observers.said
    assert [at for kind, _, at in said if kind == "saved"] == [3, 6, 9, 10]
    assert [at for kind, _, at in said if kind == "evaluated"] == [5, 10]
    assert [line["step"] for line in run.lines() if "loss" in line] == [1, 4, 8]
    found = {line["step"]: line["evaluation"] for line in run.lines() if "evaluation" in line}
    assert list(found) == [5, 10]
    assert found[5] == {"loss": 0.5, "epoch": 1}


def test_absurd_weights_do_not_replace_those_of_good_checkpoints(new_run: NewRun) -> None:
    """They are finite still: only a later step would fail."""
    new_run(max_steps=2, checkpoint_every=1).train()
    again = new_run(max_steps=4, checkpoint_every=1, keep_checkpoints=1).build()
    with torch.no_grad():
        again.trainers[0].parameters[0] *= 1e9
    says = r"a weight at step 3 is .*e\+\d+: .*\n.*lower train.lr"
    with pytest.raises(DraftcoreError, match=says):
        again.train()
    assert again.last().step == 2


def test_metrics_that_cannot_be_written_say_that_the_run_goes_on(new_run: NewRun) -> None:
    run = new_run().build()
    (file := run.folder / "metrics.jsonl").unlink()
    file.mkdir()
    with pytest.raises(DraftcoreError, match=r"(?s)metrics.jsonl.*go on"):
        run.train()


def test_lines_past_the_step_that_is_resumed_and_odd_ones_are_dropped(new_run: NewRun) -> None:
    run = new_run().build()
    run.stop_after = 4
    run.train()
    with (run.folder / "metrics.jsonl").open("ab") as stream:
        stream.write(json.dumps({"step": 3, "loss": 7}).encode() + b"\n")
        stream.write(b'7\n[1]\n{}\n{"step": "x"}\n\xff\n{"step": 4, "lo')
    assert new_run().trained().losses() == new_run("straight").trained().losses()


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_rates_clipping_and_updates_follow_the_golden_trace(schedule: Schedule) -> None:
    """The gradient is given doubled with denominator 2, so the division is tested too."""
    trace = json.loads((GOLDENS / "misc.json").read_text())[f"optimizer_{schedule}"]
    tensors: dict[str, Tensor] = load_file(GOLDENS / "misc.safetensors")
    shape: Any = {"peak": trace["lr"], "warmup_ratio": trace["warmup_ratio"], "schedule": schedule}
    rates = [learning_rate(s, trace["total_steps"], **shape) for s in range(trace["total_steps"])]
    assert rates == pytest.approx(trace["lr_used_at_step"], rel=1e-9, abs=1e-12)
    weight, start = torch.nn.Parameter(torch.zeros(2, 3)), None
    settings: Any = {"weight_decay": trace["weight_decay"], "betas": tuple(trace["betas"])}
    optimizer = build_optimizer([{"params": [weight]}], **settings)
    for step in range(5):
        at = f"optimizer.{schedule}.{{}}.{step}".format
        grad, after = tensors[at("grad")], tensors[at("weight_after")]
        weight.grad = 2 * grad
        norm = scale_and_clip([weight], torch.tensor(2.0), trace["max_grad_norm"])
        assert float(norm) == pytest.approx(trace["pre_clip_grad_norm"][step], rel=1e-6)
        optimizer.param_groups[0]["lr"] = trace["lr_used_at_step"][step]
        optimizer.step()
        # The trace starts from weights that it does not hold: compare the movement from step 0 on.
        start = after - weight.detach() if start is None else start
        torch.testing.assert_close(weight.detach() + start, after, rtol=1e-5, atol=1e-6)


def test_a_schedule_ends_near_zero_and_never_divides_by_zero() -> None:
    shape: Any = {"peak": 1.0, "warmup_ratio": 0.5, "schedule": "cosine"}
    for total in (1, 2, 3, 50):
        rates = [learning_rate(s, total, **shape) for s in range(total)]
        assert all(0 <= rate <= 2 for rate in rates)

"""What an algorithm's losses and drafts are compared with, beyond its suite.

`Golden` has a reference implementation's recorded numbers. `Naive` has the parts of a decoder straight
from their description; a subclass puts its algorithm together of them, and `require_naive` compares loss
and gradients. `require_attention` does so for a fused attention, `require_trained_drafts` for drafts with
training's own forward.

Shape letters: B batch, T tokens, H width, K drafts, V vocabulary.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_graphs.recording import RecordingBackend
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import silu

from draftcore.contracts.algorithm import Draft, Drafter, Sample, SampleId, StepOutput
from draftcore.contracts.runner import ShapeKey
from draftcore_sdk.algorithm_fixtures import WIDTH

Heads = Sequence[Tensor]  # each a vector
Update = tuple[StepOutput, list[Tensor]]  # what `accumulate` returns
# fp64 sums of some hundred terms in another order.
check_close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)

# ---------------------------------------------------------------- recorded numbers


def cases(own: Path, algorithm: str) -> list[Path]:
    """Return an algorithm's recorded cases, `NAME*.json` that say so, of DRAFTCORE_GOLDENS or `own`."""
    folder = Path(os.environ.get("DRAFTCORE_GOLDENS", own))
    files = {file: json.loads(file.read_text()) for file in folder.glob(f"{algorithm}*.json")}
    named = [file for file, data in files.items() if data["algorithm"] == algorithm]
    return sorted(named) or [folder / f"{algorithm}.json"]


class Golden:
    """One recorded case: settings, results and bounds in `NAME.json`, tensors in `NAME.safetensors`.

    `raw.I.*` are sample I's, `draft.*` the weights, `grad.*` their gradients.
    """

    def __init__(self, file: Path) -> None:
        self.folder, self.data = file.parent, json.loads(file.read_text(encoding="utf-8"))
        self.tensors: dict[str, Tensor] = load_file(file.with_suffix(".safetensors"))
        bounds = self.data["tolerance"]
        if isinstance(bounds, Mapping):
            names = ("loss_rtol", "grad_rtol", "grad_atol_relative_to_norm")
            self.loss_rtol, self.grad_rtol, self.grad_atol = (bounds[name] for name in names)
            return
        numbers = re.fullmatch(
            r".*loss rtol ([\de.-]+), grads rtol ([\de.-]+) / atol ([\de.-]+)", bounds
        )
        assert numbers is not None
        self.loss_rtol, self.grad_rtol, self.grad_atol = map(float, numbers.groups())

    def fill(self, module: nn.Module) -> None:
        weights = {name: self.tensors[f"draft.{name}"] for name in module.state_dict()}
        module.load_state_dict(weights, strict=True)

    def samples(self, layers: Sequence[int]) -> list[Sample]:
        """Return the samples; the states of these layers were recorded side by side."""

        def sample(index: int) -> Sample:
            prefix = f"raw.{index}."
            raw = {
                n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)
            }
            states = raw["aux_hidden_state" if "aux_hidden_state" in raw else "hidden_states"][0]
            parts = zip(layers, states.chunk(len(layers), -1), strict=True)
            features = {f"hidden.{layer}": part for layer, part in parts}
            if "hidden_state" in raw:
                features["last_hidden"] = raw["hidden_state"][0]
            identity = SampleId(str(index), 1)
            return Sample(identity, raw["input_ids"], raw["loss_mask"].bool(), features)

        count = sum(re.fullmatch(r"raw\.\d+\.input_ids", name) is not None for name in self.tensors)
        return [sample(index) for index in range(count)]

    def check(self, found: Any, expected: Any, name: str = "") -> None:
        """Compare a loss or metrics."""
        assert found == pytest.approx(expected, rel=self.loss_rtol), name

    def check_gradients(
        self, module: nn.Module, norms: Mapping[str, float], prefix: str | None = None
    ) -> None:
        """Compare all norms, and element by element the gradients recorded under this prefix."""
        found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        ours = {name: float(gradient.norm()) for name, gradient in found.items()}
        assert ours == pytest.approx(norms, rel=self.grad_rtol, abs=self.grad_atol)
        for name, gradient in self.tensors.items():
            if prefix is not None and name.startswith(prefix):
                same, rtol, atol = found[name.removeprefix(prefix)], self.grad_rtol, self.grad_atol
                torch.testing.assert_close(same, gradient, rtol=rtol, atol=atol)


# ---------------------------------------------------------------- computed anew


class Naive:
    """Norms, positions, attention and MLP of a decoder: one row and one head at a time."""

    def __init__(self, module: nn.Module, theta: float = 10000.0) -> None:
        self.config: Any = module.config
        self.theta, self.w = theta, dict(module.named_parameters())

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.w[f"{name}.weight"] @ x

    def rms(self, x: Tensor, name: str) -> Tensor:
        scale: Tensor = (x.pow(2).mean() + self.config.rms_norm_eps).rsqrt()
        return x * scale * self.w[f"{name}.weight"]

    def rope(self, head: Tensor, position: int) -> Tensor:
        turned = int(len(head) * self.config.rope.get("partial_rotary_factor", 1.0))
        half, out = turned // 2, list(head)
        for i in range(half):
            angle = position * self.theta ** (-2 * i / turned)
            cos, sin = math.cos(angle), math.sin(angle)
            out[i] = head[i] * cos - head[i + half] * sin
            out[i + half] = head[i + half] * cos + head[i] * sin
        return torch.stack(out)

    def attention(self, queries: Heads, keys: Sequence[Heads], values: Sequence[Heads]) -> Tensor:
        """Attend to these places; groups of query heads share a head of keys and values."""
        group, heads = len(queries) // len(keys[0]), []
        for head, query in enumerate(queries):
            scores = torch.stack([query @ key[head // group] for key in keys])
            shares = (scores / math.sqrt(len(query))).softmax(0)
            heads.append(shares @ torch.stack([value[head // group] for value in values]))
        return torch.cat(heads)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up = (self.linear(f"{name}.{part}_proj", x) for part in ("gate", "up"))
        return self.linear(f"{name}.down_proj", silu(gate) * up)


def require_naive(draft: Draft, output: StepOutput, expected: Tensor, rtol: float) -> None:
    """Require of a loss, and of the gradient of every parameter, the naive ones."""
    close = functools.partial(torch.testing.assert_close, rtol=rtol, atol=1e-12)
    ours = output.numerator / output.denominator
    close(ours, expected)
    names, parameters = zip(*draft.module.named_parameters(), strict=True)
    gradients = [torch.autograd.grad(loss, parameters) for loss in (ours, expected)]
    for name, found, right in zip(names, *gradients, strict=True):
        assert right.abs().max() > 0, name
        close(found, right)


def require_attention(
    tensors: Sequence[Tensor], attend: Callable[[Sequence[Tensor]], Tensor],
    plain: Callable[[Sequence[Tensor]], Tensor], tolerance: float,
) -> None:  # fmt: skip
    """Require of a fused attention and its gradients those of one softmax in fp64."""
    found, exact = attend(tensors), [t.detach().double().requires_grad_() for t in tensors]
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(found.shape, generator=generator, dtype=torch.float64).to(found)
    expected = plain(exact)
    ours = found, *torch.autograd.grad(found, tensors, grad)
    theirs = expected, *torch.autograd.grad(expected, exact, grad.double())
    for one, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, right.to(one), rtol=tolerance, atol=tolerance)


@torch.inference_mode()
def require_recordable(drafter: Drafter) -> None:
    """Require that a round waits for nothing, and that a recorded one drafts what others do."""
    state, generator = drafter.allocate(3, 50), torch.Generator().manual_seed(5)
    tokens_BT, lengths_B = torch.randint(40, (3, 9), generator=generator), torch.tensor([9, 1, 4])
    features = {
        name: torch.randn(3, 9, WIDTH, generator=generator, dtype=torch.float64)
        for name in drafter.request.names
    }
    drafter.prefill(state, tokens_BT, lengths_B, features, lengths_B)
    backend, key = RecordingBackend(), ShapeKey(3)
    backend.capture_one(key, lambda: drafter.propose(state).tokens_BK)
    counts_B = torch.tensor([1, 2, drafter.num_drafts + 1])
    read = {name: x[:, : drafter.num_drafts + 1] for name, x in features.items()}
    drafter.accept(state, tokens_BT[:, : drafter.num_drafts + 1], read, counts_B)
    assert torch.equal(backend.replay(key), drafter.propose(state).tokens_BK)


def require_same_update(found: Update, expected: Update) -> None:
    """Compare losses, metrics and gradients."""
    (ours, gradients), (theirs, right) = found, expected
    check_close((ours.numerator, ours.denominator), (theirs.numerator, theirs.denominator))
    check_close(dict(ours.counts), dict(theirs.counts))
    check_close(gradients, right)


# ---------------------------------------------------------------- training's own forward


@torch.no_grad()
def require_trained_drafts(
    drafter: Drafter, tokens: int, temperature: float, logits_of: Callable[[Sample, int], Tensor]
) -> None:
    """Require of drafts what training computes of them; and that rounds can be recorded.

    Rows of several lengths are decoded in fp64, some accepted more often than others. `logits_of` gets a
    sample and how many of its tokens were known; it returns the logits [K, V] of the drafts that follow.
    """
    generator, most = torch.Generator().manual_seed(5), drafter.num_drafts
    tokens_BT = torch.randint(tokens, (3, 40), generator=generator)
    shape, rows_B, at_B = (3, 40, WIDTH), torch.arange(3), torch.tensor([7, 1, 9])
    features = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name in drafter.request.names
    }
    state, longest = drafter.allocate(3, 50), int(at_B.max())
    known = {name: x[:, :longest] for name, x in features.items()}
    drafter.prefill(state, tokens_BT[:, :longest], at_B, known, tokens_BT[rows_B, at_B])
    for accepted in ([0, 2, 4], [4, 4, 0], [1, 0, 3], [4, 4, 4]):
        greedy, random = drafter.propose(state), torch.Generator().manual_seed(0)
        drawn = drafter.propose(state, temperature, random)
        assert drawn.probs_BKV is not None
        for row, at in enumerate(at_B.tolist()):
            read = {name: x[row, :at] for name, x in features.items()}
            greedy_KV, drawn_KV = (
                logits_of(continued(tokens_BT[row, : at + 1], read, drafts.tokens_BK[row]), at + 1)
                for drafts in (greedy, drawn)
            )
            assert greedy.tokens_BK[row].tolist() == greedy_KV.argmax(-1).tolist()
            check_close(drawn.probs_BKV[row], (drawn_KV / temperature).softmax(-1))
        counts_B = torch.tensor(accepted).clamp(max=most) + 1
        read_BK = at_B[:, None] + torch.arange(most + 1)
        new = {name: x[rows_B[:, None], read_BK] for name, x in features.items()}
        drafter.accept(state, tokens_BT[rows_B[:, None], read_BK + 1], new, counts_B)
        at_B = at_B + counts_B
    require_recordable(drafter)


def continued(known_T: Tensor, read: Mapping[str, Tensor], drafts_K: Tensor) -> Sample:
    """Return known tokens and drafts as one sample; features that a draft may not read are large."""
    tokens_T, unread = torch.cat([known_T, drafts_K]), (len(drafts_K) + 1, -1)
    features = {
        n: torch.cat([x, torch.full_like(x[:1], 1e3).expand(unread)]) for n, x in read.items()
    }
    return Sample(SampleId("", 1), tokens_T, torch.ones(len(tokens_T)).bool(), features)

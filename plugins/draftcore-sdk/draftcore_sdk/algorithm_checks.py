"""What tests of an algorithm share beyond its suite: comparisons with a reference and with training.

`Golden` reads a reference implementation's recorded numbers, `ragged_rounds` decodes for a comparison
with training's own forward, `check_bf16` trains in half precision, `WarmStarts` begins from an export.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from draftcore.contracts.algorithm import Draft, DraftBatch, Drafter, Sample, SampleId, StepContext
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError
from draftcore_sdk.algorithm_fixtures import NO_DATA, WIDTH, MakeDraft, Tiny, accumulate
from draftcore_sdk.workbench import require_same_bits

# ---------------------------------------------------------------- recorded numbers


def cases(own: Path, algorithm: str) -> list[Path]:
    """Return the recorded cases of an algorithm, `NAME.json`: of DRAFTCORE_GOLDENS, or of `own`."""
    folder = Path(os.environ.get("DRAFTCORE_GOLDENS", own))
    return sorted(folder.glob(f"{algorithm}*.json")) or [folder / f"{algorithm}.json"]


class Golden:
    """One recorded case: settings, results and bounds in `NAME.json`, tensors in `NAME.safetensors`.

    `raw.I.*` are sample I's, `draft.*` the weights, `grad.*` their gradients.
    """

    def __init__(self, file: Path) -> None:
        self.folder, self.data = file.parent, json.loads(file.read_text(encoding="utf-8"))
        self.tensors = load_file(file.with_suffix(".safetensors"))
        numbers = re.fullmatch(
            r".*loss rtol ([\de.-]+), grads rtol ([\de.-]+) / atol ([\de.-]+)",
            self.data["tolerance"],
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


# ---------------------------------------------------------------- training's own forward


class Drafted(NamedTuple):
    """A row's known tokens and features (one fewer), and what was drafted for it: twice K tokens."""

    tokens_T: Tensor
    features: dict[str, Tensor]
    greedy_K: Tensor
    drawn_K: Tensor
    probs_KV: Tensor


def ragged_rounds(drafter: Drafter, vocab_size: int, temperature: float) -> Iterator[Drafted]:
    """Decode rows of several lengths, some accepted more often than others, in fp64; yield each row.

    The drawn tokens have this temperature, and their distributions with them.
    """
    generator, most = torch.Generator().manual_seed(5), drafter.num_drafts
    tokens_BT = torch.randint(vocab_size, (3, 40), generator=generator)
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
            drafts = greedy.tokens_BK[row], drawn.tokens_BK[row], drawn.probs_BKV[row]
            read = {name: x[row, :at] for name, x in features.items()}
            yield Drafted(tokens_BT[row, : at + 1], read, *drafts)
        counts_B = torch.tensor(accepted).clamp(max=most) + 1
        read_BK = at_B[:, None] + torch.arange(most + 1)
        new = {name: x[rows_B[:, None], read_BK] for name, x in features.items()}
        drafter.accept(state, tokens_BT[rows_B[:, None], read_BK + 1], new, counts_B)
        at_B = at_B + counts_B


def check_bf16(algorithm: Any, draft: Draft, batch: DraftBatch, context: StepContext) -> None:
    """Check that bf16 compute over fp32 weights keeps loss and gradients in fp32, and what they are.

    bf16 keeps 8 bits: some percent on a loss of random weights.
    """
    plain, gradients = accumulate(algorithm, draft, [batch], context)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed, rounded = accumulate(algorithm, draft, [batch], context)
    assert {tensor.dtype for tensor in (mixed.numerator, *rounded)} == {torch.float32}
    torch.testing.assert_close(mixed.numerator, plain.numerator, rtol=0.05, atol=0)
    for found, gradient in zip(rounded, gradients, strict=True):
        assert (found - gradient).norm() / gradient.norm() < 0.2


# ---------------------------------------------------------------- starting from an export


class WarmStarts:
    """What `warm_start` takes over from an export, and which options it refuses.

    `kept` are options of the draft that is exported, `free` those that a run may set all the same,
    `against` some that say otherwise than the export.
    """

    kept: ClassVar[dict[str, Any]] = {}
    free: ClassVar[dict[str, Any]] = {}
    against: ClassVar[dict[str, Any]] = {}

    def test_a_warm_start_takes_over_weights_and_shape_and_refuses_another(
        self, algorithm: Tiny, make_draft: MakeDraft, folder: Path, target: TargetSpec
    ) -> None:
        draft = make_draft(dtype=torch.float32, **self.kept)
        algorithm.plain.export_draft(draft, folder, "serving")

        def start(**options: Any) -> Any:
            return algorithm.made_with(algorithm.options(warm_start=str(folder), **options))

        again = start(**self.free).build_draft(target, NO_DATA)
        assert again.config == draft.config
        require_same_bits(again.module.state_dict(), draft.module.state_dict())
        assert start().feature_request(target).layers == tuple(draft.config["layers"])
        for name, value in self.against.items():
            with pytest.raises(UsageError, match=f"option {name} is"):
                start(**{name: value}).feature_request(target)

"""What is this draft's own: its loss, its two drafters, vLLM's files. The rest is in conformance."""

import math
from pathlib import Path

import pytest
import torch
from draftcore_hf.target import TransformersTarget
from draftcore_mlpspec.algorithm import MlpSpec, MlpSpecTree
from draftcore_mlpspec.model import MlpSpecDraft
from draftcore_mlpspec.options import MlpSpecOptions, MlpSpecTreeOptions
from draftcore_mlpspec.served import read
from draftcore_nn import losses
from draftcore_nn.batches import collate
from draftcore_nn.served import UnservableError
from draftcore_sdk.exports import change_config, change_tensors
from draftcore_sdk.targets import tiny_target
from torch import Tensor
from torch.nn.functional import gelu

from draftcore.contracts.algorithm import DataSummary, Draft, Sample, SampleId
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError

WIDTH, NO_DATA = 32, DataSummary("", 0, 0, 0, 0, {})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetSpec:
    folder = tiny_target(tmp_path_factory.mktemp("target"), hidden_size=WIDTH)
    return TransformersTarget(str(folder), device="cpu")


def random_draft(target: TargetSpec, options: MlpSpecOptions) -> Draft:
    torch.manual_seed(1)
    draft = MlpSpec(options).build_draft(target, NO_DATA)
    for weight in draft.module.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return draft


def samples(*lengths: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(2)
    return [
        Sample(
            SampleId(str(length), 1),
            torch.randint(250, (length,), generator=generator),
            torch.rand(length, generator=generator) < 0.7,
            {"last_hidden": torch.randn(length, WIDTH, generator=generator).double()},
        )
        for length in lengths
    ]


def written_out(module: MlpSpecDraft, batch: list[Sample]) -> Tensor:
    """The mean over heads of each head's mean cross entropy, a position at a time, by the paper."""
    shape, read = module.shape, dict(module.named_parameters())
    state_weight = 0.5 ** (0.5 / shape.num_heads)
    emb_weight = (1 - state_weight**2) ** 0.5 * (shape.inner_size / 2) ** 0.5
    found: list[list[Tensor]] = [[] for _ in range(shape.num_heads)]
    for sample in batch:
        for t, state in enumerate(sample.features["last_hidden"]):
            if shape.scale_input:
                state = state / (state.square().mean() + 1e-6).sqrt() / math.sqrt(2)
            for i in range(min(shape.num_heads, len(sample.token_ids_T) - 2 - t)):
                one, proj = (0, min(i, 1)) if shape.tied else (i, i)
                moved = state_weight * read[f"proj.{proj}.weight"] @ state
                moved = (
                    moved + emb_weight * read[f"emb.{one}.weight"][sample.token_ids_T[t + 1 + i]]
                )
                moved = moved / (moved.square().mean() + 1e-6 * state_weight**2).sqrt()
                state = gelu(moved * read[f"ln.{one}.weight"] + read[f"ln.{one}.bias"])
                if sample.loss_mask_T[t + 2 + i]:
                    scores = read[f"head.{one}.weight"] @ state
                    found[i].append(-scores.log_softmax(-1)[sample.token_ids_T[t + 2 + i]])
    return torch.stack([torch.stack(losses).mean() for losses in found]).mean()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scale_input", [True, False])
def test_loss_and_gradients_are_the_published_formula_in_slices_of_rows_too(
    tied: bool, scale_input: bool, target: TargetSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = MlpSpecOptions(tied=tied, scale_input=scale_input, inner_size=20)
    draft = random_draft(target, options)
    draft.module.double()
    assert isinstance(draft.module, MlpSpecDraft)
    batch, weights = samples(11, 4, 1, 7), list(draft.module.parameters())
    expected = written_out(draft.module, batch)
    gradients = torch.autograd.grad(expected, weights)
    for elements in (1 << 26, 5 * target.vocab_size):
        monkeypatch.setattr(losses, "LOGIT_ELEMENTS", elements)
        output = draft.module(collate(batch))
        loss = sum(weight * top / below for top, below, weight in output.terms)
        torch.testing.assert_close(loss, expected)  # fp64: 1e-7 relative
        for found, wanted in zip(torch.autograd.grad(loss, weights), gradients, strict=True):
            torch.testing.assert_close(found, wanted)


def test_the_best_children_of_a_tree_are_the_chain_and_siblings_differ(target: TargetSpec) -> None:
    options = MlpSpecTreeOptions(branches=(3, 2), num_heads=3)
    draft = random_draft(target, options)
    chain = MlpSpec(options).drafter(draft, target.load_model())
    tree = MlpSpecTree(options).drafter(draft, target.load_model())
    hidden_BTH = torch.randn(2, 1, WIDTH)
    given = torch.zeros(2, 1).long(), torch.ones(2).long(), {"last_hidden": hidden_BTH}
    states = [drafter.allocate(2, 9) for drafter in (chain, tree)]
    for drafter, state in zip((chain, tree), states, strict=True):
        drafter.prefill(state, *given, torch.tensor([5, 6]))
    proposal = tree.propose(states[1])
    assert proposal.parents_BK is not None
    assert proposal.parents_BK[0].tolist() == [-1, -1, -1, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    # Node 0 is the first of the first three, 3 the first of its two, 9 the only one below.
    assert torch.equal(proposal.tokens_BK[:, [0, 3, 9]], chain.propose(states[0]).tokens_BK)
    drawn = tree.propose(states[1], 1.0, torch.Generator().manual_seed(3))
    assert drawn.probs_BKV is not None
    for row, probs_KV in zip(drawn.tokens_BK.tolist(), drawn.probs_BKV, strict=True):
        assert len(set(row[:3])) == 3
        first, second = probs_KV[0].clone(), probs_KV[1]
        first[row[0]] = 0
        torch.testing.assert_close(second, first / first.sum())


def test_a_draft_as_it_is_published_is_read_and_what_vllm_would_not_is_named(
    target: TargetSpec, tmp_path: Path
) -> None:
    draft, algorithm = random_draft(target, MlpSpecOptions()), MlpSpec(MlpSpecOptions())
    algorithm.export_draft(draft, tmp_path, "serving")
    change_config(tmp_path, inner_dim=0)
    change_tensors(
        tmp_path, lambda t: [t.update({f"speculator.{name}": t.pop(name)}) for name in [*t]]
    )
    again = algorithm.import_draft(tmp_path, target)
    assert again.config == draft.config
    for name, tensor in read(tmp_path, "vllm").tensors.items():
        assert torch.equal(tensor, draft.module.get_parameter(name))
        assert torch.equal(tensor, again.module.get_parameter(name))
    change_config(tmp_path, tie_weights=False)
    with pytest.raises(UnservableError, match=r"emb\.1\.weight .* is missing"):
        read(tmp_path, "vllm")
    with pytest.raises(UsageError, match=r"missing emb\.1\.weight"):
        algorithm.import_draft(tmp_path, target)

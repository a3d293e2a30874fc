"""The pairs that are drawn, a naive loss in fp64, two formulations' recorded numbers, and the decoder.

Recorded numbers are of DRAFTCORE_GOLDENS, or the project's own `tests/goldens/`: `peagle` of SpecForge,
`peagle2` of speculators. Their pairs are given. Ours differ from both in that the last row of a sample,
which has no next token, teaches nothing: for SpecForge's numbers, in which it does, a token is added.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_eagle3.serving import config_fields
from draftcore_nn import masks
from draftcore_nn.vocabulary import to_ids
from draftcore_peagle.algorithm import PEagle
from draftcore_peagle.attention import attend, rule_of, seen_by
from draftcore_peagle.config import PEagleConfig
from draftcore_peagle.model import PEagleDraft
from draftcore_peagle.options import PEagleOptions
from draftcore_peagle.pairs import Drawn, Pairs, draw, draw_pairs
from draftcore_sdk import comparisons
from draftcore_sdk.algorithm_fixtures import (
    MakeDraft,
    MakeSamples,
    MakeTarget,
    use_exact_frequencies,
)
from draftcore_sdk.comparisons import Heads, require_naive, require_trained_drafts
from safetensors.torch import load_file
from torch import Tensor

from draftcore.contracts.algorithm import Draft, DraftBatch, Sample, SampleId, StepContext
from draftcore.contracts.target import TargetSpec

SEED = 11
CONTEXT = StepContext(step=1, total_steps=1, seed=SEED)
OPTIONS = PEagleOptions(num_depths=4)

# ------------------------------------------------------------ what is drawn


def test_depths_are_drawn_from_learned_rows_of_the_sample_and_each_has_those_before_it() -> None:
    learned = torch.rand(60, generator=torch.Generator().manual_seed(1)) < 0.8
    learned[0], learned[-1] = True, True
    for options in (OPTIONS, PEagleOptions(down_sample_ratio=1.0), PEagleOptions(max_anchors=9)):
        anchors, depths = draw_pairs(learned, options, torch.Generator().manual_seed(2))
        drawn = set(zip(anchors.tolist(), depths.tolist(), strict=True))
        assert len(drawn) == len(anchors) > 0
        for anchor, depth in drawn:
            assert anchor >= 0
            assert learned[anchor + depth]
            assert depth == 1 or (anchor, depth - 1) in drawn
        seeds = min(int(learned.sum()), options.max_anchors or 60)
        there = seeds
        for depth in range(1, options.num_depths):
            ratio = max(options.down_sample_ratio**depth, options.down_sample_ratio_min)
            count = int((depths == depth).sum())
            assert count <= int((seeds - depth) * ratio)
            assert count == min(there - (depth == 1), int((seeds - depth) * ratio)) or depth > 1
            there = count
    for nothing in (torch.zeros(5).bool(), torch.tensor([True]), torch.zeros(0).bool()):
        assert len(draw_pairs(nothing, OPTIONS, torch.Generator())[0]) == 0


def test_a_draw_depends_on_run_seed_sample_and_epoch_alone(make_samples: MakeSamples) -> None:
    samples = make_samples(30, 40)

    def drawn(samples: Sequence[Sample], seed: int = SEED) -> list[list[Any]]:
        batch = PEagle(OPTIONS).collate(samples)
        return [[x.tolist() for x in one] for one in draw(batch, OPTIONS, seed)]

    first, second = drawn(samples)
    assert drawn(samples[1:]) == [second]
    assert first not in drawn(samples, seed=SEED + 1)
    for other in (SampleId("3.9", 1), SampleId("3.0", 2)):
        assert drawn([Sample(other, *list(vars(samples[0]).values())[1:])]) != [first]


# ------------------------------------------------------------ the loss, anew


class Naive(comparisons.Naive):
    """The algorithm straight from its description: one pair at a time."""

    def __init__(self, draft: Draft, target: TargetSpec) -> None:
        assert isinstance(draft.module, PEagleDraft)
        super().__init__(draft.module)
        self.module, self.target = draft.module, target

    def qkv(
        self, name: str, embedding: Tensor, hidden: Tensor, position: int
    ) -> tuple[Heads, Heads, Heads]:
        x = self.rms(hidden if name != "midlayer" else embedding, f"{name}.input_layernorm")
        if name == "midlayer":
            x = torch.cat([x, self.rms(hidden, f"{name}.hidden_norm")])
        q, k, v = (
            list(self.linear(f"{name}.self_attn.{n}_proj", x).view(-1, self.config.head_dim))
            for n in "qkv"
        )
        return [self.rope(head, position) for head in q], [self.rope(h, position) for h in k], v

    def logits(self, sample: Sample, drawn: Drawn) -> dict[tuple[int, int], Tensor]:
        tokens = [*sample.token_ids_T[1:].tolist(), 0]
        chosen = [(t, 0) for t in range(len(tokens))]
        chosen += list(zip(drawn[0].tolist(), drawn[1].tolist(), strict=True))
        mask = self.w["mask_hidden"][0, 0].chunk(3)
        hidden, embedding = {}, {}
        for a, d in chosen:
            parts = [sample.features[f"hidden.{layer}"][a] for layer in self.config.layers]
            parts = list(mask) if d else parts
            if self.config.fc_norm:
                parts = [self.rms(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
            hidden[a, d] = self.linear("fc", torch.cat(parts))
            embedding[a, d] = self.w["embed_tokens"][self.config.mask_token_id if d else tokens[a]]
        for name in ["midlayer", *(f"layers.{i}" for i in range(1, self.config.num_layers))]:
            made = {(a, d): self.qkv(name, embedding[a, d], hidden[a, d], a + d) for a, d in chosen}
            for a, d in chosen:
                seen = [(j, 0) for j in range(a + 1)] + [(a, k) for k in range(1, d + 1)]
                keys, values = [made[p][1] for p in seen], [made[p][2] for p in seen]
                attended = self.attention(made[a, d][0], keys, values)
                x = hidden[a, d] + self.linear(f"{name}.self_attn.o_proj", attended)
                inner = self.rms(x, f"{name}.post_attention_layernorm")
                hidden[a, d] = x + self.mlp(f"{name}.mlp", inner)
        return {p: self.linear("lm_head", self.rms(x, "norm")) for p, x in hidden.items()}

    def loss(self, batch: DraftBatch, samples: Sequence[Sample], skip: bool) -> Tensor:
        terms, ids = list[Tensor](), self.module.token_ids()
        assert ids is not None
        for row, drawn in enumerate(draw(batch, self.module.options, SEED)):
            for (a, d), logits in self.logits(samples[row], drawn).items():
                if not batch.loss_mask_BT[row, a + d]:
                    continue
                z = self.target.head().double() @ samples[row].features["last_hidden"][a + d + 1]
                z = z * self.target.logit_scale
                cap = self.target.logit_softcap
                z = z if cap is None else cap * (z / cap).tanh()
                if not skip or int(z.argmax()) in ids.tolist():
                    terms.append(-(z[ids].softmax(0) * logits.log_softmax(0)).sum())
        return torch.stack(terms).mean()


VARIANTS: dict[str, tuple[dict[str, Any], float, float | None]] = {
    "plain": ({}, 1.0, None),
    "all rows, normed features": ({"skip_unknown": False, "fc_norm": True}, 1.0, None),
    "scaled, capped, predicted": ({"supervise": "predicted", "num_layers": 3}, 3.0, 0.7),
}


@pytest.mark.parametrize(("options", "scale", "cap"), VARIANTS.values(), ids=VARIANTS.keys())
def test_loss_and_gradients_equal_a_naive_draft(
    options: dict[str, Any], scale: float, cap: float | None, make_target: MakeTarget,
    make_draft: MakeDraft, make_samples: MakeSamples,
) -> None:  # fmt: skip
    target = make_target()
    target.logit_scale, target.logit_softcap = scale, cap
    draft, samples = make_draft(of=target, **options), make_samples(11, 2, 8)
    use_exact_frequencies(draft.module)
    algorithm = PEagle(PEagleOptions(**options))
    batch = algorithm.collate(samples)
    output = algorithm.forward_loss(draft, batch, CONTEXT)
    theirs = Naive(draft, target).loss(batch, samples, options.get("skip_unknown", True))
    require_naive(draft, output, theirs, rtol=1e-9)


# ------------------------------------------------------------ the tiles of FlexAttention


def long_pairs() -> Pairs:
    learned = torch.rand(2, 300, generator=torch.Generator().manual_seed(3)) < 0.6
    learned[1, 150:] = False
    drawn = [draw_pairs(row, OPTIONS, torch.Generator().manual_seed(4)) for row in learned]
    return Pairs.of(learned, drawn, OPTIONS.num_depths, tiled=True)


def test_listed_tiles_are_those_in_which_something_is_seen_and_whole_ones_hide_nothing() -> None:
    pairs = long_pairs()
    batch, count = pairs.anchor_BE.shape
    table = masks.dense(rule_of(pairs.anchor_BE, pairs.depth_BE), (batch, count, count))
    size = -(-count // masks.TILE)
    cells = torch.zeros(batch, size * masks.TILE, size * masks.TILE, dtype=torch.bool)
    cells[:, :count, :count] = table[:, 0]
    cells[:, count:, :count] = table[:, 0, -1:]  # past the last query, nothing is computed
    cells = cells.view(batch, size, masks.TILE, size, masks.TILE).transpose(2, 3).flatten(3)
    found = []
    for kind in ("kv", "full_kv"):
        numbers, indices = (pairs.tiles[f"{kind}_{n}"] for n in ("num_blocks", "indices"))
        listed_BIJ = torch.zeros(batch, size, size, dtype=torch.bool)
        for b, i in ((b, i) for b in range(batch) for i in range(size)):
            listed_BIJ[b, i, indices[b, 0, i, : numbers[b, 0, i]].long()] = True
        found.append(listed_BIJ)
    partly, whole = found
    assert not (partly & whole).any()
    assert not (whole & ~cells.all(-1)).any()
    assert not (cells.any(-1) & ~(partly | whole)).any()
    assert int((partly & ~cells.any(-1)).sum()) <= 2 * batch, "tiles are visited for nothing"


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.long), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_a_compiled_draft_attends_by_tiles_to_what_the_table_says(device: str) -> None:
    pairs = long_pairs().to(device)
    batch, count = pairs.anchor_BE.shape
    made = [torch.randn(batch, count, heads, 16, device=device) for heads in (4, 2, 2)]

    def attended(tensors: list[Tensor], pairs: Pairs) -> Tensor:
        seen = seen_by(pairs.anchor_BE, pairs.depth_BE, pairs.tiles)
        return attend(tensors[0], tensors[1], tensors[2], seen)

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(attended, backend=backend, dynamic=True, fullgraph=True)
    with torch.no_grad():
        found = compiled(made, pairs)
    torch.testing.assert_close(found, attended(made, pairs), atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------ decoding


def test_proposals_equal_training_over_ragged_rounds(
    make_draft: MakeDraft, target: TargetSpec
) -> None:
    """The last known row at depths 0 to 3: none reads a draft."""
    draft = make_draft()
    module: Any = draft.module
    ids = module.token_ids()

    def trained(sample: Sample, known: int) -> Tensor:
        batch, deep = PEagle(OPTIONS).collate([sample]), torch.arange(1, 4)
        drawn = (torch.full_like(deep, known - 2), deep)
        pairs = Pairs.of(batch.loss_mask_BT, [drawn], 4, tiled=False)
        hidden_EH = module.hidden(batch, pairs, module.row_tokens(batch))[0]
        chosen = [known - 2, *range(len(hidden_EH) - 3, len(hidden_EH))]
        logits_KV = torch.full((4, 48), -torch.inf, dtype=torch.float64)
        logits_KV[:, ids] = module.lm_head(hidden_EH[chosen])
        return logits_KV

    drafter = PEagle(OPTIONS).drafter(draft, target.load_model())
    require_trained_drafts(drafter, 48, 0.7, trained)


# ------------------------------------------------------------ recorded numbers

OWN = Path(__file__).parents[3] / "tests" / "goldens"
LAYERS = (1, 3, 5)


class Golden:
    """A case, with our objects made of it; its layers' names are those of published drafts."""

    def __init__(self, name: str, **options: Any) -> None:
        file = comparisons.cases(OWN, name)[0]
        self.data, self.tensors = (
            json.loads(file.read_text()),
            load_file(file.with_suffix(".safetensors")),
        )
        written = self.data["draft_config"]
        stated = {**written, **written.get("transformer_layer_config", {})}
        stated["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in LAYERS]
        config = PEagleConfig(
            **config_fields(stated, file, 8, {}), mask_token_id=self.data["mask_token_id"]
        )
        depths = self.data["num_depths"]
        self.draft = PEagleDraft(
            config, PEagleOptions(num_depths=depths, **options),
            self.tensors["draft.embed_tokens.weight"], self.tensors["target.lm_head.weight"],
            to_ids(self.tensors["draft.d2t"]),
        )  # fmt: skip
        weights = {n: self.tensors[f"draft.{self.named(n)}"] for n in self.draft.state_dict()}
        self.draft.load_state_dict(weights, strict=True)

    def named(self, name: str) -> str:
        return name.replace("midlayer", "layers.0").replace("embed_tokens", "embed_tokens.weight")

    def batch(self, *parts: tuple[Tensor, Tensor, Tensor, Tensor]) -> DraftBatch:
        """A batch of samples: tokens, the masks of their rows, features, last states."""
        samples = []
        for number, (tokens, mask, states, last) in enumerate(parts):
            split = zip(LAYERS, states.chunk(3, -1), strict=True)
            features = {f"hidden.{layer}": part for layer, part in split} | {"last_hidden": last}
            samples.append(Sample(SampleId(str(number), 1), tokens, mask.bool(), features))
        return PEagle(OPTIONS).collate(samples)

    def pairs(self, anchors: str, first: int, stop: int) -> Drawn:
        """Drawn above depth 0 of the rows from `first` on, as rows of their own sample."""
        anchor, depth = (self.tensors[f"{anchors}.{n}"] for n in ("anchor_pos", "depth"))
        chosen = (depth > 0) & (anchor >= first) & (anchor < stop)
        return anchor[chosen] - first, depth[chosen]

    def check_counts(self, counts: Mapping[str, tuple[Tensor, Tensor]], metrics: Any) -> None:
        for k in range(self.data["num_depths"]):
            hits, total = map(float, counts[f"accuracy_{k}"])
            assert total == metrics[f"position_{k}_acc_total"]
            if (
                self.draft.options.skip_unknown
            ):  # else a target's unknown token is a miss here alone
                assert hits == metrics[f"position_{k}_acc_sum"]

    def check_gradients(
        self, norms: Mapping[str, float], prefix: str = "", but_for: int | None = None
    ) -> None:
        for name, parameter in self.draft.named_parameters():
            if not parameter.requires_grad:
                continue
            assert parameter.grad is not None
            gradient, norm = parameter.grad.clone(), norms[self.named(name)]
            if name == "embed_tokens" and but_for is not None:
                gradient[but_for] = 0
            assert float(gradient.norm()) == pytest.approx(norm, rel=1e-4), name
            if (theirs := self.tensors.get(f"{prefix}{self.named(name)}")) is not None:
                assert float((gradient - theirs).norm()) < 1e-5 * norm, name


def test_golden_of_specforge() -> None:
    """Its last row has a row of zeros for a teacher, and the embedding of token 0 no gradient."""
    golden = Golden("peagle")
    given = [
        golden.tensors[f"batch.{n}"][0]
        for n in ("input_ids", "loss_mask", "hidden_state", "target")
    ]
    tokens, mask, states, last = (torch.cat([x, torch.zeros_like(x[:1])]) for x in given)
    output = golden.draft.loss_of(
        golden.batch((tokens, mask, states, last)), [golden.pairs("cod", 0, len(mask))]
    )
    loss, expected = output.numerator / output.denominator, golden.data["expected"]
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == pytest.approx(expected["loss"], rel=1e-6)
    assert float(output.denominator) == expected["full_acc_total"]
    golden.check_counts(output.counts, expected)
    golden.check_gradients(golden.data["grad_norms"], "grad.", but_for=0)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", ["", "other_cod_draw(ratio 0.6, min 0.3, max_anchors 9)"])
def test_golden_of_speculators(case: str, compiled: bool) -> None:
    """Two documents side by side there; row t has the mask of token t + 1; KL is less the entropy."""
    golden = Golden("peagle2", train_head=False, skip_unknown=False)
    if compiled:
        golden.draft.compile(dynamic=True)
    parts, drawn, first = [], [], 0
    for number in (0, 1):
        raw = {
            n.split(".")[2]: t for n, t in golden.tensors.items() if n.startswith(f"raw.{number}.")
        }
        last = raw["target_last_hidden_states"]
        parts.append((raw["input_ids"], raw["loss_mask"].roll(-1), raw["hidden_states"], last))
        stop = first + len(last) - 1
        drawn.append(golden.pairs("alt.max_anchors.cod" if case else "cod", first, stop))
        first = stop
    output = golden.draft.loss_of(golden.batch(*parts), drawn)
    expected = golden.data["alternatives_same_inputs"][case] if case else golden.data["expected"]
    (output.numerator / (output.denominator + 1e-5)).backward()  # type: ignore[no-untyped-call]
    entropy = sum(float(x) for x in entropies(golden, parts, drawn))
    found = float(output.numerator.detach()) - entropy
    assert found == pytest.approx(expected["numerators"]["kl_div"], rel=1e-5)
    assert float(output.denominator) == expected["denominator"]
    golden.check_counts(output.counts, expected["metrics"])
    golden.check_gradients(expected["grad_norms"], "" if case else "grad.")


def entropies(golden: Golden, parts: Sequence[Any], drawn: Sequence[Drawn]) -> list[Tensor]:
    """The teacher's entropy over draft tokens, at each pair that is learned."""
    head_UH = golden.tensors["target.lm_head.weight"][to_ids(golden.tensors["draft.d2t"])]
    found = []
    for (_, mask, _, last), (anchors, depths) in zip(parts, drawn, strict=True):
        places = torch.cat([torch.arange(len(mask) - 1), anchors + depths])
        places = places[mask[places].bool()]
        logs = (last[places + 1] @ head_UH.T).log_softmax(-1)
        found.append(-(logs.exp() * logs).sum())
    return found

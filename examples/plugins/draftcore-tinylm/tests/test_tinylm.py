"""EAGLE-3 as it is, on a target that is not transformers': trained, resumed, evaluated, exported.

`nox -s foreign` runs this where no transformers is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_eval.verb import evaluate
from draftcore_tinylm.make import make
from draftcore_tinylm.options import RowsOptions
from draftcore_tinylm.rows import TokenRows
from draftcore_tinylm.target import TinyModel, TinyTarget
from safetensors.torch import load_file

import draftcore
from draftcore.contracts.capture import FeatureRequest
from draftcore.errors import UsageError

ALL = FeatureRequest((0, 1, 2, 3), True, "float32")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tinylm")
    make(made, steps=100, rows=600)
    return made


@pytest.fixture(scope="session")
def model(folder: Path) -> TinyModel:
    return TinyModel(TinyTarget(str(folder), device="cpu"))


# ------------------------------------------------------------ a draft for it


@pytest.fixture
def overrides(folder: Path, tmp_path: Path) -> list[str]:
    return [
        f"run={tmp_path / 'run'}", f"target.path={folder}", f"data.train={folder / 'train.jsonl'}",
        f"data.eval={folder / 'eval.jsonl'}", "train.device=cpu", "target.device=cpu",
    ]  # fmt: skip


RUN = Path(__file__).parents[1] / "run.yaml"


def test_eagle3_trains_on_it_resumes_and_decodes_as_the_target_does(
    overrides: list[str], tmp_path: Path
) -> None:
    """Few steps, so that some drafts are refused, and what the target read of them has to be undone."""
    held_out = ["train.eval_every=18", "train.eval_samples=8", "train.eval_prompts=4"]
    overrides += [*held_out, "train.schedule=constant", "train.warmup_ratio=0"]  # of any total
    whole = draftcore.train(RUN, *overrides, "train.max_steps=36")
    parted = [*overrides, f"run={tmp_path / 'parted'}"]
    assert draftcore.train(RUN, *parted, "train.max_steps=18").reason == "complete"
    resumed = draftcore.train(RUN, *parted, "train.max_steps=36")
    files = [made.checkpoints[""] / "draft.safetensors" for made in (whole, resumed)]
    ours, theirs = map(load_file, files)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours), "to the bit"

    (report,) = evaluate(RUN, *overrides)
    assert report.lossless
    assert report.prompts == 50
    refused = sum(row["rounds"] for row in report.rows) * 5 - report.tokens
    assert 1.2 < report.acceptance_length < 4.5
    assert refused > 100
    (folder,) = draftcore.export(RUN, *overrides)
    (again,) = evaluate(RUN, *overrides, exported=folder)
    assert again.acceptance_length == report.acceptance_length
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 48
    make(other := tmp_path / "other", steps=1, rows=8)
    with pytest.raises(UsageError, match="target: weights"):  # another target is told from it
        draftcore.train(RUN, *parted, "train.max_steps=54", f"target.path={other}")


def test_it_says_what_is_missing(overrides: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\(tinylm\) has no num_attention_heads"):
        draftcore.train(RUN, *overrides, "algorithm.options={layers: [0, 1, 2]}")
    with pytest.raises(UsageError, match=r"python -m draftcore_tinylm\.make"):
        draftcore.train(RUN, *overrides, f"target.path={tmp_path}")
    with pytest.raises(UsageError, match=r"layers 0\.\.3, and \[7\] were asked for"):
        TinyTarget(str(overrides[1].partition("=")[2])).require_layers(
            FeatureRequest((7,), True, "float32")
        )


# ------------------------------------------------------------ the target


def test_reading_on_from_the_cache_is_reading_the_whole_also_after_refused_tokens(
    model: TinyModel,
) -> None:
    rows = torch.randint(40, (3, 12), generator=torch.Generator().manual_seed(1))
    whole = model.features(rows, torch.tensor([12, 12, 12]), ALL)
    cache = model.allocate(3, 16)
    model.forward(cache, rows[:, :5], torch.zeros(3, dtype=torch.long), 5, ALL)
    starts = torch.tensor([5, 3, 4])  # the last tokens that two rows read count as refused
    for step in range(3):
        at = starts + 2 * step
        window = torch.stack([rows[b, at[b] : at[b] + 2] for b in range(3)])
        drafted = torch.cat(
            [window, torch.zeros(3, 2, dtype=torch.long)], 1
        )  # two that are refused
        read = model.forward(cache, drafted, at, int(at.max()) + 4, ALL)
        for name, value_BTH in whole.items():
            for b in range(3):
                expected = value_BTH[b, at[b] : at[b] + 2]
                torch.testing.assert_close(read[name][b, :2], expected)


def test_padding_behind_a_row_changes_nothing_that_is_captured(model: TinyModel) -> None:
    row = torch.randint(40, (1, 9), generator=torch.Generator().manual_seed(2))
    padded = torch.nn.functional.pad(row, (0, 5))
    alone, beside = (model.features(x, torch.tensor([9]), ALL) for x in (row, padded))
    for name, value in alone.items():
        torch.testing.assert_close(beside[name][:, :9], value)


def test_it_generates_what_its_head_says_up_to_an_end_token(model: TinyModel) -> None:
    prompts = [[1, 9, 20], [3, 30, 11, 7], [2, 5]]
    for prompt, new in zip(prompts, model.generate(prompts, 40), strict=True):
        tokens = torch.tensor([[*prompt, *new]])
        last = model.features(tokens, torch.tensor([tokens.shape[1]]), ALL)["last_hidden"]
        best = (last[0] @ model.spec.head().T).argmax(-1).tolist()
        assert new == best[len(prompt) - 1 : -1]
        assert len(new) == 40 or (
            new[-1] in model.end_tokens and not model.end_tokens & {*new[:-1]}
        )
        assert model.top2_gap(prompt) > 0


def test_trees_and_tokenizers_are_refused(model: TinyModel) -> None:
    one = torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(UsageError, match="drafts trees"):
        model.forward(model.allocate(1, 4), one, one[0], 1, ALL, torch.ones(1, 1, 1).bool())
    with pytest.raises(UsageError, match=r"data\.name=token-rows"):
        model.spec.load_tokenizer()


# ------------------------------------------------------------ the rows


GOOD = '{"input_ids": [5, 9, 2], "loss_mask": [0, 1, 1]}'


def read(tmp_path: Path, *lines: str, **options: Any) -> TokenRows:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(lines))
    return TokenRows(RowsOptions(train=str(file), eval=str(file), **options), vocab_size=40)


def test_rows_are_what_the_file_says(tmp_path: Path) -> None:
    data = read(tmp_path, GOOD, '{"input_ids": [7, 8, 2, 2], "loss_mask": [0, 0, 1, 0]}')
    rows = data.samples("train")
    assert [rows.tokens(row).tolist() for row in range(2)] == [[5, 9, 2], [7, 8, 2, 2]]
    assert rows.loss_mask(1).tolist() == [False, False, True, False]
    assert (rows.summary.tokens, rows.summary.loss_tokens, rows.summary.max_length) == (7, 3, 4)
    assert rows.summary.token_counts == {2: 2, 9: 1}
    assert data.prompts().token_ids == [[5], [7, 8]]
    assert data.prompts(1).token_ids == [[5]]
    other = read(tmp_path, GOOD, GOOD).samples("train")
    assert len({*rows.feature_ids, *other.feature_ids}) == 4, "each row of each data has its own"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "rows.jsonl:2: "),
        ('{"input_ids": [1, 2]}', "rows.jsonl:2: 'loss_mask'"),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "2 input_ids and 1 loss_mask"),
        ('{"input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 1, 1, 1, 1]}', "of 2 to 4 each"),
        ('{"input_ids": [1, 40], "loss_mask": [0, 1]}', "none of the target's 40"),
        ('{"input_ids": [1, 2], "loss_mask": [0, 0]}', "no token that is learned"),
    ],
)
def test_a_line_that_is_no_row_is_named(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        read(tmp_path, GOOD, line, max_length=4).samples("train")
    with pytest.raises(UsageError, match="has no rows"):
        read(tmp_path).samples("eval")

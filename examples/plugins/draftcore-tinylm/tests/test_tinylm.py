"""The target reads on from what it keeps; rows are what their file says. A draft: `without_transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_tinylm.make import make
from draftcore_tinylm.options import RowsOptions
from draftcore_tinylm.rows import TokenRows
from draftcore_tinylm.target import TinyModel, TinyTarget

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


def test_trees_tokenizers_and_layers_that_are_not_there_are_refused(model: TinyModel) -> None:
    one = torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(UsageError, match="drafts trees"):
        model.forward(model.allocate(1, 4), one, one[0], 1, ALL, torch.ones(1, 1, 1).bool())
    with pytest.raises(UsageError, match=r"data\.name=token-rows"):
        model.spec.load_tokenizer()
    with pytest.raises(UsageError, match=r"layers 0\.\.3, and \[7\] were asked for"):
        model.spec.require_layers(FeatureRequest((7,), True, "float32"))


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

"""What every kind of samples must do: the rows of a run. See `draftcore_sdk` for how to use it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftcore.contracts.algorithm import DataSummary
from draftcore.contracts.run import OpenRun, RunSamples, Samples
from draftcore.errors import UsageError
from draftcore_sdk.running import open_run
from draftcore_sdk.suite import Suite, offer_of
from draftcore_sdk.targets import conversations, tiny_target


class SamplesSuite(Suite):
    """Standard tests of samples: rows with their digest, to train on and held out, and prompts.

    A subclass sets `plugin`, and `data_options` unless it reads lines of JSON.
    """

    def data_options(self, folder: Path, seed: int) -> Mapping[str, Any]:
        """Write four rows or more to train on, and to hold out, others for another seed.

        Return the section `data` that names them.
        """
        answers = [
            f"{word} are {seed + n}" for n, word in enumerate(["one", "two", "six", "ten", "dot"])
        ]
        train = conversations(folder / "train.jsonl", answers)
        held_out = conversations(folder / "eval.jsonl", answers[::-1])
        return {"train": str(train), "eval": str(held_out)}

    @pytest.fixture
    def base(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A folder for all tests of the process, with a target."""
        base = tmp_path_factory.getbasetemp()
        if not (base / "samples-target").exists():
            tiny_target(base / "samples-target")
        return base

    @contextmanager
    def opened_in(self, base: Path, folder: Path, options: Mapping[str, Any]) -> Iterator[OpenRun]:
        """Open a run in a folder with these options."""
        offer = offer_of(self.plugin, "samples", self.name)
        section = {**options, "name": offer.name, "plugin": self.plugin.split()[0]}
        target = {"path": str(base / "samples-target"), "device": "cpu"}
        extras = self.plugin.split()[1:]
        with open_run(
            base, folder, self.plugin, target=target, data=section, plugins=extras
        ) as run:
            yield run

    @contextmanager
    def rows_of(self, base: Path, folder: Path, seed: int = 0) -> Iterator[RunSamples]:
        """Open a run's rows, which are written beside it."""
        data = folder / f"data-{seed}"
        data.mkdir(parents=True, exist_ok=True)
        options = {**self.data_options(data, seed), **self.options}
        with self.opened_in(base, folder, options) as run:
            try:
                rows = run.data
                rows.samples("train")
            except UsageError as error:
                if type(self).data_options is SamplesSuite.data_options and not self.options:
                    pytest.skip(f"only its author can write rows: override data_options; {error}")
                raise
            yield rows

    @pytest.fixture
    def rows(self, base: Path, tmp_path: Path) -> Iterator[RunSamples]:
        with self.rows_of(base, tmp_path) as rows:
            yield rows

    # ------------------------------------------------------------ rows

    def test_rows_and_digest_are_the_same_whenever_they_are_opened(
        self, base: Path, tmp_path: Path
    ) -> None:
        """In the run's folder, and anew in another's."""
        seen = []
        for folder in ("first", "first", "other"):
            with self.rows_of(base, tmp_path / folder) as rows:
                seen += [contents(rows.samples("train")), contents(rows.samples("train"))]
        assert all(one == seen[0] for one in seen[1:])

    def test_other_rows_have_another_digest(self, base: Path, tmp_path: Path) -> None:
        seen = []
        for seed in (0, 1):
            with self.rows_of(base, tmp_path, seed) as rows:
                seen.append(rows.samples("train"))
                if contents(seen[-1]) == contents(seen[0]) and seed:
                    pytest.skip("one set of rows alone was named")
        assert seen[0].summary.fingerprint != seen[1].summary.fingerprint
        assert not {*seen[0].feature_ids} & {*seen[1].feature_ids}, "a store would mix them up"

    def test_tokens_and_masks_are_as_long_as_said(self, base: Path, tmp_path: Path) -> None:
        data = tmp_path / "data-0"
        data.mkdir()
        options = {**self.data_options(data, 0), **self.options}
        with self.opened_in(base, tmp_path, options) as run, self.rows_of(base, tmp_path) as rows:
            for part in ("train", "eval"):
                samples = rows.samples(part)
                count = len(samples.lengths)
                assert count == len(samples.feature_ids) == len({*samples.feature_ids}) > 0
                for row, length in enumerate(samples.lengths.tolist()):
                    tokens_T, mask_T = samples.tokens(row), samples.loss_mask(row)
                    assert tokens_T.shape == mask_T.shape == (length,)
                    assert tokens_T.dtype == np.int64
                    assert mask_T.dtype == np.bool_
                    assert 0 < length <= rows.longest
                    assert 0 <= tokens_T.min() <= tokens_T.max() < run.target.vocab_size
                    assert mask_T.any(), f"row {row} has nothing to learn: leave it out"
                    assert isinstance(samples.images(row), tuple)

    def test_the_summary_counts_its_rows(self, rows: RunSamples) -> None:
        samples = rows.samples("train")
        learned = Counter[int]()
        for row in range(len(samples.lengths)):
            learned.update(samples.tokens(row)[samples.loss_mask(row)].tolist())
        summary, lengths = samples.summary, samples.lengths
        sizes = (summary.samples, summary.tokens, summary.loss_tokens, summary.max_length)
        right = (len(lengths), int(lengths.sum()), learned.total(), int(lengths.max()))
        assert sizes == right, f"samples, tokens, tokens to learn and the longest are {right}"
        assert {int(k): v for k, v in summary.token_counts.items()} == learned
        assert DataSummary.from_json(json.loads(json.dumps(summary.to_json()))) == summary

    def test_a_limit_is_kept(self, rows: RunSamples) -> None:
        every, few = rows.samples("eval"), rows.samples("eval", limit=2)
        assert len(few.lengths) == 2 < len(every.lengths)
        assert [few.tokens(0).tolist(), few.tokens(1).tolist()] == [
            every.tokens(0).tolist(), every.tokens(1).tolist(),
        ]  # fmt: skip
        assert len(rows.prompts(1).token_ids) == 1 < len(rows.prompts().token_ids)

    # ------------------------------------------------------------ prompts, and nothing

    def test_prompts_are_token_ids_that_leave_room_to_answer(self, rows: RunSamples) -> None:
        prompts = rows.prompts()
        for tokens in prompts.token_ids:
            assert 0 < len(tokens) < rows.longest
            assert all(isinstance(token, int) and token >= 0 for token in tokens)
        json.dumps(dict(prompts.about))
        assert [*map(list, rows.prompts().token_ids)] == [*map(list, prompts.token_ids)]

    def test_where_rows_lie_has_a_name_and_what_lies_nowhere_is_refused(
        self, base: Path, tmp_path: Path, rows: RunSamples
    ) -> None:
        assert rows.train, "a message could not name the rows"
        assert rows.eval
        with self.opened_in(base, tmp_path / "nowhere", {}) as run:
            try:
                nowhere = run.data
            except UsageError:
                return  # it has to be told where they lie
            assert (nowhere.train, nowhere.eval) == (None, None)
            for part in ("train", "eval"):
                with pytest.raises(UsageError):
                    nowhere.samples(part)
            with pytest.raises(UsageError):
                nowhere.prompts()


def contents(samples: Samples) -> list[Any]:
    """All that a run takes of rows."""
    rows = range(len(samples.lengths))
    text = [[samples.tokens(row).tolist(), samples.loss_mask(row).tolist()] for row in rows]
    return [samples.feature_ids, samples.lengths.tolist(), samples.summary, text]

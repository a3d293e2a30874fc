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
        parts = {"train": answers, "eval": answers[::-1]}
        return {part: str(conversations(folder / f"{part}.jsonl", parts[part])) for part in parts}

    @pytest.fixture(autouse=True)
    def folders(self, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
        """Make a folder for all tests of the process, with a target, and one for this test."""
        self.base, self.folder = tmp_path_factory.getbasetemp(), tmp_path
        if not (self.base / "samples-target").exists():
            tiny_target(self.base / "samples-target")

    @contextmanager
    def opened(self, place: str = "run", seed: int | None = 0) -> Iterator[OpenRun]:
        """Open a run in a folder, with rows of a seed that are written beside it, or with none."""
        plugin, *extras = self.plugin.split()
        data = {"name": offer_of(self.plugin, "samples", self.name).name, "plugin": plugin}
        if seed is not None:
            rows = self.folder / place / f"data-{seed}"
            rows.mkdir(parents=True, exist_ok=True)
            data |= {**self.data_options(rows, seed), **self.options}
        sections: Any = {"data": data, "plugins": extras}
        sections["target"] = {"path": str(self.base / "samples-target"), "device": "cpu"}
        with open_run(self.base, self.folder / place, self.plugin, **sections) as run:
            try:
                if seed is not None:
                    run.data.samples("train")
            except UsageError as error:
                if type(self).data_options is SamplesSuite.data_options and not self.options:
                    pytest.skip(f"only its author can write rows: override data_options; {error}")
                raise
            yield run

    @pytest.fixture
    def rows(self) -> Iterator[RunSamples]:
        with self.opened() as run:
            yield run.data

    # ------------------------------------------------------------ rows

    def test_rows_and_digest_are_the_same_whenever_they_are_opened(self) -> None:
        """In the run's folder, and anew in another's."""
        seen = []
        for place in ("first", "first", "other"):
            with self.opened(place) as run:
                seen += [contents(run.data.samples("train")), contents(run.data.samples("train"))]
        assert all(one == seen[0] for one in seen[1:])

    def test_other_rows_have_another_digest(self) -> None:
        seen = []
        for seed in (0, 1):
            with self.opened("run", seed) as run:
                seen.append(run.data.samples("train"))
                if seed and contents(seen[1]) == contents(seen[0]):
                    pytest.skip("one set of rows alone was named")
        assert seen[0].summary.fingerprint != seen[1].summary.fingerprint
        assert not {*seen[0].feature_ids} & {*seen[1].feature_ids}, "a store would mix them up"

    def test_tokens_and_masks_are_as_long_as_said(self) -> None:
        with self.opened() as run:
            for samples in (run.data.samples("train"), run.data.samples("eval")):
                count = len(samples.lengths)
                assert count == len(samples.feature_ids) == len({*samples.feature_ids}) > 0
                for row, length in enumerate(samples.lengths.tolist()):
                    tokens_T, mask_T = samples.tokens(row), samples.loss_mask(row)
                    assert tokens_T.shape == mask_T.shape == (length,)
                    assert tokens_T.dtype == np.int64
                    assert mask_T.dtype == np.bool_
                    assert 0 < length <= run.data.longest
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
        assert all(few.tokens(row).tolist() == every.tokens(row).tolist() for row in range(2))
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
        self, rows: RunSamples
    ) -> None:
        assert all([rows.train, rows.eval]), "a message could not name the rows"
        with self.opened("nowhere", None) as run:
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

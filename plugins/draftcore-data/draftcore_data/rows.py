"""The rows of a run that conversations are: to train on, held out, and to ask from."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import suppress
from typing import Any, Literal

from draftcore.contracts.capture import ImageProcessor
from draftcore.contracts.run import OpenRun, Prompts
from draftcore.errors import UsageError
from draftcore_data.dataset import Dataset, bounded, build_dataset, date_of, read_prompts
from draftcore_data.options import DataOptions, Sources
from draftcore_data.sources import finder, named, open_source, require_columns


class NoImages:
    """An image processor for runs that can read no images: it refuses rows with some, and says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"NoImages({self.reason!r})"

    def identity(self) -> str:
        return ""

    def write(self, *unread: Any) -> Any:
        raise UsageError(
            f"the data has rows with images, and here they cannot be read: {self.reason}\n"
            "  or leave such rows out of the data"
        )

    inputs = write


class Conversations:
    """Conversations, rendered with the target's chat template and kept in the run's folder."""

    def __init__(self, run: OpenRun, options: DataOptions) -> None:
        self.run, self.options = run, options
        # Not every target has a bound.
        self.positions = getattr(run.target.text_config, "max_position_embeddings", None)
        self.longest = bounded(options, self.positions).max_length
        self.folder, self.find = run.folder / "data", finder(run.bind)
        self.trained: Dataset | None = None  # the rows to train on, once they were opened
        self.train = named(options.train) if options.train is not None else None
        self.eval = named(options.eval) if options.eval is not None else None
        self.images = self._open_images() if run.target.is_multimodal else None

    def _open_images(self) -> ImageProcessor:
        """Open what reads images, or what refuses rows with images and says why."""
        if "images" not in self.run.capture.capabilities:
            offered = self.run.offered("capture").items()
            others = ", ".join(name for name, has in offered if "images" in has)
            name = self.run.config.capture.name
            return NoImages(f"the capture {name!r} reads text alone\n  set capture.name={others}")
        try:
            hooks = self.run.bind("images", "processor").hook
        except UsageError as error:
            return NoImages(str(error))
        processor: ImageProcessor = hooks.image_processor(name="processor", target=self.run.target)
        return processor

    def sources(self, part: Literal["train", "eval"]) -> Sources:
        """Return what the run names as its data. Raises UsageError for nothing."""
        sources = self.options.train if part == "train" else self.options.eval
        if sources is None:
            held_out = "held-out " * (part == "eval")
            raise UsageError(
                f"data.{part} is not set\n  set it to {held_out}conversations in JSONL"
            )
        return sources

    def _require_held_out(self) -> None:
        """Raise UsageError for held-out data that is named and not there, or empty."""
        sources = self.options.eval
        if sources is not None and next(open_source(sources, self.find).rows(), None) is None:
            raise UsageError(
                f"data.eval: {named(sources)} holds no row\n  set it to held-out conversations in JSONL"
            )

    def samples(self, part: Literal["train", "eval"], date: str = "", limit: int = 0) -> Dataset:
        """Render rows with the chat template, which is told `date`; printed is what was left out."""
        if part == "train":
            self._require_held_out()  # rendering these rows may take long, and those are needed later
            # What is held out may have other keys.
            require_columns(self.sources(part), self.options.columns, self.find)
        given: Any = limit or (self.options.limit if part == "train" else None)
        dataset = build_dataset(
            self.sources(part),
            self.run.target.load_tokenizer(),
            self.options.model_copy(update={"limit": given}),
            self.folder / part,
            find=self.find,
            date=date,
            processor=self.run.target.images,
            positions=self.positions,
        )
        self._require_known(dataset.largest())
        if part == "train":
            self.trained = dataset
        report = dataset.report
        if (report.skipped or report.notes or report.unread) and not self.run.ranks.rank:
            print(report.text(), file=sys.stderr)
        return dataset

    def _require_known(self, largest: int) -> None:
        """Raise UsageError for a token that the target has no embedding of."""
        target = self.run.target
        if largest >= target.vocab_size:
            raise UsageError(
                f"the tokenizer of {target.path!r} wrote the token {largest}, and the target's embedding has "
                f"{target.vocab_size} rows\n  give the target the tokenizer that it was trained with"
            )

    def prompts(self, limit: int = 0) -> Prompts:
        """Read the eval prompts, which are told the date of the training data."""
        sources = self.sources("eval")
        date = date_of(self.folder / "train") or date_of(self.folder / "eval")
        prompts = read_prompts(
            sources,
            self.run.target.load_tokenizer(),
            limit or None,
            self.options,
            find=self.find,
            date=date,
            positions=self.positions,
        )
        self._require_known(max(map(max, prompts.token_ids)))
        with suppress(ValueError, KeyError, OSError):  # no rows, or not as they were written
            self.trained = self.trained or Dataset(self.folder / "train")
            answered = self.trained.answered(prompts.token_ids)
            return dataclasses.replace(prompts, about={**prompts.about, "trained_on": answered})
        return prompts

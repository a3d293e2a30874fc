"""What `contracts.run` promises of a run is there, on a run that is really opened."""

import inspect
import json
import re
import subprocess
import sys
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from draftcore_sdk.targets import conversations

import draftcore
from draftcore import open_run
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.run import (
    Evaluation,
    Needed,
    OpenCapture,
    OpenDraft,
    OpenRun,
    PlannedBatch,
    RunSamples,
    Samples,
)
from draftcore.errors import UsageError
from draftcore.plugins.binding import type_error
from draftcore.plugins.registry import load_plugins
from draftcore.run.train import TEXT_BYTES, trainer_parts


def require(value: Any, protocol: type) -> None:
    """Ask for every member of a protocol, and for the arguments of each method."""
    assert type_error(value, protocol) == ""
    for name, method in vars(protocol).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            promised = list(inspect.signature(method).parameters.values())[1:]
            there = inspect.signature(getattr(value, name)).parameters
            assert [p.name for p in promised] == list(there)[: len(promised)], name
            optional = [p.name for p in there.values() if p.default is not p.empty]
            assert {p.name for p in promised if p.default is not p.empty} <= {*optional}, name


def test_a_run_its_drafts_and_what_they_open_have_all_that_plugins_are_promised(
    tmp_path: Path, target_folder: Path
) -> None:
    draft = {"algorithm": {"name": "eagle3", "options": {"layers": [1, 2, 4], "ttt_length": 2}}}
    config = {
        "run": str(tmp_path / "run"),
        "target": {"path": str(target_folder), "device": "cpu"},
        "data": {
            "train": str(conversations(tmp_path / "train.jsonl", 6)),
            "eval": str(conversations(tmp_path / "eval.jsonl", ["yes it is", "no"])),
        },
        "drafts": {"one": draft, "other": draft},
        "train": {"batch": 2, "accumulate": 2, "device": "cpu"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    with open_run(tmp_path / "run.yaml") as run:
        require(run, OpenRun)
        require(run.data, RunSamples)
        require(samples := run.data.samples("train"), Samples)
        require(run.evaluation(), Evaluation)
        for one in run.drafts:
            require(one, OpenDraft)
        with closing(run.open_capture(run.drafts[0].request())) as capture:
            require(capture, OpenCapture)
        parts = trainer_parts(run, "both")
        needed = parts.needed()
        assert isinstance(needed, Needed)
        shares = [list(needed.uses(rank, 2)) for rank in (0, 1)]
        assert sorted(len(share) for share in shares) == [1, 2]
        assert all(isinstance(one, PlannedBatch) for share in shares for one in share)
        planned = next(needed.uses(0, 1))
        batch, masks = needed.batch_of(planned)
        assert batch.ids == tuple(samples.feature_ids[row] for row in planned.rows)
        assert [len(mask) for mask in masks] == [len(ids) for ids in batch.token_ids]
        assert needed.token_bytes == needed.request.token_bytes(run.width) + TEXT_BYTES
        assert "refs of other samples" in str(needed.ref_error(batch, ()))


LACKING = """
from draftcore import hookimpl
from draftcore.contracts.offers import Offer

@hookimpl
def describe():
    return [Offer("capture", "lacking", needs={"no_such_engine": "pip install 'mine[engine]'"})]

@hookimpl
def capture(): ...
"""


def test_who_captures_by_an_engine_that_is_not_installed_is_told_before_rows_are_read(
    tmp_path: Path, target_folder: Path
) -> None:
    """Whose features come from elsewhere, or are all there, needs none: the trainer asks for its rows."""
    (tmp_path / "lacking.py").write_text(LACKING)
    config = {
        "run": str(tmp_path / "run"),
        "target": {"path": str(target_folder), "device": "cpu"},
        "data": {"train": str(tmp_path / "nowhere.jsonl")},
        "algorithm": {"name": "eagle3", "options": {"layers": [1, 2, 4]}},
        "capture": {"name": "lacking"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    given = tmp_path / "run.yaml", f"store=file:{tmp_path / 'store'}"
    registry = load_plugins([tmp_path / "lacking.py"])
    says = (
        "the capture 'lacking' needs no_such_engine, which is not installed\n  pip install 'mine["
    )
    for verb in (draftcore.capture, draftcore.train):
        with pytest.raises(UsageError, match=re.escape(says)):
            verb(*given, registry=registry)
    with pytest.raises(UsageError, match=r"nowhere\.jsonl"):
        draftcore.train(*given, trainer=True, registry=registry)


def test_a_manifest_of_features_of_before_there_were_others_is_read() -> None:
    held = {"layers": [1, 3], "last_hidden": True, "dtype": "float32"}
    assert FeatureRequest.from_json(held) == FeatureRequest((1, 3), True, "float32")


def test_a_mapping_is_a_configuration_and_a_function_is_told_of_each_step(
    tmp_path: Path, target_folder: Path
) -> None:
    """Whatever the function returns; a mapping is answered as a file is."""
    config = {
        "run": tmp_path / "run",
        "target": {"path": target_folder, "device": "cpu"},
        "data": {"train": conversations(tmp_path / "train.jsonl", 6)},
        "algorithm": {"name": "eagle3", "options": {"layers": [1, 2, 4], "ttt_length": 2}},
        "train": {"batch": 2, "device": "cpu"},
    }
    losses = dict[int, float]()
    tell = lambda step, metrics: losses.setdefault(step, metrics["loss"])  # noqa: E731
    done = draftcore.train(config, "train.lr=3e-4", progress=tell, say=lambda line: None)
    assert (done.reason, sorted(losses)) == ("complete", [1, 2, 3])
    with pytest.raises(UsageError, match=r"(?s)the configuration: 1 wrong.*did you mean 'epochs'"):
        draftcore.train({**config, "train": {"epoch": 3}})
    with pytest.raises(UsageError, match="leave progress out"):
        draftcore.train(config, "topology.ranks=2", progress=tell)
    elsewhere = {**config, "run": tmp_path / "ranks", "topology": {"ranks": 2}}
    assert draftcore.train(elsewhere, say=lambda line: None).reason == "complete"
    old = [*map(int, version("transformers").split(".")[:2])] < [5, 23]  # which imports it itself
    unused = {"matplotlib", *["torch._dynamo"][old:]}
    code = f"import sys, draftcore; draftcore.export(sys.argv[1]); assert not {unused} & {{*sys.modules}}"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(config, default=str))))
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run.yaml")], check=True)

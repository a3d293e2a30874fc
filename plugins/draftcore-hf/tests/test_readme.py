"""The README's run opens, and its table lists the options that there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from draftcore_hf.capture import LocalCapture
from draftcore_hf.options import TargetOptions
from draftcore_hf.target import TransformersTarget

from draftcore import open_run
from draftcore.contracts.capture import FeatureRequest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
(RUN,) = re.findall(r"^```yaml\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
TABLE = re.findall(r"^\| `(\w+)` \| (.+?) \|", README, re.MULTILINE)


def test_the_readmes_run_opens_with_this_target_and_this_capture(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    here = f"target.path={target_folder}", "target.device=cpu"
    with open_run("run.yaml", here) as run:
        assert isinstance(run.target, TransformersTarget)
        request = FeatureRequest((0,), False, "bfloat16")
        capture: Any = run.capture.hook
        opened = capture.capture(name="hf", target=run.target, request=request, options=None)
        assert isinstance(opened, LocalCapture)


def test_the_table_lists_the_options_that_there_are_and_their_defaults() -> None:
    fields = TargetOptions.model_fields
    assert [name for name, _ in TABLE] == list(fields)
    words = {"must be set": ..., "none": None}
    for name, default in TABLE:
        said = words.get(default, yaml.safe_load(default))
        assert said is ... if fields[name].is_required() else said == fields[name].default

"""A step: how much code of the core it goes through, and what it is when it is compiled."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import draftcore
from draftcore.training.compiled import TRITON
from tests.together.conftest import ODD, OPTIONS, NewProject, Project

CORE = Path(draftcore.__file__).parent
TRACER = """
import sys
from pathlib import Path
from draftcore import hookimpl

CALLS = []

def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith({core!r}):
        CALLS.append(f"{{code.co_filename}}:{{code.co_qualname}}")

@hookimpl
def step_finished(step):
    if step == 3:
        sys.setprofile(note)
    elif step == 4:
        sys.setprofile(None)
        Path({out!r}).write_text("\\n".join(CALLS))
"""


def test_torch_knows_the_settings_of_a_compiled_draft() -> None:
    """Of a name that it drops it would say so in a warning alone."""
    known = torch._inductor.config.get_config_copy()
    assert {f"triton.{name}" for name in TRITON} <= known.keys()


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_compiled_run_has_the_losses_of_an_eager_one_from_few_graphs(
    tmp_path: Path, new_project: NewProject, name: str, device: str
) -> None:
    """Rows of many lengths; fp32 sums in another order, of which Adam makes more from step to step."""
    heads = {"head_dim": 16}  # FlexAttention has no smaller ones
    changes = {"algorithm": {"name": name, "options": {**OPTIONS[name], **heads}}, "samples": 26}
    given = (f"target.device={device}", f"train.device={device}", "train.eval_every=3")
    eager, compiled = (new_project(tmp_path / label, **changes) for label in ("eager", "compiled"))
    eager.cli("train", "train.compile=off", *given)
    torch.compiler.reset()
    assert "warning" not in compiled.cli("train", "train.compile=on", *given).output
    ours, theirs = compiled.losses(), eager.losses()
    assert ours[1] == pytest.approx(theirs[1], rel=1e-5)
    assert ours == pytest.approx(theirs, rel=5e-3)
    lines = map(json.loads, (compiled.run / "metrics.jsonl").read_text().splitlines())
    assert {line["compilations"] for line in lines if "loss" in line} <= {1, 2, 3}  # of 7 lengths
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled.cli("train", "train.compile=on", *given, f"run={tmp_path}/again")
    assert torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"], "kept"
    assert (
        replace(compiled, config={**compiled.config, "run": f"{tmp_path}/again"}).losses() == ours
    )


def test_a_compiler_that_fails_leaves_a_warning_and_an_eager_run(
    tmp_path: Path, new_project: NewProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a draft of two linear layers, as one of attention takes 15 s to come to the compiler."""
    import torch._inductor.config as inductor

    (able := tmp_path / "able.py").write_text(
        ODD.read_text().replace('"odd", options', '"odd", frozenset({"compile"}), options')
    )
    odd = {"algorithm": {"name": "odd", "options": {}}, "samples": 8, "plugins": [able]}
    broken, eager = (new_project(tmp_path / label, **odd) for label in ("broken", "eager"))
    monkeypatch.setattr(inductor.cpp, "cxx", ("/bin/false",))
    monkeypatch.setattr(inductor, "compile_threads", 1)  # else each of many imports torch
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    torch.compiler.reset()
    output = broken.cli("train", "train.compile=on").output
    assert output.count("warning: torch.compile failed") == 1
    eager.cli("train", "train.compile=off")
    assert broken.losses() == eager.losses() != {}


def test_a_colocated_step_crosses_at_most_60_functions_of_the_core_in_500_calls(
    project: Project, tmp_path: Path
) -> None:
    out = tmp_path / "functions"
    plugin = tmp_path / "tracer.py"
    plugin.write_text(TRACER.format(core=f"{CORE}/", out=str(out)))
    project.cli("train", "store=auto", "train.checkpoint_every=100", plugin=plugin)
    calls = out.read_text().splitlines()
    functions = sorted({call for call in calls if not call.endswith(">")})
    assert len(calls) <= 500, "\n".join(calls)
    assert len(functions) > 20, "the trace saw nothing"
    assert len(functions) <= 60, "\n".join(functions)

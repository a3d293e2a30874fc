"""How much code of the core a step goes through: whoever debugs one reads no more than that."""

from pathlib import Path

import draftcore
from tests.together.conftest import Project

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

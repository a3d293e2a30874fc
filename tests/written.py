"""Runs the tests of each plugin that `new-plugin` wrote, installed as its wheel: `nox -s authors`.

The first argument is the folder of the plugins, the second that of the reports. Each has a fork of this
process, which has imported much that is not ours, and what a suite starts is a fork of that: imported
anew, it would take most of their time.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.fsdp  # noqa: F401
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

sys.path.append(str(Path(__file__).parents[1]))

from tests.forks import Popen

folder, reports = map(Path, sys.argv[1:])
failed = []
for project in sorted(folder.iterdir()):
    print(f"--- {project.name}", flush=True)
    if not (pid := os.fork()):
        Popen.direct, subprocess.Popen = True, Popen  # type: ignore[misc]
        report = f"--junitxml={reports / project.name}.xml"
        code = pytest.main(["-q", str(project), report, "-o", "junit_duration_report=total"])
        sys.stdout.flush()
        os._exit(code)
    if os.waitpid(pid, 0)[1]:
        failed.append(project.name)
sys.exit(f"these fail: {', '.join(failed)}" if failed else 0)

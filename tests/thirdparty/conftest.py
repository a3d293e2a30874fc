"""Fresh environments, into which plugins come and from which they go by pip.

Run by `nox -s authors`, which builds the wheels and says where they lie. Nothing of this source
tree is on the path of what runs here, and every verb is a process of its own: what trains and decodes
is a fork that has imported other people's packages.
"""

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from draftcore_sdk.targets import conversations

from tests.forks import ENVIRONMENT

ROOT = Path(__file__).parents[2]
OFFLINE = ("--no-deps", "--no-index")
HEAVY = ("train", "eval", "export")  # verbs that import torch
STANDARD = (
    "draftcore",
    *(f"draftcore-{name}" for name in ("data", "disagg", "eval", "file", "hf")),
)
WHEELS = "DRAFTCORE_WHEELS"  # the folders of wheels under test, joined as in PATH


@dataclass
class Run:
    """A run's YAML and folder; `losses` are exactly as written."""

    yaml: Path
    folder: Path

    @property
    def losses(self) -> dict[int, float]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return {line["step"]: line["loss"] for line in map(json.loads, lines)}

    def manifest(self, step: int, name: str) -> dict[str, str]:
        """What a checkpoint says of one of the plugins that took part."""
        state = json.loads((self.checkpoint(step) / "state.json").read_text())
        (entry,) = (plugin for plugin in state["plugins"] if plugin["name"] == name)
        return dict(entry)

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step-{step:08d}"


class Environment:
    """A virtual environment with the third-party packages of this one and none of our dists."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder, symlinks=True)
        (self.packages / "base.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")

    @property
    def packages(self) -> Path:
        (packages,) = self.folder.glob("lib/python*/site-packages")
        return packages

    def wheel(self, dist: str) -> Path:
        folders = [Path(folder) for folder in os.environ[WHEELS].split(os.pathsep)]
        name = f"{dist.replace('-', '_')}-[0-9]*.whl"
        (wheel,) = (wheel for folder in folders for wheel in folder.glob(name))
        return wheel

    def install(self, *dists: str) -> None:
        """Install the wheels of these dists, without what they require."""
        self.pip("install", *OFFLINE, *(str(self.wheel(dist)) for dist in dists))

    def install_editable(self, project: Path) -> None:
        self.pip("install", *OFFLINE, "--no-build-isolation", "-e", str(project))

    def pip(self, *arguments: str) -> None:
        self.run("python", "-m", "pip", "-q", "--disable-pip-version-check", *arguments)

    def draftcore(self, verb: str, *arguments: object) -> str:
        """Run a verb that must succeed; return what it prints."""
        return self.run("draftcore", verb, *map(str, arguments)).stdout

    def refusal(self, verb: str, *arguments: object) -> str:
        """Run a verb that must fail with an explanation; return that."""
        done = self.run("draftcore", verb, *map(str, arguments), status=2)
        assert done.stderr.startswith("error: "), done.stderr
        return done.stderr

    def plugins(self) -> dict[str, dict[str, Any]]:
        """The listing by plugin name, without the times, which differ from call to call."""
        listed = json.loads(self.draftcore("list-plugins", "--json"))["plugins"]
        return {p["name"]: {key: p[key] for key in p if key != "import_ms"} for p in listed}

    def run(
        self, program: str, *arguments: str, status: int = 0
    ) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        command = [str(self.folder / "bin" / program)]
        if program == "draftcore" and arguments[0] in HEAVY:
            env = {**os.environ, ENVIRONMENT: str(self.folder)}
            command = [sys.executable, "-m", "draftcore"]  # forked, and there
        done = subprocess.run(
            [*command, *arguments],
            cwd=self.folder, env={**env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == status, f"{program} {arguments}\n{done.stdout}{done.stderr}"
        return done


NewEnvironment = Callable[..., Environment]
NewRun = Callable[..., Run]


@pytest.fixture(scope="session")
def new_environment(tmp_path_factory: pytest.TempPathFactory) -> NewEnvironment:
    """Make an environment and install the wheels of these dists."""
    if WHEELS not in os.environ:
        pytest.skip("needs wheels: nox -s authors")

    def make(*dists: str) -> Environment:
        environment = Environment(tmp_path_factory.mktemp("environment"))
        environment.install(*dists)
        return environment

    return make


@pytest.fixture(scope="session")
def new_run(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> NewRun:
    """Write a run of two steps with the algorithm `name`; keyword arguments are its options."""

    def make(name: str, **options: Any) -> Run:
        folder = tmp_path_factory.mktemp(name)
        config = {
            "run": str(folder / "run"),
            "target": {"path": str(target_folder), "device": "cpu"},
            "data": {
                "train": str(conversations(folder / "train.jsonl", 8)),
                "eval": str(conversations(folder / "eval.jsonl", ["yes it is", "no"])),
            },
            "algorithm": {"name": name, "options": options},
            "train": {"batch": 4, "log_every": 1, "checkpoint_every": 1, "device": "cpu"},
            "eval": {"max_new_tokens": 12},
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        return Run(folder / "run.yaml", folder / "run")

    return make

"""Fresh environments, into which plugins come and from which they go by pip; nobody else notices.

Run by `nox -s authors`, which builds the wheels and says where they lie. Nothing of this source
tree is on the path of what runs here, and every verb is a process of its own: what trains and decodes
is a fork that has imported other people's packages.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
import yaml
from draftcore_sdk.targets import conversations
from safetensors.torch import load_file

from tests.forks import ENVIRONMENT

MEDUSA_PROJECT = Path(__file__).parents[2] / "examples" / "plugins" / "draftcore-medusa"
MEDUSA = {"name": "medusa", "dist": "draftcore-medusa", "version": "0.1.0", "origin": ""}
BLOCKS = {"num_layers": 1, "layers": [1, 3], "block_size": 4, "num_anchors": 4}
HEAD = {"gru_hidden_dim": 8, "emb_dim": 4}
OFFLINE = ("--no-deps", "--no-index")
HEAVY = ("train", "eval", "export")  # verbs that import torch
STANDARD = [f"draftcore-{name}" for name in ("data", "disagg", "eval", "file", "hf")]
WHEELS = "DRAFTCORE_WHEELS"  # the folders of wheels under test, joined as in PATH


class Run:
    """A run of two steps with the algorithm `name`."""

    def __init__(self, folder: Path, target: Path, name: str, **options: Any) -> None:
        self.yaml, self.folder = folder / "run.yaml", folder / "run"
        held_out = conversations(folder / "eval.jsonl", ["yes it is", "no"])
        often = {"log_every": 1, "checkpoint_every": 1, "eval_every": 0}
        config = {
            "run": str(self.folder),
            "target": {"path": str(target), "device": "cpu"},
            "data": {"train": str(conversations(folder / "train.jsonl", 8)), "eval": str(held_out)},
            "algorithm": {"name": name, "options": options},
            "train": {"batch": 4, **often, "device": "cpu"},
            "eval": {"max_new_tokens": 12},
        }
        self.yaml.write_text(yaml.safe_dump(config))

    @property
    def losses(self) -> dict[int, float]:
        """Exactly as written."""
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
    """A virtual environment with the third-party packages of this one and wheels of these dists."""

    def __init__(self, folder: Path, *dists: str) -> None:
        self.folder = folder
        venv.create(folder, symlinks=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "base.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
        self.install(*dists)

    def wheel(self, dist: str) -> Path:
        folders = [Path(folder) for folder in os.environ[WHEELS].split(os.pathsep)]
        name = f"{dist.replace('-', '_')}-[0-9]*.whl"
        (wheel,) = (wheel for folder in folders for wheel in folder.glob(name))
        return wheel

    def install(self, *dists: str) -> None:
        """Install the wheels of these dists, without what they require."""
        self.pip("install", *OFFLINE, *(str(self.wheel(dist)) for dist in dists))

    def renumber(self, version: str, *dists: str) -> None:
        """Install these dists as another version: wheels that differ in the number, also in pins."""
        for old in map(self.wheel, dists):
            new = self.folder / old.name.replace("-0.1.0-", f"-{version}-")
            with zipfile.ZipFile(old) as had, zipfile.ZipFile(new, "w") as made:
                for name in had.namelist():
                    data = had.read(name)
                    if ".dist-info/" in name:
                        data = data.replace(b"0.1.0", version.encode())
                    made.writestr(name.replace("-0.1.0.", f"-{version}."), data)
            self.pip("install", *OFFLINE, str(new))

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

    def run(self, program: str, *arguments: str, status: int = 0) -> CompletedProcess[str]:
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


@pytest.fixture
def new_environment(tmp_path: Path) -> Callable[..., Environment]:
    if WHEELS not in os.environ:
        pytest.skip("needs wheels: nox -s authors")
    return lambda *dists: Environment(tmp_path / "environment", *dists)


@pytest.fixture
def new_run(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Callable[..., Run]:
    new = tmp_path_factory.mktemp
    return lambda name, **options: Run(new(name), target_folder, name, **options)


def same_bits(one: Run, other: Run) -> bool:
    """Whether two runs wrote the same losses, weights and optimizer states."""
    for file in ("draft.safetensors", "optimizer.safetensors"):
        a, b = (load_file(run.checkpoint(2) / file) for run in (one, other))
        if a.keys() != b.keys() or not all(torch.equal(a[name], b[name]) for name in a):
            return False
    return len(one.losses) == 2 and one.losses == other.losses


def test_the_core_names_what_a_run_needs_and_another_algorithm_comes_and_goes_unnoticed(
    new_environment: Callable[..., Environment], new_run: Callable[..., Run]
) -> None:
    here = new_environment("draftcore")
    before, after = new_run("dflash", **BLOCKS), new_run("dflash", **BLOCKS)
    for line, dists in (
        ("pip install 'draftcore[standard]'", STANDARD),
        ("pip install draftcore-dflash", ("draftcore-nn", "draftcore-dflash")),
    ):
        assert line in here.refusal("train", before.yaml)
        here.install(*dists)

    # The main job, for which no other dist is there.
    assert "complete: step 2 of 2" in here.draftcore("train", before.yaml)
    report = json.loads(here.draftcore("eval", before.yaml, "--json"))
    assert report["lossless"] is True
    here.draftcore("export", before.yaml)
    export = before.folder / "export"
    again = json.loads(here.draftcore("eval", before.yaml, "--export", export, "--json"))
    assert again["acceptance_length"] == report["acceptance_length"]
    elsewhere = ("topology.producers=1", f"run={before.folder}-elsewhere")
    assert "complete: step 2 of 2" in here.draftcore("train", before.yaml, *elsewhere)

    listed, domino = here.plugins(), new_run("domino", **BLOCKS, **HEAD)
    assert "domino" not in listed
    here.install("draftcore-domino")
    grown = here.plugins()
    assert grown["domino"]["state"] == "ready"
    assert {name: data for name, data in grown.items() if name != "domino"} == listed
    assert "complete: step 2 of 2" in here.draftcore("train", domino.yaml)
    here.draftcore("train", after.yaml)
    assert same_bits(before, after)
    assert not same_bits(before, domino)

    here.pip("uninstall", "-y", "draftcore-domino")
    assert here.plugins() == listed
    for verb in ("eval", "export"):
        said = here.refusal(verb, domino.yaml)
        assert "domino 0.1.0: pip install draftcore-domino==0.1.0" in said
    assert "pip install draftcore-domino" in here.refusal("train", domino.yaml, "train.epochs=2")
    resumed = here.draftcore("train", after.yaml, "train.epochs=2")
    assert "resuming from step 2 of 4" in resumed
    assert "complete: step 4 of 4" in resumed


def test_an_algorithm_of_others_lives_its_whole_life_and_goes_on_in_the_next_versions_of_all(
    new_environment: Callable[..., Environment], new_run: Callable[..., Run], tmp_path: Path
) -> None:
    """The Medusa example, which this project does not know. Its wheel ships types and no tests."""
    here = new_environment("draftcore", *STANDARD, "draftcore-nn", "draftcore-medusa")
    names = zipfile.ZipFile(here.wheel("draftcore-medusa")).namelist()
    assert "draftcore_medusa/py.typed" in names
    folders = {name.partition("/")[0] for name in names}
    assert folders == {"draftcore_medusa", "draftcore_medusa-0.1.0.dist-info"}
    run = new_run("medusa", num_heads=3)
    here.draftcore("train", run.yaml)
    assert run.manifest(2, "medusa") == MEDUSA
    report = json.loads(here.draftcore("eval", run.yaml, "--json"))
    assert (report["lossless"], report["num_drafts"]) == (True, 3)
    here.draftcore("export", run.yaml)
    export = run.folder / "export"
    assert MEDUSA in json.loads((export / "draftcore.json").read_text())["plugins"]
    assert json.loads((export / "config.json").read_text())["model_type"] == "medusa"

    project = shutil.copytree(MEDUSA_PROJECT, tmp_path / "project")
    text = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(text.replace('version = "0.1.0"', 'version = "0.2.0"'))
    here.pip("install", *OFFLINE, "--no-build-isolation", "-e", str(project))
    assert f"editable: {project}" in here.draftcore("list-plugins")
    assert run.manifest(2, "hf")["version"] == "0.1.0"
    here.renumber("0.1.1", "draftcore", *STANDARD)
    assert "resuming from step 2 of 4" in here.draftcore("train", run.yaml, "train.epochs=2")
    newer = {**MEDUSA, "version": "0.2.0", "origin": f"editable: {project}"}
    assert run.manifest(4, "medusa") == newer
    assert run.manifest(4, "hf")["version"] == "0.1.1"
    # The next minor version may have taken away what a plugin of 0.1 calls: it is named, and left alone.
    here.renumber("0.2.0", "draftcore", *STANDARD)
    states = {name: plugin["state"] for name, plugin in here.plugins().items()}
    assert (states["medusa"], states["hf"]) == ("incompatible", "ready")
    assert "draftcore-medusa" in here.refusal("train", run.yaml, "train.epochs=3")

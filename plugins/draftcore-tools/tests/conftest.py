"""A trained run of each algorithm on a tiny target, exported, to be read and to be damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from draftcore_sdk.exports import change
from draftcore_sdk.targets import conversations, tiny_target
from draftcore_tools.reference import Reference, open_reference, read_manifest
from draftcore_tools.verify import Divergence, servers_of, verify_export
from torch import Tensor

from draftcore import load_plugins
from draftcore.cli import main
from draftcore.files import EXPORT, digest, read_sealed, write_sealed

BLOCKS = {"num_layers": 2, "block_size": 5, "layers": [1, 4]}
OPTIONS: dict[str, dict[str, Any]] = {  # that make drafts small
    "eagle3": {"draft_vocab_size": 120, "ttt_length": 3, "num_drafts": 3},
    "dflash": BLOCKS,
    "dflash2": {**BLOCKS, "selector_rank": 8, "selector_top_k": 40},
    "domino": {**BLOCKS, "gru_hidden_dim": 20, "emb_dim": 16},
    "dspark": {**BLOCKS, "markov_rank": 16},
    "peagle": {"draft_vocab_size": 120, "num_layers": 2, "num_depths": 4},
}
WORDS = ["red", "green", "blue", "one", "two", "three", "sky", "sea", "def", "return"]


def run_cli(*arguments: object) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.fixture
def cli() -> Callable[..., Result]:
    return run_cli


@pytest.fixture(scope="session")
def write_run(target_folder: Path) -> Callable[..., Path]:
    """Write the YAML of a run of these algorithms, with further options, trained on these answers."""

    def write(folder: Path, answers: Any, algorithms: dict[str, Any], **train: Any) -> Path:
        drafts = {
            name: {"algorithm": {"name": name, "options": {**OPTIONS[name], **options}}}
            for name, options in algorithms.items()
        }
        config = {
            "run": str(folder / "run"),
            "target": {"path": str(target_folder), "device": "cpu"},
            "data": {"train": str(conversations(folder / "train.jsonl", answers))},
            "train": {"device": "cpu", **train},
            **({"drafts": drafts} if len(drafts) > 1 else next(iter(drafts.values()))),
        }
        (file := folder / "run.yaml").write_text(yaml.safe_dump(config))
        return file

    return write


@dataclass(frozen=True)
class Exported:
    """The export of a run, in a folder of its own, and its target."""

    algorithm: str
    folder: Path
    target: Path
    run: Path

    def ask(self, *arguments: str | Path) -> Result:
        """Verify as a person would, and return what was printed."""
        asked = ("verify", self.folder, "--target", self.target, "--device", "cpu")
        return run_cli(*asked, *arguments)

    def verify(self, *arguments: str | Path, status: int) -> list[dict[str, Any]]:
        """Verify and return the verdicts; `status` is the exit status to expect."""
        result = self.ask("--json", *arguments)
        assert result.exit_code == status, result.output
        verdicts: list[dict[str, Any]] = json.loads(result.stdout)
        return verdicts

    def change(self, edit: Callable[[dict[str, Any], dict[str, Tensor]], Any]) -> None:
        """Edit config.json's content and the tensors in place, as a writer with that mistake does."""
        change(self.folder, edit)
        manifest = read_sealed(file := self.folder / EXPORT)
        files = {name: digest(self.folder / name) for name in manifest["files"]}
        write_sealed(file, {**manifest, "files": files})


MakeRun = Callable[..., Exported]
Judge = Callable[[Exported], dict[str, Divergence | None]]


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return tiny_target(folder, std=0.5, num_hidden_layers=8, head_dim=12)  # o_proj is square


@pytest.fixture(scope="session")
def make_run(
    tmp_path_factory: pytest.TempPathFactory, target_folder: Path, write_run: Any
) -> MakeRun:
    """Train a run for a few steps and export it; each algorithm and options once."""
    made: dict[str, Exported] = {}
    answers = [" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))]

    def make(algorithm: str, **options: Any) -> Exported:
        if (key := f"{algorithm} {options}") not in made:
            folder = tmp_path_factory.mktemp(algorithm)
            file = write_run(folder, answers, {algorithm: options}, epochs=4, batch=5, lr=0.01)
            for verb in ("train", "export"):
                result = run_cli(verb, file)
                assert result.exit_code == 0, result.output
            run = folder / "run"
            made[key] = Exported(algorithm, run / "export", target_folder, run)
        return made[key]

    return make


@pytest.fixture
def exported(make_run: MakeRun, tmp_path: Path) -> MakeRun:
    """A copy of an export beside it, which a test may damage."""

    def copy(algorithm: str, **options: Any) -> Exported:
        original = make_run(algorithm, **options)
        folder = original.run / f"export-{tmp_path.name}"
        return replace(original, folder=shutil.copytree(original.folder, folder))

    return copy


@pytest.fixture(scope="session")
def judge(make_run: MakeRun) -> Iterator[Judge]:
    """What `verify` finds of an export, by server; each algorithm's trained draft drafts once."""
    opened: dict[str, Reference] = {}
    with ExitStack() as stack:

        def divergences(exported: Exported) -> dict[str, Divergence | None]:
            if (name := exported.algorithm) not in opened:
                whole, target = make_run(name).folder, str(exported.target)
                original = open_reference(load_plugins(), whole, None, target, "cpu")
                opened[name] = stack.enter_context(original)
            reference = replace(opened[name], manifest=read_manifest(exported.folder))
            servers = servers_of(reference, "all")
            verdicts = (verify_export(reference, exported.folder, server) for server in servers)
            return {verdict.server: verdict.divergence for verdict in verdicts}

        yield divergences

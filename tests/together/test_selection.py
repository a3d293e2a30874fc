"""Our own verbs import the plugins that a run selects; what else is installed cannot disturb them."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.together.conftest import NewProject, Project

TRAIN = """
import sys
from draftcore.cli import main

main(["train", sys.argv[1], "train.max_steps=1"], standalone_mode=False)
main(["eval", sys.argv[1]], standalone_mode=False)
for verb in ("capture", "train", "eval", "export"):
    main([verb, "--help"], standalone_mode=False)
print("modules", *sys.modules)
"""


def install(site: Path, name: str, entry_points: str, code: str) -> Path:
    """Install the dist draftcore-NAME of one module; returns that."""
    info, module = site / f"draftcore_{name}-0.1.dist-info", site / f"draftcore_{name}.py"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: draftcore-{name}\nVersion: 0.1\n"
    (info / "METADATA").write_text(text)
    (info / "entry_points.txt").write_text(entry_points)
    module.write_text(code)
    return module


def test_only_the_listing_imports_a_plugin_that_nobody_selected(
    project: Project, tmp_path: Path
) -> None:
    """Beside all our own dists lies one that kills the process; it is named, and left out by hand."""
    points, code = (
        "[draftcore]\nkiller = draftcore_killer\n",
        "os.kill(os.getpid(), signal.SIGSEGV)\n",
    )
    killer = install(tmp_path / "site", "killer", points, f"import os, signal\n{code}")
    path = os.pathsep.join([str(killer.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env={**env, **more}, capture_output=True, text=True)

    done = run("-c", TRAIN, str(project.yaml))
    assert done.returncode == 0, done.stderr
    trained, _, modules = done.stdout.partition("modules ")
    assert "complete: step 1 of 1" in trained
    assert "acceptance length" in trained
    assert "warning" not in done.stderr.lower()
    packages = {name.partition(".")[0] for name in modules.split() if "draftcore_" in name}
    sections = {"draftcore_data", "draftcore_eval", "draftcore_hf"}
    assert packages == {"draftcore_eagle3", "draftcore_nn", "draftcore_file", *sections}

    for options in ([], ["--traceback"]):
        listing = run("-m", "draftcore", *options, "list-plugins")
        assert (listing.returncode, listing.stdout) == (-signal.SIGSEGV, "")
        assert f'File "{killer}", line 2' in listing.stderr
        assert ("importing killer (draftcore-killer 0.1)\n" in listing.stderr) == bool(options)
    left_out = run("-m", "draftcore", "list-plugins", DRAFTCORE_DISABLE="killer").stdout
    assert re.search("^killer .* disabled", left_out, re.MULTILINE)


TAKER = """
import click
from draftcore import hookimpl
from draftcore.contracts.offers import Offer

OURS = {"target": "hf", "capture": "hf", "store": "file", "samples": "conversations"}

@hookimpl
def describe():
    return [Offer(kind, name) for kind, name in OURS.items()]

@hookimpl
def commands():
    return [click.Command("eval", callback=refuse, help="Take its place.")]

def refuse(*given, **more):
    raise AssertionError("nobody chose this one")

target = capture = feature_store = samples = hookimpl(refuse)
"""
PRINT = "print(1 / 0)\n"


def test_what_offers_our_names_or_fails_at_import_changes_no_bit(
    tmp_path: Path, new_project: NewProject, trained: Project
) -> None:
    """Installed beside a run are a plugin whose modules raise, and one with `eval`, `hf` and `file`."""
    site, beside = tmp_path / "site", new_project(tmp_path / "beside")
    for name, code in (("broken", PRINT), ("taker", TAKER)):
        points = f"[draftcore]\n{name} = draftcore_{name}\n"
        points += f"[draftcore.hooks]\nkind-of-{name} = broken_hooks\n"
        install(site, name, points, code)
    (site / "broken_hooks.py").write_text(PRINT)

    def run(*command: str) -> str:
        line, env = (
            [sys.executable, "-m", "draftcore", *command],
            {**os.environ, "PYTHONPATH": str(site)},
        )
        done = subprocess.run(line, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr
        return done.stdout

    run("capture", str(beside.yaml))
    run("train", str(beside.yaml))
    found = json.loads(run("eval", str(beside.yaml), "--json"))
    right = json.loads(trained.cli("eval", "--json").stdout)
    for key in ("rows", "acceptance_by_position"):
        assert found[key] == right[key]
    assert found["about"]["plugins"] == right["about"]["plugins"]
    assert beside.losses() == trained.losses()
    ours, theirs = (one.run / "checkpoints" / "step-00000006" for one in (beside, trained))
    for file in ("draft.safetensors", "optimizer.safetensors"):
        assert (ours / file).read_bytes() == (theirs / file).read_bytes()
    states = [json.loads((folder / "state.json").read_text()) for folder in (ours, theirs)]
    for key in ("plugins", "features"):
        assert states[0][key] == states[1][key]
    listed = {p["name"]: p for p in json.loads(run("list-plugins", "--json"))["plugins"]}
    assert "ZeroDivisionError" in listed["broken"]["problem"]
    assert "taker" in listed


ENDS = {
    "observer": (
        "@hookimpl\ndef step_finished():\n    raise SystemExit(0)\n",
        "goes on without ends",
    ),
    "capture": (
        "class Ends:\n    def features(self, batches): raise SystemExit(0)\n    close = print\n"
        "@hookimpl(wrapper=True)\ndef capture():\n    yield\n    return Ends()\n",
        "error: SystemExit: 0 ended the run",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_no_plugin_ends_a_run_as_if_it_were_done(
    project: Project, tmp_path: Path, name: str
) -> None:
    """An observer is dropped, and the run goes on; what else ends the process is an error."""
    file = tmp_path / f"ends_{name}.py"
    file.write_text("from draftcore import hookimpl\n" + ENDS[name][0])
    done = project.cli("train", "train.max_steps=2", plugin=file, ok=False)
    assert ENDS[name][1] in done.stderr
    assert done.exit_code == (name != "observer")
    assert ("complete: step 2 of 2" in done.stdout) == (name == "observer")


WRAPS = """
from draftcore import hookimpl
from draftcore.contracts.offers import Offer
from draftcore.errors import UsageError

@hookimpl
def describe():
    return [Offer("capture", "wrapped")]  # so that it wraps nothing unless a run names it

@hookimpl
def capture():
    return None

@hookimpl(wrapper=True)
def launch():
    try:
        yield
    except UsageError:
        return "interrupted"
"""


def test_the_plugins_of_a_run_wrap_the_launch_of_its_processes(
    project: Project, tmp_path: Path
) -> None:
    """None is started here: there is no such launcher, and the wrapper answers for it."""
    file = tmp_path / "wraps.py"
    file.write_text(WRAPS)
    asked = ("train", "topology.producers=1", "topology.launcher=nosuch")
    refused = project.cli(*asked, plugin=file, ok=False)
    assert (refused.exit_code, "no launcher 'nosuch'" in refused.output) == (2, True)
    assert project.cli(*asked, "plugins=[wraps]", plugin=file, ok=False).exit_code == 130

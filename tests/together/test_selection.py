"""Our own verbs import the plugins that a run selects; what else is installed cannot disturb them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.together.conftest import NewProject, Project

TRAIN = """
import sys
from draftcore.cli import main

for verb in ("capture", "train", "eval"):
    main([verb, sys.argv[1]], standalone_mode=False)
for verb in ("capture", "train", "eval", "export"):
    main([verb, "--help"], standalone_mode=False)
print("modules", *sys.modules)
"""
KILL = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
RAISE = "print(1 / 0)\n"
TAKE = """
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


def install(site: Path, name: str, code: str) -> Path:
    """Install the dist draftcore-NAME of one module, with hooks that raise; returns that module."""
    info, module = site / f"draftcore_{name}-0.1.dist-info", site / f"draftcore_{name}.py"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: draftcore-{name}\nVersion: 0.1\n"
    (info / "METADATA").write_text(text)
    points = f"[draftcore]\n{name} = draftcore_{name}\n[draftcore.hooks]\nof-{name} = no_hooks\n"
    (info / "entry_points.txt").write_text(points)
    module.write_text(code)
    (site / "no_hooks.py").write_text(RAISE)
    return module


def test_a_plugin_that_nobody_selected_is_imported_by_the_listing_alone_and_changes_no_bit(
    tmp_path: Path, new_project: NewProject, trained: Project
) -> None:
    """Beside our dists lie one that kills the process, one that raises, one with `eval`, `hf` and `file`.

    The first is named by the listing that it ends, and left out by hand.
    """
    site, beside = tmp_path / "site", new_project(tmp_path / "beside")
    killer, *_ = (
        install(site, name, code)
        for name, code in (("killer", KILL), ("broken", RAISE), ("taker", TAKE))
    )
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env={**env, **more}, capture_output=True, text=True)

    done = run("-c", TRAIN, str(beside.yaml))
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr.lower()
    modules = done.stdout.partition("modules ")[2].split()
    packages = {name.partition(".")[0] for name in modules if "draftcore_" in name}
    sections = {"draftcore_data", "draftcore_eval", "draftcore_hf"}
    assert packages == {"draftcore_eagle3", "draftcore_nn", "draftcore_file", *sections}

    trained.cli("eval")
    found, right = (
        json.loads((one.run / "eval" / "report.json").read_text()) for one in (beside, trained)
    )
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

    for options in ([], ["--traceback"]):
        listing = run("-m", "draftcore", *options, "list-plugins")
        assert (listing.returncode, listing.stdout) == (-signal.SIGSEGV, "")
        assert f'File "{killer}", line 2' in listing.stderr
        assert ("importing killer (draftcore-killer 0.1)\n" in listing.stderr) == bool(options)
    listing = run("-m", "draftcore", "list-plugins", "--json", DRAFTCORE_DISABLE="killer")
    listed = {plugin["name"]: plugin for plugin in json.loads(listing.stdout)["plugins"]}
    assert listed["killer"]["state"] == "disabled"
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
    whose = f"plugins that are not draftcore's own: ends_{name} ({file} sha256:"
    for told in (whose, "complete: step 2 of 2"):
        assert (told in done.stdout) == (name == "observer")


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

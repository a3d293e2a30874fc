"""The shell: listing always works, verbs come from plugins, errors are for people."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

import draftcore
from draftcore.cli import HINT, main
from tests.kernel.conftest import STORE

if TYPE_CHECKING:
    from tests.kernel.conftest import Site

VERB = """
    import click
    from draftcore.errors import DraftcoreError, UsageError

    @click.command()
    @click.argument("how", default="well")
    @click.pass_obj
    def greet(registry, how):
        "Say hello."
        if how == "badly":
            raise DraftcoreError("no voice\\n  drink something")
        if how == "wrongly":
            raise UsageError("no such manner")
        if how == "never":
            raise KeyboardInterrupt
        if how == "nowhere":
            open("/").read()
        click.echo(f"hello from {len(registry.ready)} plugins")

    @hookimpl
    def commands():
        return [greet]
"""


def invoke(site: Site, *arguments: str) -> Result:
    """Run a verb in this process, with no plugins but the site's."""
    return CliRunner().invoke(main, arguments, obj=site.load())


# ------------------------------------------------------------ list-plugins


def test_the_table_shows_offers_problems_and_remedies(site: Site) -> None:
    site.core()
    source = "@hookimpl\ndef describe():\n    return [Offer('store', 'mine', frozenset('cba'))]\n"
    site.plugin("good", source + "@hookimpl\ndef feature_store(uri): ...")
    site.plugin("bad", "import surely_missing")
    info = site.folder / "draftcore_good-0.1.dist-info" / "direct_url.json"
    url = {"url": Path.cwd().as_uri() + "/plugins/good", "dir_info": {"editable": True}}
    info.write_text(json.dumps(url))
    lines = invoke(site, "list-plugins").output.splitlines()
    assert sorted(re.findall(r"(\w+) \d+", lines.pop())) == ["bad", "builtin", "good"]
    assert lines == [
        "NAME     DIST            VERSION  STATE   OFFERS",
        "bad      draftcore-bad   0.1      broken  "
        "ModuleNotFoundError: No module named 'surely_missing'",
        "                                          pip install surely_missing",
        "builtin  draftcore       0.4.2    ready   store builtin",
        "good     draftcore-good  0.1      ready   store mine [a, b, c]   editable: plugins/good",
    ]


def test_the_listing_as_data_has_every_field_and_nothing_else(site: Site) -> None:
    site.store("good")
    site.plugin("bad", "import surely_missing")
    bad, good = json.loads(invoke(site, "list-plugins", "--json").output)["plugins"]
    assert good.pop("import_ms") > 0
    offer = {"kind": "store", "name": "good", "capabilities": [], "examples": []}
    said = ("version", "0.1"), ("origin", ""), ("state", "ready"), ("problem", ""), ("fix", "")
    assert good == {"name": "good", "dist": "draftcore-good", **dict(said)} | {
        "offers": [{**offer, "options": "", "implementation": "", "needs": ""}],
        "hooks": ["describe", "feature_store"],
    }
    assert (bad["state"], bad["fix"]) == ("broken", "pip install surely_missing")


def test_what_an_offer_still_lacks_is_said_as_text_and_as_data(site: Site) -> None:
    """Of its modules, those that are not installed, with what installs them; it is ready."""
    needs = {"click": "pip install click", "missing_engine": "pip install 'mine[engine]'"}
    offer = f'Offer("store", "mine", needs={needs})'
    site.plugin("mine", STORE.replace('Offer("store", "NAME")', offer))
    lacks = "the store 'mine' needs missing_engine, which is not installed\n  pip install 'mine[engine]'"
    _, row, *more, _ = invoke(site, "list-plugins").output.splitlines()
    assert row.endswith("0.1      ready  store mine")
    assert [line.strip() for line in more] == [line.strip() for line in lacks.splitlines()]
    (mine,) = json.loads(invoke(site, "list-plugins", "--json").output)["plugins"]
    assert (mine["state"], mine["offers"][0]["needs"]) == ("ready", lacks)
    assert invoke(site, "list-plugins", "--check").exit_code == 0
    for wrong in ('["click"]', "7", '{7: ""}', '{"a\\n  b  ready": ""}', '{"": "pip"}'):
        odd = f'Offer("store", "x", needs={wrong})'
        site.plugin("odd", STORE.replace('Offer("store", "NAME")', odd))
        assert invoke(site, "list-plugins").exit_code == 0
        assert site.judged("odd").state == "broken", wrong
        shutil.rmtree(site.folder / "draftcore_odd-0.1.dist-info")
        del sys.modules["fake_odd"]


def test_only_check_makes_what_is_broken_an_exit_status(site: Site) -> None:
    site.store("good")
    assert invoke(site, "list-plugins", "--check").exit_code == 0
    site.plugin("exits", "raise SystemExit(9)")
    assert invoke(site, "list-plugins").exit_code == 0
    assert invoke(site, "list-plugins", "--check").exit_code == 1


def test_two_plugins_of_one_offer_are_both_ready_and_the_clash_is_told(site: Site) -> None:
    for name in ("a", "b"):
        site.plugin(name, STORE.replace("NAME", "same"))
    told = "a and b offer the store 'same': a run takes none, or that of `plugin` beside the name"
    assert told in invoke(site, "list-plugins").output.splitlines()
    assert json.loads(invoke(site, "list-plugins", "--json").output)["clashes"] == [told]
    site.store("same")
    taken = "a and b and same offer the store 'same': a run takes that of same (draftcore-same 0.1)"
    assert f"{taken}, or that of `plugin` beside the name" in invoke(site, "list-plugins").output
    assert invoke(site, "list-plugins", "--check").exit_code == 1


# ------------------------------------------------------------ verbs from plugins


def test_a_plugins_verb_runs_with_the_registry_and_stands_in_the_help(site: Site) -> None:
    site.plugin("polite", VERB)
    assert invoke(site, "greet").output == "hello from 1 plugins\n"
    assert "greet         Say hello." in invoke(site, "--help").output


def test_a_loose_file_may_bring_a_verb(site: Site) -> None:
    file = site.loose("loosely_polite", VERB)
    assert "hello from " in CliRunner().invoke(main, ["--plugin", str(file), "greet"]).output
    assert "greet" in CliRunner().invoke(main, ["--plugin", str(file), "--help"]).output
    gone = CliRunner().invoke(main, ["--plugin", f"{file}.py", "list-plugins"])
    assert gone.exit_code == 2
    assert gone.stderr.startswith(f"error: there is no file {file}.py")


@pytest.mark.parametrize(
    ("verb", "says"),
    [
        ("gret", "no verb 'gret' (did you mean 'greet'?)\n  installed: greet\n"),
        ("verify", "pip install draftcore-tools"),
        ("verfy", "pip install draftcore-tools   # for 'verify'"),
        ("make-coffee", "choose one that is there, or install the plugin that offers it"),
    ],
)
def test_an_unknown_verb_is_told_the_nearest_or_its_dist(site: Site, verb: str, says: str) -> None:
    site.plugin("polite", VERB)
    result = invoke(site, verb, "my-export")
    assert result.exit_code == 2
    assert says in result.stderr


def test_of_two_plugins_with_one_verb_neither_answers_nor_takes_a_core_one(site: Site) -> None:
    for name in ("a", "b"):
        site.plugin(name, VERB)
    taker = VERB.replace("greet()", "list_plugins()").replace("greet", "list_plugins")
    site.plugin("greedy", taker)
    result = invoke(site, "greet")
    assert result.exit_code == 2
    assert "cannot use the verb 'greet'\n  a (draftcore-a 0.1) is ready\n  b (" in result.stderr
    assert "  greet  " not in invoke(site, "--help").output
    assert "a and b offer the verb 'greet': " in invoke(site, "list-plugins").output


def test_a_verb_of_ours_is_its_owners_alone_and_nothing_else_is_imported(site: Site) -> None:
    ours = VERB.replace("greet", "verify").replace("no voice", "our voice")
    site.plugin("thief", "import sys\nsys.modules['stolen'] = sys\n" + dedent(ours))
    site.plugin("tools", ours)
    assert invoke(site, "verify", "badly").stderr.startswith("error: our voice")
    assert "stolen" not in sys.modules
    assert "thief and tools offer the verb 'verify'" in invoke(site, "list-plugins").output
    sys.modules.pop("stolen", None)


# ------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("how", "status", "text"),
    [
        ("badly", 1, "error: no voice\n  drink something\n"),
        ("wrongly", 2, "error: no such manner\n"),
        ("never", 130, "interrupted\n"),
        ("nowhere", 1, f"error: IsADirectoryError: [Errno 21] Is a directory: '/'{HINT}\n"),
    ],
)
def test_an_explained_error_is_shown_without_a_traceback_unless_asked(
    site: Site, how: str, status: int, text: str
) -> None:
    site.plugin("polite", VERB)
    result = invoke(site, "greet", how)
    assert (result.exit_code, result.stderr, result.stdout) == (status, text, "")
    if how != "never":
        assert not isinstance(invoke(site, "--traceback", "greet", how).exception, SystemExit)


def test_ctrl_c_ends_a_verb_with_one_line_and_status_130(site: Site) -> None:
    sleeps = "import time; click.echo('ready'); time.sleep(60)"
    site.plugin("polite", VERB.replace("raise KeyboardInterrupt", sleeps))
    root = str(Path(draftcore.__file__).parents[1])
    path = os.pathsep.join([str(site.folder), root, os.environ.get("PYTHONPATH", "")])
    command, pipe = [sys.executable, "-m", "draftcore", "greet", "never"], subprocess.PIPE
    env = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=300) == ("", "interrupted\n")
    assert process.returncode == 130


def test_the_version_is_that_of_the_distribution() -> None:
    result = CliRunner().invoke(main, ["--version"], prog_name="draftcore")
    assert result.output == f"draftcore {draftcore.__version__}\n"


def test_the_help_shows_every_verb_in_a_whole_sentence() -> None:
    text = CliRunner().invoke(main, ["--help"], terminal_width=80).output
    verbs = text.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert len(verbs) >= 8
    assert [line for line in verbs if not line.endswith(".") or line.endswith("...")] == []

"""The shell: listing always works, verbs come from plugins, errors are for people."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner, Result

import draftcore
from draftcore.cli import main

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
        click.echo(f"hello from {len(registry.ready)} plugins")

    @hookimpl
    def commands():
        return [greet]
"""
ROOT = str(Path(draftcore.__file__).parents[1])


def invoke(site: Site, *arguments: str) -> Result:
    """Run a verb in this process, with no plugins but the site's."""
    return CliRunner().invoke(main, arguments, obj=site.load())


def start(site: Site, *arguments: str) -> subprocess.Popen[str]:
    """Run a verb in a process of its own, where the site's plugins are installed as well."""
    path = os.pathsep.join([str(site.folder), ROOT, os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "draftcore", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A job in the background of a shell inherits SIGINT ignored; a person's terminal does not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


# ------------------------------------------------------------ list-plugins and hooks


def test_the_table_shows_offers_problems_and_remedies(site: Site) -> None:
    site.core()
    site.store("good")
    site.plugin("bad", "import surely_missing")
    info = site.folder / "draftcore_good-0.1.dist-info" / "direct_url.json"
    url = {"url": Path.cwd().as_uri() + "/plugins/good", "dir_info": {"editable": True}}
    info.write_text(json.dumps(url))
    assert invoke(site, "list-plugins").output.splitlines() == [
        "NAME     DIST            VERSION  STATE   OFFERS",
        "bad      draftcore-bad   0.1      broken  "
        "ModuleNotFoundError: No module named 'surely_missing'",
        "                                          pip install surely_missing",
        "builtin  (built in)      0.4.2    ready   store builtin",
        "good     draftcore-good  0.1      ready   store good   editable: plugins/good",
    ]


def test_capabilities_stand_in_brackets(site: Site) -> None:
    offer = "Offer('store', 'mine', frozenset('edcba'))"
    source = f"@hookimpl\ndef describe():\n    return [{offer}]\n"
    site.plugin("mine", source + "@hookimpl\ndef feature_store(uri): ...")
    assert "store mine [a, b, c, d, e]" in invoke(site, "list-plugins").output


def test_the_listing_as_data_has_every_field_and_nothing_else(site: Site) -> None:
    site.store("good")
    site.plugin("bad", "import surely_missing")
    result = invoke(site, "list-plugins", "--json")
    bad, good = json.loads(result.output)["plugins"]
    assert good.pop("import_ms") > 0
    assert good == {
        "name": "good",
        "dist": "draftcore-good",
        "version": "0.1",
        "origin": "",
        "state": "ready",
        "problem": "",
        "fix": "",
        "offers": [{"kind": "store", "name": "good", "capabilities": [], "options": ""}],
        "hooks": ["describe", "feature_store"],
    }
    assert (bad["state"], bad["fix"]) == ("broken", "pip install surely_missing")


def test_only_check_makes_a_broken_plugin_an_exit_status(site: Site) -> None:
    site.store("good")
    assert invoke(site, "list-plugins", "--check").exit_code == 0
    site.plugin("bad", "1 / 0")
    assert invoke(site, "list-plugins").exit_code == 0
    assert invoke(site, "list-plugins", "--check").exit_code == 1
    assert invoke(site, "list-plugins", "--check", "--json").exit_code == 1


def test_listing_works_whatever_is_broken(site: Site) -> None:
    site.plugin("exits", "raise SystemExit(9)")
    site.plugin("verbs", "@hookimpl\ndef commands():\n    raise RuntimeError")
    process = start(site, "list-plugins", "--json")
    output, _ = process.communicate(timeout=60)
    states = {plugin["name"]: plugin["state"] for plugin in json.loads(output)["plugins"]}
    assert process.returncode == 0
    assert (states["exits"], states["verbs"]) == ("broken", "ready")


def test_hooks_shows_signature_document_and_who_implements(site: Site) -> None:
    site.store("good")
    text = invoke(site, "hooks").output
    assert "feature_store(name: str, uri: str, options: Any) -> FeatureStore\n" in text
    data = {
        hook["name"]: hook for hook in json.loads(invoke(site, "hooks", "--json").output)["hooks"]
    }
    assert data["feature_store"]["plugins"] == ["good"]
    assert data["feature_store"]["result"] == "first"
    assert data["step_finished"]["result"] == "all"
    assert data["channel"]["plugins"] == []
    assert all(hook["doc"] and hook["signature"].startswith(hook["name"]) for hook in data.values())


# ------------------------------------------------------------ verbs from plugins


def test_a_plugins_verb_runs_with_the_registry_and_stands_in_the_help(site: Site) -> None:
    site.plugin("polite", VERB)
    assert invoke(site, "greet").output == "hello from 1 plugins\n"
    assert "greet         Say hello." in invoke(site, "--help").output


def test_a_loose_file_may_bring_a_verb(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "loosely_polite.py"
    site.module("loosely_polite", VERB).rename(file)
    output, _ = start(site, "--plugin", str(file), "greet").communicate(timeout=60)
    assert output.startswith("hello from ")
    output, _ = start(site, "--plugin", str(file), "--help").communicate(timeout=60)
    assert "greet" in output


def test_a_loose_file_that_is_not_there_is_a_usage_error(site: Site, tmp_path: Path) -> None:
    process = start(site, "--plugin", str(tmp_path / "none.py"), "list-plugins")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert error.startswith(f"error: there is no file {tmp_path / 'none.py'}")


def test_an_unknown_verb_is_answered_with_the_nearest_one(site: Site) -> None:
    site.plugin("polite", VERB)
    result = invoke(site, "gret")
    assert result.exit_code == 2
    assert "no verb 'gret' (did you mean 'greet'?); there are greet, hooks, list-plugins" in (
        result.output
    )


def test_a_verb_of_a_dist_that_is_not_installed_names_the_dist(site: Site) -> None:
    for verb in ("verify", "verfy"):
        result = invoke(site, verb, "my-export")
        assert result.exit_code == 2
        assert "pip install draftcore-tools" in result.stderr
    assert "no verb 'verfy' (did you mean 'verify'?)" in result.stderr
    assert "pip install" not in invoke(site, "make-coffee").stderr


def test_a_verb_of_the_core_imports_no_plugin_that_was_not_chosen(site: Site) -> None:
    site.store("idle")
    site.plugin("verbose", "@hookimpl\ndef commands():\n    raise RuntimeError")
    site.plugin("broken", "raise AssertionError('imported')")
    code = (
        "import sys, contextlib, draftcore.cli\n"
        "with contextlib.suppress(SystemExit): draftcore.cli.main(['train', 'none.yaml'])\n"
        "print(*sys.modules)"
    )
    path = os.pathsep.join([str(site.folder), ROOT, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.startswith("error: no configuration file none.yaml")
    modules = set(done.stdout.split())
    assert {"draftcore.builtin", "draftcore.verbs"} <= modules
    ours = {name for name in modules if name.startswith(("fake_", "draftcore_"))}
    assert ours == set()


def test_a_plugin_whose_verbs_fail_takes_no_other_verb_along(site: Site) -> None:
    site.plugin("polite", VERB)
    site.plugin("bad", "@hookimpl\ndef commands():\n    raise SystemExit('no GPU')")
    result = invoke(site, "greet")
    assert result.stdout == "hello from 2 plugins\n"
    assert "no verbs of bad (draftcore-bad 0.1): SystemExit: no GPU" in result.stderr


def test_of_two_plugins_with_one_verb_neither_answers(site: Site) -> None:
    site.plugin("a", VERB)
    site.plugin("b", VERB)
    result = invoke(site, "greet")
    assert result.exit_code == 2
    assert "warning: a and b have a verb 'greet'" in result.stderr


def test_a_verb_of_the_core_is_not_taken_over(site: Site) -> None:
    site.plugin("greedy", VERB.replace("greet", "hooks").replace("hello", "mine"))
    assert "mine" not in invoke(site, "hooks").output
    assert "draftcore and greedy have a verb 'hooks'" in invoke(site, "--help").stderr


# ------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("how", "status", "text"),
    [
        ("badly", 1, "error: no voice\n  drink something\n"),
        ("wrongly", 2, "error: no such manner\n"),
        ("never", 130, "interrupted\n"),
    ],
)
def test_an_explained_error_is_shown_without_a_traceback(
    site: Site, how: str, status: int, text: str
) -> None:
    site.plugin("polite", VERB)
    result = invoke(site, "greet", how)
    assert (result.exit_code, result.stderr, result.stdout) == (status, text, "")


def test_traceback_shows_where_an_error_comes_from(site: Site) -> None:
    site.plugin("polite", VERB)
    _, error = start(site, "--traceback", "greet", "badly").communicate(timeout=60)
    assert error.startswith("Traceback")
    assert "fake_polite.py" in error


def test_ctrl_c_ends_a_verb_with_one_line_and_status_130(site: Site) -> None:
    sleeps = "import time; click.echo('ready'); time.sleep(60)"
    site.plugin("polite", VERB.replace("raise KeyboardInterrupt", sleeps))
    process = start(site, "greet", "never")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "interrupted\n")
    assert process.returncode == 130


def test_a_verb_of_the_shell_is_an_ordinary_click_command() -> None:
    assert {name: type(verb) for name, verb in main.commands.items()} == {
        "hooks": click.Command,
        "list-plugins": click.Command,
    }


def test_the_version_is_that_of_the_distribution() -> None:
    result = CliRunner().invoke(main, ["--version"], prog_name="draftcore")
    assert result.output == f"draftcore {draftcore.__version__}\n"


def test_the_help_shows_every_verb_in_a_whole_sentence() -> None:
    text = CliRunner().invoke(main, ["--help"], terminal_width=80).output
    verbs = text.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert len(verbs) >= 8
    assert [line for line in verbs if not line.endswith(".") or line.endswith("...")] == []


FAILS = """
    import click

    @click.command()
    @click.argument("where")
    def fetch(where):
        open(where).read()

    @hookimpl
    def commands():
        return [fetch]
"""


def test_what_the_system_refuses_is_one_line_with_the_path_and_a_remedy(
    site: Site, tmp_path: Path
) -> None:
    site.plugin("keen", FAILS)
    result = invoke(site, "fetch", str(tmp_path))
    assert result.exit_code == 1
    first, remedy = result.stderr.splitlines()
    assert first.startswith("error: IsADirectoryError: ")
    assert str(tmp_path) in first
    assert "--traceback" in remedy
    assert isinstance(
        invoke(site, "--traceback", "fetch", str(tmp_path)).exception, IsADirectoryError
    )

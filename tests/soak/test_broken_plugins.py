"""Plugins that are broken at random: a listing names each of them, and lists a good one as ever."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.drills import Drill

HEADER = """
import click, itertools, os, sys
from draftcore import hookimpl
from draftcore.contracts.offers import Offer
OFFER = Offer("channel", "mine")
class Mute(Exception):
    def __str__(self): raise SystemExit(0)
    __repr__ = __str__
"""
OBSERVER = "@hookimpl\ndef step_finished(): ...\n"
RAISED = [
    "ValueError('x')", "SystemExit(0)", "SystemExit('no GPU')", "BaseException", "GeneratorExit",
    "Mute", "SystemExit(Mute())", "ValueError('y' * 10**6)", "OSError(7)", "KeyError(object())",
    "ValueError('\\x1b[2J\\x07\\r\\n  good  draftcore-good  0.1  ready')", "ValueError('\\udcff')",
    "ImportError(name=7)", "ImportError('x', name='\\x1b;rm -r /')", "MemoryError", "RecursionError",
    "UnicodeDecodeError('utf-8', b'\\xff', 0, 1, 'odd')", "ExceptionGroup('x', [Mute()])",
    "click.exceptions.Exit(0)", "click.Abort", "type('\\x1b[31m', (BaseException,), {})",
]  # fmt: skip
RETURNED = [
    "None", "7", "'text'", "[None]", "[Offer]", "OFFER", "{}", "{OFFER}", "itertools.count()",
    "itertools.repeat(OFFER)", "(OFFER for _ in itertools.count())", "[Mute()]", "range(10**18)",
    "[Offer('channel', None)]", "[Offer(['channel'], 'x')]", "[Offer('shop', 'x')]",
    "[Offer('channel', 'x', None)]", "[Offer('channel', 'x', {7})]",
    "[Offer('channel', '\\x1b[31m')]", "[Offer('channel', 'x\\n  y  ready')]", "[click.Command(None)]",
    "[Offer('channel', 'x' * 10**5)]", "[Offer('channel', 'x', options=int)]", "[click.Command]",
    "[click.Command('x', help=7)]", "[click.Command('x', short_help='\\x1b[2J')]",
    "[click.Command('x\\n  train  Break.')]", "[Offer('channel', 'x')]", "[OFFER, OFFER, Mute()]",
]  # fmt: skip
BROKEN = [
    *(f"raise {what}" for what in RAISED),
    *(f"@hookimpl\ndef {hook}(): raise {x}" for x in RAISED for hook in ("describe", "commands")),
    *(f"@hookimpl\ndef {hook}(): return {x}" for x in RETURNED for hook in ("describe", "commands")),
    "import nowhere", "def (", "\0", "\udcff", "", "sys.modules[__name__] = 7", "from . import x",
    "import importlib; importlib.import_module(__name__).missing", "del sys.modules[__name__]; 1 / 0",
    "@hookimpl\ndef unknown(): ...", "@hookimpl\ndef evaluated(colour): ...", "@hookimpl\nclass A: ...",
    "@hookimpl(wrapper=True)\ndef evaluated(): ...", "hookimpl(OFFER)", "@hookimpl(7)\ndef evaluated(): ...",
]  # fmt: skip
CHATTY = ["print('{')", "sys.stdout.write('{')", "click.echo('{')"]  # on stdout, which holds data
ENTRIES = [
    "{name}", "{name} =", "= {module}", "{name} = {module}:", "{name} = {module}:no.such", "{name} = 7",
    "{name} = {module}:Mute", "{name} = \udcff", "{name}\udcff = {module}:OFFER", "{name} = {module}:sys",
    "{name} = a{dots}", "{name} = no.such.module", "{name} = .", "{name} = '; echo {module}",
    "{name} = {module}:OFFER", "\x1b[31m{name}", "{name} = builtins:None", "{name} = {module}:OFFER.x\0",
]  # fmt: skip
DAMAGES = {
    "METADATA": [
        "", "\udcff\udcfe", "Version: 1\x1b[2J", "Version: {dots}", "Requires-Dist: ;;", "Name: x\0\n\n",
        "Requires-Dist: no-such", "Requires-Dist: draftcore<0.0.1", "Requires-Dist: {dots}",
    ],
    "direct_url.json": ["{", "[" * 10**5, '{"url": 7}', '{"url": "\\u001b", "dir_info": {}}', "\udcff"],
}  # fmt: skip


def write(file: Path, text: str) -> None:
    filled = text.replace("{dots}", ".a" * 10**4)
    file.write_bytes(filled.encode("utf-8", "surrogateescape"))


def break_one(site: Path, name: str, code: str, entry: str, draw: random.Random) -> list[str]:
    """Write a plugin, as a loose file, which is then an option of the listing, or as a damaged dist."""
    loose = entry != "{name}" and draw.random() < 0.3
    file = site.parent / f"{name}.py" if loose else site / f"fake_{name}.py"
    write(file, HEADER * (len(code) > 1) + code)
    if loose:
        return [f"--plugin={file}"]
    info = site / f"{name}-1.dist-info"
    for part, texts in DAMAGES.items():
        if draw.random() < 0.2:
            (info / part).mkdir(parents=True)  # a folder in the place of a file
        elif draw.random() < 0.5:
            info.mkdir(exist_ok=True)
            write(info / part, draw.choice(texts))
    info.mkdir(exist_ok=True)
    line = entry.replace("{name}", name).replace("{module}", f"fake_{name}")
    write(info / "entry_points.txt", f"[console_scripts]\na = b\n[draftcore]\n{line}\n")
    return []


def test_a_listing_names_every_broken_plugin(tmp_path: Path, drill: Drill) -> None:
    """All that a test tries lie beside a good one; half of them are chatty, or badly packed."""
    site = tmp_path / "site"
    (site / "good-1.dist-info").mkdir(parents=True)
    (site / "good-1.dist-info" / "entry_points.txt").write_text("[draftcore]\ngood = fake_good\n")
    (site / "good-1.dist-info" / "METADATA").write_text("Name: good\nVersion: 1\n")
    (site / "fake_good.py").write_text(HEADER + OBSERVER)
    env = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    env.pop("PYTHONUNBUFFERED", None)
    loose, listed = list[str](), dict[str, dict[str, Any]]()

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "draftcore", *loose, *arguments]
        done = subprocess.run(command, env=env, capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:].decode(errors="replace")
        return done.stdout.decode()

    cases = drill.draw("broken plugins")
    for case in cases:
        name, dice = f"odd{case.number}", case.dice
        usable = case.number % 2 == 1
        code = f"{dice.choice(CHATTY)}\n{OBSERVER}" if usable else dice.choice(BROKEN)
        entry = dice.choice(["{name} = {module}", *ENTRIES]) if usable else "{name} = {module}"
        loose += break_one(site, name, code, entry, dice)
        case.shown = f"{entry}\n{code}"
    for plugin in json.loads(run("list-plugins", "--json"))["plugins"]:
        listed[Path(plugin["dist"]).stem] = plugin
    assert listed["good"]["state"] == "ready"
    for case in drill.judge(cases):
        with case:
            plugin = listed[f"odd{case.number}"]
            assert all(str(v).isprintable() and len(str(v)) < 1200 for v in plugin.values())
            if plugin["state"] == "ready":
                assert case.number % 2 == 1
            else:
                assert plugin["problem"]
                assert plugin["fix"]
                case.outcome = "refused in words"
    table = run("list-plugins").splitlines()
    assert sum(line.startswith("good ") and line.isprintable() for line in table) == 1
    assert "  train  " in run("--help")

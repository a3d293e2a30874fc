"""The loader quarantines bad plugins, says why and what fixes it, and imports what is asked for."""

from __future__ import annotations

import random
import shutil
import signal
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner

from draftcore.cli import main
from draftcore.contracts.offers import Kind
from draftcore.errors import UsageError
from draftcore.plugins.registry import load_plugins
from draftcore.training import checkpoint
from tests.kernel.conftest import STORE, Site

Patch = pytest.MonkeyPatch
Captured = pytest.CaptureFixture[str]
HERE = version("pluggy")
OBSERVER = "@hookimpl\ndef step_finished(step): ...\n"
FORGOTTEN = "def capture(target): ...\ndef helper(): ...\ndef evaluated(step): ..."
WRAPPER = "@hookimpl(wrapper=True)\ndef feature_store(uri):\n    return (yield)\n"
HOOKS = [
    "feature_request(target)",
    "build_draft(target)",
    "collate(samples)",
    "forward_loss(draft)",
]


METHODS = [
    "__eq__", "__ne__", "__hash__", "__bool__", "__len__", "__iter__", "__repr__", "__str__", "__dir__",
    "__getattr__", "__getattribute__", "__contains__", "__call__", "__format__", "__lt__",
]  # fmt: skip
RAISED = ["ValueError('x')", "SystemExit(0)", "KeyboardInterrupt", "BaseException", "GeneratorExit"]


def offering(offers: str, more: str = "") -> str:
    return f"@hookimpl\ndef describe():\n    {offers}\n{more}"


ALGORITHM = offering('return [Offer("algorithm", "mine", frozenset({"disagg"}))]')
for hook in (*HOOKS, "build_disagg_draft_input(batch)"):
    ALGORITHM += f"@hookimpl\ndef {hook}: ...\n"


def offer(site: Site, plugin: str, name: str, more: str = "") -> None:
    """Install a plugin that offers the store of this name; `more` stands behind that in its offer."""
    site.plugin(plugin, STORE.replace('"NAME"', f'"{name}"{more}'))


def refusal(site: Site, kind: Kind, name: str) -> list[str]:
    """What is said to who chooses something that cannot be used."""
    with pytest.raises(UsageError) as caught:
        site.load().find(kind, name)
    return str(caught.value).splitlines()


def states(site: Site) -> dict[str, str]:
    return {plugin.name: plugin.state for plugin in site.load().plugins}


def imported() -> set[str]:
    return {name for name in sys.modules if name.removeprefix("draftcore.").startswith("fake_")}


def test_plugins_are_sorted_by_name_with_their_offers_and_hooks(site: Site) -> None:
    for name in ("b", "c", "a"):
        site.store(name)
    for name, plugin in zip("abc", site.load().plugins, strict=True):
        assert plugin.name == name
        assert (plugin.state, plugin.problem, plugin.fix) == ("ready", "", "")
        assert (plugin.dist, plugin.version) == (f"draftcore-{name}", "0.1")
        assert [(offer.kind, offer.name) for offer in plugin.offers] == [("store", name)]
        assert plugin.hooks == ("describe", "feature_store")
        assert plugin.import_ms > 0


BROKEN = {
    "import surely_missing.part": "ModuleNotFoundError: No module named 'surely_missing'",
    "1 / 0": "ZeroDivisionError: division by zero",
    "raise KeyboardInterrupt": "KeyboardInterrupt:",
    "raise SystemExit": "SystemExit:",
    "class Mute(Exception):\n    def __str__(self): 1 / 0\nraise Mute": "Mute: (it has no text: that ra",
    "raise ValueError('\\x1b\\n' + 'x' * 998)": rf"ValueError: \x1b {'x' * 498} ... (1000 characters)",
    "@hookimpl\ndef forwrd_loss(draft): ...": "unknown hook 'forwrd_loss' (did you mean 'forward_l",
    "@hookimpl\ndef evaluated(step, reprot): ...": "no argument 'reprot' (did you mean 'report'?);",
    "@hookimpl(wrapper=True)\ndef capture(): ...": "the wrapper capture has no yield",
    FORGOTTEN: "registers no hook; put @hookimpl above capture, evaluated",
    "answer = 42": "registers no hook",
    offering("raise SystemExit(3)"): "SystemExit: 3",
    offering("return Offer('store', 'x')"): "describe() returned store x",
    offering("return ['store']"): "describe() returned ['store']",
    offering(
        "return [Offer('algoritm', 'x')]"
    ): "unknown kind 'algoritm' (did you mean 'algorithm'?)",
    "@hookimpl\ndef commands(): return [1]": "commands() returned [1]",
    offering("return [Offer('algorithm', n) for n in 'ab']"): "several algorithms written as fu",
    offering("return [Offer('graph', 'mine')]"): "offers the graph 'mine' without graph_backend",
    offering("return [Offer('store', 'mine')]", WRAPPER): "the store 'mine' without feature_st",
    ALGORITHM.replace("@hookimpl\ndef collate", "def collate"): "put @hookimpl above collate",
    offering(
        "return [Offer('graph', 'm')]", "import os as graph_backend"
    ): "module graph_backend too",
    ALGORITHM.replace("@hookimpl\ndef build_disagg", "def build_disagg"): "without build_disagg",
}


@pytest.mark.parametrize(("source", "problem"), BROKEN.items(), ids=BROKEN.values())
def test_a_bad_plugin_is_broken_and_others_load(site: Site, source: str, problem: str) -> None:
    site.plugin("bad", source)
    site.store("good")
    bad, good = site.load().plugins
    assert (bad.state, good.state) == ("broken", "ready")
    assert problem in bad.problem
    with pytest.raises(UsageError) as caught:
        site.load().named("bad")
    assert str(caught.value).endswith(f"{bad.problem}\n  {bad.fix}")


def test_a_whole_algorithm_and_an_optional_hook_of_a_newer_core_are_ready(site: Site) -> None:
    site.plugin("whole", ALGORITHM)
    newer = f"{OBSERVER}@hookimpl(optionalhook=True)\ndef from_the_future(): ..."
    site.plugin("newer", newer)
    assert states(site) == {"newer": "ready", "whole": "ready"}


def test_a_broken_import_is_fixed_by_what_is_lacking_or_by_the_plugin_anew(site: Site) -> None:
    requires = ["surely-missing-engine>=2", "pluggy>=1", "other; extra == 'more'"]
    site.plugin("bad", "import surely_missing", requires=requires)
    site.metadata("draftcore-gone", {"gone": "fake_gone"})
    assert site.judged("bad").fix == "pip install 'surely-missing-engine>=2'"
    assert site.judged("gone").fix == "pip install --force-reinstall draftcore-gone"


@pytest.mark.parametrize(
    "bound",
    [">=99", "<0.1", "==0.1", "~=99.0", ">=1.5; python_version>'3.99'", "==1.*", f"=={HERE}.0"],
)
def test_a_plugin_that_requires_another_version_is_broken(site: Site, bound: str) -> None:
    """Whatever the form of the bound; a marker that does not apply asks for nothing."""
    site.plugin("bad", OBSERVER, requires=[f"pluggy{bound}"])
    found = site.judged("bad")
    if ";" in bound or bound in ("==1.*", f"=={HERE}.0"):
        assert found.state == "ready", found.problem
    else:
        assert found.state == "broken"
        assert found.problem == f"requires pluggy{bound}; here: pluggy {HERE}"


def test_ctrl_c_at_import_is_not_swallowed_and_names_the_plugin(
    site: Site, capsys: Captured
) -> None:
    site.plugin("slow", "import signal\nsignal.raise_signal(signal.SIGINT)")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        _ = site.load().plugins
    signal.signal(signal.SIGINT, before)
    said = "while looking at slow (draftcore-slow 0.1); DRAFTCORE_DISABLE=slow leaves it out\n"
    assert capsys.readouterr().err == said


def test_what_a_plugin_prints_goes_to_stderr_once(site: Site, capfd: Captured) -> None:
    site.plugin("chatty", "print('hello')\n1 / 0")
    registry = site.load()
    for _ in range(2):
        assert [plugin.state for plugin in registry.plugins] == ["broken"]
    printed = capfd.readouterr()
    assert site.judged("chatty").fix == "python -c 'import fake_chatty'   # shows where it fails"
    assert (printed.out, printed.err) == ("", "hello\n")
    site.plugin("mistaken", offering("return [Offer('store', 'x', option='y')]"))
    shows = "python -c 'import fake_mistaken; fake_mistaken.describe()'   # shows where it fails"
    assert site.judged("mistaken").fix == shows


def test_a_class_is_refused_but_its_instance_is_a_plugin(site: Site) -> None:
    source = """
        from draftcore.contracts.hooks import Specs

        class Observer(Specs):
            @hookimpl
            def step_finished(self, step, metrics): ...

        plugin = Observer()
    """
    site.module("classy", source)
    site.metadata("draftcore-classy", {"bad": "classy:Observer", "good": "classy:plugin"})
    bad, good = site.load().plugins
    assert bad.state == "broken"
    assert "is a class" in bad.problem
    assert "plugin = Observer()" in bad.fix
    assert (good.state, good.hooks) == ("ready", ("step_finished",))


def test_whatever_the_methods_of_an_instance_raise_disturbs_no_other_plugin(site: Site) -> None:
    """A comparison too: each of forty has up to three that raise, and twenty are as they should be."""
    draw = random.Random(31)
    for number in range(40):
        lines = ["class Odd:", "    @hookimpl", "    def step_finished(self, step): ..."]
        for method in draw.sample(METHODS, draw.randint(1, 3)):
            lines.append(f"    def {method}(self, *given): raise {draw.choice(RAISED)}")
        site.module(f"fake_odd{number}", "\n".join([*lines, "plugin = Odd()"]))
        site.metadata(f"draftcore-odd{number}", {f"odd{number}": f"fake_odd{number}:plugin"})
    for number in range(20):
        site.store(f"good{number}")
    found = {plugin.name: plugin for plugin in site.load().plugins}
    assert [p.problem for p in found.values() if p.name.startswith("good")] == [""] * 20
    assert {p.state for p in found.values()} == {"ready", "broken"}
    assert CliRunner().invoke(main, ["list-plugins"], obj=site.load()).exit_code == 0


# ------------------------------------------------------------ metadata


@pytest.mark.parametrize("seed", range(6))
def test_a_dist_whose_metadata_is_missing_or_binary_is_broken_and_not_imported(
    site: Site, seed: int
) -> None:
    site.plugin("torn", "raise AssertionError('imported')")
    file = site.folder / "draftcore_torn-0.1.dist-info" / "METADATA"
    file.write_bytes(random.Random(seed).randbytes(100 * seed))
    if seed == 1:
        file.unlink()
    torn = site.judged("torn")
    assert (torn.state, torn.problem) == (
        "broken", "ImportError: its METADATA is missing or damaged",
    )  # fmt: skip
    assert torn.fix == "pip install --force-reinstall draftcore-torn"
    assert "fake_torn" not in sys.modules


@pytest.mark.parametrize("first", [True, False])
def test_a_dist_of_the_cores_name_is_broken_and_stands_in_for_nothing(
    site: Site, tmp_path: Path, first: bool
) -> None:
    site.core("0.4.2")
    site.plugin("good", OBSERVER, requires=["draftcore>=0.4,<0.5"])
    site.module("fake_thief", "raise AssertionError('imported')")
    other = tmp_path / "elsewhere"
    names = {"builtin": "fake_thief", "more": "fake_thief:plugin"}
    site.metadata("Draftcore", names, version="9.9", folder=other)
    path = [str(other), str(site.folder)] if first else [str(site.folder), str(other)]
    registry = load_plugins(path=path)
    states = [(plugin.name, plugin.version, plugin.state) for plugin in registry.plugins]
    assert sorted(states) == [
        ("builtin", "0.4.2", "ready"), ("builtin", "9.9", "broken"), ("good", "0.1", "ready"),
        ("more", "9.9", "broken"),
    ]  # fmt: skip
    assert registry.find("store", "builtin").version == registry.named("builtin").version == "0.4.2"
    assert "fake_thief" not in sys.modules


def test_two_dists_with_one_plugin_name_are_a_conflict_and_neither_is_imported(site: Site) -> None:
    site.store("same")
    site.module("fake_other", "raise AssertionError('imported')")
    site.metadata("somebodys-plugin", {"same": "fake_other"})
    registry = site.load()
    with pytest.raises(UsageError, match="draftcore-same and somebodys-plugin have a plugin"):
        registry.named("same")
    assert [plugin.state for plugin in registry.plugins] == ["conflict", "conflict"]
    assert imported() == set()


def test_entry_points_that_nobody_can_read_are_listed_as_broken(site: Site) -> None:
    site.store("good")
    for name, text in (("torn", b"tor"), ("garbled", b"a\xff = \xff\n"), ("void", b"b =\n")):
        info = site.metadata(f"draftcore-{name}", {})
        (info / "entry_points.txt").write_bytes(b"[other]\nc = d\n[draftcore]\n" + text)
    assert states(site) == {"a\ufffd": "broken", "b": "broken", "good": "ready", "tor": "broken"}
    assert site.judged("tor").fix == "pip install --force-reinstall draftcore-torn"


def test_plugins_that_are_left_out_are_listed(
    site: Site, monkeypatch: Patch, capsys: Captured
) -> None:
    site.core()
    site.plugin("crashes", "raise AssertionError('imported')")
    monkeypatch.setenv("DRAFTCORE_DISABLE", "crashes,crash,builtin")
    assert states(site) == {"builtin": "ready", "crashes": "disabled"}
    *_, said = capsys.readouterr().err.splitlines()
    assert said.endswith("DRAFTCORE_DISABLE names no plugin: crash (did you mean 'crashes'?)")
    with pytest.raises(UsageError, match="is disabled: left out\n  DRAFTCORE_DISABLE names it"):
        site.load().named("crashes")


def test_of_two_folders_the_first_is_taken_also_a_checkout(site: Site, tmp_path: Path) -> None:
    site.store("good")
    other, egg = tmp_path / "elsewhere", tmp_path / "src/draftcore_good.egg-info"
    site.metadata("Draftcore_Good", {"good": "fake_good"}, version="9", folder=other)
    assert [plugin.version for plugin in site.load((), other).plugins] == ["0.1"]
    egg.parent.mkdir()
    site.metadata("draftcore-good", {"good": "fake_good"}, version="8", folder=tmp_path).rename(egg)
    (egg / "METADATA").rename(egg / "PKG-INFO")
    (plugin,) = load_plugins(path=[str(egg.parent), str(site.folder)]).plugins
    assert (plugin.state, plugin.version) == ("ready", "8")


def test_a_plugin_for_another_draftcore_is_not_even_imported(site: Site) -> None:
    site.core("0.4.2")
    site.plugin("old", "raise AssertionError", requires=["torch", "draftcore[all]>=0.3, <0.4"])
    builtin, old = site.load().plugins
    assert (builtin.state, builtin.dist, builtin.version) == ("ready", "draftcore", "0.4.2")
    assert old.state == "incompatible"
    assert old.problem == "requires draftcore[all]>=0.3, <0.4; here: draftcore 0.4.2"
    assert old.fix == "pip install 'draftcore[all]>=0.3, <0.4'"
    assert "fake_old" not in sys.modules


def test_a_requirement_that_is_met_or_is_not_on_the_core_is_no_obstacle(site: Site) -> None:
    site.core("0.4.2")
    met = ["draftcore>=0.4,<0.5", "draftcore (>=0.4)"]
    site.metadata("draftcore-old", {}, version="0.0.9")
    site.plugin("good", OBSERVER, requires=[*met, "draftcore-old<0.1", "draftcore<1; extra == 'x'"])
    assert site.judged("good").state == "ready"


def test_the_origin_is_the_editable_folder_or_the_commit(site: Site) -> None:
    site.store("good")
    git = '"vcs_info": {"vcs": "git", "commit_id": "0abc"}'
    here = '"file:///home/my%20plugin", "dir_info": {"editable": true}'
    for direct_url, origin in (
        (here, "editable: /home/my plugin"),
        (f'"https://x.org/p.git", {git}', "git+https://x.org/p.git@0abc"),
        ('"https://x.org/p-0.1-py3-none-any.whl", "archive_info": {}', ""),
        ("", ""),
    ):
        file = site.folder / "draftcore_good-0.1.dist-info" / "direct_url.json"
        file.write_text(f'{{"url": {direct_url}}}')
        assert (site.judged("good").state, site.judged("good").origin) == ("ready", origin)


def test_a_loose_file_is_a_plugin_named_by_its_stem(site: Site) -> None:
    file = site.loose("my_idea", OBSERVER)
    (plugin,) = site.load([file, file]).plugins
    assert (plugin.name, plugin.dist, plugin.state) == ("my_idea", str(file), "ready")
    assert plugin.loose
    assert plugin.version.startswith("sha256:")
    with pytest.raises(UsageError, match=r"no file .*my_ide\.py\n.*: my_idea\.py"):
        site.load([file.with_name("my_ide.py")])
    with pytest.raises(UsageError, match=r"my idea\.py cannot be imported .*\n  rename it"):
        site.load([site.loose("my idea", OBSERVER)])


def test_a_loose_file_never_stands_in_for_what_is_installed_by_its_name(site: Site) -> None:
    site.module("taken", "answer = 42")
    site.store("good")
    files = [site.loose(name, "raise AssertionError('imported')") for name in ("taken", "good")]
    *same, taken = site.load(files).plugins
    assert [plugin.state for plugin in same] == ["conflict", "conflict"]
    assert taken.state == "broken"
    assert "is a module of that name" in taken.problem


def test_an_unknown_name_lists_what_is_there_and_invents_no_pip_line(site: Site) -> None:
    site.store("mooring")
    site.plugin("bad", "1 / 0")
    first, *more, last = refusal(site, "store", "moring")
    assert "no store 'moring' (did you mean 'mooring'?)" in first
    assert "  installed: mooring" in more
    assert "quarantined: bad (draftcore-bad 0.1): ZeroDivisionError" in "\n".join(more)
    assert last == "  choose one that is there, or install the plugin that offers it"
    assert "there is no channel 'mooring'" in refusal(site, "channel", "mooring")[0]


def test_an_offer_of_a_dist_that_is_not_installed_names_the_dist(site: Site) -> None:
    for kind, name in (("algorithm", "eagle3"), ("capture", "sglang-server")):
        install = f"  pip install draftcore-{name.partition('-')[0]}"
        lines = [f"there is no {kind} {name!r}", "  installed: none", install]
        assert refusal(site, kind, name) == lines
    first, _, last = refusal(site, "store", "mooncacke")
    assert first == "there is no store 'mooncacke' (did you mean 'mooncake'?)"
    assert last == "  pip install draftcore-mooncake   # for 'mooncake'"


def test_offers_are_found_by_a_capability_in_our_own_dists_and_loose_files(site: Site) -> None:
    """What somebody installed beside them takes part where a run names it."""
    site.core()
    for name, words in (("mooncake", "fast shared"), ("file", "shared"), ("builtin_too", "fast")):
        offer(site, name, name.removesuffix("_too"), f", frozenset({words.split()})")
    file = site.loose("mine", STORE.replace('"NAME"', '"mine", frozenset({"fast"})'))
    registry = site.load([file])
    assert registry.offering("store", "fast") == ["mine", "mooncake"]
    assert registry.offering("capture", "fast") == []
    assert "fake_builtin_too" not in sys.modules


def test_what_is_built_in_wins_its_name_and_those_of_its_offers(site: Site) -> None:
    site.core()
    site.metadata("thief", {"builtin": "fake_thief"})
    offer(site, "fork", "builtin")
    found = {plugin.dist: plugin.state for plugin in site.load().plugins}
    assert found == {"draftcore": "ready", "thief": "conflict", "draftcore-fork": "ready"}
    assert site.load().find("store", "builtin") is not site.load().find("store", "builtin", "fork")
    assert site.load().find("store", "builtin").dist == site.load().named("builtin").dist


def test_a_name_of_ours_is_taken_from_its_dist_and_another_only_by_its_plugin(site: Site) -> None:
    """Neither a plugin, nor an entry point of that name, nor a loose file takes part otherwise."""
    site.store("mooncake")
    offer(site, "fork", "mooncake")
    site.module("fake_thief", "raise AssertionError('imported')")
    site.metadata("thief", {"mooncake": "fake_thief"})
    registry = site.load([site.loose("fake_loose", STORE.replace("NAME", "mooncake"))])
    assert registry.find("store", "mooncake").dist == "draftcore-mooncake"
    assert imported() == {"fake_mooncake"}
    for plugin in ("fork", "fake_loose"):
        assert registry.find("store", "mooncake", plugin).name == plugin
    assert registry.find("store", "mooncake").dist == "draftcore-mooncake"
    offer(site, "faster", "mooncake", ', frozenset({"fast"})')
    assert site.load().offering("store", "fast") == []


@pytest.mark.parametrize("owner", ["broken", "disabled", "missing"])
def test_where_a_names_owner_cannot_be_used_nobody_stands_in(
    site: Site, monkeypatch: Patch, owner: str
) -> None:
    for name in ("fork", "another"):
        offer(site, name, "mooncake")
    if owner != "missing":
        site.plugin("mooncake", "1 / 0" if owner == "broken" else STORE.replace("NAME", "mooncake"))
    monkeypatch.setenv("DRAFTCORE_DISABLE", "mooncake" if owner == "disabled" else "")
    says = {
        "broken": "  mooncake (draftcore-mooncake 0.1) is broken: ZeroDivisionError: division by zero",
        "disabled": "  mooncake (draftcore-mooncake 0.1) is disabled: left out",
        "missing": "  pip install draftcore-mooncake",
    }
    assert says[owner] in refusal(site, "store", "mooncake")
    assert imported() == set()


def test_two_plugins_with_one_offer_are_both_named(site: Site) -> None:
    for name in ("a", "b"):
        offer(site, name, "same")
    assert refusal(site, "store", "same") == [
        "cannot use the store 'same'",
        "  a (draftcore-a 0.1) is ready",
        "  b (draftcore-b 0.1) is ready",
        "  choose one: `plugin`, beside the name; or uninstall the others",
    ]
    assert site.load().find("store", "same", plugin="b").name == "b"
    with pytest.raises(UsageError, match=r"a .draftcore-a 0.1. offers no store 'other'"):
        site.load().find("store", "other", plugin="a")


def test_a_broken_plugin_of_that_name_or_dist_is_the_reason_unless_one_is_ready(site: Site) -> None:
    for name in ("sglang", "mine"):
        site.plugin(name, "1 / 0")
    for kind, name, plugin in (("capture", "sglang-server", "sglang"), ("store", "mine", "mine")):
        (line,) = [line for line in refusal(site, kind, name) if " is broken: ZeroDivision" in line]
        assert line.startswith(f"  {plugin} ")
    offer(site, "other", "mine")
    assert site.load().find("store", "mine").name == "other"


# ------------------------------------------------------------ importing what is chosen


def test_choosing_imports_the_built_in_plugin_and_the_one_of_that_name(site: Site) -> None:
    site.core()
    site.store("a")
    offer(site, "b", "a")
    site.plugin("bad", "raise AssertionError('imported')")
    registry = site.load()
    assert imported() == set()
    assert registry.find("store", "builtin").name == "builtin"
    assert imported() == {"draftcore.fake_builtin"}
    assert registry.find("store", "a").name == "a"
    assert registry.named("a").state == "ready"
    assert imported() == {"draftcore.fake_builtin", "fake_a"}


def test_an_offer_in_an_entry_point_of_another_name_is_found(site: Site) -> None:
    site.store("a")
    offer(site, "engine", "engine-server")
    assert site.load().find("store", "engine-server").name == "engine"


def test_a_loose_file_is_asked_before_what_is_installed(site: Site) -> None:
    site.plugin("bad", "raise AssertionError('imported')")
    file = site.loose("fake_loose", STORE.replace("NAME", "mine"))
    registry = site.load([file])
    assert registry.find("store", "mine").name == "fake_loose"
    assert imported() == {"fake_loose"}


def test_a_manifest_names_what_is_missing_and_lets_an_upgrade_pass(site: Site) -> None:
    site.core("0.4.2")
    for name in ("kept", "moved", "lost"):
        site.store(name)
    file = site.loose("my_idea", OBSERVER)
    registry = site.load([file])
    keys = ("name", "dist", "version", "origin")
    manifest = [{key: getattr(plugin, key) for key in keys} for plugin in registry.plugins]
    assert checkpoint.missing(manifest, registry) == ""

    for folder in ("draftcore_lost-0.1", "draftcore_moved-0.1", "draftcore-0.4.2"):
        shutil.rmtree(site.folder / f"{folder}.dist-info")
    site.metadata("draftcore-moved", {"moved": "fake_moved"}, version="0.2")
    site.plugin("idle", "raise AssertionError('imported')")
    site.metadata("another", {"kept": "fake_kept"})  # which who binds it tells of
    lines = checkpoint.missing(manifest, site.load()).splitlines()[1:]
    assert "fake_idle" not in sys.modules
    assert [line.strip() for line in lines] == [
        "builtin 0.4.2: pip install draftcore==0.4.2",
        "lost 0.1: pip install draftcore-lost==0.1",
        f"my_idea {manifest[4]['version']}: --plugin {file}",
    ]

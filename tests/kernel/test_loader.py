"""The loader quarantines bad plugins, says why and what fixes it, and imports what is asked for."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from draftcore.contracts.offers import Kind
from draftcore.errors import UsageError
from draftcore.plugins.catalog import lacking
from draftcore.plugins.registry import load

if TYPE_CHECKING:
    from tests.kernel.conftest import Site

STORE = """
    @hookimpl
    def describe():
        return [Offer("store", "NAME")]
    @hookimpl
    def feature_store(uri): ...
"""
ALGORITHM = """
    @hookimpl
    def describe():
        return [Offer("algorithm", "mine", frozenset({capabilities}))]
    @hookimpl
    def feature_request(target): ...
    @hookimpl
    def build_draft(target): ...
    @hookimpl
    def collate(samples): ...
    @hookimpl
    def forward_loss(draft, batch): ...
"""


def test_a_good_plugin_is_ready_with_its_offers_and_hooks(site: Site) -> None:
    site.store("good")
    plugin = site.judged("good")
    assert (plugin.state, plugin.problem, plugin.fix) == ("ready", "", "")
    assert (plugin.dist, plugin.version, plugin.module) == ("draftcore-good", "0.1", "fake_good")
    assert [(offer.kind, offer.name) for offer in plugin.offers] == [("store", "good")]
    assert plugin.hooks == ("describe", "feature_store")
    assert plugin.import_ms > 0


def test_plugins_are_sorted_by_name_wherever_they_lie_on_the_path(site: Site) -> None:
    for name in ("b", "c", "a"):
        site.store(name)
    assert [plugin.name for plugin in site.load().plugins] == ["a", "b", "c"]


# ------------------------------------------------------------ what pluggy does with a bad plugin


def test_a_broken_import_is_quarantined_and_the_others_load(site: Site) -> None:
    site.plugin("bad", "import surely_missing.part")
    site.store("good")
    bad, good = site.load().plugins
    assert bad.state == "broken"
    assert bad.problem == "ModuleNotFoundError: No module named 'surely_missing'"
    assert bad.fix == "pip install surely_missing"
    assert good.state == "ready"


def test_a_broken_import_is_fixed_by_the_requirement_that_is_not_installed(site: Site) -> None:
    requires = ["surely-missing-engine>=2", "pluggy>=1", "other; extra == 'more'"]
    site.plugin("bad", "import surely_missing", requires=requires)
    assert site.judged("bad").fix == "pip install 'surely-missing-engine>=2'"


def test_a_plugin_whose_own_files_are_gone_is_installed_again(site: Site) -> None:
    site.metadata("draftcore-gone", {"gone": "fake_gone"})
    assert site.judged("gone").fix == "pip install --force-reinstall draftcore-gone"


def test_any_other_error_at_import_names_the_command_that_shows_where(site: Site) -> None:
    site.plugin("bad", "1 / 0")
    plugin = site.judged("bad")
    assert (plugin.state, plugin.problem) == ("broken", "ZeroDivisionError: division by zero")
    assert plugin.fix.startswith("python -c 'import fake_bad'")


def test_system_exit_at_import_does_not_end_the_process(site: Site) -> None:
    site.plugin("bad", "raise SystemExit('no GPU')")
    plugin = site.judged("bad")
    assert (plugin.state, plugin.problem) == ("broken", "SystemExit: no GPU")


def test_ctrl_c_at_import_is_not_swallowed(site: Site) -> None:
    site.plugin("slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        _ = site.load().plugins


def test_an_unknown_hook_is_quarantined_and_the_nearest_name_offered(site: Site) -> None:
    site.plugin("bad", "@hookimpl\ndef forwrd_loss(draft): ...")
    plugin = site.judged("bad")
    assert plugin.state == "broken"
    assert plugin.problem == "unknown hook 'forwrd_loss' (did you mean 'forward_loss'?)"
    assert "draftcore hooks" in plugin.fix


def test_a_hook_of_a_newer_core_may_be_marked_optional(site: Site) -> None:
    source = "@hookimpl(optionalhook=True)\ndef from_the_future(): ..."
    site.plugin("early", source + "\n@hookimpl\ndef step_finished(step): ...")
    plugin = site.judged("early")
    assert (plugin.state, plugin.hooks) == ("ready", ("step_finished",))


def test_an_argument_that_the_hook_lacks_is_quarantined_with_pluggys_message(site: Site) -> None:
    source = "@hookimpl\ndef run_started(run): ...\n@hookimpl\ndef evaluated(step, colour): ..."
    site.plugin("bad", source)
    plugin = site.judged("bad")
    assert plugin.state == "broken"
    assert "evaluated(step, colour)" in plugin.problem
    assert "{'colour'}" in plugin.problem


def test_a_forgotten_marker_is_found_by_the_names_of_hooks(site: Site) -> None:
    site.plugin("bad", "def capture(target): ...\ndef helper(): ...\ndef evaluated(step): ...")
    plugin = site.judged("bad")
    assert plugin.state == "broken"
    assert plugin.problem == "registers no hook; put @hookimpl above capture, evaluated"


def test_a_module_without_any_hook_is_broken(site: Site) -> None:
    site.plugin("empty", "answer = 42")
    assert site.judged("empty").problem == "registers no hook"


def test_a_class_is_refused_but_its_instance_is_a_plugin(site: Site) -> None:
    source = """
        from draftcore.contracts.hooks import Specs

        class Observer(Specs):
            @hookimpl
            def step_finished(self, step, metrics): ...

        plugin = Observer()
    """
    site.module("classy", source)
    points = {"bad": "classy:Observer", "good": "classy:plugin"}
    site.metadata("draftcore-classy", points)
    bad, good = site.load().plugins
    assert bad.state == "broken"
    assert "is a class" in bad.problem
    assert "plugin = Observer()" in bad.fix
    assert (good.state, good.hooks) == ("ready", ("step_finished",))


def test_two_dists_with_one_plugin_name_are_a_conflict_and_neither_is_imported(site: Site) -> None:
    site.store("same")
    site.module("fake_other", "raise AssertionError('imported')")
    site.metadata("somebodys-plugin", {"same": "fake_other"})
    plugins = site.load().plugins
    assert [plugin.state for plugin in plugins] == ["conflict", "conflict"]
    for plugin in plugins:
        assert "draftcore-same" in plugin.problem
        assert "somebodys-plugin" in plugin.problem
    assert not {"fake_same", "fake_other"} & sys.modules.keys()


def test_one_module_under_two_names_is_kept_once(site: Site) -> None:
    site.store("first")
    site.metadata("draftcore-alias", {"second": "fake_first"})
    first, second = site.load().plugins
    assert (first.state, second.state) == ("ready", "broken")
    assert "'first' already" in second.problem


# ------------------------------------------------------------ metadata


def test_a_stale_empty_folder_does_not_hide_the_installed_dist(site: Site, tmp_path: Path) -> None:
    site.store("good")
    stale = site.metadata("draftcore-good", {"good": "fake_good"}, version="0.0.1")
    (stale / "METADATA").unlink()
    assert (site.judged("good").state, site.judged("good").version) == ("ready", "0.1")


def test_of_two_versions_in_one_folder_the_newer_is_taken(site: Site) -> None:
    site.store("good")
    for version in ("0.0.9", "0.10", "0.9"):
        site.metadata("draftcore-good", {"good": "fake_good"}, version=version)
    assert site.judged("good").version == "0.10"


def test_of_two_folders_the_first_on_the_path_is_taken(site: Site, tmp_path: Path) -> None:
    site.store("good")
    other = tmp_path / "elsewhere"
    site.metadata("Draftcore_Good", {"good": "fake_good"}, version="9", folder=other)
    (plugin,) = site.load((), other).plugins
    assert plugin.version == "0.1"


def test_the_egg_info_of_a_checkout_does_not_make_a_second_dist(site: Site, tmp_path: Path) -> None:
    site.store("good")
    egg = tmp_path / "src" / "draftcore_good.egg-info"
    egg.parent.mkdir()
    site.metadata("draftcore-good", {"good": "fake_good"}, version="9", folder=tmp_path).rename(egg)
    (egg / "METADATA").rename(egg / "PKG-INFO")
    (plugin,) = load(path=[str(egg.parent), str(site.folder)]).plugins
    assert (plugin.state, plugin.version) == ("ready", "0.1")


def test_a_dist_without_readable_metadata_is_broken(site: Site) -> None:
    site.store("torn")
    (site.folder / "draftcore_torn-0.1.dist-info" / "METADATA").unlink()
    plugin = site.judged("torn")
    assert plugin.state == "broken"
    assert plugin.fix == "pip install --force-reinstall draftcore-torn"


def test_a_plugin_for_another_draftcore_is_not_even_imported(site: Site) -> None:
    site.core("0.4.2")
    site.plugin("old", "raise AssertionError", requires=["torch", "draftcore[all]>=0.3, <0.4"])
    plugin = site.judged("old")
    assert plugin.state == "incompatible"
    assert plugin.problem == "requires draftcore[all]>=0.3, <0.4, and this is draftcore 0.4.2"
    assert plugin.fix == "pip install 'draftcore[all]>=0.3, <0.4'"
    assert "fake_old" not in sys.modules


@pytest.mark.parametrize(
    "requires",
    [
        "draftcore>=0.4,<0.5",
        "draftcore (>=0.4)",
        "draftcore-old<0.1",
        "draftcore<0.1; extra == 'x'",
    ],
)
def test_a_requirement_that_is_met_or_is_not_on_the_core_is_no_obstacle(
    site: Site, requires: str
) -> None:
    site.core("0.4.2")
    site.store("good")
    metadata = site.folder / "draftcore_good-0.1.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + f"Requires-Dist: {requires}\n")
    assert site.judged("good").state == "ready"


def test_built_ins_are_the_plugins_of_the_dist_draftcore(site: Site) -> None:
    site.core()
    plugin = site.judged("builtin")
    assert (plugin.state, plugin.dist, plugin.version) == ("ready", "(built in)", "0.4.2")


@pytest.mark.parametrize(
    ("direct_url", "origin"),
    [
        (
            {"url": "file:///home/me/my%20plugin", "dir_info": {"editable": True}},
            "editable: /home/me/my plugin",
        ),
        (
            {"url": "https://example.org/p.git", "vcs_info": {"vcs": "git", "commit_id": "0abc"}},
            "git+https://example.org/p.git@0abc",
        ),
    ],
)
def test_the_origin_is_the_editable_folder_or_the_commit(
    site: Site, direct_url: dict[str, object], origin: str
) -> None:
    site.store("good")
    info = site.folder / "draftcore_good-0.1.dist-info"
    (info / "direct_url.json").write_text(json.dumps(direct_url))
    assert site.judged("good").origin == origin


def test_a_malformed_direct_url_does_not_break_the_listing(site: Site) -> None:
    site.store("good")
    (site.folder / "draftcore_good-0.1.dist-info" / "direct_url.json").write_text("{")
    assert (site.judged("good").state, site.judged("good").origin) == ("ready", "")


# ------------------------------------------------------------ offers


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("raise RuntimeError('no driver')", "RuntimeError: no driver"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("return None", "must return Offers"),
        ("return ['store']", "must return Offers"),
        ("return [Offer('shop', 'mine')]", "must return Offers of algorithm, capture, store"),
        ("return [Offer('algorithm', 'a'), Offer('algorithm', 'b')]", "one at most"),
    ],
)
def test_a_bad_description_is_quarantined(site: Site, body: str, problem: str) -> None:
    site.plugin("bad", f"@hookimpl\ndef describe():\n    {body}")
    plugin = site.judged("bad")
    assert plugin.state == "broken"
    assert problem in plugin.problem


@pytest.mark.parametrize("kind", ["capture", "store", "channel", "graph", "graph-plugin"])
def test_an_offer_without_the_hook_that_opens_it_is_quarantined(
    site: Site, kind: Literal["capture", "store"]
) -> None:
    site.plugin("bad", f"@hookimpl\ndef describe():\n    return [Offer({kind!r}, 'mine')]")
    plugin = site.judged("bad")
    assert plugin.state == "broken"
    assert plugin.problem.startswith(f"offers the {kind} 'mine' without ")


def test_the_marker_that_an_algorithm_forgot_is_named(site: Site) -> None:
    source = ALGORITHM.format(capabilities=())
    site.plugin("whole", source)
    site.plugin("part", source.replace("@hookimpl\n    def collate", "def collate"))
    part, whole = site.load().plugins
    assert whole.state == "ready"
    assert part.problem == (
        "offers the algorithm 'mine' without collate; put @hookimpl above collate"
    )


def test_a_wrapper_does_not_make_an_owner(site: Site) -> None:
    source = """
        @hookimpl
        def describe():
            return [Offer("store", "mine")]
        @hookimpl(wrapper=True)
        def feature_store(uri):
            return (yield)
    """
    site.plugin("bad", source)
    assert "without feature_store" in site.judged("bad").problem


def test_the_capability_disagg_needs_its_hook(site: Site) -> None:
    source = ALGORITHM.format(capabilities={"disagg"})
    site.plugin("bad", source)
    hook = "\n    @hookimpl\n    def build_disagg_draft_input(batch): ...\n"
    site.plugin("good", source + hook)
    bad, good = site.load().plugins
    assert "without build_disagg_draft_input" in bad.problem
    assert good.state == "ready"


def test_what_a_plugin_prints_at_import_goes_to_stderr(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.plugin("chatty", "print('hello')\n@hookimpl\ndef step_finished(step): ...")
    _ = site.load().plugins
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "hello\n")


# ------------------------------------------------------------ loose files


def test_a_loose_file_is_a_plugin_named_by_its_stem(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "my_idea.py"
    file.write_text("from draftcore import hookimpl\n@hookimpl\ndef step_finished(step): ...\n")
    (plugin,) = site.load([file, file]).plugins
    assert (plugin.name, plugin.dist, plugin.state) == ("my_idea", str(file), "ready")
    assert plugin.loose
    assert plugin.version.startswith("sha256:")


def test_a_loose_file_that_is_not_there_is_refused_with_its_neighbours(
    site: Site, tmp_path: Path
) -> None:
    (tmp_path / "my_idea.py").touch()
    with pytest.raises(UsageError, match=r"no file .*my_ide\.py\n.*: my_idea\.py"):
        site.load([tmp_path / "my_ide.py"])


def test_a_loose_file_never_stands_in_for_a_module_of_its_name(site: Site, tmp_path: Path) -> None:
    site.module("taken", "answer = 42")
    file = tmp_path / "taken.py"
    file.write_text("raise AssertionError('imported')")
    (plugin,) = site.load([file]).plugins
    assert plugin.state == "broken"
    assert "is a module of that name" in plugin.problem


def test_a_loose_file_clashes_with_an_installed_plugin_of_its_name(
    site: Site, tmp_path: Path
) -> None:
    site.store("good")
    file = tmp_path / "good.py"
    file.touch()
    assert [plugin.state for plugin in site.load([file]).plugins] == ["conflict", "conflict"]


# ------------------------------------------------------------ choosing


def test_an_unknown_name_lists_what_is_there_and_invents_no_pip_line(site: Site) -> None:
    site.store("mooring")
    site.plugin("bad", "1 / 0")
    with pytest.raises(UsageError) as caught:
        site.load().find("store", "moring")
    text = str(caught.value)
    assert "no store 'moring' (did you mean 'mooring'?)" in text
    assert "installed: mooring" in text
    assert "quarantined: bad (draftcore-bad 0.1): ZeroDivisionError" in text
    assert text.endswith("choose one that is there, or install the plugin that offers it")
    assert "pip install" not in text


@pytest.mark.parametrize(
    ("kind", "name", "dist"),
    [
        ("algorithm", "eagle3", "draftcore-eagle3"),
        ("capture", "sglang-server", "draftcore-sglang"),
        ("runner", "graphs", "draftcore-graphs"),
        ("store", "shm", "draftcore-shm"),
    ],
)
def test_an_offer_of_a_dist_that_is_not_installed_names_the_dist(
    site: Site, kind: Kind, name: str, dist: str
) -> None:
    with pytest.raises(UsageError) as caught:
        site.load().find(kind, name)
    assert str(caught.value).splitlines() == [
        f"there is no {kind} {name!r}",
        "  installed: none",
        f"  pip install {dist}",
    ]


def test_a_misspelt_offer_of_a_dist_that_is_not_installed_is_recognised(site: Site) -> None:
    site.store("file")
    with pytest.raises(UsageError) as caught:
        site.load().find("store", "mooncacke")
    text = str(caught.value)
    assert "no store 'mooncacke' (did you mean 'mooncake'?)" in text
    assert text.endswith("pip install draftcore-mooncake   # for 'mooncake'")


def test_a_broken_plugin_of_the_dist_that_has_an_offer_is_its_reason(site: Site) -> None:
    site.plugin("sglang", "1 / 0")
    with pytest.raises(UsageError, match=r"sglang .* is broken: ZeroDivisionError"):
        site.load().find("capture", "sglang-server")


def test_offers_are_found_by_a_capability(site: Site) -> None:
    for name, words in (("a", "fast shared"), ("b", "shared"), ("c", "fast")):
        offer = f'Offer("store", "NAME", frozenset({words.split()}))'
        site.plugin(name, STORE.replace('Offer("store", "NAME")', offer).replace("NAME", name))
    registry = site.load()
    assert registry.offering("store", "fast") == ["a", "c"]
    assert registry.offering("capture", "fast") == []


def test_what_is_lacking_names_the_dist_that_has_the_capability() -> None:
    text = lacking("store", "memory-speed")
    assert text.splitlines()[0] == "no store with the capability 'memory-speed' is installed"
    assert text.endswith("pip install draftcore-shm")
    assert "pip install" not in lacking("store", "antigravity")


def test_a_kind_of_another_offer_is_not_confused(site: Site) -> None:
    site.store("good")
    with pytest.raises(UsageError, match="there is no channel 'good'"):
        site.load().find("channel", "good")


def test_two_plugins_with_one_offer_are_both_named(site: Site) -> None:
    for name in ("a", "b"):
        site.plugin(name, STORE.replace("NAME", "same"))
    with pytest.raises(UsageError) as caught:
        site.load().find("store", "same")
    assert str(caught.value).splitlines() == [
        "cannot use the store 'same'",
        "  a (draftcore-a 0.1) is ready",
        "  b (draftcore-b 0.1) is ready",
        "  uninstall all but one; a file: leave out --plugin",
    ]


def test_choosing_a_broken_plugin_fails_with_its_reason_and_remedy(site: Site) -> None:
    site.plugin("bad", "import surely_missing")
    registry = site.load()
    with pytest.raises(UsageError) as found:
        registry.find("store", "bad")
    with pytest.raises(UsageError) as named:
        registry.named("bad")
    for text in (str(found.value), str(named.value)):
        assert "No module named 'surely_missing'" in text
        assert text.endswith("pip install surely_missing")


def test_a_ready_offer_is_found_though_a_broken_plugin_has_its_name(site: Site) -> None:
    site.plugin("mine", "1 / 0")
    site.plugin("other", STORE.replace("NAME", "mine"))
    assert site.load().find("store", "mine").name == "other"


# ------------------------------------------------------------ importing what is chosen


def imported() -> set[str]:
    return {name for name in sys.modules if name.startswith("fake_")}


def test_looking_for_plugins_imports_none(site: Site) -> None:
    site.store("a")
    site.load()
    assert imported() == set()


def test_choosing_imports_the_built_in_plugin_and_the_one_of_that_name(site: Site) -> None:
    site.core()
    for name in ("a", "b"):
        site.store(name)
    site.plugin("bad", "raise AssertionError('imported')")
    registry = site.load()
    assert registry.find("store", "builtin").name == "builtin"
    assert imported() == {"fake_builtin"}
    assert registry.find("store", "a").name == "a"
    assert registry.named("a").state == "ready"
    assert imported() == {"fake_builtin", "fake_a"}


def test_a_plugin_of_the_name_goes_before_others_with_that_offer(site: Site) -> None:
    site.store("a")
    site.plugin("b", STORE.replace("NAME", "a"))
    assert site.load().find("store", "a").name == "a"
    assert imported() == {"fake_a"}


def test_an_offer_in_an_entry_point_of_another_name_is_found(site: Site) -> None:
    site.store("a")
    site.plugin("engine", STORE.replace("NAME", "engine-server"))
    assert site.load().find("store", "engine-server").name == "engine"


def test_a_loose_file_is_asked_before_what_is_installed(site: Site, tmp_path: Path) -> None:
    site.plugin("bad", "raise AssertionError('imported')")
    file = tmp_path / "fake_loose.py"
    site.module("fake_loose", STORE.replace("NAME", "mine")).rename(file)
    assert site.load([file]).find("store", "mine").name == "fake_loose"
    assert imported() == {"fake_loose"}


def test_a_verdict_is_the_same_whoever_was_judged_before(site: Site) -> None:
    site.store("first")
    site.metadata("draftcore-alias", {"second": "fake_first"})
    for name in ("draftcore-one", "draftcore-two"):
        site.metadata(name, {"same": "fake_same"})
    registry = site.load()
    with pytest.raises(UsageError, match="its module is the plugin 'first' already"):
        registry.named("second")
    with pytest.raises(UsageError, match="draftcore-one and draftcore-two have a plugin"):
        registry.named("same")
    seen = {plugin.name: plugin.problem for plugin in registry.plugins}
    assert seen == {plugin.name: plugin.problem for plugin in site.load().plugins}
    assert registry.named("first").state == "ready"


def test_a_plugin_is_imported_once_however_often_it_is_asked_for(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.plugin("bad", "print('again')\n1 / 0")
    registry = site.load()
    for _ in range(2):
        with pytest.raises(UsageError, match="ZeroDivisionError"):
            registry.named("bad")
    assert capsys.readouterr().err == "again\n"


# ------------------------------------------------------------ manifests


def test_a_manifest_names_what_is_missing_and_lets_an_upgrade_pass(
    site: Site, tmp_path: Path
) -> None:
    site.core("0.4.2")
    for name in ("kept", "moved", "lost"):
        site.store(name)
    file = tmp_path / "my_idea.py"
    file.write_text("from draftcore import hookimpl\n@hookimpl\ndef step_finished(step): ...\n")
    registry = site.load([file])
    manifest = json.loads(json.dumps(registry.manifest(registry.plugins)))
    assert {"name", "dist", "version", "origin"} == set(manifest[0])
    assert registry.missing(manifest) == ""

    shutil.rmtree(site.folder / "draftcore_lost-0.1.dist-info")
    shutil.rmtree(site.folder / "draftcore_moved-0.1.dist-info")
    site.metadata("draftcore-moved", {"moved": "fake_moved"}, version="0.2")
    shutil.rmtree(site.folder / "draftcore-0.4.2.dist-info")
    site.plugin("idle", "raise AssertionError('imported')")
    registry = site.load()
    lines = registry.missing(manifest).splitlines()[1:]
    assert "fake_idle" not in sys.modules
    assert [line.strip() for line in lines] == [
        "builtin 0.4.2: pip install draftcore==0.4.2",
        "lost 0.1: pip install draftcore-lost==0.1",
        f"my_idea {manifest[4]['version']}: --plugin {file}",
    ]

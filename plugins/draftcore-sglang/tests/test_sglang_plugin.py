"""The offers, options and messages; an sglang that is not as tested; and where sglang is imported."""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from capturing import require_engine_ended, write_run
from draftcore_eval.engines import Serving
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.suite import child_environment
from draftcore_sdk.targets import tiny_target
from draftcore_sglang import internals, server
from draftcore_sglang.capture import SglangCapture, settings_of
from draftcore_sglang.internals import Limits, Settings, disagg
from draftcore_sglang.internals import server as hooked
from draftcore_sglang.internals.signatures import TESTED, require_sglang
from draftcore_sglang.options import EngineOptions, SglangOptions
from draftcore_sglang.ranks import Ranks
from draftcore_sglang.remote import place
from draftcore_sglang.served import SglangEngine, read_answer
from draftcore_sglang.wire import Ask, Refusal, pack, unpack
from packaging.requirements import Requirement

from draftcore import open_run
from draftcore.contracts.capture import FeatureRequest
from draftcore.errors import UsageError

HERE = Path(__file__).parents[1]
ROOT = HERE.parents[1]
REQUEST = FeatureRequest((0,), True, "float32")


class TestPlugin(PluginSuite):
    plugin = "draftcore_sglang.plugin"


def test_one_package_alone_imports_sglang() -> None:
    """Of the core and of all dists."""
    packages = [ROOT / "draftcore", *ROOT.glob("plugins/*/draftcore_*")]
    files = [path for package in packages for path in package.rglob("*.py")]
    assert len(files) > 50
    imports = re.compile(r"""^\s*(import|from) sglang\b|["']sglang\.""", re.MULTILINE)
    found = {path.parent.relative_to(ROOT) for path in files if imports.search(path.read_text())}
    assert found == {Path("plugins/draftcore-sglang/draftcore_sglang/internals")}


BESIDE_A_SERVER = """
import sys
sys.modules.update(dict.fromkeys(["transformers", "draftcore_hf"]))
import draftcore_sglang.disagg, draftcore_sglang.internals.server, draftcore_sglang.writer
draftcore_sglang.writer.open_store(sys.argv[1]).close()
"""


def test_beside_a_server_it_needs_the_core_and_a_store_alone(tmp_path: Path) -> None:
    """sglang pins a transformers that may be older than ours."""
    command = [sys.executable, "-c", BESIDE_A_SERVER, f"file:{tmp_path}/memory?volatile=yes"]
    subprocess.run(command, env=child_environment(), check=True)


@pytest.fixture
def target(tmp_path: Path) -> TransformersTarget:
    return TransformersTarget(str(tiny_target(tmp_path)), device="cpu")


# ---------------------------------------------------------------- which sglang


def pretend(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Let this version of sglang be installed, or none."""
    true = metadata.version

    def found(name: str) -> str:
        if name == "sglang" and version is None:
            raise metadata.PackageNotFoundError(name)
        return version if name == "sglang" and version else true(name)

    monkeypatch.setattr(metadata, "version", found)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "is not installed"),
        ("0.5.16", r"0\.5\.16 is installed.*0\.5\.17"),
        ("0.5.24", r"0\.5\.24 is installed.*0\.5\.17"),
    ],
)
def test_without_an_sglang_that_was_tested_the_pip_line_is_the_answer(
    monkeypatch: pytest.MonkeyPatch, target: TransformersTarget, version: str, reason: str
) -> None:
    pretend(monkeypatch, version)
    line = rf"{reason}.*\n  pip install 'draftcore-sglang\[sglang\]'"
    with pytest.raises(UsageError, match=line):
        SglangCapture(target, REQUEST, SglangOptions())


def test_all_that_moved_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter more; another order; a name and a module that are gone. The range is the extra's."""
    extras = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    (line,) = extras["optional-dependencies"]["sglang"]
    assert Requirement(line).specifier == TESTED
    pretend(monkeypatch, "0.5.23")
    require_sglang({"draftcore.errors:nearest": "name known"})
    wanted = {"draftcore.errors:nearest": "name", "draftcore.errors:closest": "known name"}
    with pytest.raises(UsageError, match=r"0\.5\.23 is not as(.|\n)*pip install") as caught:
        require_sglang({**wanted, "json:gone": "", "no_such_module:f": ""})
    more, order, gone, module = map(str.strip, str(caught.value).splitlines()[1:-1])
    assert more == "draftcore.errors:nearest(name, known), where (name) was tested"
    assert order == "draftcore.errors:closest(name, known, alike), where (known, name) was tested"
    assert [gone.split()[0], module.split()[0]] == ["json:gone:", "no_such_module:f:"]


@pytest.mark.sglang
@pytest.mark.smoke
def test_the_sglang_that_is_installed_is_as_tested() -> None:
    for used in (internals, hooked, disagg):
        require_sglang(used.SIGNATURES)


@pytest.mark.sglang
def test_a_server_whose_sglang_moved_takes_nothing_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first use of each is behind the check."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    before = dict(HookRegistry._hooks)
    monkeypatch.setattr(HookRegistry, "register", staticmethod(lambda target, hook: None))
    with pytest.raises(UsageError, match=r"HookRegistry\.register\(target, hook\)"):
        hooked.install("file:none", (), 1 << 20)
    assert HookRegistry._hooks == before


OTHERS = (  # that stand in the same pages for other programs
    "--target --speculative-config --server --prompts --run --device --json --row --steps --minutes"
    " --lr --draft --only --shm-size"
)


@pytest.mark.sglang
def test_every_flag_that_our_readmes_give_is_one_of_sglangs() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    texts = [page.read_text() for page in ROOT.glob("plugins/*/README.md")]
    texts = [text for text in texts if "sglang.launch_server" in text]
    assert len(texts) > 3
    named = set(re.findall(r"(?<![-\w])--[a-z][a-z-]+", "\n".join(texts))) - set(OTHERS.split())
    assert len(named) > 12
    assert named - known == set()


# ---------------------------------------------------------------- ranks that end


def answer(settings: Settings, rank: int, port: int, meeting: str, pipe: Any) -> None:
    """Be a rank that computes nothing, as sglang may be missing here."""
    pipe.send((False, Limits(1, 1, 1)))
    while True:
        pipe.recv()
        pipe.send((False, {}))


def test_an_engine_that_has_died_ends_the_process_that_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork = multiprocessing.get_context("fork")  # ranks that compute nothing need no fresh process
    monkeypatch.setattr("torch.multiprocessing.get_context", lambda method: fork)
    monkeypatch.setattr("draftcore_sglang.ranks.serve", answer)
    ranks = Ranks(Settings("target", None, "float32", "cpu", 2, 1, 1, "{}"))
    assert ranks.forward([[5]], (), {}) == {}
    require_engine_ended(lambda: ranks.forward([[5]], (), {}))


# ---------------------------------------------------------------- options and settings


@pytest.mark.parametrize(("device", "there"), [("cpu", "cores"), ("cuda:1", "devices")])
def test_more_devices_than_there_are_are_refused_before_a_process_starts(
    target: TransformersTarget, monkeypatch: pytest.MonkeyPatch, device: str, there: str
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr("draftcore_sglang.capture.resolve_device", torch.device)
    target.device = device
    assert settings_of(target, SglangOptions(tp=3)).tp == 3
    with pytest.raises(UsageError, match=f"tp is 4, and from {device} on there are 3 {there}"):
        settings_of(target, SglangOptions(tp=4))


HOW = {"servers": ["http://10.0.0.7:1"], "in_flight": 2, "timeout": 3, "self_test": False}


@pytest.mark.parametrize(
    ("name", "changed", "same"),
    [
        ("sglang", {"tp": 2}, {"max_tokens": 512}),
        ("sglang", {"args": {"quantization": "fp8"}}, {"self_test": False}),
        ("sglang", {"args": {"attention_backend": "fa3"}}, {"max_tokens": 512, "self_test": False}),
        ("sglang-server", {}, HOW),
    ],
    ids=str,
)
def test_a_store_remembers_what_changes_bits_and_nothing_else(
    tmp_path: Path, target: TransformersTarget, name: str, changed: Any, same: Any
) -> None:
    for number, more in enumerate(({}, changed)):
        capture = {"name": name, "options": {**same, **more}}
        file = write_run(tmp_path / f"run-{number}", Path(target.path), capture=capture)
        with open_run(file) as run:
            assert json.loads(run.provenance(REQUEST)).get("capture.options", {}) == more


def test_a_servers_settings_come_from_its_environment_and_none_without_a_sink(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`register` is called in every process of every sglang that has this dist beside it."""
    monkeypatch.delenv("DRAFTCORE_SINK", raising=False)
    server.register()
    monkeypatch.setenv("DRAFTCORE_SINK", "redis://user:secret@host/1")
    with pytest.raises(UsageError, match="user name or a password") as caught:
        server.register()
    assert "secret@" not in str(caught.value)
    assert [server.read_layers(text) for text in ("33, 2,18,2", "")] == [(2, 18, 33), ()]
    with pytest.raises(UsageError, match="2,18,33"):
        server.read_layers("2-18")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("file:/m/run7", "file:/m/run7?volatile=yes", True),
        ("mooncake://h:1/run7?segment=a", "mooncake://h:1/run7", True),
        ("mooncake://h:1/run7", "mooncake://h:1/run8", False),
        ("file:/a%20b", "file:/a b", True),
    ],
)
def test_stores_are_told_apart_by_what_is_not_an_option(one: str, other: str, same: bool) -> None:
    assert (place(one) == place(other)) is same


# ---------------------------------------------------------------- messages

BESIDE = {"loss_mask": pack(torch.tensor([True, False]))}
ASK = Ask("0f" * 12, ("hidden.3", "last_hidden"), "bfloat16", "origin", BESIDE, lent=True)
SENT = json.loads(json.dumps(ASK.to_json()))
WRONG: list[dict[str, Any]] = [
    {"version": 0}, {"more": 1}, {"lent": "for long"}, {"read": "0f"}, {"dtype": "float64"},
    {"origin": "p" * 5000}, {"names": ["weights"]}, {"names": "hidden.1"}, {"names": []},
    {"sample": "../../etc/passwd"}, {"sample": "file:elsewhere"}, {"sample": "ab" * 12 + "\n"},
    {"beside": {"../x": ["int64", ""]}}, {"beside": {"mask": ["complex64", ""]}},
    {"beside": {f"mask{'_' * n}": ["int64", ""] for n in range(9)}},
]  # fmt: skip


@pytest.mark.parametrize("data", [17, {}, *(SENT | wrong for wrong in WRONG)], ids=str)
def test_an_ask_of_another_form_is_refused(data: Any) -> None:
    with pytest.raises(Refusal, match=r"the request's 'draftcore.*': ") as caught:
        Ask.from_json(data)
    assert caught.value.receipt["error"] == "refused"


@pytest.mark.parametrize("dtype", ["int64", "int32", "bool", "float32"])
def test_an_ask_and_small_tensors_come_back_as_they_were_sent(dtype: str) -> None:
    assert Ask.from_json(SENT) == ASK
    value = torch.tensor([0, 1, 1, 0, 1]).to(getattr(torch, dtype))
    assert torch.equal(unpack(*pack(value)), value)
    assert len(unpack(*pack(value[:0]))) == 0


# ---------------------------------------------------------------- the engine


def test_answers_say_how_often_each_position_was_accepted() -> None:
    """Of an answer of one token nothing was verified."""
    counted = {"spec_verify_ct": 5, "spec_correct_drafts_histogram": [1, 2, 0, 2]}
    answer = read_answer({"output_ids": [7] * 13, "meta_info": counted}, 3)
    assert (answer.rounds, answer.accepted) == (5, (4, 2, 2))
    alone = read_answer({"output_ids": [7], "meta_info": {}}, 3)
    assert (alone.rounds, alone.accepted) == (0, (0, 0, 0))


def test_a_python_without_sglang_and_arguments_of_ours_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked = Serving(tmp_path, tmp_path, 3, 8)
    with pytest.raises(UsageError, match="what kind of draft"):
        SglangEngine(asked, EngineOptions())
    given = {"algorithm": "EAGLE3", "args": {"dtype": "auto"}}
    with pytest.raises(UsageError, match="--option args sets dtype"):
        SglangEngine(asked, EngineOptions(**given))
    nowhere = EngineOptions(algorithm="EAGLE3", python=str(tmp_path / "python"))
    with pytest.raises(UsageError, match=r"python has no sglang: .*\n.*--option python"):
        SglangEngine(asked, nowhere)

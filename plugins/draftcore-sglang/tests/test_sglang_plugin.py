"""What needs no sglang: the offers, refusals, and where sglang is imported."""

import ast
import sys
import tomllib
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.targets import tiny_target
from draftcore_sglang.capture import SglangCapture
from draftcore_sglang.internals import sglang_layers
from draftcore_sglang.internals.signatures import TESTED, require_sglang
from draftcore_sglang.options import ServerOptions, SglangOptions
from packaging.requirements import Requirement

from draftcore.contracts.capture import FeatureRequest
from draftcore.errors import UsageError
from draftcore.features.provenance import choices
from draftcore.target import TransformersTarget

ROOT = Path(__file__).parents[3]
REQUEST = FeatureRequest((0,), True, "float32")


class TestPlugin(PluginSuite):
    plugin = "draftcore_sglang.plugin"


def imports_sglang(source: str) -> bool:
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
        if isinstance(node, ast.Call) and any(isinstance(a, ast.Constant) for a in node.args):
            called = ast.unparse(node.func)
            if called.endswith(("import_module", "__import__")):
                names.append(str(node.args[0].value))  # type: ignore[attr-defined]
        if any(name.split(".")[0] == "sglang" for name in names):
            return True
    return False


def test_one_package_alone_imports_sglang() -> None:
    """Of the core and of all dists."""
    packages = [ROOT / "draftcore", *ROOT.glob("plugins/*/draftcore_*")]
    files = [path for package in packages for path in package.rglob("*.py")]
    assert len(files) > 50
    found = {path.parent.relative_to(ROOT) for path in files if imports_sglang(path.read_text())}
    assert found == {Path("plugins/draftcore-sglang/draftcore_sglang/internals")}


@pytest.mark.parametrize(
    "source",
    [
        "import sglang",
        "from sglang.srt import x",
        "def f():\n import sglang.srt.y as z",
        "import importlib\nimportlib.import_module('sglang.srt')",
    ],
)
def test_that_check_sees_every_way_to_import_it(source: str) -> None:
    assert imports_sglang(source)
    assert not imports_sglang(source.replace("sglang", "other_sglang"))


def versions(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    true = metadata.version

    def found(name: str) -> str:
        if name != "sglang":
            return true(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", found)


def test_without_sglang_the_pip_line_is_the_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    versions(monkeypatch, None)
    target = TransformersTarget(str(tiny_target(tmp_path)), device="cpu")
    with pytest.raises(UsageError, match=r"pip install 'draftcore-sglang\[sglang\]'"):
        SglangCapture(target, REQUEST, SglangOptions())


@pytest.mark.parametrize("version", ["0.5.16", "0.5.24", "0.6.0", "0.4.9"])
def test_a_version_that_was_not_tested_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    versions(monkeypatch, version)
    with pytest.raises(UsageError, match=rf"{version} is installed.*0\.5\.17"):
        require_sglang({})


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (("value", "index"), r"other:moved\(value, index, extra\), where \(value, index\) was"),
        (("value", "index", "extra", "more"), r"where \(value, index, extra, more\) was tested"),
        (("index", "value", "extra"), r"moved\(value, index, extra\), where \(index, value"),
    ],
    ids=["one more, with a default", "one less", "another order"],
)
def test_a_function_with_other_parameters_is_refused(
    monkeypatch: pytest.MonkeyPatch, wanted: tuple[str, ...], found: str
) -> None:
    versions(monkeypatch, "0.5.23")
    other = types.ModuleType("other")
    exec("def moved(value, index, extra=None): ...", vars(other))
    monkeypatch.setitem(sys.modules, "other", other)
    require_sglang({"other:moved": ("value", "index", "extra")})
    with pytest.raises(UsageError, match=rf"0\.5\.23 is not as.*\n.*{found}.*\n.*pip install"):
        require_sglang({"other:moved": wanted})


def test_all_that_moved_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, "0.5.17")
    with pytest.raises(UsageError) as caught:
        require_sglang({"json:gone": (), "no_such_module:f": (), "json:dumps": ("obj",)})
    lines = str(caught.value).splitlines()[1:-1]
    assert [line.split(":")[0].strip() for line in lines] == ["json", "no_such_module", "json"]


def test_the_range_is_that_of_the_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    (line,) = project["optional-dependencies"]["sglang"]
    assert Requirement(line).specifier == TESTED


def test_a_vision_language_target_is_refused_by_name(tmp_path: Path) -> None:
    target = TransformersTarget(str(tiny_target(tmp_path)), device="cpu")
    target.config.vision_config = {"hidden_size": 8}
    with pytest.raises(UsageError, match="vision-language"):
        SglangCapture(target, REQUEST, SglangOptions())


def test_layers_are_asked_for_once_in_the_models_order_and_never_the_last() -> None:
    assert sglang_layers((2, 0, 2), 4) == [0, 2]
    assert sglang_layers((3, 1), 4) == [1]
    assert sglang_layers((), 4) == [0]


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({"tp": 2}, {"max_tokens": 512}),
        ({"args": {"quantization": "fp8"}}, {"self_test": False}),
        ({"args": {"attention_backend": "fa3"}}, {"tp": 1, "args": {}}),
    ],
    ids=str,
)
def test_a_store_remembers_what_changes_bits(changed: dict[str, Any], same: dict[str, Any]) -> None:
    assert choices(SglangOptions(**same)) == {}
    assert choices(SglangOptions(**same | changed)) == changed


def test_where_servers_are_and_how_they_are_asked_changes_no_feature() -> None:
    asked = ServerOptions(servers=("http://10.0.0.7:1",), in_flight=2, timeout=3, self_test=False)
    assert choices(asked) == {}

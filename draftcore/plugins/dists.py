"""What is installed, as pip's metadata says, and the pip line for what is missing or broken.

Read with `importlib_metadata`, the backport, which knows where an install came from. A loose file is
a plugin whose dist is its path.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import unquote

from importlib_metadata import Distribution, distributions

from draftcore.contracts.offers import Offer
from draftcore.errors import UsageError, closest, one_line
from draftcore.plugins.catalog import CORE, defaults, owners

STANDARD = "requirements/standard.txt"  # in a checkout
COMPARE = {"<": operator.lt, ">=": operator.ge, "==": operator.eq}


@dataclass(eq=False)
class Plugin:
    """A plugin that was found; `problem` says why it is not ready, `fix` how to repair it.

    The first fields are what metadata says; version is '' where that cannot be read.
    """

    name: str
    dist: str
    version: str
    module: str
    origin: str = ""
    loose: bool = False
    requires: tuple[str, ...] = field(default=(), repr=False)
    kinds: Mapping[str, str] = field(default_factory=dict, repr=False)  # modules of hooks, by kind
    state: Literal["found", "ready", "broken", "conflict", "incompatible", "disabled"] = "found"
    problem: str = ""
    fix: str = ""
    offers: tuple[Offer, ...] = ()
    hooks: tuple[str, ...] = ()
    verbs: Mapping[str, Any] = field(default_factory=dict, repr=False)  # click commands, by name
    import_ms: float = 0.0
    instance: Any = field(default=None, repr=False)
    dropped: bool = False  # an observer that failed in this process, and is not called again

    def offer(self, kind: str, name: str) -> Offer | None:
        return next((o for o in self.offers if (o.kind, o.name) == (kind, name)), None)

    def __str__(self) -> str:
        return f"{self.name} ({self.dist} {self.version})"


def installed(path: Sequence[str]) -> list[Plugin]:
    """Return the plugins of each dist on `path`; of several of one name the first, as imports have it."""
    dists: dict[tuple[str, ...], list[Plugin]] = {}
    for dist in cast(Iterable[Distribution], distributions(path=[*path])):
        if "[draftcore]" in (entries := _text(dist, "entry_points.txt")):
            # private, but the name as METADATA has it takes a mail parser
            name = one_line(dist._normalized_name.replace("_", "-"), 60)
            key = (name, entries) if name == CORE else (name,)  # an impostor hides it from nobody
            dists.setdefault(key, list(_plugins(dist, name, entries)))
    return [plugin for plugins in dists.values() for plugin in plugins]


def _text(dist: Any, file: str) -> str:
    """Read one of a dist's files, what is no UTF-8 as question marks; '' if it is not there."""
    try:
        return dist.read_text(file) or ""
    except UnicodeDecodeError as error:
        return error.object.decode(errors="replace")


def _plugins(dist: Distribution, name: str, entries: str) -> Iterator[Plugin]:
    """Yield the plugins that a dist's entry points name; without a module if a line is damaged.

    Each has the kinds that its dist brings, by entry points of the group `draftcore.hooks`.
    """
    head = (_text(dist, "METADATA") or _text(dist, "PKG-INFO")).partition("\n\n")[0]
    version = one_line("".join(re.findall(r"^Version: (.*)", head, re.MULTILINE)[:1]), 30)
    requires = tuple(re.findall(r"^Requires-Dist: (.*)", head, re.MULTILINE))
    origin, section, groups = _origin(dist), "", dict[str, dict[str, str]]()
    for line in filter(None, map(str.strip, entries.splitlines())):
        if line[0] == "[":
            section = line
        elif line[0] not in "#;":
            key, _, module = map(str.strip, line.partition("="))
            groups.setdefault(section, {})[one_line(key or line, 60)] = module if key else ""
    kinds = groups.get("[draftcore.hooks]", {})
    for listed, module in groups.get("[draftcore]", {}).items():
        yield Plugin(listed, name, version, module, origin, requires=requires, kinds=kinds)


def _origin(dist: Distribution) -> str:
    """Say what folder or commit was installed; '' for a release, or an archive of one."""
    with contextlib.suppress(Exception):  # direct_url.json may hold anything
        url = dist.origin.url
        if vcs := getattr(dist.origin, "vcs_info", None):
            return one_line(f"{vcs.vcs}+{url}@{vcs.commit_id}")
        editable = "editable: " if getattr(dist.origin.dir_info, "editable", False) else ""
        return one_line(editable + unquote(url.removeprefix("file://")))
    return ""


def loose(file: Path) -> Plugin:
    """Make a Python file importable by its stem. Raises UsageError for one that cannot be."""
    if file.suffix != ".py" or not file.is_file():
        present = ", ".join(sorted(p.name for p in file.parent.glob("*.py"))) or "none"
        raise UsageError(f"there is no file {file}\n  Python files in {file.parent}: {present}")
    if not file.stem.isidentifier():
        remedy = "rename it: letters, digits and '_', and no digit first"
        raise UsageError(f"{file} cannot be imported as a module {file.stem!r}\n  {remedy}")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last, so that it hides no installed module
    import hashlib  # 4 ms, for loose files only

    digest = f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
    return Plugin(file.stem, str(file), digest, file.stem, loose=True)


@functools.cache
def version_of(name: str) -> str:
    """Return the version of an installed distribution, '' of one that is not here."""
    dist = next(iter(distributions(name=name)), None)
    text = _text(dist, "METADATA") if dist else ""
    return text.partition("\nVersion: ")[2].partition("\n")[0]


def unmet(requires: Iterable[str], version_of: Callable[[str], str] = version_of) -> list[str]:
    """Return the requirements, without their markers, that `version_of` does not satisfy."""
    return [line.partition(";")[0].strip() for line in requires if not _met(line, version_of)]


def _met(line: str, version_of: Callable[[str], str]) -> bool:
    """Compare numbers where that is enough: `packaging`, which knows every form, takes 30 ms."""
    if "extra ==" in line:
        return True
    number = r"\d+(?:\.\d+)*"
    plain = re.fullmatch(rf"([\w.-]+) ?((?:(?:<|>=|==){number},?)*)", line)
    version = version_of(plain[1]) if plain else ""
    if plain and (here := re.fullmatch(rf"({number}(?:\.post\d+)?)(?:\+.*)?", version)):
        bounds = re.findall(rf"(<|>=|==)({number})", plain[2])
        return all(COMPARE[sign](_release(here[1]), _release(to)) for sign, to in bounds)
    from packaging.requirements import InvalidRequirement, Requirement

    with contextlib.suppress(InvalidRequirement):
        need = Requirement(line)
        applies = need.marker is None or need.marker.evaluate({"extra": ""})
        version = version_of(need.name)
        return not applies or bool(version and need.specifier.contains(version, prereleases=True))
    return False


def _release(version: str) -> list[int]:
    return [*map(int, re.findall(r"\d+", version)), *[0] * 8][:8]


def remedy(error: BaseException, plugin: Plugin, module: str) -> str:
    """Return the command that repairs the failed import of a plugin's module, or shows where it fails."""
    module = module.partition(":")[0]
    if module and not isinstance(error, ImportError):
        asked = [hook for hook in ("describe", "commands") if hook in plugin.hooks]
        calls = "".join(f"; {plugin.module.replace(':', '.')}.{hook}()" for hook in asked)
        return f"python -c {shlex.quote(f'import {module}{calls}')}   # shows where it fails"
    lacking = str(getattr(error, "name", "") or module).partition(".")[0]
    if lacking in ("draftcore", module.partition(".")[0]):
        return install_line("--force-reinstall", plugin.dist)
    return install_line(*unmet(plugin.requires) or [lacking])


def advice(kind: str, name: str, here: Collection[str]) -> tuple[str, str]:
    """Return a hint and a remedy for a name of which nothing is `here`."""
    known = owners(kind)
    near = closest(name, [*here, *known])
    hint = f" (did you mean {near!r}?)" if near not in ("", name) else ""
    if near in here or near not in known:
        return hint, "choose one that is there, or install the plugin that offers it"
    remedy = install_line("draftcore[standard]" if known[near] in defaults() else known[near])
    return hint, remedy + f"   # for {near!r}" * bool(hint)


def install_line(*words: str) -> str:
    """Return the pip line with these words, quoted for a shell.

    Where the core was installed from a checkout, dists of ours are folders there.
    """
    core: Any = next(iter(distributions(name=CORE)), None)
    root = Path(_origin(core).removeprefix("editable: ") if core else "")
    line, there = [*words], ""
    if root.is_absolute() and (root / STANDARD).is_file():
        line = list(dict.fromkeys(part for word in words for part in _folders(root, word)))
        there = f"cd {shlex.quote(str(root))} && " * (line != [*words])
    return f"{there}pip install {shlex.join(line)}"


def _folders(root: Path, dist: str) -> list[str]:
    """Return what brings a dist from a checkout: its folder, and those of what it requires and lacks."""
    import tomllib  # 5 ms

    folder = "plugins/" + re.split(r"[^\w-]", dist)[0]
    if dist == "draftcore[standard]":
        return ["-r", STANDARD]
    if not (file := root / folder / "pyproject.toml").is_file():
        return [dist]
    needs = unmet(tomllib.loads(file.read_text())["project"]["dependencies"])
    ours = [need for need in needs if need.startswith("draftcore-")]
    return [folder, *(part for need in ours for part in _folders(root, need))]

"""The verb `new-plugin`: write a distribution that works as it is, for its author to change.

The templates lie beside this file, in `common` and in a folder per kind; each is readable as what
it becomes, with capital words for what differs (`PLACEHOLDERS`). A file that both folders have is
the kind's part followed by the common one. `.txt` keeps our own tools from taking a template for
code, and `TESTS` stands for `tests` because a wheel ships no folder of that name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from draftcore.errors import DraftcoreError, UsageError

if TYPE_CHECKING:
    from draftcore_sdk.internals import Registry

TEMPLATES = Path(__file__).parent / "templates"
# Per kind, what the written code imports beside the core: requirements of the core, dists of ours.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "algorithm": ("draftcore-nn", "pydantic", "torch"),
    "target": ("draftcore-hf", "draftcore-nn", "safetensors", "torch"),
    "samples": ("numpy", "pydantic"), "evaluation": ("pydantic", "torch"), "batches": (),
    "store": ("draftcore-file", "safetensors"), "capture": ("draftcore-hf", "torch"),
    "channel": ("draftcore-disagg",), "launcher": ("draftcore-disagg",),
    "engine": ("draftcore-eval",), "prompts": ("draftcore-bench",),
    "graph": ("torch",), "graph-plugin": ("draftcore-graphs", "torch"),
}  # fmt: skip
PLACEHOLDERS = ("NAME", "PACKAGE", "KIND", "DEPENDENCIES", "TESTS")
LONGEST = 24  # a longer name would push lines of the written code over its formatter's limit


@click.command(epilog="For example: draftcore new-plugin my-idea --kind algorithm")
@click.argument("name")
@click.option("--kind", type=click.Choice(list(NEEDS)), required=True, help="What it will offer.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=Path(),
    help="Folder in which draftcore-NAME is made; the current one if not given.",
)  # fmt: skip
@click.pass_obj
def new_plugin(registry: Registry, name: str, kind: str, out: Path) -> None:
    """Write a plugin of your own that works and passes its tests.

    It is a small repository, yours to change from there. Nothing is installed; what to do is printed.
    """
    name = plugin_name(name)
    require_free(name, kind, registry)
    folder = out / f"draftcore-{name}"
    files = render(name, kind)
    write(folder, files)
    click.echo(f"wrote {folder}, which offers the {kind} {name}")
    for path in files:
        click.echo(f"  {path}")
    place = shlex.quote(str(folder))
    click.echo(
        "next:\n"
        f"  pip install -e {place} draftcore-sdk\n"
        f"  draftcore check-plugin {name}\n"
        f"  python -m pytest {place}"
    )


def plugin_name(text: str) -> str:
    """Normalise a name as pip does, without `draftcore-`; raises UsageError for a bad one."""
    name = re.sub(r"[-_.]+", "-", text).lower().removeprefix("draftcore-")
    if re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) and len(name) <= LONGEST:
        return name
    raise UsageError(
        f"{text!r} cannot be the name of a plugin\n"
        f"  a name begins with a letter, has letters, digits and dashes, and at most {LONGEST} of "
        "them\n  choose one like my-plugin"
    )


def require_free(name: str, kind: str, registry: Registry) -> None:
    """Raise UsageError where an installed plugin has this name, or offers it."""
    for plugin in registry.plugins:
        same = re.sub(r"[-_.]+", "-", plugin.name).lower() == name
        if same or plugin.dist == f"draftcore-{name}" or plugin.offer(kind, name):
            raise UsageError(
                f"the name {name!r} is taken here by the plugin {plugin}\n"
                "  two of one name could not be installed side by side: choose another one"
            )


def render(name: str, kind: str) -> dict[str, str]:
    """Return the files of a new plugin: their text by their path."""
    values = {
        "NAME": name, "PACKAGE": f"draftcore_{name.replace('-', '_')}", "KIND": kind, "TESTS": "tests",
        "DEPENDENCIES": ", ".join(f'"{line}"' for line in dependencies(kind)),
    }  # fmt: skip
    pattern = re.compile("|".join(PLACEHOLDERS))

    def fill(text: str) -> str:
        return pattern.sub(lambda found: values[found[0]], text)

    files: dict[str, str] = {}
    for part in (TEMPLATES / kind, TEMPLATES / "common"):
        for template in part.rglob("*.txt"):
            path = fill(template.relative_to(part).as_posix().removesuffix(".txt"))
            text = template.read_text(encoding="utf-8")
            files[path] = files.get(path, "") + (text if path == "LICENSE" else fill(text))
    return dict(sorted(files.items()))


def dependencies(kind: str) -> list[str]:
    """Return the requirements of a new plugin: this core's minor, for all of ours, and what it requires."""
    from importlib_metadata import requires, version  # 40 ms, for this verb only

    lines = [line for line in requires("draftcore") or () if "extra ==" not in line]
    ours = {re.split(r"[^\w.-]", line)[0]: line for line in lines}
    minor = bounds(version("draftcore"))
    return [ours.get(need, need + minor) for need in ("draftcore", *NEEDS[kind])]


def bounds(version: str) -> str:
    """Return the bounds of a core of this contract: its minor below 1.0, then its major."""
    major, minor = (int(number) for number in re.findall(r"\d+", version)[:2])
    beyond = f"{major}.{minor + 1}" if major == 0 else str(major + 1)
    return f">={major}.{minor},<{beyond}"


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files; raises UsageError where the folder holds something already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} is there already\n  remove it, or choose another place with --out"
        )
    try:
        for path, text in files.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DraftcoreError(
            f"cannot write {folder}: {error}\n  choose another place with --out"
        ) from None

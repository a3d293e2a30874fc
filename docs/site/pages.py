"""What mkdocs is told beyond docs/*.md: pages from elsewhere, generated references, and links.

README becomes the first page, each dist's README a page, `--help` of every verb the reference of the command
line, and docstrings that of Python. A page of ours that is named in backticks becomes a link to it.
"""

from __future__ import annotations

import importlib
import inspect
import posixpath
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"(?<!\[)`((?:docs|plugins)/[\w./-]+\.md|(?:CONTRIBUTING|CHANGELOG)\.md)`")
LINK = re.compile(r"""(\]\(|<img src=")([^)#\s"]+)((?:#[^)\s]*)?[)"])""")
LABEL = re.compile(r"\[(?:docs/)?([\w-]+\.md)\](?=\()")
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
API = (  # docs/compatibility.md calls these public
    "draftcore",
    "draftcore_eval.api",
    "draftcore_tools.api",
    "draftcore_bench.api",
    "draftcore_data.api",
    "draftcore_disagg.api",
    "draftcore_llamacpp.api",
)
CONTRACTS = sorted((ROOT / "draftcore" / "contracts").glob("[a-z]*.py"))


def on_config(config: Any) -> Any:
    """Add each dist's README to the part of the navigation that is called Reference."""
    reference = next(part["Reference"] for part in config["nav"] if "Reference" in part)
    pages = [page for page in sources().values() if page.startswith("dists/")]
    reference.append({"READMEs": [{page[len("dists/") : -len(".md")]: page} for page in pages]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie elsewhere or are made of the code."""
    for source, page in sources().items():
        if not page.startswith("docs/"):
            files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "command-line.md", content=command_line()))
    files.append(File.generated(config, "python.md", content=python()))
    return files


@cache
def sources() -> dict[str, str]:
    """Return for each Markdown file of the repository the page that shows it."""
    found = {"README.md": "index.md"}
    found |= {f"{name.upper()}.md": f"{name}.md" for name in ("contributing", "changelog")}
    for file in sorted(ROOT.glob("plugins/*/README.md")):
        found[str(file.relative_to(ROOT))] = f"dists/{file.parent.name}.md"
    found |= {f"docs/{page.name}": f"docs/{page.name}" for page in ROOT.glob("docs/*.md")}
    return found


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Turn links between files of the repository, and names of pages, into links of the site."""
    shown = {page.removeprefix("docs/"): source for source, page in sources().items()}
    here = page.file.src_uri
    folder = posixpath.dirname(shown.get(here, f"docs/{here}"))

    def to(file: str) -> str | None:
        """Return the address from this page to the page or image of a file of the repository."""
        there = sources().get(file, file)
        if there == file and not file.startswith("docs/"):
            return None
        return posixpath.relpath(there.removeprefix("docs/"), posixpath.dirname(here) or ".")

    def link(match: re.Match[str]) -> str:
        if "://" in match[2]:
            return match[0]
        file = posixpath.normpath(posixpath.join(folder, match[2]))
        return f"{match[1]}{to(file) or match[2]}{match[3]}"

    def named(match: re.Match[str]) -> str:
        address = to(match[1])
        return match[0] if address is None else f"[{match[1]}]({address})"

    def label(match: re.Match[str]) -> str:
        name = match[1].lower().replace("readme", "index")
        return f"[{titles.get(name, match[1])}]"

    titles = {page: title for part in config["nav"] for title, page in listed(part)}
    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(link, LABEL.sub(label, NAMED.sub(named, part))) for part in parts[::2]]
    return "".join(parts)


def listed(part: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the title and the file of each page of a part of the navigation."""
    for title, below in part.items():
        if isinstance(below, str):
            yield title, below
        else:
            for inner in below:
                yield from listed(inner)


def command_line() -> str:
    """Return the page of all verbs, as `--help` says them."""
    from draftcore.cli import main

    def helps(command: click.Command, name: str, above: click.Context | None) -> Iterator[str]:
        context = click.Context(
            command, above, info_name=name.rsplit(" ", 1)[-1], max_content_width=100
        )
        level = "#" * min(name.count(" ") + 1, 3)
        if above is not None:
            yield f"{level} {name}\n\n```text\n{command.get_help(context)}\n```\n"
        if isinstance(command, click.Group):
            for verb in command.list_commands(context):
                inner = command.get_command(context, verb)
                assert inner is not None, verb
                yield from helps(inner, f"{name} {verb}", context)

    head = (
        "# Command line\n\nAfter this page you can give any verb of ours what it takes. It is generated from"
        " `--help`, with all of our distributions installed.\n"
    )
    return "\n".join([head, *helps(main, "draftcore", None)])


def python() -> str:
    """Return the page of the public functions and of the contract, from signatures and docstrings."""
    lines = [
        "# Python\n\nAfter this page you can run every verb from Python, and know the records that plugins"
        " are given and return. It is generated from signatures and docstrings;"
        " [hooks.md](hooks.md) says what each hook is for.\n"
    ]
    modules = [*API, *(f"draftcore.contracts.{file.stem}" for file in CONTRACTS)]
    for name in modules:
        module = importlib.import_module(name)
        lines.append(f"\n## `{name}`\n\n{documentation(module)}\n")
        listed = getattr(module, "__all__", None) or [
            key
            for key, value in vars(module).items()
            if not key.startswith("_") and getattr(value, "__module__", None) == name
        ]
        for key in listed:
            value = getattr(module, key)
            if inspect.isclass(value) or inspect.isfunction(value):
                lines.append(entry(key, value))
    return "\n".join(lines)


def entry(name: str, value: Any) -> str:
    """Return a function's or class's part of the page: its signature, docstring and fields."""
    text = f"### `{name}`\n\n"
    if inspect.isfunction(value):
        text += f"```python\n{signature(name, value)}\n```\n\n"
    elif fields := getattr(value, "__annotations__", {}):
        listed = "\n".join(f"{key}: {kind}" for key, kind in fields.items() if key[0] != "_")
        text += f"```python\n{listed}\n```\n\n"
    return text + documentation(value) + "\n"


def signature(name: str, function: Any) -> str:
    """Return a function's signature, an argument a line where it is long."""
    found = inspect.signature(function)
    arguments, starred = [], False
    for argument in found.parameters.values():
        starred |= argument.kind is argument.VAR_POSITIONAL
        if argument.kind is argument.KEYWORD_ONLY and not starred:
            arguments.append("*")
            starred = True
        arguments.append(re.sub(r": '(.+?)'(?= =|$)", r": \1", str(argument)))
    arguments = [re.sub(r"<(?:built-in )?function (\w+).*?>", r"\1", each) for each in arguments]
    text = f"{name}({', '.join(arguments)})"
    if len(text) > 80:
        text = f"{name}(\n    " + ",\n    ".join(arguments) + ",\n)"
    result = found.return_annotation
    return text if result is found.empty else f"{text} -> {result}"


def documentation(value: Any) -> str:
    text = inspect.getdoc(value) or ""
    if text.startswith(f"{getattr(value, '__name__', '')}("):  # a dataclass's own signature
        return ""
    return textwrap.dedent(text).replace("<", "&lt;")

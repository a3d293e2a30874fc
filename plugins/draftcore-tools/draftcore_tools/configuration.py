"""What a run's settings come to, and all the keys there are: `draftcore config`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from draftcore import RunConfig, load_config
from draftcore.errors import UsageError
from draftcore.options import Config, apply_overrides, imported, read_yaml, validate

# The sections that belong to the plugin they select, with its kind.
SECTIONS = {"target": "target", "data": "samples", "eval": "evaluation"}
MOST = 1e6  # bounds beyond it only keep numbers within what a computer holds


class Setting(NamedTuple):
    """A dotted key of a run, its value, and who set it: the command line, the file, or the default."""

    key: str
    value: Any
    origin: str


def resolved(config: Config, overrides: Sequence[str], registry: Any) -> list[Setting]:
    """Return every key of a run, plugins' options too.

    Raises UsageError as `load_config` and the plugins' options do. What runs the plugins is not imported.
    """
    settings, file, commanded = load_config(config, overrides), read_yaml(config), dict[str, Any]()
    apply_overrides(commanded, overrides)
    data = settings.model_dump(mode="json")

    def options_of(kind: str, choice: Any) -> dict[str, Any]:
        owner = registry.find(kind, choice.name, choice.plugin)
        where = f"options of the {kind} {choice.name!r}, plugin {owner}"
        options = validate(owner.offer(kind, choice.name).options, choice.options, where)
        return options.model_dump(mode="json") if options else {}

    registry.extras(settings.plugins)

    for name, kind in SECTIONS.items():
        data[name] |= options_of(kind, getattr(settings, name))
    chosen: list[tuple[str, Any, Any]] = [
        ("algorithm", settings.algorithm, data["algorithm"]),
        ("capture", settings.capture, data["capture"]),
        ("runner", settings.runner.prefill, data["runner"]["prefill"]),
        ("runner", settings.runner.decode, data["runner"]["decode"]),
    ]
    chosen += [
        ("algorithm", draft.algorithm, data["drafts"][label]["algorithm"])
        for label, draft in settings.drafts.items()
    ]
    for kind, choice, section in chosen:
        if choice is not None and section is not None:
            section["options"] = options_of(kind, choice)
    given = "the configuration" if isinstance(config, Mapping) else str(config)
    who = {"command line": commanded, given: file}
    return [
        Setting(
            ".".join(path), value, next((one for one in who if _sets(who[one], path)), "default")
        )
        for path, value in leaves(data)
    ]


def as_yaml(rows: Sequence[tuple[str, Any, str]]) -> str:
    """Write resolved keys as the YAML of a run, who set each in a comment beside it."""
    lines, open_sections = list[tuple[str, str]](), list[str]()
    for key, value, origin in rows:
        *sections, last = key.split(".")
        shared = 0
        while shared < len(sections) and sections[: shared + 1] == open_sections[: shared + 1]:
            shared += 1
        for depth in range(shared, len(sections)):
            lines.append((f"{'  ' * depth}{sections[depth]}:", ""))
        open_sections = sections
        text = value if isinstance(value, str) and value.isidentifier() else json.dumps(value)
        lines.append((f"{'  ' * len(sections)}{last}: {text}", f"# {origin}"))
    width = max(len(line) for line, _ in lines)
    return "\n".join(f"{line.ljust(width)}  {origin}".rstrip() for line, origin in lines)


def schema_of_run(registry: Any) -> dict[str, Any]:
    """Return the JSON schema of a run.

    Sections that belong to a plugin have the keys of the one that is selected where none is named.
    """
    schema: dict[str, Any] = RunConfig.model_json_schema()
    for name, kind in SECTIONS.items():
        section = schema["$defs"][schema["properties"][name]["$ref"].rpartition("/")[2]]
        owned = section["properties"]["name"]["default"]
        with suppress(UsageError):  # it is not installed
            offer = registry.find(kind, owned).offer(kind, owned)
            keys = imported(offer.options, f"the {kind} {owned!r}").model_json_schema()
            section["properties"] |= keys["properties"]
            section["required"] = [*section.get("required", ()), *keys.get("required", ())]
            schema["$defs"] |= keys.get("$defs", {})
    return schema


def reference(registry: Any) -> str:
    """Return a table in Markdown of every key: its values, its default, what it is for."""
    schema = schema_of_run(registry)
    lines = ["| key | values | default | says |", "|---|---|---|---|"]
    for key, field, default in _fields(schema, schema["$defs"], "", {}):
        about = field.get("description", "").replace("|", "\\|")
        lines.append(f"| `{key}` | {_values(field)} | {default} | {about} |")
    return "\n".join(lines)


def _fields(
    section: Any, named: Any, before: str, defaults: Mapping[str, Any]
) -> Iterator[tuple[str, Any, str]]:
    """Yield the keys of a section of the JSON schema, with what they are and their defaults."""
    for name, field in section["properties"].items():
        several: Any = next(iter(field.get("patternProperties", {}).values()), {})
        choices = [field, several, *field.get("anyOf", ())]
        inside = next((one["$ref"] for one in choices if "$ref" in one), None)
        default = defaults.get(name, field.get("default"))
        if inside is None or "anyOf" in field:  # a section that may be left out is a value, too
            needed = name in section.get("required", ()) and name not in defaults
            yield before + name, field, "needed" if needed else f"`{json.dumps(default)}`"
        if inside is not None:
            label = ".LABEL" if several else ""
            below = named[inside.rpartition("/")[2]], named, f"{before}{name}{label}."
            yield from _fields(*below, default or {})


def _values(field: Any) -> str:
    """Say in a word or two which values the JSON schema of a key allows."""
    if "anyOf" in field:
        return " or ".join(map(_values, field["anyOf"]))
    if "$ref" in field:
        return "mapping"
    if "enum" in field or "const" in field:
        return ", ".join(f"`{one}`" for one in field.get("enum", [field.get("const")]))
    bounds = [
        f"{sign} {field[name]:g}"
        for name, sign in (
            ("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<")
        )
        if abs(field.get(name, math.inf)) <= MOST
    ]  # fmt: skip
    kind = {"object": "mapping", "array": "list", "string": "text"}.get(
        field["type"], field["type"]
    )
    return " ".join([kind, " and ".join(bounds)]).strip()


def leaves(tree: Mapping[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yield the keys of a tree, each as a path from its root, with their values."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*before, name))
        else:
            yield (*before, name), value


def _sets(tree: Any, path: Sequence[str]) -> bool:
    """Say whether a tree of settings has this key, or a whole value in the place of a section of it."""
    for part in path:
        if not isinstance(tree, Mapping):
            return tree is not None
        if part not in tree:
            return False
        tree = tree[part]
    return True

"""From YAML and KEY=VALUE to validated options, with refusals that say what there is and what to do."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import yaml
from yaml.error import MarkedYAMLError

from draftcore.errors import UsageError, nearest

if TYPE_CHECKING:
    from pydantic import BaseModel

LARGEST = 10_000  # values
WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "true": True, "yes": True}
WORDS |= {"on": True, "false": False, "no": False, "off": False}


class _Loader(yaml.BaseLoader):
    """Reads of YAML what JSON has too: keys are texts, 3e-4 is a number, .inf and dates are texts.

    Raises YAMLError for a tag, for a key that is given twice, for a character that cannot be printed
    and for what is larger than any configuration, aliases written out.
    """

    values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        alias, before = self.check_event(yaml.AliasEvent), self.values
        node: Any = super().compose_node(parent, index)
        self.values += getattr(node, "values", 0) if alias else 1
        node.values = self.values - before
        _refuse(self.values > LARGEST, "this is larger than any configuration", node)
        _refuse(not node.tag.startswith("tag:yaml.org"), f"nobody knows the tag {node.tag}", node)
        return node

    def construct_scalar(self, node: Any) -> Any:
        """Return a text, or what one without quotes stands for."""
        text, plain = str(node.value), node.style is None
        _refuse(self.NON_PRINTABLE.search(text), f"{text!r:.40} cannot be printed", node)
        for kind in (int, float) if plain else ():
            with suppress(ValueError, OverflowError):
                if math.isfinite(number := kind(text)):
                    return number
        return WORDS.get(text.lower(), text) if plain else text

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        found = dict[str, Any]()
        for name, value in node.value:
            _refuse(str(name.value) in found, f"the key {name.value!r} is given twice", name)
            found[str(name.value)] = self.construct_object(value)
        return found


def _refuse(wrong: object, problem: str, node: yaml.Node) -> None:
    if wrong:
        raise MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a mapping. Raises UsageError for a file that is missing, unreadable or anything else."""
    try:
        with path.open(encoding="utf-8") as stream:
            data = yaml.load(stream, _Loader)
    except (OSError, UnicodeDecodeError) as error:
        there = ", ".join(sorted(p.name for p in path.parent.glob("*.y*ml"))) or "none"
        text = f"cannot read {path}: {error}\n"
        raise UsageError(f"{text}  YAML files, to be in UTF-8, in {path.parent}: {there}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{path} is not YAML: {error}\n  correct it there") from None
    if not isinstance(data, dict):
        kind = "is empty" if data is None else f"holds a {type(data).__name__}, not a mapping"
        raise UsageError(f"{path} {kind}\n  it needs at least run, target and algorithm")
    return data


def apply_overrides(data: dict[str, Any], overrides: Iterable[str]) -> None:
    """Set each KEY=VALUE in `data`, in order: a dotted key, a value read as YAML."""
    for override in overrides:
        key, equals, text = override.partition("=")
        if not (equals and key):
            raise UsageError(f"override {override!r} is not KEY=VALUE\n  for example train.lr=1e-4")
        *parents, last = key.split(".", 9)
        section = data
        for parent in parents:
            child = {} if section.get(parent) is None else section[parent]
            if not isinstance(child, dict):
                raise UsageError(f"override {override!r}: {parent!r} is a value, not a section")
            section[parent] = section = {**child}  # a copy, as an alias elsewhere may mean it too
        try:
            section[last] = yaml.load(text, _Loader)
        except (yaml.YAMLError, RecursionError) as error:
            raise UsageError(f"cannot read the value {text!r:.80}: {error}") from None


def validate(path: str, data: Mapping[str, Any], where: str) -> Any:
    """Validate options by the model at `module:Class`; None for data of '', which must be empty.

    Raises UsageError as `checked` does, and for a model that cannot be imported.
    """
    if not path:
        if data:
            raise UsageError(f"{where}: it has none\n  leave out {', '.join(data)}")
        return None
    return checked(imported(path, where), data, where, {})


def imported(path: str, where: str) -> Any:
    """Return what a dotted path `module:name` leads to. Raises UsageError where that is nothing."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{where}: {error}\n  python -c 'import {module}' tells more") from error


def checked(
    model: type[BaseModel], data: Mapping[str, Any], where: str, gone: Mapping[str, str]
) -> Any:
    """Validate data as JSON of just the types that a model names: "3" is no number, and 1 not true.

    Raises UsageError for values of other types, and for unknown keys, which the model may have meant
    to ignore, naming the keys that there are, or what replaced those that are `gone`.
    """
    from pydantic import ValidationError  # 70 ms: listing plugins needs none of it

    try:
        text = json.dumps(dict(data), default=str)
        return model.model_validate_json(text, extra="forbid", strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    lines = [f"{where}: {len(problems)} wrong"]
    for problem in problems:
        path = ".".join(map(str, problem["loc"]))
        if not path:  # a rule about the whole
            lines.append(f"  {problem['msg'].removeprefix('Value error, ')}")
        elif path in gone:
            lines.append(f"  {path}: is gone; {gone[path]}")
        elif problem["type"] == "extra_forbidden":
            *parents, key = problem["loc"]
            known = _keys(model, parents)
            hint = nearest(str(key), known)
            lines.append(f"  {path:.80}: unknown key{hint}; there are {', '.join(known)}")
        elif problem["type"] == "missing":
            lines.append(f"  {path}: is missing")
        else:
            lines.append(f"  {path}: {problem['msg']}, not {problem['input']!r:.80}")
    raise UsageError("\n".join([*lines, "  correct or leave out these keys"]))


def _keys(model: Any, parents: Sequence[int | str]) -> Sequence[str]:
    """Return the keys of the section that `parents` lead to, through lists and optional ones."""
    for parent in parents:
        if parent in model.model_fields:
            annotation = model.model_fields[parent].annotation
            inside = [annotation, *get_args(annotation)]
            model = next((a for a in inside if hasattr(a, "model_fields")), model)
    return list(model.model_fields)

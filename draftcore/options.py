"""From YAML and KEY=VALUE to validated options, with refusals that say what there is and what to do."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast, get_args

import yaml
from yaml.error import MarkedYAMLError

from draftcore.errors import UsageError, nearest
from draftcore.files import regular

if TYPE_CHECKING:
    from pydantic import BaseModel


Config = str | Path | Mapping[str, Any]  # a run's YAML file, or what it would say


class _Loader(yaml.SafeLoader):
    """Reads YAML in which 3e-4 is a number, keys are texts, and none of them is given twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [name.value for name, _ in node.value]
        for name, _ in node.value:
            if names.count(name.value) > 1:
                problem = f"the key {name.value!r} is given twice"
                raise MarkedYAMLError(problem=problem, problem_mark=name.start_mark)
            name.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


# SafeLoader wants a dot and a sign: 3.0e-4, 1.0e+3.
FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, [*"-+.0123456789"])


def _parse(text: str | TextIO) -> Any:
    """Read YAML as the JSON data that it stands for; raises ValueError for anything else."""
    try:
        return json.loads(json.dumps(yaml.load(text, _Loader), default=str))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None


def read_yaml(config: Config) -> dict[str, Any]:
    """Read a file that holds a mapping, or copy a mapping as the JSON data that it stands for.

    Raises UsageError for a file that is missing, unreadable or anything else.
    """
    if isinstance(config, Mapping):
        return cast(dict[str, Any], json.loads(json.dumps(dict(config), default=str)))
    path = Path(config)
    try:
        with regular(path).open(encoding="utf-8") as stream:
            data = _parse(stream)
    except (OSError, UnicodeDecodeError) as error:
        there = ", ".join(sorted(p.name for p in path.parent.glob("*.y*ml"))) or "none"
        text = f"cannot read {path}: {error}\n"
        raise UsageError(f"{text}  YAML files, to be in UTF-8, in {path.parent}: {there}") from None
    except ValueError as error:
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
            section[parent] = {} if section.get(parent) is None else section[parent]
            section = section[parent]
            if not isinstance(section, dict):
                raise UsageError(f"override {override!r}: {parent!r} is a value, not a section")
        try:
            section[last] = _parse(text)
        except ValueError as error:
            raise UsageError(f"cannot read the value {text!r:.80}: {error}") from None


def validate(path: str, data: Mapping[str, Any], where: str, beside: Iterable[str] = ()) -> Any:
    """Validate options by the model at `module:Class`; None for data of '', which must be empty.

    Raises UsageError as `validate_as` does, and for a model that cannot be imported.
    """
    if path:
        return validate_as(imported(path, where), data, where, beside)
    if data:
        raise UsageError(f"{where}: it has none\n  leave out {', '.join(data)}")


def imported(path: str, where: str) -> Any:
    """Return what a dotted path `module:name` leads to. Raises UsageError where that is nothing."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{where}: {error}\n  python -c 'import {module}' tells more") from error


def validate_as(
    model: type[BaseModel], data: Mapping[str, Any], where: str, beside: Iterable[str] = ()
) -> Any:
    """Validate data as JSON of just the types that a model names: "3" is no number, and 1 not true.

    Raises UsageError for values of other types, and for unknown keys, which the model may have meant
    to ignore, naming the keys that there are, with those that stand `beside` them in their section.
    """
    from pydantic import ValidationError  # 70 ms: listing plugins needs none of it

    try:
        text = json.dumps(dict(data), default=str)
        extra: Any = None if model.model_config.get("extra") == "forbid" else "forbid"
        return model.model_validate_json(text, extra=extra, strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    lines = [f"{where}: {len(problems)} wrong"]
    for problem in problems:
        path = ".".join(map(str, problem["loc"]))
        if not path:  # a rule about the whole
            lines.append(f"  {problem['msg'].removeprefix('Value error, ')}")
        elif problem["type"] == "extra_forbidden":
            *parents, key = problem["loc"]
            known = [*_keys(model, parents), *(() if parents else beside)]
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

"""The contract, with that of our dists' kinds, is what `contract.txt` records: a change of it is meant.

After a change that is meant: python -m tests.kernel.test_contract
"""

import dataclasses
import inspect
import pkgutil
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import draftcore.contracts

RECORD = Path(__file__).with_name("contract.txt")
DISTS = sorted(Path(__file__).parents[2].glob("plugins/*/pyproject.toml"))


def contract() -> Iterator[str]:
    """Write each hook, and each record and interface with its fields and members, on lines."""
    rooms = [
        f"draftcore.contracts.{m.name}" for m in pkgutil.iter_modules(draftcore.contracts.__path__)
    ]
    hooks = ["draftcore.contracts.hooks"]
    for project in (tomllib.loads(file.read_text())["project"] for file in DISTS):
        brought = sorted(set(project.get("entry-points", {}).get("draftcore.hooks", {}).values()))
        hooks += brought
        for name in brought:  # beside the hooks what these name
            package, things = name.partition(".")[0], vars(import_module(name)).values()
            named = {thing.__module__ for thing in things if inspect.isclass(thing)} - {name}
            rooms += sorted(room for room in named if room.startswith(f"{package}."))
    for name in hooks:
        for hook, spec in vars(import_module(name).Specs).items():
            if not hook.startswith("_"):
                yield f"hook {hook}{inspect.signature(spec)}"
    for name in rooms:
        room, shown = import_module(name), name.removeprefix("draftcore.contracts.")
        for thing in vars(room).values():
            if inspect.isclass(thing) and thing.__module__ == name and thing.__name__ != "Specs":
                bases = ", ".join(base.__name__ for base in thing.__bases__)
                yield f"{shown}.{thing.__name__}({bases})"
                yield from (f"    {line}" for line in members(thing))


def members(thing: type) -> Iterator[str]:
    fields = (
        {f.name: f for f in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else {}
    )
    for name, kind in vars(thing).get("__annotations__", {}).items():
        required = name in fields and fields[name].default is fields[name].default_factory
        yield f"{name}: {kind}{' (required)' * required}"
    for name, member in vars(thing).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            yield f"{name}{inspect.signature(member)}"
        elif isinstance(member, property):
            yield f"{name} (property)"


def test_the_contract_is_the_recorded_one() -> None:
    found, recorded = list(contract()), RECORD.read_text(encoding="utf-8").splitlines()
    gone = [line for line in recorded if line not in found]
    new = [line for line in found if line not in recorded]
    assert (gone, new) == ([], []), "see docs/compatibility.md: is this change allowed, and meant?"


if __name__ == "__main__":
    RECORD.write_text("\n".join(contract()) + "\n", encoding="utf-8")

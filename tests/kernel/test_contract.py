"""The contract is what `contract.txt` records: a change of it is seen, and is meant.

After a change that is meant: python -m tests.kernel.test_contract
"""

import dataclasses
import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import draftcore.contracts
from draftcore.contracts.hooks import Specs

RECORD = Path(__file__).with_name("contract.txt")


def contract() -> Iterator[str]:
    """Write each hook, and each record and interface with its fields and members, on lines."""
    for name, hook in vars(Specs).items():
        if not name.startswith("_"):
            yield f"hook {name}{inspect.signature(hook)}"
    for module in pkgutil.iter_modules(draftcore.contracts.__path__):
        room = import_module(f"draftcore.contracts.{module.name}")
        for name, thing in vars(room).items():
            if inspect.isclass(thing) and thing.__module__ == room.__name__ and thing is not Specs:
                yield f"{module.name}.{name}({', '.join(base.__name__ for base in thing.__bases__)})"
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

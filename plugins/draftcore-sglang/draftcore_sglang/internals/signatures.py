"""Check that the installed sglang is one that was tested, before the first call into it.

The release has to be in the tested range, and each function that is used has to be there with exactly
the parameters that it had in all of these releases. A further parameter is refused too, with a default
or without: nobody has looked at that change, and it may change numbers.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from draftcore.errors import UsageError
from draftcore_sglang import INSTALL

TESTED = SpecifierSet(">=0.5.17,<0.5.24")
Signatures = Mapping[str, str]  # MODULE:FUNCTION or MODULE:CLASS.METHOD -> names of parameters


def require_sglang(used: Signatures) -> None:
    """Raise UsageError unless the installed sglang was tested, down to each function in `used`."""
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise UsageError(f"sglang is not installed, and this runs it\n  {INSTALL}") from None
    if Version(version) not in TESTED:
        raise UsageError(
            f"sglang {version} is installed, draftcore-sglang was tested with {TESTED}\n  {INSTALL}"
        )
    moved = [how for name, wanted in used.items() if (how := _moved(name, wanted))]
    if moved:
        raise UsageError(
            f"sglang {version} is not as draftcore-sglang knows it:\n  "
            + "\n  ".join(moved)
            + f"\n  another build of sglang may be as tested: {INSTALL}"
        )


def _moved(name: str, wanted: str) -> str:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        parameters = list(inspect.signature(found).parameters)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return f"{name}: {error}"
    if parameters == wanted.split():
        return ""
    return f"{name}({', '.join(parameters)}), where ({', '.join(wanted.split())}) was tested"

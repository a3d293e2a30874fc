"""Imports each dist's modules and binds its offers where nothing else of ours is: `nox -s alone`.

The folder given has one for each dist, with its wheel and those that it requires, unpacked. Each is
tried in a fork of this process, which has imported much that is not ours.
"""

import os
import pkgutil
import re
import sys
import traceback
from importlib import import_module
from pathlib import Path

import pytest  # noqa: F401
import torch  # noqa: F401
import transformers.models.qwen3.modeling_qwen3  # noqa: F401


def try_alone(folder: Path) -> None:
    """Raise what a dist's modules raise; exit with 0 if all of its offers bind."""
    sys.path.insert(0, str(folder))
    package = folder.name.replace("-", "_")
    (about,) = folder.glob(f"{package}-*.dist-info/METADATA")
    extras = re.findall(
        r"^Requires-Dist: (draftcore-\w+).* extra ==", about.read_text(), re.MULTILINE
    )
    for module in pkgutil.walk_packages([str(folder / package)], f"{package}."):
        try:
            import_module(module.name)
        except ModuleNotFoundError as error:
            lacks = str(error.name).partition(".")[0].replace("_", "-")
            if lacks.startswith("draftcore") and lacks not in extras:
                raise  # else it is an optional package
    import_module("draftcore.cli").main(["list-plugins", "--check"])


failed = []
for folder in sorted(Path(sys.argv[1]).iterdir()):
    print(f"--- {folder.name}", flush=True)
    if not (pid := os.fork()):
        try:
            try_alone(folder)
        except SystemExit as end:  # of `list-plugins --check`
            os._exit(int(end.code or 0))  # torch takes a second of a processor to be taken down
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if os.waitpid(pid, 0)[1]:
        failed.append(folder.name)
sys.exit(f"these need others of ours: {', '.join(failed)}" if failed else 0)

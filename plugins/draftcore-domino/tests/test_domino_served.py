"""The reader of exports stands on its own legs, and on those of the backbone's reader."""

import ast
from pathlib import Path

import draftcore_domino

PACKAGE = Path(draftcore_domino.__file__).parent


def test_the_reader_shares_no_code_with_what_it_checks() -> None:
    tree = ast.parse((PACKAGE / "served.py").read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    ours = {name for name in imported if str(name).startswith("draftcore")}
    assert ours == {"draftcore.served", "draftcore_dflash.served"}

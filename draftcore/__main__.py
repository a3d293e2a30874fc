"""`python -m draftcore`, the same as the console script."""

from draftcore.cli import main

main(prog_name="draftcore")

"""docs/methods.md: its tables are those of its figures, and every method has its place there."""

import json
import re
import runpy
from pathlib import Path

from draftcore.plugins.registry import load_plugins

ROOT = Path(__file__).parents[2]


def test_the_page_of_methods_is_made_of_its_figures_and_tells_each_in_two_sentences() -> None:
    """What stands in it is what `python benchmarks/ladder.py write` writes."""
    text, figures = (ROOT / "docs" / f"methods.{kind}" for kind in ("md", "json"))
    page, made = text.read_text(), runpy.run_path(str(ROOT / "benchmarks" / "ladder_page.py"))
    assert made["page"](page, json.loads(figures.read_text())) == page
    sections = dict(re.findall(r"^### `(\w+)`\n\n(.*?)\n\n", page, re.MULTILINE | re.DOTALL))
    assert sections.keys() == {*load_plugins().offered("algorithm")}
    for name, paragraph in sections.items():
        assert page.count(f"\n| `{name}` | ") == 4, "a row in each table, measured or not"
        assert len(re.findall(r"\.(?=\s|$)", paragraph)) == 2, name

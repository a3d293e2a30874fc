"""The catalogue: docs/catalogue.json and docs/catalogue.md's tables, of metadata and of what suites said.

    python docs/site/catalogue.py            # after a change of a version, an offer, or third-party.toml
    python docs/site/catalogue.py DIST...    # tries these, which this Python has: as `nox -s catalogue` does

What a dist of ours offers is in draftcore/plugins/catalog.toml, what it is called in its pyproject.toml,
and when the session of an engine passed in tests/passed. Only what is tried has to be installed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DATA, PAGE, OTHERS = (
    ROOT / "docs" / f for f in ("catalogue.json", "catalogue.md", "third-party.toml")
)
Row = dict[str, Any]


def offers() -> dict[str, list[str]]:
    """Return what each dist of ours offers, a kind and a name each."""
    listed = tomllib.loads((ROOT / "draftcore" / "plugins" / "catalog.toml").read_text())
    found: dict[str, list[str]] = {}
    for kind in listed.keys() - {"defaults", "kind"}:
        for name, dist in listed[kind].items():
            found.setdefault(dist, []).append(f"{kind} {name}")
    return {dist: sorted(names) for dist, names in found.items()}


def category(offered: Sequence[str]) -> str:
    """Return the kinds of what a dist offers; verbs count where there is nothing else."""
    kinds = sorted({offer.partition(" ")[0] for offer in offered})
    return ", ".join([kind for kind in kinds if kind != "verb"] or kinds) or "library"


def ours() -> Iterator[Row]:
    """Yield a row of each dist of ours."""
    offered = offers()
    for file in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        named = {"name": project["name"], "category": category(offered.get(project["name"], []))}
        named |= {"version": project["version"], "summary": project["description"]}
        yield {**named, "offers": offered.get(project["name"], [])}


def others(lines: Mapping[str, Mapping[str, str]]) -> Iterator[Row]:
    """Yield a row of each line of third-party.toml."""
    for name, line in sorted(lines.items()):
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
            raise ValueError(f"third-party.toml: {name!r} is not a name as pip normalises it")
        if line.keys() != {"category", "home"} or not line["home"].startswith("https://"):
            raise ValueError(
                f"third-party.toml: {name} needs a category, a home of https, and no more"
            )
        yield {"name": name, "version": "", **line, "offers": []}


def tried(dist: str) -> Row:
    """Run `check-plugin` on each plugin of a dist; return what is new in its row."""
    suites: Row = {"date": time.strftime("%Y-%m-%d"), "passed": 0, "failed": 0}
    try:
        there = distribution(dist)
    except PackageNotFoundError:
        return {"suites": {**suites, "problem": "pip cannot install it"}}
    row: Row = {"version": there.version, "offers": [], "suites": suites}
    suites["version"] = there.version
    for plugin in there.entry_points.select(group="draftcore"):
        command = [sys.executable, "-P", "-m", "draftcore", "check-plugin", plugin.name]
        done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        if not done.stdout.startswith("{"):
            suites["problem"] = f"check-plugin {plugin.name} ended with status {done.returncode}"
            continue
        report = json.loads(done.stdout)
        row["offers"] += [f"{s['kind']} {s['offer']}" for s in report["suites"] if s["offer"]]
        for suite in report["suites"]:
            for test in suite["tests"]:
                if test["outcome"] == "failed":
                    print(f"{dist}: {test['test']}: {test.get('message', '')}", file=sys.stderr)
        suites["passed"] += report["passed"]
        suites["failed"] += report["failed"]
    return row


def made(new: Mapping[str, Row]) -> tuple[str, str]:
    """Return the catalogue as JSON, and its page; what is known of suites stays where it is not `new`."""
    known = (
        {row["name"]: row for row in json.loads(DATA.read_text())["dists"]} if DATA.exists() else {}
    )
    rows = []
    for row in (*ours(), *others(tomllib.loads(OTHERS.read_text()))):
        said = new.get(row["name"]) or known.get(row["name"], {})
        taken = ("version", "offers", "suites") if "home" in row else ("suites",)
        rows.append({**row, **{key: said[key] for key in taken if key in said}})
        session = ROOT / "tests" / "passed" / f"{row['name'].removeprefix('draftcore-')}.json"
        if session.exists():  # of an engine: it needs what is not installed beside others
            passed = json.loads(session.read_text())["date"]
            rows[-1]["suites"] = {"session": session.stem, "date": passed}
    data = ",\n".join(json.dumps(row) for row in rows)
    return f'{{"dists": [\n{data}\n]}}\n', page(rows)


def page(rows: Sequence[Row]) -> str:
    """Return the page with its two tables anew: ours, then others'."""

    def table(rows: Sequence[Row]) -> str:
        text = "| dist | category | version | suites |\n|---|---|---|---|\n"
        for row in rows:
            name = f"`{row['name']}`"
            home = row.get("home") or f"../plugins/{row['name']}/README.md"
            text += f"| [{name}]({home}) | {row['category']} | {row['version']} | {result(row)} |\n"
        return text

    parts = re.split(r"^\| dist \|.*?\n(?=\n|\Z)", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    tables = [table([row for row in rows if ("home" in row) is theirs]) for theirs in (False, True)]
    return parts[0] + tables[0] + parts[1] + tables[1] + parts[2]


def result(row: Row) -> str:
    """Say what became of the suites of a dist."""
    suites = row.get("suites", {})
    if "session" in suites:
        return f"`nox -s {suites['session']}`, {suites['date']}"
    if "date" not in suites:
        return "has no plugin" if row["category"] == "library" else "not tried"
    failed = f", **{suites['failed']} failed**" if suites["failed"] else ""
    tried = suites.get("problem") or f"{suites['passed']} passed{failed}; {suites['version']}"
    return f"{tried}, {suites['date']}"


if __name__ == "__main__":
    for dist in sys.argv[1:] or [""]:  # what was tried is kept, whatever ends it
        texts = made({dist: tried(dist)} if dist else {})
        for place, text in zip((DATA, PAGE), texts, strict=True):
            place.write_text(text)

"""The tables of `docs/methods.md`: what dists say of themselves, and what `ladder.py` measured."""

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from draftcore_llamacpp.methods import GROUP, METHODS
from draftcore_tools.recipes import recipes

from draftcore import open_run
from draftcore.errors import plural
from draftcore.plugins.registry import load_plugins

RULER = Path(__file__).with_name("ruler.yaml")
NONE, STEP = "not measured", ("ms", "products_ms", "ratio", "peak_gib")
SERVERS = {"vllm": "vLLM"}  # as they write themselves
Figures = Mapping[
    str, Mapping[str, Mapping[str, Mapping[str, Any]]]
]  # by setting, draft and seed or case


def page(text: str, figures: Figures) -> str:
    """Return the page with its tables made anew; what stands around them is left as it is."""
    made = {
        "methods": overview(figures), "ruler": lengths("ruler", figures),
        "small": lengths("small", figures), "step": steps(figures),
    }  # fmt: skip
    for name, content in made.items():
        begin, end = f"<!-- {name}, by benchmarks/ladder.py -->\n", f"\n<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}{content}{end}{rest.split(end)[1]}"
    return text


def installed() -> dict[str, str]:
    """Return the servers of each algorithm that is installed, by what its dist says itself."""
    tables = {method.name for method in METHODS.values()}  # for llama.cpp; other dists bring theirs
    tables |= {str(entry.dist and entry.dist.name) for entry in entry_points(group=GROUP)}
    found = dict[str, str]()
    for name, has in sorted(load_plugins().offered("algorithm").items()):
        says = {c.partition(":")[2] for c in has if c.startswith("served:")}
        says |= {"llama.cpp"} if tables & {name, f"draftcore-{name}"} else set()
        found[name] = ", ".join(sorted(SERVERS.get(server, server) for server in says))
    return found


def captured(name: str) -> str:
    """Say what a token's features take, of a target of Qwen3-8B's config, by the default options."""
    options = {"init": "fresh"} if name == "mtp" else {}  # Qwen3 brings no layer
    with TemporaryDirectory() as folder:
        config = recipes()["qwen3-8b"].config
        (Path(folder) / "config.json").write_text(json.dumps(config))
        about = {"run": f"{folder}/run", "target": {"path": folder}}
        with open_run({**about, "algorithm": {"name": name, "options": options}}) as run:
            request = run.drafts[0].request()
            size = request.token_bytes(run.width) // 1024
            return f"{plural(len(request.names), 'state')}, {size} KiB"


def table(head: str, rows: Iterable[Sequence[str]]) -> str:
    names = [name.strip() for name in head.split("|")]
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def overview(figures: Figures) -> str:
    rows = []
    for name, servers in installed().items():
        length, _ = mean(figures.get("ruler", {}).get(name, {}))
        timed = next(iter(figures.get("step", {}).get(name, {}).values()), {})
        rows.append((f"`{name}`", captured(name), servers, length, str(timed.get("ratio", NONE))))
    return table("method | captured a token | served by | ruler | step", rows)


def lengths(setting: str, figures: Figures) -> str:
    """Show acceptance of each draft: by seed, their mean, and by position."""
    drafts = figures.get(setting, {})
    labels = [*yaml.safe_load(RULER.read_text())["drafts"]]
    seeds = sorted({seed for entries in drafts.values() for seed in entries}) or ["0"]
    rows = []
    for label in [*labels, *sorted(drafts.keys() - set(labels))]:
        entries = drafts.get(label, {})
        average, by_position = mean(entries)
        cells = (shown(entries.get(seed)) for seed in seeds)
        rows.append((f"`{label}`", *cells, *[average] * (len(seeds) > 1), by_position))
    several = " | mean" if len(seeds) > 1 else ""
    head = f"draft | {' | '.join(f'seed {seed}' for seed in seeds)}{several} | by position"
    return f"{table(head, rows)}\n\n{when(drafts)}"


def shown(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return NONE
    if "error" in entry:
        return "failed"
    low, high = entry["interval"]
    return f"{entry['length']:.2f} ({low:.2f} to {high:.2f})"


def mean(entries: Mapping[str, Any]) -> tuple[str, str]:
    """Return the mean length of all seeds and the mean shares by position, as text."""
    good = [entry for entry in entries.values() if "length" in entry]
    if not good:
        return NONE, NONE
    shares = zip(*(entry["by_position"] for entry in good), strict=False)
    by_position = " ".join(f"{sum(share) / len(good):.2f}" for share in shares)
    return f"{sum(entry['length'] for entry in good) / len(good):.2f}", by_position


def steps(figures: Figures) -> str:
    """Show the time and the memory of each method's step."""
    drafts, rows = figures.get("step", {}), []
    for name in sorted({*installed(), *drafts}):
        for case, found in drafts.get(name, {"": {}}).items():
            without = "failed" if "error" in found else NONE
            cells = (str(found.get(key, without)) for key in STEP)
            rows.append((f"`{name}`", case, *cells))
    return (
        f"{table('method | case | ms | products, ms | ratio | peak, GiB', rows)}\n\n{when(drafts)}"
    )


def when(drafts: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    found = [e for entries in drafts.values() for e in entries.values() if "error" not in e]
    pairs = sorted({f"{entry['date']}, {entry['device']}" for entry in found})
    return f"Measured {'; '.join(pairs)}." if pairs else "Not measured."

"""The ladder: every method on one ruler, in `docs/methods.md`.

    python benchmarks/ladder.py run OUT [--seeds 0,1,2] [--drafts dflash,dspark]
    python benchmarks/ladder.py small OUT
    python benchmarks/ladder.py step OUT
    python benchmarks/ladder.py write [OUT/ladder.json ...]

`run` captures `benchmarks/ruler.yaml` once, and trains and evaluates its drafts on the device that is there:
a process for each draft and seed, as many side by side as --at-once says. `small` is the same with few
samples and steps on a CPU. `step` adds the time of a compiled step at Qwen3-8B's shapes, its ratio to the
matrix products and its memory (`step.py`), on a GPU. Results stand in OUT/ladder.json as soon as they are
there, also what failed; a second start goes on. After --seconds what runs is stopped, behind a checkpoint.

`write` merges such files into `docs/methods.json` and makes the page's tables of it; what was measured
later replaces what was there, but no failure replaces a figure.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE, FIGURES = ROOT / "docs" / "methods.md", ROOT / "docs" / "methods.json"
RULER = ROOT / "benchmarks" / "ruler.yaml"
NONE = "not measured"
# What a CPU can do in some minutes; the ruler's settings beside these.
SMALL: dict[str, dict[str, Any]] = {
    "data": {"limit": 400},
    "train": {"epochs": 2, "batch": 4, "warmup_ratio": 0.05},
    "eval": {"prompts": 30, "batch": 30, "max_new_tokens": 64},
}
CASES = {
    "eagle3": "eagle3:1x2048",
    "peagle": "peagle:1x2048",
    "mtp": "mtp:1x2048",
    "dflash": "dflash:1x2048:512",
    "dflash2": "dflash2:1x2048:512",
    "domino": "domino:1x2048:512",
    "dspark": "dspark:1x2048:512",
}
TAKEN = {  # of a report of `draftcore eval`
    "acceptance_length": "length",
    "acceptance_length_95": "interval",
    "acceptance_by_position": "by_position",
    "lossless": "lossless",
    "prompts": "prompts",
}
STEP = ("ms", "products_ms", "ratio", "tflops", "peak_gib", "first_s", "compilations", "error")
Figures = dict[str, dict[str, dict[str, dict[str, Any]]]]  # by setting, draft and seed or case


class Late(TimeoutError):  # noqa: N818 - no error
    """The time is over."""


class Results:
    """What is measured, in a file that is whole at any time."""

    def __init__(self, file: Path, setting: str, device: str) -> None:
        self.file, self.lock = file, threading.Lock()
        self.figures: Figures = json.loads(file.read_text()) if file.exists() else {}
        self.setting, self.about = setting, {"date": str(date.today()), "device": device}

    def has(self, draft: str, key: str) -> bool:
        found = self.figures.get(self.setting, {}).get(draft, {}).get(key, {"error": ""})
        return "error" not in found

    def add(self, draft: str, key: str, found: Mapping[str, Any]) -> None:
        said = found.get("error") or {k: v for k, v in found.items() if not isinstance(v, dict)}
        print(f"{draft} {key}: {said}", flush=True)
        with self.lock:
            merge(self.figures, {self.setting: {draft: {key: {**found, **self.about}}}})
            write_json(self.file, self.figures)


def merge(figures: Figures, more: Figures) -> None:
    for setting, drafts in more.items():
        for draft, entries in drafts.items():
            known = figures.setdefault(setting, {}).setdefault(draft, {})
            for key, entry in entries.items():
                if "error" not in entry or "error" in known.get(key, {"error": ""}):
                    known[key] = entry


def write_json(file: Path, data: Any) -> None:
    (half := file.with_suffix(".part")).write_text(
        json.dumps(data, indent=1, sort_keys=True) + "\n"
    )
    half.replace(file)


# ---------------------------------------------------------------- measuring


def call(command: Sequence[str], log: Path, ends: float, env: Mapping[str, str]) -> int:
    """Run a Python command with its output in a file; raises Late where it does not end in time."""
    if time.time() > ends:
        raise Late
    with log.open("w") as output:
        to = {
            "stdout": output,
            "stderr": subprocess.STDOUT,
            "cwd": ROOT,
            "env": {**os.environ, **env},
        }
        with subprocess.Popen([sys.executable, *command], **to) as process:  # type: ignore[call-overload]
            try:
                return int(process.wait(ends - time.time()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # draftcore stops behind a checkpoint
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                raise Late from None


def failure(log: Path) -> dict[str, Any]:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return {"error": "\n".join(lines[-12:])[-1500:] or "it said nothing"}


def chosen(given: argparse.Namespace, known: Mapping[str, Any]) -> list[str]:
    labels = given.drafts.split(",") if given.drafts else list(known)
    if unknown := set(labels) - set(known):
        sys.exit(f"--drafts {', '.join(unknown)}: there are {', '.join(known)}")
    return labels


class Ladder:
    """Trains and evaluates drafts of the ruler; all features are captured once, for every draft."""

    def __init__(self, given: argparse.Namespace, small: bool) -> None:
        import torch

        cuda = torch.cuda.is_available() and not small
        device = torch.cuda.get_device_name() if cuda else f"CPU, {os.cpu_count()} cores"
        self.out, self.more, self.ends = given.out, given.set, time.time() + given.seconds
        self.at_once = given.at_once or (9 if cuda else 2)
        threads = os.environ.get(
            "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.at_once))
        )
        self.env = {"OMP_NUM_THREADS": threads, **({} if cuda else {"CUDA_VISIBLE_DEVICES": ""})}
        self.results = Results(self.out / "ladder.json", "small" if small else "ruler", device)
        ruler = yaml.safe_load(RULER.read_text())
        for section, values in SMALL.items() if small else ():
            ruler[section] |= values
        self.drafts = ruler.pop("drafts")
        self.common = {**ruler, "store": f"file:{self.out / 'features'}"}

    def draftcore(self, verb: str, label: str, config: Mapping[str, Any]) -> Path | None:
        """Run a verb; returns the log of one that failed."""
        file, log = self.out / f"{label}.yaml", self.out / f"{label}-{verb}.log"
        file.write_text(yaml.safe_dump({**self.common, **config, "run": str(self.out / label)}))
        command = ["-m", "draftcore", verb, str(file), *self.more]
        return log if call(command, log, self.ends, self.env) else None

    def run(self, labels: Sequence[str], seeds: Sequence[str]) -> None:
        todo = [(x, seed) for seed in seeds for x in labels if not self.results.has(x, seed)]
        try:
            if todo and (log := self.draftcore("capture", "all", {"drafts": self.drafts})):
                print(failure(log)["error"], "\n  for all drafts at once: each captures its own")
                for label in labels:
                    self.drafts[label]["store"] = f"file:{self.out / f'features-{label}'}"
                    self.draftcore("capture", f"own-{label}", self.drafts[label])
        except Late:
            print("the time is over; the same command goes on")
        with ThreadPoolExecutor(self.at_once) as pool:
            list(pool.map(lambda pair: self.one(*pair), todo))

    def one(self, label: str, seed: str) -> None:
        name = f"{label}-{seed}"
        config = {**self.drafts[label], "train": {**self.common["train"], "seed": int(seed)}}
        try:
            if log := self.draftcore("train", name, config) or self.draftcore("eval", name, config):
                return self.results.add(label, seed, failure(log))
            report = json.loads((self.out / name / "eval" / "report.json").read_text())
            found = {theirs: report[ours] for ours, theirs in TAKEN.items()}
            self.results.add(label, seed, {**found, "step": report["about"].get("step")})
        except Late:
            print(f"{label} {seed}: the time is over; the same command goes on", flush=True)
        except Exception as error:  # the others go on
            self.results.add(label, seed, {"error": repr(error)})


def step(given: argparse.Namespace) -> None:
    """Time a compiled step of each method, one process after the other."""
    results, ends = Results(given.out / "ladder.json", "step", ""), time.time() + given.seconds
    script = str(ROOT / "benchmarks" / "step.py")
    for label in chosen(given, CASES):
        case, log = CASES[label], given.out / f"step-{label}.log"
        if results.has(label, case):
            continue
        try:
            call([script, "--mode", "compiled", "--mask", "dense", case], log, ends, {})
        except Late:
            return print(f"{label}: the time is over; the same command goes on")
        lines = [json.loads(line) for line in log.read_text().splitlines() if line[:1] == "{"]
        results.about |= {"device": lines[0]["device"] if lines else "?"}
        found = lines[1] if len(lines) > 1 else failure(log)
        results.add(label, case, {key: found[key] for key in STEP if key in found})


# ---------------------------------------------------------------- the page


def installed() -> dict[str, tuple[str, str]]:
    """Return the dist and the servers of each algorithm that is installed, by what it says itself."""
    from draftcore_llamacpp.methods import GROUP, METHODS
    from importlib_metadata import entry_points

    from draftcore.plugins.registry import load_plugins

    found = dict[str, tuple[str, str]]()
    own = {method.name for method in METHODS.values()}  # tables of draftcore-llamacpp, and of dists
    brought = {entry.dist.name for entry in entry_points(group=GROUP) if entry.dist}
    for plugin in load_plugins().ready:
        for offer in (o for o in plugin.offers if o.kind == "algorithm"):
            says = {c.partition(":")[2] for c in offer.capabilities if c.startswith("served:")}
            if offer.name in own or plugin.dist in brought:
                says.add("llama.cpp")
            found[offer.name] = plugin.dist, ", ".join(sorted(says)) or "none"
    return found


def captured(name: str) -> str:
    """Say what a token's features take, of a target of Qwen3-8B's config, by the default options."""
    from draftcore_tools.recipes import recipes

    from draftcore import open_run

    options = {"init": "fresh"} if name == "mtp" else {}  # Qwen3 brings no layer
    with tempfile.TemporaryDirectory() as folder:
        config = recipes()["qwen3-8b"].config
        (Path(folder) / "config.json").write_text(json.dumps(config))
        about = {"run": f"{folder}/run", "target": {"path": folder}}
        with open_run({**about, "algorithm": {"name": name, "options": options}}) as run:
            request = run.drafts[0].request()
            return f"{len(request.names)} states, {request.token_bytes(run.width) // 1024} KiB"


def table(head: str, rows: Iterable[Sequence[str]]) -> str:
    names = [name.strip() for name in head.split("|")]
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def overview(figures: Figures) -> str:
    rows = []
    for name, (dist, servers) in sorted(installed().items()):
        length, _ = mean(figures.get("ruler", {}).get(name, {}))
        timed = next(iter(figures.get("step", {}).get(name, {}).values()), {})
        ratio = f"{timed['ratio']:.2f}" if "ratio" in timed else NONE
        rows.append((f"`{name}`", f"`{dist}`", captured(name), servers, length, ratio))
    return table("method | dist | captured a token | served by | ruler | step", rows)


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
    shares = zip(*(entry["by_position"] for entry in good), strict=True)
    by_position = " ".join(f"{sum(share) / len(good):.2f}" for share in shares)
    return f"{sum(entry['length'] for entry in good) / len(good):.2f}", by_position


def steps(figures: Figures) -> str:
    drafts, rows = figures.get("step", {}), []
    for name in sorted({*installed(), *drafts}):
        for case, found in drafts.get(name, {"": {}}).items():
            cells = (
                str(found.get(key, NONE)) for key in ("ms", "products_ms", "ratio", "peak_gib")
            )
            rows.append((f"`{case or CASES.get(name, name)}`", *cells))
    head = "case | ms | products, ms | ratio | peak, GiB"
    return f"{table(head, rows)}\n\n{when(drafts)}"


def when(drafts: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    found = [e for entries in drafts.values() for e in entries.values() if "error" not in e]
    pairs = sorted({(entry["date"], entry["device"]) for entry in found})
    return (
        f"Measured {'; '.join(f'{day}, {on}' for day, on in pairs)}." if pairs else "Not measured."
    )


def page(text: str, figures: Figures) -> str:
    """Return the page with its tables made anew; what stands around them is left as it is."""
    made = {
        "methods": overview(figures), "ruler": lengths("ruler", figures),
        "small": lengths("small", figures), "step": steps(figures),
    }  # fmt: skip
    for name, content in made.items():
        begin, end = f"<!-- {name}: by benchmarks/ladder.py write -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{content}\n{end}{rest.partition(end)[2]}"
    return text


def write(files: Sequence[Path]) -> None:
    figures: Figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for file in files:
        merge(figures, json.loads(file.read_text()))
    write_json(FIGURES, figures)
    PAGE.write_text(page(PAGE.read_text(), figures))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["run", "small", "step", "write"])
    parser.add_argument("places", nargs="*", type=Path, help="a folder; of `write`, files")
    parser.add_argument("--seeds", default="0,1,2", help="of `small` 0 alone")
    parser.add_argument("--drafts", help="these labels of the ruler alone, with commas between")
    parser.add_argument("--at-once", type=int, help="processes; 9 on a GPU, else 2")
    parser.add_argument("--seconds", type=float, default=math.inf, help="then stop what runs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    if given.verb == "write":
        return write(given.places)
    if len(given.places) != 1:
        parser.error("name one folder")
    given.out = given.places[0].resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.verb == "step":
        return step(given)
    ladder = Ladder(given, small := given.verb == "small")
    ladder.run(chosen(given, ladder.drafts), ["0"] if small else given.seeds.split(","))


if __name__ == "__main__":
    main()

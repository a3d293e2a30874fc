"""The whole journey by the command line: train, which captures first, eval, export; then a summary.

    python examples/quickstart/quickstart.py examples/quickstart/eagle3.yaml [KEY=VALUE]...

Leaves summary.json, acceptance.png and export/ in the run's folder, whose path it prints. Where llama.cpp
is installed (draftcore-llamacpp[serve]) it serves the draft, and the last lines say how fast that was.
"""

import json
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import yaml

SERVED = 8  # prompts that are decoded by llama.cpp, once for each number of drafts


def main(config: str, *overrides: str) -> None:
    given = dict(override.split("=", 1) for override in overrides)
    run = Path(given.get("run") or yaml.safe_load(Path(config).read_text())["run"])
    if (run / "summary.json").exists():  # finished: begin anew; an interrupted one goes on
        shutil.rmtree(run)
    began = time.perf_counter()
    for verb in (["train"], ["eval", "--out", str(run)], ["export"]):
        print("\n$ draftcore", *verb, config, flush=True)
        subprocess.run(["draftcore", *verb, config, *overrides], check=True)
    report = json.loads((run / "report.json").read_text())
    export = json.loads((run / "export" / "draftcore.json").read_text())
    summary = {
        "acceptance_length": report["acceptance_length"],
        "acceptance_by_position": report["acceptance_by_position"],
        "lossless": report["lossless"],
        "seconds": round(time.perf_counter() - began, 1),
        "samples_seen": export["samples_seen"],
    }
    (run / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"\n{json.dumps(summary, indent=1)}\n{run.resolve()}")
    if find_spec("draftcore_llamacpp") and find_spec("xllamacpp"):
        serve = ["served", config, *overrides, "--engine", "llamacpp", "--speed"]
        print("\n$ draftcore", *serve, flush=True)
        subprocess.run(["draftcore", *serve, f"eval.prompts={SERVED}"], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

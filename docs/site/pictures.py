"""Draw README's two pictures from a finished run: its terminal's lines, and its metrics.png made small.

    draftcore train examples/quickstart/eagle3.yaml run=runs/readme data.limit=300 train.eval_prompts=4 2>&1 \
        | tee runs/train.txt
    draftcore eval examples/quickstart/eagle3.yaml run=runs/readme data.limit=300 eval.prompts=12 2>&1 \
        | tee runs/eval.txt
    python docs/site/pictures.py runs/readme runs/train.txt runs/eval.txt
"""

import io
import re
import sys
from pathlib import Path

from PIL import Image
from rich.console import Console

IMAGES = Path(__file__).parents[1] / "images"
COMMAND = "$ draftcore {} examples/quickstart/eagle3.yaml data.limit=300 {}"
MORE = {"train": "train.eval_prompts=4", "eval": "eval.prompts=12"}
COLUMNS = 122
SHOWN = {
    "train": r"a step|training \d*(50|00)/|step \d+:|best",
    "eval": r"acceptance length|by position|if those|lossless|prompts",
}


def main(run: str, *outputs: str) -> None:
    console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True)
    for (verb, lines), output in zip(SHOWN.items(), outputs, strict=True):
        console.print(COMMAND.format(verb, MORE[verb]), style="bold", highlight=False)
        for line in Path(output).read_text().splitlines():
            if re.match(lines, line):
                console.print(line, highlight=False)
    svg = console.export_svg(title="draftcore", unique_id="terminal")
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # it is fetched from elsewhere
    svg = svg.replace("Fira Code, monospace", "Fira Code, DejaVu Sans Mono, monospace")
    (IMAGES / "terminal.svg").write_text(svg)
    plot = Image.open(Path(run, "metrics.png")).convert("RGB")
    plot.quantize(32).save(IMAGES / "curves.png", optimize=True)
    for name in ("terminal.svg", "curves.png"):
        print(f"{IMAGES / name}: {(IMAGES / name).stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main(*sys.argv[1:])

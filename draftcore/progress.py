"""What a person sees while a run works: how far it is, the time left, and what training comes to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from statistics import fmean

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text


class Progress(RichProgress):
    """Progress on standard error: a live bar on a terminal, elsewhere a line for `every` units done.

    Figures of training are means over the last `every` steps.
    """

    def __init__(
        self, total: int, done: int = 0, verb: str = "training", *, every: int = 0,
        shown: bool = True, status_line: Callable[[], str] = str,
    ) -> None:  # fmt: skip
        self.shown, self.total, self.status_line = shown, total, status_line
        self.recent: list[Mapping[str, Mapping[str, float]]] = [{}]  # of drafts, by label
        columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        console = Console(stderr=True)
        hidden = not (shown and console.is_terminal)
        super().__init__(*columns, console=console, disable=hidden, speed_estimate_period=600)
        self.line, self.every = f"{verb} {{}}/{total}", every or max(1, total // 20)
        self.task = self.add_task(verb, total=total, completed=done)

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield the bar and, below it, what there is to say: beside it a terminal may be too narrow."""
        yield self.make_tasks_table(self.tasks)
        yield from map(Text, filter(None, [*self.figures(), self.status_line()]))

    def show(self, done: int, metrics: Mapping[str, Mapping[str, float]] | None = None) -> None:
        """Show how far the work is, and by a draft's label what its metrics say."""
        self.recent = [*self.recent, metrics or {}][-self.every :]
        self.update(self.task, completed=done)
        if self.disable and (done % self.every == 0 or done == self.total):
            left = f"{TimeRemainingColumn().render(self.tasks[0])} left"
            parts = [self.line.format(done), *self.figures(), left, self.status_line()]
            self.tell("  ".join(filter(None, parts)))

    def figures(self) -> Iterator[str]:
        """Yield what the last steps come to: of each draft, and of all."""
        recent = self.recent
        for label, last in recent[-1].items():
            steps = [step[label] for step in recent if label in step]
            m = {name: fmean(s[name] for s in steps if name in s) for name in last}
            yield f"{label} {in_words(m)}".strip()
        if recent[-1]:
            memory = f"  {m['memory_bytes'] / 2**30:.1f} GiB" if "memory_bytes" in m else ""
            yield f"epoch {last['epoch']:.0f}  {m['tokens'] / m['seconds']:,.0f} tokens/s{memory}"

    def tell(self, line: str) -> None:
        """Print a line, on a terminal above the bar."""
        if self.shown:
            self.console.print(line, highlight=False, soft_wrap=True)


def in_words(metrics: Mapping[str, float]) -> str:
    """Write loss, accuracy and acceptance on a line, of all the metrics there are.

    NAME_0, NAME_1, ... are one metric by position. Of a loss by position the mean is written, as its sum
    grows with their number.
    """
    groups, parts = defaultdict[str, list[float]](list), list[str]()
    for name in sorted(metrics, key=lambda name: (len(name), name)):
        stem, _, position = name.rpartition("_")
        if name.startswith(("loss", "accuracy", "acceptance")):
            groups[stem if position.isdecimal() else name].append(metrics[name])
    for name, values in groups.items():
        if name == "loss" and len(values) > 1:
            name, values = "mean loss", [fmean(values[1:])]
        parts.append(" ".join([name.replace("_", " "), *(f"{value:.3g}" for value in values)]))
    return "  ".join(parts)

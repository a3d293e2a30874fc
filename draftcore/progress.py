"""What a person sees while a run works: one line with progress, time left, loss and capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text


class StatusLine(ProgressColumn):
    """A text that is asked for anew whenever the bar is drawn."""

    def __init__(self, ask: Callable[[], str]) -> None:
        super().__init__()
        self.ask = ask

    def render(self, task: Task) -> Text:
        return Text(self.ask())


class Progress(RichProgress):
    """Progress on standard error: a live bar on a terminal, elsewhere a line for `every` units done."""

    def __init__(
        self, total: int, done: int = 0, verb: str = "training", *, every: int = 0,
        shown: bool = True, status_line: Callable[[], str] = str,
    ) -> None:  # fmt: skip
        columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        more, console = ("{task.fields[note]}", StatusLine(status_line)), Console(stderr=True)
        hidden = not (shown and console.is_terminal)
        super().__init__(*columns, *more, console=console, disable=hidden)
        self.task = self.add_task(verb, total=total, completed=done, note="")
        self.shown, self.total, self.status_line = shown, total, status_line
        self.line, self.every = f"{verb} {{}}/{total}", every or max(1, total // 20)

    def show(self, done: int, metrics: Mapping[str, Mapping[str, float]] | None = None) -> None:
        """Show how far the work is, and by a draft's label its loss, epoch and speed."""
        notes = [
            f"{label} loss {m['loss']:.4g}  epoch {m['epoch']:.0f}  {m['tokens_per_second']:,.0f} tokens/s"
            for label, m in (metrics or {}).items()
        ]
        self.update(self.task, completed=done, note="  ".join(note.strip() for note in notes))
        if self.shown and self.disable and (done % self.every == 0 or done == self.total):
            parts = [self.line.format(done), *map(str.strip, notes), self.status_line()]
            self.console.print("  ".join(filter(None, parts)), highlight=False, soft_wrap=True)

    def tell(self, line: str) -> None:
        """Print a line, on a terminal above the bar."""
        if self.shown:
            self.console.print(line, highlight=False, soft_wrap=True)

"""What a person sees while a run works: one line with progress, time left, loss and capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text


class Beside(ProgressColumn):
    """What happens beside the counted work, asked anew whenever the line is drawn."""

    def __init__(self, ask: Callable[[], str]) -> None:
        super().__init__()
        self.ask = ask

    def render(self, task: Task) -> Text:
        return Text(self.ask())


class Progress(RichProgress):
    """A progress bar on standard error: live on a terminal, a final line elsewhere."""

    def __init__(
        self,
        total: int,
        done: int = 0,
        verb: str = "training",
        *,
        shown: bool = True,
        beside: Callable[[], str] = str,
    ) -> None:
        super().__init__(
            "{task.description}",
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            "{task.fields[note]}",
            Beside(beside),
            console=Console(stderr=True),
            disable=not shown,
        )
        self.task = self.add_task(verb, total=total, completed=done, note="")

    def show(self, done: int, metrics: Mapping[str, Mapping[str, float]] | None = None) -> None:
        """Show how far the work is, and the loss of each draft by its label."""
        losses = [f"{label} loss {m['loss']:.4g}".strip() for label, m in (metrics or {}).items()]
        self.update(self.task, completed=done, note="  ".join(losses))

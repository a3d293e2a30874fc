"""How the transport benchmarks print: one figure a line, with what it aims at."""

import statistics
import time
from collections.abc import Callable, Sequence


def report(what: str, measured: str, aim: str = "no aim", met: bool | None = None) -> None:
    verdict = {True: "met", False: "NOT MET", None: "-"}[met]
    print(f"{what} | {measured} | {aim} | {verdict}", flush=True)


def ms(seconds: Sequence[float]) -> float:
    """The median, in milliseconds."""
    return 1e3 * statistics.median(seconds)


def against(what: str, base: Sequence[float], took: Sequence[float], aim: float, of: str) -> None:
    """Report how fast something is beside what bounds it.

    The medians decide. The best round of each tells what other processes beside these have cost.
    """
    share, best = ms(base) / ms(took), min(base) / min(took)
    measured = f"{share:.0%}, best rounds {best:.0%}: {ms(took):.2f} ms beside {ms(base):.2f} ms"
    report(what, measured, f">= {aim:.0%} of {of}", share >= aim)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began

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


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began

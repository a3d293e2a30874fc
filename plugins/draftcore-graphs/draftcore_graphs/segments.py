"""The work of one shape as a list of steps: recorded segments, and eager breaks between them.

What a device does is behind `Segments`; there is one for CUDA, and one of a few lines for the CPU
in the tests. Three things are odd:

- A segment runs for real as soon as it is recorded. So a break that follows is called on true
  values, and a recording returns what an eager call would.
- What a break returned is given to the next segment as an empty tensor that is allocated *within*
  that segment, so it lives in the graphs' memory, no longer than the segment needs it. A replay
  copies the break's new result there.
- For that reason neither it nor the arguments of a break are kept alive by a recording: only
  their place is kept (`Segments.pin`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from draftcore.contracts.runner import Outputs
from draftcore.errors import DraftcoreError
from draftcore_graphs.breaks import recording
from draftcore_graphs.outputs import form, leaves, mapped

Step = Callable[[], None]


class Segments(Protocol):
    """How a device records. One recording is underway at a time."""

    def aside(self) -> AbstractContextManager[None]:
        """Wrap warm-up and recording: they run where nothing else does."""
        ...

    def recording(self) -> AbstractContextManager[None]:
        """Wrap the recording of one function; a segment that an error left open is dropped."""
        ...

    def begin(self) -> None:
        """Record from here on, without running what is recorded."""
        ...

    def end(self) -> Step:
        """Return what runs the segment that was recorded since `begin`."""
        ...

    def pin(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return what gives a tensor where this one lies, for as long as the recording is kept.

        Memory that is the recordings' own may be used again by the steps that follow.
        """
        ...

    def closing(self) -> AbstractContextManager[None]:
        """Wrap the dropping of all recordings, which gives back their memory."""
        ...


@dataclass
class Recording:
    """What is replayed for one key. `outputs` are those of the last run."""

    steps: list[Step]
    outputs: Outputs

    def replay(self) -> Outputs:
        with torch.inference_mode():
            for step in self.steps:
                step()
        return self.outputs


@dataclass
class Break:
    """A function that runs between two segments; its result goes to where the next one reads."""

    fn: Callable[..., Outputs]
    args: tuple[Any, ...]
    form: Any
    into: list[Tensor] = field(default_factory=list)

    def __call__(self) -> None:
        self.write(self.fn(*self.args))

    def write(self, outputs: Outputs) -> None:
        """Raises DraftcoreError where the outputs are not of the form that was recorded."""
        if (found := form(outputs)) != self.form:
            raise DraftcoreError(
                f"a break returned {found}, but {self.form} when it was recorded\n"
                "  what runs between graphs must return the same shapes for every batch of a bucket"
            )
        for place, value in zip(self.into, leaves(outputs), strict=True):
            place.copy_(value)


def record(fn: Callable[[], Outputs], segments: Segments, *, breaks: bool) -> Recording:
    """Record one call, in one segment or with a new one after every break."""
    recorder = SegmentRecorder(segments)
    with segments.recording():
        recorder.begin()
        if breaks:
            with recording(recorder):
                outputs = fn()
        else:
            outputs = fn()
        recorder.end()
    form(outputs)  # refuses what is no output
    return Recording(recorder.steps, outputs)


def record_eager(fn: Callable[[], Outputs]) -> Recording:
    """Record nothing: the whole function is one break."""
    outputs = mapped(fn(), torch.clone)
    return Recording([Break(fn, (), form(outputs), list(leaves(outputs)))], outputs)


class SegmentRecorder:
    """Cuts one call into steps, as `draftcore_graphs.breaks` asks for."""

    def __init__(self, segments: Segments) -> None:
        self.segments, self.steps = segments, list[Step]()
        self._open = False
        # To do as soon as the open segment is recorded: give it what the break before it returned.
        self._fill: Step = _nothing

    def begin(self) -> None:
        self.segments.begin()
        self._open = True

    def end(self) -> None:
        """End the open segment and run it."""
        run, self._open = self.segments.end(), False
        self._fill()
        self._fill = _nothing
        run()
        self.steps.append(run)

    def eager(self, fn: Callable[..., Outputs], args: tuple[Any, ...]) -> Outputs:
        if not self._open:  # within another break
            return fn(*args)
        self.end()
        pinned = mapped(args, lambda tensor: self.segments.pin(tensor)())
        outputs = fn(*args)
        step = Break(fn, pinned, form(outputs))
        self.steps.append(step)
        self.begin()
        static = mapped(outputs, torch.empty_like)
        places = [self.segments.pin(tensor) for tensor in leaves(static)]

        def fill() -> None:
            step.into = [place() for place in places]
            with torch.inference_mode():
                step.write(outputs)

        self._fill = fill
        return static


def _nothing() -> None:
    """No result of a break is waiting."""

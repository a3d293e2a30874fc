"""Records the work of one shape as a list of steps: segments, and eager breaks between them.

How a device records a segment is behind `Segments`: `cuda` implements it, and the tests do for the CPU.

- A segment runs as soon as it is recorded. So a break that follows is called on true values, and a
  recording returns what an eager call would.
- What a break returns is copied into an empty tensor that is allocated *within* the next segment, and so
  lies in the graphs' memory no longer than the segment needs it. A replay copies the new result there.
- So that this memory can be used again, a recording does not keep these tensors or the arguments of
  a break alive: it keeps their addresses (`Segments.pin`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from draftcore.contracts.runner import Outputs
from draftcore.errors import DraftcoreError
from draftcore_graphs.breaks import recording

Step = Callable[[], None]


class Segments(Protocol):
    """How a device records, one recording at a time."""

    def isolated(self) -> AbstractContextManager[None]:
        """Wrap warm-up and recording: nothing else runs on their stream."""

    def recording(self) -> AbstractContextManager[None]:
        """Wrap the recording of one function; a segment that an error left open is dropped."""

    def begin(self) -> None:
        """Record from here on, without running what is recorded."""

    def end(self) -> Step:
        """Return a function that runs the segment that was recorded since `begin`."""

    def pin(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that returns a tensor at this one's address while the recording is kept.

        The steps that follow may use memory of the recordings' own again.
        """

    def closing(self) -> AbstractContextManager[None]:
        """Wrap the dropping of all recordings, and free their memory."""


@dataclass
class Recording:
    """The steps that are replayed for one key, and the outputs of the last run."""

    steps: list[Step]
    outputs: Outputs

    def replay(self) -> Outputs:
        with torch.inference_mode():
            for step in self.steps:
                step()
        return self.outputs


@dataclass
class Break:
    """A step that calls a function and copies its result to where the next segment reads it."""

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


def leaves(outputs: Outputs) -> list[Tensor]:
    """Return the tensors of outputs, in order."""
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def form(outputs: Outputs) -> Any:
    """Return the containers, shapes and dtypes of outputs, to be compared with `==`.

    Raises DraftcoreError for an object that cannot be an output.
    """
    values, containers = tree_flatten(outputs)
    for value in values:
        if not isinstance(value, Tensor | None):
            raise DraftcoreError(
                f"a function that is recorded, or a break in it, returned a {type(value).__name__}\n"
                "  let it return a tensor, None, or a dict, tuple or list of these"
            )
    return containers, [value if value is None else (*value.shape, value.dtype) for value in values]


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
    form(outputs)  # raises for what cannot be an output
    return Recording(recorder.steps, outputs)


def record_eager(fn: Callable[[], Outputs]) -> Recording:
    """Return a recording whose only step is the whole function, as a break."""
    outputs = tree_map_only(Tensor, torch.clone, fn())
    return Recording([Break(fn, (), form(outputs), leaves(outputs))], outputs)


class SegmentRecorder:
    """Cuts one call into steps; see `draftcore_graphs.breaks.Recorder`."""

    def __init__(self, segments: Segments) -> None:
        self.segments, self.steps = segments, list[Step]()
        self._open = False
        self._fill: Step | None = None  # gives the open segment what the break before it returned

    def begin(self) -> None:
        self.segments.begin()
        self._open = True

    def end(self) -> None:
        """End the open segment and run it."""
        run, self._open = self.segments.end(), False
        if self._fill is not None:
            self._fill()
            self._fill = None
        run()
        self.steps.append(run)

    def eager(self, fn: Callable[..., Outputs], args: tuple[Any, ...]) -> Outputs:
        if not self._open:  # within another break
            return fn(*args)
        self.end()
        pinned = tree_map_only(Tensor, lambda tensor: self.segments.pin(tensor)(), args)
        outputs = fn(*args)
        step = Break(fn, pinned, form(outputs))
        self.steps.append(step)
        self.begin()
        static: Outputs = tree_map_only(Tensor, torch.empty_like, outputs)
        places = [self.segments.pin(tensor) for tensor in leaves(static)]

        def fill() -> None:
            step.into = [place() for place in places]
            with torch.inference_mode():
                step.write(outputs)

        self._fill = fill
        return static

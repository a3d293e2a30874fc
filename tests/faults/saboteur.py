"""Wrappers that harm the process they run in, at named points, once each: no hook in the product.

    SABOTAGE="kill:put@2 freeze:leased raise:captured=q7? pace:0.05"  SABOTAGE_MARKS=FOLDER

`kill` is SIGKILL and `freeze` SIGSTOP, to the process itself, when it comes to a point for the
n-th time; a file in the folder marks what was done, so a restarted process passes. Points:

    producer  captured, put (half of the tensors are copied), published (before it is told)
    trainer   leased, midstep, stepped (before the release), written (a checkpoint, not renamed),
              unmarked (renamed, not marked), saved, freeing, freed

Other deeds strike once, too: `full:publish` and `full:advance` leave the channel no byte to write,
`twice:publish` tells all again, `torn:publish` dies amid a line, `flip:published` alters a stored byte.
These go on:
`raise:WORD` fails every group in which a sample begins with the word, `narrow:WORD`, `lacking:WORD`,
`nan:WORD` and `huge:WORD` return something else than was asked for that sample, and `pace:SECONDS` slows
steps down.
"""

import itertools
import os
import resource
import signal
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from draftcore import hookimpl

DEEDS = [deed.split(":", 1) for deed in os.environ.get("SABOTAGE", "").split()]
MARKS = Path(os.environ.get("SABOTAGE_MARKS", "/nonexistent"))
seen = Counter()


def now(deed, point):
    """Say whether to do something at this point: once in a run, by one process."""
    for wanted, place in DEEDS:
        name, _, at = place.partition("@")
        if (wanted, name) != (deed, point):
            continue
        seen[deed, place] += 1
        if seen[deed, place] >= int(at or 1):
            try:
                (MARKS / f"{deed}-{place}").open("x").close()
            except FileExistsError:
                continue
            return True
    return False


def reach(point):
    if now("kill", point):
        os.kill(os.getpid(), signal.SIGKILL)
    if now("freeze", point):
        (MARKS / f"frozen-{point}").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)


def word(deed):
    """The word of a deed that goes on, or None."""
    return next((place for wanted, place in DEEDS if wanted == deed), None)


@contextmanager
def full_medium():
    """Let no file of this process grow: a write fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Around:
    """An object with some methods replaced."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


# ---------------------------------------------------------------- capture


class Capture(Around):
    def __init__(self, inner, target):
        super().__init__(inner)
        self.target = target

    def features(self, groups):
        groups = list(groups)
        for group, captured in zip(groups, self.inner.features(groups), strict=True):
            texts = [self.target.tokenizer.decode(tokens) for tokens in group.token_ids]
            for text, features in zip(texts, captured.features, strict=True):
                if hits("raise", text):
                    raise RuntimeError(f"no capture of {word('raise')}")
                if hits("narrow", text):
                    features.update({name: value[:, :5] for name, value in features.items()})
                if hits("lacking", text):
                    features.pop("last_hidden")
                for deed, number in (("nan", float("nan")), ("huge", 3e38)):
                    if hits(deed, text):
                        features["last_hidden"] = features["last_hidden"].clone()
                        features["last_hidden"][2, 3] = number
            reach("captured")
            yield captured


def hits(deed, text):
    return word(deed) is not None and word(deed) in text


@hookimpl(wrapper=True)
def capture(target):
    return Capture((yield), target)


# ---------------------------------------------------------------- store


class HalfPut(dict):
    """Tensors of a sample, which are asked for twice: to be described, then to be copied."""

    def __getitem__(self, name):
        if next(self.asked) >= len(self):
            reach("put")
        return super().__getitem__(name)

    def items(self):
        return [(name, super(HalfPut, self).__getitem__(name)) for name in self]


class Store(Around):
    def put_many(self, items):
        import dataclasses

        last = HalfPut(items[-1].tensors)
        last.asked = itertools.count(len(last))
        refs = self.inner.put_many([*items[:-1], dataclasses.replace(items[-1], tensors=last)])
        if now("flip", "published"):
            with self.inner.get(refs[0]) as handle:  # its tensors are views of the shared bytes
                handle.tensors["last_hidden"].view(-1)[3] += 1
        reach("published")
        return refs

    def get_many(self, refs, device="cpu", names=None):
        handles = self.inner.get_many(refs, device, names)
        reach("leased")
        return handles

    def free(self, refs):
        refs = list(refs)
        if refs:
            reach("freeing")
        self.inner.free(refs[:1])
        if refs:
            reach("freed")
        self.inner.free(refs[1:])


@hookimpl(wrapper=True)
def feature_store():
    return Store((yield))


# ---------------------------------------------------------------- channel


class Channel(Around):
    def publish(self, task, refs):
        if now("full", "publish"):
            with full_medium():
                self.inner.publish(task, refs)
        if now("torn", "publish"):
            self.tear()
        self.inner.publish(task, refs)
        if now("twice", "publish"):
            self.inner.publish(task, refs)

    def advance(self, step_index):
        if now("full", "advance"):
            with full_medium():
                time.sleep(2.0)  # until the channel's thread had something to tell
        return self.inner.advance(step_index)

    def tear(self):
        """Write half a line to the trainer, as a process does that is killed while it writes."""
        (segment,) = self.inner._log._written.values()
        os.write(segment.file, b'{"kind": "published", "task": {"ep')
        os.kill(os.getpid(), signal.SIGKILL)


@hookimpl(wrapper=True)
def channel():
    return Channel((yield))


# ---------------------------------------------------------------- training


@hookimpl(wrapper=True)
def forward_loss():
    output = yield
    time.sleep(float(word("pace") or 0))
    reach("midstep")
    return output


@hookimpl
def step_finished(step):
    reach("stepped")


@hookimpl
def checkpoint_saved(step):
    reach("saved")


def _audit(event, arguments):
    """Python itself tells of files that are opened and renamed."""
    if event == "os.rename" and ".step-" in str(arguments[0]):
        reach("written")
    if event == "open" and str(arguments[0]).endswith("COMPLETE") and arguments[2] & os.O_CREAT:
        reach("unmarked")


if DEEDS:
    sys.addaudithook(_audit)

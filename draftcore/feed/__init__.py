"""From the plan to samples with features: the one path that every topology shares.

A `Producer` satisfies capture tasks: from what a durable store already holds (an offline run is
one in which it holds everything), else by running the target. A `Source` asks the channel for the
samples of a step: in a colocated run it pumps the producer until they are there, else it waits for
producers elsewhere. A `Feed` opens them for reading: on several ranks each has one and opens its own
share, and rank 0 alone a source. While a step is trained on, a thread of the feed's own (`aside`)
opens the next one; where the run overlaps, its captures were launched before and are stored then.

    plan ── Source ── channel ── Producer ── target      (rank 0)
              │ refs                │
            Feed ◄──── store ◄──────┘                    (every rank)
"""

from draftcore.feed.producer import TEXT, Producer, forget
from draftcore.feed.source import Source
from draftcore.feed.steps import Feed

__all__ = ["TEXT", "Feed", "Producer", "Source", "forget"]

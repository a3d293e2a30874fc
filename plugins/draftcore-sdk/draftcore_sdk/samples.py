"""Samples without a target, for tests of what an algorithm makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftcore.contracts.algorithm import Sample, SampleId


def random_samples(
    lengths: Sequence[int], features: Sequence[str], *, width: int, tokens: int, seed: int
) -> list[Sample]:
    """One sample of each length, about three in four of its tokens to be learned.

    Token ids are below `tokens`; features are normal, [length, width] in fp64.
    """
    generator = torch.Generator().manual_seed(seed)
    return [
        Sample(
            SampleId(f"{seed}.{index}", 0),
            torch.randint(tokens, (length,), generator=generator),
            torch.rand(length, generator=generator) < 0.75,
            {
                name: torch.randn(length, width, generator=generator, dtype=torch.float64)
                for name in features
            },
        )
        for index, length in enumerate(lengths)
    ]

"""Check once per target, with a short prompt, that an engine captures the features that were asked for.

First, the last hidden state times the target's head, scaled and capped as the target's config says, has
to give the engine's own prediction, or a draft would learn another distribution than it samples
from. Second, layers and last hidden state have to be those that transformers computes. That needs the
target in memory a second time, so transformers computes them before the engine starts, if the weights
fit on the device.

Shape letters: T tokens, H width, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError
from draftcore.tensors import resolve_device

# Mean over tokens of |difference| / |state|, both the L2 norm over the width. Rounding over the
# layers of a model gives 1e-6 in fp32 and up to 1.4e-2 in bf16 (an H200); another layer's output, or
# the state before the final norm, differs by a tenth and more.
BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
SEEN = "of a row with images "
FITS = 1.2  # weights, and what loading and a short prompt take beside them


def prompt_of(target: TargetSpec) -> list[int]:
    """Return the short prompt that is captured for the check."""
    return [token % target.vocab_size for token in range(10, 26)]


def reference(
    target: TargetSpec,
    request: FeatureRequest,
    prompt: Sequence[int],
    engine: str,
    made: Any = None,
) -> dict[str, Tensor] | None:
    """Return transformers' features [T, H] of a prompt, on the CPU; None where it does not fit.

    Of a prompt with images, `made` is what the target's processor makes of them.
    """
    if not fits(target):
        warnings.warn(
            f"target {target.path!r} does not fit into memory beside {engine}'s: its layers are not "
            "compared with transformers'\n  capture.options.self_test=false says so without a warning",
            stacklevel=2,
        )
        return None
    # A copy of the description, and what it loads goes with it; a model that is there they share.
    model = copy.copy(target).load_model()
    tokens_BT = torch.tensor([list(prompt)], device=model.device)
    lengths_B = torch.tensor([len(prompt)], device=model.device)
    own = dataclasses.replace(request, dtype=str(model.dtype).removeprefix("torch."))
    if made:
        forward: Any = getattr(model, "forward_images", None)  # of a target of transformers'
        if forward is None:
            raise UsageError(
                f"target {target.path!r} cannot be asked for features of images, to compare {engine}'s with\n"
                "  set capture.options.self_test=false"
            )
        taken = forward(copy.copy(made), own)
    else:
        taken = model.features(tokens_BT, lengths_B, own)
    found = {name: taken[name][0].cpu() for name in request.names}
    del model, taken
    gc.collect()
    torch.cuda.empty_cache()
    return found


def fits(target: TargetSpec) -> bool:
    """Say whether the weights fit on the target's device as it is now."""
    device = resolve_device(target.device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    return FITS * target.weight_bytes() <= free


def require_same(
    target: TargetSpec,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    engine: str,
    of: str = "",
) -> None:
    """Raise UsageError for a feature that is not transformers'; `of` says of what, if not of text."""
    for name, expected_TH in expected.items():
        found_TH = found[name].cpu().double()
        gap_T = (found_TH - expected_TH.double()).norm(dim=-1) / expected_TH.double().norm(dim=-1)
        gap, bound = float(gap_T.mean()), BOUNDS[target.dtype]
        if not gap <= bound:
            raise UsageError(
                f"{name} {of}of {target.path!r} as {engine} computes it differs from transformers' by "
                f"{gap:.2g} of its length\n  (bound {bound:.2g} in {target.dtype}): another state, or "
                "other weights, for example quantised ones\n"
                "  capture with capture.name=hf, or, where they are meant to differ, set "
                "capture.options.self_test=false"
            )


def require_own_head(
    target: TargetSpec,
    hidden_H: Tensor,
    theirs_K: Tensor,
    who: str,
    tokens: slice | list[int] = slice(None),
) -> None:
    """Raise UsageError unless last hidden x head gives the log-probabilities that were computed there.

    Those are of all tokens, or of these.
    """
    head_VH = target.head().to(hidden_H)
    ours_K = torch.log_softmax(target.capped(head_VH @ hidden_H).double(), -1)[tokens]
    gap = float((ours_K - theirs_K.to(ours_K)).abs().max())
    bound = 1e-3 if target.dtype == torch.float32 else 0.1
    if not gap <= bound:
        raise UsageError(
            f"{who} does not predict as its last hidden state times the head of {target.path!r}: "
            f"log-probabilities differ by {gap:.3g}\n  (bound {bound:.3g}): it has other weights, or "
            "computes its logits in a way that draftcore does not know\n"
            "  start it with the run's target, or, where weights are meant to differ, set "
            "capture.options.self_test=false"
        )

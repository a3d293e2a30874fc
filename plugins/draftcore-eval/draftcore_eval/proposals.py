"""What a drafter proposes: checked when it comes, and verified with the target's logits.

A proposal is a tree of nodes, each a token that may follow its parent's; a chain is the tree in
which every node's parent is the one before. Greedily, the longest path that the target agrees with
is accepted. In sampling a node is accepted with probability min(1, p/q); where it is refused, what is
left of p judges its next sibling, and in the end gives the target's own token. That keeps the target's
distribution (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1; Miao et al. 2023, arXiv
2305.09781, algorithm 2).

Shape letters: B rows, K nodes, T = K + 1 tokens that the target reads (the last known one, then the
nodes), P tokens of a path, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from draftcore.contracts.algorithm import Drafter, Proposal
from draftcore.errors import DraftcoreError, UsageError


def depth_of(drafter: Drafter) -> int:
    """Return how many drafts of a round can be accepted."""
    return int(getattr(drafter, "depth", drafter.num_drafts))


def checked_proposal(
    proposal: Proposal, drafter: Drafter, rows: int, vocab_size: int,
    temperature: float = 0.0, values: bool = False,
) -> Proposal:  # fmt: skip
    """Return a proposal that is as it must be; raise DraftcoreError for any other.

    To look at `values` as well waits for the device. Raises UsageError for drafts to sample from that
    come without their probabilities.
    """

    def wrong(what: str, remedy: str) -> DraftcoreError:
        return DraftcoreError(f"{drafter.propose.__qualname__} returned {what}\n  {remedy}")

    if not isinstance(proposal, Proposal):
        raise wrong(f"a {type(proposal).__name__}", "it returns Proposal(tokens_BK, ...)")
    if temperature > 0 and proposal.probs_BKV is None:
        raise UsageError(
            f"eval.temperature is {temperature}, and this draft proposes tokens without the "
            "probabilities that sampling needs\n  set eval.temperature=0"
        )
    tree = proposal.parents_BK is not None
    if tree != hasattr(drafter, "depth"):
        remedy = "a drafter of trees has a depth and parents_BK, one of chains has neither"
        raise wrong("parents_BK" if tree else "no parents_BK", remedy)
    K, last = drafter.num_drafts, vocab_size - 1
    for name, shape, low, high, form in (
        ("tokens_BK", (rows, K), 0, last, f"int64, ids from 0 to {last}"),
        ("probs_BKV", (rows, K, vocab_size), 0, 1.001, "float32, from 0 to 1"),
        ("parents_BK", (rows, K), -1, torch.arange(K) - 1, "int64, earlier nodes or -1"),
        ("counts_B", (rows,), 0, K, f"int64, from 0 to {K}"),
    ):
        field, remedy = getattr(proposal, name), f"{name} are {form}, of shape {shape}"
        if field is None and name != "tokens_BK":
            continue
        if not isinstance(field, Tensor):
            raise wrong(f"{name} as a {type(field).__name__}", remedy)
        if field.shape != shape or (field.dtype == torch.int64) == (name == "probs_BKV"):
            raise wrong(f"{name} of shape {tuple(field.shape)} in {field.dtype}", remedy)
        if values:
            field = field.cpu()
            for index in ((field < low) | (field > high)).nonzero().tolist()[:1]:
                raise wrong(f"{name}{index} = {field[tuple(index)].item()}", remedy)
    if values and proposal.parents_BK is not None:
        longest = int(lineage(proposal.parents_BK).sum(-1).max()) - 1
        if longest > depth_of(drafter):
            raise wrong(f"a path of {longest} nodes", f"its depth is {depth_of(drafter)}")
    return proposal


def verify(
    logits_BTV: Tensor, proposal: Proposal, temperature: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept the beginning of a chain, and add one token of the target's own.

    Returns tokens_BT, of which the first counts_B of a row are new; counts_B, in 1..K+1; and room_B,
    how many drafts could be accepted.
    """
    drafts_BK, room_B = proposal.tokens_BK, proposal.counts_B
    B, K = drafts_BK.shape
    rows = torch.arange(B, device=drafts_BK.device)
    room_B = torch.full_like(rows, K) if room_B is None else room_B
    if temperature == 0:
        choice_BT = logits_BTV.argmax(-1)
        right_BK = choice_BT[:, :K] == drafts_BK
        return choice_BT, right_BK.long().cumprod(1).sum(1).minimum(room_B) + 1, room_B
    assert proposal.probs_BKV is not None
    p_BTV = torch.softmax(logits_BTV.float() / temperature, -1)
    ids_BK1 = drafts_BK[..., None]
    p_BK = p_BTV[:, :K].gather(-1, ids_BK1)[..., 0]
    q_BK = proposal.probs_BKV.gather(-1, ids_BK1)[..., 0]
    coin_BK = torch.rand(B, K, generator=generator, device=p_BK.device)
    accepted_B = (coin_BK * q_BK < p_BK).long().cumprod(1).sum(1).minimum(room_B)
    # Past the last draft nothing was proposed, so the residual there is the target's own p.
    q_BTV = torch.cat([proposal.probs_BKV, torch.zeros_like(p_BTV[:, :1])], dim=1)
    q_BV = q_BTV[rows, accepted_B.where(accepted_B < room_B, K)]
    residual_BV = (p_BTV[rows, accepted_B] - q_BV).clamp(min=0)
    own_B = torch.multinomial(residual_BV, 1, generator=generator)[:, 0]
    tokens_BT = torch.cat([drafts_BK, drafts_BK[:, :1]], dim=1)
    tokens_BT[rows, accepted_B] = own_B
    return tokens_BT, accepted_B + 1, room_B


def lineage(parents_BK: Tensor) -> Tensor:
    """Return of each token that the target reads which others it follows, and itself, [B, T, T]."""
    K = parents_BK.shape[1]
    parents_BT = functional.pad(parents_BK + 1, (1, 0))  # the last known token is its own
    index_T = torch.arange(K + 1, device=parents_BK.device)
    seen_BTT = (index_T == parents_BT[..., None]) | (index_T == index_T[:, None])
    for _ in range(K.bit_length()):  # the parent's parent, then the fourth above, ...
        seen_BTT = seen_BTT.float() @ seen_BTT.float() > 0
    return seen_BTT


def verify_tree(
    logits_BTV: Tensor, proposal: Proposal, temperature: float, generator: torch.Generator,
    seen_BTT: Tensor, depth: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Accept a path of a tree from its root on, and add one token of the target's own.

    `seen_BTT` is the `lineage` of its parents. A node further down than `depth` is never accepted.
    Returns what `verify` does, in P = depth + 1 columns, and path_BP: which of the tokens that were
    read the new ones follow.
    """
    drafts_BK, parents_BK, probs_BKV = proposal.tokens_BK, proposal.parents_BK, proposal.probs_BKV
    assert parents_BK is not None
    B, K = drafts_BK.shape
    rows, depth_BT = torch.arange(B, device=drafts_BK.device), seen_BTT.sum(-1) - 1
    counted_BK = depth_BT[:, 1:] <= depth
    if proposal.counts_B is not None:
        counted_BK &= torch.arange(K, device=rows.device) < proposal.counts_B[:, None]
    if temperature == 0:
        choice_BT = logits_BTV.argmax(-1)
        right_BK = (drafts_BK == choice_BT.gather(1, parents_BK + 1)) & counted_BK
        whole_BT = (functional.pad(right_BK, (1, 0), value=True)[:, None] | ~seen_BTT).all(-1)
        end_B = (whole_BT * (depth_BT + 1)).argmax(-1)
        own_B = choice_BT[rows, end_B]
    else:
        assert probs_BKV is not None
        p_BTV = torch.softmax(logits_BTV.float() / temperature, -1)
        coin_BK = torch.rand(B, K, generator=generator, device=rows.device)
        # What is left of p where the path ends so far, and how much that is.
        end_B, left_BV, mass_B = torch.zeros_like(rows), p_BTV[:, 0], torch.ones_like(coin_BK[:, 0])
        for k in range(K):
            q_BV, id_B1 = mass_B[:, None] * probs_BKV[:, k], drafts_BK[:, k, None]
            fits_B = (coin_BK[:, k, None] * q_BV.gather(1, id_B1) < left_BV.gather(1, id_B1))[:, 0]
            asked_B = counted_BK[:, k] & (parents_BK[:, k] + 1 == end_B)
            taken_B, refused_B = asked_B & fits_B, asked_B & ~fits_B
            end_B = end_B.where(~taken_B, k + 1)
            left_BV = left_BV.where(~refused_B[:, None], (left_BV - q_BV).clamp(min=0))
            left_BV = left_BV.where(~taken_B[:, None], p_BTV[:, k + 1])
            mass_B = mass_B.where(~asked_B, left_BV.sum(-1)).where(~taken_B, 1)
        own_B = torch.multinomial(left_BV, 1, generator=generator)[:, 0]
    counts_B = depth_BT[rows, end_B] + 1
    # A node comes behind its parent, so the nodes of a path are in order.
    path_BP = (~seen_BTT[rows, end_B]).long().argsort(dim=1, stable=True)[:, : depth + 1]
    tokens_BP = functional.pad(drafts_BK.gather(1, path_BP[:, 1:] - 1), (0, 1))
    tokens_BP[rows, counts_B - 1] = own_B
    return tokens_BP, counts_B, (depth_BT[:, 1:] * counted_BK).amax(1), path_BP

"""Verification of sampled proposals: recursive rejection over siblings drawn without replacement.

At a node with target distribution p, the children x_0, x_1, ... were drawn from the draft's q without replacement. They are
tried in that order: x_k is accepted with probability min(1, r_k(x_k) / q_k(x_k)), where r_0 = p, q_k is q without the earlier
children, and a rejection leaves the residual r_{k+1} ~ max(r_k - q_k, 0), from which the final token is drawn when no child
is left. One child is the classic rule of Leviathan et al., "Fast inference from transformers via speculative decoding", 2023;
the recursion is that of Jeon et al., "Recursive speculative decoding", 2024. Either way the token is distributed as p.

No residual is ever stored. With Q_k the q-mass of the first k children, r_k = max(p - s_k q, 0) / m_k, where s_0 = 0, m_0 = 1,
s_{k+1} = s_k + m_k / (1 - Q_k) and m_{k+1} = sum(max(p - s_{k+1} q, 0)); tokens rejected before fall out by themselves. The
compiled library and the Triton kernel (`titan.kernels.triton.tree_rejection`, for `titan.verify.device_accept`) compute it for the nodes
that a walk reaches. None of it depends on the coins, so PyTorch computes all nodes of all trees side by side, and looks the walk up
afterwards.

Legend: T trees, L rows (of each tree the root, then its nodes), I inner nodes (those with children), K most children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.trees import DraftTree
from titan.kernels.torch.sampling import LazyProbs, WalkedTree, draw, verify_compiled
from titan.sample.distributions import Purpose, philox_uniform

Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RejectionResult:
    """Where the walk through each tree ended, and the token it emits there."""

    last_rows: Tensor  # int64 [T], the row of the last accepted node, or of the root
    final_tokens: Tensor  # int64 [T], recovered or bonus; -1 where p is NaN
    matches: Tensor  # float32 [T, 2], at the roots: p of q's most likely token, and sum(min(p, q))


def reject(trees: Sequence[DraftTree], target: LazyProbs, seeds: NDArray[np.uint64], positions: Int) -> RejectionResult:
    """Verify trees whose children were drawn from their ``draft_probs``.

    Args:
        trees: T of them, each with ``draft_probs``.
        target: p at the L rows.
        seeds: uint64 [L], of the row's request.
        positions: int64 [L], absolute position of the token that follows the row: of a tree's root, and as many more as it is deep.
    """
    roots = [0, *accumulate(1 + tree.num_nodes for tree in trees)][:-1]
    temperatures = None if target.temperatures is None else target.temperatures.tolist()
    walked = [
        walked_tree(tree, temperatures[root] if temperatures else 1.0, int(seeds[root]), int(positions[root]))
        for tree, root in zip(trees, roots, strict=True)
    ]
    ends = verify_compiled(target.values, walked, is_logits=temperatures is not None)
    if ends is None:
        return reject_by_torch(trees, target.probs(), seeds, positions)
    rows, tokens, matches = zip(*ends, strict=True)
    return RejectionResult(torch.tensor(rows), torch.tensor(tokens), torch.tensor(matches))


def walked_tree(tree: DraftTree, temperature: float, seed: int, position: int) -> WalkedTree:
    """A tree as the compiled library verifies it."""
    draft_probs = None if tree.draft_probs is None else tree.draft_probs.contiguous()
    return WalkedTree(tree.token_ids, tree.parents, draft_probs, tree.topology.inner_rows, temperature, seed, position)


def reject_by_torch(trees: Sequence[DraftTree], probs: Tensor, seeds: NDArray[np.uint64], positions: Int) -> RejectionResult:
    """`reject` by PyTorch, from probabilities: float32 [L, vocab]."""
    device = probs.device
    layout = _layout(trees)
    draft_probs = joined([tree.draft_probs for tree in trees if tree.draft_probs is not None])
    inner_rows, child_rows = torch.from_numpy(layout.inner_rows).to(device), torch.from_numpy(layout.child_rows).to(device)
    tokens = torch.from_numpy(layout.child_tokens).to(device)
    accept_probs, scales = sibling_acceptance(probs, inner_rows, draft_probs, tokens, layout.num_children)

    keys, ranks = (seeds[layout.inner_rows, None], positions[layout.inner_rows, None]), np.arange(tokens.shape[1])
    coins = philox_uniform(*keys, Purpose.ACCEPT, sibling=ranks)
    is_accepted = torch.from_numpy(coins).to(device) < accept_probs
    first = is_accepted.to(torch.int8).argmax(1, keepdim=True)  # the first child that is accepted, if one is
    accepted_rows = torch.where(is_accepted.any(1), child_rows.gather(1, first)[:, 0], inner_rows)

    # every row points to its accepted child or to itself; pointers to pointers reach the end of each path
    next_rows = torch.arange(len(probs), device=device).index_copy(0, inner_rows, accepted_rows)
    for _ in range(layout.max_depth.bit_length()):
        next_rows = next_rows[next_rows]
    root_rows = torch.from_numpy(layout.root_rows).to(device)
    last_rows = next_rows[root_rows]

    # past a leaf as without speculation
    uniform = philox_uniform(seeds, positions, np.where(layout.inner_of_row >= 0, Purpose.RESIDUAL, Purpose.SAMPLE))
    inner_of_row = torch.from_numpy(layout.inner_of_row).to(device)
    inner = inner_of_row[last_rows]
    final_probs = residual(probs[last_rows], draft_probs[inner.clamp(min=0)], torch.where(inner >= 0, scales[inner], 0.0))
    final_tokens = draw(final_probs, torch.from_numpy(uniform).to(device)[last_rows])
    final_tokens = torch.where(torch.isfinite(probs[last_rows, 0]), final_tokens, -1)
    return RejectionResult(last_rows, final_tokens, _matches(probs[root_rows], draft_probs[inner_of_row[root_rows]]))


def sibling_acceptance(
    probs: Tensor, inner_rows: Tensor, draft_probs: Tensor, tokens: Tensor, num_children: Int
) -> tuple[Tensor, Tensor]:
    """How likely each child is accepted once it is tried.

    Args:
        probs: float32 [L, vocab], p.
        inner_rows: int64 [I], rows of the inner nodes.
        draft_probs: float32 [I, vocab], q.
        tokens: int64 [I, K], the children in the order they were drawn; entries past a node's children are not read.
        num_children: int64 [I].

    Returns:
        float64 [I, K], the probability that child k is accepted when all before it were rejected, 0 where there is none; and
        float64 [I], the scale s of the residual ``max(p - s q, 0)`` after all children were rejected.
    """
    num_inner, max_children = tokens.shape
    scale = torch.zeros(num_inner, dtype=torch.float64, device=probs.device)
    drawn = torch.zeros_like(scale)  # Q, the q-mass of the children so far
    accept_probs = scale.new_zeros(num_inner, max_children)
    for rank in range(max_children):
        index = torch.from_numpy(np.flatnonzero(num_children > rank)).to(probs.device)
        rows, token, s = inner_rows[index], tokens[index, rank], scale[index]
        p, q = probs[rows, token].double(), draft_probs[index, token].double()
        left = torch.maximum(1 - drawn[index], q)  # q is part of it, whatever rounding says
        mass = residual(probs[rows], draft_probs[index], s).sum(-1, dtype=torch.float64) if rank else torch.ones_like(s)
        accept_probs[index, rank] = ((p - s * q).clamp(min=0) * left / (mass * q)).clamp(max=1)
        scale[index] = s + mass / left
        drawn[index] += q
    return accept_probs, scale


def _matches(probs: Tensor, draft_probs: Tensor) -> Tensor:
    """How often a greedy and a sampled token would be accepted: float32 [n, 2]."""
    greedy = probs.gather(1, draft_probs.max(-1, keepdim=True).indices)[:, 0]
    return torch.stack((greedy, torch.minimum(probs, draft_probs).sum(-1)), 1)


def residual(probs: Tensor, draft_probs: Tensor, scale: Tensor) -> Tensor:
    """``max(p - s q, 0)``, or p where rounding leaves nothing of it: float32 [n, vocab]; ``scale`` is [n]."""
    residual = (probs - scale[:, None].float() * draft_probs).clamp(min=0)
    return torch.where(residual.any(-1, keepdim=True), residual, probs)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts, [n_i, vocab] each, in a row; without a copy where they are slices of one table that follow each other."""
    first, offset = parts[0], parts[0].storage_offset()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        if part.untyped_storage().data_ptr() != storage or part.storage_offset() != offset or not part.is_contiguous():
            return torch.cat(list(parts))
        offset += part.numel()
    return first.as_strided((sum(map(len, parts)), first.shape[1]), (first.shape[1], 1))


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Rows and children of all trees in one table."""

    root_rows: Int  # [T]
    inner_rows: Int  # [I]
    inner_of_row: Int  # [L], -1 for a leaf
    num_children: Int  # [I]
    child_rows: Int  # [I, K]
    child_tokens: Int  # [I, K]
    max_depth: int


def _layout(trees: Sequence[DraftTree]) -> _Layout:
    num_rows = np.array([tree.num_nodes + 1 for tree in trees])
    root_rows = np.cumsum(num_rows) - num_rows
    inner_rows = np.concatenate([root + 1 + tree.inner for root, tree in zip(root_rows, trees, strict=True)])
    inner_of_row = np.full(num_rows.sum(), -1)
    inner_of_row[inner_rows] = np.arange(len(inner_rows))
    parents = inner_of_row[np.concatenate([root + 1 + tree.parents for root, tree in zip(root_rows, trees, strict=True)])]
    ranks = np.concatenate([tree.topology.child_ranks for tree in trees])
    shape = (len(inner_rows), int(ranks.max(initial=0)) + 1)
    child_rows, child_tokens = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    child_rows[parents, ranks] = np.delete(np.arange(num_rows.sum()), root_rows)
    child_tokens[parents, ranks] = np.concatenate([tree.token_ids for tree in trees])
    max_depth = max(tree.topology.max_depth for tree in trees)
    return _Layout(
        root_rows, inner_rows, inner_of_row, np.bincount(parents, minlength=len(inner_rows)), child_rows, child_tokens, max_depth
    )

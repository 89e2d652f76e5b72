"""Trees that stay on the device after they have grown: what each growth found there becomes trees in one launch, unread.

How many nodes a tree has follows from its budget and from how many candidates were looked at, which the host knows. Where a
candidate turns out not to exist, because the draft has no further possible token, its place stays empty.

Legend: n requests of a growth, c candidates of each, V vocabulary, k children looked at per node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.device_trees import DeviceTrees, TreeOutline
from titan.core.trees import topology
from titan.draft.shapes import ShapePlan
from titan.kernels.triton.tree_nodes import TreeNodes, allocate_nodes
from titan.kernels.upload import upload

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """What the tokens of a growth were drawn from."""

    probs: Tensor  # float32 [I, V], q of the inner nodes
    rows: Ints  # [n, 1 + slots], which of them belongs to the root, and to the node that is fed at each slot


@dataclass(frozen=True, slots=True, eq=False)
class DeviceCandidates:
    """Tokens that may become nodes, on the device: [n, c] each, parents before their children."""

    token_ids: Tensor  # int64
    scores: Tensor  # float32, not finite where there is none
    parent_slots: Tensor  # int64, where the parent is fed; -1 for the root
    slots: Tensor  # int64, where the candidate itself is fed; -1 where it is not
    outlines: list[TreeOutline]  # [n]
    drawn: Drawn | None = None


class HasCandidates(Protocol):
    """A growth."""

    def candidates(self) -> DeviceCandidates: ...


def device_trees(growths: Sequence[tuple[Sequence[int], HasCandidates]], num_rows: int, device: torch.device) -> DeviceTrees:
    """The trees of a step.

    Args:
        growths: grown, with the rows of the plan that they drafted for, ascending; the tokens of one of them at most were drawn.
        num_rows: of the plan.
        device: where the trees have grown.
    """
    from titan.kernels.triton.tree_select import select_trees  # not every platform has triton

    found = [(np.array(rows), growth.candidates()) for rows, growth in growths]
    outlines = [TreeOutline(0)] * num_rows
    for rows, candidates in found:
        for row, outline in zip(rows.tolist(), candidates.outlines, strict=True):
            outlines[row] = outline
    num_nodes = np.array([outline.num_nodes for outline in outlines])
    first_nodes = num_nodes.cumsum() - num_nodes
    nodes = allocate_nodes(int(num_nodes.sum()), device)
    for rows, each in found:
        first, counts = upload([first_nodes[rows].astype(np.int32), num_nodes[rows].astype(np.int32)], device)
        select_trees(each.token_ids, each.scores, each.parent_slots, each.slots, first, counts, nodes)
    for rows, each in found:
        if each.drawn is not None:
            draft_rows = _draft_rows(each.drawn.rows, first_nodes[rows], num_nodes[rows], nodes)
            return DeviceTrees(outlines, nodes, each.drawn.probs, draft_rows)
    return DeviceTrees(outlines, nodes)


def _draft_rows(rows: Ints, first_nodes: Ints, num_nodes: Ints, nodes: TreeNodes) -> Tensor:
    """Which q belongs to each root and node of n trees, by the slots of the nodes: int32 [nodes + n].

    Args:
        rows: as in `Drawn`.
        first_nodes: [n], among all nodes.
        num_nodes: [n].
        nodes: of all trees.
    """
    counts = num_nodes + 1
    owners = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(owners)) - (counts.cumsum() - counts)[owners]  # 0 for the root, then 1 + node
    sources = first_nodes[owners] + index - 1
    is_node = index > 0
    by_slot, first_columns, node_index, has_slot = upload(
        [rows.astype(np.int32), owners * rows.shape[1], np.where(is_node, sources, 0), is_node], nodes.draft_slots.device
    )
    slots = nodes.draft_slots.index_select(0, node_index)
    return by_slot.view(-1).index_select(0, first_columns + torch.where(has_slot, slots + 1, 0))


def chain_candidates(token_ids: Tensor, depths: Ints) -> DeviceCandidates:
    """Chains that are kept whole.

    Args:
        token_ids: int64 [n, longest chain].
        depths: [n].
    """
    num_levels = token_ids.shape[1]
    levels = np.arange(num_levels)
    parent_slots, slots, scores = upload(
        [
            np.tile(levels - 1, (len(depths), 1)),
            np.where(levels < depths[:, None] - 1, levels, -1),  # the last node of a chain is not fed
            np.zeros((len(depths), num_levels), np.float32),
        ],
        token_ids.device,
    )
    return DeviceCandidates(token_ids, scores, parent_slots, slots, [TreeOutline(n, is_chain=True) for n in depths.tolist()])


def shape_candidates(plans: Sequence[ShapePlan], starts: Sequence[int], children: Tensor, probs: Tensor | None) -> DeviceCandidates:
    """Shapes with their tokens; nodes that no token was left for, and what hangs at them, are not there.

    Args:
        plans: of the n shapes.
        starts: the first inner node of each shape among those of all, I.
        children: int64 [I, most children], the tokens behind the inner nodes by rank, -1 where none was left.
        probs: float32 [I, V], what they were drawn from; ``None``: the most likely tokens.
    """
    num_nodes = max(len(plan.parents) for plan in plans)
    shape = len(plans), num_nodes
    sources, parent_slots, slots = np.zeros(shape, np.int64), np.full(shape, -1), np.full(shape, -1)
    bits = np.full(shape, -1)  # behind the end of a shape: ancestors that are never there
    rows = np.zeros((len(plans), 1 + num_nodes), np.int64)
    outlines = []
    for i, (plan, start) in enumerate(zip(plans, starts, strict=True)):
        derived, nodes = topology(plan.parents.tobytes()), slice(len(plan.parents))
        sources[i, nodes] = (start + plan.node_parents) * children.shape[1] + plan.ranks
        parent_slots[i, nodes], slots[i, nodes], bits[i, nodes] = plan.parents, plan.slots, derived.ancestor_bits
        rows[i, : 1 + len(plan.parents)] = start + np.maximum(derived.inner_rows, 0)
        outlines.append(TreeOutline(len(plan.parents), is_chain=derived.is_chain, is_drawn=probs is not None))
    index, parents, fed, ancestors, powers = upload(
        [sources, parent_slots, slots, bits, np.int64(1) << np.arange(num_nodes)], children.device
    )
    token_ids = children.view(-1).index_select(0, index.view(-1)).view(shape)
    there = ((token_ids >= 0) * powers).sum(1, keepdim=True)
    scores = torch.where((ancestors & ~there) == 0, 0.0, float("-inf"))
    return DeviceCandidates(token_ids, scores, parents, fed, outlines, None if probs is None else Drawn(probs, rows))

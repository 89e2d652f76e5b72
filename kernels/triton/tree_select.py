"""Selection of each request's best draft tree: the candidates with the greatest scores, the path of first children first.

A candidate never scores above its parent and comes after it, so the best ones are ancestor-closed if ties go to the earlier
candidate: the rule of `titan.kernels.torch.trees`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from titan.core.trees import NodeColumns
from titan.kernels.interfaces import Candidates
from titan.kernels.triton.tree_walk import NODES

CANDIDATES = (64, 512, 4096)
"""Padded numbers of candidates: one program holds the scores of a request in its registers. Each number is a kernel of its own,
compiled at its first launch, and the number of candidates changes while trees are drafted: small trees take the first, larger
ones the second."""


@triton.jit(do_not_specialize=["num_candidates"])
def _select_kernel(
    node_token_ids_ptr,  # [N]
    node_parents_ptr,  # [N]
    node_depths_ptr,  # [N]
    node_ancestor_bits_ptr,  # [N]
    node_scores_ptr,  # [N]
    node_slots_ptr,  # [N]
    token_ids_ptr,  # [n, num_candidates]
    scores_ptr,  # [n, num_candidates]
    parent_slots_ptr,  # [n, num_candidates]
    slots_ptr,  # [n, num_candidates]
    num_candidates,
    first_nodes_ptr,  # [n]
    num_nodes_ptr,  # [n]
    CANDIDATES: tl.constexpr,  # num_candidates, padded
):
    """One program per request."""
    request = tl.program_id(0).to(tl.int64)
    num_nodes = tl.load(num_nodes_ptr + request)
    columns, nodes = tl.arange(0, CANDIDATES), tl.arange(0, NODES)
    left = tl.load(scores_ptr + request * num_candidates + columns, mask=columns < num_candidates, other=float("-inf"))
    left = tl.where(tl.abs(left) < float("inf"), left, float("-inf"))  # nor is NaN a score

    # choose the best, one after the other
    chosen, scores = tl.zeros((NODES,), tl.int32), tl.full((NODES,), float("-inf"), tl.float32)
    count = tl.zeros((), tl.int32)
    best = tl.max(left, axis=0)
    while (count < num_nodes) & (best > float("-inf")):
        column = tl.min(tl.where(left == best, columns, CANDIDATES), axis=0)
        chosen = tl.where(nodes == count, column, chosen)
        scores = tl.where(nodes == count, best, scores)
        left = tl.where(columns == column, float("-inf"), left)
        count += 1
        best = tl.max(left, axis=0)

    is_node = nodes < count
    entries = request * num_candidates + chosen
    token_ids = tl.load(token_ids_ptr + entries, mask=is_node, other=-1)
    parent_slots = tl.load(parent_slots_ptr + entries, mask=is_node, other=-1)
    slots = tl.load(slots_ptr + entries, mask=is_node, other=-1)
    is_parent = (parent_slots[:, None] == slots[None, :]) & (slots >= 0)[None, :]
    parents = tl.max(tl.where(is_parent, nodes[None, :], -1), axis=1)
    parents = tl.where(is_node, parents, -2)

    # the path of first children comes first, the other nodes keep their order
    on_path = tl.zeros((NODES,), tl.int32)
    child = tl.min(tl.where(parents == -1, nodes, NODES), axis=0)
    while child < NODES:
        on_path = tl.where(nodes == child, 1, on_path)
        child = tl.min(tl.where(parents == child, nodes, NODES), axis=0)
    places = tl.where(on_path == 1, tl.cumsum(on_path, axis=0), tl.sum(on_path, axis=0) + tl.cumsum(1 - on_path, axis=0)) - 1

    # pointer jumping: each node adds what its ancestors have gathered, over twice as many ancestors each time
    depths, bits = tl.full((NODES,), 1, tl.int64), tl.full((NODES,), 1, tl.int64) << places.to(tl.int64)
    ancestors = parents
    span = 1
    while span < NODES:
        has_more, above = ancestors >= 0, tl.maximum(ancestors, 0)
        depths += tl.where(has_more, tl.gather(depths, above, 0), 0)
        bits |= tl.where(has_more, tl.gather(bits, above, 0), 0)
        ancestors = tl.where(has_more, tl.gather(ancestors, above, 0), -1)
        span *= 2

    new_parents = tl.where(parents >= 0, tl.gather(places, tl.maximum(parents, 0), 0), parents)
    targets, is_written = tl.load(first_nodes_ptr + request) + places, nodes < num_nodes
    tl.store(node_token_ids_ptr + targets, token_ids, mask=is_written)
    tl.store(node_parents_ptr + targets, new_parents, mask=is_written)
    tl.store(node_depths_ptr + targets, depths, mask=is_written)
    tl.store(node_ancestor_bits_ptr + targets, bits, mask=is_written)
    tl.store(node_scores_ptr + targets, scores, mask=is_written)
    tl.store(node_slots_ptr + targets, slots.to(tl.int32), mask=is_written)


def select_trees(found: Candidates, first_nodes: Tensor, num_nodes: Tensor, nodes: NodeColumns[Tensor]) -> None:
    """Choose the trees of n requests; nothing is read back to the host.

    Args:
        found: the candidates, at most 4096 of each request.
        first_nodes: int32 [n], where the nodes of each tree begin.
        num_nodes: int32 [n], places of each tree, 0 to 63.
        nodes: of all trees, overwritten at these places; places left without a candidate become empty.

    Raises:
        ValueError: too many candidates.
    """
    num_requests, num_candidates = found.token_ids.shape
    if num_candidates > CANDIDATES[-1]:
        raise ValueError(f"a tree is to be selected from {num_candidates} candidates: at most {CANDIDATES[-1]} are allowed")
    _select_kernel[(num_requests,)](
        *nodes,
        found.token_ids,
        found.scores,
        found.parent_slots,
        found.slots,
        num_candidates,
        first_nodes,
        num_nodes,
        CANDIDATES=next(padded for padded in CANDIDATES if padded >= num_candidates),
        num_warps=4,
    )

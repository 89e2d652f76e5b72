"""Sample-and-match and greedy acceptance: each request descends its draft tree as long as a child carries the target's token.

At the root and at every node the target has chosen a token, sampled or the most likely one. If a child carries it, the child is
accepted; if none does, the token is the final token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.core.limits import MAX_NODES

NODES = tl.constexpr(MAX_NODES + 1)
"""Padded number of nodes: one program holds a tree in its registers."""


class VerifiedTrees(NamedTuple):
    """S draft trees of N nodes, and the paths kept; the target has L = N + S rows: for each tree its root, then its nodes."""

    token_ids: Tensor  # int64 [N], nodes of the trees one after the other, at most 63 each
    parents: Tensor  # int32 [N], index within the tree, -1 = the root; parents come before children, siblings as they were sampled
    start_loc: Tensor  # int32 [S + 1], first node of each tree, and N
    paths: Tensor  # int32 [S, max_nodes], accepted nodes from the root down, -1 after them
    final_tokens: Tensor  # int64 [S], recovered or bonus; -1 if it could not be sampled

    @classmethod
    def of(cls, token_ids: Tensor, parents: Tensor, start_loc: Tensor, *, max_nodes: int) -> VerifiedTrees:
        """Allocate the results of trees, none of which has more than ``max_nodes`` nodes."""
        num_trees = len(start_loc) - 1
        paths = token_ids.new_empty(num_trees, max_nodes, dtype=torch.int32)
        return cls(token_ids, parents, start_loc, paths, token_ids.new_empty(num_trees))


@triton.jit
def load_tree(request, token_ids_ptr, parents_ptr, start_loc_ptr):
    """Load a request's token ids, int64, and parents, int32, [NODES] each, and its root's row in a table of L = N + S rows.

    Past the last node the parent is -2, which is no node.
    """
    first, last = tl.load(start_loc_ptr + request), tl.load(start_loc_ptr + request + 1)
    nodes = tl.arange(0, NODES)
    is_node = first + nodes < last
    token_ids = tl.load(token_ids_ptr + first + nodes, mask=is_node, other=-1)
    parents = tl.load(parents_ptr + first + nodes, mask=is_node, other=-2)
    return token_ids, parents, first + request


@triton.jit
def store_path(request, path, final_token, paths_ptr, final_tokens_ptr, max_nodes):
    """Write one row of `VerifiedTrees`; ``path`` is [NODES]."""
    depths = tl.arange(0, NODES)
    tl.store(paths_ptr + request * max_nodes + depths, path, mask=depths < max_nodes)
    tl.store(final_tokens_ptr + request, final_token)


@triton.jit(do_not_specialize=["max_nodes"])
def _walk_kernel(
    token_ids_ptr,  # [N]
    parents_ptr,  # [N]
    start_loc_ptr,  # [S + 1]
    paths_ptr,  # [S, max_nodes]
    final_tokens_ptr,  # [S]
    max_nodes,
    wanted_ptr,  # [L]
):
    """One program per request."""
    request = tl.program_id(0)
    token_ids, parents, root_row = load_tree(request, token_ids_ptr, parents_ptr, start_loc_ptr)
    nodes = tl.arange(0, NODES)
    path = tl.full((NODES,), -1, tl.int32)
    depth = tl.zeros((), tl.int32)
    wanted = tl.load(wanted_ptr + root_row)
    child = tl.min(tl.where((parents == -1) & (token_ids == wanted), nodes, NODES), axis=0)
    while child < NODES:
        path = tl.where(nodes == depth, child, path)
        depth += 1
        wanted = tl.load(wanted_ptr + root_row + 1 + child)
        child = tl.min(tl.where((parents == child) & (token_ids == wanted), nodes, NODES), axis=0)
    store_path(request, path, wanted, paths_ptr, final_tokens_ptr, max_nodes)


def walk_matches(trees: VerifiedTrees, wanted: Tensor) -> None:
    """Accept the nodes that match the target's tokens, the first of equal siblings. Nothing is read back to the host.

    Args:
        trees: their paths and final tokens are written.
        wanted: int64 [L], the target's tokens. Those below 0 match nothing.
    """
    _walk_kernel[(len(trees.final_tokens),)](*trees, trees.paths.shape[1], wanted, num_warps=1)

"""Sample-and-match and greedy acceptance: each request descends its draft tree as long as a child carries the token it wants.

At the root and at every node the target has chosen a token, sampled or the most likely one. Where a child carries it, the child is
accepted; where none does, the token is the final token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.core.limits import MAX_NODES
from titan.kernels.triton.tools import require, require_launchable

NODES = MAX_NODES + 1
"""One program holds a tree in its registers."""


class TreePaths(NamedTuple):
    """What each of S requests keeps of its draft tree, and the token that follows."""

    paths: Tensor  # int32 [S, max_depth], accepted nodes from the root down, -1 after them
    num_accepted: Tensor  # int32 [S]
    final_tokens: Tensor  # int64 [S], recovered or bonus; -1 where it could not be sampled


@triton.jit
def load_tree(request, draft_token_ids_ptr, parents_ptr, node_start_loc_ptr, NODES: tl.constexpr):
    """Token ids int64 and parents int32 of a request's nodes, [NODES] each, and the row of its root in a table of L = N + S rows.

    Behind the last node the parent is -2, which is no node.
    """
    first, last = tl.load(node_start_loc_ptr + request), tl.load(node_start_loc_ptr + request + 1)
    nodes = tl.arange(0, NODES)
    is_node = first + nodes < last
    token_ids = tl.load(draft_token_ids_ptr + first + nodes, mask=is_node, other=-1)
    parents = tl.load(parents_ptr + first + nodes, mask=is_node, other=-2)
    return token_ids, parents, first + request


@triton.jit
def store_path(
    request, path, num_accepted, final_token, paths_ptr, num_accepted_ptr, final_tokens_ptr, max_depth, NODES: tl.constexpr
):
    """Write one row of `TreePaths`; ``path`` is [NODES]."""
    depths = tl.arange(0, NODES)
    tl.store(paths_ptr + request * max_depth + depths, path, mask=depths < max_depth)
    tl.store(num_accepted_ptr + request, num_accepted)
    tl.store(final_tokens_ptr + request, final_token)


@triton.jit(do_not_specialize=["max_depth"])
def _walk_kernel(
    paths_ptr,  # [S, max_depth]
    num_accepted_ptr,  # [S]
    final_tokens_ptr,  # [S]
    max_depth,
    draft_token_ids_ptr,  # [N]
    parents_ptr,  # [N]
    node_start_loc_ptr,  # [S + 1]
    wanted_ptr,  # [L]
    NODES: tl.constexpr,
):
    """One program per request."""
    request = tl.program_id(0)
    token_ids, parents, root_row = load_tree(request, draft_token_ids_ptr, parents_ptr, node_start_loc_ptr, NODES)
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
    store_path(request, path, depth, wanted, paths_ptr, num_accepted_ptr, final_tokens_ptr, max_depth, NODES)


def walk_matches(draft_token_ids: Tensor, parents: Tensor, node_start_loc: Tensor, wanted: Tensor, *, max_depth: int) -> TreePaths:
    """Accept the nodes that the target wants; of equal siblings the first. Nothing is read back to the host.

    Args:
        draft_token_ids: int64 [N], nodes of the S requests one after the other, at most 63 per request.
        parents: int32 [N], index within the request's own tree, -1 = the root; a parent comes before its children.
        node_start_loc: int32 [S + 1], first node of each request, and N.
        wanted: int64 [N + S], the target's tokens: per request the root's, then its nodes'. Those below 0 match nothing.
        max_depth: width of ``paths``, at least the depth of the deepest tree.

    Raises:
        ValueError: a tensor of the wrong shape, dtype, strides or device, or a max_depth out of range.
    """
    result = allocate_paths(draft_token_ids, parents, node_start_loc, max_depth=max_depth)
    num_requests, num_nodes = len(result.final_tokens), len(draft_token_ids)
    require("wanted", wanted, shape=(num_nodes + num_requests,), dtypes=(torch.int64,), device=draft_token_ids.device)
    if num_requests:
        _walk_kernel[(num_requests,)](
            *result, max_depth, draft_token_ids, parents, node_start_loc, wanted, NODES=NODES, num_warps=1
        )
    return result


def allocate_paths(draft_token_ids: Tensor, parents: Tensor, node_start_loc: Tensor, *, max_depth: int) -> TreePaths:
    """Room for the paths of these trees, which are checked first; arguments and errors are those of `walk_matches`."""
    device = draft_token_ids.device
    require_launchable("draft_token_ids", device)
    require("draft_token_ids", draft_token_ids, shape=(None,), dtypes=(torch.int64,), device=device)
    require("parents", parents, shape=(len(draft_token_ids),), dtypes=(torch.int32,), device=device)
    require("node_start_loc", node_start_loc, shape=(None,), dtypes=(torch.int32,), device=device)
    num_requests = len(node_start_loc) - 1
    if num_requests < 0:
        raise ValueError("node_start_loc is empty: it must have one entry per request and one more")
    if not 1 <= max_depth < NODES:
        raise ValueError(f"max_depth={max_depth} is not allowed: it must be 1 to {NODES - 1}")
    paths = torch.empty(num_requests, max_depth, dtype=torch.int32, device=device)
    num_accepted = torch.empty(num_requests, dtype=torch.int32, device=device)
    return TreePaths(paths, num_accepted, torch.empty(num_requests, dtype=torch.int64, device=device))

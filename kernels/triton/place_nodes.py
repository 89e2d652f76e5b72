"""Draft nodes that were grown on the device, brought to the places that a batch has for them.

The slow twin is `titan.bench.gpu.acceptance_reference.reference_place_nodes`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.kernels.triton.tools import require, require_launchable
from titan.kernels.triton.tree_walk import NODES


@triton.jit
def _place_kernel(
    token_ids_ptr,  # [T]
    positions_ptr,  # [T]
    ancestor_bits_ptr,  # [T]
    query_start_loc_ptr,  # [R + 1]
    tree_starts_ptr,  # [R]
    node_start_loc_ptr,  # [R + 1]
    node_token_ids_ptr,  # [N]
    node_ancestor_bits_ptr,  # [N]
    node_depths_ptr,  # [N], or None
    NODES: tl.constexpr,
):
    """One program per request."""
    request = tl.program_id(0)
    first, last = tl.load(node_start_loc_ptr + request), tl.load(node_start_loc_ptr + request + 1)
    nodes = first + tl.arange(0, NODES)
    is_node = nodes < last
    tokens = tl.load(query_start_loc_ptr + request + 1) - last + nodes
    token_ids = tl.load(node_token_ids_ptr + nodes, mask=is_node, other=0)
    tl.store(token_ids_ptr + tokens, tl.maximum(token_ids, 0), mask=is_node)
    tree_start = tl.load(tree_starts_ptr + request).to(tl.int64)
    if tree_start > 0:
        bits = tl.load(node_ancestor_bits_ptr + nodes, mask=is_node, other=0)
        tl.store(ancestor_bits_ptr + tokens, bits, mask=is_node)
        if node_depths_ptr is not None:
            depths = tl.load(node_depths_ptr + nodes, mask=is_node, other=0)
            tl.store(positions_ptr + tokens, tree_start - 1 + depths, mask=is_node)


def place_nodes(
    token_ids: Tensor,
    positions: Tensor,
    ancestor_bits: Tensor,
    query_start_loc: Tensor,
    tree_starts: Tensor,
    node_start_loc: Tensor,
    node_token_ids: Tensor,
    node_ancestor_bits: Tensor,
    node_depths: Tensor | None,
) -> None:
    """Write the tokens of N nodes, and of branching trees their ancestor bits and positions, over the last queries of R requests.

    Args:
        token_ids: int64 [T], overwritten; an empty place, whose token is below 0, becomes token 0.
        positions: int64 [T], overwritten with the root's position and the depth.
        ancestor_bits: int64 [T], overwritten.
        query_start_loc: int32 [R + 1], first query of each request, and the end.
        tree_starts: int32 [R], the slot of node 0, which is the position behind the root; 0 where there is no tree, or a chain:
            positions and ancestor bits then stay as they are.
        node_start_loc: int32 [R + 1], first node of each request, and N; at most 64 per request.
        node_token_ids: int64 [N].
        node_ancestor_bits: int64 [N].
        node_depths: int64 [N]; ``None``: the positions are right already.

    Raises:
        ValueError: a tensor of the wrong shape, dtype, strides or device.
    """
    device = token_ids.device
    require_launchable("token_ids", device)
    require("token_ids", token_ids, shape=(None,), dtypes=(torch.int64,), device=device, is_written=True)
    for name, values in {"positions": positions, "ancestor_bits": ancestor_bits}.items():
        require(name, values, shape=(len(token_ids),), dtypes=(torch.int64,), device=device, is_written=True)
    require("tree_starts", tree_starts, shape=(None,), dtypes=(torch.int32,), device=device)
    num_requests = len(tree_starts)
    for name, values in {"query_start_loc": query_start_loc, "node_start_loc": node_start_loc}.items():
        require(name, values, shape=(num_requests + 1,), dtypes=(torch.int32,), device=device)
    require("node_token_ids", node_token_ids, shape=(None,), dtypes=(torch.int64,), device=device)
    require("node_ancestor_bits", node_ancestor_bits, shape=(len(node_token_ids),), dtypes=(torch.int64,), device=device)
    if node_depths is not None:
        require("node_depths", node_depths, shape=(len(node_token_ids),), dtypes=(torch.int64,), device=device)
    if num_requests:
        _place_kernel[(num_requests,)](
            token_ids,
            positions,
            ancestor_bits,
            query_start_loc,
            tree_starts,
            node_start_loc,
            node_token_ids,
            node_ancestor_bits,
            node_depths,
            NODES=NODES,
            num_warps=1,
        )

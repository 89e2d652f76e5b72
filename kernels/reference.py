"""Slow twins: one obvious loop per request, the oracle of the kernel tests."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_tree_attention(
    q: Tensor,
    kv_layer: Tensor,
    *,
    query_start_loc: list[int],
    block_table: list[list[int]],
    visible_slots: list[list[int]],
    scale: float,
) -> Tensor:
    """Attention of each query token over an explicit list of visible slots, in float64.

    Args:
        q: [T, num_heads, head_dim].
        kv_layer: [2, num_kv_heads, num_blocks, block_size, head_dim].
        query_start_loc: [R + 1].
        block_table: per request, physical block ids.
        visible_slots: per query token, slots within its request.
        scale: multiplies the scores.

    Returns:
        float64 [T, num_heads * head_dim].
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_layer.shape[1], kv_layer.shape[3]
    output = torch.zeros(num_tokens, num_heads, head_dim, dtype=torch.float64)
    for request, blocks in enumerate(block_table):
        for token in range(query_start_loc[request], query_start_loc[request + 1]):
            places = [(blocks[slot // block_size], slot % block_size) for slot in visible_slots[token]]
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                keys = torch.stack([kv_layer[0, kv_head, block, offset] for block, offset in places]).double()
                values = torch.stack([kv_layer[1, kv_head, block, offset] for block, offset in places]).double()
                weights = torch.softmax(keys @ q[token, head].double() * scale, dim=0)
                output[token, head] = weights @ values
    return output.view(num_tokens, num_heads * head_dim)

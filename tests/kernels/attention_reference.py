"""The oracle of tree attention over paged KV."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_masked_attention(
    q: Tensor,
    kv_layer: Tensor,
    *,
    query_start_loc: list[int],
    block_table: list[list[int]],
    visible: list[Tensor],
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Attention over a mask, in float64: one dense product per request.

    Args:
        q: [T, num_heads, head_dim].
        kv_layer: [2, num_kv_heads, num_blocks, block_size, head_dim].
        query_start_loc: [R + 1]; rows from the last on give 0.
        block_table: per request, physical block ids.
        visible: per request, bool [query_len, slots]. What no row of the request sees may be NaN.
        scale: multiplies the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)``.

    Returns:
        float64 [T, num_heads * head_dim].
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_layer.shape[1], kv_layer.shape[3]
    output = torch.zeros(num_tokens, num_heads, head_dim, dtype=torch.float64, device=q.device)
    for request, seen in enumerate(visible):
        rows, mask = slice(query_start_loc[request], query_start_loc[request + 1]), seen.to(q.device)
        slots = mask.any(0).nonzero()[:, 0]
        blocks = torch.tensor(block_table[request], device=q.device)[slots // block_size]
        kv = kv_layer[:, :, blocks, slots % block_size].double()
        keys, values = kv.repeat_interleave(num_heads // num_kv_heads, dim=1)  # [num_heads, slots, head_dim]
        scores = torch.einsum("thd,hnd->htn", q[rows].double(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~mask[:, slots], float("-inf")).softmax(-1)
        output[rows] = torch.einsum("htn,hnd->thd", weights, values)
    return output.view(num_tokens, num_heads * head_dim)

"""The oracle of tree attention over paged KV."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reference_attention(
    q: Tensor, kv_layer: Tensor, seen: Sequence[tuple[Sequence[int], Tensor]], scale: float, softcap: float | None = None
) -> Tensor:
    """Attention over a mask: one dense product per request.

    Args:
        q: [T, num_heads, head_dim], of the requests one after the other; those behind them give 0.
        kv_layer: [2, num_kv_heads, num_blocks, block_size, head_dim].
        seen: of each request, physical block ids, and the slots that it sees, bool [query_len, slots]; others may be NaN.
        scale: multiplies the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)``.

    Returns:
        float64 [T, num_heads * head_dim].
    """
    outputs = []
    for block_ids, visible in seen:
        mask, block_size, start = visible.to(q.device), kv_layer.shape[3], sum(map(len, outputs))
        slots = mask.any(0).nonzero()[:, 0]
        blocks = torch.tensor(block_ids, device=q.device)[slots // block_size]
        kv = kv_layer[:, :, blocks, slots % block_size].double()
        keys, values = kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)  # [num_heads, slots, head_dim]
        scores = torch.einsum("thd,hnd->htn", q[start : start + len(mask)].double(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~mask[:, slots], float("-inf")).softmax(-1)
        outputs.append(torch.einsum("htn,hnd->thd", weights, values))
    padding = torch.zeros(len(q) - sum(map(len, outputs)), *q.shape[1:], dtype=torch.float64, device=q.device)
    return torch.cat([*outputs, padding]).flatten(1)

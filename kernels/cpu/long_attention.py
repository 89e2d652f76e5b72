"""Attention of prefill chunks on a CPU: one request at a time through `scaled_dot_product_attention`.

PyTorch's kernel is the fastest for many query rows, and in bfloat16 several times slower than other ways for a few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from titan.core.attention_layout import AttentionLayout, Int, Window, nearest_ancestors

MAX_SHORT_QUERY = 64
"""Queries of more tokens are long."""

NO_NODE = 63
"""Trees have nodes 0 to 62, so this bit is never set."""


@dataclass(frozen=True, slots=True, eq=False)
class LongQuery:
    """One request whose query is long."""

    rows: slice  # of T
    block_ids: Tensor  # int64 [blocks]
    seq_len: int
    visible: Mapping[Window, Tensor | None]  # bool [query, seq_len]; None: plain causal


def plan_long_queries(layout: AttentionLayout, windows: Sequence[Window]) -> list[LongQuery]:
    """Plan the requests of a batch whose queries are long.

    Args:
        layout: the batch.
        windows: distinct sliding windows of the layers.
    """
    planned = []
    for i in np.flatnonzero(np.diff(layout.query_start_loc) > MAX_SHORT_QUERY).tolist():
        first, last, seq_len = (int(n) for n in (layout.query_start_loc[i], layout.query_start_loc[i + 1], layout.seq_lens[i]))
        is_causal = last - first == seq_len and not layout.ancestor_bits[first:last].any()
        visible: dict[Window, Tensor | None] = {}
        for window in windows:
            if is_causal and (window is None or window >= seq_len):
                visible[window] = None
            else:
                visible[window] = visible_slots(layout, np.arange(first, last)[None], np.array([i]), seq_len, window)[0]
        blocks = layout.block_table[i, : -(-seq_len // layout.block_size)]
        planned.append(LongQuery(slice(first, last), torch.from_numpy(blocks).to(layout.ancestor_bits.device), seq_len, visible))
    return planned


def visible_slots(layout: AttentionLayout, rows: Int, requests: Int, num_slots: int, window: Window) -> Tensor:
    """Which slots some query rows see.

    Args:
        layout: the batch.
        rows: [S, M], rows of T.
        requests: [S], to which they belong.
        num_slots: slots to look at.
        window: of the layer.

    Returns:
        bool [S, M, num_slots].
    """
    device = layout.ancestor_bits.device
    slots = np.arange(num_slots)
    is_context = slots < layout.visible_lens[rows][..., None]
    if window is not None:
        is_context &= slots > layout.positions[rows][..., None] - window
    visible = torch.from_numpy(is_context).to(device)
    if not layout.ancestor_bits.any():
        return visible
    bits = nearest_ancestors(layout.ancestor_bits, window)[torch.from_numpy(rows).to(device)]
    node = slots - layout.tree_starts[requests, None]
    node = np.where((node >= 0) & (node < NO_NODE), node, NO_NODE)
    return visible | ((bits[..., None] >> torch.from_numpy(node[:, None]).to(device)) & 1 == 1)


def long_attention(q: Tensor, kv_layer: Tensor, query: LongQuery, *, scale: float, window: Window) -> Tensor:
    """Attend from the query tokens of one request.

    Args:
        q: [query, num_heads, head_dim].
        kv_layer: [2, num_kv_heads, num_blocks, block_size, head_dim].
        query: from `plan_long_queries`.
        scale: multiplies the scores.
        window: this layer's sliding window, one of those planned for.

    Returns:
        [query, num_heads * head_dim], dtype of ``q``.
    """
    num_kv_heads, head_dim = kv_layer.shape[1], kv_layer.shape[4]
    kv = kv_layer.index_select(2, query.block_ids).view(2, 1, num_kv_heads, -1, head_dim)[:, :, :, : query.seq_len]
    visible = query.visible[window]
    output = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        kv[0],
        kv[1],
        attn_mask=visible,
        is_causal=visible is None,
        scale=scale,
        enable_gqa=num_kv_heads != q.shape[1],
    )
    return output[0].transpose(0, 1).reshape(q.shape[0], -1)

"""Ragged tree attention over paged KV, request by request, with gathered blocks and an explicit mask.

Requirement: the blocks in a request's table hold finite values in every slot (`CacheOps.clear_blocks` on allocation); free blocks
may hold anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from titan.core.arrays import Flags, Ints
from titan.core.batch import AttentionLayout, Window
from titan.core.limits import MAX_NODES
from titan.kernels.torch.quantised_kv import dequantise


@dataclass(frozen=True, slots=True, eq=False)
class RequestQuery:
    """What the query tokens of one request see, the same for all layers."""

    rows: slice  # of T
    block_ids: Tensor  # int64 [blocks]
    seq_len: int
    visible: Mapping[Window, Tensor | None]  # bool [query, seq_len]; None: plain causal; the queries are the whole sequence


def plan_requests(layout: AttentionLayout, requests: Ints, windows: Sequence[Window], device: torch.device) -> list[RequestQuery]:
    """Plan the attention of some requests of a batch.

    Args:
        layout: the batch.
        requests: their indices.
        windows: distinct sliding windows of the layers.
        device: of the model.
    """
    planned = []
    for i in requests.tolist():
        first, last, seq_len = (int(n) for n in (layout.query_start_loc[i], layout.query_start_loc[i + 1], layout.seq_lens[i]))
        is_causal = last - first == seq_len and not layout.ancestor_bits[first:last].any()
        visible = {
            window: None
            if is_causal and (window is None or window >= seq_len)
            else torch.from_numpy(visible_slots(layout, i, window)).to(device)
            for window in windows
        }
        block_ids = torch.from_numpy(layout.block_table[i, : -(-seq_len // layout.block_size)]).to(device)
        planned.append(RequestQuery(slice(first, last), block_ids, seq_len, visible))
    return planned


def visible_slots(layout: AttentionLayout, request: int, window: Window) -> Flags:
    """Return which slots the query tokens of a request see in a layer with this window: bool [query, seq_len]."""
    rows = slice(int(layout.query_start_loc[request]), int(layout.query_start_loc[request + 1]))
    slots = np.arange(layout.seq_lens[request])
    visible: Flags = slots < layout.visible_lens[rows, None]
    if window is not None:
        visible &= slots > layout.positions[rows, None] - window
    if not layout.ancestor_bits[rows].any():
        return visible
    nodes = slots - layout.tree_starts[request]
    bits = np.array([nearest_ancestors(bits, window) for bits in layout.ancestor_bits[rows].tolist()], np.int64)
    is_ancestor = (bits[:, None] >> np.clip(nodes, 0, MAX_NODES - 1)) & 1 == 1
    visible |= is_ancestor & (nodes >= 0) & (nodes < MAX_NODES)
    return visible


def nearest_ancestors(ancestor_bits: int, window: Window) -> int:
    """Keep the highest ``window`` bits set, which are the nearest ancestors, since parents come before children."""
    while window is not None and ancestor_bits.bit_count() > window:
        ancestor_bits &= ancestor_bits - 1
    return ancestor_bits


def attend(q: Tensor, kv_layer: Tensor, query: RequestQuery, *, scale: float, window: Window) -> Tensor:
    """Attend from the query tokens of one request.

    Args:
        q: [query, num_heads, head_dim].
        kv_layer: [2, num_kv_heads, num_blocks, block_size, head_dim], or quantised.
        query: from `plan_requests`.
        scale: multiplies the scores.
        window: this layer's sliding window, one of those planned for.

    Returns:
        [query, num_heads * head_dim], dtype of ``q``.
    """
    num_kv_heads, head_dim = kv_layer.shape[1], q.shape[2]
    blocks = kv_layer.index_select(2, query.block_ids)
    if blocks.dtype == torch.int8:
        blocks = dequantise(blocks, head_dim, q.dtype)
    kv = blocks.view(2, 1, num_kv_heads, -1, head_dim)[:, :, :, : query.seq_len]
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

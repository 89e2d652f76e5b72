"""Ragged tree attention over paged KV, request by request, with gathered blocks and an explicit mask.

Requirement: the blocks in a request's table hold finite values in every slot (`CacheOps.clear_blocks` on allocation); free blocks
may hold anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.core.attention import AttentionSpec, Chunk, Window, visible_slots
from titan.core.batch import AttentionLayout
from titan.kernels.torch.quantised_kv import dequantise


@dataclass(frozen=True, slots=True, eq=False)
class RequestQuery:
    """What the query tokens of one request see, the same for all layers."""

    rows: slice  # of T
    block_ids: Tensor  # int64 [blocks]
    seq_len: int
    visible: Mapping[Window, Tensor | None]  # bool [query, seq_len]; None: plain causal; the queries are the whole sequence


def plan_requests(layout: AttentionLayout, windows: Sequence[Window], device: torch.device) -> list[RequestQuery]:
    """Plan the attention of the requests of a batch.

    Args:
        layout: the batch.
        windows: distinct windows of the layers.
        device: of the model.
    """
    planned = []
    for i in range(len(layout.seq_lens)):
        first, last, seq_len = (int(n) for n in (layout.query_start_loc[i], layout.query_start_loc[i + 1], layout.seq_lens[i]))
        is_causal = last - first == seq_len and not layout.ancestor_bits[first:last].any()
        visible = {
            window: None
            if is_causal and (window is None or (window.size if isinstance(window, Chunk) else window) >= seq_len)
            else torch.from_numpy(visible_slots(layout, i, window)).to(device)
            for window in windows
        }
        block_ids = torch.from_numpy(layout.block_table[i, : -(-seq_len // layout.block_size)]).to(device)
        planned.append(RequestQuery(slice(first, last), block_ids, seq_len, visible))
    return planned


def attend(q: Tensor, kv_layer: Tensor, query: RequestQuery, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """Attend from the query tokens of one request.

    Args:
        q: [query, num_heads, head_dim].
        kv_layer: [2, num_kv_heads, num_blocks, block_size, head_dim], or quantised; [1, ...] without a plane of values.
        query: from `plan_requests`.
        spec: of the layer, with one of the windows planned for.
        sinks: float32 [num_heads].

    Returns:
        [query, num_heads * value_dim], dtype of ``q``.
    """
    num_kv_heads, head_dim = kv_layer.shape[1], q.shape[2]
    blocks = kv_layer.index_select(2, query.block_ids)
    if blocks.dtype == torch.int8:
        blocks = dequantise(blocks, head_dim, q.dtype)
    kv = blocks.view(-1, 1, num_kv_heads, blocks.shape[2] * blocks.shape[3], head_dim)[:, :, :, : query.seq_len]
    keys, values, visible = kv[0], kv[-1][..., : spec.value_dim], query.visible[spec.window]
    if spec.softcap is None and sinks is None:
        output = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=visible,
            is_causal=visible is None,
            scale=spec.scale,
            enable_gqa=num_kv_heads != q.shape[1],
        )[0]
    else:
        output = _attend_by_scores(q.transpose(0, 1), keys[0], values[0], visible, spec, sinks)
    return output.transpose(0, 1).reshape(q.shape[0], -1)


def _attend_by_scores(
    q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Attend with a cap on scores, or with sinks, in float32: q [H, query, D], keys [K, seq_len, D] -> [H, query, V]."""
    group = len(q) // len(keys)
    scores = q.float() @ keys.float().repeat_interleave(group, 0).transpose(1, 2) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if visible is None:
        visible = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:2], 1)), -1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    return (weights @ values.float().repeat_interleave(group, 0)).to(q.dtype)

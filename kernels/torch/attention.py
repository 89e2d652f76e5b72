"""Ragged tree attention over paged KV, request by request, with gathered blocks and an explicit mask.

Every slot of the blocks in a request's table must hold finite values (`CacheOps.clear_blocks` zeroes new blocks); free blocks may
hold anything.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.core.attention import AttentionSpec, Window, visible_slots, window_length
from titan.core.batch import AttentionLayout
from titan.kernels.torch.quantised_kv import dequantise


class RequestQuery:
    """The slots that the query tokens of one request see, for all layers of a pass."""

    def __init__(self, layout: AttentionLayout, index: int, device: torch.device) -> None:
        first, last = layout.query_start_loc[index : index + 2].tolist()
        self.rows = slice(first, last)  # rows of the T query tokens
        self.seq_len = int(layout.seq_lens[index])
        blocks = layout.block_table[index, : -(-self.seq_len // layout.block_size)]
        self.block_ids = torch.from_numpy(blocks).to(device)  # int64 [blocks]
        self._layout = layout
        self._index = index
        self._device = device
        self._is_causal = last - first == self.seq_len and not layout.ancestor_bits[first:last].any()
        self._visible: dict[Window, Tensor | None] = {}

    def visible(self, window: Window) -> Tensor | None:
        """Return the slots that each query token sees, bool [query, seq_len]; ``None``: causal attention over a whole sequence."""
        if window not in self._visible:
            is_plain = self._is_causal and (window is None or window_length(window) >= self.seq_len)
            visible = None if is_plain else torch.from_numpy(visible_slots(self._layout, self._index, window)).to(self._device)
            self._visible[window] = visible
        return self._visible[window]


def attend(q: Tensor, kv_layer: Tensor, query: RequestQuery, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """Attend from the query tokens of one request.

    Args:
        q: [query, num_heads, head_dim].
        kv_layer: as in `titan.kernels.interfaces.LayerOps.tree_attention`.
        query: of the request.
        spec: of the layer.
        sinks: float32 [num_heads].

    Returns:
        [query, num_heads * value_dim], dtype of ``q``.
    """
    num_kv_heads, head_dim = kv_layer.shape[1], q.shape[2]
    blocks = kv_layer.index_select(2, query.block_ids)
    if blocks.dtype == torch.int8:
        blocks = dequantise(blocks, head_dim, q.dtype)
    kv = blocks.view(-1, 1, num_kv_heads, blocks.shape[2] * blocks.shape[3], head_dim)[:, :, :, : query.seq_len]
    keys, values, visible = kv[0], kv[-1][..., : spec.value_dim], query.visible(spec.window)
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

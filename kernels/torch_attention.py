"""Ragged tree attention over paged KV blocks in plain PyTorch: what runs where Triton does not.

Short queries (decodes, verifications) of all requests go through two batched products over *blocks*: each used block
meets the queries of the request that owns it, the scores are laid out per request for the softmax, and the weighted
values of a request's blocks are summed. Where the used blocks lie densely in the pool it is read in place, so that
nothing is gathered: on a CPU a gather of pages costs as much as the attention itself. Long queries (prefill chunks)
go one request at a time through `scaled_dot_product_attention`.

Visibility of key slot ``n`` to a query row: ``n < visible_len``, or bit ``n - tree_start`` of its ancestor bits.

Requirement: blocks in a request's table hold finite values in every slot (`kv_ops.clear_blocks` on allocation);
blocks that belong to nobody may hold anything.

Legend: T query tokens, R requests, E used blocks, S requests with short queries, M longest short query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

MAX_SHORT_QUERY = 32
"""Queries up to this length share the batched products; longer ones would waste padding."""

MAX_UNUSED_SHARE = 0.25
"""The pool is read in place while at most this share of the range of used blocks belongs to nobody in the batch."""

Window = int | None


@dataclass(frozen=True, slots=True, eq=False)
class ShortQueries:
    """How the short queries meet their blocks."""

    num_requests: int  # S
    query_len: int  # M
    query_rows: Tensor | None  # int64 [S * M], rows of T padded to M per request; None: rows 0 .. S*M-1 as they are
    output_rows: Tensor | None  # int64 [rows kept], into S * M; None: all
    token_rows: Tensor | None  # int64 [rows kept], into T; None: all of T
    num_entries: int  # E, the unused blocks of a range included
    first_block: int  # of the range read in place, when block_ids is None
    block_ids: Tensor | None  # int64 [E]
    owners: Tensor  # int64 [E], request of each entry
    score_index: Tensor  # int64 [S * blocks], entry of each (request, block); padding repeats an entry
    value_index: Tensor  # int64 [S * blocks], the same; padding points to the zero row E
    prob_index: Tensor  # int64 [E], into S * blocks
    hidden: Mapping[Window, Tensor]  # bool [S, 1, M, blocks * block_size]


@dataclass(frozen=True, slots=True, eq=False)
class LongQuery:
    """One request whose query is a prefill chunk."""

    rows: slice  # of T
    block_ids: Tensor  # int64 [blocks]
    seq_len: int
    visible: Mapping[Window, Tensor | None]  # bool [query, seq_len]; None: plain causal


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """Made once per step, used by every layer."""

    num_tokens: int
    short: ShortQueries | None
    long: tuple[LongQuery, ...]


def plan_attention(
    *,
    query_start_loc: NDArray[np.int64],
    seq_lens: NDArray[np.int64],
    block_table: NDArray[np.int64],
    positions: NDArray[np.int64],
    visible_lens: NDArray[np.int64],
    ancestor_bits: NDArray[np.int64],
    tree_starts: NDArray[np.int64],
    block_size: int,
    windows: Sequence[Window],
    device: torch.device,
) -> AttentionPlan:
    """Plan the attention of one ragged batch on the host.

    Args:
        query_start_loc: [R + 1] prefix sums of query lengths.
        seq_lens: [R] slots that the queries of a request may look at.
        block_table: [R, blocks] physical block ids.
        positions: [T] rope positions.
        visible_lens: [T] slots below this are visible.
        ancestor_bits: [T] bit ``j`` makes slot ``tree_start + j`` visible.
        tree_starts: [R] slot of node 0.
        block_size: tokens per block.
        windows: distinct sliding windows: slot ``n`` below the tree is visible only if ``n > position - window``.
        device: where the attention runs.
    """
    query_lens = np.diff(query_start_loc)
    rows = _Rows(positions, visible_lens, ancestor_bits)
    short_ids = np.flatnonzero(query_lens <= MAX_SHORT_QUERY)
    long_ids = np.flatnonzero(query_lens > MAX_SHORT_QUERY)
    num_blocks = -(-seq_lens // block_size)
    short = None
    if len(short_ids):
        short = _plan_short(short_ids, query_start_loc, num_blocks, block_table, rows, tree_starts, block_size, windows, device)
    long = []
    for i in long_ids.tolist():
        first, last = int(query_start_loc[i]), int(query_start_loc[i + 1])
        chunk = rows.take(np.arange(first, last)[None])
        seq_len = int(seq_lens[i])
        is_causal = last - first == seq_len and not chunk.ancestor_bits.any()
        visible: dict[Window, Tensor | None] = {}
        for window in windows:
            if is_causal and (window is None or window >= seq_len):
                visible[window] = None
            else:
                visible[window] = torch.from_numpy(chunk.visible(tree_starts[i : i + 1], seq_len, window)[0]).to(device)
        block_ids = torch.from_numpy(block_table[i, : num_blocks[i]]).to(device)
        long.append(LongQuery(slice(first, last), block_ids, seq_len, visible))
    return AttentionPlan(int(query_start_loc[-1]), short, tuple(long))


def plan_decode_passes(
    positions: NDArray[np.int64], block_table: NDArray[np.int64], *, block_size: int, windows: Sequence[Window], device: torch.device
) -> list[AttentionPlan]:
    """Plan several passes of one query token per request, each seeing every slot up to its own position.

    All passes share the blocks of the last one; they differ in what is hidden.

    Args:
        positions: [passes, R], ascending along the passes; a token's slot is its position.
        block_table: [R, blocks].
        block_size: tokens per block.
        windows: distinct sliding windows.
        device: where the attention runs.
    """
    num_passes, num_requests = positions.shape
    starts = np.arange(num_requests + 1)
    none = np.zeros(num_requests, np.int64)
    last = _Rows(positions[-1], positions[-1] + 1, none)
    num_blocks = positions[-1] // block_size + 1
    short = _plan_short(starts[:-1], starts, num_blocks, block_table, last, none, block_size, windows, device)
    rows = _Rows(positions[:, :, None], positions[:, :, None] + 1, np.zeros_like(positions[:, :, None]))
    num_slots = int(num_blocks.max()) * block_size
    hidden = {
        window: torch.from_numpy(~rows.visible(none, num_slots, window)[:, :, None]).to(device) for window in windows
    }  # bool [passes, R, 1, 1, slots]
    return [
        AttentionPlan(num_requests, replace(short, hidden={window: mask[i] for window, mask in hidden.items()}), ())
        for i in range(num_passes)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Query rows, [T] or [requests, rows]."""

    positions: NDArray[np.int64]
    visible_lens: NDArray[np.int64]
    ancestor_bits: NDArray[np.int64]

    def take(self, index: NDArray[np.int64]) -> _Rows:
        return _Rows(self.positions[index], self.visible_lens[index], self.ancestor_bits[index])

    def visible(self, tree_starts: NDArray[np.int64], num_slots: int, window: Window) -> NDArray[np.bool_]:
        """Which slots each row sees: bool [requests, rows, num_slots]."""
        slots = np.arange(num_slots)
        visible: NDArray[np.bool_] = slots < self.visible_lens[..., None]
        if window is not None:
            visible &= slots > self.positions[..., None] - window
        if self.ancestor_bits.any():
            node = slots - tree_starts[:, None, None]
            is_node = (node >= 0) & (node < 63)
            bits = self.ancestor_bits[..., None] >> np.clip(node, 0, 62)
            visible |= is_node & ((bits & 1) == 1)
        return visible


def _plan_short(
    ids: NDArray[np.int64],
    query_start_loc: NDArray[np.int64],
    num_blocks: NDArray[np.int64],
    block_table: NDArray[np.int64],
    rows: _Rows,
    tree_starts: NDArray[np.int64],
    block_size: int,
    windows: Sequence[Window],
    device: torch.device,
) -> ShortQueries:
    first_rows = query_start_loc[ids]
    query_lens = query_start_loc[ids + 1] - first_rows
    query_len = int(query_lens.max())
    num_tokens = len(rows.positions)
    is_whole_batch = len(ids) * query_len == num_tokens

    in_query = np.arange(query_len) < query_lens[:, None]
    padded_rows = np.where(in_query, first_rows[:, None] + np.arange(query_len), first_rows[:, None])

    blocks_per_request = num_blocks[ids]
    max_blocks = int(blocks_per_request.max())
    in_table = np.arange(max_blocks) < blocks_per_request[:, None]
    places = np.flatnonzero(in_table)  # of the entries in [S * blocks]
    used_blocks = block_table[ids, :max_blocks][in_table]
    owners = np.repeat(np.arange(len(ids)), blocks_per_request)

    first_block = int(used_blocks.min())
    range_len = int(used_blocks.max()) - first_block + 1
    is_dense = range_len * (1 - MAX_UNUSED_SHARE) <= len(used_blocks) and len(np.unique(used_blocks)) == len(used_blocks)
    if is_dense:
        entries, num_entries = used_blocks - first_block, range_len
    else:
        entries, num_entries = np.arange(len(used_blocks)), len(used_blocks)
    owner_of_entry = np.zeros(num_entries, np.int64)
    owner_of_entry[entries] = owners
    prob_index = np.zeros(num_entries, np.int64)
    prob_index[entries] = places
    value_index = np.full(in_table.size, num_entries)
    value_index[places] = entries

    def to_device(array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(device)

    queries = rows.take(padded_rows)
    return ShortQueries(
        num_requests=len(ids),
        query_len=query_len,
        query_rows=None if is_whole_batch else to_device(padded_rows.reshape(-1)),
        output_rows=None if is_whole_batch else to_device(np.flatnonzero(in_query)),
        token_rows=None if is_whole_batch else to_device(padded_rows[in_query]),
        num_entries=num_entries,
        first_block=first_block,
        block_ids=None if is_dense else to_device(used_blocks),
        owners=to_device(owner_of_entry),
        score_index=to_device(np.minimum(value_index, num_entries - 1)),
        value_index=to_device(value_index),
        prob_index=to_device(prob_index),
        hidden={
            window: torch.from_numpy(~queries.visible(tree_starts[ids], max_blocks * block_size, window)[:, None]).to(device)
            for window in windows
        },
    )


def tree_attention(q: Tensor, kv_layer: Tensor, plan: AttentionPlan, *, scale: float, window: Window) -> Tensor:
    """Attend from every query token to the visible slots of its request.

    Args:
        q: [T, num_heads, head_dim].
        kv_layer: [2, num_blocks, num_kv_heads, block_size, head_dim], keys and values; the tokens' own are written.
        plan: from `plan_attention`.
        scale: multiplies the scores.
        window: this layer's sliding window, one of those planned for.

    Returns:
        [T, num_heads * head_dim], dtype of ``q``.
    """
    num_tokens, num_heads, head_dim = q.shape
    if plan.short is not None and plan.short.token_rows is None:
        return _short_attention(q, kv_layer, plan.short, scale, window)
    output = q.new_empty(num_tokens, num_heads * head_dim)
    if plan.short is not None:
        assert plan.short.token_rows is not None
        output[plan.short.token_rows] = _short_attention(q, kv_layer, plan.short, scale, window)
    for query in plan.long:
        output[query.rows] = _long_attention(q[query.rows], kv_layer, query, scale, window)
    return output


def _short_attention(q: Tensor, kv_layer: Tensor, plan: ShortQueries, scale: float, window: Window) -> Tensor:
    _, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_layer.shape[2:4]
    num_entries, num_requests, query_len = plan.num_entries, plan.num_requests, plan.query_len
    num_rows = num_heads // num_kv_heads * query_len  # per KV head
    if plan.query_rows is not None:
        q = q.index_select(0, plan.query_rows)
    q = (q * scale).view(num_requests, query_len, num_kv_heads, -1, head_dim)
    q = q.permute(0, 2, 3, 1, 4).reshape(num_requests, -1)
    if plan.block_ids is None:
        k, v = kv_layer[:, plan.first_block : plan.first_block + num_entries].unbind()
    else:
        k, v = kv_layer[0].index_select(0, plan.block_ids), kv_layer[1].index_select(0, plan.block_ids)

    q = q.index_select(0, plan.owners).view(num_entries * num_kv_heads, num_rows, head_dim)
    scores = torch.bmm(q, k.reshape(num_entries * num_kv_heads, block_size, head_dim).transpose(1, 2))
    scores = scores.view(num_entries, -1).index_select(0, plan.score_index)
    scores = scores.view(num_requests, -1, num_kv_heads * num_rows, block_size).transpose(1, 2)
    scores = scores.reshape(num_requests, -1, query_len, plan.hidden[window].shape[-1])
    probs = scores.masked_fill_(plan.hidden[window], float("-inf")).softmax(-1)

    probs = probs.view(num_requests, num_kv_heads * num_rows, -1, block_size).transpose(1, 2)
    probs = probs.reshape(len(plan.value_index), -1).index_select(0, plan.prob_index)
    values = q.new_empty(num_entries + 1, num_kv_heads * num_rows * head_dim)
    values[num_entries].zero_()
    torch.bmm(
        probs.view(num_entries * num_kv_heads, num_rows, block_size),
        v.reshape(num_entries * num_kv_heads, block_size, head_dim),
        out=values[:num_entries].view(num_entries * num_kv_heads, num_rows, head_dim),
    )
    output = values.index_select(0, plan.value_index).view(num_requests, -1, values.shape[1]).sum(1)
    output = output.view(num_requests, num_heads, query_len, head_dim).transpose(1, 2)
    output = output.reshape(num_requests * query_len, num_heads * head_dim)
    return output if plan.output_rows is None else output.index_select(0, plan.output_rows)


def _long_attention(q: Tensor, kv_layer: Tensor, query: LongQuery, scale: float, window: Window) -> Tensor:
    num_kv_heads, block_size, head_dim = kv_layer.shape[2:]
    blocks = kv_layer.index_select(1, query.block_ids)
    kv = blocks.transpose(1, 2).reshape(2, num_kv_heads, -1, head_dim)[:, :, : query.seq_len]
    visible = query.visible[window]
    output = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        kv[0][None],
        kv[1][None],
        attn_mask=visible,
        is_causal=visible is None,
        scale=scale,
        enable_gqa=num_kv_heads != q.shape[1],
    )
    return output[0].transpose(0, 1).reshape(q.shape[0], -1)

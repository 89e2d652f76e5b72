"""Ragged tree attention over paged KV blocks in plain PyTorch: what runs where neither Triton nor a compiler is.

Requests with short queries (decodes, verifications, small chunks) are grouped by query and context length; a group gathers
its blocks once and is one pair of batched products. KV heads are the outer dimension of the cache, so that what is gathered
by blocks is contiguous per (head, request). Long queries go through `long_attention`.

Requirement: the blocks in a request's table hold finite values in every slot (`kv_ops.clear_blocks` on allocation); blocks
that belong to nobody may hold anything.

Legend: T query tokens, R requests; in a group S requests, M longest query, N slots looked at; K KV heads, G query heads per
KV head, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from titan.core.attention_layout import AttentionLayout, Int, Window
from titan.kernels.cpu.long_attention import MAX_SHORT_QUERY, LongQuery, long_attention, plan_long_queries, visible_slots

MIN_QUERY_CLASS = 8
"""Short queries are grouped in classes of at most 8, 16, 32 and 64 tokens."""

MAX_CONTEXT_RATIO = 2
"""Within a group the longest context has at most this many times the blocks of the shortest, plus `FREE_BLOCKS`."""
FREE_BLOCKS = 4

SMALL_GROUP = 64
BLOCK_MULTIPLE = 4
"""Contexts of groups of few blocks are padded to a multiple: a product of a new shape costs a set-up in oneDNN."""

MAX_FLOAT32_ELEMENTS = 2**18
"""Up to this many keys and values a CPU is faster in float32: its products in bfloat16 cost a set-up each."""


@dataclass(frozen=True, slots=True, eq=False)
class QueryGroup:
    """Requests whose short queries are attended together."""

    num_requests: int  # S
    query_len: int  # M
    query_rows: Tensor | None  # int64 [S * M], rows of T padded to M per request; None: all of T as it is
    kept_rows: Tensor | None  # int64, the rows of S * M that are queries; None: all
    token_rows: Tensor | None  # int64, where in T they belong; None: all of T
    block_ids: Tensor  # int64 [S * blocks]
    num_blocks: int  # per request
    hidden: Mapping[Window, Tensor]  # bool [S, 1, M, N]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """Made once per step, used by every layer."""

    groups: Sequence[QueryGroup]
    long: Sequence[LongQuery]
    # gathered KV by group, reused by every layer: fresh memory for each would cost a page fault per 4 KiB
    scratch: dict[int, Tensor] = field(default_factory=dict)


def plan_attention(layout: AttentionLayout, windows: Sequence[Window]) -> AttentionPlan:
    """Plan the attention of one ragged batch on the host.

    Args:
        layout: the batch.
        windows: distinct sliding windows of the layers.
    """
    num_blocks = -(-layout.seq_lens // layout.block_size)
    groups = [_plan_group(layout, ids, num_blocks, windows) for ids in _group_requests(layout, num_blocks)]
    return AttentionPlan(groups, plan_long_queries(layout, windows))


def _group_requests(layout: AttentionLayout, num_blocks: Int) -> Iterator[Int]:
    """Sort requests with short queries into groups of similar query and context length; yields their indices."""
    query_lens = np.diff(layout.query_start_loc)
    classes = np.full(len(query_lens), MIN_QUERY_CLASS)
    if query_lens.max() > MIN_QUERY_CLASS:
        classes = np.maximum(2 ** np.ceil(np.log2(query_lens)), MIN_QUERY_CLASS).astype(np.int64)
    for query_class in sorted(set(classes.tolist())):
        if query_class > MAX_SHORT_QUERY:
            break
        ids = np.flatnonzero(classes == query_class)
        while len(ids):
            blocks = num_blocks[ids]
            is_member = blocks * MAX_CONTEXT_RATIO + FREE_BLOCKS >= blocks.max()
            yield ids[is_member]
            ids = ids[~is_member]


def _padded_rows(ids: Int, query_start_loc: Int) -> Int:
    """Rows of T of each request's query, int64 [S, M]; shorter queries repeat their first row."""
    first_rows = query_start_loc[ids, None]
    query_lens = query_start_loc[ids + 1, None] - first_rows
    offsets = np.arange(query_lens.max())
    return first_rows + np.where(offsets < query_lens, offsets, 0)


def _plan_group(layout: AttentionLayout, ids: Int, num_blocks: Int, windows: Sequence[Window]) -> QueryGroup:
    device, query_start_loc = layout.ancestor_bits.device, layout.query_start_loc
    padded_rows = _padded_rows(ids, query_start_loc)
    max_blocks = int(num_blocks[ids].max())
    if len(ids) * max_blocks <= SMALL_GROUP:
        max_blocks = -(-max_blocks // BLOCK_MULTIPLE) * BLOCK_MULTIPLE
    # where a table ends its first block is read again: it is the request's own, hence finite, and it is hidden
    places = np.arange(max_blocks)
    blocks = layout.block_table[ids[:, None], np.where(places < num_blocks[ids, None], places, 0)]
    query_rows = kept_rows = token_rows = None
    is_whole_batch = len(ids) == len(query_start_loc) - 1 and padded_rows.size == query_start_loc[-1]
    if not is_whole_batch:
        is_query = np.arange(padded_rows.shape[1]) < np.diff(query_start_loc)[ids, None]
        query_rows = torch.from_numpy(padded_rows.reshape(-1)).to(device)
        kept_rows = torch.from_numpy(np.flatnonzero(is_query)).to(device)
        token_rows = torch.from_numpy(padded_rows[is_query]).to(device)
    num_slots = max_blocks * layout.block_size
    hidden = {window: ~visible_slots(layout, padded_rows, ids, num_slots, window)[:, None] for window in windows}
    block_ids = torch.from_numpy(blocks.reshape(-1)).to(device)
    return QueryGroup(len(ids), padded_rows.shape[1], query_rows, kept_rows, token_rows, block_ids, max_blocks, hidden)


def tree_attention(q: Tensor, kv_layer: Tensor, plan: AttentionPlan, *, scale: float, window: Window) -> Tensor:
    """Attend from every query token to the visible slots of its request.

    Args:
        q: [T, num_heads, head_dim].
        kv_layer: [2, num_kv_heads, num_blocks, block_size, head_dim], keys and values; the tokens' own are written.
        plan: from `plan_attention`.
        scale: multiplies the scores.
        window: this layer's sliding window, one of those planned for.

    Returns:
        [T, num_heads * head_dim], dtype of ``q``.
    """
    num_tokens, num_heads, head_dim = q.shape
    if len(plan.groups) == 1 and plan.groups[0].token_rows is None:
        return _group_attention(q, _gather(kv_layer, plan, 0), plan.groups[0], plan.groups[0].hidden[window], scale)
    output = q.new_empty(num_tokens, num_heads * head_dim)
    for i, group in enumerate(plan.groups):
        output[group.token_rows] = _group_attention(q, _gather(kv_layer, plan, i), group, group.hidden[window], scale)
    for query in plan.long:
        output[query.rows] = long_attention(q[query.rows], kv_layer, query, scale=scale, window=window)
    return output


def _gather(kv_layer: Tensor, plan: AttentionPlan, i: int) -> Tensor:
    """Keys and values of group ``i``: [2, K * S, N, D]."""
    group = plan.groups[i]
    _, num_kv_heads, _, block_size, head_dim = kv_layer.shape
    shape = (2, num_kv_heads * group.num_requests, group.num_blocks * block_size, head_dim)
    if i not in plan.scratch:
        plan.scratch[i] = kv_layer.new_empty(2, num_kv_heads, len(group.block_ids), block_size, head_dim)
    return torch.index_select(kv_layer, 2, group.block_ids, out=plan.scratch[i]).view(shape)


def _group_attention(q: Tensor, kv: Tensor, group: QueryGroup, hidden: Tensor, scale: float) -> Tensor:
    dtype = q.dtype
    num_heads, head_dim = q.shape[1:]
    if kv.device.type == "cpu" and kv.numel() <= MAX_FLOAT32_ELEMENTS:
        kv = kv.float()
    num_requests, query_len = group.num_requests, group.query_len
    num_kv_heads = kv.shape[1] // num_requests
    if group.query_rows is not None:
        q = q.index_select(0, group.query_rows)
    q = q.reshape(num_requests, query_len, num_kv_heads, -1, head_dim).permute(2, 0, 3, 1, 4)  # [K, S, G, M, D]
    rows = torch.mul(q, scale, out=kv.new_empty(q.shape)).view(kv.shape[1], -1, head_dim)
    scores = torch.bmm(rows, kv[0].transpose(1, 2))
    scores.view(num_kv_heads, num_requests, -1, query_len, kv.shape[2]).masked_fill_(hidden, float("-inf"))
    output = torch.bmm(scores.softmax(-1), kv[1]).view(num_kv_heads, num_requests, -1, query_len, head_dim)
    output = output.permute(1, 3, 0, 2, 4).reshape(num_requests * query_len, num_heads * head_dim).to(dtype)
    return output if group.kept_rows is None else output.index_select(0, group.kept_rows)

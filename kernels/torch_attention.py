"""Ragged tree attention over paged KV blocks in plain PyTorch: what runs where Triton does not.

Requests with short queries (decodes, verifications, small chunks) are grouped by query and context length; a group gathers
its blocks once and is one pair of batched products. KV heads are the outer dimension of the cache, so that what is gathered
by blocks is contiguous per (head, request). Long
queries (prefill chunks) go one request at a time through `scaled_dot_product_attention`, which in bfloat16 on a CPU is
several times slower than batched products for a few rows, and faster for many.

Visibility of key slot ``n`` to a query row: ``n < visible_len``, or bit ``n - tree_start`` of its ancestor bits.

Requirement: the blocks in a request's table hold finite values in every slot (`kv_ops.clear_blocks` on allocation); blocks
that belong to nobody may hold anything.

Legend: T query tokens, R requests; in a group S requests, M longest query, N slots looked at; K KV heads, G query heads per
KV head, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

MIN_QUERY_CLASS = 8
MAX_SHORT_QUERY = 64
"""Queries up to this length are grouped, in classes of at most 8, 16, 32 and 64 tokens."""

MAX_CONTEXT_RATIO = 2
"""Within a group the longest context has at most this many times the blocks of the shortest, plus `FREE_BLOCKS`."""
FREE_BLOCKS = 4

SMALL_GROUP = 64
BLOCK_MULTIPLE = 4
"""Contexts of groups of few blocks are padded to a multiple: a product of a new shape costs a set-up in oneDNN."""

MAX_FLOAT32_ELEMENTS = 2**18
"""Up to this many keys and values a CPU is faster in float32: its products in bfloat16 cost a set-up each."""

NO_NODE = 63
"""Trees have nodes 0 to 62, so this bit is never set."""

Window = int | None
Bool = NDArray[np.bool_]
Int = NDArray[np.int64]


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

    groups: Sequence[QueryGroup]
    hidden: Sequence[Mapping[Window, Tensor]]  # per group, bool [S, 1, M, N]
    long: Sequence[LongQuery]
    nodes: Sequence[Tensor] = ()  # per group, where ancestors come later: int64 [S, 1, 1, N], node in each slot, 63 for none
    # gathered KV by group, reused by every layer: fresh memory for each would cost a page fault per 4 KiB
    scratch: dict[int, Tensor] = field(default_factory=dict)

    def with_ancestors(self, ancestor_bits: Tensor, depth: int) -> AttentionPlan:
        """The plan with what it was made without: the ancestor bits of its rows, int64 [T], which are nodes of that depth."""
        hidden = []
        for group, masks, nodes in zip(self.groups, self.hidden, self.nodes, strict=True):
            bits = ancestor_bits if group.query_rows is None else ancestor_bits.index_select(0, group.query_rows)
            bits = bits.view(group.num_requests, 1, group.query_len, 1)
            hidden.append({window: mask & ~_is_ancestor(bits, nodes, depth, window) for window, mask in masks.items()})
        return replace(self, hidden=hidden)


def _is_ancestor(bits: Tensor, nodes: Tensor, depth: int, window: Window) -> Tensor:
    for _ in range(0 if window is None else depth - window):
        bits = bits & (bits - 1)  # the farthest ancestor is out of the window
    return (bits >> nodes) & 1 == 1


@dataclass(frozen=True, slots=True, eq=False)
class QueryRows:
    """What query rows see; arrays are [T], or [requests, rows] for some of them.

    Args:
        positions: rope positions.
        visible_lens: slots below this are visible.
        ancestor_bits: bit ``j`` makes slot ``tree_start + j`` visible.
    """

    positions: Int
    visible_lens: Int
    ancestor_bits: Int

    def take(self, index: Int) -> QueryRows:
        return QueryRows(self.positions[index], self.visible_lens[index], self.ancestor_bits[index])

    def visible(self, tree_starts: Int, num_slots: int, window: Window) -> Bool:
        """Which slots each row sees: bool [requests, rows, num_slots].

        A window goes by position: it hides slots before the tree at or below ``position - window``, and all but the nearest
        ``window`` of a node's ancestors, itself among them.
        """
        slots = np.arange(num_slots)
        visible: Bool = slots < self.visible_lens[..., None]
        if window is not None:
            visible &= slots > self.positions[..., None] - window
        if self.ancestor_bits.any():
            bits = self.ancestor_bits if window is None else nearest_ancestors(self.ancestor_bits, window)
            visible |= (bits[..., None] >> node_of_slot(tree_starts, num_slots)[:, None]) & 1 == 1
        return visible


def node_of_slot(tree_starts: Int, num_slots: int) -> Int:
    """The tree node in each slot, 63 where there is none: [requests] -> [requests, num_slots]."""
    node = np.arange(num_slots) - tree_starts[:, None]
    return np.where((node >= 0) & (node < NO_NODE), node, NO_NODE)


def nearest_ancestors(ancestor_bits: Int, count: int) -> Int:
    """Keep the highest ``count`` bits that are set, which are the nearest ancestors, since parents come before children."""
    bits = ancestor_bits.view(np.uint64)
    while (is_over := np.bitwise_count(bits) > count).any():
        bits = np.where(is_over, bits & (bits - np.uint64(1)), bits)
    return bits.view(np.int64)


def plan_attention(
    *,
    query_start_loc: Int,
    seq_lens: Int,
    block_table: Int,
    rows: QueryRows,
    tree_starts: Int,
    block_size: int,
    windows: Sequence[Window],
    device: torch.device,
    has_later_ancestors: bool = False,
) -> AttentionPlan:
    """Plan the attention of one ragged batch on the host.

    Args:
        query_start_loc: [R + 1] prefix sums of query lengths.
        seq_lens: [R] slots that the queries of a request may look at.
        block_table: [R, blocks] physical block ids.
        rows: the T query rows.
        tree_starts: [R] slot of node 0.
        block_size: tokens per block.
        windows: distinct sliding windows of the layers.
        device: where the attention runs.
        has_later_ancestors: the rows' ancestor bits are not known yet, `AttentionPlan.with_ancestors` will bring them; queries
            must then be short.
    """
    query_lens = np.diff(query_start_loc)
    num_blocks = -(-seq_lens // block_size)
    groups, hidden, nodes = [], [], []
    for ids in _group_requests(query_lens, num_blocks):
        padded_rows = _padded_rows(ids, query_start_loc)
        groups.append(_plan_group(ids, query_start_loc, padded_rows, num_blocks, block_table, device))
        num_slots = groups[-1].num_blocks * block_size
        hidden.append(_hidden(rows.take(padded_rows), tree_starts[ids], num_slots, windows, device))
        if has_later_ancestors:
            nodes.append(torch.from_numpy(node_of_slot(tree_starts[ids], num_slots)[:, None, None]).to(device))
    long = []
    for i in np.flatnonzero(query_lens > MAX_SHORT_QUERY).tolist():
        first, last, seq_len = int(query_start_loc[i]), int(query_start_loc[i + 1]), int(seq_lens[i])
        chunk = rows.take(np.arange(first, last)[None])
        is_causal = last - first == seq_len and not chunk.ancestor_bits.any()
        visible: dict[Window, Tensor | None] = {}
        for window in windows:
            if is_causal and (window is None or window >= seq_len):
                visible[window] = None
            else:
                visible[window] = torch.from_numpy(chunk.visible(tree_starts[i : i + 1], seq_len, window)[0]).to(device)
        block_ids = torch.from_numpy(block_table[i, : num_blocks[i]]).to(device)
        long.append(LongQuery(slice(first, last), block_ids, seq_len, visible))
    return AttentionPlan(groups, hidden, long, nodes)


def plan_decode_passes(
    positions: Int, block_table: Int, *, block_size: int, windows: Sequence[Window], device: torch.device
) -> list[AttentionPlan]:
    """Plan several passes of one query token per request, each seeing every slot up to its own position.

    All passes share the blocks of the last one; they differ in what is hidden.

    Args:
        positions: [passes, R], ascending along the passes; a token's slot is its position.
        block_table: [R, blocks].
        block_size: tokens per block.
        windows: distinct sliding windows of the layers.
        device: where the attention runs.
    """
    num_passes, num_requests = positions.shape
    start_loc = np.arange(num_requests + 1)
    num_blocks = positions[-1] // block_size + 1
    groups = []
    hidden: list[list[Mapping[Window, Tensor]]] = [[] for _ in range(num_passes)]  # [passes][groups]
    for ids in _group_requests(np.ones(num_requests, np.int64), num_blocks):
        group = _plan_group(ids, start_loc, ids[:, None], num_blocks, block_table, device)
        groups.append(group)
        last_seen = positions[:, ids].reshape(-1, 1)
        rows = QueryRows(last_seen, last_seen + 1, np.zeros_like(last_seen))
        masks = _hidden(rows, last_seen[:1, 0], group.num_blocks * block_size, windows, device)
        for i in range(num_passes):
            members = slice(i * len(ids), (i + 1) * len(ids))
            hidden[i].append({window: mask[members] for window, mask in masks.items()})
    scratch: dict[int, Tensor] = {}
    return [AttentionPlan(groups, hidden_by_group, (), scratch=scratch) for hidden_by_group in hidden]


def _group_requests(query_lens: Int, num_blocks: Int) -> Iterator[Int]:
    """Sort requests with short queries into groups of similar query and context length; yields their indices."""
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


def _plan_group(
    ids: Int, query_start_loc: Int, padded_rows: Int, num_blocks: Int, block_table: Int, device: torch.device
) -> QueryGroup:
    max_blocks = int(num_blocks[ids].max())
    if len(ids) * max_blocks <= SMALL_GROUP:
        max_blocks = -(-max_blocks // BLOCK_MULTIPLE) * BLOCK_MULTIPLE
    # where a table ends its first block is read again: it is the request's own, hence finite, and it is hidden
    places = np.arange(max_blocks)
    blocks = block_table[ids[:, None], np.where(places < num_blocks[ids, None], places, 0)]
    query_rows = kept_rows = token_rows = None
    is_whole_batch = len(ids) == len(query_start_loc) - 1 and padded_rows.size == query_start_loc[-1]
    if not is_whole_batch:
        is_query = np.arange(padded_rows.shape[1]) < np.diff(query_start_loc)[ids, None]
        query_rows = torch.from_numpy(padded_rows.reshape(-1)).to(device)
        kept_rows = torch.from_numpy(np.flatnonzero(is_query)).to(device)
        token_rows = torch.from_numpy(padded_rows[is_query]).to(device)
    block_ids = torch.from_numpy(blocks.reshape(-1)).to(device)
    return QueryGroup(len(ids), padded_rows.shape[1], query_rows, kept_rows, token_rows, block_ids, max_blocks)


def _hidden(
    rows: QueryRows, tree_starts: Int, num_slots: int, windows: Sequence[Window], device: torch.device
) -> dict[Window, Tensor]:
    return {window: torch.from_numpy(~rows.visible(tree_starts, num_slots, window)[:, None]).to(device) for window in windows}


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
        return _group_attention(q, _gather(kv_layer, plan, 0), plan.groups[0], plan.hidden[0][window], scale)
    output = q.new_empty(num_tokens, num_heads * head_dim)
    for i, group in enumerate(plan.groups):
        output[group.token_rows] = _group_attention(q, _gather(kv_layer, plan, i), group, plan.hidden[i][window], scale)
    for query in plan.long:
        output[query.rows] = _long_attention(q[query.rows], kv_layer, query, scale, window)
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


def _long_attention(q: Tensor, kv_layer: Tensor, query: LongQuery, scale: float, window: Window) -> Tensor:
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

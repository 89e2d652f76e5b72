"""The ragged batch: prefill chunks, decodes and root+tree segments of all requests side by side, without padding.

Legend: T = query tokens of the batch, R = requests (segments), L = rows that need logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.kernels.torch_attention import AttentionPlan, QueryRows, plan_attention, plan_decode_passes
from titan.tree import EMPTY_TREE, DraftTree


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The query tokens of one request in one pass of one model.

    Committed tokens ``token_ids`` at positions ``start .. start+len-1`` come first. With a tree, the last of them is
    the root and the nodes from ``first_node`` on follow it; nodes before ``first_node`` are in the cache already.
    ``root_position`` is where the tree hangs: the position (and slot) of the root.
    """

    block_ids: list[int]
    start: int
    token_ids: Sequence[int]
    tree: DraftTree = EMPTY_TREE
    first_node: int = 0
    root_position: int = -1
    needs_logits: bool = True  # of the last committed token and of the query nodes


@dataclass(frozen=True, slots=True, eq=False)
class RaggedBatch:
    """Everything one forward pass needs; passed explicitly to the model."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], rope positions: root position + depth for tree nodes
    slot_mapping: Tensor  # int64 [T], block * block_size + offset
    logits_rows: Tensor  # int64 [L], rows of T whose logits are computed
    logits_start_loc: NDArray[np.int64]  # [R + 1], prefix sums of logits rows per request
    attention: AttentionPlan


def build_batch(segments: Sequence[Segment], *, block_size: int, windows: Sequence[int | None], device: torch.device) -> RaggedBatch:
    """Lay the segments out one after another.

    Args:
        segments: one per request, each with at least one query token.
        block_size: tokens per KV block.
        windows: the distinct sliding windows (in positions) of the model's layers; ``None`` = full attention.
        device: where the model runs.
    """
    num_requests = len(segments)
    num_committed = np.fromiter((len(s.token_ids) for s in segments), np.int64, num_requests)
    num_nodes = np.fromiter((s.tree.num_nodes - s.first_node for s in segments), np.int64, num_requests)
    query_lens = num_committed + num_nodes
    query_start_loc = np.zeros(num_requests + 1, np.int64)
    np.cumsum(query_lens, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])

    token_ids = np.empty(num_tokens, np.int64)
    positions = np.empty(num_tokens, np.int64)
    slots = np.empty(num_tokens, np.int64)  # within the request
    visible_lens = np.empty(num_tokens, np.int64)
    ancestor_bits = np.zeros(num_tokens, np.int64)
    tree_starts = np.zeros(num_requests, np.int64)
    logits_lens = np.zeros(num_requests, np.int64)
    logits_rows: list[NDArray[np.int64]] = []
    for i, segment in enumerate(segments):
        first = int(query_start_loc[i])
        middle = first + int(num_committed[i])
        last = int(query_start_loc[i + 1])
        committed = np.arange(segment.start, segment.start + middle - first)
        token_ids[first:middle] = segment.token_ids
        positions[first:middle] = committed
        slots[first:middle] = committed
        visible_lens[first:middle] = committed + 1
        if last > middle:
            _lay_out_nodes(segment, slice(middle, last), token_ids, positions, slots, visible_lens, ancestor_bits)
            tree_starts[i] = segment.root_position + 1
        if segment.needs_logits:
            rows = np.arange(middle - 1 if middle > first else middle, last)
            logits_rows.append(rows)
            logits_lens[i] = len(rows)
    table = pad_block_tables([segment.block_ids for segment in segments])
    owners = np.repeat(np.arange(num_requests), query_lens)
    slot_mapping = table[owners, slots // block_size].astype(np.int64) * block_size + slots % block_size
    seq_lens = np.maximum.reduceat(slots, query_start_loc[:-1]) + 1
    logits_start_loc = np.zeros(num_requests + 1, np.int64)
    np.cumsum(logits_lens, out=logits_start_loc[1:])

    def to_device(array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return RaggedBatch(
        token_ids=to_device(token_ids),
        positions=to_device(positions),
        slot_mapping=to_device(slot_mapping),
        logits_rows=to_device(np.concatenate(logits_rows) if logits_rows else np.empty(0, np.int64)),
        logits_start_loc=logits_start_loc,
        attention=plan_attention(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=table,
            rows=QueryRows(positions, visible_lens, ancestor_bits),
            tree_starts=tree_starts,
            block_size=block_size,
            windows=windows,
            device=device,
        ),
    )


def _lay_out_nodes(
    segment: Segment,
    rows: slice,
    token_ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    slots: NDArray[np.int64],
    visible_lens: NDArray[np.int64],
    ancestor_bits: NDArray[np.int64],
) -> None:
    """Fill the rows of a segment's tree nodes: slots by node, positions by depth, visibility by ancestors."""
    tree, first_node, root = segment.tree, segment.first_node, segment.root_position
    token_ids[rows] = tree.token_ids[first_node:]
    positions[rows] = root + tree.depths[first_node:]
    slots[rows] = root + 1 + np.arange(first_node, tree.num_nodes)
    if tree.is_chain:
        visible_lens[rows] = slots[rows] + 1
    else:
        visible_lens[rows] = root + 1
        ancestor_bits[rows] = tree.ancestor_bits[first_node:]


def pad_block_tables(block_tables: Sequence[list[int]]) -> NDArray[np.int64]:
    """Block tables as rows of one array, int64 [R, longest table]; the tails repeat block 0 and are never read."""
    table = np.zeros((len(block_tables), max(map(len, block_tables))), np.int64)
    for row, block_ids in zip(table, block_tables, strict=True):
        row[: len(block_ids)] = block_ids
    return table


@dataclass(frozen=True, slots=True, eq=False)
class ChainBatch:
    """One depth of a batched chain: everything but the tokens, which the depth before it makes on the device."""

    positions: Tensor  # int64 [R]
    slot_mapping: Tensor  # int64 [R]
    logits_rows: Tensor  # int64 [R]
    logits_start_loc: NDArray[np.int64]  # [R + 1]
    attention: AttentionPlan

    def with_tokens(self, token_ids: Tensor) -> RaggedBatch:
        """The batch with its tokens, int64 [R]."""
        return RaggedBatch(
            token_ids, self.positions, self.slot_mapping, self.logits_rows, self.logits_start_loc, self.attention
        )


def build_chain_batches(
    block_tables: Sequence[list[int]],
    root_positions: NDArray[np.int64],
    *,
    first_depth: int,
    last_depth: int,
    block_size: int,
    windows: Sequence[int | None],
    device: torch.device,
) -> list[ChainBatch]:
    """Lay out the passes that feed the chain nodes of depths ``first_depth .. last_depth``, one node per request and pass.

    Args:
        block_tables: one per request, covering the slots of all these nodes.
        root_positions: int64 [R].
        first_depth: depth of the node that the first pass feeds.
        last_depth: of the last pass.
        block_size: tokens per KV block.
        windows: the distinct sliding windows of the model's layers.
        device: where the model runs.
    """
    num_requests = len(block_tables)
    table = pad_block_tables(block_tables)
    depths = np.arange(first_depth, last_depth + 1)
    positions = root_positions + depths[:, None]
    slots = table[np.arange(num_requests), positions // block_size] * block_size + positions % block_size
    plans = plan_decode_passes(positions, table, block_size=block_size, windows=windows, device=device)
    positions_tensor = torch.from_numpy(positions).to(device)
    slots_tensor = torch.from_numpy(slots).to(device)
    rows = torch.arange(num_requests, device=device)
    start_loc = np.arange(num_requests + 1)
    return [
        ChainBatch(positions_tensor[i], slots_tensor[i], rows, start_loc, plan) for i, plan in enumerate(plans)
    ]

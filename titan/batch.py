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


def build_batch(
    segments: Sequence[Segment], *, block_size: int, windows: Sequence[int | None], device: torch.device
) -> RaggedBatch:
    """Lay the segments out one after another.

    Args:
        segments: one per request, each with at least one query token.
        block_size: tokens per KV block.
        windows: the distinct sliding windows (in positions) of the model's layers; ``None`` = full attention.
        device: where the model runs.
    """
    num_requests = len(segments)
    num_committed = np.array([len(segment.token_ids) for segment in segments])
    num_nodes = np.array([segment.tree.num_nodes - segment.first_node for segment in segments])
    origins = np.array([s.start if len(s.token_ids) else s.root_position + 1 + s.first_node for s in segments])
    query_lens = num_committed + num_nodes
    query_start_loc = _prefix_sums(query_lens)
    num_tokens = int(query_start_loc[-1])
    owners = np.repeat(np.arange(num_requests), query_lens)

    # committed tokens and nodes lie in consecutive slots, and but for branching trees the slot is the position
    slots = origins[owners] + np.arange(num_tokens) - query_start_loc[owners]
    positions, visible_lens = slots.copy(), slots + 1
    ancestor_bits = np.zeros(num_tokens, np.int64)
    tree_starts = np.zeros(num_requests, np.int64)
    for i, segment in enumerate(segments):
        if num_nodes[i] and not segment.tree.is_chain:
            rows = slice(int(query_start_loc[i + 1] - num_nodes[i]), int(query_start_loc[i + 1]))
            tree_starts[i] = segment.root_position + 1
            positions[rows] = segment.root_position + segment.tree.depths[segment.first_node :]
            visible_lens[rows] = segment.root_position + 1
            ancestor_bits[rows] = segment.tree.ancestor_bits[segment.first_node :]

    needs_logits = np.array([segment.needs_logits for segment in segments])
    logits_lens = np.where(needs_logits, num_nodes + (num_committed > 0), 0)
    logits_start_loc = _prefix_sums(logits_lens)
    logits_rows = np.arange(logits_start_loc[-1]) + np.repeat(
        query_start_loc[1:] - logits_lens - logits_start_loc[:-1], logits_lens
    )
    table = pad_block_tables([segment.block_ids for segment in segments])
    slot_mapping = table[owners, slots // block_size] * block_size + slots % block_size
    token_ids: list[int] = []
    for segment in segments:
        token_ids += segment.token_ids
        token_ids += segment.tree.token_ids[segment.first_node :].tolist()

    return RaggedBatch(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.from_numpy(positions).to(device),
        slot_mapping=torch.from_numpy(slot_mapping).to(device),
        logits_rows=torch.from_numpy(logits_rows).to(device),
        logits_start_loc=logits_start_loc,
        attention=plan_attention(
            query_start_loc=query_start_loc,
            seq_lens=origins + query_lens,
            block_table=table,
            rows=QueryRows(positions, visible_lens, ancestor_bits),
            tree_starts=tree_starts,
            block_size=block_size,
            windows=windows,
            device=device,
        ),
    )


def _prefix_sums(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 and the running sums of ``counts``: [n] -> [n + 1]."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums


def pad_block_tables(block_tables: Sequence[list[int]]) -> NDArray[np.int64]:
    """Block tables as rows of one array, int64 [R, longest table]; the tails repeat block 0 and are never read."""
    table = np.zeros((len(block_tables), max(map(len, block_tables))), np.int64)
    for row, block_ids in zip(table, block_tables, strict=True):
        row[: len(block_ids)] = block_ids
    return table


@dataclass(frozen=True, slots=True, eq=False)
class DraftPass:
    """One depth of drafting, laid out: everything but the tokens, which the depth before it makes on the device."""

    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]
    logits_rows: Tensor  # int64 [T]
    logits_start_loc: NDArray[np.int64]  # [R + 1]
    attention: AttentionPlan

    def with_tokens(self, token_ids: Tensor) -> RaggedBatch:
        """The batch with its tokens, int64 [T]."""
        return self._batch(token_ids, self.attention)

    def with_nodes(self, token_ids: Tensor, ancestor_bits: Tensor, depth: int) -> RaggedBatch:
        """The batch with the tokens and the ancestor bits of its nodes, int64 [T] each, of that depth."""
        return self._batch(token_ids, self.attention.with_ancestors(ancestor_bits, depth))

    def _batch(self, token_ids: Tensor, attention: AttentionPlan) -> RaggedBatch:
        return RaggedBatch(token_ids, self.positions, self.slot_mapping, self.logits_rows, self.logits_start_loc, attention)


def build_chain_passes(
    block_tables: Sequence[list[int]],
    root_positions: NDArray[np.int64],
    *,
    first_depth: int,
    last_depth: int,
    block_size: int,
    windows: Sequence[int | None],
    device: torch.device,
) -> list[DraftPass]:
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
    return [DraftPass(positions_tensor[i], slots_tensor[i], rows, start_loc, plan) for i, plan in enumerate(plans)]


def build_frontier_pass(
    block_tables: Sequence[list[int]],
    root_positions: NDArray[np.int64],
    nodes: Sequence[NDArray[np.int64]],
    depth: int,
    *,
    block_size: int,
    windows: Sequence[int | None],
    device: torch.device,
) -> DraftPass:
    """Lay out the pass that feeds the frontier nodes of one depth; their ancestor bits come with their tokens.

    Args:
        block_tables: one per request, covering the slots of these nodes and of all before them.
        root_positions: int64 [R].
        nodes: per request at least one, ascending; a node ``i`` is written to slot ``root position + 1 + i``.
        depth: of the nodes.
        block_size: tokens per KV block.
        windows: the distinct sliding windows of the model's layers.
        device: where the model runs.
    """
    query_start_loc = _prefix_sums(np.array([len(each) for each in nodes]))
    owners = np.repeat(np.arange(len(nodes)), np.diff(query_start_loc))
    table = pad_block_tables(block_tables)
    slots = root_positions[owners] + 1 + np.concatenate(nodes)
    positions = root_positions[owners] + depth
    return DraftPass(
        torch.from_numpy(positions).to(device),
        torch.from_numpy(table[owners, slots // block_size] * block_size + slots % block_size).to(device),
        torch.arange(len(owners), device=device),
        query_start_loc,
        plan_attention(
            query_start_loc=query_start_loc,
            seq_lens=root_positions + 2 + np.array([each[-1] for each in nodes]),
            block_table=table,
            rows=QueryRows(positions, root_positions[owners] + 1, np.zeros_like(positions)),
            tree_starts=root_positions + 1,
            block_size=block_size,
            windows=windows,
            device=device,
            has_later_ancestors=True,
        ),
    )

"""The ragged batch: prefill chunks, decodes and root+tree segments of all requests side by side, without padding.

Legend: T = query tokens of the batch, R = requests (segments), L = rows that need logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.kernels.attention_layout import AttentionLayout
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
    attention: AttentionLayout


def build_batch(segments: Sequence[Segment], *, block_size: int, device: torch.device) -> RaggedBatch:
    """Lay the segments out one after another.

    Args:
        segments: one per request, each with at least one query token.
        block_size: tokens per KV block.
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
        attention=AttentionLayout(
            query_start_loc=query_start_loc,
            seq_lens=origins + query_lens,
            block_table=table,
            tree_starts=tree_starts,
            positions=positions,
            visible_lens=visible_lens,
            ancestor_bits=torch.from_numpy(ancestor_bits).to(device),
            block_size=block_size,
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
    """One depth of drafting, laid out: everything but the nodes, which the depth before it makes on the device."""

    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]
    logits_rows: Tensor  # int64 [T]
    attention: AttentionLayout

    def with_nodes(self, token_ids: Tensor, ancestor_bits: Tensor) -> RaggedBatch:
        """The batch with the tokens and the ancestor bits of its nodes, int64 [T] each."""
        attention = replace(self.attention, ancestor_bits=ancestor_bits)
        return RaggedBatch(
            token_ids, self.positions, self.slot_mapping, self.logits_rows, self.attention.query_start_loc, attention
        )


def build_draft_passes(
    block_tables: Sequence[list[int]],
    root_positions: NDArray[np.int64],
    feeds: Sequence[Sequence[NDArray[np.int64]]],
    *,
    block_size: int,
    device: torch.device,
) -> Iterator[DraftPass]:
    """Lay out the passes that feed the frontier nodes of the requests' trees, one per depth from 1 on.

    Args:
        block_tables: one per request, covering the slots of all these nodes.
        root_positions: int64 [requests].
        feeds: per request and depth the nodes, ascending; node ``i`` is written to slot ``root position + 1 + i``. A request is
            part of the passes down to its last depth.
        block_size: tokens per KV block.
        device: where the model runs.
    """
    all_tables = pad_block_tables(block_tables)
    for depth in range(1, max(map(len, feeds)) + 1):
        going_on = [i for i, feed in enumerate(feeds) if len(feed) >= depth]
        is_all = len(going_on) == len(feeds)
        roots, table = (root_positions, all_tables) if is_all else (root_positions[going_on], all_tables[going_on])
        nodes = [feeds[i][depth - 1] for i in going_on]
        query_start_loc = _prefix_sums(np.array([len(each) for each in nodes]))
        owners = np.repeat(np.arange(len(nodes)), np.diff(query_start_loc))
        slots = roots[owners] + 1 + np.concatenate(nodes)
        positions = roots[owners] + depth
        yield DraftPass(
            torch.from_numpy(positions).to(device),
            torch.from_numpy(table[owners, slots // block_size] * block_size + slots % block_size).to(device),
            torch.arange(len(owners), device=device),
            AttentionLayout(
                query_start_loc=query_start_loc,
                seq_lens=roots + 2 + np.array([each[-1] for each in nodes]),
                block_table=table,
                tree_starts=roots + 1,
                positions=positions,
                visible_lens=roots[owners] + 1,
                ancestor_bits=torch.zeros(len(owners), dtype=torch.int64, device=device),
                block_size=block_size,
            ),
        )

"""The ragged batch: prefill chunks, decodes and root+tree segments of all requests side by side, without padding.

Legend: T = query tokens of the batch, R = requests (segments), L = rows that need logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from titan.core.attention_layout import AttentionLayout, Int
from titan.core.device_trees import GrownNodes, TreeOutline
from titan.core.trees import EMPTY_TREE, DraftTree, query_rows


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The query tokens of one request in one pass of one model.

    Committed tokens ``token_ids`` at positions ``start .. start+len-1`` come first. With a tree, the last of them is
    the root and the nodes from ``first_node`` on follow it; nodes before ``first_node`` are in the cache already, and so is the
    root then. ``root_position`` is where the tree hangs: the position (and slot) of the root; any number without nodes.
    """

    block_ids: list[int]
    start: int
    token_ids: Sequence[int]
    tree: DraftTree | TreeOutline = EMPTY_TREE
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
    logits_start_loc: Int  # [R + 1], prefix sums of logits rows per request
    attention: AttentionLayout
    grown: GrownNodes | None = None  # queries whose tokens, bits and depths the device alone knows


def build_batch(segments: Sequence[Segment], *, block_size: int) -> RaggedBatch:
    """Lay the segments out one after another, on the host; a runner brings them to its device.

    Args:
        segments: one per request, each with at least one query token.
        block_size: tokens per KV block.
    """
    token_ids: list[int] = []
    query_lens, logits_lens, tree_starts = [], [], []
    pieces, origins = [], []  # what follows from the shapes of committed tokens and trees, and the slots that it is counted from
    for segment in segments:
        num_committed, tree, first, root = len(segment.token_ids), segment.tree, segment.first_node, segment.root_position
        num_nodes = tree.num_nodes - first
        token_ids += segment.token_ids
        if num_nodes:
            token_ids += tree.token_ids[first:].tolist()
            if num_committed > 1:
                pieces.append(_committed_rows(num_committed - 1))
                origins.append(segment.start)
            pieces.append(tree.query_rows if num_committed else tree.query_rows[:, 1 + first :])
            origins.append(root)
        else:
            pieces.append(_committed_rows(num_committed))
            origins.append(segment.start)
        tree_starts.append(root + 1 if num_nodes and not tree.is_chain else 0)
        query_lens.append(num_committed + num_nodes)
        logits_lens.append(num_nodes + (num_committed > 0) if segment.needs_logits else 0)
    query_start_loc, logits_start_loc = _prefix_sums(query_lens), _prefix_sums(logits_lens)
    num_tokens, num_rows = len(token_ids), int(logits_start_loc[-1])
    table = pad_block_tables([segment.block_ids for segment in segments])
    rows = np.concatenate(pieces, 1)
    rows[:3] += np.repeat(origins, [piece.shape[1] for piece in pieces])
    slots, positions, visible_lens, ancestor_bits = rows
    owners = np.repeat(np.arange(len(segments)), query_lens)

    if num_rows == num_tokens:
        logits_rows = np.arange(num_tokens)
    else:
        num_skipped = query_start_loc[1:] - logits_start_loc[1:]  # up to the logits of each request, which are its last rows
        logits_rows = np.arange(num_rows) + np.repeat(num_skipped, logits_lens)
    return RaggedBatch(
        token_ids=torch.from_numpy(np.array(token_ids)),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(_physical(table, owners, slots, block_size)),
        logits_rows=torch.from_numpy(logits_rows),
        logits_start_loc=logits_start_loc,
        attention=AttentionLayout(
            query_start_loc=query_start_loc,
            seq_lens=slots[query_start_loc[1:] - 1] + 1,
            block_table=table,
            tree_starts=np.array(tree_starts),
            positions=positions,
            visible_lens=visible_lens,
            ancestor_bits=torch.from_numpy(ancestor_bits),
            block_size=block_size,
        ),
    )


def _prefix_sums(counts: Sequence[int]) -> Int:
    """0 and the running sums of ``counts``: [n] -> int64 [n + 1]."""
    return np.array([0, *accumulate(counts)])


@lru_cache(maxsize=64)
def _committed_rows(count: int) -> Int:
    """`Topology.query_rows` of committed tokens, which are a chain, counted from the first of them: int64 [4, count]."""
    rows = query_rows(np.arange(count), None)
    rows.flags.writeable = False
    return rows


def _physical(table: Int, owners: Int, slots: Int, block_size: int) -> Int:
    """Where the slots of requests lie in the cache: int64 [n]."""
    blocks, offsets = np.divmod(slots, block_size)
    return table[owners, blocks] * block_size + offsets


def pad_block_tables(block_tables: Sequence[list[int]]) -> Int:
    """Block tables as rows of one array, int64 [R, longest table]; the tails repeat block 0 and are never read."""
    width = max(map(len, block_tables))
    return np.array([block_ids + [0] * (width - len(block_ids)) for block_ids in block_tables], np.int64)


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
        start_loc = attention.query_start_loc
        grown = GrownNodes(start_loc, token_ids, ancestor_bits, None)
        return RaggedBatch(token_ids, self.positions, self.slot_mapping, self.logits_rows, start_loc, attention, grown)


def build_draft_passes(
    block_tables: Sequence[list[int]],
    root_positions: Int,
    feeds: Sequence[Sequence[Int]],
    *,
    block_size: int,
) -> Iterator[DraftPass]:
    """Lay out the passes that feed the frontier nodes of the requests' trees, one per depth from 1 on, on the host.

    Args:
        block_tables: one per request, covering the slots of all these nodes.
        root_positions: int64 [requests].
        feeds: per request and depth the nodes, ascending; node ``i`` is written to slot ``root position + 1 + i``. A request is
            part of the passes down to its last depth.
        block_size: tokens per KV block.
    """
    num_depths = max(map(len, feeds))
    if not num_depths:
        return
    table = pad_block_tables(block_tables)
    counts = [[len(feed[depth]) if depth < len(feed) else 0 for feed in feeds] for depth in range(num_depths)]
    # all depths at once, one after the other
    owners = np.repeat(np.tile(np.arange(len(feeds)), num_depths), np.array(counts).ravel())
    depths = np.repeat(np.arange(1, num_depths + 1), [sum(of_depth) for of_depth in counts])
    nodes = np.concatenate([feed[depth] for depth in range(num_depths) for feed in feeds if depth < len(feed)])
    roots = root_positions[owners]
    slots = roots + 1 + nodes
    positions, visible_lens = roots + depths, roots + 1
    slot_mapping = torch.from_numpy(_physical(table, owners, slots, block_size))
    positions_tensor = torch.from_numpy(positions)
    bits = torch.zeros(len(owners), dtype=torch.int64)
    end = 0
    for of_depth in counts:
        going_on = [i for i, count in enumerate(of_depth) if count]
        query_start_loc = _prefix_sums([of_depth[i] for i in going_on])
        start, end = end, end + int(query_start_loc[-1])
        rows = slice(start, end)
        some = slice(None) if len(going_on) == len(feeds) else going_on
        yield DraftPass(
            positions_tensor[rows],
            slot_mapping[rows],
            torch.arange(end - start),
            AttentionLayout(
                query_start_loc=query_start_loc,
                seq_lens=slots[rows][query_start_loc[1:] - 1] + 1,
                block_table=table[some],
                tree_starts=root_positions[some] + 1,
                positions=positions[rows],
                visible_lens=visible_lens[rows],
                ancestor_bits=bits[rows],
                block_size=block_size,
            ),
        )

"""The ragged batch: prefill chunks, decodes and root+tree queries of all requests side by side, without padding.

Legend: T query tokens, R requests, L rows that need logits, N tree nodes among the query tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.trees import DraftTrees


class QueryRow(NamedTuple):
    """The committed tokens of one request in one pass of one model: ``token_ids`` at positions ``start, start + 1, ...``."""

    block_ids: Sequence[int]
    start: int
    token_ids: Sequence[int]
    needs_logits: bool = True  # for the last token, and for the nodes of the tree below it
    prompt_logits: range = range(0)  # indices into token_ids of earlier tokens that need logits too


class NodeQueries(NamedTuple):
    """The tree nodes of a batch, which are the last queries of their requests; their tokens may be known on the device alone."""

    start_loc: Ints  # [R + 1], prefix sums of the nodes per request
    token_ids: Tensor  # int64 [N]; -1 in an empty place
    ancestor_bits: Tensor  # int64 [N]
    depths: Tensor | None  # int64 [N]; None: the positions in the batch are right already


class NodePlaces(NamedTuple):
    """Destinations of the nodes of a batch in its arrays: int64 [N] each."""

    rows: Ints  # indices among the query tokens
    roots: Ints  # positions of the roots, for nodes that have depths
    masks: Ints  # masks of the ancestor bits: -1 in a tree; 0 in a chain, where nodes see all slots before them


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayout:
    """The slots that each query token sees; arrays are int64, contiguous, and on the host.

    A query token sees the slots below its ``visible_len``, and slot ``tree_start + j`` of its request for each bit ``j`` of its
    ancestor bits. A sliding window applies to positions: of the slots before the tree, it hides those at or below ``position -
    window``; of a node and its ancestors, it shows the nearest ``window``.
    """

    query_start_loc: Ints  # [R + 1], prefix sums of query lengths
    seq_lens: Ints  # [R], slots that the queries of a request may attend to
    block_table: Ints  # [R, blocks], physical block ids
    tree_starts: Ints  # [R], slot of node 0; 0 without a tree, or with a chain
    positions: Ints  # [T], rope positions: root position + depth for tree nodes
    visible_lens: Ints  # [T]
    ancestor_bits: Ints  # [T]
    block_size: int


@dataclass(frozen=True, slots=True, eq=False)
class RaggedBatch:
    """All inputs of one forward pass, passed explicitly to the runner.

    Tokens, ancestor bits and depths of tree nodes are in ``nodes``. In the other arrays, nodes have token 0, no bits, and the
    positions of a chain, until the runner fills in the real values, on the host or on its device.
    """

    token_ids: Ints  # [T]
    slot_mapping: Ints  # [T], block * block_size + offset
    logits_rows: Ints  # [L], ascending, query tokens whose logits are computed
    logits_start_loc: Ints  # [R + 1], prefix sums of logits rows per request, without rows for prompt logprobs
    attention: AttentionLayout
    nodes: NodeQueries | None = None
    prompt_logits: Ints | None = None  # ascending, rows of the logits for prompt logprobs; None: there are none

    def node_places(self) -> NodePlaces:
        """Return the destinations of the nodes; the batch must have some."""
        assert self.nodes is not None, "called for batches with nodes"
        layout, start_loc = self.attention, self.nodes.start_loc
        counts = start_loc[1:] - start_loc[:-1]
        owners = np.arange(len(counts)).repeat(counts)
        return NodePlaces(
            np.arange(len(owners)) + (layout.query_start_loc[1:] - start_loc[1:])[owners],
            (layout.seq_lens - counts - 1)[owners],
            -(layout.tree_starts[owners] > 0).astype(np.int64),
        )


def build_batch(rows: Sequence[QueryRow], trees: DraftTrees | None = None, *, block_size: int) -> RaggedBatch:
    """Concatenate rows into a batch on the host; a runner copies it to its device.

    Args:
        rows: one per request, each with at least one token.
        trees: one per row; the last token of a row is its root, and the KV of the nodes follows that of the root.
        block_size: tokens per KV block.
    """
    block_tables, *columns = zip(*rows, strict=True)
    return join_rows(pad_block_tables(block_tables), *columns, trees=trees, block_size=block_size)


def join_rows(
    table: Ints,
    first_positions: Sequence[int],
    row_tokens: Sequence[Sequence[int]],
    needs_logits: Sequence[bool],
    row_prompt_logits: Sequence[range] = (),
    *,
    trees: DraftTrees | None = None,
    block_size: int,
) -> RaggedBatch:
    """Build a batch as `build_batch` does, from the columns of its rows.

    Args:
        table: [R, blocks], as made by `pad_block_tables`.
        first_positions: position of each row's first token, R of them.
        row_tokens: committed tokens of each row, R lists.
        needs_logits: whether the last token of each row, and its nodes, need logits, R of them.
        row_prompt_logits: indices of each row's earlier tokens that need logits too; empty: none do.
        trees: as for `build_batch`.
        block_size: tokens per KV block.
    """
    num_committed = np.array([*map(len, row_tokens)])
    starts = np.array(first_positions)
    has_nodes = trees is not None and trees.num_nodes > 0
    counts = trees.counts if trees is not None and has_nodes else np.zeros(len(row_tokens), np.int64)
    query_lens = num_committed + counts
    query_start_loc = prefix_sums(query_lens)
    num_tokens = int(query_start_loc[-1])
    owners = np.arange(len(starts)).repeat(query_lens)
    slots = np.arange(num_tokens) + (starts - query_start_loc[:-1])[owners]
    visible_lens = slots + 1
    tree_starts = np.zeros(len(starts), np.int64)
    committed = [*chain.from_iterable(row_tokens)]
    if trees is None or not has_nodes:
        token_ids, nodes = np.array(committed), None
    else:
        is_node = np.arange(num_tokens) >= (query_start_loc[:-1] + num_committed)[owners]
        token_ids = np.zeros(num_tokens, np.int64)
        token_ids[~is_node] = committed
        tree_starts = np.where((counts > 0) & ~trees.is_chain, starts + num_committed, 0)
        starts_of_tokens = tree_starts[owners]
        visible_lens = np.where(is_node & (starts_of_tokens > 0), starts_of_tokens, visible_lens)
        nodes = NodeQueries(trees.start_loc, trees.nodes.token_ids, trees.nodes.ancestor_bits, trees.nodes.depths)

    logits_lens = np.where(needs_logits, counts + 1, 0)
    logits_start_loc = prefix_sums(logits_lens)
    num_skipped = query_start_loc[1:] - logits_start_loc[1:]  # rows without logits, up to the last rows of each request
    logits_rows = np.arange(int(logits_start_loc[-1])) + num_skipped.repeat(logits_lens)
    prompt_logits = None
    if any(row_prompt_logits):
        of_rows = zip(query_start_loc.tolist(), row_prompt_logits, strict=False)
        of_prompts = np.array([first + index for first, indices in of_rows for index in indices])
        logits_rows = np.sort(np.append(logits_rows, of_prompts))
        prompt_logits = np.flatnonzero(np.isin(logits_rows, of_prompts))
    return RaggedBatch(
        token_ids=token_ids,
        slot_mapping=physical_slots(table, owners, slots, block_size),
        logits_rows=logits_rows,
        logits_start_loc=logits_start_loc,
        attention=AttentionLayout(
            query_start_loc=query_start_loc,
            seq_lens=starts + query_lens,
            block_table=table,
            tree_starts=tree_starts,
            positions=slots,
            visible_lens=visible_lens,
            ancestor_bits=np.zeros(num_tokens, np.int64),
            block_size=block_size,
        ),
        nodes=nodes,
        prompt_logits=prompt_logits,
    )


def prefix_sums(counts: Sequence[int] | Ints) -> Ints:
    """Return 0 and the running sums of ``counts``: [n] -> int64 [n + 1]."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.add.accumulate(counts, out=sums[1:])  # as np.cumsum does, in half the time
    return sums


def physical_slots(table: Ints, owners: Ints, slots: Ints, block_size: int) -> Ints:
    """Map slots of requests to slots of the cache: int64 [n].

    Args:
        table: [R, blocks], as made by `pad_block_tables`.
        owners: [n], the request of each slot.
        slots: [n], counted within their requests.
        block_size: tokens per KV block.
    """
    blocks, offsets = np.divmod(slots, block_size)
    return table[owners, blocks] * block_size + offsets


def pad_block_tables(block_tables: Sequence[Sequence[int]]) -> Ints:
    """Pad block tables to rows of one array, int64 [R, longest table]; the padding is block 0 and is never read."""
    lengths = [*map(len, block_tables)]
    padding = memoryview(bytes(8 * max(lengths)))
    parts: list[array[int] | memoryview] = []
    for block_ids, length in zip(block_tables, lengths, strict=True):
        parts.append(block_ids if isinstance(block_ids, array) else array("q", block_ids))
        parts.append(padding[8 * length :])
    return np.frombuffer(bytearray().join(parts), np.int64).reshape(len(lengths), -1)  # twice as fast as assignments to rows

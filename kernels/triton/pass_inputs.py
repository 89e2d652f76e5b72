"""Inputs of a pass on the device: uploaded in one copy, and padded if a CUDA graph requires it.

Padded requests have queries of length 0. Padded tokens come after the queries of all requests and are written to no slot.

Legend: T query tokens and R requests, padded ones included.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.batch import RaggedBatch
from titan.kernels.interfaces import PassInputs
from titan.kernels.triton.attention_plan import DeviceLayout
from titan.kernels.triton.cuda_graphs import PassSize
from titan.kernels.triton.upload import upload

MAX_PACKED_BYTES_PER_TOKEN = 64
MAX_PACKED_BYTES_PER_REQUEST = 16
MAX_PADDING = 256
"""The three bound the bytes that the packed arrays of a batch take; see `_packed_arrays`."""

BLOCK_TABLE = 8
"""Index of the block table among these arrays."""


def size_of(batch: RaggedBatch) -> PassSize:
    """Return the shapes of a batch without padding."""
    query_start_loc = batch.attention.query_start_loc
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    return PassSize(len(batch.attention.positions), len(query_lens), int(query_lens.max()))


def upload_rows(batch: RaggedBatch, device: torch.device) -> Tensor | None:
    """Return the rows that need logits, int64 [L]; ``None`` if these are all rows of the batch."""
    rows = batch.logits_rows
    return None if len(rows) == len(batch.attention.positions) else upload([rows], device)[0]


def upload_inputs(batch: RaggedBatch, device: torch.device, max_short_query: int) -> PassInputs:
    """Upload a batch to new memory, without padding.

    Args:
        batch: on the host, except for its nodes.
        device: where the model is.
        max_short_query: queries up to this length are attended as verifications; longer ones as prefill chunks, unless they end
            in a branching tree.
    """
    size = size_of(batch)
    tensors = upload(_packed_arrays(batch, size), device)
    _place_nodes(batch, tensors)
    short_query_len = _short_query_len(batch, max_short_query)
    logits_rows = upload_rows(batch, device)
    return _inputs(tensors, batch.attention.block_size, tensors[BLOCK_TABLE], short_query_len, size.max_query_len, logits_rows)


class StaticInputs:
    """Inputs that have fixed addresses for each size, as a CUDA graph needs them; all rows get logits.

    Args:
        device: where the model is.
        largest: most tokens, requests and tokens per request.
        num_blocks: most blocks in a request's table.
    """

    def __init__(self, device: torch.device, largest: PassSize, num_blocks: int) -> None:
        self.device = device
        num_bytes = largest.num_tokens * MAX_PACKED_BYTES_PER_TOKEN + MAX_PADDING
        num_bytes += largest.num_requests * (MAX_PACKED_BYTES_PER_REQUEST + 4 * num_blocks)
        self.packed = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.block_table = torch.zeros(largest.num_requests, num_blocks, dtype=torch.int32, device=device)

    def have_room_for(self, batch: RaggedBatch) -> bool:
        """Whether the batch's block tables are short enough."""
        return bool(batch.attention.block_table.shape[1] <= self.block_table.shape[1])

    def fill(self, batch: RaggedBatch, size: PassSize) -> PassInputs:
        """Upload a batch, padded to a size that holds it, to the memory of that size."""
        tensors = upload(_packed_arrays(batch, size), self.device, into=self.packed)
        _place_nodes(batch, tensors)
        num_requests, num_blocks = batch.attention.block_table.shape
        self.block_table[:num_requests, :num_blocks].copy_(tensors[BLOCK_TABLE])
        block_table = self.block_table[: size.num_requests]
        return _inputs(tensors, batch.attention.block_size, block_table, size.max_query_len, size.max_query_len, None)


def _packed_arrays(batch: RaggedBatch, size: PassSize) -> list[NDArray[np.int64] | NDArray[np.int32]]:
    """Return the arrays of a batch in the order that `_inputs` expects, padded to ``size``, except for the block table.

    If there are nodes, three more arrays say where they belong.
    """
    layout = batch.attention
    num_tokens, num_requests, _ = size

    def padded(values: Ints, length: int, dtype: type[np.int64] | type[np.int32], filler: int = 0) -> NDArray[np.int64]:
        array = np.full(length, filler, dtype)
        array[: len(values)] = values
        return array  # type: ignore[return-value]

    def known(values: Ints) -> Ints:
        """Return the values, or none of them for a pass of nodes alone, as those of a draft are: the device knows them all."""
        return values[:0] if batch.nodes is not None and int(batch.nodes.start_loc[-1]) == len(values) else values

    arrays: list[NDArray[np.int64] | NDArray[np.int32]] = [
        padded(known(batch.token_ids), num_tokens, np.int64),
        padded(known(layout.ancestor_bits), num_tokens, np.int64),
        padded(layout.positions, num_tokens, np.int64),
        padded(batch.slot_mapping, num_tokens, np.int64, -1),
        padded(layout.visible_lens, num_tokens, np.int32),
        padded(layout.query_start_loc, num_requests + 1, np.int32, len(layout.positions)),
        padded(layout.seq_lens, num_requests, np.int32),
        padded(layout.tree_starts, num_requests, np.int32),
        layout.block_table.astype(np.int32),
    ]
    return arrays if batch.nodes is None else [*arrays, *batch.node_places()]


def _inputs(
    tensors: list[Tensor],
    block_size: int,
    block_table: Tensor,
    short_query_len: int,
    max_query_len: int,
    logits_rows: Tensor | None,
) -> PassInputs:
    token_ids, ancestor_bits, positions, slot_mapping, visible_lens, query_start_loc, seq_lens, tree_starts = tensors[:BLOCK_TABLE]
    layout = DeviceLayout(
        block_size=block_size,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=block_table,
        positions=positions,
        visible_lens=visible_lens,
        tree_starts=tree_starts,
        ancestor_bits=ancestor_bits,
        short_query_len=short_query_len,
        max_query_len=max_query_len,
    )
    return PassInputs(token_ids, positions, slot_mapping, logits_rows, layout)


def _place_nodes(batch: RaggedBatch, tensors: list[Tensor]) -> None:
    """Write the nodes, which may be known to the device alone, to the places that the host has reserved for them."""
    if (nodes := batch.nodes) is None:
        return
    (token_ids, ancestor_bits, positions), (rows, roots, masks) = tensors[:3], tensors[-3:]
    token_ids.index_copy_(0, rows, nodes.token_ids.clamp(min=0))  # empty places have token -1
    ancestor_bits.index_copy_(0, rows, nodes.ancestor_bits & masks)
    if nodes.depths is not None:
        positions.index_copy_(0, rows, roots + nodes.depths)


def _short_query_len(batch: RaggedBatch, max_short_query: int) -> int:
    """Return the length of the longest query of a verification, or of a prefill chunk with a branching tree after it."""
    layout = batch.attention
    query_lens = np.diff(layout.query_start_loc)
    is_short = query_lens <= max_short_query
    has_nodes = layout.tree_starts > 0  # of a tree that is not a chain
    return int(query_lens[is_short | has_nodes].max(initial=1))

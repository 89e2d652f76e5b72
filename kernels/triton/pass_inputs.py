"""Inputs of a pass on the device: uploaded in one copy, and padded if a CUDA graph requires it.

Padded requests have queries of length 0. Padded tokens come after the queries of all requests and are written to no slot.

Legend: T query tokens and R requests, padded ones included.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.batch import NodeQueries, RaggedBatch
from titan.kernels.interfaces import PassInputs
from titan.kernels.triton.attention_plan import DeviceLayout
from titan.kernels.triton.cuda_graphs import PassSize
from titan.kernels.triton.upload import aligned, upload

MAX_PACKED_BYTES_PER_TOKEN = 64
MAX_PACKED_BYTES_PER_REQUEST = 16
MAX_PADDING = 256
"""The three bound the bytes that `PackedInputs` take."""


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
    packed = PackedInputs(*upload(_packed_arrays(batch, size), device))
    short_query_len, block_size = _short_query_len(batch, max_short_query), batch.attention.block_size
    inputs = _inputs(packed, size, packed.block_table, block_size, short_query_len, upload_rows(batch, device))
    _place_nodes(batch.nodes, packed, inputs)
    return inputs


class PackedInputs(NamedTuple):
    """What is uploaded of a batch: few tensors, as each takes the host time. Rows of the first and third are aligned."""

    of_tokens: Tensor  # int64 [4, T or more]: token ids, ancestor bits, positions, slot mapping
    visible_lens: Tensor  # int32 [T]
    of_requests: Tensor  # int32 [3, R + 1 or more]: query start locations, sequence lengths, starts of trees
    block_table: Tensor  # int32 [requests of the batch, blocks]
    node_places: Tensor | None = None  # int64 [3, N], see `titan.core.batch.NodePlaces`; None: there are no nodes


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
        self._inputs: dict[PassSize, PassInputs] = {}  # views of this memory

    def have_room_for(self, batch: RaggedBatch) -> bool:
        """Whether the batch's block tables are short enough."""
        return bool(batch.attention.block_table.shape[1] <= self.block_table.shape[1])

    def fill(self, batch: RaggedBatch, size: PassSize) -> PassInputs:
        """Upload a batch, padded to a size that holds it, to the memory of that size."""
        packed = PackedInputs(*upload(_packed_arrays(batch, size), self.device, into=self.packed))
        if size not in self._inputs:
            block_table, block_size = self.block_table[: size.num_requests], batch.attention.block_size
            self._inputs[size] = _inputs(packed, size, block_table, block_size, size.max_query_len, None)
        num_requests, num_blocks = packed.block_table.shape
        self.block_table[:num_requests, :num_blocks].copy_(packed.block_table)
        _place_nodes(batch.nodes, packed, self._inputs[size])
        return self._inputs[size]


def _packed_arrays(batch: RaggedBatch, size: PassSize) -> list[NDArray[Any]]:
    """Return the arrays of `PackedInputs`, padded to ``size``."""
    layout = batch.attention
    num_tokens = len(layout.positions)
    of_tokens = np.zeros((4, aligned(8 * size.num_tokens) // 8), np.int64)
    if batch.nodes is None or int(batch.nodes.start_loc[-1]) < num_tokens:  # else the device knows all tokens, as those of a draft
        of_tokens[0, :num_tokens], of_tokens[1, :num_tokens] = batch.token_ids, layout.ancestor_bits
    of_tokens[2, :num_tokens], of_tokens[3, :num_tokens] = layout.positions, batch.slot_mapping
    of_tokens[3, num_tokens:] = -1
    visible_lens = np.zeros(size.num_tokens, np.int32)
    visible_lens[:num_tokens] = layout.visible_lens
    num_requests = len(layout.seq_lens)
    of_requests = np.zeros((3, aligned(4 * size.num_requests + 4) // 4), np.int32)
    of_requests[0, :num_requests], of_requests[0, num_requests:] = layout.query_start_loc[:-1], num_tokens
    of_requests[1, :num_requests], of_requests[2, :num_requests] = layout.seq_lens, layout.tree_starts
    arrays: list[NDArray[Any]] = [of_tokens, visible_lens, of_requests, layout.block_table.astype(np.int32)]
    return arrays if batch.nodes is None else [*arrays, np.array(batch.node_places())]


def _inputs(
    packed: PackedInputs, size: PassSize, block_table: Tensor, block_size: int, short_query_len: int, logits_rows: Tensor | None
) -> PassInputs:
    token_ids, ancestor_bits, positions, slot_mapping = packed.of_tokens[:, : size.num_tokens].unbind()
    query_start_loc, seq_lens, tree_starts = packed.of_requests[:, : size.num_requests + 1].unbind()
    layout = DeviceLayout(
        block_size=block_size,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens[:-1],
        block_table=block_table,
        positions=positions,
        visible_lens=packed.visible_lens,
        tree_starts=tree_starts[:-1],
        ancestor_bits=ancestor_bits,
        short_query_len=short_query_len,
        max_query_len=size.max_query_len,
    )
    return PassInputs(token_ids, positions, slot_mapping, logits_rows, layout)


def _place_nodes(nodes: NodeQueries | None, packed: PackedInputs, inputs: PassInputs) -> None:
    """Write the nodes, which may be known to the device alone, to the places that the host has reserved for them."""
    if nodes is None or packed.node_places is None:
        return
    rows, roots, masks = packed.node_places
    inputs.token_ids.index_copy_(0, rows, nodes.token_ids.clamp(min=0))  # empty places have token -1
    inputs.attention.ancestor_bits.index_copy_(0, rows, nodes.ancestor_bits & masks)
    if nodes.depths is not None:
        inputs.positions.index_copy_(0, rows, roots + nodes.depths)


def _short_query_len(batch: RaggedBatch, max_short_query: int) -> int:
    """Return the length of the longest query of a verification, or of a prefill chunk with a branching tree after it."""
    layout = batch.attention
    query_lens = np.diff(layout.query_start_loc)
    is_short = query_lens <= max_short_query
    has_nodes = layout.tree_starts > 0  # of a tree that is not a chain
    return int(query_lens[is_short | has_nodes].max(initial=1))

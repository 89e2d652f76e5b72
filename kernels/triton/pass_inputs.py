"""Inputs of a pass on the device: uploaded in one copy, and padded if a CUDA graph requires it.

Padded requests have queries of length 0. Padded tokens come after the queries of all requests and are written to no slot.

Legend: T query tokens and R requests, padded ones included.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.batch import NodeQueries, RaggedBatch
from titan.kernels.interfaces import PassInputs
from titan.kernels.triton.attention_plan import DeviceLayout
from titan.kernels.triton.cuda_graphs import PassSize
from titan.kernels.triton.upload import TORCH_DTYPES, aligned, allocate_staging, upload


def size_of(batch: RaggedBatch) -> PassSize:
    """Return the shapes of a batch without padding."""
    query_start_loc = batch.attention.query_start_loc
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    return PassSize(len(batch.attention.positions), len(query_lens), int(query_lens.max()))


def upload_rows(batch: RaggedBatch, device: torch.device) -> Tensor | None:
    """Return the rows that need logits, int64 [L]; ``None`` if these are all rows of the batch."""
    rows = _needed_rows(batch)
    return None if rows is None else upload([rows], device)[0]


def _needed_rows(batch: RaggedBatch) -> Ints | None:
    return None if len(batch.logits_rows) == len(batch.attention.positions) else batch.logits_rows


def upload_inputs(batch: RaggedBatch, device: torch.device, max_short_query: int) -> PassInputs:
    """Upload a batch to new memory, without padding.

    Args:
        batch: on the host, except for its nodes.
        device: where the model is.
        max_short_query: queries up to this length are attended as verifications; longer ones as prefill chunks, unless they end
            in a branching tree.
    """
    size, rows = size_of(batch), _needed_rows(batch)
    host = np.empty(_record(size).itemsize, np.uint8)
    _pack(batch, size, host)
    arrays: list[NDArray[Any]] = [host, batch.attention.block_table.astype(np.int32), *([] if rows is None else [rows])]
    data, block_table, *logits_rows = upload(arrays, device)
    packed, num_short = PackedInputs.of(data, size), short_query_len(batch, max_short_query)
    inputs = _inputs(packed, size, block_table, batch.attention.block_size, num_short, *logits_rows)
    _place_nodes(batch.nodes, packed, inputs)
    return inputs


class PackedInputs(NamedTuple):
    """What is uploaded of a batch besides its block tables: few tensors, as each takes the host time. Their rows are aligned."""

    of_tokens: Tensor  # int64 [4, T or more]: token ids, ancestor bits, positions, slot mapping
    visible_lens: Tensor  # int32 [T or more]
    of_requests: Tensor  # int32 [3, R + 1 or more]: query start locations, sequence lengths, starts of trees
    node_places: Tensor  # int64 [3, T or more], see `titan.core.batch.NodePlaces`; those of N nodes come first

    @classmethod
    def of(cls, packed: Tensor, size: PassSize) -> PackedInputs:
        """Return views of bytes on the device."""
        fields = [_record(size)[name] for name in cls._fields]
        starts = [0, *accumulate([field.itemsize for field in fields])]
        pieces = [packed[start : start + field.itemsize] for start, field in zip(starts, fields, strict=False)]
        return cls(*(piece.view(TORCH_DTYPES[each.base]).view(each.shape) for piece, each in zip(pieces, fields, strict=True)))


@lru_cache(maxsize=1024)
def _record(size: PassSize) -> np.dtype[Any]:
    """Return the layout of `PackedInputs` in memory."""
    of_tokens, of_requests = aligned(8 * size.num_tokens) // 8, aligned(4 * size.num_requests + 4) // 4
    return np.dtype(
        [
            ("of_tokens", np.int64, (4, of_tokens)),
            ("visible_lens", np.int32, (aligned(4 * size.num_tokens) // 4,)),
            ("of_requests", np.int32, (3, of_requests)),
            ("node_places", np.int64, (3, of_tokens)),
        ]
    )


class BlockTables:
    """Block tables at a fixed address, as CUDA graphs need them: one for all models of an engine, whose passes come in turn."""

    def __init__(self, num_requests: int, num_blocks: int, device: torch.device) -> None:
        self.tensor = torch.zeros(num_requests, num_blocks, dtype=torch.int32, device=device)
        self._held: Ints | None = None

    def holds(self, block_table: Ints) -> bool:
        """Whether the first rows are from this very array, which nobody may have changed since."""
        return block_table is self._held

    def load(self, block_table: Ints, uploaded: Tensor) -> None:
        """Copy block tables, which were uploaded as int32, to the first rows."""
        num_requests, num_blocks = block_table.shape
        self.tensor[:num_requests, :num_blocks].copy_(uploaded.view(num_requests, num_blocks))
        self._held = block_table


class StaticInputs:
    """Inputs that have fixed addresses for each size up to the largest, as a CUDA graph needs them; all rows get logits."""

    def __init__(self, largest: PassSize, tables: BlockTables) -> None:
        self.device = tables.tensor.device
        num_bytes = _record(largest).itemsize + tables.tensor.nbytes
        self.packed = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self._tables, self._max_short_query = tables, largest.max_query_len
        self._views: dict[PassSize, tuple[PackedInputs, PassInputs]] = {}  # of this memory

    def have_room_for(self, batch: RaggedBatch) -> bool:
        """Whether the batch's block tables are short enough."""
        return bool(batch.attention.block_table.shape[1] <= self._tables.tensor.shape[1])

    def fill(self, batch: RaggedBatch, size: PassSize) -> PassInputs:
        """Upload a batch, padded to a size that holds it, to the memory of that size."""
        if size not in self._views:
            packed, block_size = PackedInputs.of(self.packed, size), batch.attention.block_size
            num_short = min(size.max_query_len, self._max_short_query)
            inputs = _inputs(packed, size, self._tables.tensor[: size.num_requests], block_size, num_short)
            self._views[size] = packed, inputs
        packed, inputs = self._views[size]
        block_table, num_bytes = batch.attention.block_table, _record(size).itemsize
        num_table_bytes = 0 if self._tables.holds(block_table) else 4 * block_table.size
        staging = allocate_staging(num_bytes + num_table_bytes, self.device)
        host, uploaded = staging.numpy(), self.packed[: len(staging)]
        _pack(batch, size, host[:num_bytes])
        if num_table_bytes:
            host[num_bytes:].view(np.int32)[:] = block_table.ravel()
        uploaded.copy_(staging, non_blocking=True)
        if num_table_bytes:
            self._tables.load(block_table, uploaded[num_bytes:].view(torch.int32))
        _place_nodes(batch.nodes, packed, inputs)
        return inputs


def _pack(batch: RaggedBatch, size: PassSize, host: NDArray[np.uint8]) -> None:
    """Write the bytes of `PackedInputs`, padded to ``size``."""
    layout, num_tokens, arrays = batch.attention, len(batch.attention.positions), host.view(_record(size))
    of_tokens, visible_lens, of_requests, node_places = (arrays[name][0] for name in PackedInputs._fields)
    columns = batch.token_ids, layout.ancestor_bits, layout.positions, batch.slot_mapping
    for row, column in zip(of_tokens, columns, strict=True):
        row[:num_tokens] = column
    of_tokens[:3, num_tokens:] = 0
    of_tokens[3, num_tokens:] = -1
    visible_lens[:num_tokens], visible_lens[num_tokens:] = layout.visible_lens, 0
    num_requests = len(layout.seq_lens)
    of_requests[0, :num_requests], of_requests[0, num_requests:] = layout.query_start_loc[:-1], num_tokens
    of_requests[1, :num_requests], of_requests[2, :num_requests] = layout.seq_lens, layout.tree_starts
    of_requests[1:, num_requests:] = 0
    if batch.nodes is not None:
        for row, places in zip(node_places, batch.node_places(), strict=True):
            row[: len(places)] = places


def _inputs(
    packed: PackedInputs,
    size: PassSize,
    block_table: Tensor,
    block_size: int,
    short_query_len: int,
    logits_rows: Tensor | None = None,
) -> PassInputs:
    token_ids, ancestor_bits, positions, slot_mapping = packed.of_tokens[:, : size.num_tokens].unbind()
    query_start_loc, seq_lens, tree_starts = packed.of_requests[:, : size.num_requests + 1].unbind()
    layout = DeviceLayout(
        block_size=block_size,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens[:-1],
        block_table=block_table,
        positions=positions,
        visible_lens=packed.visible_lens[: size.num_tokens],
        tree_starts=tree_starts[:-1],
        ancestor_bits=ancestor_bits,
        short_query_len=short_query_len,
        max_query_len=size.max_query_len,
    )
    return PassInputs(token_ids, positions, slot_mapping, logits_rows, layout)


def _place_nodes(nodes: NodeQueries | None, packed: PackedInputs, inputs: PassInputs) -> None:
    """Write the nodes, which may be known to the device alone, to the places that the host has reserved for them."""
    if nodes is None:
        return
    rows, roots, masks = packed.node_places[:, : len(nodes.token_ids)].unbind()
    inputs.token_ids.index_copy_(0, rows, nodes.token_ids.clamp(min=0))  # empty places have token -1
    inputs.attention.ancestor_bits.index_copy_(0, rows, nodes.ancestor_bits & masks)
    if nodes.depths is not None:
        inputs.positions.index_copy_(0, rows, roots + nodes.depths)


def short_query_len(batch: RaggedBatch, max_short_query: int) -> int:
    """Return the length of the longest query of a verification, or of a prefill chunk with a branching tree after it."""
    layout = batch.attention
    query_lens = np.diff(layout.query_start_loc)
    is_short = query_lens <= max_short_query
    has_nodes = layout.tree_starts > 0  # of a tree that is not a chain
    return int(query_lens[is_short | has_nodes].max(initial=1))

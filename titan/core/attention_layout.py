"""Which slots each query token of a ragged batch sees: what every implementation of tree attention is planned from.

Visible to a query row are the slots below its ``visible_len``, and slot ``tree_start + j`` of its request for every bit ``j`` of
its ancestor bits. A sliding window goes by position: it hides slots before the tree at or below ``position - window``, and all
but the nearest ``window`` of a node's ancestors, the node itself among them.

Legend: T query tokens, R requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int = NDArray[np.int64]
Window = int | None
"""How many positions a layer looks back, the token's own included; ``None`` = all."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayout:
    """One ragged batch; arrays are int64, contiguous, and on the host."""

    query_start_loc: Int  # [R + 1], prefix sums of query lengths
    seq_lens: Int  # [R], slots that the queries of a request may look at
    block_table: Int  # [R, blocks], physical block ids
    tree_starts: Int  # [R], slot of node 0
    positions: Int  # [T], rope positions
    visible_lens: Int  # [T]
    ancestor_bits: Tensor  # int64 [T], on the device of the model
    block_size: int


def nearest_ancestors(ancestor_bits: Tensor, window: Window) -> Tensor:
    """Keep the highest ``window`` bits set, which are the nearest ancestors, since parents come before children.

    Args:
        ancestor_bits: int64 [T].
        window: of the layer.
    """
    bits = ancestor_bits
    if window is None or window >= 64:
        return bits
    kept = torch.zeros_like(bits)
    for _ in range(window):
        highest = _highest_bit(bits)
        kept, bits = kept | highest, bits & ~highest
    return kept


def _highest_bit(bits: Tensor) -> Tensor:
    """The highest bit set of each number, 0 where there is none; bit 63 is the sign and never set."""
    for shift in (1, 2, 4, 8, 16, 32):
        bits = bits | (bits >> shift)
    return bits ^ (bits >> 1)

"""Draft trees that lie on the device: what the kernels that choose, place and verify nodes hand to each other."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TreeNodes(NamedTuple):
    """N nodes, one tree after the other; within a tree a parent comes before its children.

    The host knows beforehand how many nodes a tree has, not whether there are as many tokens. Where there are not, the last places
    of the tree are **empty**: nobody's children, so that nothing is ever accepted there.
    """

    token_ids: Tensor  # int64 [N]; -1 = empty
    parents: Tensor  # int32 [N], index within the tree; -1 = the root, -2 = none, of an empty place
    depths: Tensor  # int64 [N], from 1 on; 1 of an empty place
    ancestor_bits: Tensor  # int64 [N], of a node itself and its ancestors; of itself alone in an empty place
    scores: Tensor  # float32 [N], cumulative log-probabilities; -inf of an empty place
    draft_slots: Tensor  # int32 [N], where the draft's KV is, counted from the slot behind the root; -1 = nowhere


NODE_DTYPES = (torch.int64, torch.int32, torch.int64, torch.int64, torch.float32, torch.int32)
"""Of these columns."""


def allocate_nodes(num_nodes: int, device: torch.device) -> TreeNodes:
    """Room for that many nodes."""
    return TreeNodes(*(torch.empty(num_nodes, dtype=dtype, device=device) for dtype in NODE_DTYPES))

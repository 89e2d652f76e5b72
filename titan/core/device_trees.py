"""Draft trees that lie on the device while a step verifies them: the host knows how many nodes they have, and little more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from titan.core.trees import EMPTY_TREE, MAX_NODES, DraftTree, query_rows
from titan.kernels.triton.tree_nodes import TreeNodes

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TreeOutline:
    """What the host knows of a tree on the device. In the layout of a batch it keeps the places of the nodes.

    ``is_chain`` where it is known that each node hangs at the one before it; ``has_scores`` where the draft chose the nodes by
    their scores; ``is_drawn`` where it drew their tokens.
    """

    num_nodes: int
    is_chain: bool = False
    has_scores: bool = False
    is_drawn: bool = False

    @property
    def token_ids(self) -> Ints:
        """What stands for the tokens: int64 [num_nodes]."""
        return _zeros(self.num_nodes)

    @property
    def query_rows(self) -> Ints:
        """As a tree's, with zeros for ancestor bits and with upper bounds of the depths, of which the last is that of all."""
        return _query_rows(self.num_nodes, self.is_chain)


@dataclass(frozen=True, slots=True, eq=False)
class GrownNodes:
    """The last queries of the requests of a batch, R of them, where they are nodes that were grown on the device, N of them."""

    node_start_loc: Ints  # [R + 1], prefix sums of the nodes per request
    token_ids: Tensor  # int64 [N]
    ancestor_bits: Tensor  # int64 [N]
    depths: Tensor | None  # int64 [N]; None: the host knows the positions


@dataclass(frozen=True, eq=False)
class DeviceTrees:
    """The trees of a step, one per row of its plan."""

    outlines: list[TreeOutline]
    nodes: TreeNodes  # of all rows, N of them
    # of the trees that were drawn alone: the distributions q that children were drawn from, float32 [any, vocab]; and which of them
    # belongs to each root and node, int32, per tree that of the root, then those of its nodes; anything where there are no children
    draft_probs: Tensor | None = None
    draft_rows: Tensor | None = None

    @cached_property
    def node_start_loc(self) -> Ints:
        """Prefix sums of the nodes per row: int64 [rows + 1]."""
        return np.cumsum([0, *(outline.num_nodes for outline in self.outlines)])

    @property
    def grown(self) -> GrownNodes:
        """The nodes as queries of a batch that has the rows of the plan as its requests."""
        return GrownNodes(self.node_start_loc, self.nodes.token_ids, self.nodes.ancestor_bits, self.nodes.depths)

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """What `on_host` is to be given, from the device."""
        return self.nodes.token_ids, self.nodes.parents, self.nodes.scores, self.nodes.draft_slots

    def on_host(self, columns: Sequence[NDArray[Any]]) -> list[DraftTree]:
        """The trees without their empty places, and without q, which stays where it is.

        Args:
            columns: `columns`, brought to the host.
        """
        token_ids, parents, scores, draft_slots = columns
        trees = []
        for outline, first in zip(self.outlines, self.node_start_loc.tolist(), strict=False):
            num_nodes = int(np.count_nonzero(token_ids[first : first + outline.num_nodes] >= 0))
            nodes = slice(first, first + num_nodes)
            tree = DraftTree(
                token_ids[nodes],
                parents[nodes],
                draft_slots=draft_slots[nodes],
                scores=scores[nodes] if outline.has_scores else None,
            )
            trees.append(tree if num_nodes else EMPTY_TREE)
        return trees


Proposal = list[DraftTree] | DeviceTrees
"""What a drafter returns: a tree per row of the plan, or trees that it has grown on the device and left there."""


def outlines_of(trees: Proposal) -> Sequence[DraftTree | TreeOutline]:
    """What the host knows of the trees, one per row of the plan."""
    return trees.outlines if isinstance(trees, DeviceTrees) else trees


@lru_cache(maxsize=MAX_NODES + 1)
def _zeros(length: int) -> Ints:
    return _frozen(np.zeros(length, np.int64))


@lru_cache(maxsize=2 * MAX_NODES + 2)
def _query_rows(num_nodes: int, is_chain: bool) -> Ints:
    return _frozen(query_rows(np.arange(num_nodes + 1), None if is_chain else _zeros(num_nodes)))


def _frozen(array: Ints) -> Ints:
    array.flags.writeable = False  # shared by all outlines of the length
    return array

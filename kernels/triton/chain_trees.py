"""Trees that hang along chains, and what the host knows of them before any token is drafted.

A greedy chain is its most likely tokens, a sampled one what was sampled. A beam of width one feeds the most likely tokens, too, and
considers their siblings, with scores. In a step with such beams, greedy chains are the first of the siblings found; in one with
sampled chains, they are sampled at temperature 0. Siblings along a sampled chain are sampled once it is complete: they are leaves,
and no pass depends on them. Beams and sampled chains are not mixed.

Legend: n chains; k children of each node that is fed; D depths of the deepest tree; N nodes of all trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.arrays import Flags, Ints
from titan.core.batch import prefix_sums
from titan.core.growth import BeamSpec, Feed, GrowthSpec, ShapePlan, ShapeSpec
from titan.core.sampling_params import SamplingParams
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import DraftTrees, NodeColumns
from titan.kernels.interfaces import Candidates

GREEDY = SamplingParams(temperature=0.0)


class Chains(NamedTuple):
    """What the host knows of n chains: [n] each, those that go on for longest first."""

    rows: Ints  # of the plan
    roots: Ints  # positions
    num_fed: Ints  # nodes that are fed
    num_nodes: Ints  # places of the trees
    is_greedy: Flags
    is_sampled: Flags  # else, unless it is greedy, a beam
    temperatures: NDArray[np.float32]  # of beams; 1 for a chain
    num_children: int  # k
    # how the tokens of chains are sampled, those that follow the roots first; None: no chain is
    sampling: SamplingRows | None
    plans: Sequence[ShapePlan]  # of all trees if any sampled one has siblings, else none

    @property
    def num_probs(self) -> int:
        """Number of q that tokens are sampled from: of each sampled chain's root and of the nodes that are fed."""
        return int(((1 + self.num_fed) * self.is_sampled).sum())

    @classmethod
    def of(cls, feeds: Sequence[Feed], roots: Ints) -> Chains:
        """Collect the chains of feeds with a spec, whose roots have these positions; beams have equal numbers of children."""
        specs = [feed.spec for feed in feeds if feed.spec is not None]
        is_sampled = np.array([*map(is_sampled_chain, specs)])
        firsts = zip(specs, (roots + 1).tolist(), strict=True)
        sampled = [(spec.params or GREEDY, spec.seed, first) for spec, first in firsts if isinstance(spec, ShapeSpec)]
        plans = [spec.plan for spec in specs if isinstance(spec, ShapeSpec)]
        return cls(
            rows=np.array([feed.row for feed in feeds]),
            roots=roots,
            num_fed=np.array([spec.num_slots for spec in specs]),
            num_nodes=np.array([spec.num_nodes for spec in specs]),
            is_greedy=np.array([isinstance(spec, ShapeSpec) for spec in specs]) & ~is_sampled,
            is_sampled=is_sampled,
            temperatures=np.array([spec.temperature if isinstance(spec, BeamSpec) else 1 for spec in specs], np.float32),
            num_children=next((spec.num_children for spec in specs if isinstance(spec, BeamSpec)), 1),
            sampling=SamplingRows.of(sampled) if is_sampled.any() else None,
            plans=[] if all(plan.shape.is_chain for plan in plans) else plans,
        )


def children_per_node(spec: GrowthSpec) -> int:
    """Return the number of children found after each node while a chain grows: 1 if no others are; 0 for any other tree.

    A beam whose growth may end before its depth counts as another tree.
    """
    if isinstance(spec, BeamSpec):
        return spec.num_children if spec.width == 1 and spec.worth is None else 0
    if is_sampled_chain(spec):  # with any siblings, if one node is fed at each depth: the others are leaves
        return int(len(spec.plan.feeds) == spec.num_slots)
    return int(isinstance(spec, ShapeSpec) and spec.plan.shape.is_chain)


def is_sampled_chain(spec: GrowthSpec) -> bool:
    """Whether the tokens along a chain are sampled."""
    return isinstance(spec, ShapeSpec) and spec.params is not None


def node_columns(chains: Chains) -> list[NDArray[Any]]:
    """Return what the host knows of the nodes of greedy chains, tree by tree in the order of the plan: six arrays of [N].

    The first are indices of their tokens in a table [D, n], the others are parents and so on as in `NodeColumns`.
    """
    order = np.argsort(chains.rows)
    counts = chains.num_nodes[order]
    above = np.arange(counts.sum()) - np.repeat(prefix_sums(counts)[:-1], counts)  # nodes above each one
    is_leaf = above == np.repeat(counts, counts) - 1
    return [
        above * len(order) + np.repeat(order, counts),
        (above - 1).astype(np.int32),
        above + 1,
        ~(np.int64(-2) << above),
        np.zeros(len(above), np.float32),
        np.where(is_leaf, -1, above).astype(np.int32),
    ]


def greedy_trees(chains: Chains, num_rows: int, drafted: Tensor, columns: Sequence[Tensor]) -> DraftTrees:
    """Return greedy chains with tokens int64 [1, D, n, 1]; ``columns`` are those of `node_columns`."""
    index, *others = columns
    counts, nothing = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.bool_)
    counts[chains.rows] = chains.num_nodes
    nodes = NodeColumns(drafted.view(-1).index_select(0, index), *others)
    return DraftTrees(prefix_sums(counts), counts > 0, nothing, nothing, nodes)


def child_columns(chains: Chains) -> Sequence[NDArray[Any]]:
    """Return what the host knows of the children of all nodes that are fed, and of the roots.

    These are, as in `Candidates`, parent slots and slots; and whether there is no such child in the tree: [n, D * k] each. The
    last is whether the tree is a greedy chain, [n, 1].
    """
    return _child_columns(chains.num_fed.tobytes(), chains.is_greedy.tobytes(), chains.num_children)


@lru_cache(maxsize=64)  # of many steps they are the same
def _child_columns(num_fed_bytes: bytes, is_greedy_bytes: bytes, k: int) -> tuple[NDArray[Any], ...]:
    num_fed = np.frombuffer(num_fed_bytes, np.int64)[:, None, None]
    is_greedy = np.frombuffer(is_greedy_bytes, np.bool_)[:, None, None]
    above, ranks = np.arange(1 + num_fed[0, 0, 0])[:, None], np.arange(k)  # nodes above each child, and siblings before it
    parent_slots = np.broadcast_to(above - 1, (len(num_fed), len(above), k))
    slots = np.where((ranks == 0) & (above < num_fed), above, -1)
    is_missing = (above > num_fed) | (is_greedy & (ranks > 0))
    return *(column.reshape(len(num_fed), -1) for column in (parent_slots, slots, is_missing)), is_greedy[:, 0]


def candidates(chains: Chains, drafted: Tensor, columns: Sequence[Tensor], probs: Tensor | None) -> Candidates:
    """Return the children found, int64 [2, D, n, k], as candidates.

    Args:
        chains: of a step.
        drafted: tokens, and the bits of their scores.
        columns: those of `child_columns`.
        probs: the q of sampled chains, whose rows are those of `probs_rows`.
    """
    parent_slots, slots, is_missing, is_greedy = columns
    token_ids, bits = drafted.transpose(1, 2).contiguous().flatten(2)
    scores = bits.int().view(torch.float32).masked_fill(is_greedy, 0.0).masked_fill(is_missing, float("-inf"))
    is_chain = chains.is_greedy | chains.is_sampled
    return Candidates(
        rows=chains.rows,
        num_nodes=chains.num_nodes,
        is_chain=is_chain,
        has_scores=~is_chain,
        token_ids=token_ids,
        scores=scores,
        parent_slots=parent_slots,
        slots=slots,
        probs=probs,
        probs_rows=None if probs is None else probs_rows(chains),
    )


def probs_rows(chains: Chains) -> Ints:
    """Return the rows where each chain's q are, of its root and the nodes below it, as in `Candidates`: [n, D]."""
    rows = prefix_sums((1 + chains.num_fed) * chains.is_sampled)[:-1, None] + np.arange(1 + chains.num_fed[0])
    return np.where(chains.is_sampled[:, None], rows, -1)

"""Trees that hang along chains, and what the host knows of them before any token is drafted.

A greedy chain is its most likely tokens, a sampled one what was sampled. A beam of width one feeds the most likely tokens, too, and
considers their siblings, with scores. In a step with such beams, greedy chains are the first of the siblings found; in one with
sampled chains, they are sampled at temperature 0. Siblings along a sampled chain are sampled once it is complete: they are leaves,
and no pass depends on them. Beams and sampled chains are not mixed.

Legend: n chains of a plan of R rows; k children of each node that is fed; D depths of the deepest tree; N nodes of all trees.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from titan.core.trees import DraftTrees, GrowthReport, NodeColumns, allocate_nodes
from titan.kernels.interfaces import Candidates
from titan.kernels.triton.tree_select import select_trees

GREEDY = SamplingParams(temperature=0.0)


class Chains(NamedTuple):
    """What the host knows of n chains: [n] each, those that go on for longest first."""

    rows: Ints  # of the plan
    start_loc: Ints  # [R + 1], prefix sums of the places of the plan's trees
    roots: Ints  # positions
    num_fed: Ints  # nodes that are fed
    num_nodes: Ints  # places of the trees
    is_greedy: Flags
    is_sampled: Flags  # else, unless it is greedy, a beam
    temperatures: NDArray[np.float64]  # of beams; 1 for a chain
    num_children: int  # k
    # how the tokens of chains are sampled, those that follow the roots first; None: no chain is
    sampling: SamplingRows | None
    plans: Sequence[ShapePlan]  # of all trees if any sampled one has siblings, else none

    @property
    def num_probs(self) -> int:
        """Number of q that tokens are sampled from: of each sampled chain's root and of the nodes that are fed."""
        return int(((1 + self.num_fed) * self.is_sampled).sum())

    @classmethod
    def of(cls, feeds: Sequence[Feed], roots: Ints, num_rows: int) -> Chains:
        """Collect the chains of feeds with a spec, whose roots have these positions; beams have equal numbers of children."""
        specs = [feed.spec for feed in feeds if feed.spec is not None]
        num_fed, num_nodes, is_greedy, is_sampled, temperatures = map(np.array, zip(*map(_facts, specs), strict=True))
        shapes = [spec for spec in specs if isinstance(spec, ShapeSpec)] if is_sampled.any() else []  # beside these, no beams
        sampled = [(spec.params or GREEDY, spec.seed, root + 1) for spec, root in zip(shapes, roots.tolist(), strict=False)]
        plans = [spec.plan for spec in shapes]
        rows, counts = np.array([feed.row for feed in feeds]), np.zeros(num_rows, np.int64)
        counts[rows] = num_nodes
        return cls(
            rows=rows,
            start_loc=prefix_sums(counts),
            roots=roots,
            num_fed=num_fed,
            num_nodes=num_nodes,
            is_greedy=is_greedy,
            is_sampled=is_sampled,
            temperatures=temperatures,
            num_children=next((spec.num_children for spec in specs if isinstance(spec, BeamSpec)), 1),
            sampling=SamplingRows.of(sampled) if shapes else None,
            plans=[] if all(plan.shape.is_chain for plan in plans) else plans,
        )


def _facts(spec: GrowthSpec) -> tuple[int, int, bool, bool, float]:
    """Return the five fields of `Chains` from `num_fed` to `temperatures` for one chain."""
    if isinstance(spec, BeamSpec):
        return spec.num_slots, spec.num_nodes, False, False, spec.temperature
    return spec.num_slots, spec.num_nodes, spec.params is None, spec.params is not None, 1.0


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

    The first are indices of their tokens in a table [n, D], the others are parents and so on as in `NodeColumns`.
    """
    order = np.argsort(chains.rows)
    counts = chains.num_nodes[order]
    above = np.arange(counts.sum()) - np.repeat(prefix_sums(counts)[:-1], counts)  # nodes above each one
    is_leaf = above == np.repeat(counts, counts) - 1
    return [
        np.repeat(order * (1 + chains.num_fed[0]), counts) + above,
        (above - 1).astype(np.int32),
        above + 1,
        ~(np.int64(-2) << above),
        np.zeros(len(above), np.float32),
        np.where(is_leaf, -1, above).astype(np.int32),
    ]


def greedy_trees(chains: Chains, drafted: Tensor, columns: Sequence[Tensor], growth: GrowthReport) -> DraftTrees:
    """Return greedy chains with tokens int64 [1, n, D, 1]; ``columns`` are those of `node_columns`."""
    index, *others = columns
    is_chain = chains.start_loc[1:] > chains.start_loc[:-1]
    nothing = np.zeros(len(is_chain), np.bool_)
    nodes = NodeColumns(drafted.view(-1).index_select(0, index), *others)
    return DraftTrees(chains.start_loc, is_chain, nothing, nothing, nodes, growth=growth)


def child_columns(chains: Chains) -> list[NDArray[Any]]:
    """Return what the host knows of the children of all nodes that are fed, and of the roots.

    These are, as in `Candidates`, parent slots and slots; whether their scores are known, and these: [n, D * k] each. Then where
    the nodes of each tree begin, and how many places they have: int32 [n] each. If chains are sampled, the last is the
    `draft_rows` of `DraftTrees`.
    """
    n, num_fed, is_greedy = len(chains.rows), chains.num_fed[:, None, None], chains.is_greedy[:, None, None]
    above, ranks = np.arange(1 + chains.num_fed[0])[:, None], np.arange(chains.num_children)  # nodes above each, siblings before it
    parent_slots = np.broadcast_to(above - 1, (n, len(above), len(ranks)))
    slots = np.where((ranks == 0) & (above < num_fed), above, -1)
    is_missing = (above > num_fed) | (is_greedy & (ranks > 0))
    scores = np.where(is_missing, -np.inf, 0).astype(np.float32)
    first_nodes = chains.start_loc[chains.rows]
    return [
        *(column.reshape(n, -1) for column in (parent_slots, slots, is_missing | is_greedy, scores)),
        first_nodes.astype(np.int32),
        chains.num_nodes.astype(np.int32),
        *([] if chains.sampling is None else [_draft_rows(chains, first_nodes + chains.rows)]),
    ]


def _draft_rows(chains: Chains, firsts: Ints) -> NDArray[np.int32]:
    """Return `DraftTrees.draft_rows` of sampled chains, whose entries begin at ``firsts``: [n]."""
    counts = 1 + chains.num_nodes
    owners = np.repeat(np.arange(len(counts)), counts)
    depths = np.arange(len(owners)) - prefix_sums(counts)[owners]  # 0 for the root
    found = np.zeros(int(chains.start_loc[-1]) + len(chains.start_loc) - 1, np.int32)
    found[firsts[owners] + depths] = probs_rows(chains)[owners, np.minimum(depths, chains.num_fed[owners])]
    return found


def scored_trees(
    chains: Chains, drafted: Tensor, columns: Sequence[Tensor], probs: Tensor | None, growth: GrowthReport
) -> DraftTrees:
    """Choose trees from the children found.

    Args:
        chains: of a step.
        drafted: int64 [2, n, D, k], tokens, and the bits of their scores.
        columns: those of `child_columns`.
        probs: the q of sampled chains, whose rows are those of `probs_rows`.
        growth: of the trees.
    """
    parent_slots, slots, is_known, known_scores, first_nodes, num_nodes, *draft_rows = columns
    token_ids, bits = drafted.flatten(2)
    scores = torch.where(is_known, known_scores, bits.int().view(torch.float32))
    is_chain = chains.is_greedy | chains.is_sampled
    found = Candidates(chains.rows, chains.num_nodes, is_chain, ~is_chain, token_ids, scores, parent_slots, slots)
    nodes = allocate_nodes(int(chains.start_loc[-1]), token_ids.device)
    select_trees(found, first_nodes, num_nodes, nodes)
    flags = np.zeros((3, len(chains.start_loc) - 1), np.bool_)
    flags[:, chains.rows] = is_chain, chains.is_sampled, ~is_chain
    return DraftTrees(chains.start_loc, flags[0], flags[1], flags[2], nodes, probs, draft_rows[0] if draft_rows else None, growth)


def probs_rows(chains: Chains) -> Ints:
    """Return the rows where each chain's q are, of its root and the nodes below it, as in `Candidates`: [n, D]."""
    rows = prefix_sums((1 + chains.num_fed) * chains.is_sampled)[:-1, None] + np.arange(1 + chains.num_fed[0])
    return np.where(chains.is_sampled[:, None], rows, -1)

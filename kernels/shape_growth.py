"""Growth of draft trees of given shapes: see `ShapeGrowth`.

Legend: n requests of a growth, V vocabulary of the trees, I inner nodes of all trees, r of them at a depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.growth import Feed, ShapePlan, ShapeSpec
from titan.core.sampling_rows import SamplingRows
from titan.kernels.interfaces import Backend, Candidates


class ShapeLevel(NamedTuple):
    """The inner nodes at one depth of all shapes: [r] each."""

    places: Tensor  # int64, indices among the I inner nodes of all trees, tree by tree
    sources: Tensor  # int64, indices of their tokens in the flattened table of children
    ancestor_bits: Tensor  # int64
    owners: Ints  # indices of their requests
    num_children: Ints


class ShapeGrowth:
    """Fills given shapes, each node with the next most likely or the next sampled token: a `titan.kernels.growth.Growth`.

    Args:
        feeds: n feeds with shape specs, either all sampled or none.
        logits: [n, V], of their roots.
        backend: the one that the draft runs on.
    """

    gain = first_scores = None  # a shape is filled at any cost, and its nodes have no scores

    def __init__(self, feeds: Sequence[Feed], logits: Tensor, backend: Backend) -> None:
        specs = [feed.spec for feed in feeds if isinstance(feed.spec, ShapeSpec)]
        self.rows = np.array([feed.row for feed in feeds])
        self._backend = backend
        self._plans = [spec.plan for spec in specs]
        self._starts = [0, *accumulate(plan.inner.shape[1] for plan in self._plans)]  # index of each request's first inner node
        self._max_children = max(plan.max_children for plan in self._plans)
        pairs = zip(specs, feeds, strict=True)
        sampled = [(spec.params, spec.seed, feed.root + 1) for spec, feed in pairs if spec.params is not None]
        self._sampling = SamplingRows.of(sampled) if sampled else None
        self._levels = self._make_levels()
        num_inner = self._starts[-1]
        self._children = logits.new_full((num_inner, self._max_children), -1, dtype=torch.int64)  # -1 where there is none
        self._probs = logits.new_empty((num_inner, logits.shape[1]), dtype=torch.float32) if sampled else None
        self.extend(0, logits)

    @property
    def fed_slots(self) -> list[tuple[Ints, ...]]:
        """Slots where nodes are fed: see `titan.kernels.growth.Growth`."""
        return [plan.feeds for plan in self._plans]

    def frontier(self, depth: int) -> tuple[Tensor, Tensor]:
        level = self._levels[depth]
        return self._children.view(-1).index_select(0, level.sources).clamp_(min=0), level.ancestor_bits

    def extend(self, depth: int, logits: Tensor) -> None:
        level = self._levels[depth]
        if self._sampling is None or self._probs is None:
            count = min(int(level.num_children.max()), logits.shape[1])
            if count == 1:
                self._children[level.places, 0] = self._backend.sampling.argmax(logits).clamp_(min=0)
                return
            best = logits.topk(count, dim=-1)
            self._children[level.places, :count] = best.indices.where(best.values > float("-inf"), -1)
            return
        rows = self._sampling.take(level.owners).shifted(depth)
        self._backend.sampling.sample_children(logits, rows, level.num_children, level.places, self._probs, self._children)

    def candidates(self) -> Candidates:
        """Return all nodes as candidates; see `shape_candidates`."""
        found = shape_candidates(self.rows, self._plans, self._children, self._backend)
        if self._probs is None:
            return found
        probs_rows = np.zeros((len(self._plans), 1 + found.token_ids.shape[1]), np.int64)
        for i, (plan, start) in enumerate(zip(self._plans, self._starts, strict=False)):
            probs_rows[i, : 1 + len(plan.parents)] = start + plan.shape.inner_rows
        return replace(found, probs=self._probs, probs_rows=probs_rows)

    def _make_levels(self) -> list[ShapeLevel]:
        owners = np.repeat(np.arange(len(self._plans)), [plan.inner.shape[1] for plan in self._plans])
        starts = np.array(self._starts)[owners]
        depths, parents, ranks, bits, num_children = np.concatenate([plan.inner for plan in self._plans], 1)
        places = np.argsort(depths, kind="stable")
        sources = (starts + parents) * self._max_children + ranks
        of_levels = np.split(places, np.cumsum(np.bincount(depths))[:-1])
        # an array per level and column: kernels read the ancestor bits, and slices of one array would not be aligned
        columns = iter(self._backend.upload([column for level in of_levels for column in (level, sources[level], bits[level])]))
        return [
            ShapeLevel(next(columns), next(columns), next(columns), owners=owners[level], num_children=num_children[level])
            for level in of_levels
        ]


def shape_candidates(rows: Ints, plans: Sequence[ShapePlan], children: Tensor, backend: Backend) -> Candidates:
    """Return all nodes of shapes as candidates; those that were left without a token, and their descendants, have score -inf.

    Args:
        rows: [n], of the plan.
        plans: of n shapes.
        children: int64 [I, any], the children of each inner node, shape by shape; -1 where there is none.
        backend: the one that they are on.
    """
    starts = accumulate((plan.inner.shape[1] for plan in plans), initial=0)  # index of each shape's first inner node
    num_nodes = np.array([len(plan.parents) for plan in plans])
    shape = len(plans), int(num_nodes.max())
    sources = np.zeros(shape, np.int64)
    parent_slots = np.full(shape, -1)
    slots = np.full(shape, -1)
    bits = np.full(shape, -1)  # past the end of a shape: ancestors that are never there
    for i, (plan, start) in enumerate(zip(plans, starts, strict=False)):
        nodes = slice(len(plan.parents))
        sources[i, nodes] = (start + plan.node_parents) * children.shape[1] + plan.shape.child_ranks
        parent_slots[i, nodes] = plan.parents
        slots[i, nodes] = plan.slots
        bits[i, nodes] = plan.shape.ancestor_bits
    powers = np.int64(1) << np.arange(shape[1])
    index, parents, fed, ancestors, powers_of_nodes = backend.upload([sources, parent_slots, slots, bits, powers])
    token_ids = children.view(-1).index_select(0, index.view(-1)).view(shape)
    there = ((token_ids >= 0) * powers_of_nodes).sum(1, keepdim=True)
    return Candidates(
        rows=rows,
        num_nodes=num_nodes,
        is_chain=np.array([plan.shape.is_chain for plan in plans]),
        has_scores=False,
        token_ids=token_ids,
        scores=torch.where((ancestors & ~there) == 0, 0.0, float("-inf")),
        parent_slots=parents,
        slots=fed,
    )

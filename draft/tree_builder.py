"""Growing draft trees, depth by depth, for several requests at once: which nodes are fed, and which tokens become nodes.

Three ways to grow, all fed by the same passes of the draft model. `ChainGrowth` follows the most likely token. `BeamGrowth` expands
the nodes with the greatest cumulative probability, as Li et al., "EAGLE-2", 2024; a beam of one node trades the far end of a
chain for siblings nearer the root. `ShapeGrowth` fills a shape that is known beforehand, with the most likely tokens or, for a
sampled proposal, with tokens drawn without replacement.

What a growth feeds at which depth is known on the host before the first pass; tokens and probabilities stay on the device until
all passes are done. Then `harvest` brings them to the host and makes trees of them there, or `candidates` leaves them where they
are, for `titan.draft.device_growth`.

Legend: n requests of a growth, V vocabulary, W beam width, k children looked at per node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.device_trees import TreeOutline
from titan.core.request import Request
from titan.core.trees import EMPTY_TREE, MAX_NODES, DraftTree, Parents
from titan.draft.device_growth import DeviceCandidates, chain_candidates, shape_candidates
from titan.draft.shapes import ShapePlan, chain_slots, main_path_order, shape_plan
from titan.kernels.torch.sampling import LazyProbs, argmax_rows, best_children, draw_children_compiled, draw_siblings
from titan.kernels.upload import to_device, upload
from titan.sample.distributions import Purpose, SamplingRows, lazy_probs, philox_uniform, spread_options

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Frontier:
    """The nodes that a growth feeds at one depth, in the order of its requests."""

    token_ids: Tensor  # int64 [rows]
    ancestor_bits: Tensor  # int64 [rows], over the slots behind the root


class Growth(Protocol):
    """Trees of some requests while they grow."""

    @property
    def feeds(self) -> Sequence[Sequence[Ints]]:
        """Per request and depth, from 1 on: where the nodes of that depth are fed, counted from the slot behind the root."""
        ...

    def plant(self, logits: Tensor) -> None:
        """Take the logits of the roots, [n, V]."""
        ...

    def frontier(self, depth: int) -> Frontier:
        """The nodes to feed at that depth."""
        ...

    def grow(self, depth: int, logits: Tensor) -> None:
        """Take the logits of the nodes fed at that depth, [rows, V]."""
        ...

    def harvest(self) -> list[DraftTree]:
        """The trees, one per request."""
        ...

    def candidates(self) -> DeviceCandidates:
        """What `harvest` would choose the trees from, left on the device."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Tokens that may become nodes, of n requests: [n, c] each, parents before their children."""

    token_ids: Ints
    scores: NDArray[np.float32]  # cumulative log-probability under the draft; not finite where there is none
    parent_slots: Ints  # where the parent is fed; -1 for the root
    slots: Ints  # where the candidate itself is fed; -1 where it is not


def best_trees(candidates: Candidates, budgets: Sequence[int]) -> list[DraftTree]:
    """Of each request's candidates the best ancestor-closed set: those with the greatest cumulative probability.

    A child never scores above its parent, so that the best are ancestor-closed if, of equal ones, the earlier are taken:
    candidates must come parents first. This is also the slow twin of `titan.kernels.triton.tree_select`.

    Args:
        candidates: of n requests, by depth.
        budgets: most nodes of each request.
    """
    scores = np.where(np.isfinite(candidates.scores), candidates.scores, -np.inf)
    num_chosen = np.minimum(np.isfinite(scores).sum(1), budgets)
    order = np.argsort(-scores, axis=1, kind="stable")[:, : num_chosen.max(initial=0)]
    columns = (candidates.token_ids, candidates.parent_slots, candidates.slots, scores)
    token_ids, parent_slots, slots, scores = (np.take_along_axis(column, order, 1) for column in columns)
    # by slot the node that is fed there; the last entry is that of slot -1, the root's
    node_in_slot = np.zeros((len(order), candidates.slots.max(initial=-1) + 2), np.int32)
    np.put_along_axis(node_in_slot, slots, np.arange(order.shape[1], dtype=np.int32), 1)
    node_in_slot[:, -1] = -1
    parents, slots = np.take_along_axis(node_in_slot, parent_slots, 1), slots.astype(np.int32)
    trees = []
    for i, count in enumerate(num_chosen.tolist()):
        # the path of first children first, so that to accept it moves no KV
        nodes, shape = main_path_order(parents[i, :count].tobytes())
        trees.append(DraftTree(token_ids[i, nodes], shape, draft_slots=slots[i, nodes], scores=scores[i, nodes]))
    return trees


class ChainGrowth:
    """Follows the most likely token of each request.

    Args:
        depths: nodes of each request's chain, at least 1.
    """

    def __init__(self, depths: Sequence[int]) -> None:
        self.depths = np.array(depths)
        self._going_on: list[Tensor | None]  # by depth, from 1 on: the requests that feed a node of that depth; None if all do
        self._token_ids: list[Tensor] = []  # int64 [n] by depth, of all; stale where a chain has ended

    @property
    def feeds(self) -> list[list[Ints]]:
        return [list(np.arange(depth - 1)[:, None]) for depth in self.depths.tolist()]

    def plant(self, logits: Tensor) -> None:
        self._going_on = [
            None if depth < self.depths.min() else to_device(np.flatnonzero(self.depths > depth), logits.device)
            for depth in range(1, self.depths.max())
        ]
        self._token_ids.append(_best_tokens(logits))

    def frontier(self, depth: int) -> Frontier:
        index = self._going_on[depth - 1]
        token_ids = self._token_ids[-1] if index is None else self._token_ids[-1][index]
        return Frontier(token_ids, torch.full_like(token_ids, (1 << depth) - 1))

    def grow(self, depth: int, logits: Tensor) -> None:
        best, index = _best_tokens(logits), self._going_on[depth - 1]
        self._token_ids.append(best if index is None else self._token_ids[-1].index_copy(0, index, best))

    def harvest(self) -> list[DraftTree]:
        token_ids: Ints = torch.stack(self._token_ids, 1).cpu().numpy()
        chains = zip(token_ids, self.depths.tolist(), strict=True)
        return [DraftTree.chain(row[:n], draft_slots=chain_slots(n)) for row, n in chains]

    def candidates(self) -> DeviceCandidates:
        return chain_candidates(torch.stack(self._token_ids, 1), self.depths)


def _best_tokens(logits: Tensor) -> Tensor:
    """The most likely token of each row, any where logits are not finite: int64 [rows]."""
    return argmax_rows(logits).clamp_(min=0)


class BeamGrowth:
    """Expands, at each depth, the nodes with the greatest cumulative probability.

    Args:
        budgets: nodes of each request.
        depths: greatest depth of each request's nodes.
        width: nodes expanded per depth, W; a request feeds ``width * (depth - 1)`` nodes.
        num_children: tokens looked at behind each node, k, at least ``width`` and 2.
        temperatures: at which each request's probabilities are compared.
    """

    def __init__(
        self, budgets: Sequence[int], depths: Sequence[int], width: int, num_children: int, temperatures: Sequence[float]
    ) -> None:
        self.budgets = budgets
        self.depths = np.array(depths)
        self.width = width
        self.num_children = num_children
        self.temperatures = np.array(temperatures, np.float32)
        self._temperatures: Tensor  # the same on the device
        self._going_on: list[Tensor]  # int64 each, by depth, from 1 on: the requests that feed nodes of that depth
        # by depth, of all requests: the columns of Candidates, on the device
        self._levels: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._beam: Tensor  # int64 [n, W], the candidates of the last level that are fed
        self._bits: Tensor  # int64 [n, W], their ancestor bits

    @property
    def feeds(self) -> list[list[Ints]]:
        return [list(np.arange((depth - 1) * self.width).reshape(-1, self.width)) for depth in self.depths.tolist()]

    def plant(self, logits: Tensor) -> None:
        going_on = [np.flatnonzero(self.depths > depth) for depth in range(1, self.depths.max())]
        self._temperatures, *self._going_on = upload([self.temperatures, *going_on], logits.device)
        token_ids, scores = best_children(logits, self.num_children, self._temperatures)
        self._add_level(token_ids, scores, torch.full_like(token_ids, -1), torch.zeros_like(token_ids), depth=1)

    def frontier(self, depth: int) -> Frontier:
        index = self._going_on[depth - 1]
        token_ids = self._levels[-1][0]
        return Frontier(token_ids.gather(1, self._beam)[index].flatten(), self._bits[index].flatten())

    def grow(self, depth: int, logits: Tensor) -> None:
        index = self._going_on[depth - 1]
        n, width, k = len(self.budgets), self.width, self.num_children
        token_ids, logprobs = best_children(logits, k, self._temperatures[index].repeat_interleave(width))
        scores = torch.full((n, width * k), float("-inf"), device=logits.device)
        parent_scores = self._levels[-1][1].gather(1, self._beam)[index]
        scores[index] = (logprobs.reshape(-1, width, k) + parent_scores[:, :, None]).flatten(1)
        all_tokens = token_ids.new_zeros(n, width * k)
        all_tokens[index] = token_ids.reshape(-1, width * k)
        parent_slots = torch.arange((depth - 1) * width, depth * width, device=logits.device).repeat_interleave(k).expand(n, -1)
        self._add_level(all_tokens, scores, parent_slots, self._bits.repeat_interleave(k, dim=1), depth=depth + 1)

    def harvest(self) -> list[DraftTree]:
        token_ids, scores, parent_slots, slots = (torch.cat(column, 1) for column in zip(*self._levels, strict=True))
        integers = torch.stack((token_ids, parent_slots, slots)).cpu().numpy()
        return best_trees(Candidates(integers[0], scores.cpu().numpy(), integers[1], integers[2]), self.budgets)

    def candidates(self) -> DeviceCandidates:
        counts = self.num_children * (1 + self.width * (self.depths - 1))  # those of a request's own depths
        num_nodes = np.minimum(self.budgets, counts).tolist()
        token_ids, scores, parent_slots, slots = (torch.cat(column, 1) for column in zip(*self._levels, strict=True))
        outlines = [TreeOutline(n, has_scores=True) for n in num_nodes]
        return DeviceCandidates(token_ids, scores, parent_slots, slots, outlines)

    def _add_level(self, token_ids: Tensor, scores: Tensor, parent_slots: Tensor, parent_bits: Tensor, depth: int) -> None:
        """Add the candidates of a depth, [n, c] each, and choose which of them are fed."""
        self._beam = scores.topk(self.width, dim=-1).indices
        fed = torch.arange((depth - 1) * self.width, depth * self.width, device=scores.device).expand_as(self._beam)
        slots = torch.full_like(token_ids, -1).scatter(1, self._beam, fed)
        # what the deepest level would feed is never fed; its slots are nobody's parents
        self._bits = parent_bits.gather(1, self._beam) | (1 << fed.clamp(max=MAX_NODES - 1))
        is_last = to_device(self.depths <= depth, scores.device)[:, None]
        self._levels.append((token_ids, scores, parent_slots, slots.masked_fill(is_last, -1)))


@dataclass(frozen=True, slots=True, eq=False)
class ShapeLevel:
    """The inner nodes of one depth of all shapes: [r] each."""

    places: Tensor  # int64, among the I inner nodes of all trees, one tree after the other
    sources: Tensor  # int64, where their tokens are in the table of children
    ancestor_bits: Tensor  # int64
    owners: Ints  # their requests
    num_children: Ints


class ShapeGrowth:
    """Fills shapes that are given, each node with the next most likely token or with the next one drawn.

    Args:
        shapes: int32 parents of each request's tree, at least one node, the path of first children first.
        samplers: the n requests, if their tokens are drawn as they sample; ``None``: the most likely tokens.
    """

    def __init__(self, shapes: Sequence[Parents], samplers: Sequence[Request] | None) -> None:
        self.samplers = samplers
        self.plans = [shape_plan(parents.tobytes()) for parents in shapes]
        self.starts = [0, *accumulate(plan.inner.shape[1] for plan in self.plans)]  # of each request's inner nodes
        self._max_children = max(plan.max_children for plan in self.plans)
        self._rows: SamplingRows | None = None  # of the roots of those that draw
        self._levels: list[ShapeLevel]
        self._children: Tensor  # int64 [I, most children], -1 where there is none
        self._probs: Tensor  # float32 [I, V], for proposals that are drawn

    @property
    def feeds(self) -> list[tuple[Ints, ...]]:
        return [plan.feeds for plan in self.plans]

    def plant(self, logits: Tensor) -> None:
        self._levels = self._make_levels(logits.device)
        self._children = logits.new_full((self.starts[-1], self._max_children), -1, dtype=torch.int64)
        if self.samplers is not None:
            num_rows = len(self.samplers)
            self._rows = spread_options(self.samplers, np.ones(num_rows, np.int64), np.zeros(num_rows, np.int64))
            self._probs = logits.new_empty((self.starts[-1], logits.shape[1]), dtype=torch.float32)
        self.grow(0, logits)

    def frontier(self, depth: int) -> Frontier:
        level = self._levels[depth]
        return Frontier(self._children.view(-1).index_select(0, level.sources).clamp_(min=0), level.ancestor_bits)

    def grow(self, depth: int, logits: Tensor) -> None:
        level = self._levels[depth]
        if self._rows is None:
            count = min(int(level.num_children.max()), logits.shape[1])
            self._children[level.places, :count] = logits.topk(count, dim=-1).indices
            return
        seeds, positions = self._rows.seeds[level.owners], self._rows.positions[level.owners] + depth
        probs = lazy_probs(logits, self._rows, level.owners)
        draw_children(probs, seeds, positions, level.num_children, level.places, self._probs, self._children)

    def harvest(self) -> list[DraftTree]:
        children: Ints = self._children.cpu().numpy()
        trees = []
        for plan, (start, end) in zip(self.plans, pairwise(self.starts), strict=True):
            probs = None if self._rows is None else self._probs[start:end]
            trees.append(shaped_tree(plan, children[start + plan.node_parents, plan.ranks], probs))
        return trees

    def candidates(self) -> DeviceCandidates:
        return shape_candidates(self.plans, self.starts[:-1], self._children, None if self._rows is None else self._probs)

    def _make_levels(self, device: torch.device) -> list[ShapeLevel]:
        owners = np.repeat(np.arange(len(self.plans)), [plan.inner.shape[1] for plan in self.plans])
        starts = np.array(self.starts)[owners]
        _, depths, parents, ranks, bits, num_children = np.concatenate([plan.inner for plan in self.plans], 1)
        places = np.argsort(depths, kind="stable")
        sources = (starts + parents) * self._max_children + ranks
        of_levels = np.split(places, np.cumsum(np.bincount(depths))[:-1])
        # one array per level and column: kernels read the ancestor bits, and slices of one array would not be aligned
        columns = iter(upload([column for level in of_levels for column in (level, sources[level], bits[level])], device))
        return [
            ShapeLevel(next(columns), next(columns), next(columns), owners=owners[level], num_children=num_children[level])
            for level in of_levels
        ]


def shaped_tree(plan: ShapePlan, token_ids: Ints, probs: Tensor | None) -> DraftTree:
    """The tree of a shape.

    Args:
        plan: of the shape.
        token_ids: int64 [num_nodes]; -1, which leaves nodes out, where a draft has fewer possible tokens than the shape children.
        probs: float32 [num_inner, vocab], if the tokens were drawn.
    """
    if token_ids.min() >= 0:
        return DraftTree(token_ids, plan.parents, probs, plan.slots)
    kept = np.zeros(len(token_ids), bool)
    for node, parent in enumerate(plan.parents.tolist()):
        kept[node] = token_ids[node] >= 0 and (parent < 0 or kept[parent])
    if not kept.any():
        return EMPTY_TREE
    new_index = np.append(np.cumsum(kept) - 1, -1).astype(np.int32)  # the root stays -1
    if probs is not None:
        is_inner = np.isin(np.arange(len(probs)), plan.node_parents[kept])
        probs = probs[torch.from_numpy(is_inner).to(probs.device)]
    return DraftTree(token_ids[kept], new_index[plan.parents[kept]], probs, plan.slots[kept])


def draw_children(
    rows: LazyProbs,
    seeds: NDArray[np.uint64],
    positions: Ints,
    num_children: Ints,
    places: Tensor,
    probs: Tensor,
    children: Tensor,
) -> None:
    """Draw the children of inner nodes without replacement.

    Args:
        rows: the distributions of r inner nodes.
        seeds: uint64 [r].
        positions: int64 [r], of the tokens to be drawn.
        num_children: int64 [r].
        places: int64 [r], rows of the two tables below that belong to the nodes.
        probs: float32 [I, V], overwritten at ``places``.
        children: int64 [I, K], likewise, from the left; -1 where no token is left.
    """
    if draw_children_compiled(rows, seeds, positions, Purpose.DRAFT, num_children, places, probs, children):
        return
    written, count = rows.probs(), int(num_children.max())
    probs.index_copy_(0, places, written)
    uniform = philox_uniform(seeds[:, None], positions[:, None], Purpose.DRAFT, sibling=np.arange(count))
    children[places, :count] = draw_siblings(written, to_device(uniform, probs.device), to_device(num_children, probs.device))

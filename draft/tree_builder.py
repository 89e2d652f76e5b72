"""Growing draft trees, depth by depth, for several requests at once: which nodes are fed, and which tokens become nodes.

Three ways to grow, all fed by the same passes of the draft model. `ChainGrowth` follows the most likely token, and may trade the
far end of a chain for siblings nearer the root. `BeamGrowth` expands the nodes with the greatest cumulative probability, as Li et
al., "EAGLE-2", 2024. `ShapeGrowth` fills a shape that is known beforehand, with the most likely tokens or, for a sampled
proposal, with tokens drawn without replacement.

What a growth feeds at which depth is known on the host before the first pass; tokens and probabilities stay on the device until
all passes are done.

Legend: n requests of a growth, V vocabulary, W beam width, k children looked at per node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from titan.draft.shapes import chain_slots, in_main_path_order, inner_by_depth, main_path_first
from titan.kernels.row_sampling import argmax_rows, draw
from titan.kernels.upload import to_device
from titan.sampling import Purpose, SamplingRows, philox_uniform, target_probs
from titan.tree import EMPTY_TREE, MAX_NODES, DraftTree, Parents, topology

Ints = NDArray[np.int64]

NUM_COMPARED = 64
"""Tokens among which the children of a node are scored."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Tokens that may become nodes, of n requests: [n, c] each, parents before their children."""

    token_ids: Ints
    scores: NDArray[np.float32]  # cumulative log-probability under the draft; not finite where there is none
    parent_slots: Ints  # where the parent is fed; -1 for the root
    slots: Ints  # where the candidate itself is fed; -1 where it is not


def children_of(logits: Tensor, num_children: int, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely tokens behind each row: token ids int64 and log-probabilities float32, [rows, num_children] each.

    The probabilities are those among the `NUM_COMPARED` most likely tokens, which spares a pass over the vocabulary.

    Args:
        logits: [rows, V].
        num_children: at most `NUM_COMPARED`; where the vocabulary has fewer tokens, the rest has log-probability -inf.
        temperatures: float32 [rows, 1], at which the probabilities are meant.
    """
    best = logits.topk(min(NUM_COMPARED, logits.shape[1]), dim=-1)
    token_ids = best.indices[:, :num_children]
    logprobs = (best.values.float() / temperatures).log_softmax(-1)[:, :num_children]
    num_missing = num_children - logprobs.shape[1]
    if num_missing > 0:
        return pad(token_ids, (0, num_missing)), pad(logprobs, (0, num_missing), value=float("-inf"))
    return token_ids, logprobs


def best_trees(candidates: Candidates, budgets: Sequence[int]) -> list[DraftTree]:
    """Of each request's candidates the best ancestor-closed set: those with the greatest cumulative probability.

    A child never scores above its parent, so that the best are ancestor-closed if, of equal ones, the earlier are taken:
    candidates must come parents first.

    Args:
        candidates: of n requests, by depth.
        budgets: most nodes of each request.
    """
    scores = np.where(np.isfinite(candidates.scores), candidates.scores, -np.inf)
    order = np.argsort(-scores, axis=1, kind="stable")
    num_candidates = np.isfinite(scores).sum(1).tolist()
    trees = []
    for i, budget in enumerate(budgets):
        chosen = order[i, : min(budget, num_candidates[i])]
        parent_slots, slots = candidates.parent_slots[i, chosen].tolist(), candidates.slots[i, chosen].tolist()
        node_in_slot = {slot: node for node, slot in enumerate(slots) if slot >= 0} | {-1: -1}
        parents = np.array([node_in_slot[slot] for slot in parent_slots], np.int32)
        # the path of first children first, so that to accept it moves no KV
        chosen = chosen[np.array(main_path_first(parents.tobytes()), np.int64)]
        trees.append(
            DraftTree(
                candidates.token_ids[i, chosen],
                in_main_path_order(parents),
                draft_slots=candidates.slots[i, chosen].astype(np.int32),
                scores=scores[i, chosen],
            )
        )
    return trees


class ChainGrowth:
    """Follows the most likely token of each request; with siblings, takes the best nodes of the chain and beside it.

    Args:
        budgets: nodes of each request.
        depths: longest chain of each request, at most its budget.
        num_children: tokens looked at behind each node of the chain; 1 grows plain chains.
        temperatures: float32 [n], at which probabilities are compared.
    """

    def __init__(self, budgets: Sequence[int], depths: Sequence[int], num_children: int, temperatures: Tensor) -> None:
        self.feeds: list[list[Ints]] = [list(np.arange(depth - 1)[:, None]) for depth in depths]
        self.budgets = budgets
        self.depths = np.array(depths)
        self.num_children = num_children
        self.temperatures = temperatures
        self._logits: list[Tensor] = []  # by depth, of the requests that go on
        self._token_ids: list[Tensor] = []  # int64 [n] by depth, of all; stale where a chain has ended

    def plant(self, logits: Tensor) -> None:
        self._logits.append(logits)
        self._token_ids.append(_best_tokens(logits))

    def frontier(self, depth: int) -> Frontier:
        index = self._going_on(depth)
        token_ids = self._token_ids[-1] if index is None else self._token_ids[-1][index]
        return Frontier(token_ids, torch.full_like(token_ids, (1 << depth) - 1))

    def grow(self, depth: int, logits: Tensor) -> None:
        best, index = _best_tokens(logits), self._going_on(depth)
        self._logits.append(logits)
        self._token_ids.append(best if index is None else self._token_ids[-1].index_copy(0, index, best))

    def harvest(self) -> list[DraftTree]:
        if self.num_children > 1:
            return best_trees(self._candidates(), self.budgets)
        token_ids: NDArray[np.int64] = torch.stack(self._token_ids, 1).cpu().numpy()
        depths = self.depths.tolist()
        return [DraftTree.chain(row[:n], draft_slots=chain_slots(n)) for row, n in zip(token_ids, depths, strict=True)]

    def _going_on(self, depth: int) -> Tensor | None:
        """The requests that feed a node of that depth; ``None`` if all do."""
        is_going_on = self.depths > depth
        return None if is_going_on.all() else to_device(np.flatnonzero(is_going_on), self.temperatures.device)

    def _candidates(self) -> Candidates:
        num_depths, n, k = len(self._logits), len(self.budgets), self.num_children
        reached = np.arange(num_depths)[:, None] < self.depths  # [depths, n]
        temperatures = self.temperatures[to_device(reached.nonzero()[1], self.temperatures.device), None]
        children, logprobs = (each.cpu().numpy() for each in children_of(torch.cat(self._logits), k, temperatures))
        token_ids, scores = np.zeros((num_depths, n, k), np.int64), np.full((num_depths, n, k), -np.inf, np.float32)
        token_ids[reached], scores[reached] = children, logprobs
        # where logits tie, the first child is the one that was fed
        fed = torch.stack(self._token_ids).cpu().numpy()[:, :, None]
        token_ids = np.where(token_ids == fed, token_ids[:, :, :1], token_ids)
        token_ids[:, :, :1] = fed
        for depth in range(1, num_depths):
            scores[depth] += scores[depth - 1, :, :1]
        depths = np.arange(num_depths)[:, None, None]
        slots = np.full((num_depths, n, k), -1)
        slots[:, :, 0] = np.where(depths[:, :, 0] + 1 < self.depths, depths[:, :, 0], -1)
        parent_slots = np.broadcast_to(depths - 1, slots.shape)
        flat_tokens, flat_parents, flat_slots = (each.swapaxes(0, 1).reshape(n, -1) for each in (token_ids, parent_slots, slots))
        return Candidates(flat_tokens, scores.swapaxes(0, 1).reshape(n, -1), flat_parents, flat_slots)


def _best_tokens(logits: Tensor) -> Tensor:
    """The most likely token of each row, any where logits are not finite: int64 [rows]."""
    return argmax_rows(logits).clamp_(min=0)


class BeamGrowth:
    """Expands, at each depth, the nodes with the greatest cumulative probability.

    Args:
        budgets: nodes of each request.
        depths: greatest depth of each request's nodes.
        width: nodes expanded per depth, W; a request feeds ``width * (depth - 1)`` nodes.
        num_children: tokens looked at behind each node, k, at least ``width``.
        temperatures: float32 [n], at which probabilities are compared.
    """

    def __init__(self, budgets: Sequence[int], depths: Sequence[int], width: int, num_children: int, temperatures: Tensor) -> None:
        self.feeds: list[list[Ints]] = [list(np.arange((depth - 1) * width).reshape(-1, width)) for depth in depths]
        self.budgets = budgets
        self.depths = np.array(depths)
        self.width = width
        self.num_children = num_children
        self.temperatures = temperatures
        # by depth, of all requests: the columns of Candidates, on the device
        self._levels: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._beam: Tensor  # int64 [n, W], the candidates of the last level that are fed
        self._bits: Tensor  # int64 [n, W], their ancestor bits

    def plant(self, logits: Tensor) -> None:
        token_ids, scores = children_of(logits, self.num_children, self.temperatures[:, None])
        self._add_level(token_ids, scores, torch.full_like(token_ids, -1), torch.zeros_like(token_ids), depth=1)

    def frontier(self, depth: int) -> Frontier:
        index = self._going_on(depth)
        token_ids = self._levels[-1][0]
        return Frontier(token_ids.gather(1, self._beam)[index].flatten(), self._bits[index].flatten())

    def grow(self, depth: int, logits: Tensor) -> None:
        index = self._going_on(depth)
        n, width, k = len(self.budgets), self.width, self.num_children
        token_ids, logprobs = children_of(logits, k, self.temperatures[index].repeat_interleave(width)[:, None])
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

    def _add_level(self, token_ids: Tensor, scores: Tensor, parent_slots: Tensor, parent_bits: Tensor, depth: int) -> None:
        """Add the candidates of a depth, [n, c] each, and choose which of them are fed."""
        self._beam = scores.topk(self.width, dim=-1).indices
        fed = torch.arange((depth - 1) * self.width, depth * self.width, device=scores.device).expand_as(self._beam)
        slots = torch.full_like(token_ids, -1).scatter(1, self._beam, fed)
        # what the deepest level would feed is never fed; its slots are nobody's parents
        self._bits = parent_bits.gather(1, self._beam) | (1 << fed.clamp(max=MAX_NODES - 1))
        is_last = to_device(self.depths <= depth, scores.device)[:, None]
        self._levels.append((token_ids, scores, parent_slots, slots.masked_fill(is_last, -1)))

    def _going_on(self, depth: int) -> Tensor:
        return to_device(np.flatnonzero(self.depths > depth), self.temperatures.device)


class ShapeGrowth:
    """Fills shapes that are given, each node with the next most likely token or with the next one drawn.

    Args:
        shapes: int32 parents of each request's tree, at least one node, the path of first children first.
        rows: sampling options of the n requests, for proposals that are drawn; ``None``: the most likely tokens.
    """

    def __init__(self, shapes: Sequence[Parents], rows: SamplingRows | None) -> None:
        self.shapes = shapes
        self.rows = rows
        self.feeds = [inner_by_depth(parents.tobytes()) for parents in shapes]
        self._topologies = [topology(parents.tobytes()) for parents in shapes]
        # all inner nodes of all trees, one tree after the other: the rows of _children and _probs
        inner = [(i, node) for i, each in enumerate(self._topologies) for node in each.inner.tolist()]
        self._row_of = {parent: row for row, parent in enumerate(inner)}
        self._num_children = np.concatenate([np.unique(parents, return_counts=True)[1] for parents in shapes])
        self._children: Tensor  # int64 [inner nodes, most children], -1 where there is none
        self._probs: Tensor  # float32 [inner nodes, V], for proposals that are drawn

    def plant(self, logits: Tensor) -> None:
        self._children = logits.new_full((len(self._row_of), int(self._num_children.max())), -1, dtype=torch.int64)
        if self.rows is not None:
            self._probs = logits.new_empty((len(self._row_of), logits.shape[1]), dtype=torch.float32)
        self._fill([(i, -1) for i in range(len(self.shapes))], logits)

    def frontier(self, depth: int) -> Frontier:
        fed = self._fed(depth)
        rows = [self._row_of[i, int(self.shapes[i][node])] for i, node in fed]
        ranks = [int(self._topologies[i].child_ranks[node]) for i, node in fed]
        bits = [int(self._topologies[i].ancestor_bits[node]) for i, node in fed]
        device = self._children.device
        token_ids = self._children[to_device(np.array(rows), device), to_device(np.array(ranks), device)]
        return Frontier(token_ids.clamp(min=0), to_device(np.array(bits, np.int64), device))

    def grow(self, depth: int, logits: Tensor) -> None:
        self._fill(self._fed(depth), logits)

    def harvest(self) -> list[DraftTree]:
        children: NDArray[np.int64] = self._children.cpu().numpy()
        return [self._tree(i, children) for i in range(len(self.shapes))]

    def _fed(self, depth: int) -> list[tuple[int, int]]:
        return [(i, node) for i, feed in enumerate(self.feeds) if len(feed) >= depth for node in feed[depth - 1].tolist()]

    def _fill(self, parents: list[tuple[int, int]], logits: Tensor) -> None:
        """Choose the children of inner nodes, given as (request, node), from their logits."""
        rows = np.array([self._row_of[parent] for parent in parents])
        index = to_device(rows, logits.device)
        count = min(int(self._num_children[rows].max()), logits.shape[1])
        if self.rows is None:
            self._children[index, :count] = logits.topk(count, dim=-1).indices
            return
        requests = np.array([i for i, _ in parents])
        depths = np.array([0 if node < 0 else int(self._topologies[i].depths[node]) for i, node in parents])
        probs = target_probs(logits, self.rows, requests)
        self._probs.index_copy_(0, index, probs)
        seeds, positions = self.rows.seeds[requests], self.rows.positions[requests] + depths
        self._children[index, :count] = draw_children(probs, count, seeds, positions)

    def _tree(self, i: int, children: NDArray[np.int64]) -> DraftTree:
        shape, inner = self.shapes[i], self._topologies[i].inner
        first_row = self._row_of[i, -1]
        tokens = children[first_row + np.searchsorted(inner, shape), self._topologies[i].child_ranks]
        slots = np.where(np.isin(np.arange(len(shape)), inner), np.arange(len(shape)), -1).astype(np.int32)
        probs = None if self.rows is None else self._probs[first_row : first_row + len(inner)]
        if (tokens >= 0).all():
            return DraftTree(tokens, shape, probs, slots)
        # a draft with fewer possible tokens than the shape has children leaves nodes empty
        kept = np.zeros(len(shape), bool)
        for node, parent in enumerate(shape.tolist()):
            kept[node] = tokens[node] >= 0 and (parent < 0 or kept[parent])
        if not kept.any():
            return EMPTY_TREE
        new_index = np.append(np.cumsum(kept) - 1, -1).astype(np.int32)  # the root stays -1
        if probs is not None:
            probs = probs[torch.from_numpy(np.isin(inner, shape[kept])).to(probs.device)]
        return DraftTree(tokens[kept], new_index[shape[kept]], probs, slots[kept])


def draw_children(probs: Tensor, num_children: int, seeds: NDArray[np.uint64], positions: Ints) -> Tensor:
    """Draw tokens without replacement: int64 [rows, num_children], -1 where no token is left.

    Args:
        probs: float32 [rows, V], normalised.
        num_children: how many.
        seeds: uint64 [rows].
        positions: int64 [rows], of the tokens to be drawn.
    """
    children = []
    left = probs
    for sibling in range(num_children):
        uniform = philox_uniform(seeds, positions, Purpose.DRAFT, sibling=sibling)
        tokens = draw(left, to_device(uniform, probs.device)).clamp(max=left.shape[1] - 1)  # where nothing is left
        is_possible = left.gather(1, tokens[:, None])[:, 0] > 0
        children.append(torch.where(is_possible, tokens, -1))
        if sibling + 1 < num_children:
            left = left.scatter(1, tokens[:, None], 0.0)
    return torch.stack(children, 1)

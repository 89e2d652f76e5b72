"""Selection and verification of draft trees, one plain loop per tree: the rules, and the reference for other back ends.

**Sample-and-match**, for deterministic proposals: the target samples its own token at the root, as it would without speculation,
and the walk descends to the child with this token, the first of equal siblings. If no child has it, the token is emitted as the
**recovered** token; past a leaf it is the **bonus** token. So the output is distributed exactly as the target's own and, with
random numbers keyed by position, it is the same sequence. At temperature 0 the sample is the argmax: greedy acceptance.

**Recursive rejection**, for sampled proposals: at a node with target distribution p, the children x_0, x_1, ... were sampled from
the draft's q without replacement. They are tried in this order; x_k is accepted with probability min(1, r_k(x_k) / q_k(x_k)), where
r_0 = p, and q_k is q without the earlier children, renormalised. A rejection leaves the residual r_{k+1} ~ max(r_k - q_k, 0); if no
child is left, the final token is sampled from it. With one child this is the rule of Leviathan et al., "Fast inference from
transformers via speculative decoding", 2023; the recursion is that of Jeon et al., "Recursive speculative decoding", 2024. Either
way the token is distributed as p.

The q-mass that earlier children leave is a sum over the other tokens. 1 less what they had would be rounding alone where the draft
is as good as sure of one of them, as it is at low temperatures, and the rule another than the one that siblings are sampled by.

A rule of one's own, a function of a `TreeToVerify`, takes the place of both by `RuledTrees`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.checks import is_integer, shown
from titan.core.growth import main_path_order
from titan.core.random import Purpose, philox_uniform
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import DraftTrees, NodeColumns, Upload, topology
from titan.kernels.interfaces import Backend, Candidates, SamplingOps, Verified
from titan.kernels.torch.sampling import draw
from titan.kernels.tree_places import place_trees, with_draft_probs


class TorchTrees:
    """Tree operations on any device, on copies of their data on the host."""

    def __init__(self, sampling: SamplingOps, upload: Upload) -> None:
        self._sampling = sampling
        self._upload = upload

    def select(self, found: Sequence[Candidates], num_rows: int) -> DraftTrees:
        start_loc, is_chain, is_sampled, has_scores = place_trees(found, num_rows)
        nodes = _empty_places(start_loc)
        for each in found:
            columns = [column.cpu().numpy() for column in (each.token_ids, each.scores, each.parent_slots, each.slots)]
            for i, row in enumerate(each.rows.tolist()):
                chosen = _best_tree(int(each.num_nodes[i]), *(column[i] for column in columns))
                first = int(start_loc[row])
                for target, column in zip(nodes, chosen, strict=True):
                    target[first : first + len(column)] = column
        trees = DraftTrees(start_loc, is_chain, is_sampled, has_scores, NodeColumns(*self._upload(nodes)))
        return with_draft_probs(trees, found, self._upload)

    def verify(self, logits: Tensor, trees: DraftTrees, rows: Ints, sampling: SamplingRows) -> Verified:
        return _verify_each(lossless, self._sampling, logits, trees, rows, sampling)


class RuledTrees:
    """The tree operations of a back end, but trees are verified by a rule of one's own: one by one, in Python.

    A rule that raises, or returns what is no outcome of its tree, fails the step, which ends all requests in flight.

    Args:
        backend: its ``trees`` are to be replaced by these.
        rule: called for each request that emits tokens, whether or not anything was drafted for it.
    """

    def __init__(self, backend: Backend, rule: AcceptanceRule) -> None:
        self.rule = rule
        self._trees, self._sampling = backend.trees, backend.sampling  # not the back end, which would be in a cycle

    def select(self, found: Sequence[Candidates], num_rows: int) -> DraftTrees:
        return self._trees.select(found, num_rows)

    def verify(self, logits: Tensor, trees: DraftTrees, rows: Ints, sampling: SamplingRows) -> Verified:
        return _verify_each(self._apply, self._sampling, logits, trees, rows, sampling)

    def _apply(self, tree: TreeToVerify) -> Outcome:
        outcome = self.rule(tree)
        if not (isinstance(outcome, Outcome) and tree.allows(outcome)):
            raise ValueError(
                f"the acceptance rule returned {shown(outcome)} for a tree with parents={tree.parents}: allowed is an Outcome "
                f"with a path of nodes from the root down, all after finite p, and an integer, a token from 0 to "
                f"{tree.probs.shape[1] - 1}, or -1 where p is not finite"
            )
        return outcome


def lossless(tree: TreeToVerify) -> Outcome:
    """Verify a tree by recursive rejection if its tokens were sampled, else by sample-and-match."""
    return tree.reject() if tree.draft_rows else tree.match()


def _verify_each(
    rule: AcceptanceRule, ops: SamplingOps, logits: Tensor, trees: DraftTrees, rows: Ints, sampling: SamplingRows
) -> Verified:
    """Verify trees one after another; see `titan.kernels.interfaces.TreeOps.verify`."""
    probs = ops.probs(logits, sampling.repeat(trees.counts[rows] + 1))
    token_ids, parents = trees.nodes.token_ids.tolist(), trees.nodes.parents.tolist()
    scores, is_greedy = trees.nodes.scores.tolist(), sampling.options["temperature"] == 0
    # of greedy rows they are known only where a neighbour samples, on which a rule shall not depend
    seeds, positions = (np.where(is_greedy, 0, sampling.options[name]).tolist() for name in ("seed", "position"))
    found = list[Outcome]()
    root_row = 0
    for i, row in enumerate(rows.tolist()):
        nodes = slice(int(trees.start_loc[row]), int(trees.start_loc[row + 1]))
        num_rows = 1 + nodes.stop - nodes.start
        draft_rows: list[int] = []
        if trees.is_sampled[row] and trees.draft_rows is not None:
            draft_rows = trees.draft_rows[nodes.start + row : nodes.stop + row + 1].tolist()
        num_nodes = sum(token_id >= 0 for token_id in token_ids[nodes])  # the places behind them are empty
        of_tree, held = slice(root_row, root_row + 1 + num_nodes), slice(nodes.start, nodes.start + num_nodes)
        tree = TreeToVerify(
            *(logits[of_tree], probs[of_tree], trees.draft_probs, draft_rows),
            *(token_ids[held], parents[held]),
            scores=scores[held] if trees.has_scores[row] else [],
            seed=seeds[i],
            position=positions[i],
        )
        found.append(rule(tree))
        root_row += num_rows
    paths = np.full((len(found), max((len(each.path) for each in found), default=0)), -1, np.int32)
    for path, each in zip(paths, found, strict=True):
        path[: len(each.path)] = each.path
    final_tokens = torch.tensor([each.final_token for each in found], dtype=torch.int64, device=logits.device)
    return Verified(torch.from_numpy(paths).to(logits.device), final_tokens)


def _empty_places(start_loc: Ints) -> NodeColumns[NDArray[Any]]:
    """Return empty places for trees whose prefix sums of places are ``start_loc``, [R + 1]."""
    num_nodes = int(start_loc[-1])
    return NodeColumns(
        token_ids=np.full(num_nodes, -1, np.int64),
        parents=np.full(num_nodes, -2, np.int32),
        depths=np.ones(num_nodes, np.int64),
        ancestor_bits=np.int64(1) << (np.arange(num_nodes) - np.repeat(start_loc[:-1], np.diff(start_loc))),
        scores=np.full(num_nodes, -np.inf, np.float32),
        draft_slots=np.full(num_nodes, -1, np.int32),
    )


def _best_tree(
    num_places: int, token_ids: Ints, scores: NDArray[np.float32], parent_slots: Ints, slots: Ints
) -> NodeColumns[NDArray[Any]]:
    """Return the best tree of one request's candidates, [c] each.

    No child scores above its parent, so the best candidates are ancestor-closed if ties go to the earlier one.
    """
    comparable = np.where(np.isfinite(scores), scores, -np.inf)
    best = np.argsort(-comparable, kind="stable")[: min(num_places, int(np.isfinite(scores).sum()))]
    node_in_slot = {slot: node for node, slot in enumerate(slots[best].tolist()) if slot >= 0} | {-1: -1}
    order, parents = main_path_order([node_in_slot[slot] for slot in parent_slots[best].tolist()])
    best, shape = best[order], topology(parents.tobytes())
    return NodeColumns(token_ids[best], parents, shape.depths, shape.ancestor_bits, scores[best], slots[best])


class Outcome(NamedTuple):
    """The result of verifying one tree."""

    path: list[int]  # accepted nodes, from the root down
    final_token: int  # the token after them; -1 where p is not finite


class TreeToVerify(NamedTuple):
    """A draft tree with the distributions of target and draft; its nodes are numbered from 0 on, and -1 is the root."""

    logits: Tensor  # [1 + nodes, vocab], of the target at the root, then at the nodes, after all options that change logits
    probs: Tensor  # float32 [1 + nodes, vocab], p: what these become by temperature, top-k, top-p and min-p
    draft_probs: Tensor | None  # float32 [any, vocab], q
    draft_rows: list[int]  # rows of draft_probs for the root, then the nodes; arbitrary at leaves; empty: nothing was sampled
    token_ids: list[int]
    parents: list[int]
    scores: list[float]  # of the nodes, log-probabilities that the draft gave their paths; empty: it chose them otherwise
    seed: int  # 0 at temperature 0, where tokens do not depend on it, and so is the position
    position: int  # position of the token that follows the root

    def p(self, node: int) -> Tensor:
        """Return the target's distribution of the token after a node, float32 [vocab]; at temperature 0 it is on one token."""
        return self.probs[1 + node]

    def q(self, node: int) -> Tensor | None:
        """Return the distribution that the children of a node were sampled from; ``None``: none, or they were not sampled."""
        if self.draft_probs is None or not self.draft_rows or node not in self.parents:
            return None
        return self.draft_probs[self.draft_rows[1 + node]]

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def sample(self, probs: Tensor, depth: int, purpose: Purpose) -> int:
        """Sample one token from a distribution, [vocab], which need not be normalised, at a depth; -1 if it is not finite.

        Raises:
            ValueError: nothing of it is above 0.
        """
        if not torch.isfinite(total := probs.sum()):
            return -1
        if total <= 0:
            raise ValueError("probs adds up to 0: allowed is a distribution that leaves a token")
        uniform = torch.from_numpy(philox_uniform(self.seed, self.position + depth, purpose).reshape(1))
        return int(draw(probs[None], uniform.to(probs.device)))

    def allows(self, outcome: Outcome) -> bool:
        """Whether an outcome is one of this tree."""
        nodes, token = [-1, *outcome.path], outcome.final_token
        steps = pairwise(nodes)
        if not all(node in range(len(self.parents)) and self.parents[node] == parent for parent, node in steps):
            return False
        *are_finite, is_finite = torch.isfinite(self.probs[[1 + node for node in nodes], 0]).tolist()
        return all(are_finite) and is_integer(token) and (0 if is_finite else -1) <= token < self.probs.shape[1]

    def match(self) -> Outcome:
        """Verify by sample-and-match."""
        path: list[int] = []
        while True:
            node = path[-1] if path else -1
            token = self.sample(self.p(node), len(path), Purpose.SAMPLE)
            child = next((child for child in self.children(node) if self.token_ids[child] == token), None)
            if child is None:
                return Outcome(path, token)
            path.append(child)

    def reject(self) -> Outcome:
        """Verify by recursive rejection.

        Raises:
            ValueError: the tree was not sampled.
        """
        path: list[int] = []
        while True:
            node = path[-1] if path else -1
            p, children = self.p(node), self.children(node)
            if not children:  # a leaf: as without speculation
                return Outcome(path, self.sample(p, len(path), Purpose.SAMPLE))
            q = self.q(node)
            if q is None:
                raise ValueError("reject() needs q, and this tree was not sampled: match() is the rule for it")
            accepted, rest = self._try(children, p, q, len(path))
            if accepted is not None:
                path.append(accepted)
                continue
            rest = rest if rest.any() else p  # rounding may leave nothing of it
            return Outcome(path, self.sample(rest, len(path), Purpose.RESIDUAL))

    def _try(self, children: list[int], p: Tensor, q: Tensor, depth: int) -> tuple[int | None, Tensor]:
        """Return the accepted child, if any, and what the rejected ones leave of p: float64 [vocab], not normalised."""
        rest, untried, mass, left = p.double(), q.double(), 1.0, 1.0  # r and q, and what they add up to
        for rank, child in enumerate(children):
            token = self.token_ids[child]
            if rank:
                mass, left = float(rest.sum()), float(untried.sum())
            coin = float(philox_uniform(self.seed, self.position + depth, Purpose.ACCEPT, sibling=rank))
            if coin * mass * float(untried[token]) < float(rest[token]) * left:
                return child, rest
            if left > 0:
                rest = (rest - mass / left * untried).clamp(min=0)
            untried[token] = 0
        return None, rest


AcceptanceRule = Callable[[TreeToVerify], Outcome]
"""Decides which nodes of a tree are accepted, and which token follows them."""

"""Growing draft trees on a CPU in one call of the compiled library, the passes over all depths included.

Between two depths there is little to do, but after a pass has filled the caches with weights each operation of Python or PyTorch
takes several times as long as otherwise.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
from torch import Tensor

from titan.core.request import Request
from titan.core.trees import DraftTree
from titan.draft.shapes import ShapePlan, chain_slots
from titan.draft.tree_builder import BeamGrowth, ChainGrowth, Growth, ShapeGrowth, shaped_tree
from titan.kernels.cpu.decoder import TREE_GROWTH, GrownTrees, TreeShapeStruct
from titan.kernels.cpu.runner import CompiledRunner

Growths = Sequence[tuple[list[int], Growth]]
"""With the indices of their requests."""


class CompiledGrower:
    """Grows what `titan.draft.tree_builder` grows depth by depth, with the same results.

    But for a given shape with more children than a draft of a smaller vocabulary has tokens: here, too, it proposes no others.

    Args:
        runner: of the draft.
        target_vocab_size: tokens from there on are not proposed.
    """

    def __init__(self, runner: CompiledRunner, target_vocab_size: int) -> None:
        self._runner = runner
        self._target_vocab_size = target_vocab_size

    @property
    def max_rows(self) -> int:
        """Most tokens of a short pass."""
        return self._runner.max_rows

    def can_grow(self, growths: Growths) -> bool:
        """Whether the passes are short, and draws are from whole distributions."""
        return all(_is_uncut(growth) for _, growth in growths) and sum(_most_rows(growth) for _, growth in growths) <= self.max_rows

    def grow(self, requests: Sequence[Request], growths: Growths, roots: Tensor | Sequence[Sequence[int]]) -> list[DraftTree]:
        """Grow the trees of n requests.

        Args:
            requests: n of them.
            growths: of all.
            roots: logits [n, target vocabulary]; or the committed tokens that each request feeds first, the root as the last.

        Returns:
            A tree per request.
        """
        specs: list[_Spec] = [_CHAIN] * len(requests)
        num_probs = 0
        for members, growth in growths:
            for i, spec in zip(members, _specs(growth, num_probs), strict=True):
                specs[i] = spec
            if isinstance(growth, ShapeGrowth) and growth.samplers is not None:
                num_probs += growth.starts[-1]
        root_positions = [request.num_tokens - 1 for request in requests]
        shapes = [0 if spec.shape is None else ctypes.addressof(spec.shape) for spec in specs]
        rows = [(shape, root, *spec[1:-1]) for shape, spec, root in zip(shapes, specs, root_positions, strict=True)]
        last_slots = [root + spec.num_slots for spec, root in zip(specs, root_positions, strict=True)]
        grown = self._runner.grow(
            np.array(rows, TREE_GROWTH),
            np.array(last_slots),
            [request.block_ids for request in requests],
            roots.contiguous() if isinstance(roots, Tensor) else (np.array([*chain(*roots)]), np.array([*map(len, roots)])),
            self._target_vocab_size,
            num_probs,
        )
        trees: dict[int, DraftTree] = {}
        for members, growth in growths:
            trees |= zip(members, _trees(growth, grown, members, specs), strict=True)
        return [trees[i] for i in range(len(requests))]


class _Spec(NamedTuple):
    """`TREE_GROWTH` of a tree, but for its root, and how many slots behind the root it writes."""

    shape: TreeShapeStruct | None
    depth: int
    width: int
    num_children: int
    budget: int
    first_inner: int
    seed: int
    temperature: float
    is_drawn: bool
    num_slots: int


_CHAIN = _Spec(None, 1, 1, 1, 1, 0, 0, 1.0, False, 0)


def _is_uncut(growth: Growth) -> bool:
    samplers = growth.samplers if isinstance(growth, ShapeGrowth) else None
    return not any(request.params.has_cuts for request in samplers or ())


def _most_rows(growth: Growth) -> int:
    """At least as many nodes as the growth feeds at any depth."""
    match growth:
        case ChainGrowth():
            return len(growth.depths)
        case BeamGrowth():
            return len(growth.depths) * growth.width
        case ShapeGrowth():
            return sum(plan.max_fed for plan in growth.plans)
    raise TypeError(f"{type(growth).__name__} is not a growth that the library knows")


def _specs(growth: Growth, first_inner: int) -> list[_Spec]:
    """Of each request; the rows of drawn distributions begin at ``first_inner``."""
    match growth:
        case ChainGrowth():
            return [_CHAIN._replace(depth=depth, budget=depth, num_slots=depth - 1) for depth in growth.depths.tolist()]
        case BeamGrowth(width=width, num_children=k):
            columns = growth.depths.tolist(), growth.budgets, growth.temperatures.tolist()
            return [
                _Spec(None, depth, width, k, budget, 0, 0, temperature, False, (depth - 1) * width)
                for depth, budget, temperature in zip(*columns, strict=True)
            ]
        case ShapeGrowth(samplers=None):
            return [_shape_spec(plan) for plan in growth.plans]
        case ShapeGrowth(samplers=samplers):
            assert samplers is not None
            columns = map(_shape_spec, growth.plans), growth.starts[:-1], samplers
            return [
                _Spec(shape, depth, 0, 0, 0, first_inner + start, request.seed, request.params.temperature, True, num_slots)
                for (shape, depth, *_, num_slots), start, request in zip(*columns, strict=True)
            ]
    raise TypeError(f"{type(growth).__name__} is not a growth that the library knows")


def _trees(growth: Growth, grown: GrownTrees, members: Sequence[int], specs: Sequence[_Spec]) -> list[DraftTree]:
    """The trees of a growth, whose requests are the ``members``."""
    num_nodes, token_ids, slots = grown.num_nodes, grown.token_ids, grown.draft_slots
    match growth:
        case ChainGrowth():
            return [DraftTree.chain(token_ids[i, : num_nodes[i]], draft_slots=chain_slots(num_nodes[i])) for i in members]
        case BeamGrowth():
            nodes = [(i, slice(num_nodes[i])) for i in members]
            return [DraftTree(token_ids[n], grown.parents[n], draft_slots=slots[n], scores=grown.scores[n]) for n in nodes]
        case ShapeGrowth():
            probs: Sequence[Tensor | None] = [None] * len(members)
            if growth.samplers is not None:
                assert grown.probs is not None
                first = specs[members[0]].first_inner
                probs = grown.probs[first : first + growth.starts[-1]].split([plan.inner.shape[1] for plan in growth.plans])
            columns = growth.plans, members, probs
            return [shaped_tree(plan, token_ids[i, : num_nodes[i]], q) for plan, i, q in zip(*columns, strict=True)]
    raise TypeError(f"{type(growth).__name__} is not a growth that the library knows")


@lru_cache(maxsize=4096)
def _shape_spec(plan: ShapePlan) -> _Spec:
    """Of a shape whose tokens are the most likely ones; the plan lives as long."""
    arrays = plan.inner, plan.node_parents, plan.ranks
    shape = TreeShapeStruct(len(plan.parents), plan.inner.shape[1], *(array.ctypes.data for array in arrays))
    return _Spec(shape, 1 + len(plan.feeds), 0, 0, 0, 0, 0, 1.0, False, int(plan.inner[0, -1]) + 1)

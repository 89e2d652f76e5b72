"""Shapes: against every tree there is, for as many nodes as can be enumerated."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from titan.core.growth import main_path_order, shape_plan
from titan.core.trees import Parents, topology
from titan.draft.shapes import expected_shape


def all_shapes(num_nodes: int) -> list[Parents]:
    """Every topological list of parents of that length."""
    ranges = [range(-1, node) for node in range(num_nodes)]
    return [np.array(parents, np.int32) for parents in product(*ranges)]


def expected_accepted(parents: Parents, rank_acceptance: tuple[float, ...]) -> float:
    reach: list[float] = []
    ranks = topology(parents.tobytes()).child_ranks
    for parent, rank in zip(parents.tolist(), ranks.tolist(), strict=True):
        acceptance = rank_acceptance[rank] if rank < len(rank_acceptance) else 0.0
        reach.append((reach[parent] if parent >= 0 else 1.0) * acceptance)
    return sum(reach)


def is_caterpillar(parents: Parents) -> bool:
    shape = topology(parents.tobytes())
    return all(shape.child_ranks[node] == 0 for node in shape.inner if node >= 0)


@pytest.mark.parametrize("only_caterpillars", [False, True])
@pytest.mark.parametrize("rank_acceptance", [(0.9, 0.05, 0.01), (0.6, 0.25, 0.12), (0.4, 0.3, 0.2)])
@pytest.mark.parametrize("num_nodes", [1, 2, 4, 6])
def test_no_shape_is_expected_to_do_better(num_nodes: int, rank_acceptance: tuple[float, ...], only_caterpillars: bool) -> None:
    shape = expected_shape(rank_acceptance, num_nodes, is_caterpillar=only_caterpillars)
    others = [parents for parents in all_shapes(num_nodes) if not only_caterpillars or is_caterpillar(parents)]
    best = max(expected_accepted(parents, rank_acceptance) for parents in others)
    assert expected_accepted(shape, rank_acceptance) == pytest.approx(best)
    assert is_caterpillar(shape) or not only_caterpillars


@pytest.mark.parametrize("num_nodes", [1, 3, 5])
def test_the_main_path_comes_first_and_the_shape_stays_the_same(num_nodes: int) -> None:
    for parents in all_shapes(num_nodes):
        ordered = main_path_order(parents).parents
        path, node = [], -1
        while node in ordered:
            node = int(np.flatnonzero(ordered == node)[0])  # the first child
            path.append(node)
        assert path == list(range(len(path)))
        assert sorted(rank_paths(ordered)) == sorted(rank_paths(parents))


def rank_paths(parents: Parents) -> list[tuple[int, ...]]:
    """Each node by the ranks on its path, which do not depend on how nodes are numbered."""
    paths: list[tuple[int, ...]] = []
    for parent, rank in zip(parents.tolist(), topology(parents.tobytes()).child_ranks.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    return paths


def test_a_shape_is_its_parents_however_they_are_given() -> None:
    parents = [-1, -1, 0, 1, 1]
    given = parents, tuple(parents), np.array(parents), np.array(parents, np.int32), np.array(parents, np.int8)
    assert len({shape_plan(each) for each in given}) == 1 and shape_plan(parents).parents.tolist() == parents
    assert {tuple(main_path_order(each).parents.tolist()) for each in given} == {(-1, 0, -1, 2, 2)}

"""Draft trees: what follows from the parents, against the obvious walk."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan.core.trees import EMPTY_TREE, MAX_NODES, DraftTree


@st.composite
def parents(draw: st.DrawFn) -> list[int]:
    num_nodes = draw(st.integers(0, MAX_NODES))
    return [draw(st.integers(-1, node - 1)) for node in range(num_nodes)]


def ancestors(parent_of: list[int], node: int) -> list[int]:
    """The node and what is above it, upwards."""
    path = []
    while node >= 0:
        path.append(node)
        node = parent_of[node]
    return path


@settings(max_examples=100, deadline=None, derandomize=True)
@given(parents())
def test_depths_paths_and_ancestors_follow_from_the_parents(parent_of: list[int]) -> None:
    tree = DraftTree(np.arange(len(parent_of)), np.array(parent_of, np.int32))
    assert tree.num_nodes == len(parent_of)
    assert tree.depths.tolist() == [len(ancestors(parent_of, node)) for node in range(tree.num_nodes)]
    for node, bits in enumerate(tree.ancestor_bits.view(np.uint64).tolist()):
        assert [i for i in range(64) if bits >> i & 1] == sorted(ancestors(parent_of, node))
        assert tree.path_to(node) == ancestors(parent_of, node)[::-1]
    assert tree.path_to(-1) == []
    assert tree.is_chain == (parent_of == list(range(-1, len(parent_of) - 1)))


@pytest.mark.parametrize("num_nodes", [0, 1, 6, MAX_NODES])
def test_a_chain_follows_itself(num_nodes: int) -> None:
    tree = DraftTree.chain(range(100, 100 + num_nodes))
    assert tree.is_chain
    assert tree.token_ids.tolist() == list(range(100, 100 + num_nodes))
    assert tree.parents.tolist() == list(range(-1, num_nodes - 1))
    assert tree.depths.tolist() == list(range(1, num_nodes + 1))


def test_an_empty_tree_is_a_chain_of_nothing() -> None:
    assert EMPTY_TREE.num_nodes == 0 and EMPTY_TREE.is_chain


def test_the_shared_parents_of_chains_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        DraftTree.chain([1, 2]).parents[0] = 1


def test_numbers_of_other_dtypes_become_those_of_trees_and_other_distributions_are_refused() -> None:
    tree = DraftTree(np.array([5, 6], np.int32), np.array([-1, 0], np.int64))
    assert (tree.token_ids.dtype, tree.parents.dtype) == (np.int64, np.int32)
    for dtype in (torch.float64, torch.bfloat16):
        with pytest.raises(ValueError, match=f"draft_probs is {dtype}: it must be torch.float32"):
            DraftTree(np.array([5]), np.array([-1], np.int32), torch.ones(1, 8, dtype=dtype))

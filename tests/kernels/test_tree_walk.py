"""Greedy and sample-and-match acceptance against a walk in plain Python, and against the engine's own."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from random_trees import DEVICE, accepted, packed, random_parents
from torch import Tensor

from titan.bench.gpu.acceptance_reference import reference_walk
from titan.core.trees import MAX_NODES, DraftTree
from titan.kernels.torch.sampling import verify_compiled
from titan.kernels.triton.tree_walk import walk_matches
from titan.verify.accept import walk
from titan.verify.rejection import walked_tree

NUM_TREES = 200


def test_random_trees_are_walked_as_in_plain_python() -> None:
    """Tokens of a small vocabulary, so that siblings are often equal."""
    rng = np.random.default_rng(1)
    trees = []
    for i in range(NUM_TREES):
        num_nodes = int(rng.integers(0, 13)) if i % 20 else (0, MAX_NODES)[i % 40 == 0]
        trees.append(DraftTree(rng.integers(0, 3, num_nodes), random_parents(rng, num_nodes)))
    trees[20] = DraftTree.chain([2] * MAX_NODES)
    wanted = [rng.integers(-1 if i % 10 == 0 else 0, 3, tree.num_nodes + 1) for i, tree in enumerate(trees)]
    wanted[20][:-1] = 2
    result = walk_matches(*packed(trees), torch.from_numpy(np.concatenate(wanted)).to(DEVICE), max_depth=MAX_NODES)
    paths = accepted(result.paths, result.num_accepted)
    expected = [
        reference_walk(tree.token_ids.tolist(), tree.parents.tolist(), want.tolist())
        for tree, want in zip(trees, wanted, strict=True)
    ]
    assert list(zip(paths, result.final_tokens.tolist(), strict=True)) == expected
    assert len(paths[20]) == MAX_NODES and sum(map(bool, paths)) > NUM_TREES // 3

    assert [walk(tree, want.tolist()) for tree, want in zip(trees, wanted, strict=True)] == paths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_library_walks_by_the_most_likely_tokens(dtype: torch.dtype) -> None:
    """From logits; of equal ones the first counts, and of rows that are not finite there is no token."""
    rng = np.random.default_rng(2)
    sizes = [0, 1, MAX_NODES, *rng.integers(0, 13, NUM_TREES)]
    trees = [DraftTree(rng.integers(0, 4, num_nodes), random_parents(rng, num_nodes)) for num_nodes in sizes]
    start_loc = np.cumsum([0, *(tree.num_nodes for tree in trees)])
    logits = torch.from_numpy(rng.integers(0, 3, (int(start_loc[-1]) + len(trees), 600)).astype(np.float32)).to(dtype)
    logits[:, 4:] -= 1  # so that the first tokens are often the most likely
    logits[rng.random(len(logits)) < 0.05, 7] = torch.nan
    walked = [walked_tree(tree, 0.0, 1, 9) for tree in trees]
    ends = verify_compiled(logits, walked, is_logits=True)
    if ends is None:
        pytest.skip("no C++ compiler")
    wanted = [int(row.argmax()) if row.isfinite().all() else -1 for row in logits.float()]
    expected = []
    for tree, first in zip(trees, (start_loc[:-1] + np.arange(len(trees))).tolist(), strict=True):
        path, token = reference_walk(tree.token_ids.tolist(), tree.parents.tolist(), wanted[first : first + 1 + tree.num_nodes])
        expected.append((first + 1 + (path[-1] if path else -1), token))
    assert [(end.row, end.token) for end in ends] == expected
    assert (
        sum(row > first for (row, _), first in zip(expected, start_loc + np.arange(len(trees) + 1), strict=False)) > NUM_TREES // 4
    )


def test_the_first_of_equal_siblings_is_accepted() -> None:
    tree = DraftTree(np.array([4, 7, 7, 5, 5]), np.array([-1, -1, -1, 2, 1], np.int32))
    result = walk_matches(*packed([tree]), torch.tensor([7, 0, 5, 0, 0, 9], device=DEVICE), max_depth=3)
    assert accepted(result.paths, result.num_accepted) == [[1, 4]] and result.final_tokens.tolist() == [9]


def test_an_empty_place_is_never_accepted_not_even_where_nothing_could_be_drawn() -> None:
    token_ids = torch.tensor([5, -1, 6, -1, -1], device=DEVICE)
    parents = torch.tensor([-1, -2, -1, -2, -2], dtype=torch.int32, device=DEVICE)
    start_loc = torch.tensor([0, 2, 5], dtype=torch.int32, device=DEVICE)
    wanted = torch.tensor([-1, -1, -1, 6, -1, 3, -1], device=DEVICE)
    result = walk_matches(token_ids, parents, start_loc, wanted, max_depth=3)
    assert accepted(result.paths, result.num_accepted) == [[], [0]] and result.final_tokens.tolist() == [-1, -1]


def test_rows_behind_the_last_request_are_left_alone() -> None:
    """Tensors of a fixed size, of which a step uses a part."""
    token_ids, parents, _ = packed([DraftTree.chain([1, 2]), DraftTree.chain([3, 3, 3])])
    start_loc = torch.tensor([0, 2, 2, 2], dtype=torch.int32, device=DEVICE)
    wanted = torch.tensor([1, 2, 8, 3, 6, 3, 3, 3], device=DEVICE)
    result = walk_matches(token_ids, parents, start_loc, wanted, max_depth=2)
    assert accepted(result.paths, result.num_accepted) == [[0, 1], [], []] and result.final_tokens.tolist() == [8, 3, 6]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("draft_token_ids", torch.zeros(2, dtype=torch.int32), "draft_token_ids has dtype torch.int32: it must be torch.int64"),
        ("parents", torch.zeros(3, dtype=torch.int32), "parents has shape [3]: it must be [2]"),
        ("node_start_loc", torch.zeros(2, dtype=torch.int64), "node_start_loc has dtype torch.int64: it must be torch.int32"),
        ("node_start_loc", torch.zeros(0, dtype=torch.int32), "node_start_loc is empty: it must have "),
        ("wanted", torch.zeros(2, dtype=torch.int64), "wanted has shape [2]: it must be [3]"),
        ("wanted", torch.zeros(3, dtype=torch.int64, device="meta"), "wanted is on meta: it must be on "),
        ("max_depth", 0, "max_depth=0 is not allowed: it must be 1 to 63"),
        ("max_depth", 64, "max_depth=64 is not allowed: it must be 1 to 63"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_by_name(name: str, value: Tensor | int, message: str) -> None:
    token_ids, parents, start_loc = packed([DraftTree.chain([1, 2])])
    given = {"draft_token_ids": token_ids, "parents": parents, "node_start_loc": start_loc}
    given |= {"wanted": torch.zeros(3, dtype=torch.int64, device=DEVICE), "max_depth": 2}
    given[name] = value.to(DEVICE) if isinstance(value, Tensor) and not value.is_meta else value
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        walk_matches(**given)


def test_no_requests_have_no_paths() -> None:
    none, start_loc = torch.zeros(0, dtype=torch.int64, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    result = walk_matches(none, none.int(), start_loc, none, max_depth=4)
    assert result.paths.shape == (0, 4) and len(result.final_tokens) == len(result.num_accepted) == 0

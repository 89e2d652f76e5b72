"""Grown nodes in their places: against the slow twin."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from random_trees import DEVICE, random_parents
from torch import Tensor

from titan.bench.gpu.acceptance_reference import reference_place_nodes
from titan.core.trees import MAX_NODES, DraftTree
from titan.kernels.triton.place_nodes import place_nodes


@pytest.mark.parametrize("has_depths", [True, False])
def test_nodes_are_written_over_the_last_queries(has_depths: bool) -> None:
    """Prefill chunks, decodes, trees and chains side by side, and padding behind them."""
    rng = np.random.default_rng(4)
    sizes = [0, 6, 1, MAX_NODES, 0, 3]
    num_committed = [5, 1, 20, 1, 1, 0]
    trees = [DraftTree(rng.integers(0, 99, n), random_parents(rng, n)) for n in sizes]
    is_chain = [False, False, True, False, False, False]
    loc = np.cumsum([0, *(a + b for a, b in zip(sizes, num_committed, strict=True))])
    starts = np.array([0 if chain or not n else 7 + 10 * i for i, (n, chain) in enumerate(zip(sizes, is_chain, strict=True))])
    num_padded = 4
    before = rng.integers(100, 200, (3, int(loc[-1]) + num_padded))
    node_tokens = np.concatenate([tree.token_ids for tree in trees])
    node_tokens[3] = -1

    def ints(values: object) -> Tensor:
        return torch.tensor(np.array(values), dtype=torch.int32, device=DEVICE)

    node_loc = np.cumsum([0, *sizes])
    padded_requests = 2
    arguments = (
        ints([*loc, *[loc[-1]] * padded_requests]),
        ints([*starts, *[0] * padded_requests]),
        ints([*node_loc, *[node_loc[-1]] * padded_requests]),
        torch.from_numpy(node_tokens).to(DEVICE),
        torch.from_numpy(np.concatenate([tree.ancestor_bits for tree in trees])).to(DEVICE),
        torch.from_numpy(np.concatenate([tree.depths for tree in trees]).astype(np.int64)).to(DEVICE) if has_depths else None,
    )
    actual, expected = (torch.from_numpy(before.copy()).to(DEVICE) for _ in range(2))
    place_nodes(*actual, *arguments)
    reference_place_nodes(*expected, *arguments)
    assert actual.tolist() == expected.tolist()
    is_changed = (actual.cpu().numpy() != before).sum(1).tolist()
    assert is_changed[0] == sum(sizes) and is_changed[2] == sum(sizes) - sizes[2] and (is_changed[1] > 0) == has_depths


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("token_ids", torch.zeros(5), "token_ids has dtype torch.float32: it must be torch.int64"),
        ("positions", torch.zeros(4, dtype=torch.int64), "positions has shape [4]: it must be [5]"),
        ("ancestor_bits", torch.zeros(1, dtype=torch.int64).expand(5), "ancestor_bits has strides (0,): it must be contiguous"),
        ("query_start_loc", torch.zeros(2, dtype=torch.int32), "query_start_loc has shape [2]: it must be [3]"),
        ("tree_starts", torch.zeros(2, dtype=torch.int64), "tree_starts has dtype torch.int64: it must be torch.int32"),
        ("node_start_loc", torch.zeros(3, dtype=torch.int32, device="meta"), "node_start_loc is on meta: it must be on "),
        ("node_token_ids", torch.zeros(3, dtype=torch.int32), "node_token_ids has dtype torch.int32: it must be torch.int64"),
        ("node_ancestor_bits", torch.zeros(4, dtype=torch.int64), "node_ancestor_bits has shape [4]: it must be [3]"),
        ("node_depths", torch.zeros(3, dtype=torch.int32), "node_depths has dtype torch.int32: it must be torch.int64"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_by_name(name: str, value: Tensor, message: str) -> None:
    queries = ("token_ids", "positions", "ancestor_bits")
    given = {each: torch.zeros(5, dtype=torch.int64, device=DEVICE) for each in queries}
    given |= {each: torch.zeros(3, dtype=torch.int32, device=DEVICE) for each in ("query_start_loc", "node_start_loc")}
    given |= {f"node_{each}": torch.zeros(3, dtype=torch.int64, device=DEVICE) for each in ("token_ids", "ancestor_bits", "depths")}
    given["tree_starts"] = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    given[name] = value if value.is_meta else value.to(DEVICE)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        place_nodes(**given)

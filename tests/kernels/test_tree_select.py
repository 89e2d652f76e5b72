"""The choice of draft trees on the device against `best_trees`, which makes it on the host."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from random_trees import DEVICE
from torch import Tensor

from titan.core.trees import MAX_NODES, topology
from titan.draft.tree_builder import Candidates, best_trees
from titan.kernels.triton.tree_nodes import TreeNodes, allocate_nodes
from titan.kernels.triton.tree_select import MAX_CANDIDATES, select_trees


@dataclass(frozen=True)
class Case:
    """Candidates of n requests, and how many nodes they may have."""

    candidates: Candidates
    budgets: NDArray[np.int32]

    def tensors(self) -> tuple[Tensor, ...]:
        each = self.candidates
        arrays = (each.token_ids, each.scores, each.parent_slots, each.slots)
        return tuple(torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE) for array in arrays)

    def by_kernel(self) -> list[TreeNodes]:
        """The trees one by one, on the host; they lie in another order, and nothing else is written."""
        order = np.random.default_rng(5).permutation(len(self.budgets))
        first_nodes = np.zeros(len(order), np.int32)
        first_nodes[order] = self.budgets[order].cumsum() - self.budgets[order]
        nodes = allocate_nodes(int(self.budgets.sum()) + 3, DEVICE)
        for column in nodes:
            column.fill_(77)
        places = (torch.from_numpy(array).to(DEVICE) for array in (first_nodes, self.budgets))
        select_trees(*self.tensors(), *places, nodes)
        assert all(column[-3:].tolist() == [77] * 3 for column in nodes)
        ends = (first_nodes + self.budgets).tolist()
        return [TreeNodes(*(column[a:b].cpu() for column in nodes)) for a, b in zip(first_nodes.tolist(), ends, strict=True)]


def random_case(rng: np.random.Generator, num_requests: int, num_candidates: int) -> Case:
    """Forests in which about every second candidate is fed; scores often tie, and what is not finite has nothing below it."""
    shape = num_requests, num_candidates
    parent_slots, slots = np.full(shape, -1), np.full(shape, -1)
    scores = np.full(shape, -np.inf, np.float32)
    for i in range(num_requests):
        fed: list[tuple[int, np.float32]] = []  # slots and scores of those that may be parents
        kind = rng.integers(3)
        for j in range(num_candidates):
            parent = (len(fed) - 1, int(rng.integers(-1, len(fed))), -1)[kind]
            parent_slots[i, j], above = fed[parent] if parent >= 0 else (-1, np.float32(0))
            step = rng.choice([0, -0.0, -0.25, -1, -rng.random(), -np.inf, np.nan], p=[0.1, 0.1, 0.2, 0.2, 0.36, 0.02, 0.02])
            scores[i, j] = above + np.float32(step)
            if kind == 0 or rng.random() < 0.5:
                slots[i, j] = (len(fed) * 7 + 3) % 1000  # in no order
                fed.append((slots[i, j], scores[i, j]))
    budgets = rng.integers(0, min(MAX_NODES, num_candidates), num_requests, endpoint=True).astype(np.int32)
    return Case(Candidates(rng.integers(0, 9, shape), scores, parent_slots, slots), budgets)


@pytest.mark.parametrize(("num_candidates", "num_requests"), [(1, 4), (6, 40), (33, 30), (64, 12), (130, 10), (512, 4)])
def test_the_trees_are_those_of_the_host(num_candidates: int, num_requests: int) -> None:
    case = random_case(np.random.default_rng(num_candidates), num_requests, num_candidates)
    case.candidates.scores[-1, num_candidates // 9 :] = -np.inf
    case.budgets[-1] = min(MAX_NODES, num_candidates)
    if num_candidates >= MAX_NODES:
        case.budgets[:3] = (MAX_NODES, 1, MAX_NODES - 1)
    num_whole = num_cut = 0
    for actual, expected in zip(case.by_kernel(), best_trees(case.candidates, case.budgets.tolist()), strict=True):
        n = expected.num_nodes
        assert actual.token_ids[:n].tolist() == expected.token_ids.tolist()
        assert actual.parents[:n].tolist() == expected.parents.tolist()
        assert expected.scores is not None and actual.scores[:n].tolist() == expected.scores.tolist()
        assert expected.draft_slots is not None and actual.draft_slots[:n].tolist() == expected.draft_slots.tolist()
        derived = topology(expected.parents.tobytes())
        assert actual.depths[:n].tolist() == derived.depths.tolist()
        assert actual.ancestor_bits[:n].tolist() == derived.ancestor_bits.tolist()

        empty = TreeNodes(*(column[n:] for column in actual))
        num_empty = len(empty.token_ids)
        assert empty.token_ids.tolist() == [-1] * num_empty and empty.parents.tolist() == [-2] * num_empty
        assert empty.depths.tolist() == [1] * num_empty and empty.scores.tolist() == [-np.inf] * num_empty
        assert empty.ancestor_bits.tolist() == [1 << node for node in range(n, n + num_empty)]
        assert empty.draft_slots.tolist() == [-1] * num_empty
        num_whole, num_cut = num_whole + (n > 1 and not num_empty), num_cut + (num_empty > 0)
    assert (num_whole and num_cut) or num_candidates == 1


def test_a_chain_of_63_nodes_is_as_deep_as_that() -> None:
    levels = np.arange(MAX_NODES)[None]
    case = Case(Candidates(levels, np.zeros((1, MAX_NODES), np.float32), levels - 1, levels), np.array([MAX_NODES], np.int32))
    [nodes] = case.by_kernel()
    assert nodes.depths.tolist() == list(range(1, MAX_NODES + 1))
    assert nodes.ancestor_bits.tolist() == [(1 << node) - 1 for node in range(1, MAX_NODES + 1)]


def test_no_requests_have_no_trees() -> None:
    none = torch.zeros(0, 4, dtype=torch.int64, device=DEVICE)
    counts = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    nodes = allocate_nodes(2, DEVICE)
    for column in nodes:
        column.fill_(7)
    select_trees(none, none.float(), none, none, counts, counts, nodes)
    assert all((column == 7).all() for column in nodes)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("token_ids", torch.zeros(2, 3), "token_ids has dtype torch.float32: it must be torch.int64"),
        ("token_ids", torch.zeros(2, 0, dtype=torch.int64), "token_ids has shape [2, 0]: there must be 1 to 4096 candidates"),
        (
            "token_ids",
            torch.zeros(2, MAX_CANDIDATES + 1, dtype=torch.int64),
            "token_ids has shape [2, 4097]: there must be 1 to 4096 candidates",
        ),
        ("scores", torch.zeros(2, 4), "scores has shape [2, 4]: it must be [2, 3]"),
        ("parent_slots", torch.zeros(2, 3, dtype=torch.int32), "parent_slots has dtype torch.int32: it must be torch.int64"),
        ("slots", torch.zeros(2, 3, dtype=torch.int64, device="meta"), "slots is on meta: it must be on "),
        ("first_nodes", torch.zeros(3, dtype=torch.int32), "first_nodes has shape [3]: it must be [2]"),
        ("num_nodes", torch.zeros(2, dtype=torch.int64), "num_nodes has dtype torch.int64: it must be torch.int32"),
        ("parents", torch.zeros(4, dtype=torch.int64), "nodes.parents has dtype torch.int64: it must be torch.int32"),
        ("scores_out", torch.zeros(5), "nodes.scores has shape [5]: it must be [4]"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_by_name(name: str, value: Tensor, message: str) -> None:
    longs, counts = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    given = {"token_ids": longs, "scores": longs.float(), "parent_slots": longs, "slots": longs}
    given |= {"first_nodes": counts, "num_nodes": counts}
    nodes = allocate_nodes(4, DEVICE)
    value = value if value.is_meta else value.to(DEVICE)
    if name in given:
        given[name] = value
    else:
        nodes = nodes._replace(**{name.removesuffix("_out"): value})
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        select_trees(**given, nodes=nodes)

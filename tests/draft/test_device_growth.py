"""Trees that stay on the device against those that the same growths give on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from interpreted import DEVICE
from torch import Tensor

from titan.core.device_trees import DeviceTrees
from titan.core.outputs import RequestMetrics
from titan.core.request import Request
from titan.core.sampling_params import SamplingParams
from titan.core.trees import DraftTree, chain_parents
from titan.draft.device_growth import device_trees
from titan.draft.policy import CHAIN_CHILDREN
from titan.draft.shapes import expected_shape, in_main_path_order
from titan.draft.tree_builder import BeamGrowth, ChainGrowth, Growth, ShapeGrowth
from titan.kernels.upload import download

Grown = list[tuple[list[int], Growth]]

NUM_ROWS = 7
VOCAB_SIZE = 24


def samplers(num_rows: int, top_k: int) -> list[Request]:
    params = SamplingParams(temperature=1.0, top_k=top_k)
    return [Request(str(i), None, [1] * (9 + i), params, i, 100, frozenset(), RequestMetrics(0.0), None) for i in range(num_rows)]


BUSHY = in_main_path_order(np.array([-1, 0, -1, 0, 1, 2, -1, 4, 3, 3], np.int32))


def make_growth(kind: str, rows: list[int], top_k: int) -> Growth:
    """Rows of different budgets and depths."""
    budgets, temperatures = [3 + row for row in rows], np.linspace(0.5, 1.5, len(rows)).tolist()
    depths = [min(budget, 2 + row % 4) for row, budget in zip(rows, budgets, strict=True)]
    match kind:
        case "chain":
            return ChainGrowth(budgets)
        case "siblings":
            return BeamGrowth(budgets, depths, 1, CHAIN_CHILDREN, temperatures)
        case "beam":
            return BeamGrowth(budgets, depths, 2, 3, temperatures)
        case "shape":
            return ShapeGrowth([BUSHY[:budget] for budget in budgets], None)
        case _:
            shapes = [chain_parents(b) if b % 3 == 0 else expected_shape((0.6, 0.3, 0.2), b, is_caterpillar=False) for b in budgets]
            return ShapeGrowth(shapes, samplers(len(rows), top_k))


def logits_of(rng: np.random.Generator, num_rows: int, kind: str) -> Tensor:
    logits = rng.normal(size=(num_rows, VOCAB_SIZE)).astype(np.float32) * 2
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "few":
        logits[:, 2:] = -np.inf  # two possible tokens
    elif kind == "broken":
        logits[rng.random(num_rows) < 0.3] = np.nan
    return torch.from_numpy(logits).to(DEVICE)


def grow(growths: Grown, kind: str) -> None:
    rng = np.random.default_rng(len(kind))
    for rows, growth in growths:
        growth.plant(logits_of(rng, len(rows), kind))
        for depth in range(1, max(map(len, growth.feeds)) + 1):
            growth.grow(depth, logits_of(rng, len(growth.frontier(depth).token_ids), kind))


def same(actual: DraftTree, expected: DraftTree) -> None:
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    assert actual.parents.tolist() == expected.parents.tolist()
    assert (actual.scores is None) == (expected.scores is None or not expected.num_nodes)
    if actual.scores is not None and expected.scores is not None:
        np.testing.assert_allclose(actual.scores, expected.scores, rtol=1e-6)
    if expected.num_nodes:
        assert actual.draft_slots is not None and expected.draft_slots is not None
        assert actual.draft_slots.tolist() == expected.draft_slots.tolist()


ALONE = {kind: [(kind, list(range(NUM_ROWS)))] for kind in ("chain", "siblings", "beam", "shape", "drawn")}
TOGETHER = {"mixed": [("beam", [1, 4]), ("drawn", [0, 5]), ("chain", [3]), ("siblings", [6])]}


@pytest.mark.parametrize("logits", ["plain", "ties", "few", "broken"])
@pytest.mark.parametrize("kinds", ALONE | TOGETHER)
def test_trees_on_the_device_are_those_on_the_host(kinds: str, logits: str) -> None:
    parts = (ALONE | TOGETHER)[kinds]
    growths: Grown = [(rows, make_growth(kind, rows, top_k=2 if logits == "ties" else 0)) for kind, rows in parts]
    grow(growths, logits)
    trees = device_trees(growths, NUM_ROWS, DEVICE)
    on_host = trees.on_host(download(trees.columns))
    assert len(on_host) == len(trees.outlines) == NUM_ROWS
    num_drafted = 0
    for rows, growth in growths:
        for row, expected in zip(rows, growth.harvest(), strict=True):
            same(on_host[row], expected)
            assert expected.num_nodes <= trees.outlines[row].num_nodes
            assert not trees.outlines[row].is_chain or expected.is_chain
            num_drafted += expected.num_nodes
    assert num_drafted > (0 if logits == "broken" else NUM_ROWS)
    drafting = {row for rows, _ in growths for row in rows}
    assert all(on_host[row].num_nodes == 0 for row in range(NUM_ROWS) if row not in drafting)
    check_draft_probs(trees, on_host, growths)


def check_draft_probs(trees: DeviceTrees, on_host: list[DraftTree], growths: Grown) -> None:
    """Each node with children has the q that its children were drawn from."""
    drawn: list[Any] = [(rows, growth.harvest()) for rows, growth in growths if getattr(growth, "samplers", None) is not None]
    if not drawn:
        assert trees.draft_probs is None and trees.draft_rows is None
        return
    assert trees.draft_probs is not None and trees.draft_rows is not None
    [(rows, expected)] = drawn
    first = 0
    for row, tree in zip(rows, expected, strict=True):
        count = 1 + trees.outlines[row].num_nodes
        draft_rows, first = trees.draft_rows[first : first + count].long(), first + count
        assert trees.outlines[row].is_drawn
        if tree.draft_probs is not None:
            assert on_host[row].inner.tolist() == tree.inner.tolist()
            q = trees.draft_probs[draft_rows[torch.from_numpy(1 + tree.inner).to(DEVICE)]]
            torch.testing.assert_close(q, tree.draft_probs, rtol=0, atol=0, equal_nan=True)
    assert first == len(trees.draft_rows)

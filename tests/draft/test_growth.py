"""Trees grown over passes, the general form: on all back ends the same, and what is kept is what was fed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from back_ends import BACK_ENDS, make_back_end
from proposals import assert_same_trees, filled, trees_on_host
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.batch import RaggedBatch
from titan.core.growth import BeamSpec, Feed, GrowthSpec, main_path_order
from titan.core.sampling_params import SamplingParams
from titan.core.trees import chain_parents
from titan.draft.policy import CHAIN_CHILDREN
from titan.draft.shapes import expected_shape
from titan.kernels.growth import grow_by_passes
from titan.kernels.interfaces import Backend

NUM_ROWS, NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE, DRAFT_VOCAB_SIZE = 7, 9, 16, 24, 21
BUSHY = main_path_order([-1, 0, -1, 0, 0, 2, 0, 4, 3, 3]).parents


class RandomDraft:
    """A draft whose logits are random, the same ones whoever asks in the same order."""

    def __init__(self, backend: Backend, kind: str) -> None:
        self.backend = backend
        self.kind = kind
        self.rng = np.random.default_rng(len(kind))
        self.ends: dict[int, int] = {}  # by row: behind the last slot that was fed

    def forward(self, batch: RaggedBatch) -> Tensor:
        layout = batch.attention
        assert batch.nodes is None or int(batch.nodes.token_ids.max()) < DRAFT_VOCAB_SIZE
        for row, end in zip(layout.block_table[:, 0] // NUM_BLOCKS, layout.seq_lens.tolist(), strict=True):
            self.ends[row] = max(self.ends.get(row, 0), end)
        logits = self.rng.normal(size=(len(batch.logits_rows), DRAFT_VOCAB_SIZE)).astype(np.float32) * 2
        if self.kind == "few":
            logits[:, 2:] = -np.inf  # two possible tokens
        elif self.kind == "broken":
            logits[self.rng.random(len(logits)) < 0.3] = np.nan
        return torch.from_numpy(logits).to(self.backend.device)


def spec_of(kind: str, row: int) -> GrowthSpec:
    """Rows of different budgets and depths."""
    budget, temperature = 3 + row, 0.5 + row / 6
    depth = min(budget, 2 + row % 4)
    match kind:
        case "chain":
            return filled(chain_parents(budget))
        case "siblings":
            return BeamSpec(budget, depth, 1, CHAIN_CHILDREN, temperature)
        case "beam":
            return BeamSpec(budget, depth, 2, 3, temperature)
        case "shape":
            return filled(BUSHY[:budget])
    shape = chain_parents(budget) if budget % 3 == 0 else expected_shape((0.6, 0.3, 0.2), budget, is_caterpillar=False)
    return replace(filled(shape), params=SamplingParams(temperature=1.0, top_k=row // 2), seed=row)


KINDS = {kind: [kind] * NUM_ROWS for kind in ("chain", "siblings", "beam", "shape", "sampled")}
KINDS["mixed"] = ["sampled", "beam", "nothing", "chain", "beam", "sampled", "siblings"]


@pytest.mark.parametrize(
    "field", [{"max_nodes": 0}, {"depth": 0}, {"width": 0}, {"width": 4}, {"num_children": 1}, {"temperature": 0.0}]
)
def test_beams_that_cannot_grow_are_refused(field: dict[str, Any]) -> None:
    [(name, value)] = field.items()
    with pytest.raises(ValueError, match=rf"BeamSpec\(.*{name}={value}.* is not allowed: max_nodes, depth and width must"):
        replace(BeamSpec(6, 3, 2, 3, 0.5), **field)


@pytest.mark.long_where("triton-sampled-few", "triton-sampled-broken", "triton-chain", "triton-siblings", "triton-beam")
@pytest.mark.parametrize("logits", ["plain", "few", "broken"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("back_end", ["cpu", "triton"])
def test_trees_are_those_that_pytorch_grows(back_end: str, kind: str, logits: str) -> None:
    """Also where the draft has fewer tokens, few possible ones, or NaN; the slots that the spec says are written and claimed."""
    feeds = []
    for row, each in enumerate(KINDS[kind]):
        blocks = list(range(NUM_BLOCKS * row, NUM_BLOCKS * (row + 1)))
        feeds.append(Feed(row, blocks, 5 + row, [1, 2][: 1 + row % 2], spec_of(each, row) if each != "nothing" else None))
    drafts = [RandomDraft(make_back_end(name), logits) for name in (back_end, "torch")]
    found, expected = (
        grow_by_passes(draft.forward, draft.backend, feeds, NUM_ROWS + 1, VOCAB_SIZE, BLOCK_SIZE) for draft in drafts
    )
    assert_same_trees(drafts[0].backend, found, expected, range(NUM_ROWS + 1), 1e-5)
    for feed, tree in zip(feeds, trees_on_host(drafts[1].backend, expected)[:-1], strict=True):
        num_slots = 0 if feed.spec is None else feed.spec.num_slots
        assert drafts[1].ends[feed.row] == feed.root + 1 + num_slots
        assert tree.draft_slots is not None and tree.draft_slots.max(initial=-1) < num_slots
        assert tree.num_nodes > 0 or feed.spec is None or logits == "broken"
    num_places = sum(feed.spec.num_nodes for feed in feeds if feed.spec is not None)
    assert 0 < expected.num_nodes <= num_places
    assert expected.num_nodes < num_places or logits == "plain" or kind == "chain", "places stay empty"
    assert int(expected.nodes.token_ids.max()) < DRAFT_VOCAB_SIZE


TABLES = np.arange(NUM_ROWS * NUM_BLOCKS).reshape(NUM_ROWS, -1)


def tables_of_passes(lengths: Mapping[int, int]) -> list[Ints]:
    """The block tables of each pass over chains of these lengths, of rows of a plan that has padded `TABLES`."""
    draft, found = RandomDraft(make_back_end("torch"), "plain"), list[Ints]()

    def forward(batch: RaggedBatch) -> Tensor:
        found.append(batch.attention.block_table)
        return draft.forward(batch)

    feeds = [Feed(row, TABLES[row].tolist(), 5, [1], filled(chain_parents(length)), TABLES) for row, length in lengths.items()]
    grow_by_passes(forward, draft.backend, feeds, NUM_ROWS, VOCAB_SIZE, BLOCK_SIZE)
    return found


@pytest.mark.parametrize("rows", [range(NUM_ROWS), [4, 1, 2]])
def test_all_passes_take_the_tables_that_the_plan_has_padded(rows: Sequence[int]) -> None:
    """The plan's very array where all of its rows grow, so that it is uploaded once."""
    with patch("titan.core.growth.pad_block_tables", side_effect=AssertionError("padded again")):
        found = tables_of_passes(dict.fromkeys(rows, 3))
    assert len(found) == 3
    for each in found:
        assert each is TABLES or not isinstance(rows, range)
        np.testing.assert_array_equal(each, TABLES[[*rows]])


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_where_logits_tie_the_chain_that_is_proposed_is_the_one_that_was_fed(back_end: str) -> None:
    torch.manual_seed(0)
    n, vocab_size, depth, backend = 50, 300, 4, make_back_end(back_end)
    fed: list[list[int]] = []

    def forward(batch: RaggedBatch) -> Tensor:
        if batch.nodes is not None:
            fed.append(batch.nodes.token_ids.tolist())
        return torch.randint(4, (n, vocab_size)).bfloat16().to(backend.device)

    feeds = [Feed(i, [0], 3, [1], BeamSpec(depth, depth, 1, CHAIN_CHILDREN, 0.05)) for i in range(n)]
    num_checked = 0
    for i, tree in enumerate(trees_on_host(backend, grow_by_passes(forward, backend, feeds, n, vocab_size, BLOCK_SIZE))):
        assert tree.draft_slots is not None
        for node, slot in enumerate(tree.draft_slots.tolist()):
            if slot >= 0:
                assert tree.token_ids[node] == fed[slot][i]
                num_checked += 1
        for parent in tree.topology.inner.tolist():
            children = tree.token_ids[tree.parents == parent].tolist()
            assert len(set(children)) == len(children)
    assert num_checked > 20


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_a_pass_that_only_feeds_is_told(back_end: str) -> None:
    backend = make_back_end(back_end)
    trees = grow_by_passes(
        RandomDraft(backend, "plain").forward, backend, [Feed(1, [0], 3, [1, 2], None)], 2, VOCAB_SIZE, BLOCK_SIZE
    )
    assert trees.num_nodes == 0 and trees.growth is not None
    assert (trees.growth.num_passes, trees.growth.num_rows) == (1, 2)
    assert (trees.growth.seconds is not None) == backend.is_host

"""Inputs of passes in fixed memory, as graphs need them, against those that are uploaded anew."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import numpy as np
import torch
from stepping import host_trees

from titan.core.batch import QueryRow, RaggedBatch, build_batch
from titan.core.growth import Feed
from titan.core.step import StepPlan
from titan.core.trees import DraftTree
from titan.kernels.growth import root_batch
from titan.kernels.triton.attention_plan import DeviceLayout
from titan.kernels.triton.cuda_graphs import PassSize
from titan.kernels.triton.pass_inputs import BlockTables, StaticInputs, size_of, upload_inputs

CPU, BLOCK_SIZE, LARGEST = torch.device("cpu"), 4, PassSize(24, 6, 8)
OF_REQUESTS = {"query_start_loc": 1, "seq_lens": 0, "tree_starts": 0}
"""Arrays with a number for each request, and how many more."""


def random_batch(rng: np.random.Generator) -> RaggedBatch:
    """Up to four requests, of which some have a tree; block tables are of all lengths."""
    n = int(rng.integers(1, 5))
    trees = [DraftTree(rng.integers(9, size=k), np.array([-1, -1, 1][:k], np.int32)) for k in rng.integers(4, size=n).tolist()]
    rows = []
    for _ in range(n):
        start, tokens = int(rng.integers(12)), rng.integers(9, size=rng.integers(1, 3)).tolist()
        rows.append(QueryRow(rng.integers(50, size=-(-(start + 6) // BLOCK_SIZE)).tolist(), start, tokens, True))
    return build_batch(rows, host_trees(trees), block_size=BLOCK_SIZE)


def test_models_that_share_block_tables_upload_them_once_and_find_their_own() -> None:
    """Passes of two models in turn, over the tables of a step, or of some of its requests, which are another array."""
    rng, tables, loads = np.random.default_rng(1), BlockTables(6, 5, CPU), 0
    models = [StaticInputs(LARGEST, tables) for _ in range(2)]
    for _ in range(40):
        batch, held = random_batch(rng), tables._held
        others = random_batch(rng)
        passes = [batch, others, batch, batch] if rng.random() < 0.5 else [batch, batch, batch]
        for each in passes:
            loads += not tables.holds(each.attention.block_table)
            inputs = models[int(rng.integers(2))].fill(each, PassSize(24, 6, 8))
            expected = torch.from_numpy(each.attention.block_table)
            assert torch.equal(inputs.attention.block_table[: len(expected), : expected.shape[1]], expected.int())
        assert tables._held is batch.attention.block_table is not held
    assert 40 < loads < 120


def test_a_plan_pads_its_tables_once_and_passes_take_their_rows_in_any_order() -> None:
    rng = np.random.default_rng(2)
    for _ in range(30):
        tables = [array("q", rng.integers(50, size=rng.integers(2, 6)).tolist()) for _ in range(int(rng.integers(1, 6)))]
        plan = StepPlan([SimpleNamespace(block_ids=each) for each in tables], [], [], [])  # type: ignore[misc]
        for rows in (range(len(tables)), rng.permutation(len(tables))[: rng.integers(1, len(tables) + 1)].tolist()):
            feeds = [Feed(i, tables[i], int(rng.integers(8)), [3], None) for i in rows]
            of_plan, of_feeds = (
                root_batch(each, BLOCK_SIZE) for each in ([f._replace(block_table=plan.block_table) for f in feeds], feeds)
            )
            width = of_feeds.attention.block_table.shape[1]
            np.testing.assert_array_equal(of_plan.attention.block_table[:, :width], of_feeds.attention.block_table)
            np.testing.assert_array_equal(of_plan.slot_mapping, of_feeds.slot_mapping)
            assert (of_plan.attention.block_table is plan.block_table) == ([*rows] == [*range(len(tables))])


def test_fixed_memory_holds_what_a_new_upload_would() -> None:
    """Of random batches in turn, padded to sizes that differ in tokens, requests or neither."""
    rng, static, sizes = np.random.default_rng(0), StaticInputs(LARGEST, BlockTables(6, 5, CPU)), set[PassSize]()
    for _ in range(60):
        batch = random_batch(rng)
        own = size_of(batch)
        size = PassSize(-(-own.num_tokens // 8) * 8, -(-own.num_requests // 2) * 2, 8)
        sizes.add(size)
        filled, fresh = static.fill(batch, size), upload_inputs(batch, CPU, 8)
        assert isinstance(filled.attention, DeviceLayout) and isinstance(fresh.attention, DeviceLayout)
        for name in ("token_ids", "positions", "slot_mapping"):
            mine, theirs = getattr(filled, name), getattr(fresh, name)
            assert len(mine) == size.num_tokens and torch.equal(mine[: own.num_tokens], theirs)
        assert (filled.slot_mapping[own.num_tokens :] == -1).all()
        for name in ("visible_lens", "ancestor_bits", *OF_REQUESTS):
            mine, theirs = getattr(filled.attention, name), getattr(fresh.attention, name)
            padded, more = (size.num_requests, OF_REQUESTS[name]) if name in OF_REQUESTS else (size.num_tokens, 0)
            assert len(mine) == padded + more and torch.equal(mine[: len(theirs)], theirs)
        assert (filled.attention.query_start_loc[own.num_requests :] == own.num_tokens).all()
        tables = filled.attention.block_table[: own.num_requests, : fresh.attention.block_table.shape[1]]
        assert torch.equal(tables, fresh.attention.block_table) and len(filled.attention.block_table) == size.num_requests
    assert len({size.num_tokens for size in sizes}) < len(sizes) > len({size.num_requests for size in sizes})

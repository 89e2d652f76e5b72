"""Inputs of passes in fixed memory, as graphs need them, against those that are uploaded anew."""

from __future__ import annotations

import numpy as np
import torch

from titan.core.batch import QueryRow, RaggedBatch, build_batch
from titan.core.trees import DraftTree, DraftTrees, TreeLimits
from titan.kernels.triton.attention_plan import DeviceLayout
from titan.kernels.triton.cuda_graphs import PassSize
from titan.kernels.triton.pass_inputs import StaticInputs, size_of, upload_inputs

CPU, BLOCK_SIZE, LARGEST = torch.device("cpu"), 4, PassSize(24, 6, 8)
OF_REQUESTS = {"query_start_loc": 1, "seq_lens": 0, "tree_starts": 0}
"""Arrays with a number for each request, and how many more."""


def random_batch(rng: np.random.Generator) -> RaggedBatch:
    """Up to four requests, of which some have a tree; block tables are of all lengths."""
    n = int(rng.integers(1, 5))
    trees = [DraftTree(rng.integers(9, size=k), np.array([-1, -1, 1][:k], np.int32)) for k in rng.integers(4, size=n).tolist()]
    most = [len(each.token_ids) for each in trees]
    limits = TreeLimits(most, [False] * n, most)
    upload = lambda arrays: [torch.from_numpy(each) for each in arrays]  # noqa: E731
    joined = DraftTrees.of(trees, limits, drafter="random", vocab_size=9, upload=upload, device=CPU)
    rows = []
    for _ in range(n):
        start, tokens = int(rng.integers(12)), rng.integers(9, size=rng.integers(1, 3)).tolist()
        rows.append(QueryRow(rng.integers(50, size=-(-(start + 6) // BLOCK_SIZE)).tolist(), start, tokens, True))
    return build_batch(rows, joined, block_size=BLOCK_SIZE)


def test_fixed_memory_holds_what_a_new_upload_would() -> None:
    """Of random batches in turn, padded to sizes that differ in tokens, requests or neither."""
    rng, static, sizes = np.random.default_rng(0), StaticInputs(CPU, LARGEST, num_blocks=5), set[PassSize]()
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

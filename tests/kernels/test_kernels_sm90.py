"""The kernels of layers, sampling and trees as compiled for an H100 or H200, at the sizes of shipped models."""

from __future__ import annotations

from collections import Counter

import pytest
from sm90 import Build, compile_launches

CODE = """
import torch
from titan.core.random import Purpose
from titan.core.trees import allocate_nodes
from titan.kernels.interfaces import TokenPlaces
from titan.kernels.triton.gate import silu_mul
from titan.kernels.triton.norm import rms_norm
from titan.kernels.triton.rope_kv import rope_and_write_kv
from titan.kernels.triton.row_distribution import normalized_probs, row_distributions
from titan.kernels.triton.sample_rows import draw_rows
from titan.kernels.triton.tree_rejection import reject_trees
from titan.kernels.triton.tree_select import select_trees
from titan.kernels.triton.tree_walk import VerifiedTrees, walk_matches

def zeros(*shape, dtype):
    return torch.zeros(shape, dtype=dtype)

half, single = torch.bfloat16, torch.float32
slots = torch.zeros(7, dtype=torch.int64)
for num_heads, num_kv_heads, head_dim, dtype in ((9, 3, 64, half), (32, 8, 128, half), (32, 8, 128, single)):
    kv_layer = zeros(2, num_kv_heads, 4, 16, head_dim, dtype=dtype)
    for qk_norm in (None, zeros(num_heads + num_kv_heads, head_dim, dtype=dtype)):
        rope_and_write_kv(
            zeros(7, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype),
            TokenPlaces(zeros(64, 2, head_dim, dtype=dtype), slots, slots), kv_layer, qk_norm, eps=1e-6,
        )
for hidden_size, dtype in ((768, half), (4096, half), (16384, half), (16384, single)):
    x, weight = zeros(7, hidden_size, dtype=dtype), zeros(hidden_size, dtype=dtype)
    rms_norm(x, weight, 1e-6)
    rms_norm(x, weight, 1e-6, x.clone())
for intermediate_size, dtype in ((2048, half), (14336, half), (14336, single)):
    silu_mul(zeros(7, 2 * intermediate_size, dtype=dtype))

start_loc = torch.zeros(3, dtype=torch.int32)
for num_rows, max_depth in ((8, 6), (7, 1), (6, 16)):  # which differ from step to step
    floats, ints, longs = (torch.zeros(num_rows, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.int64))
    trees = VerifiedTrees.of(longs[2:].clone(), ints[2:].clone(), start_loc, max_depth=max_depth)
    walk_matches(trees, longs)
    for vocab_size, dtype in ((32000, single), (128256, half)):  # of Llama 2 and Llama 3
        logits, draft_probs = torch.zeros(num_rows, vocab_size, dtype=dtype), torch.zeros(3, vocab_size)
        distributions = row_distributions(logits, temperature=floats, top_k=ints, top_p=floats, min_p=floats)
        normalized_probs(distributions)
        draw_rows(distributions, longs, longs, purpose=Purpose.SAMPLE)
        reject_trees(trees, longs[:2].clone(), distributions, draft_probs, ints, longs, longs)

requests, nodes = start_loc[1:].clone(), allocate_nodes(7, start_loc.device)
for num_candidates in (*range(1, 33), 33, 45, 63, 100, 427, 510, 512):  # chains, trees along one, beams of 6 to 63 nodes
    candidates = torch.zeros(2, num_candidates, dtype=torch.int64)
    select_trees(candidates, candidates.float(), candidates, candidates, requests, requests, nodes)
"""

KERNELS = {
    "_rope_and_write_kv_kernel": (6, 64),
    "_norm_kernel": (8, 96),
    "_silu_mul_kernel": (3, 64),
    "_walk_kernel": (1, 40),
    "_sum_up_chunks_kernel": (2, 64),
    "_cut_rows_kernel": (2, 128),
    "_probs_kernel": (2, 64),
    "_draw_kernel": (2, 128),
    "_reject_kernel": (2, 128),
    "_select_kernel": (2, 96),
}
"""How often each is built, and the most registers it may use."""
MAX_SHARED_BYTES = {"_rope_and_write_kv_kernel": 0, "_norm_kernel": 1024, "_silu_mul_kernel": 0}
"""Of the kernels of layers: for the sum of a row only; the others take up to 48 KiB."""


@pytest.fixture(scope="module")
def builds() -> list[Build]:
    return compile_launches(CODE)


def test_every_size_is_built_and_no_more(builds: list[Build]) -> None:
    assert Counter(build.name for build in builds) == {name: number for name, (number, _) in KERNELS.items()}
    assert not any(build.constants.get("EMU") == "True" for build in builds)


def test_nothing_is_spilled_and_registers_leave_room_for_other_programs(builds: list[Build]) -> None:
    assert [build for build in builds if build.stack_bytes or build.registers > KERNELS[build.name][1]] == []
    assert all(32 * build.num_warps * build.registers <= 65536 for build in builds)


def test_shared_memory_leaves_room_for_other_programs(builds: list[Build]) -> None:
    assert [build for build in builds if build.shared_bytes > MAX_SHARED_BYTES.get(build.name, 48 * 1024)] == []

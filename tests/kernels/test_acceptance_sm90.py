"""Sampling, acceptance and tree kernels as compiled for an H100 or H200, with the vocabularies of Llama 2 and Llama 3."""

from __future__ import annotations

from sm90 import compile_launches

CODE = """
import torch
from titan.core.random import Purpose
from titan.core.trees import allocate_nodes
from titan.kernels.triton.row_distribution import normalized_probs, row_distributions
from titan.kernels.triton.sample_rows import draw_rows
from titan.kernels.triton.tree_rejection import reject_trees
from titan.kernels.triton.tree_select import select_trees
from titan.kernels.triton.tree_walk import VerifiedTrees, walk_matches

start_loc = torch.zeros(3, dtype=torch.int32)
for num_rows, max_depth in ((8, 6), (7, 1), (6, 16)):  # which differ from step to step
    floats, ints, longs = (torch.zeros(num_rows, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.int64))
    trees = VerifiedTrees.of(longs[2:].clone(), ints[2:].clone(), start_loc, max_depth=max_depth)
    walk_matches(trees, longs)
    for vocab_size, dtype in ((32000, torch.float32), (128256, torch.bfloat16)):
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

REGISTERS = {
    "_walk_kernel": 40,
    "_sum_up_chunks_kernel": 64,
    "_cut_rows_kernel": 128,
    "_probs_kernel": 64,
    "_draw_kernel": 128,
    "_reject_kernel": 128,
    "_select_kernel": 96,
}


def test_kernels_compile_once_without_spills_and_leave_room_for_two_programs_on_a_multiprocessor() -> None:
    builds = compile_launches(CODE)
    assert sorted(build.name for build in builds) == sorted([*REGISTERS, *REGISTERS][1:])
    for build in builds:
        assert build.stack_bytes == 0, build
        assert build.registers <= REGISTERS[build.name], build
        assert build.shared_bytes <= 48 * 1024, build

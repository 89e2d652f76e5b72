"""Sampling, acceptance and tree kernels as compiled for an H100 or H200, with the vocabularies of Llama 2 and Llama 3."""

from __future__ import annotations

from sm90 import compile_launches

CODE = """
import torch
import numpy as np
from titan.draft.tree_builder import ShapeGrowth
from titan.kernels.triton.place_nodes import place_nodes
from titan.kernels.triton.root_matches import root_matches
from titan.kernels.triton.row_distribution import normalized_probs, row_distributions
from titan.kernels.triton.sample_rows import draw_rows
from titan.kernels.triton.tree_nodes import allocate_nodes
from titan.kernels.triton.tree_rejection import reject_trees
from titan.kernels.triton.tree_select import select_trees
from titan.kernels.triton.tree_walk import walk_matches

from titan.sample.distributions import Purpose

start_loc = torch.zeros(3, dtype=torch.int32)
for num_rows, max_depth in ((8, 6), (7, 1), (6, 16)):  # which differ from step to step
    floats, ints, longs = (torch.zeros(num_rows, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.int64))
    trees = longs[2:].clone(), ints[2:].clone(), start_loc
    walk_matches(*trees, longs, max_depth=max_depth)
    for vocab_size, dtype in ((32000, torch.float32), (128256, torch.bfloat16)):
        logits, draft_probs = torch.zeros(num_rows, vocab_size, dtype=dtype), torch.zeros(3, vocab_size)
        distributions = row_distributions(logits, temperature=floats, top_k=ints, top_p=floats, min_p=floats)
        normalized_probs(distributions)
        draw_rows(distributions, longs, longs, purpose=Purpose.SAMPLE)
        reject_trees(distributions, draft_probs, ints, *trees, longs, longs, max_depth=max_depth)
        root_matches(distributions, draft_probs, ints, start_loc)

requests, nodes = start_loc[1:].clone(), allocate_nodes(7, start_loc.device)
for num_candidates in (*range(1, 33), 33, 45, 63, 100, 427, 510, 512):  # chains, trees along one, beams of 6 to 63 nodes
    candidates = torch.zeros(2, num_candidates, dtype=torch.int64)
    select_trees(candidates, candidates.float(), candidates, candidates, requests, requests, nodes)
for num_tokens in (9, 16):
    queries = torch.zeros(num_tokens, dtype=torch.int64)
    for depths in (nodes.depths, None):
        place_nodes(queries, queries, queries, start_loc, requests, start_loc, nodes.token_ids, nodes.ancestor_bits, depths)

growth = ShapeGrowth([np.array(parents, np.int32) for parents in ([-1, 0, 1, 2], [-1, 0, -1, 0, 1, 3])], None)
growth.plant(torch.rand(2, 50))
for depth in (1, 2, 3):
    frontier = growth.frontier(depth)
    place_nodes(queries, queries, queries, start_loc, requests, start_loc, frontier.token_ids, frontier.ancestor_bits, None)
    growth.grow(depth, torch.rand(len(frontier.token_ids), 50))
"""

REGISTERS = {
    "_walk_kernel": 40,
    "_sum_up_chunks_kernel": 64,
    "_cut_rows_kernel": 128,
    "_probs_kernel": 64,
    "_draw_kernel": 128,
    "_reject_kernel": 128,
    "_root_matches_kernel": 96,
    "_select_kernel": 96,
    "_place_kernel": 40,
}


def test_kernels_compile_once_without_spills_and_leave_room_for_two_programs_on_a_multiprocessor() -> None:
    builds = compile_launches(CODE)
    assert sorted(build.name for build in builds) == sorted([*REGISTERS, *REGISTERS][1:])
    for build in builds:
        assert build.stack_bytes == 0, build
        assert build.registers <= REGISTERS[build.name], build
        assert build.shared_bytes <= 48 * 1024, build

"""The device planner against plain Python loops."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import Request, chain, device_inputs, first_position, make_case
from interpreted import DEVICE

from titan.core.attention import Chunk, Window, window_sizes
from titan.kernels.triton.attention_plan import AttentionGeometry, DeviceLayout
from titan.kernels.triton.attention_planner import TreeAttentionPlan
from titan.kernels.triton.tuning import num_multiprocessors, tile_config

PARTS = [length * 2**i for i in range(8) for length in (1, 1.25, 1.5, 1.75)]
PROGRAM_COST = 400
SHORT_QUERY_LEN = 8


class Batch:
    def __init__(self, geometry: AttentionGeometry, requests: list[Request], num_padded: int = 0) -> None:
        self.geometry = geometry
        self.case = make_case(requests, geometry.block_size, layout="dense")
        self.inputs = device_inputs(self.case, num_padded)
        self.inputs["positions"] = self.inputs["positions"].int()  # which may be of either dtype

    def plan(self, fixed_chunk: int | None) -> TreeAttentionPlan:
        longest = max(request.query_len for request in self.case.requests)
        layout = DeviceLayout(self.geometry.block_size, **self.inputs, short_query_len=SHORT_QUERY_LEN, max_query_len=longest)
        return TreeAttentionPlan(layout, fixed_chunk)


def random_batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    num_kv_heads, group = int(rng.choice([1, 2, 8])), int(rng.choice([1, 3, 4, 7]))
    dtype = torch.float32 if rng.random() < 0.2 else torch.bfloat16
    geometry = AttentionGeometry(num_kv_heads * group, num_kv_heads, 64, int(rng.choice([16, 32])), dtype)
    longest = int(rng.choice([100, 1000, 9000]))
    requests = [Request(0)]
    for _ in range(int(rng.integers(0, 29))):
        context = int(rng.integers(0, longest))
        kinds = [
            Request(context, 0),
            Request(context, 1),
            Request(context, 1, chain(int(rng.integers(1, 8)))),
            Request(context, int(rng.integers(2, 150))),
        ]
        requests.append(kinds[rng.choice(4, p=[0.1, 0.3, 0.4, 0.2])])
    return Batch(geometry, requests, num_padded=int(rng.integers(0, 5)))


def expected_records(
    batch: Batch, is_short: bool, window: Window, fixed_chunk: int | None, max_parts: int
) -> tuple[list[list[int]], list[list[int]]]:
    group = batch.geometry.group
    config = config_of(batch, is_short)
    block_m, num_running = config.block_m, config.programs_per_multiprocessor * num_multiprocessors(DEVICE)
    tiles = []  # (request, first row, rows, first slot, end slot) before splits, and the most slots of a tile of the request
    for i, request in enumerate(batch.case.requests):
        query_len, visible_lens, most = request.query_len, request.visible_lens, request.seq_len
        if query_len == 0 or (query_len <= SHORT_QUERY_LEN) != is_short:
            continue
        first_row = batch.case.query_start_loc[i] * group
        if window is not None:
            tokens_of_tile = -(-(block_m + group - 1) // group)  # a tile may begin within a token
            size = window.size if isinstance(window, Chunk) else window
            most = most - first_position(window, visible_lens[0] - 1) if is_short else min(most, size + tokens_of_tile - 1)
        for row in range(0, query_len * group, block_m):
            num_rows = min(block_m, query_len * group - row)
            first_slot = first_position(window, visible_lens[row // group] - 1)
            end_slot = request.seq_len if is_short else visible_lens[(row + num_rows - 1) // group]
            tiles.append((i, first_row + row, num_rows, first_slot, end_slot, most))

    def score(chunk: int) -> tuple[int, int]:
        num_kv_heads, num_multi = batch.geometry.num_kv_heads, num_multiprocessors(DEVICE)
        splits = [max(-(-most // chunk), 1) for *_, most in tiles]
        num_parts, num_merges = sum(each for each in splits if each > 1), sum(each > 1 for each in splits)
        num_programs, num_slots = sum(splits) * num_kv_heads, sum(most for *_, most in tiles) * num_kv_heads
        longest = max((min(most, chunk) for *_, most in tiles), default=0) + PROGRAM_COST
        traffic = (num_slots + 2 * block_m * num_parts * num_kv_heads) // (5 * num_multi // 3) + PROGRAM_COST
        occupancy = (PROGRAM_COST * num_programs + num_slots) // num_running
        cost = max(traffic, occupancy, longest) + (longest // 2 if num_programs > num_running else 0)
        cost += num_merges * num_kv_heads * block_m // 16 + 3 * max((each for each in splits if each > 1), default=0)
        return cost if num_parts <= max_parts else 2**60, -chunk

    longest = max((most for *_, most in tiles), default=0) / config.block_n
    chunk = fixed_chunk or min((max(128, ceil(longest / parts) * config.block_n) for parts in PARTS), key=score)
    whole, rest, merges, part = [], [], [], 0
    for request, first_row, num_rows, first_slot, end_slot, most in tiles:
        num_splits = max(-(-most // chunk), 1)
        if num_splits > 1:
            merges.append([first_row, num_rows, part, num_splits])
        for split in range(num_splits):
            start = min(first_slot + split * chunk, end_slot)
            record = [request, first_row, num_rows, start, min(start + chunk, end_slot), part if num_splits > 1 else -1]
            (whole if (split + 1) * chunk <= most else rest).append(record)
            part += num_splits > 1
    return whole + rest, merges


def config_of(batch: Batch, is_short: bool) -> Any:
    max_rows = SHORT_QUERY_LEN * batch.geometry.group if is_short else None
    return tile_config(max_rows, head_dim=64, dtype=batch.geometry.dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("fixed_chunk", "num_batches", "sizes"),
    # with the latter, a tile's slots are one more than a chunk, where few tokens share a tile of 128 rows
    [(None, 20, (1, 60, 300, 5000, Chunk(50), Chunk(700))), (512, 12, (386, 470, 494))],
)
def test_records_are_those_of_plain_loops(fixed_chunk: int | None, num_batches: int, sizes: Sequence[Window]) -> None:
    num_splits = set()
    for seed in range(num_batches):
        batch = random_batch(seed)
        plan = batch.plan(fixed_chunk)
        for window in (None, sizes[seed % len(sizes)]):
            launches = plan.launches(batch.geometry, window)
            has_long = max(request.query_len for request in batch.case.requests) > SHORT_QUERY_LEN
            assert [launch.ancestor_bits is not None for launch in launches] == [True, False][: 1 + has_long]
            for launch in launches:
                is_short, max_parts = launch.ancestor_bits is not None, len(launch.part_outputs)
                assert launch.config == config_of(batch, is_short)
                num_tiles, num_merges = launch.counts.tolist()
                assert num_tiles <= len(launch.tiles) and num_merges <= len(launch.merges)
                tiles, merges = launch.tiles[:num_tiles, :6].tolist(), launch.merges[:num_merges].tolist()
                assert (tiles, merges) == expected_records(batch, is_short, window, fixed_chunk, max_parts)
                assert all(part < max_parts for *_, part in tiles)
                num_splits |= {number for *_, number in merges}
    assert len(num_splits) >= 4


@pytest.mark.parametrize(("head_dim", "value_dim", "columns"), [(16, None, 64), (40, 13, 64), (128, None, 128), (192, 128, 128)])
def test_tiles_of_values_have_as_many_columns_as_a_compiler_gets_right(head_dim: int, value_dim: int | None, columns: int) -> None:
    assert AttentionGeometry(8, 2, head_dim, 16, torch.bfloat16, value_dim).padded_value_dim == columns


@pytest.mark.parametrize(
    ("num_requests", "context", "least", "most"),
    [
        *((1, 1000, 8, 8), (1, 4000, 16, 21), (1, 32768, 26, 33), (8, 250, 1, 1), (8, 1000, 3, 4), (8, 8192, 4, 4)),
        (8, 4000, 4, 4),
        *((32, context, 1, 1) for context in (250, 500, 1000, 4000)),
        (128, 1000, 1, 1),
    ],
)
def test_contexts_are_split_as_measured_on_an_h200(
    num_requests: int, context: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the sizes of Llama 3 8B, with seven tokens each; bench/results/gpu-h200-splits.md has all that was tried there."""
    monkeypatch.setattr("titan.kernels.triton.attention_planner.num_multiprocessors", lambda device: 132)
    geometry = AttentionGeometry(32, 8, 128, 16, torch.bfloat16)
    requests = [Request(context, 1, chain(6)) for _ in range(num_requests)]
    [launch] = Batch(geometry, requests).plan(None).launches(geometry, None)
    assert num_requests * least <= launch.counts[0] <= num_requests * most
    assert launch.part_outputs.nbytes <= 66 * 2**20


@pytest.mark.parametrize("window", [1, 2, 5, 62, 63, Chunk(9), Chunk(80)])
def test_bits_of_ancestors_beyond_the_window_are_dropped(window: int | Chunk) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**64, 300, dtype=np.uint64) & rng.integers(0, 2**64, 300, dtype=np.uint64)
    bits[:4] = [0, 1, 2**63, 2**64 - 1]
    bits[4:100] |= rng.integers(0, 2**64, 96, dtype=np.uint64)
    geometry = AttentionGeometry(1, 1, 64, 16, torch.bfloat16)
    batch = Batch(geometry, [Request(0)], num_padded=299)
    batch.inputs["ancestor_bits"] = torch.from_numpy(bits.view(np.int64)).to(DEVICE)
    positions = rng.integers(0, 200, 300)
    batch.inputs["positions"].copy_(torch.from_numpy(positions))
    plan = batch.plan(None)
    kept = plan.launches(geometry, window)[0].ancestor_bits
    assert plan.launches(geometry, window) is plan.launches(geometry, window), "planned once for all layers"
    assert kept is not None
    expected = [
        sum(1 << bit for bit in [bit for bit in range(64) if each >> bit & 1][-size:])
        for each, size in zip(bits.tolist(), window_sizes(window, positions).tolist(), strict=True)
    ]
    assert kept.cpu().numpy().view(np.uint64).tolist() == expected
    assert plan.launches(geometry, 64)[0].ancestor_bits is batch.inputs["ancestor_bits"]

"""The device planner against plain Python loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from titan.core.batch import Window
from titan.kernels.triton.attention_plan import MAX_REQUESTS, AttentionGeometry, DeviceLayout, TileLaunch, TreeAttentionPlan
from titan.kernels.triton.attention_planner import plan_tree_attention
from titan.kernels.triton.tools import INTERPRETED
from titan.kernels.triton.tuning import num_multiprocessors, tile_config

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
CANDIDATES = [length * 2**i for i in range(16) for length in (128, 192)]
TILE_COST = 96


@dataclass(frozen=True)
class Batch:
    geometry: AttentionGeometry
    query_lens: list[int]
    seq_lens: list[int]
    num_nodes: list[int]  # the last so many tokens of each query, which see as much of the context as the token before them
    short_query_len: int
    num_padded: int

    @property
    def query_start_loc(self) -> list[int]:
        return [0, *np.cumsum(self.query_lens).tolist()]

    def visible_lens(self, request: int) -> list[int]:
        num_tokens = self.query_lens[request] - self.num_nodes[request]
        start = self.seq_lens[request] - self.query_lens[request]
        return [start + i + 1 for i in range(num_tokens)] + [start + num_tokens] * self.num_nodes[request]

    def inputs(self) -> dict[str, Tensor]:
        lens = [each for request in range(len(self.query_lens)) for each in self.visible_lens(request)]
        lens += [0] * self.num_padded
        max_blocks = -(-max(self.seq_lens) // self.geometry.block_size) + 1
        num_requests = len(self.query_lens)

        def int32(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        return {
            "query_start_loc": int32(self.query_start_loc),
            "seq_lens": int32(self.seq_lens),
            "block_table": torch.zeros(num_requests, max_blocks, dtype=torch.int32, device=DEVICE),
            "positions": int32([length - 1 for length in lens]),
            "visible_lens": int32(lens),
            "tree_starts": torch.zeros(num_requests, dtype=torch.int32, device=DEVICE),
            "ancestor_bits": torch.zeros(len(lens), dtype=torch.int64, device=DEVICE),
        }

    def plan(self, windows: tuple[Window, ...], fixed_chunk: int | None) -> TreeAttentionPlan:
        layout = DeviceLayout(
            self.geometry, **self.inputs(), short_query_len=self.short_query_len, max_query_len=max(self.query_lens)
        )
        return plan_tree_attention(layout, windows, fixed_chunk)


def random_batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    num_kv_heads, group = int(rng.choice([1, 2, 8])), int(rng.choice([1, 3, 4, 7]))
    dtype = torch.float32 if rng.random() < 0.2 else torch.bfloat16
    geometry = AttentionGeometry(num_kv_heads * group, num_kv_heads, 64, int(rng.choice([16, 32])), dtype)
    num_requests = int(rng.integers(1, 30))
    longest = int(rng.choice([100, 1000, 9000]))
    query_lens, seq_lens, num_nodes = [], [], []
    for _ in range(num_requests):
        kind = rng.choice(["empty", "decode", "tree", "chunk"], p=[0.1, 0.3, 0.4, 0.2])
        nodes = int(rng.integers(1, 8)) if kind == "tree" else 0
        length = {"empty": 0, "decode": 1, "tree": 1 + nodes, "chunk": int(rng.integers(2, 150))}[str(kind)]
        query_lens.append(length)
        num_nodes.append(nodes)
        seq_lens.append(length + int(rng.integers(0, longest)))
    if not any(query_lens):
        query_lens[0], seq_lens[0] = 1, 1
    return Batch(geometry, query_lens, seq_lens, num_nodes, short_query_len=8, num_padded=int(rng.integers(0, 5)))


def expected_records(
    batch: Batch, is_short: bool, window: Window, fixed_chunk: int | None, max_parts: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Tiles and merges in their order, by loops."""
    group = batch.geometry.group
    config = config_of(batch, is_short)
    block_m, num_running = config.block_m, config.programs_per_multiprocessor * num_multiprocessors(DEVICE)
    tiles = []  # (request, first row, rows, first slot, end slot) before splits, and the most slots of a tile of the request
    for request, query_len in enumerate(batch.query_lens):
        if query_len == 0 or (query_len <= batch.short_query_len) != is_short:
            continue
        visible_lens = batch.visible_lens(request)
        first_row = batch.query_start_loc[request] * group
        most = batch.seq_lens[request]
        if window is not None:
            tokens_of_tile = -(-(block_m + group - 1) // group)  # a tile may begin within a token
            most = most - max(visible_lens[0] - window, 0) if is_short else min(most, window + tokens_of_tile - 1)
        for row in range(0, query_len * group, block_m):
            num_rows = min(block_m, query_len * group - row)
            first_slot = 0 if window is None else max(visible_lens[row // group] - window, 0)
            end_slot = batch.seq_lens[request] if is_short else visible_lens[(row + num_rows - 1) // group]
            tiles.append((request, first_row + row, num_rows, first_slot, end_slot, most))

    def score(chunk: int) -> tuple[int, int]:
        splits = [max(-(-most // chunk), 1) for *_, most in tiles]
        num_parts = sum(each for each in splits if each > 1)
        work = sum(most + TILE_COST * each for (*_, most), each in zip(tiles, splits, strict=True))
        longest = max((min(most, chunk) for *_, most in tiles), default=0) + TILE_COST
        share = -(-work * batch.geometry.num_kv_heads // num_running)
        return (2 * max(share, longest) + longest if num_parts <= max_parts else 2**60), -chunk

    chunk = fixed_chunk or min(CANDIDATES, key=score)
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
    max_rows = batch.short_query_len * batch.geometry.group if is_short else None
    return tile_config(max_rows, head_dim=64, dtype=batch.geometry.dtype, device=DEVICE)


def records_of(launch: TileLaunch) -> tuple[list[list[int]], list[list[int]]]:
    num_tiles, num_merges = launch.counts.tolist()
    assert num_tiles <= len(launch.tiles) and num_merges <= len(launch.merges)
    return launch.tiles[:num_tiles, :6].tolist(), launch.merges[:num_merges].tolist()


@pytest.mark.parametrize(("fixed_chunk", "num_batches"), [(None, 20), (512, 8)])
def test_records_are_those_of_plain_loops(fixed_chunk: int | None, num_batches: int) -> None:
    num_splits = set()
    for seed in range(num_batches):
        batch = random_batch(seed)
        windows = (None, [1, 60, 300, 5000][seed % 4])
        plan = batch.plan(windows, fixed_chunk)
        for window in windows:
            launches = plan.launches[window]
            has_long = max(batch.query_lens) > batch.short_query_len
            assert [launch.ancestor_bits is not None for launch in launches] == [True, False][: 1 + has_long]
            for launch in launches:
                is_short, max_parts = launch.ancestor_bits is not None, len(launch.part_outputs)
                assert launch.config == config_of(batch, is_short)
                tiles, merges = records_of(launch)
                assert (tiles, merges) == expected_records(batch, is_short, window, fixed_chunk, max_parts)
                assert all(part < max_parts for *_, part in tiles)
                num_splits |= {number for *_, number in merges}
    assert len(num_splits) > 5


def test_few_requests_with_long_contexts_are_split_and_many_are_not() -> None:
    geometry = AttentionGeometry(8, 2, 64, 16, torch.bfloat16)
    few = Batch(geometry, [4], [4000], [3], 8, 0).plan((None,), None).launches[None][0]
    num_running = few.num_running // geometry.num_kv_heads
    assert min(num_running, 4000 // 128) / 2 <= few.counts[0] <= 2 * num_running
    number = min(8 * num_running, MAX_REQUESTS)
    many = Batch(geometry, [4] * number, [4000] * number, [3] * number, 8, 0).plan((None,), None).launches[None][0]
    assert many.counts.tolist() == [number, 0]


@pytest.mark.parametrize("window", [1, 2, 5, 62, 63])
def test_bits_of_ancestors_beyond_the_window_are_dropped(window: int) -> None:
    rng = np.random.default_rng(window)
    bits = rng.integers(0, 2**64, 300, dtype=np.uint64) & rng.integers(0, 2**64, 300, dtype=np.uint64)
    bits[:4] = [0, 1, 2**63, 2**64 - 1]
    bits[4:100] |= rng.integers(0, 2**64, 96, dtype=np.uint64)
    geometry = AttentionGeometry(1, 1, 64, 16, torch.bfloat16)
    inputs = Batch(geometry, [1], [1], [0], 8, 299).inputs()
    inputs["ancestor_bits"] = torch.from_numpy(bits.view(np.int64)).to(DEVICE)
    plan = plan_tree_attention(DeviceLayout(geometry, **inputs, short_query_len=8, max_query_len=1), (window, 64))
    kept = plan.launches[window][0].ancestor_bits
    assert kept is not None
    expected = [sum(1 << bit for bit in [bit for bit in range(64) if each >> bit & 1][-window:]) for each in bits.tolist()]
    assert kept.cpu().numpy().view(np.uint64).tolist() == expected
    assert plan.launches[64][0].ancestor_bits is inputs["ancestor_bits"]

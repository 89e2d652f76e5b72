"""The device planner against plain Python loops, and what it refuses."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize("fixed_chunk", [None, 48])
@pytest.mark.parametrize("window", [None, 1, 37])
def test_every_visible_slot_is_looked_at_by_one_program(window: Window, fixed_chunk: int | None) -> None:
    group = 3
    geometry = AttentionGeometry(2 * group, 2, 64, 16, torch.bfloat16)
    batch = Batch(geometry, [1, 8, 0, 40, 70, 6], [300, 120, 50, 40, 500, 6], [0, 7, 0, 0, 0, 5], 8, 3)
    looks = np.zeros((sum(batch.query_lens) * group, max(batch.seq_lens)), np.int64)
    owners = np.repeat(np.arange(len(batch.query_lens)), batch.query_lens)
    for launch in batch.plan((window,), fixed_chunk).launches[window]:
        for request, first_row, num_rows, first_slot, end_slot, _ in records_of(launch)[0]:
            assert (owners[first_row // group], owners[(first_row + num_rows - 1) // group]) == (request, request)
            looks[first_row : first_row + num_rows, first_slot:end_slot] += 1
    for token, owner in enumerate(owners):
        visible_len = batch.visible_lens(int(owner))[token - batch.query_start_loc[owner]]
        first = 0 if window is None else max(visible_len - window, 0)
        end = batch.seq_lens[owner] if batch.num_nodes[owner] else visible_len
        assert (looks[token * group : (token + 1) * group, first:end] == 1).all()
    assert looks.max() == 1


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


SMALL = Batch(AttentionGeometry(4, 2, 64, 16, torch.bfloat16), [1, 3], [5, 9], [0, 0], 8, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"short_query_len": 0}, "short_query_len is 0: it must be at least 1"),
        ({"max_query_len": 0}, "max_query_len is 0: it must be at least 1"),
        ({"windows": ()}, "windows is empty: it must have one entry, None for full attention"),
        ({"windows": (None, 0)}, "windows has 0: each must be None or from 1 to 1073741824"),
        ({"fixed_chunk": 40}, "fixed_chunk is 40: it must be a positive multiple of 16, or None"),
        (
            {"query_start_loc": torch.zeros(4, dtype=torch.int32, device=DEVICE)},
            "query_start_loc has shape [4]: it must be [3]",
        ),
        (
            {"seq_lens": torch.zeros(2, dtype=torch.int64, device=DEVICE)},
            "seq_lens has dtype torch.int64: it must be torch.int32",
        ),
        (
            {"ancestor_bits": torch.zeros(5, dtype=torch.int32, device=DEVICE)},
            "ancestor_bits has dtype torch.int32: it must be torch.int64",
        ),
        (
            {"visible_lens": torch.zeros(10, dtype=torch.int32, device=DEVICE)[::2]},
            "visible_lens has strides (2,): it must be contiguous",
        ),
        ({"tree_starts": torch.zeros(2, dtype=torch.int32, device="meta")}, f"tree_starts is on meta: it must be on {DEVICE}"),
        (
            {"block_table": torch.zeros(2, 0, dtype=torch.int32, device=DEVICE)},
            "block_table has room for 0 slots per request: it must be 1 to 6291456",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {**SMALL.inputs(), "short_query_len": 8, "max_query_len": 3, **changes}
    options = {name: arguments.pop(name) for name in ("windows", "fixed_chunk") if name in arguments}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        plan_tree_attention(DeviceLayout(SMALL.geometry, **arguments), **options)


def test_too_many_requests_are_refused() -> None:
    ones = [1] * (MAX_REQUESTS + 1)
    many = Batch(SMALL.geometry, ones, ones, [0] * len(ones), 8, 0)
    with pytest.raises(ValueError, match=r"^seq_lens has 1025 requests: there must be 1 to 1024"):
        many.plan((None,), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "num_heads is 5: it must be a multiple of num_kv_heads, 2"),
        ({"head_dim": 512}, "head_dim is 512: it must be from 8 to 256"),
        ({"block_size": 8}, "block_size is 8: it must be one of (16, 32)"),
        ({"dtype": torch.float64}, "dtype is torch.float64: it must be one of torch.bfloat16, torch.float16, torch.float32"),
    ],
)
def test_geometry_that_the_kernel_cannot_take_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 16, "dtype": torch.float16}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        AttentionGeometry(**(arguments | changes))

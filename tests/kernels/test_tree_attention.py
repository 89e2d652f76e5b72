"""The Triton kernel against float64, without an engine's layout: padding, splits, caps, later passes, and a real model's sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from attention_cases import Request, chain, device_inputs, make_case, queries, random_kv, random_parents, star
from interpreted import DEVICE, ON_CUDA, make_capture
from torch import Tensor

from titan.core.attention import AttentionSpec, Chunk, Window
from titan.core.limits import MAX_NODES
from titan.kernels.triton.attention_plan import DeviceLayout
from titan.kernels.triton.attention_planner import TreeAttentionPlan
from titan.kernels.triton.tools import INTERPRETED
from titan.kernels.triton.tree_attention import tree_attention

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {FP32: 1e-6, FP16: 5e-4, BF16: 4e-3 if INTERPRETED else 6e-3}
"""Of ``|output - expected| / |expected|``."""


@dataclass(frozen=True)
class Setup:
    requests: Sequence[Request]
    group: int = 4
    num_kv_heads: int = 1
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = FP32
    window: Window = None
    softcap: float | None = None
    value_dim: int | None = None
    is_latent: bool = False
    has_sinks: bool = False
    fixed_chunk: int | None = None
    short_query_len: int = 8
    num_padded: int = 0
    seed: int = 0


class Batch:
    def __init__(self, setup: Setup) -> None:
        requests = [replace(request) for request in setup.requests]  # each batch gives them blocks of its own
        num_heads = setup.group * setup.num_kv_heads
        self.setup = setup
        self.case = make_case(requests, setup.block_size, setup.window, seed=setup.seed)
        num_planes = 1 if setup.is_latent else 2
        self.kv = random_kv(
            self.case, setup.num_kv_heads, setup.dtype, setup.head_dim, spares_owned=False, num_planes=num_planes
        ).to(DEVICE)
        self.q = queries(self.case.query_start_loc[-1] + setup.num_padded, num_heads, setup.dtype, setup.head_dim, DEVICE)
        sinks = 3 * torch.randn(num_heads, generator=torch.Generator().manual_seed(2))
        self.sinks = sinks.to(DEVICE) if setup.has_sinks else None
        self.inputs = device_inputs(self.case, setup.num_padded)
        self.scale = 1.5 * float(setup.head_dim) ** -0.5

    def run(self) -> Tensor:
        setup, longest = self.setup, max(each.query_len for each in self.case.requests)
        layout = DeviceLayout(setup.block_size, **self.inputs, short_query_len=setup.short_query_len, max_query_len=longest)
        plan = TreeAttentionPlan(layout, setup.fixed_chunk)
        return tree_attention(
            self.q, self.kv, plan, AttentionSpec(self.scale, setup.window, setup.softcap, setup.value_dim), self.sinks
        )

    def check(self) -> None:
        self.check_output(self.run())

    def check_output(self, output: Tensor) -> None:
        expected = self.case.expected(self.q, self.kv, self.scale, self.setup.softcap, self.setup.value_dim, self.sinks)
        assert not expected.isnan().any()
        assert output.dtype == self.setup.dtype and output.shape == expected.shape
        assert (output.double() - expected).norm() <= TOLERANCE[self.setup.dtype] * expected.norm()
        assert (output[self.case.query_start_loc[-1] :] == 0).all()

    def rows(self, values: Tensor, index: int) -> Tensor:
        return values[self.case.query_start_loc[index] : self.case.query_start_loc[index + 1]]


def random_tree(seed: int, num_nodes: int, reach: int) -> list[int]:
    return random_parents(np.random.default_rng(seed), num_nodes, reach)


EMPTY = Request(20, 0)
LARGE_TREES = [Request(33, 1, random_tree(5, 63, 4)), Request(5, 1, random_tree(6, 63, 60)), Request(16, 1, chain(64))]

CASES = {
    "63 and 64 nodes": Setup(LARGE_TREES, group=1, short_query_len=65, num_padded=3),
    "63 and 64 nodes, split, windowed": Setup(LARGE_TREES[:2], group=1, short_query_len=65, fixed_chunk=32, window=5, dtype=BF16),
    "only chunks": Setup([Request(0, 33), Request(17, 70), Request(100, 5)], short_query_len=1, dtype=BF16),
    "a head of 256": Setup([Request(0, 21), EMPTY, Request(15, 1, star(7))], group=2, head_dim=256, dtype=BF16),
    "slots that all rows see, within a window": Setup([Request(90, 70), Request(400, 1, random_tree(7, 7, 3))], window=170),
    "chunks, sinks and narrow values, split": Setup(
        [Request(70, 1, random_tree(3, 20, 3)), Request(50, 40), EMPTY, Request(55)],
        group=3,
        window=Chunk(74),
        value_dim=40,
        has_sinks=True,
        fixed_chunk=32,
        short_query_len=24,
        num_padded=2,
    ),
    "latents, sinks, split": Setup(
        [Request(100, 1, chain(5)), Request(30, 20)],
        group=16,
        head_dim=56,
        value_dim=40,
        is_latent=True,
        has_sinks=True,
        fixed_chunk=32,
        dtype=BF16,
    ),
    "splits as the planner likes": Setup([Request(700, 1, chain(3)), Request(30)], num_kv_heads=2, dtype=BF16),
}


def of_a_model(num_requests: int, max_context: int, num_nodes: int = 6, num_chunks: int = 0, **options: Any) -> Setup:
    """Random trees behind random contexts, and prefill chunks between them, at the sizes of Llama 3 8B but for the options."""
    rng = np.random.default_rng(0)
    contexts = rng.integers(max_context // 2, max_context, num_requests, endpoint=True).tolist()
    requests = [Request(context, 1, random_tree(context, num_nodes, MAX_NODES)) for context in contexts]
    for i in range(num_chunks):
        requests.insert(2 * i, Request(int(rng.integers(max_context)), 512))
    sizes = {"group": 4, "num_kv_heads": 8, "head_dim": 128, "dtype": BF16, "short_query_len": num_nodes + 1}
    return Setup(requests, **(sizes | options))


LARGE_CASES = {
    "trees of 6 nodes": of_a_model(16, 4096),
    "one long context": of_a_model(1, 32768),
    "decodes": of_a_model(64, 2048, 0),
    "trees of 63 nodes": of_a_model(8, 2048, MAX_NODES),
    "prefill chunks": of_a_model(0, 2048, 0, 3),
    "mixed with prefill chunks": of_a_model(12, 4096, 6, 2),
    "heads of 64 in float16": of_a_model(16, 4096, 6, 1, head_dim=64, dtype=FP16),
    "float32": of_a_model(8, 2048, 6, 1, dtype=FP32),
    "7 query heads per KV head, blocks of 32": of_a_model(8, 2048, group=7, num_kv_heads=4, block_size=32),
    "sliding window": of_a_model(12, 4096, 6, 1, window=1024),
    "window below the depth": of_a_model(12, 512, 32, window=3),
    "softcap of scores": of_a_model(12, 2048, 6, 1, softcap=30.0),
    "chunks and sinks": of_a_model(12, 4096, 6, 1, window=Chunk(1500), has_sinks=True),
    "narrow values": of_a_model(12, 2048, 6, 1, head_dim=192, value_dim=128),
    "heads of 512": of_a_model(4, 2048, 6, 1, head_dim=512),
    "latents": of_a_model(12, 4096, 6, 1, group=128, num_kv_heads=1, head_dim=576, value_dim=512, is_latent=True),
    "latents in float32": of_a_model(
        2, 2048, 6, 1, group=16, num_kv_heads=1, head_dim=576, value_dim=512, is_latent=True, dtype=FP32
    ),
}
"""Too large for the interpreter."""


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=ON_CUDA) for name in LARGE_CASES)])
def test_output_is_that_of_the_twin(name: str) -> None:
    Batch((CASES | LARGE_CASES)[name]).check()


@pytest.mark.long_where("[2]", "[13]")
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # of far scores below a softcap, where infinity is right
@pytest.mark.parametrize("seed", range(18))
def test_any_mix_of_queries_and_options(seed: int) -> None:
    rng = np.random.default_rng(seed)
    requests = [Request(3)]
    for _ in range(int(rng.integers(2, 7))):
        context, nodes = int(rng.choice([0, 1, 15, 16, 17, 31, 32, 33, 64, 65, rng.integers(90)])), int(rng.integers(1, 8))
        parents = random_parents(rng, nodes, int(rng.integers(1, 8)))
        kinds = [
            Request(context, 1, parents),
            Request(context, 0, parents, first_node=int(rng.integers(0, nodes))) if context else EMPTY,
            Request(context, int(rng.integers(1, 50))),
            Request(context, int(rng.integers(0, 2))),
        ]
        requests.insert(0, kinds[rng.integers(4)])
    batch = Batch(
        Setup(
            requests,
            group=int(rng.choice([1, 2, 3, 4, 5, 7, 8])),
            num_kv_heads=int(rng.integers(1, 3)),
            head_dim=int(rng.choice([16, 40, 48, 64, 80, 128])),
            block_size=int(rng.choice([16, 32])),
            dtype=[BF16, FP16, FP32][rng.integers(3)],
            window=[None, 1, 3, 20, Chunk(5), Chunk(37)][rng.integers(6)],
            softcap=[None, 5.0][rng.integers(2)],
            fixed_chunk=[None, 16, 48, 64][rng.integers(4)],
            short_query_len=int(rng.choice([8, 16])),
            num_padded=int(rng.integers(0, 4)),
            value_dim=[None, 13][rng.integers(2)],
            has_sinks=bool(rng.integers(2)),
            seed=seed,
        )
    )
    batch.check()


def test_blocks_may_lie_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:  # which copies back all that it was given, though on a CPU it works in place: 4 GiB, most never touched
        monkeypatch.setattr(triton.runtime.interpreter.GridExecutor, "_restore_args_dev", lambda *args: None)
    batch = Batch(Setup([Request(40, 1, chain(3))], head_dim=16, dtype=BF16, group=1))
    stride = 2**31 // 3
    [request] = batch.case.requests
    assert stride * max(request.block_ids) > 2**31
    memory = torch.empty(stride * batch.case.num_blocks, dtype=BF16, device=DEVICE)
    batch.kv = memory.as_strided(batch.kv.shape, (1024, 512, stride, 16, 1)).copy_(batch.kv)
    batch.check()


FIVE = [Request(70, 1, random_tree(7, 7, 3)), Request(40, 30), Request(90), Request(0, 11), Request(150)]


@pytest.mark.parametrize(
    "setup",
    [
        Setup(FIVE, group=2, fixed_chunk=32, dtype=BF16),
        Setup(FIVE, group=2, fixed_chunk=32, dtype=BF16, window=21),
        pytest.param(of_a_model(4, 4096, 6, 1, fixed_chunk=1024), marks=ON_CUDA),
    ],
)
def test_with_fixed_chunks_a_request_does_not_depend_on_its_batch(setup: Setup) -> None:
    """Nor on its place in it, nor on where its blocks lie; bit for bit."""
    batch = Batch(setup)
    outputs = batch.run()
    for members in ([1], [4, 2], [3, 1, 0, 2, 4]):
        others = Batch(replace(setup, requests=[setup.requests[i] for i in members], seed=5, num_padded=4))
        for place, i in enumerate(members):
            others.kv[:, :, others.case.requests[place].block_ids] = batch.kv[:, :, batch.case.requests[i].block_ids]
            others.rows(others.q, place).copy_(batch.rows(batch.q, i))
        result = others.run()
        for place, i in enumerate(members):
            assert torch.equal(others.rows(result, place), batch.rows(outputs, i))


def test_a_captured_plan_serves_other_lengths_when_its_inputs_are_written_in_place() -> None:
    batch = Batch(Setup([Request(40, 1, chain(7)), Request(9), Request(30)], group=2, fixed_chunk=16, num_padded=2))
    later = Batch(Setup([Request(0, 3), EMPTY, Request(55, 1, star(7))], group=2, num_padded=1))
    batch.q, batch.kv = later.q, later.kv
    batch.run()  # compiled before it is captured
    replay = make_capture()(batch.run)
    assert replay is not None
    for name, given in batch.inputs.items():
        other = later.inputs[name]
        if name == "block_table":
            width = min(given.shape[1], other.shape[1])
            given[:, :width] = other[:, :width]
        else:
            given.copy_(other)
    replay.run()
    later.check_output(replay.output)

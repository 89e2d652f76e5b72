"""The Triton kernel against its twin in float64: ragged mixes of all that a step can hold, in a pool poisoned with NaN."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from attention_reference import reference_masked_attention, reference_tree_attention
from interpreted import DEVICE, ON_CUDA, make_capture
from torch import Tensor

from titan.core.batch import Window
from titan.core.limits import MAX_NODES
from titan.kernels.triton import attention_planner
from titan.kernels.triton.attention_plan import AttentionGeometry, DeviceLayout, TreeAttentionPlan
from titan.kernels.triton.attention_planner import plan_tree_attention
from titan.kernels.triton.tools import INTERPRETED
from titan.kernels.triton.tree_attention import tree_attention

TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3 if INTERPRETED else 6e-3}
"""Of ``|output - expected| / |expected|``."""


@dataclass(frozen=True)
class Query:
    """Committed tokens in slots ``context, ...``, then the tree nodes from ``first_node`` on, which hang at the slot before."""

    context: int
    num_tokens: int = 1
    parents: Sequence[int] = ()
    first_node: int = 0

    @property
    def tree_start(self) -> int:
        return self.context + self.num_tokens

    @property
    def query_len(self) -> int:
        return self.num_tokens + len(self.parents) - self.first_node

    @property
    def seq_len(self) -> int:
        return self.tree_start + len(self.parents)

    def path(self, node: int) -> list[int]:
        """The node and its ancestors, nearest first."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path

    def must_see(self, window: Window) -> Tensor:
        """Bool [query_len, seq_len], said without bits, lengths or shifts."""
        rows = []
        nodes = range(self.first_node, len(self.parents))
        lines = [list(range(slot + 1)) for slot in range(self.context, self.tree_start)]
        lines += [[*range(self.tree_start), *(self.tree_start + each for each in reversed(self.path(node)))] for node in nodes]
        for line in lines:  # the slots on the way to this token, itself last
            row = torch.zeros(self.seq_len, dtype=torch.bool)
            row[line if window is None else line[-window:]] = True
            rows.append(row)
        return torch.stack(rows) if rows else torch.zeros(0, self.seq_len, dtype=torch.bool)


def chain(num_nodes: int) -> list[int]:
    return list(range(-1, num_nodes - 1))


def star(num_nodes: int) -> list[int]:
    return [-1] * num_nodes


def random_parents(seed: int, num_nodes: int, reach: int) -> list[int]:
    """A small reach makes deep trees."""
    rng = np.random.default_rng(seed)
    return [int(rng.integers(max(-1, node - reach), node)) for node in range(num_nodes)]


@dataclass(frozen=True)
class Setup:
    queries: Sequence[Query]
    group: int = 4
    num_kv_heads: int = 1
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: Window = None
    softcap: float | None = None
    fixed_chunk: int | None = None
    short_query_len: int = 8
    num_padded: int = 0
    layout: str = "shuffled"  # or "descending"
    seed: int = 0


@dataclass
class Batch:
    """A setup with numbers in it."""

    setup: Setup
    q: Tensor
    kv: Tensor
    query_start_loc: list[int]
    block_table: list[list[int]]
    inputs: dict[str, Tensor]

    def plan(self, **changes: Tensor) -> TreeAttentionPlan:
        setup = self.setup
        geometry = AttentionGeometry(
            setup.group * setup.num_kv_heads, setup.num_kv_heads, setup.head_dim, setup.block_size, setup.dtype
        )
        longest = max(query.query_len for query in setup.queries)
        layout = DeviceLayout(geometry, **(self.inputs | changes), short_query_len=setup.short_query_len, max_query_len=longest)
        return plan_tree_attention(layout, (None,) if setup.window is None else (None, setup.window), setup.fixed_chunk)

    def run(self, plan: TreeAttentionPlan | None = None) -> Tensor:
        setup = self.setup
        plan = plan or self.plan()
        return tree_attention(self.q, self.kv, plan, scale=scale_of(setup), window=setup.window, softcap=setup.softcap)

    def expect(self) -> Tensor:
        setup = self.setup
        return reference_masked_attention(
            self.q,
            self.kv,
            query_start_loc=self.query_start_loc,
            block_table=self.block_table,
            visible=[query.must_see(setup.window) for query in setup.queries],
            scale=scale_of(setup),
            softcap=setup.softcap,
        )


def scale_of(setup: Setup) -> float:
    return 1.5 * float(setup.head_dim) ** -0.5


def make_batch(setup: Setup) -> Batch:
    """Lay the queries out as `titan.execute.batch` does; every slot that no query may look at is NaN, every hidden one far off."""
    generator = torch.Generator().manual_seed(setup.seed)
    rng = np.random.default_rng(setup.seed)
    queries, block_size = setup.queries, setup.block_size
    sizes = [-(-query.seq_len // block_size) for query in queries]
    order = np.arange(sum(sizes) + 3)[::-1] if setup.layout == "descending" else rng.permutation(sum(sizes) + 3)
    tables = [each.tolist() for each in np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1])]
    width = max(sizes) + 2
    # tails name blocks of others, which must not be read
    block_table = np.stack([np.array([*table, *rng.choice(order, width - len(table))]) for table in tables])

    num_heads = setup.group * setup.num_kv_heads
    num_tokens = sum(query.query_len for query in queries) + setup.num_padded
    fused = torch.randn(num_tokens, num_heads + 2, setup.head_dim, generator=generator).to(setup.dtype)
    kv = torch.randn(2, setup.num_kv_heads, len(order), block_size, setup.head_dim, generator=generator).to(setup.dtype)
    is_live = torch.zeros(len(order), block_size, dtype=torch.bool)
    is_seen = is_live.clone()
    positions, visible_lens, bits = [], [], []
    for query, table in zip(queries, tables, strict=True):
        seen = query.must_see(setup.window)
        slots = torch.arange(query.seq_len)
        places = (torch.tensor(table, dtype=torch.int64)[slots // block_size], slots % block_size)
        is_seen[places] = seen.any(0)
        start = 0 if setup.window is None else query.context + (query.num_tokens > 0) - setup.window
        is_live[places] = slots >= start
        positions += range(query.context, query.tree_start)
        visible_lens += range(query.context + 1, query.tree_start + 1)
        for node in range(query.first_node, len(query.parents)):
            path = query.path(node)
            positions.append(query.tree_start - 1 + len(path))
            visible_lens.append(query.tree_start)
            bits += [0] * (len(positions) - 1 - len(bits)) + [sum(1 << ancestor for ancestor in path)]
    padding = [0] * setup.num_padded
    bits = np.array([*bits, *[0] * (num_tokens - len(bits))], np.uint64).view(np.int64)
    kv[:, :, ~is_seen] = 300.0
    kv[:, :, ~is_live] = torch.nan

    def int32(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    query_start_loc = [0, *np.cumsum([query.query_len for query in queries]).tolist()]
    inputs = {
        "query_start_loc": int32(query_start_loc),
        "seq_lens": int32([query.seq_len for query in queries]),
        "block_table": torch.from_numpy(block_table).to(DEVICE, torch.int32),
        "positions": torch.tensor(positions + padding, device=DEVICE),
        "visible_lens": int32(visible_lens + padding),
        "tree_starts": int32([query.tree_start for query in queries]),
        "ancestor_bits": torch.from_numpy(bits).to(DEVICE),
    }
    q = fused.to(DEVICE)[:, :num_heads]  # a view into what a projection gives
    return Batch(setup, q, kv.to(DEVICE), query_start_loc, tables, inputs)


def error(output: Tensor, expected: Tensor) -> float:
    return float((output.double() - expected).norm() / expected.norm())


def check(setup: Setup) -> Tensor:
    batch = make_batch(setup)
    output, expected = batch.run(), batch.expect()
    assert not expected.isnan().any()
    assert output.dtype == setup.dtype and output.shape == expected.shape
    assert error(output, expected) <= TOLERANCE[setup.dtype]
    assert (output[batch.query_start_loc[-1] :] == 0).all()
    return output


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EDGES = [Query(context) for context in (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65)]
TREES = [
    Query(9, 1, chain(6)),  # its nodes begin in slot 10, and end in the next block
    Query(15, 1, star(7)),
    Query(14, 2, random_parents(1, 5, 2)),
    Query(63, 1, random_parents(2, 7, 7)),
    Query(0, 1, random_parents(3, 6, 3)),
    Query(40, 0, random_parents(4, 9, 3), first_node=4),  # a later pass over the same tree
]
EMPTY = Query(20, 0)
LARGE_TREES = [Query(33, 1, random_parents(5, 63, 4)), Query(5, 1, random_parents(6, 63, 60)), Query(16, 1, chain(64))]
MIXED = [Query(0, 21), *TREES[:2], EMPTY, Query(30, 45), Query(50), EMPTY, Query(7, 9, chain(3))]

CASES = {
    "contexts at block edges": Setup(EDGES, layout="descending", num_padded=3),
    "small trees": Setup(TREES, group=3, num_kv_heads=2, num_padded=5, dtype=BF16),
    "small trees, split": Setup(TREES, group=2, fixed_chunk=16, dtype=FP16),
    "small trees, split, 7 heads a group": Setup([EMPTY, *TREES], group=7, fixed_chunk=32, head_dim=48, num_padded=1),
    "63 and 64 nodes": Setup(LARGE_TREES, group=1, short_query_len=65),
    "63 and 64 nodes, bfloat16": Setup(LARGE_TREES, group=4, short_query_len=65, dtype=BF16, head_dim=128),
    "63 and 64 nodes, split, windowed": Setup(LARGE_TREES[:2], group=1, short_query_len=65, fixed_chunk=32, window=5, dtype=BF16),
    "mixed": Setup(MIXED, num_padded=2, head_dim=128, dtype=BF16, short_query_len=12),
    "mixed, float32, split": Setup(MIXED, group=2, num_kv_heads=2, fixed_chunk=48, short_query_len=12),
    "mixed, fp16, split, 8 heads a group": Setup(MIXED, group=8, fixed_chunk=64, dtype=FP16, short_query_len=12, block_size=32),
    "only chunks": Setup([Query(0, 33), Query(17, 70), Query(100, 5)], short_query_len=1, group=4, dtype=BF16),
    "window 1": Setup(TREES, window=1, num_padded=3),
    "window below the depth of the trees": Setup([*TREES, *EDGES[5:]], window=3, group=2, dtype=BF16, fixed_chunk=16),
    "window above all contexts": Setup(TREES, window=200, group=2),
    "window, mixed": Setup(MIXED, window=19, short_query_len=12, group=4, num_padded=2, block_size=32),
    "window, mixed, split": Setup(MIXED, window=33, short_query_len=12, group=3, fixed_chunk=32, dtype=BF16),
    "softcap": Setup(MIXED, softcap=2.0, short_query_len=12, group=2, head_dim=128),
    "softcap, window, split": Setup(TREES, softcap=30.0, window=9, fixed_chunk=16, dtype=BF16, head_dim=96),
    "one token": Setup([Query(0)], group=1, head_dim=16),
    "splits as the planner likes": Setup([Query(700, 1, chain(3)), Query(30)], group=4, num_kv_heads=2, dtype=BF16),
    "a chunk in splits as the planner likes": Setup([Query(500, 12)], group=4, dtype=BF16),
    "a head of 256": Setup(MIXED[:4], group=2, head_dim=256, dtype=BF16, num_padded=1),
}


def of_a_model(num_requests: int, max_context: int, num_nodes: int = 6, num_chunks: int = 0, **options: Any) -> Setup:
    """Random trees behind random contexts, and prefill chunks between them, at the sizes of Llama 3 8B but for the options."""
    rng = np.random.default_rng(0)
    contexts = rng.integers(max_context // 2, max_context, num_requests, endpoint=True).tolist()
    queries = [Query(context, 1, random_parents(context, num_nodes, MAX_NODES)) for context in contexts]
    for i in range(num_chunks):
        queries.insert(2 * i, Query(int(rng.integers(max_context)), 512))
    sizes = {"group": 4, "num_kv_heads": 8, "head_dim": 128, "dtype": BF16, "short_query_len": num_nodes + 1}
    return Setup(queries, **(sizes | options))


LARGE_CASES = {
    "trees of 6 nodes": of_a_model(16, 4096),
    "one long context": of_a_model(1, 32768),
    "decodes": of_a_model(64, 2048, 0),
    "trees of 63 nodes": of_a_model(8, 2048, MAX_NODES),
    "prefill chunks": of_a_model(0, 2048, 0, 3),
    "mixed with prefill chunks": of_a_model(12, 4096, 6, 2),
    "heads of 64": of_a_model(16, 4096, head_dim=64),
    "float16": of_a_model(16, 4096, 6, 1, dtype=FP16),
    "float32": of_a_model(8, 2048, 6, 1, dtype=FP32),
    "blocks of 32": of_a_model(16, 4096, block_size=32),
    "7 query heads per KV head": of_a_model(8, 2048, group=7, num_kv_heads=4),
    "sliding window": of_a_model(12, 4096, 6, 1, window=1024),
    "window below the depth": of_a_model(12, 512, 32, window=3),
    "softcap of scores": of_a_model(12, 2048, 6, 1, softcap=30.0),
}
"""Too large for the interpreter."""


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=ON_CUDA) for name in LARGE_CASES)])
def test_output_is_that_of_the_twin(name: str) -> None:
    check((CASES | LARGE_CASES)[name])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # of far scores below a softcap, where infinity is right
@pytest.mark.parametrize("seed", range(10))
def test_any_mix_of_queries_and_options(seed: int) -> None:
    rng = np.random.default_rng(seed)
    queries = []
    for _ in range(int(rng.integers(1, 6))):
        context, nodes = int(rng.integers(0, 60)), int(rng.integers(1, 8))
        parents = random_parents(int(rng.integers(1000)), nodes, int(rng.integers(1, 8)))
        kinds = [
            Query(context, 1, parents),
            Query(context, 0, parents, first_node=int(rng.integers(0, nodes))) if context else EMPTY,
            Query(context, int(rng.integers(1, 30))),
            Query(context, int(rng.integers(0, 2))),
        ]
        queries.append(kinds[rng.integers(4)])
    setup = Setup(
        [*queries, Query(3)],
        group=int(rng.choice([1, 2, 3, 4, 5, 7, 8])),
        num_kv_heads=int(rng.integers(1, 3)),
        head_dim=int(rng.choice([16, 40, 64, 80, 128])),
        block_size=int(rng.choice([16, 32])),
        dtype=[BF16, FP16, FP32][rng.integers(3)],
        window=[None, 2, 20][rng.integers(3)],
        softcap=[None, 5.0][rng.integers(2)],
        fixed_chunk=[None, 64][rng.integers(2)],
        short_query_len=int(rng.choice([8, 16])),
        num_padded=int(rng.integers(0, 4)),
        seed=seed,
    )
    check(setup)


def test_blocks_may_lie_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:  # which copies back all that it was given, though on a CPU it works in place: 4 GiB, most never touched
        monkeypatch.setattr(triton.runtime.interpreter.GridExecutor, "_restore_args_dev", lambda *args: None)
    batch = make_batch(Setup([Query(40, 1, chain(3))], head_dim=16, dtype=BF16, group=1))
    num_blocks, stride = batch.kv.shape[2], 2**31 // 3
    assert stride * max(batch.block_table[0]) > 2**31
    memory = torch.empty(stride * num_blocks, dtype=BF16, device=DEVICE)
    kv = memory.as_strided(batch.kv.shape, (1024, 512, stride, 16, 1))
    kv.copy_(batch.kv)
    assert error(replace(batch, kv=kv).run(), batch.expect()) <= TOLERANCE[BF16]


def test_the_two_twins_agree() -> None:
    batch = make_batch(Setup([*TREES, EMPTY], group=2, window=4, num_padded=1))
    slots = [row.nonzero()[:, 0].tolist() for query in batch.setup.queries for row in query.must_see(4)]
    looped = reference_tree_attention(
        batch.q,
        batch.kv,
        query_start_loc=batch.query_start_loc,
        block_table=batch.block_table,
        visible_slots=slots,
        scale=scale_of(batch.setup),
    )
    torch.testing.assert_close(batch.expect(), looped, rtol=1e-12, atol=1e-12)


def test_splits_change_float32_outputs_by_rounding_only() -> None:
    whole = Setup([Query(90, 1, random_parents(1, 7, 4)), Query(50, 12)], group=1)
    outputs = [check(replace(whole, fixed_chunk=chunk)).double() for chunk in (1024, 48, 16)]
    for output in outputs[1:]:
        assert 0 < error(output, outputs[0]) <= 1e-6


def rows_of(batch: Batch, output: Tensor, index: int) -> Tensor:
    return output[batch.query_start_loc[index] : batch.query_start_loc[index + 1]]


FIVE = Setup(
    [Query(70, 1, random_parents(7, 7, 3)), Query(40, 30), Query(90), Query(0, 11), Query(300)], group=2, fixed_chunk=32, dtype=BF16
)


@pytest.mark.parametrize(
    "setup", [FIVE, replace(FIVE, window=21), pytest.param(of_a_model(4, 4096, 6, 1, fixed_chunk=1024), marks=ON_CUDA)]
)
def test_with_fixed_chunks_a_request_does_not_depend_on_its_batch(setup: Setup) -> None:
    """Nor on its place in it, nor on where its blocks lie; bit for bit."""
    batch, queries = make_batch(setup), setup.queries
    outputs = batch.run()
    generator = torch.Generator().manual_seed(1)
    for members in ([0], [1], [4, 2], [3, 1, 0, 2, 4], [2, 3]):
        others = make_batch(replace(batch.setup, queries=[queries[i] for i in members], seed=5, num_padded=4))
        order = torch.randperm(others.kv.shape[2], generator=generator)[: sum(len(batch.block_table[i]) for i in members)]
        starts = np.cumsum([0, *(len(batch.block_table[i]) for i in members)])
        for place, i in enumerate(members):
            blocks = order[starts[place] : starts[place + 1]]
            others.kv[:, :, blocks] = batch.kv[:, :, batch.block_table[i]]
            others.inputs["block_table"][place, : len(blocks)] = blocks
            rows_of(others, others.q, place).copy_(rows_of(batch, batch.q, i))
        result = others.run()
        for place, i in enumerate(members):
            assert torch.equal(rows_of(others, result, place), rows_of(batch, outputs, i))


def of_other_lengths(setup: Setup) -> Setup:
    """The same trees behind other contexts, which take as many blocks or more."""
    queries = [replace(query, context=query.context + (31, -12)[i % 2]) for i, query in enumerate(setup.queries)]
    return replace(setup, queries=queries, seed=1)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            Setup([Query(40, 1, chain(7)), Query(9), Query(30)], group=2, num_padded=2),
            Setup([Query(0, 3), EMPTY, Query(55, 1, star(7))], group=2, num_padded=1),
        ),
        pytest.param(LARGE_CASES["trees of 6 nodes"], of_other_lengths(LARGE_CASES["trees of 6 nodes"]), marks=ON_CUDA),
    ],
)
def test_a_captured_plan_serves_other_lengths_when_its_inputs_are_written_in_place(before: Setup, after: Setup) -> None:
    """The same shapes and addresses, other contents."""
    first, second = make_batch(before), make_batch(after)
    batch = replace(first, q=second.q, kv=second.kv)
    batch.run()  # compiled before it is captured
    replay = make_capture()(batch.run)
    assert replay is not None
    for name, given in first.inputs.items():
        other = second.inputs[name]
        if name == "block_table":
            width = min(given.shape[1], other.shape[1])
            given[:, :width] = other[:, :width]
        else:
            given.copy_(other)
    replay.run()
    assert error(replay.output, second.expect()) <= TOLERANCE[after.dtype]


# What goes wrong must show: each change of the inputs or the plan is an error that the comparison has to find.


@pytest.mark.parametrize(
    ("name", "tensor", "change"),
    [
        ("small trees", "ancestor_bits", lambda bits: bits << 1),
        ("small trees", "ancestor_bits", lambda bits: bits & (bits - 1)),
        ("63 and 64 nodes", "ancestor_bits", lambda bits: bits & ((1 << 63) - 1)),
        ("small trees", "tree_starts", lambda starts: starts + 1),
        ("contexts at block edges", "visible_lens", lambda lens: lens - 1),
        ("window 1", "positions", lambda positions: positions + 1),
        ("window, mixed", "positions", lambda positions: positions - 1),
        ("mixed", "block_table", lambda table: table.roll(1, 0)),
        ("mixed, float32, split", "seq_lens", lambda lens: lens - 1),
    ],
)
def test_wrong_input_shows(name: str, tensor: str, change: object) -> None:
    assert callable(change)
    batch = make_batch(CASES[name])
    output = batch.run(batch.plan(**{tensor: change(batch.inputs[tensor])}))
    assert not error(output, batch.expect()) <= 10 * TOLERANCE[batch.setup.dtype]


def test_a_window_that_does_not_reach_the_nodes_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(CASES["window below the depth of the trees"])
    monkeypatch.setattr(attention_planner, "_within_window", lambda bits, window: bits)
    assert not error(batch.run(), batch.expect()) <= 10 * TOLERANCE[batch.setup.dtype]


def test_wrong_tensors_are_refused_by_name() -> None:
    batch = make_batch(Setup(TREES, window=9))
    plan, q, kv = batch.plan(), batch.q, batch.kv
    for message, changed_q, changed_kv in [
        ("q has shape [42, 4, 32]: it must be [42, 4, 64]", q[:, :, :32], kv),
        ("q has shape [41, 4, 64]: it must be [42, 4, 64]", q[1:], kv),
        ("q has dtype torch.float16: it must be torch.float32", q.half(), kv),
        ("q has strides (512, 128, 2): its last dimension must be contiguous", q.repeat_interleave(2, 2)[:, :, ::2], kv),
        ("kv_layer has shape [2, 1, 18, 8, 64]: it must be [2, 1, any, 16, 64]", q, kv[:, :, :, :8]),
        ("kv_layer has dtype torch.bfloat16: it must be torch.float32", q, kv.bfloat16()),
        ("kv_layer is on meta: it must be on", q, kv.to("meta")),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            tree_attention(changed_q, changed_kv, plan, scale=1.0)
    for message, options in [
        ("window is 8: the plan was made for None, 9", {"window": 8}),
        ("softcap is 0.0: it must be positive, or None", {"softcap": 0.0}),
        ("scale is 0.0: it must be positive", {"scale": 0.0}),
    ]:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            tree_attention(q, kv, plan, **({"scale": 1.0} | options))

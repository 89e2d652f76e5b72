"""Tree attention: every back end against float64, on ragged mixes of everything a step can hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import (
    SCALE,
    Case,
    Request,
    attend,
    make_case,
    make_ops,
    must_see,
    queries,
    random_case,
    random_kv,
    random_request,
    random_tree,
)
from attention_reference import reference_masked_attention
from torch import Tensor

from titan.core.batch import RaggedBatch, Window
from titan.core.growth import Feed, ShapeSpec, main_path_order, shape_plan
from titan.core.limits import MAX_NODES
from titan.core.trees import DraftTree
from titan.kernels.growth import grow_by_passes
from titan.kernels.interfaces import Backend
from titan.kernels.torch.layers import TorchOps
from titan.kernels.triton.backend import TritonBackend

KINDS = ("decode", "chain", "tree", "chunk", "prompt", "long_chunk", "long_prompt")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Of ``|output - expected| / |expected|``."""
DTYPES = list(TOLERANCE)


def assert_near(output: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert (output.double() - expected).norm() <= BOUNDS[dtype] * expected.norm()


def check(backend: Backend, case: Case, num_heads: int, num_kv_heads: int, dtype: torch.dtype, head_dim: int = 16) -> None:
    kv = random_kv(case, num_kv_heads, dtype, head_dim)
    q = queries(case.query_start_loc[-1], num_heads, dtype, head_dim)
    loc, table = case.query_start_loc, case.block_table
    expected = reference_masked_attention(q, kv, query_start_loc=loc, block_table=table, visible=case.visible, scale=SCALE)
    assert_near(attend(backend, case.batch(backend), q, kv, case.window), expected, dtype)


def num_cases(backend: Backend, count: int) -> int:
    """Fewer where an interpreter runs the kernels."""
    return count // 5 if isinstance(backend, TritonBackend) else count


def test_any_mix_of_queries(backend: Backend) -> None:
    for seed in range(num_cases(backend, 40)):
        rng = np.random.default_rng(seed)
        kinds = rng.choice(KINDS, int(rng.integers(1, 6))).tolist()
        block_size = int(rng.choice([16, 32] if isinstance(backend, TritonBackend) else [8, 16, 32]))
        window = [None, None, 5, 24][rng.integers(4)]
        case = random_case(seed, kinds, block_size, window, str(rng.choice(["dense", "scattered", "shared"])))
        heads, dtype, head_dim = (
            [(4, 4), (4, 2), (4, 1), (1, 1)][rng.integers(4)],
            DTYPES[rng.integers(3)],
            int(rng.choice([16, 64])),
        )
        print(seed, kinds, block_size, window, heads, dtype, head_dim)
        check(backend, case, *heads, dtype, head_dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_query_alone(backend: Backend, kind: str, window: Window, dtype: torch.dtype) -> None:
    check(backend, random_case(3, [kind], window=window), 4, 2, dtype)


@pytest.mark.parametrize(
    ("dtype", "num_kv_heads", "window"),
    [(torch.float32, 2, 9), (torch.float32, 4, None), (torch.bfloat16, 2, None), (torch.bfloat16, 4, 9)],
)
@pytest.mark.parametrize(
    "head_dim", [40, 64, 80, 96, 128]
)  # a remainder behind whole vectors; whole tiles; compiled for their size
def test_other_sizes_of_heads(backend: Backend, head_dim: int, num_kv_heads: int, window: Window, dtype: torch.dtype) -> None:
    kinds = ["decode", "chain"] if isinstance(backend, TritonBackend) else ["decode", "tree", "chunk", "long_chunk"]
    check(backend, random_case(6, kinds, window=window), 4, num_kv_heads, dtype, head_dim)


@pytest.mark.parametrize("context", [0, 1, 15, 16, 31, 32, 63])
def test_trees_at_block_edges(backend: Backend, context: int) -> None:
    """A star, a chain, a tree of 63 nodes and one behind a prefill chunk, each begun at every offset that matters."""
    rng = np.random.default_rng(context)
    star, chain = DraftTree(np.zeros(7, np.int64), np.full(7, -1, np.int32)), DraftTree.chain([0] * 6)
    trees = [Request(context, 1, star), Request(context, 1, chain), Request(context, 9, random_tree(rng, 5))]
    large = Request(context, 1, random_tree(rng, MAX_NODES))
    check(backend, make_case([*trees, large], window=[None, 4][context % 2]), 4, 1, torch.float32)


@pytest.mark.parametrize("layout", ["dense", "scattered", "shared"])
def test_many_decodes_of_very_different_length(backend: Backend, layout: str) -> None:
    check(backend, random_case(4, ["decode"] * 12 + ["chain"] * 6, layout=layout), 4, 2, torch.float32)


@pytest.mark.parametrize("kind", ["decode", "chain"])
def test_queries_of_equal_length_need_no_padding(backend: Backend, kind: str) -> None:
    request = random_request(np.random.default_rng(0), kind)
    requests = [Request(request.context, request.num_tokens, request.tree) for _ in range(4)]
    check(backend, make_case(requests, layout="dense"), 4, 2, torch.float32)


def test_queries_may_lie_in_memory_by_heads(backend: Backend) -> None:
    case = random_case(7, ["decode", "chunk"], layout="dense")
    kv, batch = random_kv(case, 2, torch.float32, 16), case.batch(backend)
    q = torch.randn(4, case.query_start_loc[-1], 16, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
    assert torch.equal(attend(backend, batch, q, kv), attend(backend, batch, q.contiguous(), kv))


@pytest.mark.parametrize("num_heads", [2, 6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_far_beyond_the_first_ones_do_not_overflow(backend: Backend, dtype: torch.dtype, num_heads: int) -> None:
    """The last slot's score is larger than the first's by much more than exponentials of float32 reach."""
    case = make_case([Request(90)], layout="dense")
    q = torch.ones(1, num_heads, 64).to(dtype)
    kv = torch.randn(2, 2, 6, 16, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    kv[0] = torch.arange(96).view(1, 6, 16, 1) / 64  # scores 0, 1, 2 ... at scale 1
    output = attend(backend, case.batch(backend), q, kv, scale=10.0).view(num_heads, 64)
    last = kv[1, :, 5, 90 % 16].repeat_interleave(num_heads // 2, 0)
    torch.testing.assert_close(output, last, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 16), (torch.bfloat16, 64)])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_nan_in_one_visible_slot_shows(
    backend: Backend, num_kv_heads: int, dtype: torch.dtype, head_dim: int, window: Window
) -> None:
    case = make_case([Request(47)], layout="dense")
    q, batch = queries(1, 2, dtype, head_dim), case.batch(backend)
    for broken in (5, 31) if isinstance(backend, TritonBackend) else (0, 5, 31, 40, 47):
        kv = torch.randn(2, num_kv_heads, 3, 16, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)
        kv[0, :, broken // 16, broken % 16] = torch.nan
        is_visible = window is None or broken > 47 - window
        # PyTorch's wants finite slots wherever a request may look
        if is_visible or not isinstance(make_ops(backend, dtype), TorchOps):
            assert bool(attend(backend, batch, q, kv, window).isnan().all()) == is_visible


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # numpy's in the interpreter
def test_a_request_whose_own_kv_is_nan_does_not_touch_its_neighbours(backend: Backend) -> None:
    chunk = "chunk" if isinstance(backend, TritonBackend) else "long_chunk"
    case = random_case(5, ["decode", "tree", chunk, "chain"], layout="dense")
    kv, batch = random_kv(case, 2, torch.float32, 16), case.batch(backend)
    q = queries(case.query_start_loc[-1], 4, torch.float32, 16)
    clean = attend(backend, batch, q, kv)
    for broken in range(len(case.requests)):
        broken_kv = kv.clone()
        broken_kv[:, :, case.block_table[broken]] = torch.nan
        output = attend(backend, batch, q, broken_kv)
        rows = torch.zeros(len(q), dtype=torch.bool)
        rows[case.query_start_loc[broken] : case.query_start_loc[broken + 1]] = True
        assert output[rows].isnan().all()
        torch.testing.assert_close(output[~rows], clean[~rows], rtol=0, atol=0)


def test_nodes_that_are_fed_while_trees_grow_see_their_context_and_their_ancestors(backend: Backend) -> None:
    for seed in range(num_cases(backend, 20)):
        check_growth(backend, seed)


def check_growth(backend: Backend, seed: int) -> None:
    """The passes of `grow_by_passes`, over the inner nodes of each depth of trees of any shape."""
    rng = np.random.default_rng(seed)
    window, num_kv_heads = [None, 1, 2, 3, 9][rng.integers(5)], int(rng.choice([1, 4]))
    feeds, trees, tables = [], [], []
    parents = [random_tree(rng, int(rng.integers(1, 16))).parents for _ in range(rng.integers(1, 6))]
    shapes = [main_path_order(each.tobytes()).parents for each in parents]
    roots = rng.integers(0, 60, len(shapes)).tolist()
    sizes = [(root + 1 + len(shape)) // 16 + 1 for root, shape in zip(roots, shapes, strict=True)]
    order = rng.permutation(sum(sizes) + 3)
    for i, blocks in enumerate(np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1])):
        tables.append(blocks.tolist())
        trees.append(DraftTree(np.zeros(len(shapes[i]), np.int64), shapes[i]))
        feeds.append(Feed(i, tables[i], roots[i], [0], ShapeSpec(shape_plan(shapes[i].tobytes()))))
    kv = torch.randn(2, num_kv_heads, len(order), 16, 16, generator=torch.Generator().manual_seed(2))
    num_passes = 0

    def forward(batch: RaggedBatch) -> Tensor:
        nonlocal num_passes
        depth, num_passes = num_passes, num_passes + 1
        if depth > 0:
            inner = [np.intersect1d(tree.parents, np.flatnonzero(tree.topology.depths == depth)) for tree in trees]
            fed = [(i, nodes) for i, nodes in enumerate(inner) if len(nodes)]
            visible, slots = [], []
            for i, nodes in fed:
                visible.append(must_see(Request(roots[i], 1, trees[i]), window)[1 + nodes])
                slots += [tables[i][slot // 16] * 16 + slot % 16 for slot in (roots[i] + 1 + nodes).tolist()]
            q = queries(len(batch.slot_mapping), 4, torch.float32, 16)
            loc = [0, *np.cumsum([len(nodes) for _, nodes in fed]).tolist()]
            block_table = [tables[i] for i, _ in fed]
            expected = reference_masked_attention(q, kv, query_start_loc=loc, block_table=block_table, visible=visible, scale=SCALE)
            assert_near(attend(backend, batch, q, kv, window), expected, torch.float32)
            assert batch.slot_mapping.tolist() == slots
            assert batch.attention.positions.tolist() == [roots[i] + depth for i, nodes in fed for _ in nodes]
        return torch.randn(len(batch.logits_rows), 30, generator=torch.Generator().manual_seed(seed)).to(backend.device)

    grow_by_passes(forward, backend, feeds, len(feeds), 30, 16)
    assert num_passes == max(int(tree.topology.depths.max()) for tree in trees)

"""Tree attention: every back end against float64, on ragged mixes of everything a step can hold."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from attention_cases import (
    SCALE,
    Case,
    Request,
    attend,
    chain,
    make_case,
    make_ops,
    quantised,
    queries,
    random_case,
    random_kv,
    random_parents,
    reference_attention,
    star,
    supports,
)
from torch import Tensor

from titan.core.attention import AttentionSpec, Chunk, LayerSpec, Window
from titan.core.batch import RaggedBatch
from titan.core.growth import Feed, ShapeSpec, main_path_order, shape_plan
from titan.core.limits import MAX_NODES
from titan.kernels.cpu.backend import CpuBackend
from titan.kernels.growth import grow_by_passes
from titan.kernels.interfaces import Backend
from titan.kernels.torch.layers import TorchOps
from titan.kernels.triton.backend import TritonBackend

KINDS = ("decode", "chain", "tree", "chunk", "prompt", "long_chunk", "long_prompt")
HEAD_DIMS = (16, 40, 64, 80, 96, 128)
"""A remainder behind whole vectors; whole tiles; sizes that C++ is compiled for."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Of ``|output - expected| / |expected|``."""
INTEGER_TOLERANCE, INTEGER_BOUND = 4e-4, 1e-4
"""Where quantised slots are multiplied by queries and weights of 16 bits."""
DTYPES = list(TOLERANCE)
EXPECTED: dict[tuple[Case, LayerSpec, torch.dtype, bool], Tensor] = {}
"""What the reference says, for the next back end."""


def assert_near(
    output: Tensor, expected: Tensor, dtype: torch.dtype, *, by_integers: bool = False, weights: torch.dtype | None = None
) -> None:
    tolerance, bound = TOLERANCE[weights or dtype], BOUNDS[weights or dtype]
    if by_integers:
        tolerance, bound = max(tolerance, INTEGER_TOLERANCE), max(bound, INTEGER_BOUND)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    assert (output.double() - expected).norm() <= bound * expected.norm()


def check(
    backend: Backend,
    case: Case,
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    head_dim: int = 16,
    is_quantised: bool = False,
) -> None:
    check_layer(backend, case, LayerSpec(num_heads, num_kv_heads, head_dim, AttentionSpec(SCALE, case.window)), dtype, is_quantised)


def check_layer(backend: Backend, case: Case, layer: LayerSpec, dtype: torch.dtype, is_quantised: bool = False) -> None:
    spec = layer.attention
    kv = exact = random_kv(case, layer.num_kv_heads, dtype, layer.head_dim, num_planes=1 if layer.is_latent else 2)
    if spec.value_dim is not None and not layer.is_latent:
        kv[1, ..., spec.value_dim :] = 300.0 if is_quantised else torch.nan
    if is_quantised:
        kv, exact = quantised(kv)
    q = queries(case.query_start_loc[-1], layer.num_heads, dtype, layer.head_dim)
    sinks = torch.randn(layer.num_heads, generator=torch.Generator().manual_seed(2)) if layer.has_sinks else None
    rest = spec.scale, spec.softcap, spec.value_dim, sinks
    key = case, layer, dtype, is_quantised
    if key not in EXPECTED:
        EXPECTED[key] = case.expected(q, exact, *rest)
    output = attend(backend, case.batch(backend), q, kv, case.window, *rest)
    by_integers, weights = is_quantised and isinstance(backend, CpuBackend), weights_of(backend, dtype, is_quantised)
    assert_near(output, EXPECTED[key], dtype, by_integers=by_integers, weights=weights)


def weights_of(backend: Backend, dtype: torch.dtype, is_quantised: bool) -> torch.dtype:
    """The dtype that weights are rounded to before they are multiplied by values: float16 may be too small for their scales."""
    return torch.bfloat16 if is_quantised and dtype == torch.float16 and isinstance(backend, TritonBackend) else dtype


@pytest.mark.parametrize("is_latent", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_weights_of_quantised_values_are_not_lost(backend: Backend, dtype: torch.dtype, is_latent: bool) -> None:
    """In each run of slots, one that tells nothing takes most of the weight."""
    layer = LayerSpec(1, 1, 64, AttentionSpec(1.0, value_dim=48 if is_latent else None), is_latent=is_latent)
    if not supports(backend, dtype, layer.traits):
        pytest.skip("its attention lacks latents")
    if is_latent and isinstance(backend, CpuBackend):
        pytest.skip("it rounds weights to 16 bits of the largest of a run, which is that of the key's other numbers here")
    case = make_case([Request(1000)], layout="dense")
    kv = random_kv(case, 1, dtype, 64, num_planes=1 if is_latent else 2) * 0.1 + 0.3
    kv[0, ..., -1] = 0.0
    kv[:, :, ::4, 0] = 0.0
    kv[0, :, ::4, 0, -1] = 12.0
    kv, exact = quantised(kv)
    q = queries(1, 1, dtype, 64)
    q[:] = 0.0
    q[..., -1] = 1.0
    output = attend(backend, case.batch(backend), q, kv, None, 1.0, None, layer.attention.value_dim)
    expected = case.expected(q, exact, 1.0, None, layer.attention.value_dim)
    assert 0 < expected.norm() < 0.01
    by_integers, weights = isinstance(backend, CpuBackend), weights_of(backend, dtype, True)
    assert_near(output * 100, expected * 100, dtype, by_integers=by_integers, weights=weights)


@pytest.mark.parametrize("is_quantised", [False, True])
def test_any_mix_of_queries(backend: Backend, is_quantised: bool) -> None:
    is_interpreted = isinstance(backend, TritonBackend)
    for seed in range(*(20, 23 if is_interpreted else 50) if is_quantised else (9 if is_interpreted else 60,)):
        mix = random_mix(seed, is_interpreted)
        print(seed, *mix)
        check(backend, *mix, is_quantised)


@cache
def random_mix(seed: int, is_small: bool) -> tuple[Case, int, int, torch.dtype, int]:
    """Requests, heads, dtype and size of heads."""
    rng = np.random.default_rng(seed)
    num_requests = int(rng.choice([2, 3, 5] if is_small else [2, 3, 5, 18]))
    kinds = rng.choice(KINDS, num_requests).tolist() if seed >= len(KINDS) else [KINDS[seed]]
    block_size = int(rng.choice([16, 32] if is_small else [8, 16, 32]))
    window = [None, None, 5, 24][rng.integers(4)]
    case = random_case(seed, kinds, window, str(rng.choice(["dense", "scattered", "shared"])), block_size)
    heads, dtype = [(4, 4), (4, 2), (4, 1), (1, 1)][rng.integers(4)], DTYPES[rng.integers(3)]
    return case, *heads, dtype, int(rng.choice(HEAD_DIMS))


LAYERS = {
    "caps": LayerSpec(4, 2, 64, AttentionSpec(SCALE, 24, 3.0)),
    "sinks": LayerSpec(6, 2, 64, AttentionSpec(SCALE, 5), has_sinks=True),
    "chunks": LayerSpec(2, 2, 128, AttentionSpec(SCALE, Chunk(12))),
    "narrow values": LayerSpec(4, 2, 192, AttentionSpec(SCALE / 4, None, None, 128)),
    "latents": LayerSpec(16, 1, 576, AttentionSpec(SCALE / 8, None, None, 512), is_latent=True),
    "latents of many heads": LayerSpec(32, 1, 40, AttentionSpec(SCALE, None, None, 24), is_latent=True),
    "all at once": LayerSpec(6, 2, 80, AttentionSpec(SCALE, Chunk(24), 3.0, 40), has_sinks=True),
    "all at once over latents": LayerSpec(16, 1, 96, AttentionSpec(SCALE, Chunk(24), 3.0, 64), has_sinks=True, is_latent=True),
}
"""What layers of families beyond Llama's have; each with trees deeper than its window, and across the edges of its chunks."""


@pytest.mark.long_where(
    *(f"triton-{layer}-{kind}" for layer in LAYERS for kind in ("dtype0-True", "dtype1-False")),
    *("triton-latents-dtype1", "triton-latents of many heads-dtype0"),
)
@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_layers_of_other_families(backend: Backend, layer: LayerSpec, dtype: torch.dtype, is_quantised: bool) -> None:
    if not supports(backend, dtype, layer.traits):
        pytest.skip(f"its attention lacks one of {sorted(layer.traits)}")
    case = case_for_layers(layer.attention.window, 3 if isinstance(backend, TritonBackend) else 5)
    check_layer(backend, case, layer, dtype, is_quantised)


@cache
def case_for_layers(window: Window, num_requests: int) -> Case:
    tree = random_parents(np.random.default_rng(0), 40, 3)
    requests = [Request(10, 1, chain(6)), Request(33, 2, tree), Request(70), Request(0, 30), Request(20, 64)]
    return make_case(requests[:num_requests], window=window)


@pytest.mark.long_where("triton-4")
@pytest.mark.parametrize("window", [None, 4, Chunk(16)])
def test_trees_at_block_edges(backend: Backend, window: Window) -> None:
    """A star, a chain, a tree of 63 nodes and one behind a prefill chunk, each begun at every offset that matters."""
    if isinstance(window, Chunk) and not supports(backend, torch.float32, frozenset({"chunked_window"})):
        pytest.skip("its attention lacks chunks")
    check(backend, case_at_block_edges(window), 4, 1, torch.float32)


@cache
def case_at_block_edges(window: Window) -> Case:
    requests, rng = [], np.random.default_rng(0)
    for context in (0, 1, 15, 16, 31, 32, 63) if window is None else (0, 15, 16, 32):
        requests += [Request(context, 1, star(7)), Request(context, 1, chain(6)), Request(context, 9, random_parents(rng, 5))]
    for context in (0, 15, 16, 63):
        requests.append(Request(context, 1, random_parents(rng, MAX_NODES)))
    return make_case(requests, window=window)


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


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 16), (torch.bfloat16, 64)])
@pytest.mark.parametrize(("num_kv_heads", "window"), [(1, None), (2, 17)])
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
        if is_visible or type(make_ops(backend, dtype)) is not TorchOps:
            assert bool(attend(backend, batch, q, kv, window).isnan().all()) == is_visible


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # numpy's in the interpreter
def test_a_request_whose_own_kv_is_nan_does_not_touch_its_neighbours(backend: Backend) -> None:
    chunk = "chunk" if isinstance(backend, TritonBackend) else "long_chunk"
    case = random_case(5, ["decode", "tree", chunk, "chain"], layout="dense")
    kv, batch = random_kv(case, 2, torch.float32, 16), case.batch(backend)
    q = queries(case.query_start_loc[-1], 4, torch.float32, 16)
    clean = attend(backend, batch, q, kv)
    for i, broken in enumerate(case.requests):
        broken_kv = kv.clone()
        broken_kv[:, :, broken.block_ids] = torch.nan
        output = attend(backend, batch, q, broken_kv)
        rows = torch.zeros(len(q), dtype=torch.bool)
        rows[case.query_start_loc[i] : case.query_start_loc[i + 1]] = True
        assert output[rows].isnan().all()
        torch.testing.assert_close(output[~rows], clean[~rows], rtol=0, atol=0)


@pytest.mark.long_where("triton-1", "triton-2")
@pytest.mark.parametrize("seed", range(4))
def test_nodes_that_are_fed_while_trees_grow_see_their_context_and_their_ancestors(backend: Backend, seed: int) -> None:
    """In the passes of `grow_by_passes`, over the inner nodes of each depth of trees of any shape."""
    rng, window = np.random.default_rng(seed), (None, 1, 3, 9)[seed % 4]
    requests = []
    for _ in range(rng.integers(2, 6)):
        shape = np.array(random_parents(rng, int(rng.integers(1, 16))), np.int32)
        requests.append(Request(int(rng.integers(60)), 1, main_path_order(shape).parents.tolist()))
    case = make_case(requests, window=window, seed=seed)
    trees = [each.tree for each in requests]
    feeds = [
        Feed(i, each.block_ids, each.context, [0], ShapeSpec(shape_plan(tree.parents)))
        for i, (each, tree) in enumerate(zip(requests, trees, strict=True))
    ]
    kv = torch.randn(2, int(rng.choice([1, 4])), case.num_blocks, 16, 16, generator=torch.Generator().manual_seed(2))
    num_passes = 0

    def forward(batch: RaggedBatch) -> Tensor:
        nonlocal num_passes
        depth, num_passes = num_passes, num_passes + 1
        if depth > 0:
            inner = [np.intersect1d(tree.parents, np.flatnonzero(tree.topology.depths == depth)) for tree in trees]
            fed = [(request, nodes) for request, nodes in zip(requests, inner, strict=True) if len(nodes)]
            q = queries(len(batch.slot_mapping), 4, torch.float32, 16)
            seen = [(request.block_ids, request.must_see(window)[1 + nodes]) for request, nodes in fed]
            expected = reference_attention(q, kv, seen, SCALE)
            assert_near(attend(backend, batch, q, kv, window), expected, torch.float32)
            slots = [(request, request.tree_start + node) for request, nodes in fed for node in nodes.tolist()]
            assert batch.slot_mapping.tolist() == [each.block_ids[slot // 16] * 16 + slot % 16 for each, slot in slots]
            assert batch.attention.positions.tolist() == [request.context + depth for request, _ in slots]
        return torch.randn(len(batch.logits_rows), 30, generator=torch.Generator().manual_seed(seed)).to(backend.device)

    grow_by_passes(forward, backend, feeds, len(feeds), 30, 16)
    assert num_passes == max(int(tree.topology.depths.max()) for tree in trees)

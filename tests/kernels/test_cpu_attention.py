"""What attention in C++ promises beyond what all back ends must: few roundings, and the same bits wherever a token stands."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from attention_cases import SCALE, Request, attend, chain, make_case, quantised
from back_ends import KINDS, make_back_end, make_kernels
from torch import Tensor

from titan.core.attention import AttentionSpec, Chunk, LayerSpec, Window
from titan.core.kv_tensor import kv_planes
from titan.kernels.cpu.backend import CpuBackend
from titan.kernels.cpu.kinds import Kind
from titan.kernels.interfaces import Backend


@pytest.fixture(scope="module", params=KINDS)
def compiled(request: pytest.FixtureRequest) -> Backend:
    return make_back_end(request.param)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attend_all(backend: Backend, requests: Sequence[Request], q: Tensor, kv: Tensor, layer: LayerSpec) -> Tensor:
    spec, sinks = layer.attention, torch.arange(layer.num_heads) - 1.0 if layer.has_sinks else None
    batch = make_case(list(requests), layout="dense").batch(backend)
    return attend(backend, batch, q, kv, spec.window, spec.scale, spec.softcap, spec.value_dim, sinks)


@pytest.mark.parametrize("num_nodes", [0, 7, 40])
@pytest.mark.parametrize("num_heads", [2, 6])
@pytest.mark.parametrize("head_dim", [8, 16, 40, 64, 80, 96, 128])
def test_in_bfloat16_only_weights_and_outputs_are_rounded(compiled: Backend, head_dim: int, num_heads: int, num_nodes: int) -> None:
    """Each by half a unit of its last bit, at most, and to either side."""
    case, scale = make_case([Request(400, 1, chain(num_nodes))], layout="dense"), 0.1
    kv = random(2, 2, case.num_blocks, 16, head_dim, dtype=torch.bfloat16)
    q = random(num_nodes + 1, num_heads, head_dim, dtype=torch.bfloat16, seed=1)
    output = attend(compiled, case.batch(compiled), q, kv, scale=scale).double()

    exact, sizes = case.expected(q, kv, scale), case.expected(q, torch.stack([kv[0], kv[1].abs()]), scale)  # of what is summed up
    assert ((output - exact).abs() <= 2 * 2**-8 * 1.01 * sizes).all()
    few = 2**-6 / output.numel() ** 0.5  # roundings, which do not quite cancel out
    assert abs(float((output * exact).sum() / exact.square().sum()) - 1) <= max(2**-11, few)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    ("head_dim", "dtype", "is_quantised"),
    [*product((8, 16, 40, 64), (torch.float32, torch.bfloat16), (False,)), (40, torch.float32, True), (64, torch.bfloat16, True)],
)
def test_chains_and_chunks_are_attended_as_their_tokens_alone(
    compiled: Backend, head_dim: int, dtype: torch.dtype, is_quantised: bool, window: Window
) -> None:
    """Bit by bit, wherever the context ends, whatever lies behind it, whoever is beside, and also of several pieces for threads."""
    chains, chunks = [Request(root, 1, chain(9)) for root in (0, 3, 14, 31, 60, 127)], [Request(37, 65), Request(0, 150)]
    for request, num_heads in product([*chains, *chunks], (2, 6)):
        layer = LayerSpec(num_heads, 2, head_dim, AttentionSpec(SCALE, window))
        check_tokens_alone(compiled, layer, request, dtype, is_quantised)


def check_tokens_alone(backend: Backend, layer: LayerSpec, request: Request, dtype: torch.dtype, is_quantised: bool) -> None:
    root, num_tokens, neighbour = request.context, request.query_len, Request(50, 3)
    kv = random(1 if layer.is_latent else 2, layer.num_kv_heads, 20, 16, layer.head_dim, dtype=dtype, seed=root)
    kv = quantised(kv)[0] if is_quantised else kv
    q = random(num_tokens, layer.num_heads, layer.head_dim, dtype=dtype, seed=root + 1)
    both = attend_all(backend, [request, neighbour], torch.cat([q, q[:3]]), kv, layer)[:-3]
    for i in range(0, num_tokens, 1 + num_tokens // 20):
        broken, later = kv.clone(), torch.arange(root + i + 1, 320)  # what is not there yet
        numbers = kv_planes(broken, layer.head_dim)[1] if is_quantised else broken
        numbers[:, :, later // 16, later % 16] = torch.nan
        alone = attend_all(backend, [Request(root + i)], q[i : i + 1], broken, layer)
        assert torch.equal(alone, both[i : i + 1])


def test_sums_of_integers_are_as_large_as_they_get(compiled: Backend) -> None:
    """All numbers of queries and slots are the largest that there are, of either sign."""
    case, scale = make_case([Request(400)], layout="dense"), 1 / 1024
    kv = torch.ones(1, 1, case.num_blocks, 16, 1024).mul(random(case.num_blocks, 16, 1, dtype=torch.float32).sign())
    q = torch.ones(1, 2, 1024)
    blocks, exact = quantised(kv)
    output = attend(compiled, case.batch(compiled), q, blocks, scale=scale, value_dim=512)
    torch.testing.assert_close(output.double(), case.expected(q, exact, scale, value_dim=512), rtol=1e-4, atol=1e-4)


def test_many_small_weights_of_quantised_slots_are_not_lost(compiled: Backend) -> None:
    """One slot weighs as much as 160,000 others, too much for 16 bits; the 4,000 others have all of the value."""
    case = make_case([Request(4000)], layout="dense")
    kv, q = torch.zeros(2, 1, case.num_blocks, 16, 16), torch.ones(1, 1, 16)
    kv[0, 0, case.requests[0].block_ids[0], 0], kv[1] = 12 / 16, 1.0
    kv[1, 0, case.requests[0].block_ids[0], 0] = 0.0
    blocks, exact = quantised(kv)
    output = attend(compiled, case.batch(compiled), q, blocks, scale=1.0)
    torch.testing.assert_close(output.double(), case.expected(q, exact, 1.0), rtol=2e-3, atol=0.0)


LATENTS = LayerSpec(16, 1, 576, AttentionSpec(SCALE / 8, value_dim=512), is_latent=True)
ALL_AT_ONCE = LayerSpec(6, 2, 96, AttentionSpec(SCALE, Chunk(40), 3.0, 64), has_sinks=True)


@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", [LATENTS, ALL_AT_ONCE], ids=["latents", "all at once"])
def test_so_are_those_of_other_families(compiled: Backend, layer: LayerSpec, dtype: torch.dtype, is_quantised: bool) -> None:
    for request in (Request(37, 1, chain(9)), Request(70, 34)):
        check_tokens_alone(compiled, layer, request, dtype, is_quantised)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_that_share_the_rows_of_a_head_change_nothing(kind: Kind, dtype: torch.dtype) -> None:
    """With three heads, threads begin within a query."""
    alone, together = (CpuBackend(make_kernels(kind, num_threads)) for num_threads in (1, 5))
    requests, three_heads = (Request(70), Request(37, 1, chain(6)), Request(20, 40)), LayerSpec(3, 1, 64, AttentionSpec(SCALE))
    for layer, request in product((LATENTS, three_heads), requests):
        kv = random(1 if layer.is_latent else 2, 1, 20, 16, layer.head_dim, dtype=dtype)
        q = random(request.query_len, layer.num_heads, layer.head_dim, dtype=dtype, seed=1)
        assert torch.equal(*(attend_all(each, [request], q, kv, layer) for each in (alone, together)))

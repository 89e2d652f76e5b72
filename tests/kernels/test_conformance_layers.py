"""Norms, gates, linear layers, rotation and KV writes: every back end against the definitions in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attention_cases import make_ops
from interpreted import DEVICE, ON_CUDA, triton_backend
from layer_reference import (
    assert_rounded_once,
    make_table,
    reference_gelu_mul,
    reference_rms_norm,
    reference_rope_and_write_kv,
    reference_silu_mul,
)
from torch import Tensor

from titan.core.kv_tensor import KVGroup, KVLayout, KVTensor, kv_planes
from titan.kernels.cpu.layers import CompiledOps
from titan.kernels.interfaces import Backend, LayerOps, TokenPlaces
from titan.kernels.torch.layers import TorchOps
from titan.kernels.triton.gate import gelu_mul, silu_mul
from titan.kernels.triton.kv_writes import write_kv
from titan.kernels.triton.layers import TritonOps
from titan.kernels.triton.norm import rms_norm
from titan.kernels.triton.rope_kv import rope_and_write_kv

BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Of ``|actual - exact| / |exact|``."""
DTYPES = list(BOUNDS)


def random(backend: Backend, *shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0, mean: float = 0.0) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale + mean
    return numbers.to(backend.device, dtype)


def assert_near(ops: LayerOps, actual: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """A Triton kernel rounds once: within half a unit in the last place, up to the float32 arithmetic."""
    assert actual.dtype == dtype and actual.shape == exact.shape
    assert (actual.double() - exact).norm() <= BOUNDS[dtype] * exact.norm()
    if isinstance(ops, TritonOps):
        assert_rounded_once(actual, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (4, 7), (40, 100), (4, 4096)])
def test_rms_norm_is_its_definition(backend: Backend, dtype: torch.dtype, num_rows: int, size: int) -> None:
    """Of rows of several scales, with a mean that layer norm would take away; by a weight of the same dtype or a wider one."""
    ops, scales = make_ops(backend, dtype), torch.tensor([[1.0], [0.0], [1e-3], [1e3]]).repeat(10, 1)[:num_rows]
    x = (random(backend, num_rows, size, dtype=torch.float32, mean=1.0) * scales.to(backend.device)).to(dtype)
    before = x.clone()
    for weight_dtype in (dtype, torch.float32):
        weight = random(backend, size, dtype=weight_dtype, seed=1)
        normed, exact = ops.rms_norm(x, weight, 1e-6), reference_rms_norm(x, weight, 1e-6)
        assert_near(ops, normed, exact, dtype)
        if weight_dtype == torch.float32:
            assert_rounded_once(normed, exact)
        assert torch.equal(x, before)


def test_numbers_of_another_dtype_are_not_taken_for_those_of_the_model(backend: Backend) -> None:
    ops = make_ops(backend, torch.bfloat16)
    if not isinstance(ops, CompiledOps):
        pytest.skip("its kernels go by the tensors")
    x, weight = random(backend, 7, 96, dtype=torch.float32), random(backend, 96, dtype=torch.bfloat16, seed=1)
    assert torch.equal(ops.rms_norm(x, weight, 1e-6), TorchOps(x.device).rms_norm(x, weight, 1e-6))
    x, halves = x.bfloat16(), weight.half()
    assert torch.equal(ops.rms_norm(x, halves, 1e-6), TorchOps(x.device).rms_norm(x, halves, 1e-6))
    with pytest.raises(AssertionError):
        ops.linear(x.float(), ops.pack(random(backend, 32, 96, dtype=torch.bfloat16)), None)
    table, places = make_table(8, 16).bfloat16(), torch.zeros(7, dtype=torch.int64)
    kv_layer = torch.zeros(2, 1, 1, 16, 16, dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        ops.rope_and_write_kv(x[:, :64].contiguous(), TokenPlaces(table, places, places), kv_layer, halves[:48].view(3, 16), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_with_nan_spoils_no_other(backend: Backend, dtype: torch.dtype) -> None:
    ops = make_ops(backend, dtype)
    x = random(backend, 9, 64, dtype=dtype)
    x[4, 5] = torch.nan
    weight = random(backend, 24, 64, dtype=dtype, seed=1)
    for output in (ops.rms_norm(x, weight[0], 1e-6), ops.linear(x, ops.pack(weight), None)):
        assert output.isnan().all(1).nonzero()[:, 0].tolist() == [4]
        assert int(output.isnan().any(1).sum()) == 1


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's in the interpreter, as exp(1000) is infinite
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (2, 5), (40, 65), (2, 2100)])
def test_gates_are_their_definitions(backend: Backend, dtype: torch.dtype, num_rows: int, size: int) -> None:
    ops, gate_up = make_ops(backend, dtype), random(backend, num_rows, 2 * size, dtype=dtype, scale=8.0)
    assert_near(ops, ops.silu_mul(gate_up), reference_silu_mul(gate_up), dtype)
    assert_near(ops, ops.gelu_mul(gate_up), reference_gelu_mul(gate_up), dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's in the interpreter, as exp(1000) is infinite
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size", "has_bias"), [(1, 96, False), (40, 33, True), (0, 32, False)])
def test_gated_mlp_is_its_definition(backend: Backend, dtype: torch.dtype, num_rows: int, size: int, has_bias: bool) -> None:
    ops, x = make_ops(backend, dtype), random(backend, num_rows, 48, dtype=dtype)
    gate_up, down = (random(backend, *shape, dtype=dtype, seed=1) for shape in ((2 * size, 48), (40, size)))
    biases = [random(backend, len(each), dtype=dtype, seed=2) if has_bias else None for each in (gate_up, down)]
    gate, up = (x.double() @ gate_up.double().T + (0 if biases[0] is None else biases[0].double())).chunk(2, -1)
    exact = (gate * gate.sigmoid() * up) @ down.double().T + (0 if biases[1] is None else biases[1].double())
    output = ops.gated_mlp(x, ops.pack(gate_up), biases[0], ops.pack(down), biases[1])
    assert output.dtype == dtype and output.shape == exact.shape
    assert (output.double() - exact).norm() <= 3 * BOUNDS[dtype] * exact.norm()


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's in the interpreter, as exp(1000) is infinite
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_gates_are_closed_or_open(backend: Backend, dtype: torch.dtype) -> None:
    gates = [-1e30, -1000.0, -200.0, -50.0, -0.0, 256.0, 1024.0, torch.inf, torch.nan]
    gate_up = torch.tensor([gates + [up] * len(gates) for up in (3.0, -3.0)], device=backend.device, dtype=dtype)
    ops = make_ops(backend, dtype)
    for output in (ops.silu_mul(gate_up), ops.gelu_mul(gate_up)):
        assert output[:, :5].abs().max() < 1e-19 and output[:, 8].isnan().all()
        assert output[:, 5:8].tolist() == [[768, 3072, torch.inf], [-768, -3072, -torch.inf]]


@pytest.mark.parametrize("num_rows", [1, 7, 33])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_layer_with_what_follows_it(backend: Backend, dtype: torch.dtype, has_bias: bool, num_rows: int) -> None:
    ops = make_ops(backend, dtype)
    weight, x = random(backend, 50, 70, dtype=dtype), random(backend, num_rows, 70, dtype=dtype, seed=1)
    bias = random(backend, 50, dtype=dtype, seed=2) if has_bias else None
    residual = random(backend, num_rows, 50, dtype=dtype, seed=3, scale=30.0)
    norm_weight = random(backend, 50, dtype=dtype, seed=4)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for kept in (weight, ops.pack(weight)):
        output = ops.linear(x, kept, bias)
        assert output.dtype == dtype
        torch.testing.assert_close(output.double(), exact, rtol=tolerance, atol=tolerance * float(exact.abs().max()))
        stream, normed = ops.linear_add_norm(x, kept, bias, residual.clone(), norm_weight, 1e-5)
        wanted = residual.double() + exact
        assert stream.dtype == dtype and (stream.double() - wanted).norm() <= BOUNDS[dtype] * wanted.norm()
        assert_near(ops, normed, reference_rms_norm(stream, norm_weight, 1e-5), dtype)


HEADS = [(4, 2, 16), (3, 3, 10), (8, 1, 64), (2, 1, 80), (7, 1, 128), (28, 4, 6), (5, 5, 2), (2, 1, 2048)]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's in the interpreter
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "has_norm", "num_tokens"),
    [
        *((*heads, *others) for heads in HEADS for others in ((False, 1), (True, 12))),
        pytest.param(32, 8, 128, False, 128, marks=ON_CUDA),
        pytest.param(32, 8, 64, True, 128, marks=ON_CUDA),
    ],
)
def test_heads_are_normed_and_rotated_and_only_their_slots_change(
    backend: Backend, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool, num_tokens: int
) -> None:
    ops, num_blocks, block_size, num_positions = make_ops(backend, dtype), 4 + num_tokens // 8, 16, 2048 if num_tokens > 12 else 50
    qkv = random(backend, num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    qkv[0, -4:] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])  # values, which reach the cache as they are
    norm_dtype = torch.float32 if num_heads % 2 else dtype
    qk_norm = random(backend, num_heads + num_kv_heads, head_dim, dtype=norm_dtype, seed=1, mean=1.0) if has_norm else None
    table = make_table(num_positions, head_dim).to(backend.device, dtype)
    generator = torch.Generator().manual_seed(3)
    positions = torch.randint(num_positions, (num_tokens,), generator=generator)
    positions[: num_tokens // 2] = num_positions - 1
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    if isinstance(ops, TritonOps) and num_tokens > 1:  # others pad a pass with it
        slots[[3, -1]] = -1
    cache = random(backend, 3, 2, num_kv_heads, num_blocks, block_size, head_dim, dtype=dtype, seed=5)
    places = TokenPlaces(table, positions.to(backend.device), slots.to(backend.device))
    before, values = cache.clone(), qkv.view(num_tokens, -1, head_dim)[:, num_heads + num_kv_heads :].clone()
    exact_kv = cache[1].double()
    exact_q = reference_rope_and_write_kv(qkv, places, exact_kv, num_heads, qk_norm, eps=1e-3)

    q = ops.rope_and_write_kv(qkv, places, cache[1], qk_norm, 1e-3)
    assert_near(ops, q, exact_q, dtype)
    assert_near(ops, cache[1, 0], exact_kv[0], dtype)
    assert torch.equal(cache[[0, 2]], before[[0, 2]])
    is_written = torch.zeros(num_blocks * block_size, dtype=torch.bool)
    is_written[slots[slots >= 0]] = True
    by_slot, before_by_slot = (each[1].flatten(2, 3).cpu() for each in (cache, before))
    assert torch.equal(by_slot[:, :, ~is_written], before_by_slot[:, :, ~is_written])
    written = by_slot[1][:, slots[slots >= 0]].transpose(0, 1)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(written.contiguous().view(bits), values.cpu()[slots >= 0].view(bits))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's in the interpreter
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "has_norm"), [(4, 2, 16, True), (3, 3, 10, False), (2, 1, 80, True)]
)
def test_quantised_keys_and_values_are_off_by_half_a_scale_and_only_their_slots_change(
    backend: Backend, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool
) -> None:
    ops, num_tokens, layout = make_ops(backend, dtype), 9, KVLayout((KVGroup(1, num_kv_heads, head_dim),), torch.int8)
    qkv = random(backend, num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    qkv[0], qkv[1, -1], qkv[2, -2] = 0, torch.inf, torch.nan
    qk_norm = random(backend, num_heads + num_kv_heads, head_dim, dtype=dtype, seed=1, mean=1.0) if has_norm else None
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(3))[:num_tokens].to(backend.device)
    places = TokenPlaces(make_table(50, head_dim).to(backend.device, dtype), slots % 50, slots)
    exact = torch.zeros(2, num_kv_heads, 3, 16, head_dim, dtype=torch.float64, device=backend.device)
    exact_q = reference_rope_and_write_kv(qkv, places, exact, num_heads, qk_norm, eps=1e-3)
    [blocks] = KVTensor(layout, 3, 16, backend.device).layers
    numbers, scales = kv_planes(blocks.fill_(5), head_dim)
    before = numbers.flatten(2, 3).clone(), scales.flatten(2, 3).clone()

    assert_near(ops, ops.rope_and_write_kv(qkv, places, blocks, qk_norm, 1e-3), exact_q, dtype)
    is_written = torch.zeros(48, dtype=torch.bool, device=backend.device)
    is_written[slots] = True
    for plane, old in zip((numbers, scales), before, strict=True):
        assert torch.equal(plane.flatten(2, 3)[:, :, ~is_written], old[:, :, ~is_written])
    sizes, found = exact.flatten(2, 3)[:, :, slots].abs().amax(-1), scales.flatten(2, 3)[:, :, slots].double()
    is_finite = sizes.isfinite()
    assert not is_finite[1, -1, [1, 2]].any() and is_finite.sum() == is_finite.numel() - 2
    assert torch.equal(found.isfinite(), is_finite)
    rounding = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]  # of operations in PyTorch
    torch.testing.assert_close(found[is_finite] * 127, sizes[is_finite], rtol=2 * rounding, atol=1e-12)
    errors = (numbers.double() * scales.double()[..., None] - exact).flatten(2, 3)[:, :, slots].abs().amax(-1)[is_finite]
    assert (errors <= (0.5 / 127 + 3 * rounding) * sizes[is_finite] + 1e-12).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "value_dim", "order"),
    [(4, 64, 64, (1, 0, 2)), (2, 24, 10, (0, 1, 2)), (1, 576, None, (1, 0, 2)), (3, 40, 40, (2, 1, 0))],
)
def test_keys_and_values_reach_their_slots_however_they_lie_in_memory(
    backend: Backend,
    dtype: torch.dtype,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int | None,
    order: tuple[int, ...],
    is_quantised: bool,
) -> None:
    """Narrow values the first numbers of theirs; latents, which have no values, in a cache of one plane."""
    rows = [
        torch.randn(9, num_kv_heads, size, generator=torch.Generator().manual_seed(size)) for size in (head_dim, value_dim) if size
    ]
    rows = [each.to(backend.device, dtype).permute(order).contiguous().permute(order) for each in rows]  # its own inverse
    layout = KVLayout((KVGroup(1, num_kv_heads, head_dim, len(rows)),), torch.int8 if is_quantised else dtype)
    [kv_layer] = KVTensor(layout, 3, 16, backend.device).layers
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(3))[:9].to(backend.device)
    make_ops(backend, dtype).write_kv(kv_layer.fill_(5), slots, rows[0], rows[1] if value_dim else None)
    is_written = torch.zeros(48, dtype=torch.bool, device=backend.device)
    is_written[slots] = True
    numbers, scales = kv_planes(kv_layer, head_dim) if is_quantised else (kv_layer, None)
    for plane, written in enumerate(rows):
        found = numbers[plane].flatten(1, 2)
        assert (found[:, ~is_written] == 5).all()
        found, written = found[:, slots, : written.shape[2]].double(), written.transpose(0, 1).double()
        if scales is None:
            assert torch.equal(found, written)
        else:
            sizes = scales[plane].flatten(1, 2)[:, slots].double()
            torch.testing.assert_close(sizes, written.abs().amax(-1) / 127, rtol=1e-6, atol=0)
            assert ((found * sizes[..., None] - written).abs() <= 0.5001 * sizes[..., None]).all()


# What Triton does beyond that: tensors may lie apart, and beyond 32 bits.


def on_triton(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    return random(triton_backend(), *shape, dtype=dtype, seed=seed)


def in_a_wider_tensor(x: Tensor) -> Tensor:
    wide = torch.full((x.shape[0], x.shape[1] + 16), torch.nan, dtype=x.dtype, device=DEVICE)
    return wide[:, 8:-8].copy_(x)


def far_apart(x: Tensor) -> Tensor:
    """The same rows beyond 32 bits: few pages are touched, and an offset that wraps around is 2048 elements before its base."""
    storage = torch.empty(2**32 + 4096, dtype=x.dtype, device=DEVICE)
    return storage.as_strided(x.shape, (2**31 - 1024, 1), 2048).copy_(x)


@pytest.mark.parametrize(
    ("place", "num_tokens", "hidden_size", "dtype"),
    [
        (far_apart, 3, 64, torch.float16),
        *((in_a_wider_tensor, 3, 96, dtype) for dtype in DTYPES),
        *((torch.clone, 2, 16384, dtype) for dtype in DTYPES),
        *(pytest.param(torch.clone, 512, 4096, dtype, marks=ON_CUDA) for dtype in DTYPES),
    ],
)
def test_rows_of_norms_and_gates_may_lie_apart_and_be_as_large_as_a_models(
    place: Callable[[Tensor], Tensor], num_tokens: int, hidden_size: int, dtype: torch.dtype
) -> None:
    x, weight = place(on_triton(num_tokens, hidden_size, dtype=dtype) + 0.5), on_triton(hidden_size, dtype=dtype, seed=2)
    residual = place(on_triton(num_tokens, hidden_size, dtype=dtype, seed=1) * 300)
    given, expected_residual = x.clone(), residual.clone()
    assert_rounded_once(rms_norm(x, weight, 1e-5), reference_rms_norm(x, weight, 1e-5))
    expected_residual.copy_(expected_residual.double() + x.double())
    output = rms_norm(x, weight, 1e-5, residual)
    assert_rounded_once(output, reference_rms_norm(expected_residual, weight, 1e-5))  # of the rounded residual
    assert torch.equal(residual, expected_residual) and torch.equal(x, given)
    if place is in_a_wider_tensor:
        beside = residual.as_strided((num_tokens * (hidden_size + 16),), (1,), 0).isnan()
        assert int(beside.sum()) == num_tokens * 16
    gate_up = place(on_triton(num_tokens, 7 * hidden_size, dtype=dtype))
    assert_rounded_once(silu_mul(gate_up), reference_silu_mul(gate_up))
    assert_rounded_once(gelu_mul(gate_up), reference_gelu_mul(gate_up))


@pytest.mark.parametrize("far", ["tokens", "heads", "blocks", "by_block"])
def test_queries_and_caches_may_lie_apart(far: str) -> None:
    num_kv_heads = 3 if far == "heads" else 1
    qkv, storage = on_triton(3, (1 + 2 * num_kv_heads) * 8), torch.empty(2**32 + 4096, dtype=torch.float16, device=DEVICE)
    kv_layer = torch.empty(2, num_kv_heads, 3, 16, 8, dtype=torch.float16, device=DEVICE)
    match far:
        case "tokens":
            qkv = far_apart(qkv)
        case "by_block":
            kv_layer = torch.empty(3, 2, 16, 1, 8, dtype=torch.float16, device=DEVICE).permute(1, 3, 0, 2, 4)
        case _:
            head_and_block = (2**31 - 1024, 128) if far == "heads" else (128, 2**31 - 1024)
            kv_layer = storage.as_strided(kv_layer.shape, (512, *head_and_block, 8, 1), 2048)
    kv_layer[:, :, [0, 2], 0] = 0
    positions, slots = torch.arange(3, device=DEVICE), torch.tensor([-1, -1, 2 * 16], device=DEVICE)
    places = TokenPlaces(make_table(3, 8).to(DEVICE, torch.float16), positions, slots)
    exact_kv = torch.zeros(kv_layer.shape, dtype=torch.float64, device=DEVICE)
    exact_q = reference_rope_and_write_kv(qkv, places, exact_kv, num_heads=1)
    assert_rounded_once(rope_and_write_kv(qkv, places, kv_layer), exact_q)
    assert_rounded_once(kv_layer[:, :, [0, 2], 0], exact_kv[:, :, [0, 2], 0])


@pytest.mark.parametrize("is_quantised", [False, True])
def test_keys_and_values_of_padding_are_not_written(is_quantised: bool) -> None:
    keys, values = on_triton(4, 3, 40), on_triton(4, 3, 10, seed=1)
    layout = KVLayout((KVGroup(1, 3, 40),), torch.int8 if is_quantised else keys.dtype)
    slots = torch.tensor([17, -1, 3, -1], device=DEVICE)
    expected, kv_layer = (KVTensor(layout, 2, 16, DEVICE).layers[0].fill_(5) for _ in range(2))
    TorchOps(DEVICE).write_kv(expected, slots[::2], keys[::2], values[::2])
    write_kv(kv_layer, slots, keys, values)
    assert torch.equal(kv_layer, expected)


def test_no_tokens_are_no_work_on_triton() -> None:
    none, kv_layer = torch.zeros(0, dtype=torch.int64, device=DEVICE), torch.zeros(2, 1, 2, 16, 8, device=DEVICE)
    places = TokenPlaces(make_table(1, 8).to(DEVICE), none, none)
    assert rope_and_write_kv(torch.zeros(0, 24, device=DEVICE), places, kv_layer).shape == (0, 1, 8)
    assert rms_norm(torch.zeros(0, 8, device=DEVICE), torch.ones(8, device=DEVICE), 1e-5).shape == (0, 8)
    write_kv(kv_layer, none, torch.zeros(0, 1, 8, device=DEVICE), torch.zeros(0, 1, 8, device=DEVICE))
    assert silu_mul(torch.zeros(0, 16, device=DEVICE)).shape == (0, 8) and not kv_layer.any()

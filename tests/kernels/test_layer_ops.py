"""Norm, rotation, KV write and activation of a layer: each implementation against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from cpu_kernels import choose_cpu_kernels
from torch import Tensor

from titan.kernels.cpu.layers import CompiledOps
from titan.kernels.cpu.library import load_library
from titan.kernels.interfaces import LayerOps, choose_layer_ops
from titan.kernels.torch.layers import TorchOps

NUM_BLOCKS, BLOCK_SIZE = 6, 8
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 8e-3}
CPU = torch.device("cpu")


@pytest.fixture(params=["torch", "compiled"])
def implementation(request: pytest.FixtureRequest) -> str:
    if request.param == "compiled" and load_library().library is None:
        pytest.skip(load_library().description)
    return str(request.param)


def make_ops(implementation: str, dtype: torch.dtype) -> LayerOps:
    library = load_library().library
    return TorchOps() if implementation == "torch" or library is None else CompiledOps(library, dtype)


def random_tensor(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    assert (actual.double() - expected).norm() <= BOUNDS[dtype] * expected.norm()


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.double() / (x.double().pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 7), (3, 64), (300, 100)])  # the last by several threads
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_rms_norm_is_its_definition(implementation: str, dtype: torch.dtype, num_rows: int, size: int, scale: float) -> None:
    x = (random_tensor(num_rows, size, dtype=torch.float32) * scale + scale).to(dtype)
    weight = random_tensor(size, dtype=dtype, seed=1)
    before = x.clone()
    assert_near(make_ops(implementation, dtype).rms_norm(x, weight, 1e-6), normed(x, weight, 1e-6), dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 5), (4, 64), (300, 65)])
def test_silu_mul_is_its_definition(implementation: str, dtype: torch.dtype, num_rows: int, size: int) -> None:
    gate_up = random_tensor(num_rows, 2 * size, dtype=dtype, scale=8.0)
    gate, up = gate_up.double().chunk(2, -1)
    assert_near(make_ops(implementation, dtype).silu_mul(gate_up), gate / (1 + (-gate).exp()) * up, dtype)


def test_silu_mul_at_its_limits(implementation: str) -> None:
    gate_up = torch.tensor([[-1e30, -200.0, -50.0, 0.0, 200.0, torch.inf, torch.nan, 1, 1, 1, 1, 1, 1, 1]])
    output = make_ops(implementation, torch.float32).silu_mul(gate_up)[0]
    assert output[:4].abs().max() < 1e-20 and output[4] == 200 and output[5] == torch.inf and output[6].isnan()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (3, 3, 10), (8, 1, 64)])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_rotation_by_pairs_and_kv_in_its_slots_alone(
    implementation: str, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool, num_tokens: int
) -> None:
    num_qk_heads = num_heads + num_kv_heads
    qkv = random_tensor(num_tokens, (num_qk_heads + num_kv_heads) * head_dim, dtype=dtype)
    qk_norm = random_tensor(num_qk_heads, head_dim, dtype=dtype, seed=1) if has_norm else None
    angles = random_tensor(50, head_dim // 2, dtype=torch.float32, seed=2)
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(dtype)
    positions = torch.randint(50, (num_tokens,), generator=torch.Generator().manual_seed(3))
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(4))[:num_tokens]
    cache = random_tensor(2, 2, num_kv_heads, NUM_BLOCKS, BLOCK_SIZE, head_dim, dtype=dtype, seed=5)

    heads = qkv.double().view(num_tokens, -1, head_dim)
    qk = heads[:, :num_qk_heads] if qk_norm is None else normed(heads[:, :num_qk_heads], qk_norm, 1e-5)
    first, second = qk.chunk(2, -1)
    cos, sin = (table[positions].double()[:, each, None, -(head_dim // 2) :] for each in (0, 1))
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    expected_kv = cache.double()
    for token, slot in enumerate(slots.tolist()):
        expected_kv[1, 0, :, slot // BLOCK_SIZE, slot % BLOCK_SIZE] = rotated[token, num_heads:]
        expected_kv[1, 1, :, slot // BLOCK_SIZE, slot % BLOCK_SIZE] = heads[token, num_qk_heads:]

    before = cache.clone()
    ops = make_ops(implementation, dtype)
    q = ops.rope_and_write_kv(qkv, table, positions, slots, cache[1], num_heads=num_heads, qk_norm=qk_norm, eps=1e-5)
    assert q.shape == (num_tokens, num_heads, head_dim)
    assert_near(q, rotated[:, :num_heads], dtype)
    assert_near(cache, expected_kv, dtype)
    written = torch.zeros(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    written[slots] = True
    assert torch.equal(cache[0], before[0])
    assert torch.equal(cache[1].flatten(2, 3)[:, :, ~written], before[1].flatten(2, 3)[:, :, ~written])


def test_compiled_rounding_is_to_nearest_even() -> None:
    library = load_library().library
    if library is None:
        pytest.skip(load_library().description)
    gate = torch.full((4096,), 1e4)  # its sigmoid is 1
    up = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    gate_up = torch.cat((gate, up)).bfloat16()[None]
    exact = gate_up[0, :4096].float() * gate_up[0, 4096:].float()
    assert torch.equal(CompiledOps(library, torch.bfloat16).silu_mul(gate_up)[0], exact.bfloat16())


def test_choice_by_device_dtype_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    has_library = load_library().library is not None
    for dtype in (torch.float32, torch.bfloat16):
        assert isinstance(choose_layer_ops(CPU, dtype), CompiledOps if has_library else TorchOps)
    assert isinstance(choose_layer_ops(CPU, torch.float16), TorchOps)
    choose_cpu_kernels(monkeypatch, "torch")
    assert isinstance(choose_layer_ops(CPU, torch.float32), TorchOps)
    choose_cpu_kernels(monkeypatch, "fast")
    with pytest.raises(ValueError, match="TITAN_CPU_KERNELS=fast is not allowed: allowed are 'auto' and 'torch'"):
        choose_layer_ops(CPU, torch.float32)


def test_compiled_slot_minus_one_writes_nothing() -> None:
    library = load_library().library
    if library is None:
        pytest.skip(load_library().description)
    qkv = random_tensor(2, 4 * 8, dtype=torch.float32)
    table = torch.stack((torch.ones(3, 8), torch.zeros(3, 8)), 1)
    cache = random_tensor(3, 2, 1, 2, 4, 8, dtype=torch.float32, seed=1)
    before = cache.clone()
    q = CompiledOps(library, torch.float32).rope_and_write_kv(
        qkv, table, torch.tensor([0, 2]), torch.tensor([-1, 5]), cache[1], num_heads=2, qk_norm=None, eps=0.0
    )
    assert torch.equal(q, qkv.view(2, 4, 8)[:, :2])
    before[1, :, :, 1, 1] = qkv.view(2, 4, 8)[1, 2:, None]
    assert torch.equal(cache, before)

"""Rotation, norms, gate, and moves of KV at full shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from titan.bench.gpu.checks import ROUNDED_ONCE, held_to, largest_difference, num_different
from titan.bench.gpu.layer_reference import (
    reference_add_rms_norm,
    reference_clear_blocks,
    reference_copy_blocks,
    reference_move_paths,
    reference_rms_norm,
    reference_rope_and_write_kv,
    reference_silu_mul,
)
from titan.bench.gpu.sections import Measurement, Setting, Task
from titan.kernels.triton.gate import silu_mul
from titan.kernels.triton.kv_moves import clear_blocks, copy_blocks, move_paths
from titan.kernels.triton.norm import add_rms_norm, rms_norm
from titan.kernels.triton.rope_kv import rope_and_write_kv
from titan.models.rope import Rope, rope_table

BLOCK_SIZE = 16
EPS = 1e-5


def make_tasks(setting: Setting) -> Sequence[Task]:
    """One task per kernel, shape and dtype."""
    checks = {
        "rope and KV write, heads of 128": partial(check_rope, setting, head_dim=128, has_norm=False),
        "rope, head norms and KV write, heads of 64": partial(check_rope, setting, head_dim=64, has_norm=True),
    }
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        checks[f"norms, {str(dtype).removeprefix('torch.')}"] = partial(check_norms, setting, dtype)
        checks[f"gate, {str(dtype).removeprefix('torch.')}"] = partial(check_gate, setting, dtype)
    checks["moves of accepted paths"] = partial(check_move_paths, setting)
    checks["copies and clearing of blocks"] = partial(check_blocks, setting)
    return [Task(name, check, seconds=3, rank=1) for name, check in checks.items()]


def check_rope(setting: Setting, *, head_dim: int, has_norm: bool) -> Measurement:
    """Queries and the whole cache, against the token-by-token oracle."""
    num_heads, num_kv_heads, num_tokens, num_blocks = (4, 2, 5, 3) if setting.is_tiny else (32, 8, 128, 256)
    dtype, generator = torch.bfloat16, _generator(setting)
    qkv = _random(generator, num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    frequencies = tuple(500_000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2))
    table = rope_table(Rope("default", frequencies, 1.0), 8192).to(setting.device, dtype)
    rng = np.random.default_rng(setting.seed)
    positions = torch.from_numpy(rng.integers(0, 8192, num_tokens)).to(setting.device)
    slots = torch.from_numpy(rng.permutation(num_blocks * BLOCK_SIZE)[:num_tokens]).to(setting.device)
    slots[::7] = -1
    norm = _random(generator, num_heads + num_kv_heads, head_dim, dtype=dtype) if has_norm else None
    kv = torch.full((2, num_kv_heads, num_blocks, BLOCK_SIZE, head_dim), torch.nan, dtype=dtype, device=setting.device)
    exact_kv = kv.double()
    options = {"num_heads": num_heads, "qk_norm": norm, "eps": EPS}
    exact_q = reference_rope_and_write_kv(qkv, table, positions, slots, exact_kv, **options)  # type: ignore[arg-type]
    q = rope_and_write_kv(qkv, table, positions, slots, kv, **options)  # type: ignore[arg-type]
    is_written = ~exact_kv.isnan()
    error = max(largest_difference(q, exact_q), largest_difference(kv[is_written], exact_kv[is_written]))
    if int((kv.isnan() == is_written).sum()):
        error = float("inf")  # slots of others have changed
    return held_to(error, ROUNDED_ONCE[dtype], f"{num_tokens} tokens, {num_heads}/{num_kv_heads} heads of {head_dim}")


def check_norms(setting: Setting, dtype: torch.dtype) -> Measurement:
    """RMSNorm alone and after an addition, with the sum."""
    num_tokens, size = (3, 96) if setting.is_tiny else (512, 4096)
    generator = _generator(setting)
    x, residual = _random(generator, 2, num_tokens, size, dtype=dtype)
    weight = _random(generator, size, dtype=dtype)
    error = largest_difference(rms_norm(x, weight, EPS), reference_rms_norm(x, weight, EPS))
    exact_residual = residual.clone()
    exact = reference_add_rms_norm(x, exact_residual, weight, EPS)
    error = max(error, largest_difference(add_rms_norm(x, residual, weight, EPS), exact))
    error = max(error, largest_difference(residual, exact_residual))
    return held_to(error, ROUNDED_ONCE[dtype], f"{num_tokens} x {size}")


def check_gate(setting: Setting, dtype: torch.dtype) -> Measurement:
    """SiLU of one half times the other."""
    num_tokens, size = (3, 70) if setting.is_tiny else (512, 14336)
    gate_up = _random(_generator(setting), num_tokens, 2 * size, dtype=dtype)
    error = largest_difference(silu_mul(gate_up), reference_silu_mul(gate_up))
    return held_to(error, ROUNDED_ONCE[dtype], f"{num_tokens} x {size}")


def check_move_paths(setting: Setting) -> Measurement:
    """Random accepted paths, the whole cache compared."""
    num_requests, num_blocks_each = (3, 3) if setting.is_tiny else (64, 8)
    kv = _cache(setting, num_requests * num_blocks_each)
    rng = np.random.default_rng(setting.seed)
    table = rng.permutation(num_requests * num_blocks_each).reshape(num_requests, -1)
    max_path = 7
    paths = np.stack([np.sort(rng.permutation(20)[:max_path]) for _ in range(num_requests)])
    arguments = (
        _int32(table, setting),
        _int32(rng.integers(0, num_blocks_each * BLOCK_SIZE - 20, num_requests), setting),
        _int32(paths, setting),
        _int32(rng.integers(0, max_path, num_requests, endpoint=True), setting),
    )
    exact = kv.clone()
    reference_move_paths(exact, *arguments)
    move_paths(kv, *arguments)
    return held_to(num_different(kv, exact), 0, f"{num_requests} paths, cache {list(kv.shape)}")


def check_blocks(setting: Setting) -> Measurement:
    """Copies to free blocks, then clearing, the whole cache compared."""
    num_blocks = 12 if setting.is_tiny else 512
    kv = _cache(setting, num_blocks)
    order = torch.from_numpy(np.random.default_rng(setting.seed).permutation(num_blocks)).to(setting.device)
    pairs, cleared = order[: num_blocks // 2].view(-1, 2).contiguous(), order[num_blocks // 2 : num_blocks * 3 // 4].contiguous()
    exact = kv.clone()
    reference_copy_blocks(exact, pairs)
    reference_clear_blocks(exact, cleared)
    copy_blocks(kv, pairs)
    clear_blocks(kv, cleared)
    return held_to(num_different(kv, exact), 0, f"{len(pairs)} copies, cache {list(kv.shape)}")


def _cache(setting: Setting, num_blocks: int) -> Tensor:
    num_layers, num_kv_heads, head_dim = (2, 2, 8) if setting.is_tiny else (32, 8, 128)
    return _random(_generator(setting), num_layers, 2, num_kv_heads, num_blocks, BLOCK_SIZE, head_dim, dtype=torch.bfloat16)


def _generator(setting: Setting) -> torch.Generator:
    return torch.Generator(setting.device).manual_seed(setting.seed)


def _random(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=generator.device).normal_(generator=generator)


def _int32(values: np.typing.NDArray[np.int64], setting: Setting) -> Tensor:
    return torch.from_numpy(values).to(setting.device, torch.int32)

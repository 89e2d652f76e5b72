"""Rotation with the KV write, norms and gate at full shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from titan.bench.gpu.checks import ROUNDED_ONCE, held_to, largest_difference
from titan.bench.gpu.layer_reference import (
    reference_add_rms_norm,
    reference_rms_norm,
    reference_rope_and_write_kv,
    reference_silu_mul,
)
from titan.bench.gpu.sections import Measurement, Setting, Task
from titan.kernels.interfaces import TokenPlaces
from titan.kernels.triton.gate import silu_mul
from titan.kernels.triton.norm import rms_norm
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
    q = rope_and_write_kv(qkv, TokenPlaces(table, positions, slots), kv, norm, EPS)
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
    error = max(error, largest_difference(rms_norm(x, weight, EPS, residual), exact))
    error = max(error, largest_difference(residual, exact_residual))
    return held_to(error, ROUNDED_ONCE[dtype], f"{num_tokens} x {size}")


def check_gate(setting: Setting, dtype: torch.dtype) -> Measurement:
    """SiLU of one half times the other."""
    num_tokens, size = (3, 70) if setting.is_tiny else (512, 14336)
    gate_up = _random(_generator(setting), num_tokens, 2 * size, dtype=dtype)
    error = largest_difference(silu_mul(gate_up), reference_silu_mul(gate_up))
    return held_to(error, ROUNDED_ONCE[dtype], f"{num_tokens} x {size}")


def _generator(setting: Setting) -> torch.Generator:
    return torch.Generator(setting.device).manual_seed(setting.seed)


def _random(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=generator.device).normal_(generator=generator)

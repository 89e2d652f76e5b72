"""What the layer kernels are compiled to for an H100 or H200, at the sizes of shipped models: no spills, few registers."""

from __future__ import annotations

from collections import Counter

import pytest
from sm90 import Build, compile_launches

CODE = """
import torch
from titan.kernels.triton.norm import rms_norm
from titan.kernels.triton.gate import silu_mul
from titan.kernels.interfaces import TokenPlaces
from titan.kernels.triton.rope_kv import rope_and_write_kv

def zeros(*shape, dtype):
    return torch.zeros(shape, dtype=dtype)

half, single = torch.bfloat16, torch.float32
slots = torch.zeros(7, dtype=torch.int64)
for num_heads, num_kv_heads, head_dim, dtype in ((9, 3, 64, half), (32, 8, 128, half), (32, 8, 128, single)):
    kv_layer = zeros(2, num_kv_heads, 4, 16, head_dim, dtype=dtype)
    for qk_norm in (None, zeros(num_heads + num_kv_heads, head_dim, dtype=dtype)):
        rope_and_write_kv(
            zeros(7, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype),
            TokenPlaces(zeros(64, 2, head_dim, dtype=dtype), slots, slots), kv_layer, qk_norm, eps=1e-6,
        )
for hidden_size, dtype in ((768, half), (4096, half), (16384, half), (16384, single)):
    x, weight = zeros(7, hidden_size, dtype=dtype), zeros(hidden_size, dtype=dtype)
    rms_norm(x, weight, 1e-6)
    rms_norm(x, weight, 1e-6, x.clone())
for intermediate_size, dtype in ((2048, half), (14336, half), (14336, single)):
    silu_mul(zeros(7, 2 * intermediate_size, dtype=dtype))
"""

MAX_REGISTERS = {
    "_rope_and_write_kv_kernel": 64,
    "_norm_kernel": 96,
    "_silu_mul_kernel": 64,
}


@pytest.fixture(scope="module")
def builds() -> list[Build]:
    return compile_launches(CODE)


def test_every_size_is_built(builds: list[Build]) -> None:
    assert Counter(build.name for build in builds) == {
        "_rope_and_write_kv_kernel": 6,
        "_norm_kernel": 8,
        "_silu_mul_kernel": 3,
    }
    assert not any(build.constants.get("EMU") == "True" for build in builds)


def test_nothing_is_spilled_and_registers_leave_room_for_other_programs(builds: list[Build]) -> None:
    assert [build for build in builds if build.stack_bytes or build.registers > MAX_REGISTERS[build.name]] == []
    assert all(32 * build.num_warps * build.registers <= 65536 for build in builds)


def test_shared_memory_serves_the_sum_of_a_row_only(builds: list[Build]) -> None:
    assert {build.name for build in builds if build.shared_bytes} == {"_norm_kernel"}
    assert max(build.shared_bytes for build in builds) <= 1024

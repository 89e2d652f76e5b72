"""Rotation, head norms and KV writes in one launch against the token-by-token twin, and in a layer against transformers."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from zoo import Zoo

from titan.bench.gpu.layer_reference import reference_rope_and_write_kv
from titan.kernels.triton.gate import silu_mul
from titan.kernels.triton.norm import add_rms_norm, rms_norm
from titan.kernels.triton.rope_kv import rope_and_write_kv
from titan.kernels.triton.tools import INTERPRETED
from titan.models.loader import load_config
from titan.models.rope import Rope, rope_table

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HALF_ULP = {torch.float32: 1e-6, torch.float16: 2**-11 + 1e-6, torch.bfloat16: 2**-8 + 1e-6}


def make_table(num_positions: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    frequencies = tuple(100.0 ** (-2 * i / head_dim) for i in range(head_dim // 2))
    return rope_table(Rope("default", frequencies, 1.0), num_positions).to(DEVICE, dtype)


def assert_rounded_once(actual: Tensor, exact: Tensor) -> None:
    """Within half a unit in the last place, up to the float32 arithmetic."""
    torch.testing.assert_close(actual.double(), exact, rtol=HALF_ULP[actual.dtype], atol=1e-6)


CASES: list[dict[str, Any]] = [
    {"dtype": torch.bfloat16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "has_norm": True},
    {"dtype": torch.bfloat16, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "has_norm": False},
    {"dtype": torch.float16, "num_heads": 3, "num_kv_heads": 3, "head_dim": 64, "has_norm": True},
    {"dtype": torch.float16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 80, "has_norm": False},
    {"dtype": torch.float32, "num_heads": 7, "num_kv_heads": 1, "head_dim": 128, "has_norm": True},
    {"dtype": torch.float32, "num_heads": 5, "num_kv_heads": 5, "head_dim": 2, "has_norm": False},
    {"dtype": torch.float32, "num_heads": 28, "num_kv_heads": 4, "head_dim": 6, "has_norm": True, "block_size": 12},
    {"dtype": torch.float32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 2048, "has_norm": True},  # one head per program
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_heads_are_normed_and_rotated_and_only_their_slots_change(case: dict[str, Any]) -> None:
    dtype, head_dim, block_size = case["dtype"], case["head_dim"], case.get("block_size", 16)
    num_heads, num_kv_heads = case["num_heads"], case["num_kv_heads"]
    generator = torch.Generator().manual_seed(1)
    # of a wider tensor, and nothing of what lies beside it may be read
    wide = torch.full((6, (num_heads + 2 * num_kv_heads) * head_dim + 16), torch.nan)
    qkv = wide.to(DEVICE, dtype)[:, 8:-8]
    qkv.copy_(torch.randn(qkv.shape, generator=generator))
    positions = torch.tensor([0, 39, 7, 7, 38, 1], dtype=torch.int32 if case["has_norm"] else torch.int64, device=DEVICE)
    slots = torch.tensor([4 * block_size - 1, -1, block_size, 0, block_size - 1, -1], device=DEVICE)
    kv_layer = torch.full((2, num_kv_heads, 4, block_size, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    norm = (torch.randn(num_heads + num_kv_heads, head_dim, generator=generator) + 1).to(DEVICE, dtype)
    arguments = (qkv, make_table(40, head_dim, dtype), positions, slots)
    options = {"num_heads": num_heads, "qk_norm": norm if case["has_norm"] else None, "eps": 1e-3}

    exact_kv = kv_layer.double()
    exact_q = reference_rope_and_write_kv(*arguments, exact_kv, **options)
    q = rope_and_write_kv(*arguments, kv_layer, **options)

    assert q.shape == (6, num_heads, head_dim) and q.dtype == dtype
    assert_rounded_once(q, exact_q)
    torch.testing.assert_close(kv_layer.double(), exact_kv, rtol=HALF_ULP[dtype], atol=1e-6, equal_nan=True)
    assert int(kv_layer.isnan().sum()) == kv_layer.numel() - 4 * 2 * num_kv_heads * head_dim
    values = qkv.view(6, -1, head_dim)[:, num_heads + num_kv_heads :]
    assert torch.equal(kv_layer[1, :, 3, block_size - 1], values[0])  # not a bit of them changes


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, of what is not written
def test_infinite_values_reach_the_cache_as_they_are() -> None:
    qkv = torch.zeros(1, 3 * 8, device=DEVICE)
    qkv[0, 16:] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1, 2, 3, 4])
    kv_layer = torch.zeros(2, 1, 1, 8, 8, device=DEVICE)
    slots = torch.tensor([5], device=DEVICE)
    rope_and_write_kv(qkv, make_table(1, 8, torch.float32), slots * 0, slots, kv_layer, num_heads=1)
    assert torch.equal(kv_layer[1, 0, 0, 5].view(torch.int32), qkv[0, 16:].view(torch.int32))


def test_a_cache_may_be_laid_out_block_by_block() -> None:
    qkv = torch.randn(3, 8 * 16, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    slots, positions = torch.tensor([17, 3, 40], device=DEVICE), torch.tensor([1, 2, 3], device=DEVICE)
    plain = torch.zeros(2, 2, 3, 16, 16, device=DEVICE)
    by_block = torch.zeros(3, 2, 16, 2, 16, device=DEVICE).permute(1, 3, 0, 2, 4)
    for kv_layer in (plain, by_block):
        rope_and_write_kv(qkv, make_table(4, 16, torch.float32), positions, slots, kv_layer, num_heads=4)
    assert torch.equal(plain, by_block) and int(plain.count_nonzero()) == 3 * 4 * 16


@pytest.mark.parametrize("far", ["tokens", "heads", "blocks"])
def test_offsets_beyond_32_bits_are_right(far: str) -> None:
    """Only a few pages of the storage are touched; an offset that wraps around is 2048 elements before its base."""
    storage = torch.empty(2**32 + 4096, dtype=torch.float16, device=DEVICE)
    num_kv_heads = 3 if far == "heads" else 1
    qkv = torch.randn(3, (1 + 2 * num_kv_heads) * 8, generator=torch.Generator().manual_seed(3)).to(DEVICE, torch.float16)
    kv_layer = torch.empty(2, num_kv_heads, 3, 16, 8, dtype=torch.float16, device=DEVICE)
    if far == "tokens":
        qkv = storage.as_strided(qkv.shape, (2**31 - 1024, 1), 2048).copy_(qkv)
    else:
        head_and_block = (2**31 - 1024, 128) if far == "heads" else (128, 2**31 - 1024)
        kv_layer = storage.as_strided(kv_layer.shape, (512, *head_and_block, 8, 1), 2048)
    kv_layer[:, :, [0, 2], 0] = 0
    positions, slots = torch.arange(3, device=DEVICE), torch.tensor([-1, -1, 2 * 16], device=DEVICE)
    table = make_table(3, 8, torch.float16)
    exact_kv = torch.zeros(kv_layer.shape, dtype=torch.float64, device=DEVICE)
    exact_q = reference_rope_and_write_kv(qkv, table, positions, slots, exact_kv, num_heads=1)
    q = rope_and_write_kv(qkv, table, positions, slots, kv_layer, num_heads=1)
    assert_rounded_once(q, exact_q)
    assert_rounded_once(kv_layer[:, :, [0, 2], 0], exact_kv[:, :, [0, 2], 0])


def test_no_tokens_are_no_work() -> None:
    empty = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    kv_layer = torch.zeros(2, 1, 1, 16, 8, device=DEVICE)
    q = rope_and_write_kv(torch.zeros(0, 24, device=DEVICE), make_table(1, 8, torch.float32), empty, empty, kv_layer, num_heads=1)
    assert q.shape == (0, 1, 8) and not kv_layer.any()


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama3_rope", "qwen3"])
def test_a_layer_of_these_kernels_equals_that_of_transformers(family: str, zoo: Zoo) -> None:
    model, config = zoo.model(family), load_config(zoo.path(family))
    layer, eps = deepcopy(model.model.layers[1]).to(DEVICE), config.rms_norm_eps
    num_heads, num_kv_heads, num_tokens = config.num_heads, config.num_kv_heads, 7
    hidden_states = model(torch.arange(10, 10 + num_tokens)[None], output_hidden_states=True).hidden_states
    x, expected = (hidden_states[i][0].to(DEVICE) for i in (1, 2))

    attention, mlp = layer.self_attn, layer.mlp
    qk_norm = None
    if "qk_norm" in config.traits:
        qk_norm = torch.stack([attention.q_norm.weight] * num_heads + [attention.k_norm.weight] * num_kv_heads)
    qkv_weight = torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight))
    gate_up_weight = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
    positions, slots = torch.arange(num_tokens, device=DEVICE), torch.tensor([40, 3, 4, 16, 15, 47, 0], device=DEVICE)
    kv = torch.full((2, num_kv_heads, 3, 16, config.head_dim), torch.nan, device=DEVICE)

    qkv = rms_norm(x, layer.input_layernorm.weight, eps) @ qkv_weight.T
    table = rope_table(config.rope, 16).to(DEVICE)
    q = rope_and_write_kv(qkv, table, positions, slots, kv, num_heads=num_heads, qk_norm=qk_norm, eps=eps)
    keys, values = kv.flatten(2, 3)[:, :, slots]
    attended = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, is_causal=True, enable_gqa=True)
    projected = attended.transpose(0, 1).flatten(1) @ attention.o_proj.weight.T
    normed = add_rms_norm(projected, x, layer.post_attention_layernorm.weight, eps)
    output = x + silu_mul(normed @ gate_up_weight.T) @ mlp.down_proj.weight.T
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def arguments_of_one_token() -> dict[str, Any]:
    return {
        "qkv": torch.zeros(1, 4 * 8, device=DEVICE),
        "rope_table": torch.zeros(10, 2, 8, device=DEVICE),
        "positions": torch.zeros(1, dtype=torch.int64, device=DEVICE),
        "slot_mapping": torch.zeros(1, dtype=torch.int64, device=DEVICE),
        "kv_layer": torch.zeros(2, 1, 3, 16, 8, device=DEVICE),
        "num_heads": 2,
        "qk_norm": torch.zeros(3, 8, device=DEVICE),
    }


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("qkv", torch.zeros(1, 40), "qkv has shape [1, 40]: it must be [any, 32]"),
        ("num_heads", 3, "qkv has shape [1, 32]: it must be [any, 40]"),
        ("qkv", torch.zeros(32, 2).T, "qkv has strides (1, 2): its last dimension must be contiguous"),
        ("qkv", torch.zeros(1, 32).half(), "qkv has dtype torch.float16: it must be torch.float32"),
        ("rope_table", torch.zeros(10, 2, 4), "rope_table has shape [10, 2, 4]: it must be [any, 2, 8]"),
        ("rope_table", torch.zeros(10, 2, 8).bfloat16(), "rope_table has dtype torch.bfloat16: it must be torch.float32"),
        ("positions", torch.zeros(2, dtype=torch.int64), "positions has shape [2]: it must be [1]"),
        ("positions", torch.zeros(1), "positions has dtype torch.float32: it must be torch.int32 or torch.int64"),
        ("slot_mapping", torch.zeros(1, dtype=torch.int32), "slot_mapping has dtype torch.int32: it must be torch.int64"),
        ("kv_layer", torch.zeros(2, 3, 16, 8), "kv_layer has shape [2, 3, 16, 8]: it must be [2, any, any, any, any]"),
        ("kv_layer", torch.zeros(2, 1, 3, 16, 9), "kv_layer has shape [2, 1, 3, 16, 9]: head_dim must be even"),
        ("kv_layer", torch.zeros(2, 1, 3, 8, 16).mT, "its last dimension must be contiguous"),
        ("qk_norm", torch.zeros(2, 8), "qk_norm has shape [2, 8]: it must be [3, 8]"),
        ("positions", torch.zeros(1, dtype=torch.int64, device="meta"), "positions is on meta: it must be on"),
        ("qkv", torch.zeros(1, 32, device="meta"), "is on meta"),
    ],
)
def test_wrong_arguments_are_refused_by_name(argument: str, value: Any, message: str) -> None:
    if isinstance(value, Tensor) and not value.is_meta:
        value = value.to(DEVICE)
    with pytest.raises(ValueError, match=re.escape(message)):
        rope_and_write_kv(**(arguments_of_one_token() | {argument: value}))

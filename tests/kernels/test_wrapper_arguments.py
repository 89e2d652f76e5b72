"""What a model hands to the wrappers of Triton kernels: what is wrong with it is refused by its name, before a launch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreted import DEVICE
from torch import Tensor

from titan.core.attention import AttentionSpec, Chunk
from titan.kernels.interfaces import TokenPlaces
from titan.kernels.triton import tools as triton_tools
from titan.kernels.triton.attention_plan import AttentionGeometry, DeviceLayout
from titan.kernels.triton.attention_planner import TreeAttentionPlan
from titan.kernels.triton.gate import silu_mul
from titan.kernels.triton.kv_writes import write_kv
from titan.kernels.triton.norm import rms_norm
from titan.kernels.triton.rope_kv import rope_and_write_kv
from titan.kernels.triton.top_tokens import row_argmax
from titan.kernels.triton.tree_attention import tree_attention

NUM_ROWS, VOCAB_SIZE, HEAD_DIM = 3, 20, 16


def floats(*shape: int) -> Tensor:
    return torch.full(shape, 0.05, device=DEVICE)


def ints(values: list[Any], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def longs(values: list[Any]) -> Tensor:
    return ints(values, torch.int64)


def geometry() -> dict[str, Any]:
    return {"num_heads": 4, "num_kv_heads": 2, "head_dim": HEAD_DIM, "block_size": 16, "dtype": torch.float32}


def batch() -> DeviceLayout:
    return DeviceLayout(
        block_size=16,
        query_start_loc=ints([0, 2, 3]),
        seq_lens=ints([5, 9]),
        block_table=ints([[0, 0], [0, 0]]),
        positions=longs([3, 4, 8]),
        visible_lens=ints([4, 5, 9]),
        tree_starts=ints([0, 0]),
        ancestor_bits=longs([0, 0, 0]),
        short_query_len=2,
        max_query_len=2,
    )


def rotate(
    qkv: Tensor, rope_table: Tensor, positions: Tensor, slots: Tensor, kv_layer: Tensor, qk_norm: Tensor | None = None
) -> Tensor:
    return rope_and_write_kv(qkv, TokenPlaces(rope_table, positions, slots), kv_layer, qk_norm)


def attend(q: Tensor, kv_layer: Tensor, plan: TreeAttentionPlan, sinks: Tensor | None = None, **spec: Any) -> Tensor:
    return tree_attention(q, kv_layer, plan, AttentionSpec(**{"scale": 0.25} | spec), sinks)


KV_LAYER = floats(2, 2, 3, 16, HEAD_DIM)
WRAPPERS: dict[Callable[..., object], Callable[[], dict[str, Any]]] = {
    AttentionGeometry: geometry,
    attend: lambda: {
        "q": floats(3, 4, HEAD_DIM),
        "kv_layer": KV_LAYER,
        "plan": TreeAttentionPlan(batch()),
        "sinks": floats(4),
    },
    write_kv: lambda: {
        "kv_layer": KV_LAYER,
        "slots": longs([0, 1, -1]),
        "keys": floats(3, 2, HEAD_DIM),
        "values": floats(3, 2, 8),
    },
    rms_norm: lambda: {"x": floats(3, 8), "weight": floats(8), "eps": 1e-5, "residual": floats(3, 8)},
    silu_mul: lambda: {"gate_up": floats(3, 8)},
    rotate: lambda: {
        "qkv": floats(3, 8 * HEAD_DIM),
        "rope_table": floats(9, 2, HEAD_DIM),
        "positions": longs([0, 1, 2]),
        "slots": longs([0, 1, 2]),
        "kv_layer": KV_LAYER,
        "qk_norm": floats(6, HEAD_DIM),
    },
    row_argmax: lambda: {"logits": floats(NUM_ROWS, VOCAB_SIZE)},
}

APART = "numbers that do not lie side by side"
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "an integer for a float, or a float for an integer": lambda x: x.int() if x.is_floating_point() else x.float(),
    "a dtype that no kernel takes": lambda x: x.to(torch.float8_e4m3fn) if x.is_floating_point() else x.to(torch.int16),
    "a dimension too many": lambda x: x[None],
    "a dimension too few": lambda x: x[0],
    APART: lambda x: torch.stack((x, x), -1)[..., 0],
    "another device": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda each: each.__name__)
def test_each_tensor_is_refused_by_name(wrapper: Callable[..., object]) -> None:
    arguments = WRAPPERS[wrapper]
    wrapper(**arguments())  # which is fine as it is
    for name in [name for name, value in arguments().items() if isinstance(value, Tensor)]:
        for change, apply in CHANGES.items():
            if (wrapper, change) == (write_kv, APART) and name in ("keys", "values"):
                continue  # they may lie as another library leaves them
            changed = arguments()
            changed[name] = apply(changed[name])
            print(name, "with", change)
            with pytest.raises(ValueError, match=rf"^{name} (has|is on) "):
                wrapper(**changed)


@pytest.mark.parametrize(("wrapper", "name"), [(rms_norm, "residual"), (rotate, "kv_layer"), (write_kv, "kv_layer")])
def test_what_is_written_has_a_place_for_each_number(wrapper: Callable[..., object], name: str) -> None:
    arguments = WRAPPERS[wrapper]()
    tensor = arguments[name]
    arguments[name] = tensor[:1].expand(max(len(tensor), 2), *tensor.shape[1:])
    with pytest.raises(ValueError, match=rf"^{name} has strides \(0, .*: it is written to, and must not be expanded$"):
        wrapper(**arguments)


MESSAGES: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    (AttentionGeometry, {"num_heads": 5}, "num_heads is 5: it must be a multiple of num_kv_heads, 2"),
    (AttentionGeometry, {"head_dim": 513}, "head_dim is 513: it must be from 8 to 512"),
    (AttentionGeometry, {"head_dim": 577, "is_latent": True}, "head_dim is 577: it must be from 8 to 576"),
    (AttentionGeometry, {"value_dim": 17}, "value_dim is 17: it must be from 1 to 16"),
    (AttentionGeometry, {"head_dim": 576, "value_dim": 511, "is_latent": True}, "value_dim is 511: it must be from 512 to 512"),
    (AttentionGeometry, {"block_size": 8}, "block_size is 8: it must be one of (16, 32)"),
    (AttentionGeometry, {"dtype": torch.float64}, "dtype is torch.float64: it must be one of torch.bfloat16, torch.float16, torch"),
    (attend, {"q": floats(2, 4, HEAD_DIM)}, "q has shape [2, 4, 16]: it must be [3, any, any]"),
    (attend, {"q": floats(3, 4, HEAD_DIM).half()}, "kv_layer has dtype torch.float32: it must be torch.float16 or torch.int8"),
    (attend, {"q": floats(3, 5, HEAD_DIM), "sinks": None}, "num_heads is 5: it must be a multiple of num_kv_heads, 2"),
    (attend, {"sinks": floats(3)}, "sinks has shape [3]: it must be [4]"),
    (attend, {"value_dim": 17}, "value_dim is 17: it must be from 1 to 16"),
    (attend, {"kv_layer": floats(3, 2, 3, 16, HEAD_DIM)}, "kv_layer has 3 planes: it must have 2, keys and values, or 1, keys"),
    (attend, {"kv_layer": floats(2, 2, 3, 8, HEAD_DIM)}, "kv_layer has shape [2, 2, 3, 8, 16]: it must be [any, any, any, 16, 16]"),
    (attend, {"window": 0}, "window is 0: it must be None or from 1 to 1073741824"),
    (attend, {"window": Chunk(0)}, "window is Chunk(size=0): it must be None or from 1 to 1073741824"),
    (attend, {"softcap": 0.0}, "softcap is 0.0: it must be positive, or None"),
    (attend, {"scale": 0.0}, "scale is 0.0: it must be positive"),
    (write_kv, {"values": floats(3, 2, 17)}, "values has shape [3, 2, 17]: a value must have 1 to 16 numbers"),
    (write_kv, {"values": None}, "kv_layer has shape [2, 2, 3, 16, 16]: it must be [1, 2, any, any, 16]"),
    (write_kv, {"slots": longs([0, 1])}, "slots has shape [2]: it must be [3]"),
    (rms_norm, {"x": floats(2, 16385)}, "x has shape [2, 16385]: hidden_size must be 1 to 16384"),
    (rms_norm, {"weight": floats(7)}, "weight has shape [7]: it must be [8]"),
    (rms_norm, {"residual": floats(2, 8)}, "residual has shape [2, 8]: it must be [3, 8]"),
    (silu_mul, {"gate_up": floats(2, 7)}, "gate_up has shape [2, 7]: its rows must have two halves"),
    (rotate, {"qkv": floats(3, 90)}, "qkv has shape [3, 90]: it must be [T, (H + 4) * 16] with one query head or more"),
    (rotate, {"rope_table": floats(9, 2, 8)}, "rope_table has shape [9, 2, 8]: it must be [any, 2, 16]"),
    (rotate, {"positions": longs([0, 1])}, "positions has shape [2]: it must be [3]"),
    (rotate, {"kv_layer": floats(2, 1, 3, 16, 9)}, "kv_layer has shape [2, 1, 3, 16, 9]: head_dim must be even"),
    (rotate, {"kv_layer": floats(2, 1, 3, 16, 0)}, "kv_layer has shape [2, 1, 3, 16, 0]: head_dim must be even, and no"),
    (rotate, {"kv_layer": floats(2, 0, 3, 16, 8)}, "kv_layer has shape [2, 0, 3, 16, 8]: head_dim must be even, and no"),
    (rotate, {"qk_norm": floats(2, 16)}, "qk_norm has shape [2, 16]: it must be [6, 16]"),
    (row_argmax, {"logits": floats(3, 0)}, "logits has shape [3, 0]: there must be at least one token"),
    (rms_norm, {"x": floats(3, 8).to("meta")}, "x is on meta: Triton kernels of this process run on "),
]


@pytest.mark.parametrize(("wrapper", "changes", "message"), MESSAGES)
def test_sizes_and_numbers_are_refused_by_name(wrapper: Callable[..., object], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        wrapper(**(WRAPPERS[wrapper]() | changes))


def test_a_cuda_device_that_is_not_the_current_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would launch on the current one, with pointers into the other."""
    monkeypatch.setattr(triton_tools, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    triton_tools.require_launchable("x", torch.device("cuda:0"))
    with pytest.raises(ValueError, match=r"^x is on cuda:1, but cuda:0 is current"):
        triton_tools.require_launchable("x", torch.device("cuda:1"))


@pytest.mark.parametrize("wrapper", [attend, rotate, write_kv])
def test_quantised_blocks_are_whole_slots(wrapper: Callable[..., object]) -> None:
    blocks = torch.zeros(2, 2, 3, 16 * (HEAD_DIM + 4), dtype=torch.int8, device=DEVICE)
    wrapper(**WRAPPERS[wrapper]() | {"kv_layer": blocks})
    with pytest.raises(ValueError, match="quantised blocks have 319 bytes"):
        wrapper(**WRAPPERS[wrapper]() | {"kv_layer": blocks[..., :-1]})

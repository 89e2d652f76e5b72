"""Every tensor that goes into a wrapper of a Triton kernel: what is wrong with it is refused by its name, before a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from titan.kernels.triton import tools as triton_tools
from titan.kernels.triton.attention_plan import AttentionGeometry
from titan.kernels.triton.attention_planner import plan_tree_attention
from titan.kernels.triton.gate import silu_mul
from titan.kernels.triton.kv_moves import clear_blocks, copy_blocks, move_paths
from titan.kernels.triton.norm import add_rms_norm, rms_norm
from titan.kernels.triton.root_matches import root_matches
from titan.kernels.triton.rope_kv import rope_and_write_kv
from titan.kernels.triton.row_distribution import RowDistributions, row_distributions
from titan.kernels.triton.sample_rows import draw_rows, sample_rows
from titan.kernels.triton.tools import INTERPRETED
from titan.kernels.triton.tree_attention import tree_attention
from titan.kernels.triton.tree_rejection import reject_trees
from titan.kernels.triton.tree_walk import walk_matches

DEVICE = torch.device("cpu" if INTERPRETED else "cuda:0")
NUM_ROWS, VOCAB_SIZE, HEAD_DIM = 3, 20, 16


def floats(*shape: int) -> Tensor:
    return torch.full(shape, 0.05, device=DEVICE)


def ints(values: list[Any], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def longs(values: list[Any]) -> Tensor:
    return ints(values, torch.int64)


def batch() -> dict[str, Any]:
    """Two requests, of two tokens and one."""
    return {
        "geometry": AttentionGeometry(4, 2, HEAD_DIM, 16, torch.float32),
        "query_start_loc": ints([0, 2, 3]),
        "seq_lens": ints([5, 9]),
        "block_table": ints([[0, 0], [0, 0]]),
        "positions": longs([3, 4, 8]),
        "visible_lens": ints([4, 5, 9]),
        "tree_starts": ints([0, 0]),
        "ancestor_bits": longs([0, 0, 0]),
        "short_query_len": 2,
        "max_query_len": 2,
    }


def options() -> dict[str, Any]:
    ones, zeros = torch.ones(NUM_ROWS, device=DEVICE), torch.zeros(NUM_ROWS, device=DEVICE)
    return {"temperature": ones, "top_k": zeros.int(), "top_p": ones, "min_p": zeros}


def distributions() -> RowDistributions:
    return row_distributions(floats(NUM_ROWS, VOCAB_SIZE), **options())


def trees() -> dict[str, Any]:
    """One request with a chain of two nodes: three rows."""
    return {"draft_token_ids": longs([3, 4]), "parents": ints([-1, 0]), "node_start_loc": ints([0, 2])}


def kv() -> Tensor:
    return floats(1, 2, 2, 3, 16, HEAD_DIM)


NUMBERS: dict[str, Any] = {"seeds": longs([1, 2, 3]), "positions": longs([4, 5, 6])}
DRAFTS: dict[str, Any] = {"draft_probs": floats(2, VOCAB_SIZE), "draft_rows": ints([0, 1, 0])}

WRAPPERS: dict[Callable[..., object], Callable[[], dict[str, Any]]] = {
    plan_tree_attention: batch,
    tree_attention: lambda: {
        "q": floats(3, 4, HEAD_DIM),
        "kv_layer": kv()[0],
        "plan": plan_tree_attention(**batch()),
        "scale": 0.25,
    },
    rms_norm: lambda: {"x": floats(3, 8), "weight": floats(8), "eps": 1e-5},
    add_rms_norm: lambda: {"x": floats(3, 8), "residual": floats(3, 8), "weight": floats(8), "eps": 1e-5},
    silu_mul: lambda: {"gate_up": floats(3, 8)},
    rope_and_write_kv: lambda: {
        "qkv": floats(3, 8 * HEAD_DIM),
        "rope_table": floats(9, 2, HEAD_DIM),
        "positions": longs([0, 1, 2]),
        "slot_mapping": longs([0, 1, 2]),
        "kv_layer": kv()[0],
        "num_heads": 4,
        "qk_norm": floats(6, HEAD_DIM),
    },
    move_paths: lambda: {
        "kv": kv(),
        "block_table": ints([[0, 0], [0, 0]]),
        "first_slots": longs([0, 0]),
        "paths": ints([[0, 2], [0, 1]]),
        "num_accepted": ints([2, 1]),
    },
    copy_blocks: lambda: {"kv": kv(), "pairs": longs([[0, 1], [0, 2]])},
    clear_blocks: lambda: {"kv": kv(), "block_ids": longs([0, 1])},
    row_distributions: lambda: {"logits": floats(NUM_ROWS, VOCAB_SIZE)} | options(),
    draw_rows: lambda: {"distributions": distributions(), "purpose": 0} | NUMBERS,
    sample_rows: lambda: {"logits": floats(NUM_ROWS, VOCAB_SIZE), "purpose": 0} | options() | NUMBERS,
    walk_matches: lambda: {"wanted": longs([1, 2, 3]), "max_depth": 2} | trees(),
    reject_trees: lambda: {"distributions": distributions(), "max_depth": 2} | trees() | DRAFTS | NUMBERS,
    root_matches: lambda: {"distributions": distributions(), "node_start_loc": trees()["node_start_loc"]} | DRAFTS,
}

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "an integer for a float, or a float for an integer": lambda x: x.int() if x.is_floating_point() else x.float(),
    "a dtype that no kernel takes": lambda x: x.to(torch.float8_e4m3fn) if x.is_floating_point() else x.to(torch.int16),
    "a dimension too many": lambda x: x[None],
    "a dimension too few": lambda x: x[0],
    "numbers that do not lie side by side": lambda x: torch.stack((x, x), -1)[..., 0],
    "another device": lambda x: x.to("meta"),
}
WRITTEN = [
    (add_rms_norm, "residual"),
    (rope_and_write_kv, "kv_layer"),
    (move_paths, "kv"),
    (copy_blocks, "kv"),
    (clear_blocks, "kv"),
]


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda each: each.__name__)
def test_each_tensor_is_refused_by_name(wrapper: Callable[..., object]) -> None:
    arguments = WRAPPERS[wrapper]
    wrapper(**arguments())  # which is fine as it is
    for name in [name for name, value in arguments().items() if isinstance(value, Tensor)]:
        for change, apply in CHANGES.items():
            changed = arguments()
            changed[name] = apply(changed[name])
            print(name, change)
            with pytest.raises(ValueError, match=rf"^{name} (has|is on) "):
                wrapper(**changed)


@pytest.mark.parametrize(("wrapper", "name"), WRITTEN)
def test_what_is_written_has_a_place_for_each_number(wrapper: Callable[..., object], name: str) -> None:
    arguments = WRAPPERS[wrapper]()
    tensor = arguments[name]
    arguments[name] = tensor[:1].expand(max(len(tensor), 2), *tensor.shape[1:])
    with pytest.raises(ValueError, match=rf"^{name} has strides \(0, .*: it is written to, and must not be expanded$"):
        wrapper(**arguments)


@pytest.mark.parametrize(("wrapper", "name"), WRITTEN[1:])
@pytest.mark.parametrize("dimension", ["heads", "head_dim"])
def test_caches_that_hold_nothing_are_refused(wrapper: Callable[..., object], name: str, dimension: str) -> None:
    arguments = WRAPPERS[wrapper]()
    cache = arguments[name]
    arguments[name] = cache[..., :0] if dimension == "head_dim" else cache.narrow(-4, 0, 0)
    with pytest.raises(ValueError, match=rf"^{name} has shape \["):
        wrapper(**arguments)


def test_a_cuda_device_that_is_not_the_current_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would launch on the current one, with pointers into the other."""
    monkeypatch.setattr(triton_tools, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    triton_tools.require_launchable("x", torch.device("cuda:0"))
    with pytest.raises(ValueError, match=r"^x is on cuda:1, but cuda:0 is current"):
        triton_tools.require_launchable("x", torch.device("cuda:1"))

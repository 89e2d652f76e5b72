"""What is read from the configs, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import SIZES

from titan.models.config import ModelConfig
from titan.models.loader import load_config
from titan.models.rope import Rope, rope_table

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def read(folder: Path, model_type: str = "llama", **entries: Any) -> ModelConfig:
    content = SIZES | {"model_type": model_type, "architectures": [ARCHITECTURES.get(model_type, "Other")]} | entries
    (folder / "config.json").write_text(json.dumps(content))
    return load_config(str(folder))


def test_biases_and_norms_of_the_families(tmp_path: Path) -> None:
    flags = {}
    for model_type in ARCHITECTURES:
        config = read(tmp_path, model_type)
        flags[model_type] = tuple(trait in config.traits for trait in ("attention_bias", "output_bias", "mlp_bias", "qk_norm"))
    assert flags == {
        "llama": (False, False, False, False),
        "mistral": (False, False, False, False),
        "qwen2": (True, False, False, False),
        "qwen3": (False, False, False, True),
    }
    biased = read(tmp_path, attention_bias=True, mlp_bias=True)
    assert biased.traits >= {"attention_bias", "output_bias", "mlp_bias"}


def test_sliding_windows(tmp_path: Path) -> None:
    assert read(tmp_path, "mistral", sliding_window=9).layer_windows == (9, 9, 9)
    assert read(tmp_path, "mistral", sliding_window=256).windows == (None,)  # no position can leave it
    assert read(tmp_path, "qwen2", sliding_window=9).layer_windows == (None, None, None)
    config = read(tmp_path, "qwen3", sliding_window=9, use_sliding_window=True, max_window_layers=1)
    assert config.layer_windows == (None, 9, 9)
    assert config.windows == (None, 9)


def test_the_generation_config_decides_on_the_end_tokens(tmp_path: Path) -> None:
    assert read(tmp_path).eos_token_ids == (2,)
    assert read(tmp_path, eos_token_id=[2, 5]).eos_token_ids == (2, 5)
    assert read(tmp_path, eos_token_id=None).eos_token_ids == ()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read(tmp_path).eos_token_ids == (7, 8)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    assert read(tmp_path).eos_token_ids == (2,)


def test_dtype_and_memory_per_token(tmp_path: Path) -> None:
    assert read(tmp_path).dtype == torch.float32
    config = read(tmp_path, torch_dtype="bfloat16")
    assert config.dtype == torch.bfloat16
    assert config.kv_layout(torch.bfloat16).bytes_per_token == 2 * 3 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
            "config names GPT2LMHeadModel; supported are LlamaForCausalLM, ",
        ),
        (
            {"model_type": "new", "architectures": ["NewForCausalLM"]},
            "config names NewForCausalLM; supported are LlamaForCausalLM, ",
        ),
        ({"architectures": None}, "config names no architecture; supported are LlamaForCausalLM, "),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', which is not supported: it must be 'silu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized \(gptq\), which is not supported"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"head_dim": 3}, "head_dim=3 is odd"),
        (
            {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
            "rope type 'spiral' is not supported: .* default, linear",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 3}, "'chunked_attention' is not supported"),
    ],
)
def test_unsupported_configs_are_refused_by_name(tmp_path: Path, entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, **entries)


def test_the_table_rotates_each_pair_by_its_angle() -> None:
    cos, sin = rope_table(Rope("default", (1.0, 0.25), 1.0), 5).unbind(1)
    x = torch.randn(5, 4)
    rotated = x * cos + x.roll(2, -1) * sin
    pairs = torch.complex(x[:, :2], x[:, 2:]) * torch.exp(1j * torch.arange(5)[:, None] * torch.tensor([1.0, 0.25]))
    assert torch.allclose(rotated, torch.cat((pairs.real, pairs.imag), -1), atol=1e-6)

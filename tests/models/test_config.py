"""What is read from the configs; test_decoder holds traits and windows to transformers, test_broken_models has what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DYNAMIC, LONGROPE, YARN
from stepping import greedy, make_engine, run_all
from tiny_models import SIZES, make_model

from titan.models.config import DecoderConfig, check_entries
from titan.models.files import ModelFiles
from titan.models.loader import open_model


def read(folder: Path, model_type: str = "llama", **entries: Any) -> DecoderConfig:
    content = SIZES | {"model_type": model_type, "architectures": [f"{model_type.capitalize()}ForCausalLM"]} | entries
    (folder / "config.json").write_text(json.dumps(content))
    return open_model(ModelFiles(str(folder)), "native").config


def test_the_generation_config_decides_on_the_end_tokens(tmp_path: Path) -> None:
    assert read(tmp_path).eos_token_ids == (2,)
    assert read(tmp_path, eos_token_id=[2, 5]).eos_token_ids == (2, 5)
    assert read(tmp_path, eos_token_id=None).eos_token_ids == ()
    assert read(tmp_path, eos_token_id=[-1, 2]).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read(tmp_path).eos_token_ids == (7, 8)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    assert read(tmp_path).eos_token_ids == (2,)


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_end_tokens_outside_the_vocabulary_are_none(tmp_path: Path, model_impl: str, file: str) -> None:
    """A request that may not end yet forbids its end tokens, of which there must be logits."""
    model, prompts = make_model(tmp_path), [[5, 6, 7], [8, 9]]
    content = json.loads((tmp_path / file).read_text()) | {"eos_token_id": [2, 500]}
    (tmp_path / "generation_config.json").unlink()  # which would override the other
    (tmp_path / file).write_text(json.dumps(content))
    engine = make_engine(str(tmp_path), model_impl=model_impl, num_kv_blocks=8)
    written = run_all(engine, prompts, [greedy(4, min_tokens=2), greedy(4)])
    for prompt, token_ids, min_tokens in zip(prompts, written, (2, 0), strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=4, min_new_tokens=min_tokens, do_sample=False)
        assert token_ids == expected[0, len(prompt) :].tolist()
    assert engine.model_config.eos_token_ids == (2,)


def test_dtype_memory_per_token_and_windows(tmp_path: Path) -> None:
    assert read(tmp_path).dtype is None
    layers = read(tmp_path, "mistral", sliding_window=256).layers
    assert {layer.attention.window for layer in layers} == {None}  # no position can leave it
    config = read(tmp_path, torch_dtype="bfloat16")
    assert config.dtype == torch.bfloat16
    assert config.kv_layout(torch.bfloat16).bytes_per_token == 2 * 2 * 2 * 16 * 2


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_positions_end_where_the_frequencies_would_change(tmp_path: Path, model_impl: str) -> None:
    """Beyond, keys in the cache would be of other frequencies than new ones."""
    sizes = {"hidden_size": 64, "original_max_position_embeddings": 128, "architectures": ["Phi3ForCausalLM"]}
    read(tmp_path, "phi3", rope_parameters=LONGROPE, **sizes)
    config = open_model(ModelFiles(str(tmp_path)), model_impl).config
    assert config.max_position_embeddings == 128 < SIZES["max_position_embeddings"]


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize(("rope", "max_positions", "expected"), [(YARN, 64, 256), (DYNAMIC, 128, 128)])
def test_positions_go_on_where_the_frequencies_hold(
    tmp_path: Path, rope: dict[str, Any], max_positions: int, expected: int, model_impl: str
) -> None:
    """YaRN's to the extended length, which the configs of many models do not have; dynamic's to that of the config."""
    parameters = rope | {"original_max_position_embeddings": 64}
    model = make_model(tmp_path, rope_parameters=parameters, max_position_embeddings=max_positions)
    engine = make_engine(str(tmp_path), model_impl=model_impl, num_kv_blocks=16)
    assert engine.max_model_len == expected
    prompt = torch.randint(3, 131, (1, 100))
    written = model.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert run_all(engine, prompt.tolist(), [greedy(20, ignore_eos=True)]) == written[:, 100:].tolist()


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_positions_beyond_all_bounds_are_refused(tmp_path: Path, model_impl: str) -> None:
    make_model(tmp_path, rope_parameters=YARN | {"factor": 1e9})
    with pytest.raises(ValueError, match=r"factor \* original_max_position_embeddings=64000000000 is not allowed"):
        open_model(ModelFiles(str(tmp_path)), model_impl)


def test_a_window_that_is_not_used_may_be_of_nothing(tmp_path: Path) -> None:
    """As transformers saves those of Qwen2-MoE."""
    layers = read(tmp_path, "qwen2", use_sliding_window=False, sliding_window=0).layers
    assert {layer.attention.window for layer in layers} == {None}


def test_a_window_of_nothing_is_refused_where_the_family_uses_it_whatever_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sliding_window=0 is not allowed: it must be an integer from 1"):
        read(tmp_path, "mistral", use_sliding_window=False, sliding_window=0)


def test_layers_of_an_unknown_type_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'chunked_attention' is not supported"):
        read(tmp_path, "qwen2", layer_types=["chunked_attention"] * 2)


def test_layers_with_windows_need_one(tmp_path: Path) -> None:
    """transformers fails in its first pass, with an error that names no entry."""
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
    assert [layer.attention.window for layer in read(tmp_path, "qwen2", use_sliding_window=True, **sliding).layers] == [3, None]
    for model_type, entries in (("qwen2", {"use_sliding_window": False}), ("olmo3", {"sliding_window": None})):
        with pytest.raises(ValueError, match="layer_types has 'sliding_attention', which is not allowed without a window"):
            read(tmp_path, model_type, **sliding | entries)


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize("layer_types", [None, ["full_attention"] * 2])
def test_there_must_be_as_many_layers_that_may_rotate(tmp_path: Path, layer_types: list[str] | None, model_impl: str) -> None:
    smollm3 = {"architectures": ["SmolLM3ForCausalLM"], "layer_types": layer_types}
    assert read(tmp_path, "smollm3", no_rope_layers=[1, 0, 1], **smollm3).ropes[1].rope_type == "none"
    for given in ([], [1]):
        (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": "smollm3", "no_rope_layers": given} | smollm3))
        message = rf"no_rope_layers={re.escape(str(given))} is not allowed: it has {len(given)} entries, and num_hidden_layers=2;"
        with pytest.raises(ValueError, match=message):
            open_model(ModelFiles(str(tmp_path)), model_impl)
    check_entries({"model_type": "llama4_text", "num_hidden_layers": 2, "no_rope_layers": []})  # which stands for null


def test_numbers_of_other_families_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"residual_multiplier=0 is not allowed: it must be a number in \(0, inf\)"):
        read(tmp_path, "granite", residual_multiplier=0)
    part = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.44}
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.44 rotates 7 of 16 dimensions"):
        read(tmp_path, "phi3", rope_parameters=part)
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0 is not allowed: it must be a number in \(0, 1\]"):
        read(tmp_path, "phi3", rope_parameters=part | {"partial_rotary_factor": 0})
    with pytest.raises(ValueError, match=r"final_logit_softcapping=30\.0 is not supported: it must be null"):
        read(tmp_path, "gemma3_text", architectures=["Gemma3ForCausalLM"], final_logit_softcapping=30.0)

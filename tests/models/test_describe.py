"""What a config of transformers says before there are weights, and how often it is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from back_ends import cpu_backend
from checkpoints import make_config
from families import FAMILIES
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from titan.core.options import ModelOptions
from titan.model_info import model_facts
from titan.models.config import as_token_ids
from titan.models.files import ModelFiles
from titan.models.hf.describe import COUNTS_FROM_PADDING, describe, empty_model
from titan.models.hf.latents import absorb
from titan.models.hf.probe import without_weights
from titan.models.loader import open_model

NUMBERS = {"longcat_flash": 2 * (16 + 8), "dbrx": 4 * 2 * 2 * 16, "jetmoe": 4 * 2 * 4 * 16}
"""Of a token in the KV of models whose experts run in loops over what was chosen; those of jetmoe's attention share no keys."""


def tiny_config(name: str) -> PreTrainedConfig:
    return make_config(CONFIG_MAPPING[FAMILIES[name].model_type], FAMILIES[name].config)


@pytest.mark.parametrize("name", NUMBERS)
def test_kv_is_told_before_there_are_weights(tmp_path: Path, name: str) -> None:
    tiny_config(name).save_pretrained(tmp_path)
    runs, facts = model_facts(str(tmp_path), ModelOptions(), cpu_backend())
    num_bytes = 4 * NUMBERS[name]
    assert runs and f"{num_bytes:,} bytes" in facts["KV, 1 token"]


def test_a_decoder_of_speech_has_as_many_positions_as_it_learned() -> None:
    own = {"d_model": 64, "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
    config = CONFIG_MAPPING["whisper"](
        is_encoder_decoder=False, architectures=["WhisperForCausalLM"], max_target_positions=64, **own
    )
    assert describe(config).max_position_embeddings == 64


@pytest.mark.parametrize("name", ["mixtral", "gemma3"])
def test_the_dtype_is_that_of_the_checkpoint(name: str) -> None:
    config = tiny_config(name)
    config.dtype = torch.bfloat16
    assert describe(config).dtype == config.dtype == torch.bfloat16


@pytest.mark.parametrize("outer", [[3, 4], 5, None])
def test_the_end_tokens_of_a_composite_config_are_those_that_transformers_takes(outer: int | list[int] | None) -> None:
    config = tiny_config("gemma3")
    config.eos_token_id, config.text_config.eos_token_id = outer, 2
    expected = GenerationConfig.from_model_config(config).eos_token_id
    assert describe(config).eos_token_ids == as_token_ids(expected)
    assert expected == (2 if outer is None else outer)


@pytest.mark.parametrize("name", ["mixtral", "gptj", "gemma3"])
def test_an_attention_that_a_config_names_and_that_is_not_installed_is_not_asked_for(tmp_path: Path, name: str) -> None:
    tiny_config(name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attn_implementation": "flash_attention_2"}))
    assert AutoConfig.from_pretrained(tmp_path)._attn_implementation == "flash_attention_2"
    config = open_model(ModelFiles(str(tmp_path))).config
    assert config.layers == describe(tiny_config(name)).layers


def test_an_activation_that_the_family_does_not_read_may_have_any_name(tmp_path: Path) -> None:
    """As that of Falcon 3, which is a Llama."""
    config = tiny_config("llama")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"activation": "swiglu"}))
    assert open_model(ModelFiles(str(tmp_path)), "transformers").config.layers == describe(config).layers


def test_that_a_language_model_inside_is_quantised_is_told(tmp_path: Path) -> None:
    tiny_config("gemma3").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    content["text_config"]["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    path.write_text(json.dumps(content))
    _, facts = model_facts(str(tmp_path), ModelOptions(), cpu_backend())
    assert facts["weights"].endswith("if dequantised: quantization_config has quant_method='fp8'")


class RoundedLinear(nn.Module):
    """A linear layer that keeps integers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = linear.weight.detach().abs().max() / 127
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.scale).T


def test_latents_are_expanded_by_quantised_weights_too() -> None:
    model = AutoModelForCausalLM.from_config(config := tiny_config("deepseek_v3"))
    module, probed = model.model.layers[0].self_attn, describe(config).modules[0]
    assert probed.expanded is not None
    module.kv_b_proj = RoundedLinear(module.kv_b_proj)
    latents, q = torch.randn(5, 16), torch.randn(5, 4, 16)
    keys, values = module.expand_kv(latents[None, None], torch.zeros(1, 1, 5, 8))
    absorbed = absorb(module, probed.expanded, torch.float32, torch.device("cpu"))
    scores = torch.einsum("thl,sl->hts", absorbed.absorb(torch.cat((q, q[..., :8]), -1))[..., :16], latents)
    torch.testing.assert_close(scores, torch.einsum("thd,hsd->hts", q, keys[0, ..., :16]))
    torch.testing.assert_close(absorbed.expand(latents[:, None].expand(-1, 4, -1)), values[0].transpose(0, 1))


def test_weights_take_no_memory_where_a_model_is_described() -> None:
    model = empty_model(tiny_config("cohere"), trust_remote_code=False)
    with without_weights(model):
        assert {each.untyped_storage().nbytes() for each in model.parameters()} == {4}
        assert model(input_ids=torch.zeros(1, 1, dtype=torch.int64)).logits.shape == (1, 1, 131)


def test_of_a_family_that_mixes_states_and_attention_a_model_whose_layers_all_attend_has_keys_and_values_alone() -> None:
    assert len(describe(tiny_config("granitemoehybrid:attention")).layers) == 4
    with pytest.raises(ValueError, match="another state"):
        describe(tiny_config("granitemoehybrid"))


def test_a_decoder_that_fails_is_named_as_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Embedding, "forward", Mock(side_effect=KeyError("luck")))
    with pytest.raises(ValueError, match=r"^the decoder of MixtralForCausalLM does not turn a token into .*: KeyError: 'luck'$"):
        describe(tiny_config("mixtral"))


def test_modules_that_text_does_not_go_through_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a tower would place what it is given behind the padding token."""
    expected = describe(tiny_config("mixtral"))

    def make_towered(*args: Any, **options: Any) -> Any:
        model = empty_model(*args, **options)
        model.tower = nn.Identity()
        setattr(model.tower, COUNTS_FROM_PADDING, None)
        return model

    monkeypatch.setattr("titan.models.hf.describe.empty_model", make_towered)
    assert describe(tiny_config("mixtral")).modules == expected.modules

"""Quantised checkpoints: greedy output is that of transformers' `generate`, and what is dequantised at load is said.

Tests of a package's method are skipped without the package.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stepping import DEFAULTS, greedy
from tiny_models import make_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from zoo import random_prompts

from titan import LLM

NUM_TOKENS = 16
BLOCK = 32


def quantise(folder: Path, method: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Replace weights of a checkpoint, add others, and say in its config how they are to be read."""
    file, config = folder / "model.safetensors", folder / "config.json"
    save_file(load_file(file) | weights, file, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": method}))


def projections(folder: Path) -> dict[str, Tensor]:
    return {name: weight for name, weight in load_file(folder / "model.safetensors").items() if name.endswith("_proj.weight")}


def make_fp8(folder: Path) -> None:
    """Weights in float8, with a scale for each block."""
    weights = {}
    for name, weight in projections(folder).items():
        rows, columns = (size // BLOCK for size in weight.shape)
        scales = weight.view(rows, BLOCK, columns, BLOCK).abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        each = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        weights |= {name: (weight / each).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
    quantise(folder, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}, weights)


def make_compressed_tensors(folder: Path) -> None:
    """Weights in int8, with a scale for each row."""
    pytest.importorskip("compressed_tensors")
    weights = {}
    for name, weight in projections(folder).items():
        scales = weight.abs().amax(1, keepdim=True) / 127
        weights |= {name: (weight / scales).round().to(torch.int8), f"{name}_scale": scales}
    kind = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    method = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
    groups = {"group_0": {"targets": ["Linear"], "format": "int-quantized", "weights": kind}}
    quantise(folder, {**method, "config_groups": groups, "ignore": ["lm_head"]}, weights)


def make_torchao(folder: Path) -> None:
    """Weights in int8, as that package writes them."""
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    method = TorchAoConfig(quantization.Int8WeightOnlyConfig(version=2))
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=method, dtype=torch.float32).save_pretrained(folder)


METHODS = {
    "fp8": (make_fp8, True),  # transformers dequantises it where there is no GPU
    "compressed-tensors": (make_compressed_tensors, True),
    "torchao": (make_torchao, False),
}


@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.skipif(torch.cuda.is_available(), reason="what is dequantised depends on the device")
@pytest.mark.parametrize("name", METHODS)
def test_a_quantised_model_writes_what_transformers_does(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    make_model(tmp_path / "plain", hidden_size=64, intermediate_size=96)
    shutil.copytree(tmp_path / "plain", folder := tmp_path / "quantised")
    make, is_dequantised = METHODS[name]
    make(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None
    prompts = random_prompts(2)
    expected = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        written = reference.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NUM_TOKENS, do_sample=False)
        expected.append(written[0, len(prompt) :].tolist())
    with caplog.at_level(logging.WARNING, "titan"):
        llm = LLM(str(folder), str(tmp_path / "plain"), **DEFAULTS, num_kv_blocks=64)
    said = [record.getMessage() for record in caplog.records if "dequantised" in record.getMessage()]
    assert len(said) == is_dequantised
    assert all(f"model {str(folder)!r} is dequantised at load ({name}): its weights take " in line for line in said)
    outputs = llm.generate(prompts, greedy(NUM_TOKENS, ignore_eos=True), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert llm.metrics().model_impl == "transformers" and llm.metrics().acceptance_rate > 0, "the draft is not quantised"

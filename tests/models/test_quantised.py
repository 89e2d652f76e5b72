"""Quantised checkpoints: greedy output is that of transformers' `generate`, and what is dequantised at load is said.

Tests of a package's method are skipped without the package. gptqmodel compiles its kernels when they are first used, for minutes.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stepping import DEFAULTS, greedy
from tiny_models import make_model
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from zoo import random_prompts

from titan import LLM
from titan.kernels.torch.backend import TorchBackend
from titan.models.files import ModelFiles
from titan.models.loader import load_model, open_model

NUM_TOKENS = 16
BLOCK = 32


def quantise(folder: Path, method: dict[str, Any], weights: dict[str, Tensor], instead_of: Iterable[str] = ()) -> None:
    """Replace weights of a checkpoint, add others, and say in its config how they are to be read."""
    file, config = folder / "model.safetensors", folder / "config.json"
    kept = {name: weight for name, weight in load_file(file).items() if name not in set(instead_of)}
    save_file(kept | weights, file, metadata={"format": "pt"})
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


def four_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integers from 0 to 15, [outputs, inputs], with scales and zero points for each `BLOCK` of inputs."""
    groups = weight.unflatten(1, (-1, BLOCK))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales).round()
    numbers = (groups / scales[..., None]).round() + zeros[..., None]
    return numbers.clamp(0, 15).flatten(1).long(), scales, zeros.long()


def packed(numbers: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """Eight numbers of four bits in an int32: [rows, 8 * columns] -> [rows, columns]."""
    eights = numbers.unflatten(1, (-1, 8))[..., list(order)] & 15
    return (eights << torch.arange(0, 32, 4)).sum(2).to(torch.int32)


def make_gptq(folder: Path) -> None:
    """Four bits, packed along the inputs; zero points are less by one."""
    pytest.importorskip("optimum"), pytest.importorskip("gptqmodel")
    weights = {}
    for name, weight in projections(folder).items():
        numbers, scales, zeros = four_bits(weight)
        parts = {"qweight": packed(numbers).T, "qzeros": packed(zeros.T - 1), "scales": scales.T}
        parts |= {"g_idx": (torch.arange(weight.shape[1]) // BLOCK).to(torch.int32)}
        weights |= {name.replace("weight", part): each.contiguous() for part, each in parts.items()}
    method = {"quant_method": "gptq", "bits": 4, "group_size": BLOCK, "sym": False, "desc_act": False}
    quantise(folder, {**method, "checkpoint_format": "gptq"}, weights, instead_of=projections(folder))


def make_awq(folder: Path) -> None:
    """Four bits, packed along the outputs, in an order of their own."""
    pytest.importorskip("gptqmodel")
    weights, order = {}, (0, 2, 4, 6, 1, 3, 5, 7)
    for name, weight in projections(folder).items():
        numbers, scales, zeros = four_bits(weight)
        parts = {"qweight": packed(numbers.T, order), "qzeros": packed(zeros.T, order), "scales": scales.T}
        weights |= {name.replace("weight", part): each.contiguous() for part, each in parts.items()}
    method = {"quant_method": "awq", "bits": 4, "group_size": BLOCK, "zero_point": True, "version": "gemm"}
    quantise(folder, method, weights, instead_of=projections(folder))


def make_bitsandbytes(folder: Path, **options: Any) -> None:
    """As that package writes them; what is not quantised is in bfloat16."""
    pytest.importorskip("bitsandbytes")
    method = BitsAndBytesConfig(**options)
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=method, dtype=torch.bfloat16).save_pretrained(folder)


def make_8_bits(folder: Path) -> None:
    make_bitsandbytes(folder, load_in_8bit=True, llm_int8_threshold=0.0)


def make_8_bits_with_outliers(folder: Path) -> None:
    make_bitsandbytes(folder, load_in_8bit=True)


def make_4_bits(folder: Path) -> None:
    make_bitsandbytes(folder, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def make_packed_compressed_tensors(folder: Path) -> None:
    """Weights in int4, eight in an int32, with a scale for each `BLOCK` of inputs."""
    pytest.importorskip("compressed_tensors")
    weights = {}
    for name, weight in projections(folder).items():
        groups = weight.unflatten(1, (-1, BLOCK))
        scales = groups.abs().amax(2) / 7
        numbers = (groups / scales[..., None]).round().flatten(1).long() + 8
        parts = {"weight_packed": packed(numbers), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
        weights |= {name.replace("weight", part): each for part, each in parts.items()}
    kind = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": BLOCK, "symmetric": True}
    method = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    groups = {"group_0": {"targets": ["Linear"], "format": "pack-quantized", "weights": kind}}
    method |= {"config_groups": groups, "ignore": ["lm_head"]}
    quantise(folder, method, weights, instead_of=projections(folder))


def make_torchao(folder: Path) -> None:
    """Weights in int8, as that package writes them."""
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    method = TorchAoConfig(quantization.Int8WeightOnlyConfig(version=2))
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=method, dtype=torch.float32).save_pretrained(folder)


METHODS = {
    "fp8": (make_fp8, True),  # transformers dequantises it where there is no GPU
    "compressed-tensors": (make_compressed_tensors, True),
    "compressed-tensors, packed": (make_packed_compressed_tensors, True),
    "torchao": (make_torchao, False),
    "gptq": (make_gptq, False),
    "awq": (make_awq, False),
    "bitsandbytes, 8 bits": (make_8_bits, False),
    "bitsandbytes, 4 bits": (make_4_bits, False),
}
ROUNDING = {"bitsandbytes, 4 bits": 0.05}
"""Differences of logprobs; some kernels compute in bfloat16."""
DRAFTS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "none": (None, {}),
    "n-gram": ("ngram", {}),
    "plain": ("plain", {"draft_tree": "dynamic", "draft_dtype": "bfloat16"}),
    "quantised": ("quantised", {"draft_tree": "dynamic"}),
    "quantised for a plain target": ("quantised", {}),
}


def load_reference(folder: Path) -> Any:
    """The model as transformers runs it, all that is not quantised in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    for parameter in model.parameters():
        if type(parameter) is torch.nn.Parameter and parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()
    return model


@torch.no_grad()
def generate(model: Any, prompt: list[int]) -> tuple[list[int], Tensor]:
    """What transformers writes, and the logprob of each token."""
    tokens = torch.tensor([prompt])
    written = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NUM_TOKENS, do_sample=False)
    logprobs = model(written).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return written[0, len(prompt) :].tolist(), logprobs.gather(1, written[0, len(prompt) :, None])[:, 0]


@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.skipif(torch.cuda.is_available(), reason="what is dequantised depends on the device")
@pytest.mark.parametrize("name", METHODS)
def test_a_quantised_model_writes_what_transformers_does(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    make_model(tmp_path / "plain", hidden_size=64, intermediate_size=128)
    shutil.copytree(tmp_path / "plain", folder := tmp_path / "quantised")
    make, is_dequantised = METHODS[name]
    make(folder)
    prompts = random_prompts(2)
    expected = {each: [generate(load_reference(tmp_path / each), prompt) for prompt in prompts] for each in ("plain", "quantised")}
    for what, (draft, options) in DRAFTS.items():
        target = "plain" if "plain target" in what else "quantised"
        path = None if draft is None else str(tmp_path / draft) if (tmp_path / draft).exists() else draft
        caplog.clear()
        with caplog.at_level(logging.WARNING, "titan"):
            llm = LLM(str(tmp_path / target), path, **(DEFAULTS | options), num_kv_blocks=64)
        said = [record.getMessage() for record in caplog.records if "dequantised" in record.getMessage()]
        assert len(said) == is_dequantised * (target, draft).count("quantised")
        assert all(
            f"model {str(folder)!r} is dequantised at load ({name.partition(',')[0]}): its weights take " in line for line in said
        )
        outputs = llm.generate(prompts, greedy(NUM_TOKENS, ignore_eos=True, logprobs=1), use_tqdm=False)
        for output, (tokens, logprobs) in zip(outputs, expected[target], strict=True):
            [completion] = output.outputs
            assert completion.token_ids == tokens, what
            found = [each[token].logprob for each, token in zip(completion.logprobs, tokens, strict=True)]
            torch.testing.assert_close(torch.tensor(found), logprobs, rtol=0, atol=ROUNDING.get(name, 1e-4))
        assert llm.metrics().model_impl == ("native" if target == "plain" else "transformers")
        assert path in (None, "ngram") or llm.metrics().acceptance_rate > 0, what


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is dequantised depends on the device")
def test_experts_in_mxfp4_write_what_transformers_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "sliding_window": 12}
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    make_model(tmp_path, "gpt_oss", **sizes, num_local_experts=4, num_experts_per_tok=2, rope_parameters=rope)
    weights: dict[str, Tensor] = {}
    experts = [name for name in load_file(tmp_path / "model.safetensors") if name.endswith(("gate_up_proj", "down_proj"))]
    for name in experts:
        num_experts, inputs, outputs = load_file(tmp_path / "model.safetensors")[name].shape
        shape = num_experts, outputs, inputs // 32
        weights[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)  # two numbers of four bits in each
        weights[f"{name}_scales"] = torch.randint(122, 126, shape, dtype=torch.uint8)  # exponents, of 2^-5 to 2^-2
    quantise(tmp_path, {"quant_method": "mxfp4"}, weights, instead_of=experts)
    prompt = random_prompts(2)[1]
    tokens, _ = generate(load_reference(tmp_path), prompt)
    with caplog.at_level(logging.WARNING, "titan"):
        llm = LLM(str(tmp_path), str(tmp_path), **(DEFAULTS | {"draft_tree": "dynamic"}), num_kv_blocks=64)
    assert caplog.text.count("is dequantised at load (mxfp4): its weights take ") == 2
    [output] = llm.generate([prompt], greedy(NUM_TOKENS, ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].token_ids == tokens and llm.metrics().acceptance_rate == 1


@pytest.mark.filterwarnings("ignore")  # of the package
def test_that_outliers_of_8_bits_mix_rows_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_model(tmp_path, hidden_size=64, intermediate_size=128)
    make_8_bits_with_outliers(tmp_path)
    with caplog.at_level(logging.WARNING, "titan"):
        LLM(str(tmp_path), **DEFAULTS, num_kv_blocks=64)
    assert "has load_in_8bit with llm_int8_threshold above 0: its rounding" in caplog.text


@pytest.mark.parametrize(
    ("package", "method"),
    [
        ("gptqmodel", {"quant_method": "gptq", "bits": 4}),
        ("gptqmodel", {"quant_method": "awq"}),
        ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
        ("compressed-tensors", {"quant_method": "compressed-tensors"}),
        ("torchao", {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}}),
    ],
)
def test_packages_that_are_missing_are_named_before_weights_are_read(tmp_path: Path, package: str, method: dict[str, Any]) -> None:
    if find_spec(package.replace("-", "_")) is not None:
        pytest.skip(f"{package} is installed")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": method}))
    refusal = f"quant_method='{method['quant_method']}', which cannot be loaded here: .*`pip install .*{package}"
    with pytest.raises(ValueError, match=refusal):
        LLM(str(tmp_path), **DEFAULTS)


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_an_empty_quantisation_is_none(tmp_path: Path, model_impl: str) -> None:
    make_model(tmp_path)
    quantise(tmp_path, {}, {})
    checkpoint = open_model(ModelFiles(str(tmp_path)), model_impl)
    load_model(checkpoint, dtype="float32", backend=TorchBackend(torch.device("cpu")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_method_that_needs_a_gpu_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    method = {"quant_method": "fbgemm_fp8"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": method}))
    with pytest.raises(ValueError, match=r"quant_method='fbgemm_fp8', which cannot be loaded here: .* requires a GPU"):
        LLM(str(tmp_path), **DEFAULTS)

"""Drafts of another dtype than their target, or with weights rounded to 8 bits: it changes nothing but what is drafted."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from back_ends import CODED, KINDS, make_back_end
from stepping import AMPLE, DEFAULTS, greedy, make_engine, run_all
from zoo import Zoo, random_prompts

from titan import LLM
from titan.bench.loading import load_decoder
from titan.core.options import weight_bits_of
from titan.draft.draft_model import DraftModelDrafter
from titan.engine import Engine
from titan.kernels.cpu.backend import CpuBackend
from titan.models.decoder import Decoder

PROMPTS = random_prompts(4)


def drafting(engine: Engine) -> list[torch.Tensor]:
    """The weights of an engine's draft model that belong to linear layers."""
    assert isinstance(engine.drafter, DraftModelDrafter) and isinstance(engine.drafter.model, Decoder)
    return matrices(engine.drafter.model)


def matrices(model: Decoder) -> list[torch.Tensor]:
    return [weight for name, weight in model.named_parameters() if model.is_packable(name.rpartition(".")[2])]


@pytest.mark.long_where("triton")
@pytest.mark.parametrize(
    ("name", "bits", "draft_dtype"),
    [*((name, "auto", None) for name in CODED), *((name, 8, "bfloat16") for name in CODED), ("triton", "auto", "bfloat16")],
)
def test_a_rounded_draft_changes_no_greedy_output(zoo: Zoo, name: str, bits: int | str, draft_dtype: str | None) -> None:
    options = AMPLE | {"draft_weight_bits": bits, "draft_dtype": draft_dtype, "backend": make_back_end(name)}
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), **options)
    assert {each.dtype for each in drafting(engine)} == {torch.int8} and engine.runner.model.head.dtype != torch.int8
    prompts, length = (PROMPTS[:1], 5) if name == "triton" else (PROMPTS, 16)  # whose interpreter is slow
    expected = [zoo.greedy("llama", prompt, length, ignore_eos=True) for prompt in prompts]
    params = [greedy(length, ignore_eos=True)] * len(prompts)
    assert run_all(engine, prompts, params) == expected
    assert engine.metrics().mean_acceptance_length > 1.2, "it still guesses well"
    assert engine.metrics().draft_weight_bits == 8
    engine.swap_draft(zoo.path("other"))
    assert {each.dtype for each in drafting(engine)} == {torch.int8}
    assert name == "triton" or run_all(engine, prompts, params) == expected


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *((name, {}, r"draft_weight_bits=8 is not supported in float32 by these kernels \(.*\): .* on a CPU with AVX2 or AVX-512")
          for name in ("torch", "triton", *KINDS) if name not in CODED),
        *((name, {"draft_dtype": "float16"}, r"draft_weight_bits=8 is not supported in float16 by these kernels \(.*\): ")
          for name in (*CODED, "triton")),
        *((name, {"model_impl": "transformers"}, r"draft_weight_bits=8 is not supported for Llama.* in transformers' layers")
          for name in CODED),
    ],
)  # fmt: skip
def test_where_nothing_reads_8_bits_they_are_refused(zoo: Zoo, name: str, options: dict[str, Any], message: str) -> None:
    options = AMPLE | {"draft_weight_bits": 8, "backend": make_back_end(name)} | options
    with pytest.raises(ValueError, match=message):
        make_engine(zoo.path("llama"), zoo.path("llama~"), **options)
    engine = make_engine(zoo.path("llama"), "ngram", **options)  # which has no weights
    assert engine.drafter.name == "ngram" and engine.metrics().draft_weight_bits is None


def test_the_command_line_writes_none_in_any_case() -> None:
    assert [weight_bits_of(text) for text in ("none", "None", "auto", "8")] == [None, None, "auto", 8]


@pytest.mark.parametrize(
    ("name", "bits", "dtype"),
    [
        *((name, None, "float32") for name in CODED),
        *((name, "auto", "float16") for name in CODED),
        *((name, "auto", "float32") for name in ("torch", "triton", *KINDS) if name not in CODED),
    ],
)
def test_weights_stay_as_they_are_unless_8_bits_are_read_in_less_time(zoo: Zoo, name: str, bits: str | None, dtype: str) -> None:
    options = AMPLE | {"draft_weight_bits": bits, "draft_dtype": dtype, "backend": make_back_end(name)}
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), **options)
    plain = load_decoder(zoo.path("llama~"), dtype=dtype, backend=make_back_end(name))
    assert all(map(torch.equal, drafting(engine), matrices(plain))) and engine.metrics().draft_weight_bits is None


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_a_bfloat16_draft_of_a_float32_target(zoo: Zoo, model_impl: str) -> None:
    """Which a swap brings."""
    options = DEFAULTS | {"model_impl": model_impl, "num_kv_blocks": 64}
    llm = LLM(zoo.path("llama"), draft_dtype="bfloat16", **options)
    llm.swap_draft(zoo.path("llama~"))
    assert isinstance(llm.engine.drafter, DraftModelDrafter) and llm.engine.drafter.kv is not None
    assert (llm.engine.dtype, llm.engine.drafter.kv.dtype) == (torch.float32, torch.bfloat16)
    prompts = random_prompts(3)
    outputs = llm.generate(prompts, greedy(24, ignore_eos=True), use_tqdm=False)
    expected = [zoo.greedy("llama", prompt, 24, ignore_eos=True) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert llm.metrics().acceptance_rate > 0 and llm.metrics().model_impl == model_impl


def test_pytorch_has_threads_only_while_it_runs_the_layers_of_a_model(zoo: Zoo) -> None:
    def num_torch_threads() -> int:
        gc.collect()
        with llm.engine.backend.active():
            return torch.get_num_threads()

    llm = LLM(zoo.path("llama"), zoo.path("llama~"), draft_dtype="float16", num_threads=2, **DEFAULTS, num_kv_blocks=64)
    if not isinstance(llm.engine.backend, CpuBackend):
        pytest.skip("there is no compiler")
    assert num_torch_threads() == 2, "there are no kernels for float16"
    llm.swap_draft("ngram")
    assert num_torch_threads() == 1

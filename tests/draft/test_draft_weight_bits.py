"""Drafts whose weights are rounded to 8 bits: what they are rounded to, and that it changes nothing but what is drafted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from back_ends import CODED, KINDS, make_back_end
from stepping import AMPLE, greedy, make_engine, run_all
from zoo import Zoo, random_prompts

from titan.bench.loading import load_decoder
from titan.core.options import weight_bits_of
from titan.draft.draft_model import DraftModelDrafter
from titan.engine import Engine
from titan.kernels.cpu.weights import round_to_8_bits
from titan.models.decoder import Decoder

PROMPTS = random_prompts(4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_rounded_to_the_nearest_with_3_bits_of_mantissa(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 70, generator=generator) * torch.logspace(-30, 30, 70)
    weight[0, :4], weight[1, :3] = torch.tensor([0.0, -0.0, 1 + 2**-4, 1 + 3 * 2**-4]), torch.finfo(torch.bfloat16).max
    weight = weight.to(dtype)
    mantissas, exponents = np.frexp(weight.bfloat16().double().numpy())
    expected = torch.from_numpy(np.ldexp(np.round(mantissas * 16) / 16, exponents))  # which rounds half to even, as well
    expected[1, :3] = 1.875 * 2.0**127  # the largest there is
    rounded = weight.clone()
    round_to_8_bits(rounded)
    assert rounded.dtype == dtype and torch.equal(rounded.double(), expected)
    assert torch.equal(rounded.signbit(), weight.signbit())
    again = rounded.clone()
    round_to_8_bits(again)
    assert torch.equal(again, rounded)


def drafting(engine: Engine) -> list[torch.Tensor]:
    """The weights of an engine's draft model that belong to linear layers."""
    assert isinstance(engine.drafter, DraftModelDrafter) and isinstance(engine.drafter.model, Decoder)
    return matrices(engine.drafter.model)


def matrices(model: Decoder) -> list[torch.Tensor]:
    return [weight for name, weight in model.named_parameters() if model.is_packable(name.rpartition(".")[2])]


@pytest.mark.parametrize(
    ("name", "bits", "draft_dtype"),
    [*((name, "auto", None) for name in CODED), *((name, 8, "bfloat16") for name in (*CODED, "triton"))],
)
def test_a_rounded_draft_changes_no_greedy_output(zoo: Zoo, name: str, bits: int | str, draft_dtype: str | None) -> None:
    options = AMPLE | {"draft_weight_bits": bits, "draft_dtype": draft_dtype, "backend": make_back_end(name)}
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), **options)
    assert {each.dtype for each in drafting(engine)} == {torch.int8} and engine.runner.model.head.dtype != torch.int8
    expected = [zoo.greedy("llama", prompt, 16, ignore_eos=True) for prompt in PROMPTS]
    assert run_all(engine, PROMPTS, [greedy(16, ignore_eos=True)] * 4) == expected
    assert engine.metrics().mean_acceptance_length > 1.2, "it still guesses well"
    assert engine.metrics().draft_weight_bits == 8
    engine.swap_draft(zoo.path("other"))
    assert {each.dtype for each in drafting(engine)} == {torch.int8}
    assert run_all(engine, PROMPTS, [greedy(16, ignore_eos=True)] * 4) == expected


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
        *((name, "auto", "float32") for name in ("torch", *KINDS) if name not in CODED),
    ],
)
def test_weights_stay_as_they_are_unless_8_bits_are_read_in_less_time(zoo: Zoo, name: str, bits: str | None, dtype: str) -> None:
    options = AMPLE | {"draft_weight_bits": bits, "draft_dtype": dtype, "backend": make_back_end(name)}
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), **options)
    plain = load_decoder(zoo.path("llama~"), dtype=dtype, backend=make_back_end(name))
    assert all(map(torch.equal, drafting(engine), matrices(plain))) and engine.metrics().draft_weight_bits is None

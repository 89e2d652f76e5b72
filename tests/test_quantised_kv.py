"""KV in int8: the tokens of the same engine without drafts, nearly the perplexity of the model's dtype, and the bytes it takes."""

from __future__ import annotations

import inspect
from math import exp
from unittest.mock import MagicMock

import pytest
import torch
from back_ends import make_back_end
from stepping import AMPLE, make_engine, run_all
from zoo import Zoo, random_prompts

from titan import LLM, SamplingParams
from titan.core import trees as a_text
from titan.core.kv_tensor import KVGroup, KVLayout
from titan.core.options import MemoryOptions
from titan.memory.sizing import num_kv_blocks

PROMPTS = random_prompts(6, seed=8, max_len=24)


def test_on_triton_too_drafts_change_no_token(zoo: Zoo) -> None:
    """On the other back ends, `test_equality` and `test_engine_machine` try what is quantised with all else there is."""
    options = AMPLE | {"backend": make_back_end("triton"), "kv_cache_dtype": "int8", "draft_tree": [-1, -1, 0, 0, 1]}
    prompts, params = [PROMPTS[1][:5]], [SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)]
    expected = run_all(make_engine(zoo.path("llama"), **options), prompts, params)
    for draft_dtype in ("auto", "int8"):
        engine = make_engine(zoo.path("llama"), zoo.path("llama~"), draft_kv_cache_dtype=draft_dtype, **options)
        is_quantised = {role: kv.layout.is_quantised for role, kv in engine.kv.tensors.items()}
        assert is_quantised == {"target": True, "draft": draft_dtype == "int8"}
    assert run_all(engine, prompts, params) == expected and sum(engine.counters.accepted_per_depth) > 0


@pytest.mark.long_where("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_perplexity_stays_within_half_a_percent(dtype: str) -> None:
    text, perplexities = inspect.getsource(a_text), list[float]()
    prompts = [text[start : start + 1500] for start in range(0, 6000, 1500)]
    for kv_cache_dtype in ("auto", "int8"):
        llm = LLM("demo", dtype=dtype, device="cpu", kv_cache_dtype=kv_cache_dtype, num_kv_blocks=300)
        logprobs = [
            each[token].logprob
            for output in llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
            for token, each in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
            if each is not None
        ]
        assert len(logprobs) > 1000
        perplexities.append(exp(-sum(logprobs) / len(logprobs)))
    plain, quantised = perplexities
    assert plain != quantised == pytest.approx(plain, rel=0.005)


def test_the_same_memory_holds_nearly_twice_the_tokens_of_bfloat16(zoo: Zoo) -> None:
    plain = KVLayout((KVGroup(16, 12, 64), KVGroup(2, 4, 64)), torch.bfloat16)
    layouts = [plain.stored_as(dtype) for dtype in ("auto", "int8")]
    auto, int8 = (
        num_kv_blocks(MemoryOptions(kv_cache_memory=2**30), [each, each], 10**9, MagicMock(free_memory=lambda: 2**40), MagicMock())
        for each in layouts
    )
    assert 1.85 * auto <= int8 <= 2 * auto
    assert layouts[1].bytes_per_token == 2 * (16 * 12 + 2 * 4) * (64 + 4)
    for dtype, bytes_per_row in (("auto", 16 * 4), ("int8", 16 + 4)):
        engine = make_engine(zoo.path("llama"), kv_cache_dtype=dtype, kv_cache_memory=2**20)
        [target] = engine.kv.tensors.values()
        block_bytes = 16 * 2 * 2 * 2 * bytes_per_row
        assert sum(group.nbytes for group in target.groups) == engine.limits.num_kv_blocks * block_bytes
        assert engine.limits.num_kv_blocks == 2**20 // block_bytes

"""A draft in another dtype than its target changes what is drafted, and nothing of a greedy output."""

from __future__ import annotations

import gc

import pytest
import torch
from stepping import DEFAULTS, greedy
from zoo import Zoo, random_prompts

from titan import LLM
from titan.draft.draft_model import DraftModelDrafter
from titan.kernels.cpu.backend import CpuBackend


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_a_bfloat16_draft_of_a_float32_target(zoo: Zoo, model_impl: str) -> None:
    options = DEFAULTS | {"model_impl": model_impl, "num_kv_blocks": 64}
    llm = LLM(zoo.path("llama"), zoo.path("llama~"), draft_dtype="bfloat16", **options)
    assert isinstance(llm.engine.drafter, DraftModelDrafter) and llm.engine.drafter.kv is not None
    assert (llm.engine.dtype, llm.engine.drafter.kv.dtype) == (torch.float32, torch.bfloat16)
    prompts = random_prompts(3)
    outputs = llm.generate(prompts, greedy(24, ignore_eos=True), use_tqdm=False)
    expected = [zoo.greedy("llama", prompt, 24, ignore_eos=True) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert llm.metrics().acceptance_rate > 0 and llm.metrics().model_impl == model_impl


def test_a_draft_dtype_holds_for_the_draft_that_a_swap_brings(zoo: Zoo) -> None:
    llm = LLM(zoo.path("llama"), draft_dtype="bfloat16", **DEFAULTS, num_kv_blocks=64)
    llm.swap_draft(zoo.path("llama~"))
    assert isinstance(llm.engine.drafter, DraftModelDrafter) and llm.engine.drafter.kv is not None
    assert (llm.engine.dtype, llm.engine.drafter.kv.dtype) == (torch.float32, torch.bfloat16)


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

"""What Titan generates from a checkpoint of `families`, in several ways, beside what transformers' `generate` does."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from checkpoints import MAX_TOKENS, PROMPT_LENS, Checkpoint, make_prompts

from titan import LLM, SamplingParams
from titan.core.metrics import EngineMetrics
from titan.core.outputs import CompletionOutput

LOGPROB_BOUND = 1e-4  # of rounding; tiny models amplify it
DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "speculation": "fixed",
    "draft_sampling": "greedy",
    "warm_up": False,
}
DEFAULTS |= {"max_model_len": max(PROMPT_LENS) + MAX_TOKENS + 16, "block_size": 8}
CHUNKS: dict[str, Any] = {"max_batch_size": 4, "prefill_chunk_size": 7, "max_num_batched_tokens": 16}
SCARCE: dict[str, Any] = CHUNKS | {"num_kv_blocks": 15, "enable_prefix_caching": False, "max_num_batched_tokens": 32}
TREE: dict[str, Any] = {"max_draft_tokens": 6, "draft_tree": [-1, -1, 0, 0, 1, 2]}
CHAIN: dict[str, Any] = {"max_draft_tokens": 4, "draft_tree": "chain"}


def check_parity(checkpoint: Checkpoint, model_impl: str = "auto") -> None:
    """Assert that greedy output is that of transformers: alone, in a batch and in chunks, with n-grams, with trees of a draft.

    Two of the prompts run alone. In the last two ways there are so few blocks that requests are preempted. The layers run as is
    expected of the family.
    """
    checkpoint.check()
    run = partial(_run, checkpoint, model_impl=model_impl)
    alone, metrics = run(one_by_one=True)
    assert metrics.model_impl == (checkpoint.family.runs if model_impl == "auto" else model_impl)
    _compare("a prompt alone", checkpoint, alone)
    mixed, _ = run(**CHUNKS)
    _compare("all prompts at once, in chunks", checkpoint, mixed)
    ngram, metrics = run("ngram", **SCARCE, **CHAIN)
    _compare("n-gram drafts, few blocks", checkpoint, ngram)
    assert metrics.num_preemptions, "n-gram drafts: enough blocks for all, so that nothing was preempted"
    trees, metrics = run(checkpoint.draft_path, **SCARCE, **TREE)
    _compare("trees of a draft model, few blocks", checkpoint, trees)
    assert metrics.num_preemptions, "trees: enough blocks for all, so that nothing was preempted"
    assert metrics.acceptance_rate, "trees: no draft token was accepted"


def _run(
    checkpoint: Checkpoint, draft: str | None = None, *, one_by_one: bool = False, **options: Any
) -> tuple[list[CompletionOutput], EngineMetrics]:
    llm = LLM(checkpoint.path, draft, **(DEFAULTS | options))
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    calls = [[prompt] for prompt in make_prompts()[:2]] if one_by_one else [make_prompts()]
    outputs = [output for call in calls for output in llm.generate(call, params, use_tqdm=False)]
    return [output.outputs[0] for output in outputs], llm.metrics()


def _compare(way: str, checkpoint: Checkpoint, outputs: list[CompletionOutput]) -> None:
    for i, output in enumerate(outputs):
        tokens = checkpoint.continuations[i]
        assert output.token_ids == tokens, f"{way}: prompt {i}, of {PROMPT_LENS[i]} tokens"
        logprobs = torch.tensor([each[token].logprob for each, token in zip(output.logprobs or [], tokens, strict=True)])
        error = (logprobs - checkpoint.logprobs[i]).abs().max()
        assert error < LOGPROB_BOUND, f"{way}: prompt {i}, of {PROMPT_LENS[i]} tokens: log-probabilities differ by {error:.1e}"

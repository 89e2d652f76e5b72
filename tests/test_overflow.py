"""Tokens whose numbers overflow: what they end, and what they do not."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from back_ends import ON_HOST, make_back_end
from stepping import DEFAULTS, drain, greedy, make_engine, run_all, submit
from tiny_models import edit_weights
from zoo import Zoo, random_prompts

from titan.core.options import EngineConfig
from titan.core.request import Request
from titan.core.step import StepPlan
from titan.core.trees import DraftTree
from titan.draft.base import CachelessDrafter
from titan.engine import Engine
from titan.models.files import ModelFiles
from titan.models.loader import load_model, open_model

NUM_TOKENS = 16
[PROMPT] = random_prompts(3, seed=9, max_len=30)[1:2]


class Overflowing(CachelessDrafter):
    """Proposes a main path of the tokens that follow, with one whose numbers overflow after the first few."""

    name, max_draft_tokens = "overflowing", 20

    def __init__(self, expected: Sequence[int], bad: int, num_right: int, parents: Sequence[int]) -> None:
        self.expected, self.bad, self.num_right, self.parents = expected, bad, num_right, np.array(parents, np.int32)

    def propose(self, plan: StepPlan) -> list[DraftTree]:
        return [self._draft(*row) for row in zip(plan.requests, plan.draft_budgets, strict=True)]

    def _draft(self, request: Request, budget: int) -> DraftTree:
        right = [*self.expected[request.num_output_tokens :][: self.num_right], *[self.bad] * len(self.parents)]
        return DraftTree(np.array(right[: len(self.parents)][:budget]), self.parents[:budget])


def make_overflowing(
    zoo: Zoo, back_end: str, num_right: int, parents: Sequence[int], **options: object
) -> tuple[Engine, list[int]]:
    """An engine with such a drafter, and what it should write after `PROMPT`."""
    expected = zoo.greedy("llama", PROMPT, NUM_TOKENS, ignore_eos=True)
    bad = min(set(range(3, 131)) - {*PROMPT, *expected})
    backend = make_back_end(back_end)
    target = load_model(open_model(ModelFiles(zoo.path("llama"))), dtype="float32", backend=backend)
    target.embedding[bad] = torch.nan
    config = EngineConfig.of(**(DEFAULTS | {"num_kv_blocks": 20, "max_draft_tokens": 20} | options))
    return Engine(config, target, Overflowing(expected, bad, num_right, parents), backend=backend), expected


@pytest.mark.parametrize("back_end", ON_HOST)
@pytest.mark.parametrize(
    ("num_right", "parents"),
    [(0, [-1, 0, 1]), (0, [-1, -1, -1]), (1, [-1, -1, 0]), (9, [*range(-1, 12)])],
    ids=["chain", "star", "tree", "long chain"],
)
def test_a_draft_that_overflows_ends_no_request(zoo: Zoo, back_end: str, num_right: int, parents: Sequence[int]) -> None:
    """Nor does it change logprobs. Of a long chain, compiled kernels keep the rows that are not computed beside the overflow."""
    engine, expected = make_overflowing(zoo, back_end, num_right, parents)
    params = greedy(NUM_TOKENS, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    requests = submit(engine, [PROMPT] * 3, [replace(params, use_speculative=False), params, params])
    drain(engine)
    logprobs = []
    for request in requests:
        assert (request.error, request.output_token_ids) == (None, expected)
        assert request.logprobs is not None and request.prompt_logprobs is not None
        entries = [*request.prompt_logprobs[1:], *request.logprobs]
        logprobs.append([[each.logprob for each in entry.values()] for entry in entries if entry is not None])
    assert len(logprobs[0]) == len(PROMPT) - 1 + NUM_TOKENS
    for found in logprobs[1:]:
        for entry, without_drafts in zip(found, logprobs[0], strict=True):
            assert entry == pytest.approx(without_drafts, abs=1e-4)


def test_estimates_do_not_learn_from_rows_that_ran_again(zoo: Zoo) -> None:
    """Which they do in all steps but the last one, in which nothing is drafted; no more is reserved than the options allow."""
    engine, expected = make_overflowing(zoo, "torch", 0, [-1, 0, 1], max_draft_tokens=2)
    budgets = list[int]()
    engine.observers.append(lambda plan, _: budgets.extend(plan.draft_budgets))
    engine.adaptive = adaptive = Mock(num_reserved=3, fleet=None)
    [request] = submit(engine, [PROMPT], [greedy(NUM_TOKENS, ignore_eos=True)])
    drain(engine)
    assert request.output_token_ids == expected and engine.counters.num_steps == NUM_TOKENS
    assert adaptive.decide.call_count == NUM_TOKENS and adaptive.observe.call_count == 1 and max(budgets) == 2


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_gathered_slots_that_overflow_end_those_alone_that_see_them(zoo: Zoo, tmp_path: Path, kv_cache_dtype: str) -> None:
    """Drafts are not seen by the tokens before them; prompts come in chunks, of which the last may lie behind the overflow."""
    good = [prompt[:14] for prompt in random_prompts(9, seed=4, max_len=30) if len(prompt) > 20]
    expected = [zoo.greedy("gathered", prompt, NUM_TOKENS, ignore_eos=True) for prompt in good]
    bad = max(set(range(3, 131)).difference(*good, *expected))
    model = tmp_path / "model"
    shutil.copytree(zoo.path("gathered"), model)
    embedding = zoo.model("gathered").get_input_embeddings().weight.detach().clone()
    embedding[bad] = torch.tensor([3e38, -3e38]).repeat(embedding.shape[1] // 2)
    edit_weights(model, transformer__wte__weight=embedding)
    drafter = Overflowing(expected[0], bad, 0, [-1, 0])
    engine = make_engine(str(model), drafter, num_kv_blocks=40, block_size=8, prefill_chunk_size=8, kv_cache_dtype=kv_cache_dtype)
    prompts = [good[0], [5, 7, bad, *good[1][:8]], *good[1:], [bad]]
    requests = submit(engine, prompts, [greedy(NUM_TOKENS, ignore_eos=True)] * len(prompts))
    drain(engine)
    assert [requests.pop(i).error for i in (-1, 1)] == ["the target's logits are not finite"] * 2
    assert [each.error for each in requests] == [None] * len(good)
    if kv_cache_dtype == "auto":
        assert [each.output_token_ids for each in requests] == expected


def test_gathered_keys_of_other_requests_are_not_seen_however_large(zoo: Zoo, tmp_path: Path) -> None:
    """In float16 scores may be larger than its largest number, since they are computed in float32."""
    shutil.copytree(zoo.path("gathered"), model := tmp_path / "model")
    queries = {name: each for name, each in zoo.model("gathered").named_parameters() if "q_proj" in name}
    edit_weights(model, **{name: 20 * each.detach() for name, each in queries.items()})
    params, options = greedy(NUM_TOKENS, ignore_eos=True), {"dtype": "float16", "num_kv_blocks": 20, "block_size": 8}
    expected = run_all(make_engine(str(model), **options), [PROMPT], [params])
    engine = make_engine(str(model), **options)
    [group] = engine.kv.tensors["target"].groups
    request, other = submit(engine, [PROMPT, [3, 4, 5]], [params] * 2)

    def enlarge(_: int) -> None:  # a value of this size shows in the output
        group[:, other.block_ids] = 6e4

    drain(engine, enlarge)
    assert [request.output_token_ids] == expected

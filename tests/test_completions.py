"""Several completions of one prompt: the prompt is computed once, and each completion is the request it would be alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from stepping import drain, greedy, make_engine
from torch import Tensor
from zoo import Zoo, random_prompts

from titan import LLM, CompletionOutput, RequestMetrics, SamplingParams
from titan.core.outputs import merge_metrics
from titan.core.request import Request
from titan.core.terms import RequestTerms
from titan.engine import Engine
from titan.frontend.input_processor import InputProcessor

PROMPT = random_prompts(2, seed=8, max_len=40)[1]  # 40 tokens
CPU: dict[str, Any] = {"dtype": "float32", "device": "cpu", "speculation": "fixed", "draft_sampling": "greedy"}


def sampled(n: int, max_tokens: int = 14, **options: Any) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=max_tokens, **({"temperature": 1.2, "ignore_eos": True, "seed": 9} | options))


def add(engine: Engine, params: SamplingParams, prompt: list[int] = PROMPT) -> tuple[Request, ...]:
    family = InputProcessor(engine).make_request(prompt, params, RequestTerms()).family
    for request in family:
        engine.scheduler.add(request)
    return family


def outputs_of(family: tuple[Request, ...]) -> list[list[int]]:
    return [request.output_token_ids for request in family]


@pytest.fixture(scope="module")
def alone(zoo: Zoo) -> list[list[int]]:
    """Each completion as a request of its own, without speculation: the oracle."""
    engine = make_engine(zoo.path("llama"), num_kv_blocks=64, max_batch_size=1, enable_prefix_caching=False)
    outputs = []
    for index in range(6):
        source = np.random.SeedSequence(9, spawn_key=(index,))  # as the documentation says
        seed = int(source.generate_state(1, np.uint64)[0]) >> 1
        [request] = add(engine, sampled(1, seed=seed) if index else sampled(1))
        drain(engine)
        outputs.append(request.output_token_ids)
    assert len(set(map(tuple, outputs))) == 6
    return outputs


SETTINGS: dict[str, dict[str, Any]] = {
    "ample": {"num_kv_blocks": 80, "prefill_chunk_size": 16},
    "scarce": {"num_kv_blocks": 11, "prefill_chunk_size": 16},
    "one by one": {"num_kv_blocks": 8, "max_batch_size": 1},  # the first has finished, and its blocks are gone, before the next
}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("draft", "max_tokens"), [(None, 14), (None, 1), ("llama~", 14), ("ngram", 14)])
def test_completions_are_those_of_separate_requests_with_derived_seeds(
    zoo: Zoo, alone: list[list[int]], draft: str | None, max_tokens: int, setting: str, caching: bool
) -> None:
    spec = zoo.path(draft) if draft == "llama~" else draft
    engine = make_engine(zoo.path("llama"), spec, block_size=8, enable_prefix_caching=caching, **SETTINGS[setting])
    family = add(engine, sampled(6, max_tokens))
    beside = add(engine, greedy(20, n=2, ignore_eos=True), PROMPT[:9])
    drain(engine)
    assert outputs_of(family) == [output[:max_tokens] for output in alone]
    assert outputs_of(beside) == [zoo.greedy("llama", PROMPT[:9], 20, ignore_eos=True)] * 2
    assert engine.counters.num_preemptions > 0 or setting != "scarce" or max_tokens == 1


@pytest.mark.parametrize("caching", [True, False])
def test_the_prompt_is_computed_once_and_its_full_blocks_are_shared(zoo: Zoo, caching: bool) -> None:
    """40 tokens are 4 full blocks of 8 before the root's; each completion has a copy of the 7 tokens after these."""
    engine = make_engine(
        zoo.path("llama"), zoo.path("llama"), draft_tree="chain",
        num_kv_blocks=80, block_size=8, prefill_chunk_size=16, enable_prefix_caching=caching,
    )  # fmt: skip
    family = add(engine, greedy(16, n=4, ignore_eos=True))
    num_tokens: list[list[int]] = []
    engine.observers.append(lambda plan, _: num_tokens.append(plan.num_tokens))
    for _ in range(4):
        engine.step()
    assert num_tokens == [[16], [16], [8], [1] * 4], "the others wait until the prompt is computed, and compute its root alone"
    shared = family[0].block_ids[:4]
    assert [request.block_ids[:4] for request in family] == [shared] * 4
    own = [block_id for request in family for block_id in request.block_ids[4:]]
    assert len(own) == len(set(own)) and not set(own) & set(shared)
    assert engine.kv.pool.num_blocks - engine.kv.pool.num_free == 4 + len(own)
    assert [request.num_computed_tokens for request in family[1:]] == [40 + request.num_output_tokens - 1 for request in family[1:]]
    drain(engine)
    assert outputs_of(family) == [zoo.greedy("llama", PROMPT, 16, ignore_eos=True)] * 4
    for request in family:
        assert request.metrics.num_accepted_tokens == request.metrics.num_draft_tokens > 0, "the draft's blocks are shared too"
        assert request.metrics.num_cached_tokens == (32 if caching and request.index else 0)
    assert engine.metrics().num_cached_tokens == (96 if caching else 0)
    num_fed = engine.counters.num_admitted_tokens - engine.counters.num_cached_tokens
    assert num_fed == (40 + 3 * 8 if caching else 4 * 40), "without a prefix cache, a shared block is no hit of one"


@pytest.mark.parametrize("caching", [True, False])
def test_a_completion_that_ends_at_once_leaves_the_prompt_to_the_others(zoo: Zoo, caching: bool) -> None:
    engine = make_engine(zoo.path("llama"), num_kv_blocks=80, block_size=8, enable_prefix_caching=caching)
    family = add(engine, greedy(1, n=6))
    drain(engine)
    assert outputs_of(family) == [zoo.greedy("llama", PROMPT, 1)] * 6
    assert (engine.counters.num_steps, engine.counters.num_rows) == (2, 40 + 5)


@pytest.mark.parametrize("reservation", ["on_demand", "max_tokens"])
@pytest.mark.parametrize("caching", [True, False])
def test_completions_finish_where_only_one_fits(zoo: Zoo, caching: bool, reservation: str) -> None:
    engine = make_engine(
        zoo.path("llama"), zoo.path("llama~"), num_kv_blocks=6, block_size=8, prefill_chunk_size=16,
        enable_prefix_caching=caching, reservation=reservation,
    )  # fmt: skip
    family = add(engine, greedy(8, n=3, ignore_eos=True))
    drain(engine)
    assert outputs_of(family) == [zoo.greedy("llama", PROMPT, 8, ignore_eos=True)] * 3
    assert not engine.counters.num_preemptions or reservation == "on_demand"


def test_the_prompt_is_computed_once_though_the_prefix_cache_is_reset_meanwhile(zoo: Zoo) -> None:
    engine = make_engine(zoo.path("llama"), num_kv_blocks=80, block_size=8, prefill_chunk_size=16)
    family = add(engine, greedy(4, n=4, ignore_eos=True))
    for _ in range(2):
        engine.step()
    engine.kv.forget_cached()
    drain(engine)
    assert outputs_of(family) == [zoo.greedy("llama", PROMPT, 4, ignore_eos=True)] * 4
    assert engine.counters.num_rows == 40 + 3 + 4 * 3


def test_completions_share_a_prompt_that_one_computes_beside_cached_blocks_of_it_as_reserved(zoo: Zoo) -> None:
    """The first needs logits of the prompt, which cached blocks do not hold; the others await it, and count its blocks."""
    options: dict[str, Any] = {"num_kv_blocks": 11, "block_size": 8, "prefill_chunk_size": 8}
    engine = make_engine(zoo.path("llama"), reservation="max_tokens", **options)
    prompt = PROMPT[:33]
    add(engine, greedy(1), prompt)
    drain(engine)
    beside, family = add(engine, greedy(38, ignore_eos=True), PROMPT[-2:]), add(engine, greedy(7, n=2, prompt_logprobs=0), prompt)
    engine.step()
    assert len(engine.scheduler.running) == 3, "of 11 blocks, it may take 5, and they 4 together and one each"
    drain(engine)
    assert engine.counters.num_preemptions == 0
    assert outputs_of(family) == [zoo.greedy("llama", prompt, 7)] * 2
    assert outputs_of(beside) == [zoo.greedy("llama", PROMPT[-2:], 38, ignore_eos=True)]


@pytest.fixture(scope="module")
def llm(zoo: Zoo) -> LLM:
    return LLM(zoo.path("llama+text"), zoo.path("llama~"), num_kv_blocks=64, max_batch_size=5, max_waiting_requests=6, **CPU)


def test_generate_gives_every_prompt_its_completions(llm: LLM, zoo: Zoo) -> None:
    prompts = random_prompts(4, seed=2, max_len=20)
    numbers = [3, 1, 8, 2]
    outputs = llm.generate(prompts, [greedy(6, n=n, ignore_eos=True) for n in numbers], use_tqdm=False)
    for prompt, n, output in zip(prompts, numbers, outputs, strict=True):
        tokens = zoo.greedy("llama+text", prompt, 6, ignore_eos=True)
        completion = CompletionOutput(0, output.outputs[0].text, tokens, finish_reason="length")
        assert output.outputs == [replace(completion, index=index) for index in range(n)]
        assert output.finished and output.error is None and output.prompt_token_ids == prompt
        assert output.metrics.num_emitted_tokens == 6 * n
    assert len({output.request_id for output in outputs}) == 4
    assert not llm.engine.scheduler.has_unfinished
    llm.diagnose()  # checks the block pool


def test_the_first_completion_and_the_next_request_are_as_without_siblings(zoo: Zoo) -> None:
    single, several = (LLM(zoo.path("llama"), num_kv_blocks=64, seed=4, **CPU) for _ in range(2))
    params = SamplingParams(temperature=1.1, max_tokens=10, ignore_eos=True)
    expected = [single.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids for _ in range(2)]
    [first] = several.generate(PROMPT, sampled(3, 10, temperature=1.1, seed=None), use_tqdm=False)
    [second] = several.generate(PROMPT, params, use_tqdm=False)
    assert [first.outputs[0].token_ids, second.outputs[0].token_ids] == expected
    assert len({tuple(completion.token_ids) for completion in first.outputs}) == 3


def test_an_error_in_one_completion_is_named_and_costs_no_other(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": 7, "logprobs": 1}
    [good] = llm.generate("the dog", sampled(4, 8, **options), use_tqdm=False)
    tokens = [completion.token_ids for completion in good.outputs]
    num_prompt_tokens = len(good.prompt_token_ids)
    assert sum(each[0] == tokens[2][0] for each in tokens) == 1

    def picky(token_ids: list[int], logits: Tensor) -> Tensor:
        if token_ids[num_prompt_tokens : num_prompt_tokens + 1] == tokens[2][:1]:
            raise LookupError("not this one")
        return logits

    params = [sampled(4, 8, logits_processors=[picky], **options), greedy(5, ignore_eos=True)]
    [bad, beside] = llm.generate(["the dog", "the"], params, use_tqdm=False)
    assert bad.finished and bad.error == "logits_processors: LookupError: not this one"
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 5 completions ended with an error, which is in their outputs; the first, of request "
        f"{bad.request_id}: logits_processors: LookupError: not this one"
    ]
    assert [completion.finish_reason for completion in bad.outputs] == ["length", "length", "error", "length"]
    assert [completion.token_ids for completion in bad.outputs] == [tokens[0], tokens[1], tokens[2][:1], tokens[3]]
    assert [len(completion.logprobs or ()) for completion in bad.outputs] == [8, 8, 1, 8]
    assert beside.error is None and len(beside.outputs[0].token_ids) == 5


def test_metrics_of_completions_are_summed_and_their_times_spanned() -> None:
    parts = [
        RequestMetrics(1.0, 2.0, 5.0, 9.0, 0, 1, 3, [3, 2], [2, 1], 6),
        RequestMetrics(1.5, 3.0, 4.0, 7.0, 32, 0, 4, [4, 4, 1], [1], 5),
    ]
    assert merge_metrics(parts) == RequestMetrics(1.0, 2.0, 4.0, 9.0, 32, 1, 7, [7, 6, 1], [3, 1], 11)
    waiting = RequestMetrics(0.5)
    assert merge_metrics([*parts, waiting]) == RequestMetrics(0.5, 2.0, 4.0, None, 32, 1, 7, [7, 6, 1], [3, 1], 11)
    assert merge_metrics([waiting, waiting]) == waiting
    (part, _), alone = parts, merge_metrics(parts[:1])
    part.proposed_per_depth.append(1)
    part.accepted_per_depth.append(1)
    assert alone == RequestMetrics(1.0, 2.0, 5.0, 9.0, 0, 1, 3, [3, 2], [2, 1], 6), "an output stays as it is"

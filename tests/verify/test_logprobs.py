"""Logprobs of emitted tokens: those of transformers' own logits, with and without speculation."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from back_ends import make_back_end
from stepping import greedy, make_engine, make_request, submit
from text_tools import make_word_tokenizer
from tiny_models import make_model, reference_logits
from zoo import Zoo, random_prompts

from titan import LLM, CompletionOutput, Logprob, SamplingParams
from titan.core.request import Request
from titan.core.terms import RequestTerms
from titan.frontend.front_end import FrontEnd
from titan.verify.logprobs import emitted_logprobs

upload = make_back_end("torch").upload

PROMPTS = random_prompts(6, seed=4, max_len=20)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "seed": 3},
    "transformed": {"temperature": 0.6, "top_k": 30, "repetition_penalty": 1.2, "logit_bias": {9: 3.0}, "seed": 1},
}


def check(zoo: Zoo, prompt: list[int], completion: CompletionOutput, num_logprobs: int, model: str = "llama+text") -> None:
    assert completion.logprobs is not None and completion.cumulative_logprob is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    logits = reference_logits(zoo.model(model), prompt + completion.token_ids)[len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    ordered = expected.sort(-1, descending=True).values
    for i, (token_id, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        num_best = expected.shape[-1] if num_logprobs < 0 else num_logprobs
        first_id, *others = entry
        best = [other_id for other_id in entry if entry[other_id].rank <= num_best]
        assert first_id == token_id and len(best) == num_best and set(best) >= set(others)
        assert [entry[other_id].rank for other_id in others] == sorted(entry[other_id].rank for other_id in others)
        for other_id, logprob in entry.items():  # of tokens that are equally likely but for rounding, any may come first
            assert logprob.logprob == pytest.approx(float(expected[i, other_id]), abs=1e-4)
            assert logprob.logprob == pytest.approx(float(ordered[i, logprob.rank - 1]), abs=1e-4)
        assert len({logprob.rank for logprob in entry.values()}) == len(entry)
    total = sum(float(expected[i, token_id]) for i, token_id in enumerate(completion.token_ids))
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("draft", [None, "llama~"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_emitted_token_has_the_models_own_logprobs(zoo: Zoo, name: str, draft: str | None) -> None:
    """Requests that ask for different numbers, or for none, side by side; some of them are preempted."""
    pool: dict[str, Any] = {"speculation": "fixed", "block_size": 8, "num_kv_blocks": 6, "max_batch_size": 4}
    llm = LLM(zoo.path("llama+text"), draft and zoo.path(draft), dtype="float32", device="cpu", **pool)
    counts = [0, 1, 5, 20, None, -1]
    params = [SamplingParams(max_tokens=20, logprobs=count, **OPTIONS[name]) for count in counts]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, count, output in zip(PROMPTS, counts, outputs, strict=True):
        if count is None:
            assert (output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (None, None)
        else:
            check(zoo, prompt, output.outputs[0], count)
    assert llm.metrics().num_preemptions > 0
    if draft is not None and name == "greedy":
        assert sum(output.metrics.num_accepted_tokens for output in outputs) > 10


@pytest.mark.long_where("torch-False", "triton")
@pytest.mark.parametrize(
    ("back_end", "is_caching", "max_tokens"),
    [*product(("torch", "cpu"), (True, False), (16,)), ("triton", True, 2)],  # its interpreter takes seconds per step
)
def test_prompts_have_the_models_own_logprobs(zoo: Zoo, back_end: str, is_caching: bool, max_tokens: int) -> None:
    """Of prompts in chunks and in the cache already, beside others and siblings; some requests are preempted."""
    shared = PROMPTS[1] + PROMPTS[3]
    prompts = [*PROMPTS[:2], shared, [*shared, 7], shared, [*shared[:30], 9, 9]]
    counts = [2, 0, None, 3, -1, 1]
    pool: dict[str, Any] = {"num_kv_blocks": 7, "max_batch_size": 4, "prefill_chunk_size": 6}
    if max_tokens == 2:
        prompts, counts = [shared[:20], shared[:21]], [-1, 1]
        pool["prefill_chunk_size"] = 16
    options = pool | {"enable_prefix_caching": is_caching, "backend": make_back_end(back_end)}
    frontend = FrontEnd(make_engine(zoo.path("llama"), zoo.path("llama~"), **options))
    frontend.generate([shared], [greedy(2)], False, [RequestTerms()])
    params = [
        greedy(max_tokens, ignore_eos=True, prompt_logprobs=count, logprobs=count, n=1 + i % 2, repetition_penalty=1.3)
        for i, count in enumerate(counts)
    ]
    terms = [RequestTerms()] * len(prompts)
    outputs = frontend.generate(prompts, params, False, terms)
    plain = [replace(each, prompt_logprobs=None, use_speculative=False) for each in params]
    others = frontend.generate(prompts, plain, False, terms)
    for prompt, count, output, other in zip(prompts, counts, outputs, others, strict=True):
        assert [each.token_ids for each in output.outputs] == [each.token_ids for each in other.outputs]
        if count is None:
            assert output.prompt_logprobs is None
            continue
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        scored = [entry for entry in output.prompt_logprobs if entry is not None]
        completion = CompletionOutput(0, "", prompt[1:], sum(e[t].logprob for e, t in zip(scored, prompt[1:], strict=True)), scored)
        check(zoo, prompt[:1], completion, count, model="llama")
    assert (frontend.engine.counters.num_preemptions > 0) == (max_tokens > 2)


def test_the_text_of_a_token_is_not_cleaned_up(tmp_path: Path) -> None:
    make_model(tmp_path)
    make_word_tokenizer(names := [f" .{i}" for i in range(131)]).save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", device="cpu", num_kv_blocks=8)
    [output] = llm.generate([[3, 4]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=3), use_tqdm=False)
    entries = output.outputs[0].logprobs
    assert entries and all(logprob.decoded_token == names[token_id] for entry in entries for token_id, logprob in entry.items())


def test_logprobs_are_trimmed_with_the_tokens_at_a_stop_inside_an_accepted_run(zoo: Zoo) -> None:
    """Drafted by itself the model accepts runs of seven; it stops after each number of tokens in turn."""
    engine = make_engine(zoo.path("llama"), zoo.path("llama"), num_kv_blocks=64)
    prompt = PROMPTS[3]
    output = zoo.greedy("llama", prompt, 8, ignore_eos=True)
    for length in range(1, 8):
        stop = greedy(30, ignore_eos=True, logprobs=1, stop_token_ids=[output[length - 1]])
        if output[length - 1] in output[: length - 1]:
            continue
        [request] = submit(engine, [prompt], [stop])
        while engine.scheduler.has_unfinished:
            engine.step()
        assert request.output_token_ids == output[:length]
        assert request.logprobs is not None and [next(iter(entry)) for entry in request.logprobs] == output[:length]


def asking_for(logprobs: int | None) -> Request:
    return make_request(params=SamplingParams(logprobs=logprobs))


def test_paths_through_branching_trees_and_more_logprobs_than_tokens_in_the_vocabulary() -> None:
    """By hand: rows 0 to 3 are of a request with a branching tree, row 4 of one that asks for nothing, row 5 of a decode."""
    requests = [asking_for(2), asking_for(None), asking_for(20)]
    probs = np.random.default_rng(0).dirichlet(np.ones(4), size=6)
    logits = torch.tensor(np.log(probs) + 3.0)
    result = emitted_logprobs(requests, np.array([0, 4, 5, 6]), [[0, 2], [], []], [[3, 1, 0], [2], [2]], logits, upload)
    assert sorted(result) == [0, 2]
    assert [list(entry) for entry in result[0]] == [
        list(dict.fromkeys([token_id, *probs[row].argsort()[::-1][:2]])) for token_id, row in ((3, 0), (1, 1), (0, 3))
    ]
    for row, entry in zip((0, 1, 3, 5), (*result[0], *result[2]), strict=True):
        for token_id, logprob in entry.items():
            rank = int((probs[row] > probs[row, token_id]).sum()) + 1
            assert logprob == Logprob(pytest.approx(np.log(probs[row, token_id]), abs=1e-5), rank)
    assert len(result[2][0]) == 4


def test_tokens_that_tie_have_the_rank_of_the_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.5, 2.0]]).repeat(5, 1)
    paths, tokens = [[0, 1, 2, 3]], [[0, 1, 2, 3, 4]]
    [entries] = emitted_logprobs([asking_for(0)], np.array([0, 5]), paths, tokens, logits, upload).values()
    assert [entry[token_id].rank for token_id, entry in enumerate(entries)] == [4, 1, 1, 5, 1]


def test_which_of_tied_tokens_are_listed_does_not_depend_on_what_others_ask_for() -> None:
    logits = torch.randint(0, 4, (40, 400), generator=torch.Generator().manual_seed(0)).bfloat16()
    requests = [asking_for(5), asking_for(20)]
    for row in logits:
        [alone] = emitted_logprobs(requests[:1], np.array([0, 1]), [[]], [[7]], row[None], upload).values()
        both = emitted_logprobs(requests, np.array([0, 1, 2]), [[], []], [[7], [7]], row.repeat(2, 1), upload)
        assert both[0] == alone and len(both[1][0]) >= 20

"""Coverage is what it claims: the KV behind the counters is that of a fresh pass over the same tokens.

`num_computed_tokens` speaks for the target's cache, `num_drafted_context` for the draft's; transformers makes the fresh pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import asdict
from typing import Any

import pytest
import torch
from auditor import Auditor
from proposals import SHAPES
from stepping import AMPLE, SCARCE, check_blocks, drain, greedy, make_engine, submit
from zoo import Zoo, random_prompts

from titan.core.draft_history import DraftHistory
from titan.core.request import Request
from titan.core.sampling_params import SamplingParams
from titan.core.step import Acceptance, StepPlan
from titan.draft.registry import DraftSpec

PROMPTS = random_prompts(14, seed=1, max_len=45)


def mixed_params(i: int) -> SamplingParams:
    """Requests that draft, draft less, draft nothing, or must not draft; one in two samples."""
    options: dict[str, Any] = [{}, {}, {"max_draft_tokens": 2}, {"max_draft_tokens": 0}, {"use_speculative": False}, {}][i % 6]
    return SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=5 + 3 * i % 20, ignore_eos=True, **options)


@pytest.mark.long_where("llama-parents", "qwen3-chain", "dynamic_63", "llama-auto-greedy")
@pytest.mark.parametrize(
    ("target", "shape", "draft_sampling", "caching"),
    [
        ("llama", "chain", "greedy", True),
        ("qwen3", "chain", "greedy", False),
        ("llama", "auto", "greedy", True),
        ("llama", "auto", "sampled", False),
        ("llama", "auto_16", "sampled", True),
        ("qwen3", "dynamic", "greedy", True),
        ("llama", "dynamic_63", "greedy", False),
        ("llama", "parents", "greedy", False),
        ("llama", "parents", "sampled", True),
    ],
)
def test_coverage_through_drafting_pauses_prefix_hits_and_preemption(
    zoo: Zoo, target: str, shape: str, draft_sampling: str, caching: bool
) -> None:
    """Random acceptance, paths off the first nodes: drafted KV is kept where it is accepted, not recomputed."""
    draft, options = f"{target}~", SCARCE | SHAPES[shape] | {"draft_sampling": draft_sampling, "enable_prefix_caching": caching}
    engine = make_engine(zoo.path(target), zoo.path(draft), **options)
    auditor = Auditor(zoo, engine, target)
    requests, drafted = submit(engine, PROMPTS, map(mixed_params, range(len(PROMPTS)))), set[str]()

    def note(plan: StepPlan, _: Acceptance) -> None:
        drafted.clear()
        drafted.update(each.request_id for each, budget in zip(plan.requests, plan.draft_budgets, strict=True) if budget)

    engine.observers.append(note)
    while engine.scheduler.has_unfinished:
        engine.step()
        if engine.counters.num_steps % 2:  # what is wrong stays in its slots
            auditor.check(draft)
        check_blocks(engine)
        for request in engine.scheduler.running:
            is_steady = request.num_output_tokens > 0 and request.metrics.num_preemptions == 0 and request.request_id in drafted
            if is_steady and request.params.use_speculative and request.params.max_draft_tokens is None:
                assert request.num_tokens - request.num_drafted_context <= 2
            assert request.params.may_draft or caching or request.num_drafted_context == 0, "fed for nothing"
    assert engine.counters.num_preemptions > 0 or shape in ("auto_16", "dynamic_63"), "few have room beside each other"
    assert (engine.counters.num_cached_tokens > 0) == caching
    assert auditor.num_checked["draft"] > auditor.num_checked["target"] / 4
    assert sum(request.metrics.num_accepted_tokens for request in requests) > 10


@pytest.mark.parametrize("swap_space", [0, 2**20])
def test_coverage_through_swaps_in_flight(zoo: Zoo, swap_space: int) -> None:
    """Of drafts, and of requests."""
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), swap_space=swap_space, **SCARCE | SHAPES["auto"])
    auditor = Auditor(zoo, engine, "llama")
    submit(engine, PROMPTS, map(mixed_params, range(len(PROMPTS))))
    first = engine.drafter
    swaps: dict[int, tuple[DraftSpec, str | None]] = {
        4: ("ngram", None), 7: (zoo.path("other"), "other"), 12: (zoo.path("llama"), "llama"), 17: (None, None),
        20: (first, "llama~"), 26: (zoo.path("useless"), "useless"), 33: (first, "llama~"),
    }  # fmt: skip
    draft: str | None = "llama~"
    step = num_lost = 0  # swapped requests
    while engine.scheduler.has_unfinished:
        if step in swaps:
            spec, draft = swaps.pop(step)
            num_lost += engine.metrics().num_swapped
            engine.swap_draft(spec)
            assert not engine.metrics().num_swapped
            for request in (*engine.scheduler.running, *engine.scheduler.waiting):
                assert request.num_drafted_context == 0 and asdict(request.draft_history) == asdict(DraftHistory())
        engine.step()
        if step % 2:
            auditor.check(draft)
        step += 1
    assert not swaps
    metrics = engine.metrics()
    assert metrics.num_preemptions > 0 and metrics.num_cached_tokens > 0 and metrics.num_evicted_blocks > 0
    assert (metrics.num_swapped, metrics.swap_space.num_used_blocks) == (0, 0)
    assert metrics.num_swapped_in + num_lost == metrics.num_swapped_out
    assert metrics.num_swapped_out == (metrics.num_preemptions if swap_space else 0)
    assert metrics.num_swap_cached_tokens == SCARCE["block_size"] * engine.kv.swap_space.num_hits
    assert (metrics.num_swap_cached_tokens > 0) == (swap_space > 0)


def test_a_steady_request_lacks_one_or_two_tokens_and_a_paused_one_catches_up_at_once(zoo: Zoo) -> None:
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), **AMPLE)
    [request] = submit(engine, PROMPTS[1:2], [greedy(60, ignore_eos=True)])
    engine.step()
    for _ in range(5):
        assert 1 <= request.num_tokens - request.num_drafted_context <= 2
        engine.step()
    paused_at = request.num_drafted_context
    request.params = greedy(60, ignore_eos=True, use_speculative=False)
    for _ in range(5):
        engine.step()
    assert request.num_drafted_context == paused_at, "nothing is fed while the request does not draft"
    assert engine.metrics().draft_coverage is None, "nor is anything missed"
    request.params = greedy(60, ignore_eos=True)
    assert engine.metrics().draft_coverage == paused_at / request.num_computed_tokens < 1
    engine.step()
    assert 1 <= request.num_tokens - request.num_drafted_context <= 2
    auditor = Auditor(zoo, engine, "llama")
    auditor.check("llama~")
    assert auditor.num_checked["draft"] == request.num_drafted_context > paused_at


@pytest.mark.parametrize(("options", "num_fed"), [({"max_tokens": 1}, 0), ({"max_tokens": 2}, 44), ({"max_draft_tokens": 0}, 0)])
def test_a_prompt_is_fed_only_if_its_request_may_draft(zoo: Zoo, options: dict[str, Any], num_fed: int) -> None:
    """The last token needs no drafts."""
    engine = make_engine(zoo.path("llama"), zoo.path("useless"), **(AMPLE | {"prefill_chunk_size": 16}))
    [request] = submit(
        engine, random_prompts(2, seed=3, max_len=44)[1:], [SamplingParams(temperature=0.0, ignore_eos=True, **options)]
    )
    most = 0
    while engine.scheduler.has_unfinished:
        engine.step()
        most = max(most, request.num_drafted_context)
    assert most == num_fed


def test_an_interrupted_swap_leaves_the_current_draft_and_the_bytes_of_the_swap_space(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), **AMPLE, swap_space=2**20)
    requests = submit(engine, PROMPTS, [greedy(9)] * len(PROMPTS))
    resize = engine.kv.resize_swap_space

    def interrupt(num_blocks: int, requests: Iterable[Request]) -> None:
        resize(num_blocks, requests)
        if not num_blocks:
            raise KeyboardInterrupt

    before, num_swapped = (engine.drafter, engine.kv.tensors["draft"]), engine.kv.swap_space.pool.num_blocks
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.kv, "resize_swap_space", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.swap_draft(zoo.path("other"))
    assert (engine.drafter, engine.kv.tensors["draft"]) == before
    assert engine.kv.swap_space.pool.num_blocks == num_swapped > 0
    drain(engine)
    assert [each.output_token_ids for each in requests] == [zoo.greedy("llama", prompt, 9) for prompt in PROMPTS]


def test_a_long_context_is_caught_up_within_the_token_budget_before_anything_is_drafted(zoo: Zoo) -> None:
    """A swap leaves every request's whole context to be fed. The draft is the target: whatever it proposes is accepted."""
    engine = make_engine(zoo.path("llama"), "ngram", **(AMPLE | {"max_num_batched_tokens": 32}))
    prompts = random_prompts(9, seed=4, max_len=60)[1::4]
    requests = submit(engine, prompts, [greedy(60, ignore_eos=True)] * len(prompts))
    while not all(request.num_output_tokens > 3 for request in requests):
        engine.step()
    engine.swap_draft(zoo.path("llama"))
    metrics = engine.metrics()
    num_rejected = sum(metrics.proposed_per_depth) - sum(metrics.accepted_per_depth)
    auditor, fed = Auditor(zoo, engine, "llama"), []
    runner: Any = engine.drafter.runner  # type: ignore[attr-defined]
    grow = runner.grow
    runner.grow = lambda feeds, *others: (fed.append(sum(len(feed.token_ids) for feed in feeds)), grow(feeds, *others))[1]
    for _ in range(8):
        engine.step()
        auditor.check("llama")
    assert max(fed) == 32 < sum(fed)
    assert all(1 <= request.num_tokens - request.num_drafted_context <= 2 for request in requests if not request.is_finished)
    metrics = engine.metrics()
    assert sum(metrics.proposed_per_depth) - sum(metrics.accepted_per_depth) == num_rejected
    assert sum(metrics.accepted_per_depth) > 10


@pytest.mark.parametrize("is_reviewed", [False, True])
def test_what_memory_lacks_for_at_once_is_fed_in_parts(zoo: Zoo, is_reviewed: bool) -> None:
    """After a swap there is memory for passes of 10 tokens; the draft is the target."""
    engine = make_engine(zoo.path("llama"), None, **AMPLE | {"max_num_batched_tokens": 128})
    [request] = submit(engine, [[*range(3, 83)]], [greedy(60, ignore_eos=True)])
    while request.num_output_tokens < 4:
        engine.step()
    engine.swap_draft(zoo.path("llama"))
    drafter: Any = engine.drafter
    runner, fed = drafter.runner, []
    grow, forward = runner.grow, runner.forward

    def check_memory(num_tokens: int) -> None:
        fed.append(num_tokens)
        if num_tokens > 10:
            raise torch.OutOfMemoryError("made up")

    runner.grow = lambda feeds, *others: (check_memory(sum(len(feed.token_ids) for feed in feeds)), grow(feeds, *others))[1]
    runner.forward = lambda batch: (check_memory(len(batch.token_ids)), forward(batch))[1]
    while is_reviewed and request.num_tokens - request.num_drafted_context > 1:
        with suppress(torch.OutOfMemoryError):
            drafter.review([request])
    with nullcontext() if is_reviewed else pytest.warns(RuntimeWarning, match="OutOfMemoryError: made up"):
        drain(engine)
    assert request.output_token_ids == zoo.greedy("llama", request.prompt_token_ids, 60, ignore_eos=True)
    num_failed = sum(each > 10 for each in fed)
    assert 4 <= num_failed <= 4 + 80 // 5 and sum(each for each in fed if each <= 10) > request.num_prompt_tokens
    assert request.metrics.num_accepted_tokens > 20
    assert drafter._most_fed == drafter.max_num_batched_tokens, "memory for it is looked for again"

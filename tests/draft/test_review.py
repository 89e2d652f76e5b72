"""Reviews: what a draft model says of tokens that were emitted without it is what it would have proposed, and leaves right KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from auditor import Auditor
from back_ends import make_back_end
from machines import Machine
from scipy.special import logsumexp
from stepping import AMPLE, greedy, host_trees, make_engine, make_request, run_all, submit
from zoo import VOCAB_SIZE, Zoo, random_prompts

from titan.adaptive.value import own_acceptance
from titan.bench.hopeless_drafts import HalfHopelessDrafter
from titan.core.draft_history import AcceptanceCounts
from titan.core.request import Request
from titan.core.sampling_params import SamplingParams
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import DraftTree, GrowthReport
from titan.draft.base import Review, ReviewReport
from titan.draft.draft_model import MAX_REVIEWED, DraftModelDrafter
from titan.draft.feedback import TEMPERATURE_PRIOR, note_review, note_verification
from titan.draft.policy import GREEDY_TEMPERATURE, score_temperature
from titan.engine import Engine

PROMPTS = random_prompts(6, seed=8, max_len=40)


def undrafted(
    zoo: Zoo,
    draft: str,
    num_steps: int,
    back_end: str = "cpu",
    prompts: Sequence[Sequence[int]] = PROMPTS,
    target: str = "llama",
    **options: object,
) -> tuple[Engine, list[Request]]:
    """Requests in flight, none of which the draft has been fed."""
    engine = make_engine(zoo.path(target), zoo.path(draft), backend=make_back_end(back_end), **AMPLE | options)
    requests = submit(engine, prompts, [greedy(60, ignore_eos=True, use_speculative=False)] * len(prompts))
    for _ in range(num_steps):
        engine.step()
    assert not any(request.num_drafted_context for request in requests)
    return engine, requests


def review(engine: Engine, requests: Sequence[Request]) -> Sequence[Review]:
    with engine.backend.active(), torch.inference_mode():
        report: ReviewReport = engine.drafter.review(requests)  # type: ignore[attr-defined]
    assert (report.seconds > 0) == (report.num_rows > 0 and engine.backend.is_host)
    return report.reviews


@torch.no_grad()
def said(zoo: Zoo, draft: str, request: Request, start: int, num_tokens: int = VOCAB_SIZE) -> tuple[list[bool], list[float]]:
    """By transformers, of the tokens whose places are from ``start`` on, if the draft had only its first tokens."""
    logits = zoo.model(draft)(torch.tensor([request.token_ids])).logits[0, :, :num_tokens]
    logprobs = (logits / GREEDY_TEMPERATURE).log_softmax(-1)
    best = logprobs[start - 1 : request.num_tokens - 1].max(-1)
    is_right = [token == known for token, known in zip(best.indices.tolist(), request.token_ids[start:], strict=True)]
    return is_right, best.values.tolist()


@pytest.mark.long_where("triton")
@pytest.mark.parametrize(("back_end", "num_steps"), [("torch", 5), ("cpu", 5), ("cpu", MAX_REVIEWED + 4), ("triton", 5)])
def test_a_review_says_what_the_draft_would_have_proposed(
    zoo: Zoo, back_end: str, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last of a request's own tokens; then of those since, from KV that a fresh pass would have made as well."""
    Machine(monkeypatch)
    target, prompts = ("thin", PROMPTS[:3]) if back_end == "triton" else ("llama", PROMPTS)
    draft = f"{target}~"
    engine, requests = undrafted(zoo, draft, num_steps, back_end, prompts, target, speculation="adaptive", draft_tree="auto")
    drafter, auditor = engine.drafter, Auditor(zoo, engine, target)
    assert isinstance(drafter, DraftModelDrafter)
    some, found_right = requests[:5], list[bool]()
    for num_more in (num_steps, 3):
        counts = [drafter.num_reviewable(request) for request in some]
        assert counts == [min(num_more, MAX_REVIEWED)] * len(some)
        for request, found in zip(some, review(engine, some), strict=True):
            is_right, logprobs = said(zoo, draft, request, request.num_tokens - min(num_more, MAX_REVIEWED))
            assert (found.logprobs is not None) == (back_end != "triton"), "growth there does not stop early"
            assert found.is_right == is_right and (found.logprobs is None or found.logprobs == pytest.approx(logprobs, abs=1e-3))
            assert request.num_drafted_context == request.num_tokens - 1 and drafter.num_reviewable(request) == 0
            found_right += is_right
        auditor.check(draft)
        for _ in range(3):
            engine.step()
    assert 0 < sum(found_right) < len(found_right)


def test_a_review_is_of_what_fits_into_a_pass_and_the_drafts_context(zoo: Zoo) -> None:
    """A draft of 40 positions; passes of 50 tokens: the second of two long prompts is fed in part, and has nothing to say."""
    prompts = [[*range(5, 37)], [*range(90, 120)]]
    engine, requests = undrafted(zoo, "short", 12, max_num_batched_tokens=50, prompts=prompts)
    drafter = engine.drafter
    assert isinstance(drafter, DraftModelDrafter) and [request.num_tokens for request in requests] == [44, 41]
    assert [*map(drafter.num_reviewable, requests)] == [9, 11]
    first, cut = review(engine, requests)
    assert first.is_right == said(zoo, "short", requests[0], 32)[0][:9] and list(cut.is_right) == []
    assert [request.num_drafted_context for request in requests] == [40, 10] and drafter.num_reviewable(requests[1]) == 11
    none, rest = review(engine, requests)
    assert list(none.is_right) == [] and len(rest.is_right) == 11
    assert [request.num_drafted_context for request in requests] == [40, 40]
    Auditor(zoo, engine, "llama").check("short")


def test_a_review_is_of_tokens_that_the_target_has(zoo: Zoo) -> None:
    """A draft may have more."""
    engine, requests = undrafted(zoo, "llama~", 10)
    engine.drafter._num_proposable = 60  # type: ignore[attr-defined]
    found = [each.is_right for each in review(engine, requests)]
    assert found == [said(zoo, "llama~", request, request.num_tokens - 10, 60)[0] for request in requests]
    assert found != [said(zoo, "llama~", request, request.num_tokens - 10)[0] for request in requests]


@pytest.mark.parametrize(
    ("draft_sampling", "seed", "can_review"),
    [("greedy", None, True), ("auto", 3, True), ("auto", None, False), ("sampled", 3, False)],
)
def test_only_greedy_drafts_can_be_reviewed(zoo: Zoo, draft_sampling: str, seed: int | None, can_review: bool) -> None:
    """Of others it is not known how likely the target would have been to accept them."""
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), draft_sampling=draft_sampling, **AMPLE)
    [request] = submit(engine, PROMPTS[:1], [SamplingParams(temperature=1.0, seed=seed, max_tokens=9)])
    assert isinstance(engine.drafter, DraftModelDrafter)
    assert (engine.drafter.num_reviewable(request) is not None) == can_review


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.5}], ids=["plain", "penalised"])
@pytest.mark.parametrize("has_scores", [True, False])
def test_a_review_counts_like_drafts_of_a_node_each(zoo: Zoo, has_scores: bool, options: dict[str, float]) -> None:
    """All at the temperature that the review has led to."""
    engine, _ = undrafted(zoo, "llama~", 1)
    labels, start = [True, False, True, True, False], GREEDY_TEMPERATURE
    logits = -np.outer([0.8, 0.1, 0.4, 0.05, 0.2], np.arange(2000))  # geometric distributions at any temperature

    def logprobs(temperature: float) -> list[float]:
        return [float(row[0] - logsumexp(row)) for row in logits / temperature]

    reviewed, drafted = submit(engine, PROMPTS[:2], [greedy(9, **options)] * 2)
    of_reviewed, of_drafted = AcceptanceCounts(), AcceptanceCounts()
    note_review(reviewed, Review(labels, logprobs(start) if has_scores else None), of_reviewed)
    note_review(reviewed, Review((), None), of_reviewed)
    temperature = reviewed.draft_history.temperature or start
    scores = logprobs(temperature)
    for i, is_right in enumerate(labels):
        score = np.array(scores[i : i + 1], np.float32) if has_scores else None
        trees = host_trees([DraftTree(np.array([7]), np.array([-1], np.int32), scores=score)])
        found = Acceptance(trees, [[0] if is_right else []], [[7]], [None])
        report = GrowthReport(1, 1, 0.0, np.full(1, np.nan, np.float32) if score is None else score)
        note_verification(StepPlan([drafted], [1], [1], [1]), replace(found, trees=replace(found.trees, growth=report)), of_drafted)
    fields = AcceptanceCounts.__slots__  # type: ignore[attr-defined]
    for one, other in ((reviewed.draft_history.acceptance, drafted.draft_history.acceptance), (of_reviewed, of_drafted)):
        assert [getattr(one, name) for name in fields] == pytest.approx([getattr(other, name) for name in fields], rel=1e-5)
    assert (of_reviewed.num_drafts > 0) == (not options)
    assert (reviewed.draft_history.temperature is None) == (not has_scores)
    if has_scores:  # more were expected than were right, by as many as it takes for so much higher a temperature
        surplus = float(np.exp(scores).sum()) - sum(labels)
        assert surplus == pytest.approx(TEMPERATURE_PRIOR * log(temperature / start), abs=0.01) and temperature > 1.05 * start


@pytest.mark.parametrize("start", [0.15, 0.5, 1.5])
def test_reviews_find_the_temperature_and_how_often_drafts_are_accepted(start: float) -> None:
    """Tokens of a vocabulary like that of a language model, which are right as often as the draft says at a temperature of 0.5."""
    shown, true, temperatures = [], [], []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        logits = -np.outer(rng.gamma(2.0, 0.4, 48), np.log(np.arange(1, 2001))) + rng.gumbel(0, 0.3, (48, 2000))
        logits -= logits.max(1, keepdims=True)
        probabilities = np.exp(-logsumexp(logits / 0.5, axis=1))
        labels = (rng.random(48) < probabilities).tolist()
        request = make_request(params=greedy(9))
        request.draft_history.start_at(start)
        for first in (0, 16, 32):
            logprobs = -logsumexp(logits[first : first + 16] / score_temperature(request), axis=1)
            note_review(request, Review(labels[first : first + 16], logprobs.tolist()), AcceptanceCounts())
        shown.append(own_acceptance(request.draft_history.acceptance, 1.0))
        true.append(probabilities.mean())
        temperatures.append(score_temperature(request))
    assert np.exp(np.mean(np.log(temperatures))) == pytest.approx(0.5, rel=0.15)
    assert np.mean(shown) == pytest.approx(np.mean(true), abs=0.05)


def test_requests_are_reviewed_instead_of_drafting_and_may_fail_to_be(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is too slow at first: it is reviewed, at no cost for the output, and drafts as soon as that pays."""
    expected = [zoo.greedy("llama", prompt, 120, ignore_eos=True) for prompt in PROMPTS]
    machine = Machine(monkeypatch, {0: 0.6, 20: 0.01})
    options = AMPLE | {"speculation": "adaptive", "draft_tree": "auto"}
    engine, reviewed = make_engine(zoo.path("llama"), zoo.path("llama~"), **options), list[tuple[int, int]]()

    def counted(drafter: DraftModelDrafter, requests: Sequence[Request]) -> ReviewReport:
        report = original(drafter, requests)
        reviewed.append((len(machine.choices), sum(len(each.is_right) for each in report.reviews)))
        return report

    original = DraftModelDrafter.review
    monkeypatch.setattr(DraftModelDrafter, "review", counted)
    assert run_all(engine, PROMPTS, [greedy(120, ignore_eos=True)] * len(PROMPTS)) == expected
    assert reviewed and all(count >= 6 for _, count in reviewed)
    assert {machine.choices[step] for step, _ in reviewed if step < 30} <= {"probe"} and "on" in machine.choices[30:]
    wrong = Review([True, False], [-0.5])
    for failing, reason in (
        (Mock(side_effect=RuntimeError("no review")), "RuntimeError: no review"),
        (Mock(return_value=ReviewReport(())), "ValueError: 0 reviews of . requests were reported"),
        (lambda _, requests: ReviewReport([wrong] * len(requests)), "ValueError: a review has logprobs="),
    ):
        monkeypatch.setattr(DraftModelDrafter, "review", failing)
        machine.choices.clear()
        engine = make_engine(zoo.path("llama"), zoo.path("llama~"), **options)
        with pytest.warns(RuntimeWarning, match=f"which costs drafts and no request: {reason}"):
            outputs = run_all(engine, PROMPTS, [greedy(60, ignore_eos=True)] * len(PROMPTS))
        assert outputs == [each[:60] for each in expected]


@pytest.mark.parametrize(
    ("question", "answer", "reason"),
    [
        *(
            (name, Mock(side_effect=KeyError(name)), f"KeyError: '{name}'")
            for name in ("num_reviewable", "stops_early", "lookahead")
        ),
        ("lookahead", Mock(return_value=None), "TypeError: 'NoneType' object cannot be interpreted as an integer"),
    ],
)
def test_a_drafter_that_fails_to_answer_costs_no_request(
    zoo: Zoo, question: str, answer: Mock, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch, {0: 0.05}, target=lambda rows: 1.0 + 0.01 * rows)
    params = [greedy(12, ignore_eos=True)] * len(PROMPTS)
    expected = [zoo.greedy("llama", prompt, 12, ignore_eos=True) for prompt in PROMPTS]
    monkeypatch.setattr(DraftModelDrafter, question, answer)
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), **AMPLE | {"speculation": "adaptive", "draft_tree": "auto"})
    with pytest.warns(RuntimeWarning, match=f"failed, which costs drafts and no request: {reason}"):
        assert run_all(engine, PROMPTS, params) == expected


def test_a_review_whose_pass_fails_has_fed_nothing(zoo: Zoo) -> None:
    engine, requests = undrafted(zoo, "llama~", 10)
    runner = engine.drafter.runner  # type: ignore[attr-defined]
    forward, runner.forward = runner.forward, Mock(side_effect=ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        review(engine, requests)
    assert not any(request.num_drafted_context for request in requests)
    runner.forward = forward
    assert [len(each.is_right) for each in review(engine, requests)] == [10] * len(requests)
    Auditor(zoo, engine, "llama").check("llama~")


def test_some_are_reviewed_while_others_draft(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where drafts of every second request are wrong, and a row of the target's costs something."""
    Machine(monkeypatch, {0: 0.05}, target=lambda rows: 1.0 + 0.05 * rows)
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), **AMPLE | {"speculation": "adaptive", "draft_tree": "auto"})
    assert isinstance(engine.drafter, DraftModelDrafter)
    engine.swap_draft(HalfHopelessDrafter("half", engine.drafter.model, engine.draft_context()))
    auditor, seen = Auditor(zoo, engine, "llama"), list[tuple[bool, bool]]()
    engine.observers.append(lambda plan, _: seen.append((any(plan.draft_budgets), bool(plan.reviews))))
    requests = submit(engine, PROMPTS, [greedy(90, ignore_eos=True)] * len(PROMPTS))
    while engine.scheduler.has_unfinished:
        engine.step()
        if engine.counters.num_steps % 4 == 0:  # what is wrong stays
            auditor.check("llama~")
    assert [each.output_token_ids for each in requests] == [zoo.greedy("llama", each, 90, ignore_eos=True) for each in PROMPTS]
    assert {(True, True), (True, False)} <= {*seen}

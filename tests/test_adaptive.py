"""Adaptive speculation in engines: whatever times it sees and whatever it decides, tokens are those of the target.

Engines run on made-up machines, so that all decisions are the same in every run.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import accumulate, count, cycle
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from back_ends import make_back_end
from machines import Machine
from stepping import AMPLE, SCARCE, drain, greedy, make_engine, run_all, submit
from torch import Tensor
from zoo import VOCAB_SIZE, Zoo, random_prompts

from titan import LLM, SamplingParams
from titan.adaptive.controller import Controller
from titan.adaptive.load import Outcome
from titan.adaptive.measure import measure
from titan.adaptive.pass_cost import PassCost
from titan.adaptive.policy import BudgetPolicy
from titan.adaptive.speculation import AdaptiveSpeculation
from titan.core.batch import RaggedBatch
from titan.core.draft_history import AcceptanceCounts
from titan.core.growth import BeamSpec, Feed
from titan.core.step import Acceptance, StepPlan
from titan.core.terms import RequestTerms
from titan.core.trees import DraftTree
from titan.diagnosis import faults
from titan.draft.base import CachelessDrafter
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.registry import _FACTORIES, DraftSpec, open_draft_model, register
from titan.draft.replay import ReplayDrafter
from titan.engine import Engine

PROMPTS = random_prompts(10, seed=3, max_len=50)
NUM_TOKENS = 28
LIMITS = [NUM_TOKENS - i for i in range(10)]
OWN: list[dict[str, Any]] = [{}, {"max_draft_tokens": 2}, {"use_speculative": False}, {}, {"max_draft_tokens": 0}, *[{}] * 5]
PARAMS = [greedy(limit, ignore_eos=True, **own) for limit, own in zip(LIMITS, OWN, strict=True)]
CHANGING = {step: (0.01, 9.0)[step // 9 % 2] for step in range(0, 900, 9)}  # drafts as good as free, then too slow, and so on


class Bush(CachelessDrafter):
    """Proposes trees of what the target writes, beside other tokens."""

    name = "bush"
    max_draft_tokens = 5
    parents = np.array([-1, -1, 0, 0, 2], np.int32)

    def __init__(self, zoo: Zoo) -> None:
        self.written = {tuple(each): zoo.greedy("llama", each, NUM_TOKENS + 4, ignore_eos=True) for each in PROMPTS}

    def propose(self, plan: StepPlan) -> list[DraftTree]:
        trees = []
        for request, budget in zip(plan.requests, plan.draft_budgets, strict=True):
            first, second, third = self.written[tuple(request.prompt_token_ids)][request.num_output_tokens :][:3]
            trees.append(DraftTree(np.array([first, 5, second, 6, third])[:budget], self.parents[:budget]))
        return trees


def spec_of(zoo: Zoo, draft: str | None) -> DraftSpec:
    return Bush(zoo) if draft == "bush" else draft if draft in (None, "ngram") or "/" in draft else zoo.path(draft)


def adaptive_engine(zoo: Zoo, draft: str | None, target: str = "llama", **options: Any) -> Engine:
    return make_engine(zoo.path(target), spec_of(zoo, draft), **{"speculation": "adaptive", "draft_tree": "auto"} | options)


def written(zoo: Zoo, limits: Sequence[int] = LIMITS, target: str = "llama") -> list[list[int]]:
    """By transformers, after the first prompts."""
    return [zoo.greedy(target, prompt, limit, ignore_eos=True) for prompt, limit in zip(PROMPTS, limits, strict=False)]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "auto": ("llama~", AMPLE),
    "cap 1": ("llama~", AMPLE | {"max_draft_tokens": 1}),
    "cap 16": ("llama~", AMPLE | {"max_draft_tokens": 16}),
    "cap 63": ("llama~", AMPLE | {"max_draft_tokens": 63, "max_batch_size": 4}),
    "chain": ("llama~", SCARCE | {"draft_tree": "chain"}),
    "dynamic": ("llama~", SCARCE | {"draft_tree": "dynamic", "max_draft_tokens": 12}),
    "shape": ("llama~", AMPLE | {"draft_tree": [-1, -1, 0, 0, 1], "max_draft_tokens": 5}),
    "other": ("other", AMPLE),
    "padded": ("small_vocab", SCARCE),
    "short": ("short", AMPLE),
    "ngram": ("ngram", AMPLE),
    "bush": ("bush", SCARCE),
    "chunks": ("llama~", AMPLE | {"prefill_chunk_size": 5, "max_num_batched_tokens": 33}),
    "no prefix cache": ("llama~", SCARCE | {"enable_prefix_caching": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers_whatever_pays(zoo: Zoo, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (draft, options), machine = CASES[case], Machine(monkeypatch, CHANGING)
    monkeypatch.setattr("titan.draft.registry._map_vocabulary", lambda *_: None)
    engine = adaptive_engine(zoo, draft, **options)
    assert run_all(engine, PROMPTS, PARAMS) == written(zoo)
    assert {"on", "off"} <= set(machine.choices)
    assert (engine.counters.num_preemptions > 0) == (options.get("num_kv_blocks") == SCARCE["num_kv_blocks"])


def test_drafts_may_be_swapped_and_requests_aborted(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """While passes are measured in earnest: the target's in the first swap, the drafts' in each."""
    machine = Machine(monkeypatch, {step: (0.01, 9.0)[step // 5 % 2] for step in range(0, 900, 5)})
    monkeypatch.setattr("titan.adaptive.profiler.measure", lambda *args: (measure(*args), machine.curves(*args))[1])
    engine = adaptive_engine(zoo, None, **SCARCE)
    swaps = {6: "llama~", 15: "ngram", 21: None, 25: "llama~", 38: "other"}

    def swap(step: int) -> None:
        assert (engine.adaptive is None) == (engine.drafter.name == "none")
        if step in swaps:
            engine.swap_draft(spec_of(zoo, swaps[step]))
        if step == 10:
            engine.scheduler.abort(requests[1])

    requests, expected = submit(engine, PROMPTS, PARAMS), written(zoo)
    drain(engine, swap)
    expected[1] = expected[1][: requests[1].num_output_tokens]
    assert [each.output_token_ids for each in requests] == expected
    assert {"on", "off"} <= set(machine.choices) and engine.drafter.name.endswith("other")


CLOCKS: dict[str, Callable[[Random], Iterator[float]]] = {  # seconds between two looks at it
    "constant": lambda _: cycle([1e-3]),
    "random": lambda rng: (rng.expovariate(1e3) for _ in count()),
    "jumping": lambda rng: (rng.choice((1e-7, 1e-3, 1e-3, 50.0)) for _ in count()),
}


@pytest.mark.long_where(
    "most likely-constant",
    "most likely-random",
    "own seed-constant",
    "own seed-jumping",
    "greedy drafts-constant",
    "greedy drafts-random",
)
@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("sampling", ["most likely", "own seed", "greedy drafts"])
def test_tokens_do_not_depend_on_the_clock(zoo: Zoo, sampling: str, clock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the back end all of whose times are taken in Python; measured costs are far from what the clock then says."""
    hot: dict[str, Any] = {"temperature": 0.1, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    own = [SamplingParams(**hot, seed=i, top_p=0.9 if i % 2 else 1.0) for i in range(10)]
    params = {"most likely": PARAMS, "own seed": own, "greedy drafts": [SamplingParams(**hot)] * 10}[sampling]
    options = AMPLE | {"draft_sampling": "greedy" if sampling == "greedy drafts" else "auto"}
    plain = run_all(adaptive_engine(zoo, "llama", **options | {"speculation": "off"}), PROMPTS, params)
    num_nodes, now = list[int](), accumulate(CLOCKS[clock](Random(0)))
    fake = SimpleNamespace(perf_counter=lambda: next(now))
    for module in ("titan.engine", "titan.adaptive.measure", "titan.kernels.growth", "titan.kernels.torch.backend"):
        monkeypatch.setattr(f"{module}.time", fake)
    for draft_seconds in (1e-9, 1e-3, 10.0):
        curves = [PassCost([1, 8, 64], [1e-3, 1e-3, 4e-3]), PassCost([1], [draft_seconds])]
        monkeypatch.setattr("titan.adaptive.profiler.measure", lambda *_, costs=curves: costs)
        engine = adaptive_engine(zoo, "llama", backend=make_back_end("torch"), **options)
        engine.observers.append(lambda _, acceptance: num_nodes.append(acceptance.trees.num_nodes))
        assert run_all(engine, PROMPTS, params) == plain
    assert 0 < num_nodes.count(0) < len(num_nodes)


class Records:
    """Of the steps of an engine: requests, rows, drafts; and, where a draft model grows trees, their specs."""

    def __init__(self, engine: Engine) -> None:
        self.requests, self.rows, self.budgets = list[list[str]](), list[list[int]](), list[int]()
        self.growths: dict[int, list[Any]] = {}
        engine.observers.append(self.note)
        if (runner := getattr(engine.drafter, "runner", None)) is not None:
            self._grow, runner.grow = runner.grow, self.grow

    def grow(self, feeds: Sequence[Feed], *args: Any) -> Any:
        self.growths[len(self.rows)] = [feed.spec for feed in feeds if feed.spec is not None]
        return self._grow(feeds, *args)

    def note(self, plan: StepPlan, _: Acceptance) -> None:
        self.requests.append([request.request_id for request in plan.requests])
        self.rows.append(list(plan.num_tokens))
        self.budgets.append(sum(plan.draft_budgets))


@pytest.mark.parametrize("memory", [AMPLE, SCARCE], ids=["ample", "scarce"])
def test_off_is_an_engine_without_a_draft_but_for_probes(
    zoo: Zoo, memory: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a draft that is always wrong: the same rows in the same steps, and as many preemptions."""
    wrong = deepcopy(zoo.model("llama"))
    wrong.lm_head.weight.data = wrong.lm_head.weight.data.roll(1, 0)
    wrong.save_pretrained(tmp_path)
    machine, params = Machine(monkeypatch, {0: 2.0}), [greedy(60, ignore_eos=True)] * 10
    off, engine = (adaptive_engine(zoo, draft, **memory | {"draft_tree": "chain"}) for draft in (None, str(tmp_path)))
    plain, seen = Records(off), Records(engine)
    assert run_all(engine, PROMPTS, params) == run_all(off, PROMPTS, params)
    assert (seen.requests, seen.rows) == (plain.requests, plain.rows)
    assert engine.counters.num_preemptions == off.counters.num_preemptions
    drafting = [step for step, budget in enumerate(seen.budgets) if budget]
    fed = {*seen.growths} - {*drafting}  # the prompt of a request that is alone, while nothing was ever drafted
    assert {*drafting} <= {*seen.growths} and all(len(seen.requests[step]) == 1 for step in fed)
    assert sum(engine.counters.accepted_per_depth) == 0
    probes = [step for step in drafting if step >= 20]
    assert {machine.choices[step] for step in probes} <= {"probe"} and len(probes) < 0.2 * len(seen.rows)


def test_a_review_that_is_due_reserves_no_room(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """It verifies nothing more, unlike the node that a drafter without reviews drafts instead."""
    Machine(monkeypatch, {0: 2.0})
    monkeypatch.setattr(Controller, "is_probe_due", True)
    engine, reserved = adaptive_engine(zoo, "llama~", **AMPLE), Counter[bool]()
    adaptive = engine.adaptive
    assert adaptive is not None

    def look(step: int) -> None:
        if step >= 40 and not adaptive.controller.optimum.drafts:
            reserved[adaptive.num_reserved > 0] += 1

    run_all(engine, PROMPTS[:4], [greedy(200, ignore_eos=True)] * 4, before_step=look)
    assert reserved[False] and not reserved[True]


def test_drafting_comes_back_when_it_pays_and_catches_up(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row beyond eight costs as much as eight: eight requests and more have no room for drafts, two have."""
    Machine(monkeypatch, target=lambda rows: 1.0 + max(0.0, rows - 8))
    engine, limits = adaptive_engine(zoo, "llama", **AMPLE), [20] * 8 + [80] * 2
    seen, coverage, sizes = Counter[tuple[int, str]](), dict[int, float | None](), list[int]()
    engine.observers.append(lambda _, acceptance: sizes.append(acceptance.trees.num_nodes))

    def look(_: int) -> None:
        metrics = engine.metrics()
        assert metrics.speculation is not None
        seen[metrics.num_running, metrics.speculation.choice] += 1
        coverage[metrics.num_running] = metrics.draft_coverage

    assert run_all(engine, PROMPTS, [greedy(limit, ignore_eos=True) for limit in limits], before_step=look) == written(zoo, limits)
    assert seen[10, "on"] == 0 < seen[10, "off"] and (coverage[10] or 0) < 0.95
    assert seen[2, "on"] > 3 * seen[2, "off"] and (coverage[2] or 0) > 0.98  # but for the last token of one
    assert max(sizes) == 6  # however sure the draft is


@pytest.mark.parametrize(("draft", "temperature"), [("llama~", 0.0), ("llama~", 1.0), ("short_llama", 0.0)])
def test_repeated_decisions_are_cut_to_what_requests_may_draft(
    zoo: Zoo, draft: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ends at another step, and drafts less and less before it; drafts may be sampled; or the length of the draft ends."""
    Machine(monkeypatch, {0: 0.01})
    engine, found = adaptive_engine(zoo, draft, **AMPLE | {"draft_sampling": "auto"}), Counter[str]()
    adaptive, drafter = engine.adaptive, engine.drafter
    assert adaptive is not None and isinstance(drafter, DraftModelDrafter)

    def note(plan: StepPlan, acceptance: Acceptance) -> None:
        is_repeated = adaptive._is_repeat and adaptive._rest is None
        found["repeated" if is_repeated else "decided"] += 1
        room = [max(0, min(each.num_remaining_tokens - 1, drafter.max_len - each.num_tokens)) for each in plan.requests]
        assert all(count <= most for count, most in zip(acceptance.trees.counts, room, strict=True))
        if is_repeated:
            found["cut"] += any(most < count for most, count in zip(room, adaptive._budgets, strict=True))

    engine.observers.append(note)
    prompts, limits = [prompt[:9] for prompt in PROMPTS[:3]], [72, 76, 80]
    params = [SamplingParams(temperature=temperature, max_tokens=limit, ignore_eos=True) for limit in limits]
    output = run_all(engine, prompts, params)
    assert [*map(len, output)] == limits and found["repeated"] > 2 and found["decided"] and found["cut"]
    if not temperature:
        assert output == [zoo.greedy("llama", *each, ignore_eos=True) for each in zip(prompts, limits, strict=True)]


def test_a_last_token_is_no_failure_to_draft(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be drafted in its step, which repeats no step that drafts; of requests of many lengths, some have one left."""
    Machine(monkeypatch, {0: 0.01})
    engine, found = adaptive_engine(zoo, "llama~", **AMPLE), Counter[bool]()
    adaptive = engine.adaptive
    assert adaptive is not None

    def note(plan: StepPlan, _: Acceptance) -> None:
        if adaptive.controller.optimum.drafts and plan.requests[0].num_remaining_tokens == 1:
            found[adaptive._is_repeat and adaptive._rest is None] += 1

    engine.observers.append(note)
    for limit in range(40, 52):
        run_all(engine, [PROMPTS[1][:9]], [greedy(limit, ignore_eos=True)])
    assert found[False] and not found[True]


@pytest.mark.parametrize("drafts", [True, False])
def test_repeated_steps_that_run_in_parts_are_decided_on_again(zoo: Zoo, drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is learned of them; memory gets short for two requests at once in the first step that repeats."""
    Machine(monkeypatch, {0: 0.01 if drafts else 9.0})
    engine, limits = adaptive_engine(zoo, "llama~", **AMPLE), [90, 90]
    adaptive, forward, is_short, in_a_row, num_parts = engine.adaptive, engine.runner.forward, False, [0], 0
    assert adaptive is not None

    def forward_if_there_is_memory(batch: RaggedBatch) -> Tensor:
        nonlocal is_short, num_parts
        repeats = adaptive._is_repeat
        is_short |= repeats and (adaptive._rest is None) == drafts
        if is_short and len(batch.attention.seq_lens) > 1:
            in_a_row.append(in_a_row[-1] + 1 if repeats else 0)
            raise torch.OutOfMemoryError("made up")
        num_parts += is_short
        return forward(batch)

    monkeypatch.setattr(engine.runner, "forward", forward_if_there_is_memory)
    assert run_all(engine, PROMPTS[:2], [greedy(limit, ignore_eos=True) for limit in limits]) == written(zoo, limits)
    assert num_parts > 20 and max(in_a_row) > 0 and in_a_row.count(0) > 1


@pytest.mark.parametrize("drafts", [True, False])
def test_an_idle_engine_keeps_no_request_that_has_ended(zoo: Zoo, drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its outputs may be large, and its user has let go of them; whether the last steps were decided on anew or not."""
    Machine(monkeypatch, {0: 0.01 if drafts else 9.0})
    engine = adaptive_engine(zoo, "llama~", scheduling_policy="priority" if drafts else "fcfs", **AMPLE)
    for limits in ([30, 30], [30, 17], [3, 1]):
        params = [greedy(limit, ignore_eos=True, logprobs=1) for limit in limits]
        requests = submit(engine, PROMPTS[:2], params, [RequestTerms(timeout_s=1e6)] * 2)
        ended = [weakref.ref(request) for request in requests]
        del requests
        drain(engine)
        gc.collect()
        assert [each() for each in ended] == [None, None]


def test_what_a_drafter_without_a_model_takes_counts(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is always right, and takes longer than the tokens that it saves."""
    machine = Machine(monkeypatch, {0: 8.0}, target=lambda rows: 1 + rows / 1e3)
    engine = make_engine(zoo.path("llama"), replaying(zoo, [200]), speculation="adaptive", **AMPLE)
    assert run_all(engine, PROMPTS[:1], [greedy(200, ignore_eos=True)]) == written(zoo, [200])
    assert "on" in machine.choices[:20] and machine.choices[20:].count("on") < 0.05 * len(machine.choices)


def replaying(zoo: Zoo, limits: Sequence[int]) -> ReplayDrafter:
    recordings = {tuple(prompt): recorded for prompt, recorded in zip(PROMPTS, written(zoo, limits), strict=False)}
    return ReplayDrafter(recordings, acceptance=1.0, vocab_size=VOCAB_SIZE, max_draft_tokens=4)


@pytest.mark.parametrize(("seconds", "choice"), [(0.01, "on"), (8.0, "off")])
def test_what_a_draft_model_takes_counts_although_it_returns_a_list(
    zoo: Zoo, seconds: float, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which does not tell its passes; they become slow after they were measured, or stay as they were."""

    class Mine(DraftModelDrafter):
        def propose(self, plan: StepPlan) -> Any:
            trees = super().propose(plan)
            return [trees[i] for i in range(trees.num_rows)]

    monkeypatch.setattr("titan.draft.registry._FACTORIES", dict(_FACTORIES))
    register("mine", lambda context: open_draft_model(zoo.path("llama"), context, Mine)())
    machine = Machine(monkeypatch, {0: 0.01, 4: seconds})
    engine = make_engine(zoo.path("llama"), "mine", speculation="adaptive", **AMPLE | {"max_draft_tokens": 2})
    assert run_all(engine, PROMPTS[:1], [greedy(200, ignore_eos=True)]) == written(zoo, [200])
    found = machine.choices[len(machine.choices) // 2 :]
    assert found.count(choice) > 0.9 * len(found) > 20


def test_a_drafter_that_is_not_fed_repeats_decisions(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, target=lambda rows: 1 + rows / 1e3)
    drafter = replaying(zoo, [80] * 3)
    engine, repeats = make_engine(zoo.path("llama"), drafter, speculation="adaptive", **AMPLE), Counter[bool]()
    adaptive = engine.adaptive
    assert adaptive is not None
    engine.observers.append(lambda *_: repeats.update([adaptive._is_repeat and adaptive._rest is None]))
    assert run_all(engine, PROMPTS[:3], [greedy(80, ignore_eos=True)] * 3) == written(zoo, [80] * 3)
    assert repeats[True] > repeats[False]


def test_prompts_are_fed_to_the_draft_by_what_was_just_found(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by what was found before, in steps in which that changes."""
    Machine(monkeypatch, CHANGING)
    engine, num_changed = adaptive_engine(zoo, "llama~", **SCARCE | {"num_kv_blocks": 60, "prefill_chunk_size": 2}), 0
    decide = AdaptiveSpeculation.decide

    def look(speculation: AdaptiveSpeculation, plan: StepPlan) -> None:
        nonlocal num_changed
        before = speculation.controller.optimum.drafts
        decide(speculation, plan)
        drafts = speculation.controller.optimum.drafts
        is_decided = speculation._load.candidates and speculation.controller.has_tried  # it was compared, or may have been
        if is_decided and max(plan.num_tokens) > 1:
            assert plan.drafts_prompts == drafts
            num_changed += before != drafts

    monkeypatch.setattr(AdaptiveSpeculation, "decide", look)
    assert run_all(engine, PROMPTS, PARAMS) == written(zoo)
    assert num_changed > 0


def test_a_large_cap_crowds_nobody_out(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight requests that draft a few nodes each have 128 tokens per step, not enough for 63 nodes of all."""
    machine = Machine(monkeypatch, target=lambda rows: 1 + 0.1 * rows)
    engine = adaptive_engine(zoo, "llama~", max_draft_tokens=63, max_num_batched_tokens=128, **AMPLE)
    seen = Records(engine)
    assert run_all(engine, PROMPTS[:8], PARAMS[:8]) == written(zoo, LIMITS[:8]) and "on" in machine.choices
    num_rows = [len(rows) for rows in seen.rows[3:]]
    assert num_rows == sorted(num_rows, reverse=True) and num_rows[0] == 8


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError])
def test_what_cannot_be_measured_is_drafted_as_fixed(zoo: Zoo, kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """For lack of memory; a later swap may do better."""
    with monkeypatch.context() as patch:
        patch.setattr("titan.adaptive.profiler.measure", Mock(side_effect=kind("3 GB are missing")))
        with pytest.warns(UserWarning, match="so speculation='fixed' is used: 3 GB") as found:
            engine = adaptive_engine(zoo, "llama~", **AMPLE)
    assert len(found) == 1 and engine.adaptive is None and engine.metrics().speculation is None
    assert run_all(engine, PROMPTS, PARAMS) == written(zoo) and engine.metrics().mean_acceptance_length > 1.3
    engine.swap_draft(zoo.path("llama~"))
    assert engine.adaptive is not None


@pytest.mark.parametrize("speculation", ["adaptive", "off"])
def test_what_cannot_be_measured_bounds_no_prompts(zoo: Zoo, speculation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan.adaptive.profiler.measure", Mock(side_effect=torch.OutOfMemoryError("3 GB are missing")))
    with pytest.warns(UserWarning, match="passes could not be measured, so .*: 3 GB") as found:
        engine = adaptive_engine(zoo, "llama~", speculation=speculation, max_inter_token_s=1e-9, **AMPLE)
    assert "so max_inter_token_s bounds nothing" in str(found[-1].message)
    assert run_all(engine, PROMPTS, PARAMS) == written(zoo)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_measuring_passes_keeps_the_kv_of_requests_that_hold_all_blocks(zoo: Zoo, kv_cache_dtype: str) -> None:
    options: dict[str, Any] = {"block_size": 8, "num_kv_blocks": 3, "kv_cache_dtype": kv_cache_dtype}
    engine = adaptive_engine(zoo, None, **options)
    [expected] = run_all(engine, [PROMPTS[1][:17]], [greedy(6, ignore_eos=True)])
    engine = adaptive_engine(zoo, None, **options)
    [request] = submit(engine, [PROMPTS[1][:17]], [greedy(6, ignore_eos=True)])
    engine.step()
    assert engine.kv.pool.num_free == 0
    before = [group[:, :2].clone() for group in engine.kv.tensors["target"].groups]  # of full blocks
    engine.swap_draft(zoo.path("llama~"))
    assert all(map(torch.equal, before, [group[:, :2] for group in engine.kv.tensors["target"].groups]))
    assert engine.adaptive is not None
    drain(engine)
    assert request.output_token_ids == expected and not engine.counters.num_preemptions


def test_a_draft_whose_passes_fail_while_they_are_measured_leaves_the_current_one(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch)
    engine = adaptive_engine(zoo, "llama~", **AMPLE)
    requests = submit(engine, PROMPTS, PARAMS)
    while not any(engine.kv.pool.is_drafted):
        engine.step()
    before = engine.drafter, engine.adaptive, engine.kv.tensors["draft"], engine.kv.pool.is_drafted[:]
    with monkeypatch.context() as patch:
        patch.setattr("titan.adaptive.profiler.measure", Mock(side_effect=ValueError("a head of 3")))
        with pytest.raises(ValueError, match="a head of 3"):
            engine.swap_draft(zoo.path("other"))
        attach = Mock(wraps=engine.drafter.attach)  # type: ignore[attr-defined]
        patch.setattr(engine.drafter, "attach", attach)
        with pytest.raises(ValueError, match="a head of 3"):
            engine.swap_draft(engine.drafter)
    assert attach.call_count == 2 and attach.call_args.args == (engine.kv.tensors["draft"],), "it has its cache again"
    assert (engine.drafter, engine.adaptive, engine.kv.tensors["draft"], engine.kv.pool.is_drafted) == before
    drain(engine)
    assert [request.output_token_ids for request in requests] == written(zoo)


def test_measuring_passes_loses_no_cached_prefix(zoo: Zoo) -> None:
    """Nor the order of free blocks, even if all of them are cached."""
    for num_blocks, limit in ((30, 12), (4, 12)):
        engine = adaptive_engine(zoo, None, block_size=8, num_kv_blocks=num_blocks)
        pool = engine.kv.pool
        expected = run_all(engine, [PROMPTS[1][:20]], [greedy(limit, ignore_eos=True)])
        [request] = submit(engine, [[3, 4]], [greedy(2)])
        engine.step()  # it holds one more block
        hashes, free = dict(pool._hash_of), (pool._blank[:], list(pool._cached))
        for draft in ("llama~", "other"):
            engine.swap_draft(zoo.path(draft))
            assert engine.adaptive is not None
        assert (pool._hash_of, pool._blank, list(pool._cached)) == (hashes, *free)
        engine.scheduler.abort(request)
        assert run_all(engine, [PROMPTS[1][:20]], [greedy(limit, ignore_eos=True)]) == expected


LIMITED = [{"max_batch_size": 1, "max_draft_tokens": 63}, {"max_model_len": 8}, {"max_batch_size": 2, "max_num_batched_tokens": 2}]


@pytest.mark.parametrize("limits", LIMITED)
@pytest.mark.parametrize("draft", ["llama~", "short", "ngram"])
def test_passes_are_measured_within_all_limits(zoo: Zoo, draft: str, limits: dict[str, int]) -> None:
    """A draft of 40 positions, targets of 8, steps of 2 tokens."""
    engine = adaptive_engine(zoo, draft, **AMPLE | {"max_draft_tokens": 9} | limits)
    found, schedule = engine.metrics().speculation, engine.config.schedule
    assert found is not None and (draft == "ngram") == (not found.draft_pass)
    most = min(schedule.max_num_batched_tokens, schedule.max_batch_size * engine.max_model_len)
    assert all(size <= most and seconds > 0 for size, seconds in (found.target_pass | found.draft_pass).items())
    prompt = PROMPTS[1][:5]
    assert run_all(engine, [prompt], [greedy(3, ignore_eos=True)]) == [zoo.greedy("llama", prompt, 3, ignore_eos=True)]


@pytest.mark.parametrize(("target_ms", "draft_ms"), [(90, 25), (350, 50), (400, 100)])
def test_a_profile_takes_less_than_three_seconds(
    zoo: Zoo, target_ms: float, draft_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of 64 rows take twice as long as those of one, which take half a second of a target of 8 B on a laptop's CPU. The
    first pass of all takes four times as long, which is no part of the curve."""
    now = 0.0
    for module in ("titan.adaptive.measure", "titan.adaptive.profiler", "titan.kernels.growth"):
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(perf_counter=lambda: now))
    engine = adaptive_engine(zoo, None, backend=make_back_end("torch"), max_batch_size=64, num_kv_blocks=128)
    target = engine.runner
    forward = type(target).forward

    def forward_slowly(runner: Any, batch: RaggedBatch, *args: Any) -> Tensor:
        nonlocal now
        factor = (1 + len(batch.token_ids) / 64) * (1.0 if now else 4.0)
        now += (target_ms if runner is target else draft_ms) / 1e3 * factor
        return forward(runner, batch, *args)

    monkeypatch.setattr(type(target), "forward", forward_slowly)
    engine.swap_draft(zoo.path("llama~"))
    assert engine.metrics().profile_s == pytest.approx(now) and 1 < now - 3 * target_ms / 1e3 < 3
    found = engine.metrics().speculation
    assert found is not None and found.target_pass == {
        size: pytest.approx(target_ms / 1e3 * (1 + size / 64)) for size in found.target_pass
    }
    engine.swap_draft(None)
    assert engine.metrics().profile_s == pytest.approx(now), "of the last measurement"


@pytest.mark.parametrize("back_end", ["cpu", "torch"])
def test_passes_of_a_draft_cost_what_its_growth_reports(zoo: Zoo, back_end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what else growth takes, which is the host's time of a step that drafts."""
    backend = make_back_end(back_end)
    few = AMPLE | {"max_batch_size": 4}
    runner = type(adaptive_engine(zoo, "llama~", backend=backend, **few).drafter.runner)  # type: ignore[attr-defined]
    grow = runner.grow

    def grow_and_report(runner: Any, feeds: Sequence[Feed], *args: Any) -> Any:
        trees = grow(runner, feeds, *args)
        assert trees.growth.num_passes == 1 and trees.growth.num_rows == sum(len(feed.token_ids) for feed in feeds)
        return replace(trees, growth=trees.growth._replace(seconds=3.0 + trees.growth.num_rows))

    monkeypatch.setattr(runner, "grow", grow_and_report)
    found = adaptive_engine(zoo, "llama~", backend=backend, **few).metrics().speculation
    assert found is not None and found.draft_pass == {size: pytest.approx(3.0 + size) for size in found.draft_pass}
    assert len(found.draft_pass) > 2 and max(found.target_pass.values()) < 3.0


def test_metrics_say_why_speculation_is_off(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, {0: 0.01, 54: 9.0})
    llm = LLM(zoo.path("llama"), zoo.path("llama"), dtype="float32", device="cpu", num_kv_blocks=64, draft_weight_bits=None)
    for limit in (*range(40, 47), 200):  # in some last steps nothing may be drafted
        assert faults(llm.metrics()) == []
        llm.generate([PROMPTS[1]], greedy(limit, ignore_eos=True), use_tqdm=False)
        found = llm.metrics().speculation
        assert found is not None and (found.choice == "on") == (found.on_rate > found.off_rate) == (limit < 200)
        assert found.off_rate == pytest.approx(1 / 1.1e-3, rel=0.1)
        assert 0.85 < found.acceptance <= 1 and 0.9 < found.agreement < 1.1 and 1 < found.mean_draft_tokens <= 6
        assert found.target_pass[8] == pytest.approx(1e-3, rel=0.1) and (found.draft_pass[1] > 1e-3) == (limit == 200)
        assert found.target_context_token == found.draft_context_token == 0
    assert found is not None
    finding = llm.diagnose()[-1]
    assert finding.startswith(
        f"speculation is off: {found.off_rate:.0f} tokens/s are expected without it, at best {found.on_rate:.0f}"
    )
    hopeless = replace(llm.metrics(), speculation=replace(found, on_rate=0.0, acceptance=0.001))
    assert ["and less with the draft" in finding for finding in faults(hopeless)] == [True], "none of its tokens is worth a try"
    for options in ({"speculation": "fixed"}, {"speculation": "off"}):
        assert adaptive_engine(zoo, "llama~", **AMPLE | options).metrics().speculation is None


@pytest.mark.parametrize("target", ["throughput", "latency"])
def test_for_latency_tokens_count_the_more_the_fewer_there_are(zoo: Zoo, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    choose, weights = Controller.choose, list[tuple[float, ...]]()

    def recorded(controller: Controller, load: Any, **options: Any) -> Any:
        weights.append(tuple(each.weight for each in load.candidates))
        return choose(controller, load, **options)

    monkeypatch.setattr(Controller, "choose", recorded)
    engine = adaptive_engine(zoo, "llama", speculation_target=target, **AMPLE)
    run_all(engine, PROMPTS[1:3], [greedy(40, ignore_eos=True), greedy(20, ignore_eos=True, use_speculative=False)])
    fast, slow = next(pair for pair in reversed(weights) if len(pair) == 2)
    assert weights[0] == (1.0, 1.0) and slow == 1.0 and (fast == 1.0 if target == "throughput" else 0.15 < fast < 0.5)
    found = engine.metrics().speculation
    assert found is not None and found.off_rate == pytest.approx(2 / 1.1e-3, rel=0.01), "in tokens"


def test_options_that_the_draft_does_not_see_teach_only_their_request(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    taught, note = Counter[int](), AcceptanceCounts.note
    monkeypatch.setattr(AcceptanceCounts, "note", lambda counts, *args: (taught.update([id(counts)]), note(counts, *args)))
    engine = adaptive_engine(zoo, "llama~", **AMPLE)
    requests = submit(engine, [PROMPTS[1]] * 2, [greedy(60, ignore_eos=True), greedy(30, repetition_penalty=1.9)])
    drain(engine)
    assert engine.adaptive is not None
    fleet, plain, penalised = map(id, (engine.adaptive.controller.fleet, *(each.draft_history.acceptance for each in requests)))
    assert taught[fleet] == taught[plain] > 10 < taught[penalised] and len(taught) == 3
    assert not engine.adaptive.controller.past.last, "the one that left first tells of no others"
    run_all(engine, PROMPTS[:1], [greedy(20, ignore_eos=True)])
    assert len(engine.adaptive.controller.past.last) == 1, "one has left that tells of others"


def test_passes_of_a_device_take_what_its_marks_say(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the draft tells how many there were, and of how many rows."""
    curves, outcomes, observe = [PassCost([1, 64], [each] * 2) for each in (7.0, 1.0)], list[Outcome](), Controller.observe
    monkeypatch.setattr("titan.adaptive.profiler.measure", lambda *_: curves)
    monkeypatch.setattr(Controller, "observe", lambda *call: (outcomes.append(call[1]), observe(*call)))
    monkeypatch.setattr(Controller, "repeat", lambda *_: False)  # no step is repeated: the controller is told of each
    backend = make_back_end("triton")
    monkeypatch.setattr(backend, "mark", count().__next__)
    monkeypatch.setattr(backend, "seconds_between", lambda marks: [1.0, 0.5, 7.0] if marks == sorted(marks) else [])
    monkeypatch.setattr("titan.engine.time", SimpleNamespace(perf_counter=count().__next__))  # the host takes as long in each step
    engine = adaptive_engine(zoo, "thin", "thin", backend=backend, **AMPLE | {"max_draft_tokens": 3})
    depths = list[int]()
    engine.observers.append(lambda _, acceptance: depths.append(max(acceptance.trees.counts)))
    assert run_all(engine, PROMPTS[2:4], [greedy(15, ignore_eos=True)] * 2) == written(zoo, [0, 0, 15, 15], "thin")[2:]
    drafting = [each for each in outcomes if each.num_nodes]
    assert {(each.draft_seconds, each.target_seconds) for each in drafting} == {(1.0, 7.0)}
    assert len(drafting) > 2 and all(each.num_draft_rows >= each.num_nodes for each in drafting)
    assert [each.num_draft_passes for each in drafting] == [depth for depth in depths if depth]
    drafted = engine.adaptive.controller.costs.draft if engine.adaptive else None
    assert drafted is not None and drafted.predict(2, 0) < 0.8, "of a step with three passes that took a second"


@pytest.mark.parametrize("max_inter_token_s", [None, 1e9])
def test_a_device_is_waited_for_by_who_looks_at_results_or_must_know_their_times(
    zoo: Zoo, max_inter_token_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of three chunks: the second step waits for the first one's pass, behind its own; the third looks at results.

    It begins when the device is done with the second, which is no part of it.
    """
    monkeypatch.setattr("titan.adaptive.profiler.measure", lambda *_: [PassCost([1, 64], [7.0] * 2)])
    backend, numbers = make_back_end("triton"), list[int]()
    seconds_between = backend.seconds_between
    backend.seconds_between = lambda marks: (numbers.append(len(marks)), seconds_between(marks))[1]  # type: ignore[method-assign]
    options = {"prefill_chunk_size": 16, "max_inter_token_s": max_inter_token_s, "speculation": "off"}
    engine = adaptive_engine(zoo, None, "thin", backend=backend, **AMPLE | options)
    submit(engine, [list(range(5, 45))], [greedy(3, ignore_eos=True)])
    drain(engine)
    assert numbers == ([4] * 5 if max_inter_token_s else [1, 1, 4, 4, 4])


def test_logprobs_of_prompts_are_results_that_a_device_is_waited_for(zoo: Zoo) -> None:
    """The first step, of a chunk without them, is not waited for until the second one begins, which looks at its own."""
    backend, numbers = make_back_end("triton"), list[int]()
    seconds_between = backend.seconds_between
    backend.seconds_between = lambda marks: (numbers.append(len(marks)), seconds_between(marks))[1]  # type: ignore[method-assign]
    engine = adaptive_engine(zoo, None, "thin", backend=backend, **AMPLE | {"prefill_chunk_size": 16, "speculation": "off"})
    for prompt, params in ((range(5, 45), greedy(3)), (range(45, 85), greedy(3, prompt_logprobs=0))):
        submit(engine, [list(prompt)], [params])
        engine.step()
    assert numbers == [1, 4] and engine.counters.num_emitted_tokens == 0


@pytest.mark.long_where("triton")
@pytest.mark.parametrize("back_end", ["torch", "cpu", "triton"])
def test_growth_ends_early_where_the_host_can_look(zoo: Zoo, back_end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    engine = adaptive_engine(zoo, "llama~", backend=make_back_end(back_end), **AMPLE)
    seen = Records(engine)
    assert run_all(engine, PROMPTS[2:4], [greedy(10, ignore_eos=True)] * 2) == written(zoo, [0, 0, 10, 10])[2:]
    priced = [isinstance(spec, BeamSpec) and spec.worth is not None for specs in seen.growths.values() for spec in specs]
    assert len(priced) > 3 and any(priced) == (back_end != "triton")


class Rash(BudgetPolicy):
    """Sets the budgets that it was given, whatever is reserved."""

    num_reserved = 2

    def __init__(self, budgets: list[int]) -> None:
        self.budgets = budgets

    def decide(self, plan: StepPlan) -> None:
        plan.draft_budgets[:] = self.budgets


@pytest.mark.parametrize("budgets", [[3, 0], [0, -1], [2], [0, 0, 0]])
def test_budgets_beyond_what_is_reserved_fail_the_step(zoo: Zoo, budgets: list[int]) -> None:
    """Before anything is drafted: slots behind those of a request may be another one's."""
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), speculation="fixed", num_kv_blocks=40)
    engine.adaptive = Rash(budgets)
    submit(engine, [[5] * 9, [6] * 9], [greedy(9)] * 2)
    with pytest.raises(ValueError, match=rf"Rash.decide\(\) left draft_budgets={re.escape(str(budgets))}, .* that of \[2, 2\]"):
        engine.step()

"""Adaptive speculation in engines: whatever times it sees and whatever it decides, tokens are those of the target.

Machines are made up: engines are told what their passes would take on them, so that all decisions are the same in every run.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from back_ends import make_back_end
from stepping import AMPLE, SCARCE, drain, greedy, make_engine, run_all, submit
from zoo import VOCAB_SIZE, Zoo, random_prompts

from titan import LLM, SamplingParams
from titan.adaptive.controller import Controller, Decision, Load
from titan.adaptive.cost import PassCost
from titan.adaptive.speculation import AdaptiveSpeculation, StepTimes
from titan.core.draft_history import AcceptanceCounts
from titan.core.growth import BeamSpec
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import DraftTree, GrowthReport
from titan.draft.base import NoDrafter
from titan.draft.registry import DraftSpec
from titan.engine import Engine
from titan.kernels.interfaces import Runner

PROMPTS = random_prompts(10, seed=3, max_len=50)
NUM_TOKENS = 28
LIMITS = [NUM_TOKENS - i for i in range(10)]
ALWAYS = {"on", "off", "probe"}
Cost = Callable[[float], float]  # milliseconds of rows


def flat(rows: float) -> float:
    return 1.0


def stairs(rows: float) -> float:
    """As much for up to 8 rows, and for each further 8."""
    return float(-(-rows // 8))


@dataclass
class Machine:
    """A processor whose draft may become slow or fast while it runs."""

    target: Cost = flat
    drafts: dict[int, float] = field(default_factory=lambda: {0: 0.01})  # milliseconds of a draft's pass, from each step on
    choices: list[str] = field(default_factory=list)  # of steps that emitted tokens
    num_steps: int = 0

    @property
    def draft_milliseconds(self) -> float:
        return self.drafts[max(step for step in self.drafts if step <= self.num_steps)]

    def curve(self, engine: Engine, runner: Runner, *_: Any) -> PassCost:
        """In place of `Engine._measure`."""
        sizes = (1, 2, 4, 8, 16, 32, 64, 128)
        return PassCost(
            sizes, [(self.target(size) if runner is engine.runner else self.draft_milliseconds) / 1e3 for size in sizes]
        )

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        observe = AdaptiveSpeculation.observe

        def timed(
            adaptive: AdaptiveSpeculation, plan: StepPlan, acceptance: Acceptance, growth: GrowthReport | None, _: StepTimes
        ) -> None:
            target = self.target(sum(plan.num_tokens) + acceptance.trees.num_nodes) / 1e3
            draft = 0.0 if growth is None else growth.num_passes * self.draft_milliseconds / 1e3
            growth = None if growth is None else growth._replace(seconds=draft)
            observe(adaptive, plan, acceptance, growth, StepTimes(target + draft + 1e-4, draft, target))
            self.choices.append(adaptive.metrics(0.0).choice)
            self.num_steps += 1

        monkeypatch.setattr(Engine, "_measure", lambda *args: self.curve(*args))
        monkeypatch.setattr(AdaptiveSpeculation, "observe", timed)


def changing(period: int = 9) -> Machine:
    """Where drafts are as good as free at first, then too slow, and so on."""
    return Machine(drafts={step: (0.01, 9.0)[step // period % 2] for step in range(0, 3000, period)})


def adaptive_engine(zoo: Zoo, draft: DraftSpec, **options: Any) -> Engine:
    return make_engine(zoo.path("llama"), draft, **({"speculation": "adaptive", "draft_tree": "auto"} | options))


class Bush(NoDrafter):
    """Proposes trees of what the target writes, beside other tokens."""

    name = "bush"
    max_draft_tokens = 5
    parents = np.array([-1, -1, 0, 0, 2], np.int32)

    def __init__(self, zoo: Zoo) -> None:
        self.written = {tuple(each): zoo.greedy("llama", each, NUM_TOKENS + 4, ignore_eos=True) for each in PROMPTS}

    def propose(self, plan: StepPlan) -> list[DraftTree]:
        trees = []
        for request, budget in zip(plan.requests, plan.draft_budgets, strict=True):
            right = self.written[tuple(request.prompt_token_ids)][request.num_output_tokens :]
            first, second, third = (*right, 0, 0, 0)[:3]
            trees.append(DraftTree(np.array([first, 5, second, 6, third])[:budget], self.parents[:budget]))
        return trees


def draft_of(zoo: Zoo, name: str | None) -> DraftSpec:
    return Bush(zoo) if name == "bush" else name if name in (None, "ngram") else zoo.path(name)


CASES: dict[str, tuple[str | None, dict[str, Any]]] = {
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
OWN = [{}, {"max_draft_tokens": 2}, {"use_speculative": False}, {}, {"max_draft_tokens": 0}, {}, {}, {}, {}, {}]  # of each request


def expected_tokens(zoo: Zoo) -> list[list[int]]:
    return [zoo.greedy("llama", prompt, limit, ignore_eos=True) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]


def greedy_params() -> list[SamplingParams]:
    return [greedy(limit, ignore_eos=True, **own) for limit, own in zip(LIMITS, OWN, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers_whatever_pays(zoo: Zoo, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (draft, options), machine = CASES[case], changing()
    machine.install(monkeypatch)
    engine = adaptive_engine(zoo, draft_of(zoo, draft), **options)
    assert run_all(engine, PROMPTS, greedy_params()) == expected_tokens(zoo)
    assert set(machine.choices) >= ALWAYS, Counter(machine.choices)
    assert (engine.counters.num_preemptions > 0) == (options.get("num_kv_blocks") == SCARCE["num_kv_blocks"])

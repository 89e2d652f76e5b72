"""The promises of docs/equality.md: the table is read, and its columns are tried in pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from back_ends import make_back_end
from machines import Machine
from stepping import AMPLE, SCARCE, make_engine, run_all
from zoo import Zoo, random_prompts

from titan import SamplingParams
from titan.core.step import StepPlan
from titan.core.terms import PRIORITIES, RequestTerms
from titan.core.trees import DraftTree
from titan.draft.base import CachelessDrafter
from titan.draft.registry import DraftSpec

TABLE = Path(__file__).parents[1] / "docs" / "equality.md"
AXES = {
    "drafter": ("none", "model", "ngram", "custom"),
    "draft_tree": ("auto", "dynamic", "chain", "shape"),
    "draft_sampling": ("auto", "greedy", "sampled"),
    "temperature": ("0", "above 0"),
    "seed": ("own", "engine's"),
    "swap_draft": ("no", "yes"),
    "KV blocks": ("ample", "scarce"),
    "preemption": ("recompute", "swap"),
    "policy": ("fcfs", "priority", "fair"),
    "KV dtype": ("auto", "int8"),
    "back end": ("torch", "cpu"),
    "model_impl": ("native", "transformers", "gathered"),
}
TARGETS = {"native": "llama", "transformers": "llama", "gathered": "gathered"}
PROMISES = {"exact in float32", "same distribution", "refused"}
PROMPTS = random_prompts(4, seed=8, max_len=24)
NUM_TOKENS = 20
USERS = [RequestTerms(user="ab"[i // 2]) for i in range(len(PROMPTS))]
CLASSES = [replace(each, priority=PRIORITIES[2 - i % 3]) for i, each in enumerate(USERS)]
MEMORY = {"ample": AMPLE, "scarce": SCARCE | {"num_kv_blocks": 7}}

Case = dict[str, str]


class Repeating(CachelessDrafter):
    name = "repeating"
    max_draft_tokens = 2

    def propose(self, plan: StepPlan) -> list[DraftTree]:
        pairs = zip(plan.requests, plan.draft_budgets, strict=True)
        return [DraftTree.chain(request.token_ids[: -1 - min(budget, 2) : -1]) for request, budget in pairs]


@cache
def read_table() -> list[tuple[Case, str]]:
    lines = [line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    assert lines[0] == [*AXES, "promise"]
    return [(dict(zip(AXES, cells, strict=False)), cells[-1]) for cells in lines[1:]]


def promise_of(case: Case) -> str:
    return next(
        promise for row, promise in read_table() if all(row[axis] == "any" or case[axis] in row[axis].split(", ") for axis in AXES)
    )


def pairwise() -> Iterator[Case]:
    """Cases in which every two values of different columns meet, each built around a pair that has not."""
    values = [(axis, name) for axis, names in AXES.items() for name in names]
    missing = dict.fromkeys(pair for pair in combinations(values, 2) if pair[0][0] != pair[1][0])
    while missing:
        case = dict(next(iter(missing)))
        for axis, names in AXES.items():
            if axis not in case:
                case[axis] = max(names, key=lambda name: sum(pair in missing for pair in _pairs({**case, axis: name})))
        for pair in _pairs(case):
            missing.pop(pair, None)
        yield {axis: case[axis] for axis in AXES}


def _pairs(case: Case) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    return combinations([(axis, case[axis]) for axis in AXES if axis in case], 2)


def generate(zoo: Zoo, case: Case, speculation: str = "fixed") -> list[list[int]]:
    target, impl = TARGETS[case["model_impl"]], case["model_impl"]
    drafts: dict[str, DraftSpec] = {"none": None, "model": zoo.path(f"{target}~"), "ngram": "ngram", "custom": Repeating()}
    shape = [-1, -1, 0, 0, 1] if case["draft_tree"] == "shape" else case["draft_tree"]
    is_scarce, swaps = case["KV blocks"] == "scarce", case["preemption"] == "swap"
    options: dict[str, Any] = {
        "draft_tree": shape, "draft_sampling": case["draft_sampling"], "speculation": speculation,
        "preemption_mode": case["preemption"], "swap_space": 2**20 if swaps else 0,
        "scheduling_policy": case["policy"], "kv_cache_dtype": case["KV dtype"],
        "model_impl": "auto" if impl == "gathered" else impl,
    }  # fmt: skip
    backend, draft = make_back_end(case["back end"]), drafts[case["drafter"]]
    engine = make_engine(zoo.path(target), draft, backend=backend, **options, **MEMORY[case["KV blocks"]])

    assert engine.metrics().model_impl == impl

    def swap(step: int) -> None:
        if case["swap_draft"] == "yes" and step in (5, 9):
            engine.swap_draft(None if step == 5 else draft)

    temperature = 0.0 if case["temperature"] == "0" else 0.8
    params = [
        SamplingParams(temperature=temperature, seed=i if case["seed"] == "own" else None, max_tokens=NUM_TOKENS)
        for i in range(len(PROMPTS))
    ]
    outputs = run_all(engine, PROMPTS, params, before_step=swap, terms=CLASSES if case["policy"] == "priority" else USERS)
    assert (engine.counters.num_preemptions > 0, engine.counters.num_swapped_out > 0) == (is_scarce, is_scarce and swaps)
    if case["drafter"] == "model" and speculation == "fixed":
        assert sum(engine.counters.accepted_per_depth) > 0
    return outputs


PLAIN_AXES = ("temperature", "seed", "KV dtype", "back end", "model_impl")
Plain = Callable[[Case], list[list[int]]]
"""Outputs of a case without speculation."""


@pytest.fixture(scope="module")
def plain(zoo: Zoo) -> Plain:
    """Those at temperature 0 are of transformers, the others of PyTorch; quantised KV is compared within a back end."""
    first = {axis: names[0] for axis, names in AXES.items()}

    @cache
    def of(values: tuple[str, ...]) -> list[list[int]]:
        case = first | dict(zip(PLAIN_AXES, values, strict=True))
        if case["KV dtype"] == "auto" and case["temperature"] == "0":
            return [zoo.greedy(TARGETS[case["model_impl"]], prompt, NUM_TOKENS) for prompt in PROMPTS]
        return generate(zoo, case | ({"back end": "torch"} if case["KV dtype"] == "auto" else {}))

    return lambda case: of(tuple(case[axis] for axis in PLAIN_AXES))


def test_every_case_has_a_promise() -> None:
    cases = product(*(names if any(row[axis] != "any" for row, _ in read_table()) else names[:1] for axis, names in AXES.items()))
    assert {promise_of(dict(zip(AXES, case, strict=True))) for case in cases} == PROMISES


@pytest.mark.parametrize("case", list(pairwise()), ids=lambda case: "-".join(case.values()))
def test_promises_are_kept(zoo: Zoo, plain: Plain, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """That sampled drafts keep the distribution is shown in tests/verify/test_distribution.py; here, that a seed repeats them."""
    match promise_of(case):
        case "refused":
            with pytest.raises(ValueError, match="needs a draft model"):
                generate(zoo, case)
        case "exact in float32":
            Machine(monkeypatch, {step: (0.01, 9.0)[step // 6 % 2] for step in range(0, 300, 6)})
            for speculation in ("fixed", "adaptive"):
                assert generate(zoo, case, speculation) == plain(case)
        case "same distribution":
            outputs = generate(zoo, case)
            assert outputs == generate(zoo, case) != plain(case)

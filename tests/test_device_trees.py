"""Engines whose trees stay on the device, on the Triton kernels, against the same engines on PyTorch: the same step by step."""

from __future__ import annotations

import re
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cpu_kernels import choose_cpu_kernels
from interpreted import DEVICE, take_triton
from stepping import check_blocks, make_engine, submit
from zoo import Zoo, random_prompts

from titan.core.device_trees import DeviceTrees, TreeOutline
from titan.core.sampling_params import SamplingParams
from titan.draft.device_growth import device_trees
from titan.engine import Engine
from titan.execute.batch import Segment, build_batch
from titan.kernels.triton.tree_nodes import allocate_nodes
from titan.kernels.upload import download
from titan.verify import device_accept

CPU = torch.device("cpu")
PROMPTS = [*random_prompts(3, seed=6, max_len=9), random_prompts(1, seed=7, max_len=25)[0]]
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"draft_tree": "chain", "max_draft_tokens": 4},
    "auto": {"draft_tree": "auto", "max_draft_tokens": 7},
    "dynamic": {"draft_tree": "dynamic", "max_draft_tokens": 9},
    "parents": {"draft_tree": [-1, -1, 0, 0, 1, 2, 5], "max_draft_tokens": 7},
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}] * 4,
    "sampled": [
        {"temperature": 0.8},
        {"temperature": 1.2, "top_k": 3},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9, "min_p": 0.02},
    ],
    "looking back": [
        {"temperature": 0.8, "repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 0.0, "min_tokens": 3, "ignore_eos": False},
        {"temperature": 0.0, "logit_bias": {7: 3.0}, "use_speculative": False},
        {"temperature": 1.0, "presence_penalty": 0.5},
    ],
}
NUM_COLUMNS = 4
"""Of trees on the device, brought to the host."""

POOL: dict[str, Any] = {"max_batch_size": 4, "prefill_chunk_size": 6, "num_kv_blocks": 40, "max_num_batched_tokens": 40}


class Trace(NamedTuple):
    """A run, step by step."""

    steps: list[Any]  # what each of them found
    matches: list[tuple[int, float, float]]  # probabilities, which are rounded
    histories: list[Any]  # what was learnt of each request
    proposed_per_depth: list[int]
    accepted_per_depth: list[int]


def trace(engine: Engine, options: list[dict[str, Any]], max_tokens: int = 4, prompts: list[list[int]] = PROMPTS) -> Trace:
    """Run all prompts."""
    steps: list[Any] = []
    matches: list[tuple[int, float, float]] = []

    def observe(plan: Any, acceptance: Any) -> None:
        trees = [(tree.token_ids.tolist(), tree.parents.tolist()) for tree in acceptance.trees]
        slots = [[] if tree.draft_slots is None else tree.draft_slots.tolist() for tree in acceptance.trees]
        matches.extend((i, *match) for i, match in acceptance.matches.items())
        steps.append((trees, slots, acceptance.paths, acceptance.token_ids, acceptance.errors))

    engine.observers.append(observe)
    params = [SamplingParams(max_tokens=max_tokens, seed=i, **({"ignore_eos": True} | each)) for i, each in enumerate(options)]
    requests = submit(engine, prompts, params)
    while engine.scheduler.has_unfinished:
        engine.step()
        check_blocks(engine)
    assert [request.error for request in requests] == [None] * len(requests)
    histories = [asdict(request.draft_history) for request in requests]
    learnt = [[each[name] for name in ("num_drafts", "tree_depth", "num_confidences", "rank_acceptance")] for each in histories]
    return Trace(steps, matches, learnt, engine.counters.proposed_per_depth, engine.counters.accepted_per_depth)


def assert_same(actual: Trace, expected: Trace) -> None:
    assert actual._replace(matches=[]) == expected._replace(matches=[])
    np.testing.assert_allclose(actual.matches, expected.matches, atol=1e-4)


def count_downloads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that receives the number of tensors of each copy to the host."""
    counts: list[int] = []

    def counted(tensors: Any) -> Any:
        counts.append(len(tensors))
        return download(tensors)

    monkeypatch.setattr(device_accept, "download", counted)
    return counts


CASES = [
    ("chain", "sampled", "greedy"),
    ("auto", "greedy", "greedy"),
    ("auto", "sampled", "sampled"),
    ("dynamic", "sampled", "greedy"),
    ("dynamic", "looking back", "greedy"),
    ("parents", "greedy", "greedy"),
    ("parents", "looking back", "sampled"),
]


@pytest.mark.parametrize(("shape", "options", "draft_sampling"), CASES)
def test_steps_on_triton_are_those_on_pytorch(
    shape: str, options: str, draft_sampling: str, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(device: torch.device) -> Trace:
        choice = POOL | SHAPES[shape] | {"draft_sampling": draft_sampling, "device": str(device)}
        return trace(make_engine(zoo.path("short"), zoo.path("short~"), **choice), OPTIONS[options])

    choose_cpu_kernels(monkeypatch, "torch")
    expected = run(CPU)
    take_triton(monkeypatch)
    downloads = count_downloads(monkeypatch)
    assert_same(run(DEVICE), expected)
    assert len(downloads) - downloads.count(NUM_COLUMNS) <= len(expected.steps), "one look per step; none where nothing is drafted"
    assert (NUM_COLUMNS in downloads) == (options == "looking back"), "the trees alone, because options look at them"
    assert sum(expected.accepted_per_depth) >= 3


@pytest.mark.parametrize(("shape", "options"), [("chain", "sampled"), ("auto", "looking back"), ("parents", "sampled")])
def test_drawn_trees_of_the_host_are_verified_on_triton(
    shape: str, options: str, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a drafter may propose them that knows nothing of trees on the device; some of each step are not drawn."""

    def run(device: torch.device) -> Trace:
        choice = POOL | SHAPES[shape] | {"draft_sampling": "sampled", "device": str(device)}
        return trace(make_engine(zoo.path("short"), zoo.path("short~"), **choice), OPTIONS[options])

    choose_cpu_kernels(monkeypatch, "torch")
    expected = run(CPU)
    take_triton(monkeypatch)
    monkeypatch.setattr("titan.draft.draft_model.backend", SimpleNamespace(takes_triton=lambda device: False))
    downloads = count_downloads(monkeypatch)
    assert_same(run(DEVICE), expected)
    assert len(downloads) >= 2 and NUM_COLUMNS not in downloads, "the trees are known"
    assert sum(expected.accepted_per_depth) >= 3


@pytest.mark.parametrize("draft_sampling", ["greedy", "sampled"])
def test_a_draft_without_enough_tokens_leaves_places_empty(draft_sampling: str, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-k cuts siblings of drawn shapes; a vocabulary of eight has too few for a beam of that width; a draft breaks down."""
    options: list[dict[str, Any]] = [{"temperature": 1.0, "top_k": 1}, {"temperature": 1.3, "top_k": 2}, {"temperature": 0.0}]
    choices: dict[str, Any] = POOL | {"draft_sampling": draft_sampling, "max_draft_tokens": 12}
    choices["draft_tree"] = "dynamic" if draft_sampling == "greedy" else [-1, -1, -1, 0, 0, 1, 3, 3]
    num_empty = 0

    def run(device: torch.device) -> Trace:
        engine = make_engine(zoo.path("eight"), zoo.path("eight"), device=str(device), **choices)
        runner: Any = engine.drafter.runner  # type: ignore[attr-defined]
        forward, num_passes = runner.forward, 0

        def breaking_down(batch: Any) -> torch.Tensor:
            nonlocal num_passes
            num_passes += 1
            logits: torch.Tensor = forward(batch).clone()
            if num_passes % 4 == 3:
                logits[:1] = torch.nan
            return logits

        runner.forward = breaking_down
        return trace(engine, options, 11, [[3, 4], [5, 6, 7], [4]])

    def counted(*args: Any) -> DeviceTrees:
        nonlocal num_empty
        trees = device_trees(*args)
        num_empty += int((trees.nodes.token_ids < 0).sum())
        return trees

    choose_cpu_kernels(monkeypatch, "torch")
    expected = run(CPU)
    take_triton(monkeypatch)
    monkeypatch.setattr("titan.draft.draft_model.device_trees", counted)
    assert_same(run(DEVICE), expected)
    assert num_empty > 0 and sum(expected.accepted_per_depth) > 0


def test_a_tree_that_is_larger_than_its_budget_is_refused(zoo: Zoo) -> None:
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), max_draft_tokens=3, num_kv_blocks=40)
    submit(engine, [[5, 6]], [SamplingParams(max_tokens=9)])
    plan = engine.scheduler.schedule(3)
    trees = DeviceTrees([TreeOutline(4)], allocate_nodes(4, DEVICE))
    with pytest.raises(ValueError, match="proposed 4 nodes: at most 3 were allowed"):
        engine.build_batch(plan, trees)


@pytest.mark.parametrize(
    ("outlines", "num_nodes", "q", "temperature", "message"),
    [
        ([TreeOutline(2)] * 2, 4, None, 0.0, "proposed 2 trees: the plan has 1 rows"),
        ([], 0, None, 0.0, "proposed 0 trees: the plan has 1 rows"),
        ([TreeOutline(2)], 3, None, 0.0, "gave nodes.token_ids of length 3: the outlines have 2 nodes"),
        ([TreeOutline(2, is_drawn=True)], 2, (131, 3), 0.0, "drew a tree at temperature 0: it may at temperatures above 0 only"),
        (
            [TreeOutline(2, is_drawn=True)],
            2,
            None,
            1.0,
            "gave draft_probs of shape None and 0 draft_rows: they must be [any, 131] and 3,",
        ),
        ([TreeOutline(2, is_drawn=True)], 2, (9, 3), 1.0, "gave draft_probs of shape [2, 9] and 3 draft_rows: they must be"),
        ([TreeOutline(2, is_drawn=True)], 2, (131, 2), 1.0, "gave draft_probs of shape [2, 131] and 2 draft_rows: they must be"),
    ],
)
def test_trees_that_are_not_what_their_outlines_say_are_refused(
    outlines: list[TreeOutline], num_nodes: int, q: tuple[int, int] | None, temperature: float, message: str, zoo: Zoo
) -> None:
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), max_draft_tokens=3, num_kv_blocks=40)
    submit(engine, [[5, 6]], [SamplingParams(max_tokens=9, temperature=temperature)])
    plan = engine.scheduler.schedule(3)
    probs, rows = (None, None) if q is None else (torch.zeros(2, q[0]), torch.zeros(q[1], dtype=torch.int32))
    with pytest.raises(ValueError, match=re.escape(message)):
        engine.build_batch(plan, DeviceTrees(outlines, allocate_nodes(num_nodes, CPU), probs, rows))


def test_places_in_a_batch_bound_what_the_device_will_write() -> None:
    """Positions that the host checks are no smaller than any that a tree of so many nodes can have."""
    for num_nodes in (1, 5, 63):
        for outline in (TreeOutline(num_nodes), TreeOutline(num_nodes, is_chain=True)):
            [branching, chunk] = (
                Segment([0] * 9, start, [3] * (root + 1 - start), outline, root_position=root)
                for start, root in ((40, 40), (10, 30))
            )
            batch = build_batch([branching, chunk], block_size=16)
            layout = batch.attention
            ends = layout.query_start_loc[1:] - 1
            assert layout.positions[ends].tolist() == [40 + num_nodes, 30 + num_nodes]
            assert (layout.tree_starts.tolist() == [0, 0]) == outline.is_chain
            assert layout.seq_lens.tolist() == [41 + num_nodes, 31 + num_nodes]

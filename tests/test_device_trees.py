"""Engines whose trees stay on the device, on the Triton kernels, against the same engines on PyTorch: the same step by step."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from interpreted import DEVICE, take_triton
from stepping import check_blocks, make_engine, submit
from zoo import Zoo, random_prompts

from titan.engine import Engine
from titan.kernels.upload import download
from titan.sampling_params import SamplingParams
from titan.verify import device_accept

CPU = torch.device("cpu")
PROMPTS = random_prompts(4, seed=6, max_len=25)
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"draft_tree": "chain", "max_draft_tokens": 4},
    "auto": {"draft_tree": "auto", "max_draft_tokens": 7},
    "dynamic": {"draft_tree": "dynamic", "max_draft_tokens": 9},
    "parents": {"draft_tree": [-1, -1, 0, 0, 1, 2, 5], "max_draft_tokens": 7},
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}] * 4,
    "sampled": [{"temperature": 0.8}, {"temperature": 1.2, "top_k": 3}, {"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}],
    "looking back": [
        {"temperature": 0.8, "repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 0.0, "min_tokens": 5, "ignore_eos": False},
        {"temperature": 0.0, "logit_bias": {7: 3.0}, "use_speculative": False},
        {"temperature": 1.0, "presence_penalty": 0.5},
    ],
}
NUM_COLUMNS = 4
"""Of trees on the device, brought to the host."""

POOL: dict[str, Any] = {"max_batch_size": 4, "prefill_chunk_size": 16, "num_kv_blocks": 40, "max_num_batched_tokens": 40}


class Trace(NamedTuple):
    """A run, step by step."""

    steps: list[Any]  # what each of them found
    matches: list[tuple[int, float, float]]  # probabilities, which are rounded
    histories: list[Any]  # what was learnt of each request
    proposed_per_depth: list[int]
    accepted_per_depth: list[int]


def trace(engine: Engine, options: list[dict[str, Any]]) -> Trace:
    """Run all prompts."""
    steps: list[Any] = []
    matches: list[tuple[int, float, float]] = []

    def observe(plan: Any, acceptance: Any) -> None:
        trees = [(tree.token_ids.tolist(), tree.parents.tolist()) for tree in acceptance.trees]
        slots = [[] if tree.draft_slots is None else tree.draft_slots.tolist() for tree in acceptance.trees]
        matches.extend((i, *match) for i, match in acceptance.matches.items())
        steps.append((trees, slots, acceptance.paths, acceptance.token_ids, acceptance.errors))

    engine.observers.append(observe)
    params = [SamplingParams(max_tokens=6, seed=i, **({"ignore_eos": True} | each)) for i, each in enumerate(options)]
    requests = submit(engine, PROMPTS, params)
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

    monkeypatch.setenv("TITAN_CPU_KERNELS", "torch")
    expected = run(CPU)
    take_triton(monkeypatch)
    downloads = count_downloads(monkeypatch)
    assert_same(run(DEVICE), expected)
    assert len(downloads) - downloads.count(NUM_COLUMNS) <= len(expected.steps), "one look per step; none where nothing is drafted"
    assert (NUM_COLUMNS in downloads) == (options == "looking back"), "the trees alone, because options look at them"
    assert sum(expected.accepted_per_depth) >= 3

"""The host's part of a step: scheduling, batch building, plans, tree growth, commit, and a whole step without its models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from titan.bench.micro.stage import CONTEXT_LEN, MAX_OUTPUT_LEN, NUM_DRAFT_TOKENS, Stage, make_engine
from titan.core.step import Acceptance
from titan.core.trees import MAX_NODES
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.policy import DraftPolicy
from titan.draft.tree_builder import Growth
from titan.execute.batch import RaggedBatch
from titan.models.loader import DEMO

Measure = Callable[..., Any]
pytestmark = pytest.mark.benchmark(group="host")


def test_schedule(measure: Measure, stage: Stage) -> None:
    """The plan of a step whose blocks are reserved."""
    measure(stage.engine.scheduler.schedule, NUM_DRAFT_TOKENS)


def test_build_batch(measure: Measure, stage: Stage) -> None:
    """The ragged batch of a verification."""
    measure(stage.engine.build_batch, stage.plan, stage.trees)


def test_plan_attention(measure: Measure, stage: Stage) -> None:
    """What attention prepares once per step."""
    measure(stage.model.ops.plan_attention, stage.batch.attention, stage.model.config.windows)


def grow(growths: list[tuple[list[int], Growth]], logits: torch.Tensor) -> None:
    """Grow trees as a draft model does, from the same logits at every node."""
    for rows, growth in growths:
        growth.plant(logits[: len(rows)])
        for depth in range(1, max(map(len, growth.feeds)) + 1):
            num_nodes = len(growth.frontier(depth).token_ids)
            growth.grow(depth, logits[:num_nodes])
        growth.harvest()


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_grow(measure: Measure, stage: Stage, tree: str) -> None:
    """The growth of a step's trees, the draft's passes left out."""
    requests = stage.plan.requests
    policy = DraftPolicy(tree, "greedy", NUM_DRAFT_TOKENS)
    logits = stage.logits[:1].expand(len(requests) * MAX_NODES, -1).contiguous()

    def run() -> None:
        grow(policy.growths(requests, stage.plan.draft_budgets, lambda *_: True), logits)

    measure(run)


def test_commit(measure: Measure, stage: Stage) -> None:
    """The commit of accepted paths that are not where they belong: the last node of each tree and its ancestors."""
    paths = [tree.path_to(tree.num_nodes - 1) for tree in stage.acceptance.trees]
    # the target's KV alone: the draft's coverage would grow
    trees = [replace(tree, draft_slots=None) for tree in stage.acceptance.trees]
    acceptance = Acceptance(trees, paths, stage.acceptance.token_ids, stage.acceptance.errors)
    measure(stage.engine.kv.commit, stage.plan, acceptance)


@pytest.mark.parametrize("draft", [None, DEMO], ids=["no draft", "draft"])
def test_step(benchmark: Any, num_requests: int, seed: int, draft: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole step with the passes of its models taken out: what the host takes of it."""
    engine = make_engine(num_requests, seed, draft=draft)
    vocab_size = engine.model_config.vocab_size
    logits = torch.randn(num_requests * (MAX_NODES + 1), vocab_size, generator=torch.Generator().manual_seed(0))
    logits = logits.to(engine.device, engine.dtype)
    monkeypatch.setattr(engine.runner, "forward", lambda batch: logits[: len(batch.logits_rows)])
    if isinstance(engine.drafter, DraftModelDrafter):
        monkeypatch.setattr(engine.drafter, "model", _Silent(logits))
    num_rounds = (MAX_OUTPUT_LEN - CONTEXT_LEN) // (NUM_DRAFT_TOKENS + 1)  # no request ends on the way
    benchmark.pedantic(engine.step, rounds=num_rounds, warmup_rounds=5)


class _Silent:
    """A model that returns given logits, whatever it is fed."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def __call__(self, batch: RaggedBatch, *_: Any) -> torch.Tensor:
        return self.logits[: len(batch.logits_rows)]

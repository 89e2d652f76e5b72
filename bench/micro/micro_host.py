"""The host's part of a step: scheduling, batch building, plans, tree growth, commit, and a whole step without its models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from titan.bench.micro.backlog import Backlog
from titan.bench.micro.stage import CONTEXT_LEN, MAX_OUTPUT_LEN, NUM_DRAFT_TOKENS, SilentRunner, Stage, make_engine
from titan.core.growth import Feed
from titan.core.limits import MAX_NODES
from titan.core.options import SCHEDULING_POLICIES
from titan.core.step import Acceptance
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.policy import DraftPolicy
from titan.execute.batch import target_batch
from titan.models.loader import DEMO

Measure = Callable[..., Any]
pytestmark = pytest.mark.benchmark(group="host")


def test_schedule(measure: Measure, stage: Stage) -> None:
    """The plan of a step whose blocks are reserved."""
    measure(stage.engine.scheduler.schedule, NUM_DRAFT_TOKENS, stage.engine.drafting.lookahead)


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_update_and_schedule(benchmark: Any, policy: str) -> None:
    """The end of a step and the plan of the next, with 256 running requests and 2,000 waiting ones."""
    backlog = Backlog(policy)
    benchmark.pedantic(backlog.run, setup=lambda: ((backlog.verify(),), {}), rounds=200)


def test_build_batch(measure: Measure, stage: Stage) -> None:
    """The ragged batch of a verification."""
    measure(target_batch, stage.plan, stage.trees, block_size=stage.kv.block_size)


def test_plan_attention(measure: Measure, stage: Stage) -> None:
    """What attention prepares once per step."""
    measure(stage.call_of_pass("plan_attention"))


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_grow(measure: Measure, stage: Stage, tree: str) -> None:
    """The growth of a step's trees over passes, from the same logits at every node, the draft's passes left out."""
    plan, policy = stage.plan, DraftPolicy(tree, "greedy", NUM_DRAFT_TOKENS)
    logits = stage.logits[:1].expand(len(plan.requests) * MAX_NODES, -1).contiguous()
    runner = SilentRunner(stage.engine, logits)

    def run() -> None:
        feeds = [
            Feed(i, request.block_ids, request.num_tokens - 1, request.token_ids[-1:], policy.spec(request, budget, num_slots))
            for i, (request, budget, num_slots) in enumerate(zip(plan.requests, plan.draft_budgets, plan.num_slots, strict=True))
        ]
        runner.grow(feeds, len(plan.requests), logits.shape[1])

    measure(run)


def test_commit(measure: Measure, stage: Stage) -> None:
    """The commit of accepted paths that are not where they belong: the last node of each tree and its ancestors."""
    found = stage.verify()
    trees = found.trees
    last_bits = [int(trees[i].topology.ancestor_bits[-1]) for i in range(trees.num_rows)]
    paths = [[node for node in range(NUM_DRAFT_TOKENS) if bits >> node & 1] for bits in last_bits]
    # the target's KV alone: the draft's coverage would grow
    trees = replace(trees, nodes=trees.nodes._replace(draft_slots=np.full_like(trees.nodes.draft_slots, -1)))
    measure(stage.engine.kv.commit, stage.plan, Acceptance(trees, paths, found.token_ids, found.errors))


@pytest.mark.parametrize("draft", [None, DEMO], ids=["no draft", "draft"])
def test_step(benchmark: Any, num_requests: int, seed: int, draft: str | None) -> None:
    """A whole step with the passes of its models taken out: what the host takes of it."""
    engine = make_engine(num_requests, seed, draft=draft)
    vocab_size = engine.model_config.vocab_size
    logits = torch.randn(num_requests * (MAX_NODES + 1), vocab_size, generator=torch.Generator().manual_seed(0))
    runner = SilentRunner(engine, logits.to(engine.backend.device, engine.dtype))
    engine.runner = runner
    if isinstance(engine.drafter, DraftModelDrafter):
        engine.drafter.runner = runner
    num_rounds = (MAX_OUTPUT_LEN - CONTEXT_LEN) // (NUM_DRAFT_TOKENS + 1)  # no request ends on the way
    benchmark.pedantic(engine.step, rounds=num_rounds, warmup_rounds=5)

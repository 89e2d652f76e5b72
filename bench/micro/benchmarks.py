"""What the micro-benchmarks time: kernels at the shapes of the demo target, and the host's part of a step.

A function takes a stage and returns the call to be timed; ``None`` where there is nothing to time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from titan import SamplingParams
from titan.bench.micro.stage import (
    CONTEXT_LEN,
    MAX_OUTPUT_LEN,
    NUM_DRAFT_TOKENS,
    Call,
    SilentRunner,
    Stage,
    make_engine,
    make_stage,
)
from titan.core.batch import QueryRow, RaggedBatch, build_batch
from titan.core.growth import Feed
from titan.core.kv_tensor import KVTensor
from titan.core.limits import MAX_NODES
from titan.core.sampling_rows import SamplingRows
from titan.core.step import Acceptance
from titan.core.trees import DraftTrees
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.policy import DraftPolicy
from titan.execute.batch import target_batch
from titan.kernels.interfaces import PathMove
from titan.kernels.torch.layers import TorchOps
from titan.models.loader import DEMO

PREFILL_LEN = 512
NUM_STEPS = (MAX_OUTPUT_LEN - CONTEXT_LEN) // (NUM_DRAFT_TOKENS + 1)
"""In which no request ends."""

Prepare = Callable[[Stage], Call | None]


def operation(stage: Stage, name: str, kind: str, ops: str) -> Call | None:
    """An operation of a pass as the last layer calls it: those that this device and dtype get, or the plain ones beside them.

    Attention overwrites slots of others, whose values nobody reads afterwards.
    """
    if kind == "prefill" and stage.num_requests > 1:
        return None
    if ops == "chosen":
        return stage.call_of_pass(name, batch=batch_of(stage, kind))
    plain, is_chosen = TorchOps(stage.backend.device), isinstance(stage.model.ops, TorchOps)
    return None if is_chosen else stage.call_of_pass(name, ops=plain, batch=batch_of(stage, kind))


def batch_of(stage: Stage, kind: str) -> RaggedBatch:
    """A root and a draft tree per request, one token per request, or a prefill chunk beside no context."""
    block_size = stage.kv.block_size
    if kind == "verify":
        return stage.batch
    if kind == "decode":
        no_trees = DraftTrees.empty(stage.num_requests, stage.backend.device)
        return target_batch(stage.plan, no_trees, block_size=block_size)
    row = QueryRow(list(range(-(-PREFILL_LEN // block_size))), 0, [0] * PREFILL_LEN)
    return build_batch([row], block_size=block_size)


def move_paths(stage: Stage) -> Call:
    """An accepted path of two nodes per request moved by one slot."""
    moves = [PathMove(request.block_ids, request.num_tokens, [1, 2]) for request in stage.plan.requests]
    return partial(stage.backend.cache.move_paths, stage.kv, moves)


def clear_blocks(stage: Stage) -> Call:
    """One new block per request."""
    kv = KVTensor(stage.kv.layout, stage.num_requests, stage.kv.block_size, stage.backend.device)
    return partial(stage.backend.cache.clear_blocks, kv, np.arange(kv.num_blocks))


def sample(stage: Stage, params: SamplingParams) -> Call:
    """A token for every row of a verification, as where nothing is drafted."""
    num_rows = len(stage.logits)
    no_trees = DraftTrees.empty(num_rows, stage.backend.device)
    options = SamplingRows.of((params, row, row) for row in range(num_rows))
    return partial(stage.backend.trees.verify, stage.logits, no_trees, np.arange(num_rows), options)


def accept(stage: Stage, draft_tree: str, temperature: float) -> Call:
    """Acceptance of greedy dynamic trees, or rejection over siblings."""
    return make_stage(stage.num_requests, stage.seed, draft_tree=draft_tree, temperature=temperature).verify


def grow(stage: Stage, tree: str) -> Call:
    """The growth of a step's trees over passes, from the same logits at every node, the draft's passes left out."""
    plan, policy = stage.plan, DraftPolicy(tree, "greedy", NUM_DRAFT_TOKENS)
    logits = stage.logits[:1].expand(stage.num_requests * MAX_NODES, -1).contiguous()
    runner = SilentRunner(stage.engine, logits)

    def run() -> None:
        feeds = [
            Feed(i, request.block_ids, request.num_tokens - 1, request.token_ids[-1:], policy.spec(request, budget, num_slots))
            for i, (request, budget, num_slots) in enumerate(zip(plan.requests, plan.draft_budgets, plan.num_slots, strict=True))
        ]
        runner.grow(feeds, len(plan.requests), logits.shape[1])

    return run


def commit(stage: Stage) -> Call:
    """The commit of accepted paths that are not where they belong: the last node of each tree and its ancestors."""
    found = stage.verify()
    trees = found.trees
    last_bits = [int(trees[i].topology.ancestor_bits[-1]) for i in range(trees.num_rows)]
    paths = [[node for node in range(NUM_DRAFT_TOKENS) if bits >> node & 1] for bits in last_bits]
    # the target's KV alone: the draft's coverage would grow
    trees = replace(trees, nodes=trees.nodes._replace(draft_slots=np.full_like(trees.nodes.draft_slots, -1)))
    return partial(stage.engine.kv.commit, stage.plan, Acceptance(trees, paths, found.token_ids, found.errors))


def step(stage: Stage, draft: str | None) -> Call:
    """A whole step with the passes of its models taken out: what the host takes of it."""
    engine = make_engine(stage.num_requests, stage.seed, draft=draft)
    shape = stage.num_requests * (MAX_NODES + 1), engine.model_config.vocab_size
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(engine.backend.device, engine.dtype)
    engine.runner = SilentRunner(engine, logits)
    if isinstance(engine.drafter, DraftModelDrafter):
        engine.drafter.runner = engine.runner
    return engine.step


KERNELS: dict[str, Prepare] = {
    **{
        f"{name}-{kind}-{ops}": partial(operation, name=name, kind=kind, ops=ops)
        for name, kinds in {
            "tree_attention": ("verify", "decode", "prefill"),
            "rms_norm": ("verify",),
            "rope_and_write_kv": ("verify",),
            "silu_mul": ("verify",),
        }.items()
        for kind in kinds
        for ops in ("chosen", "PyTorch")
    },
    "linear-gate and up": lambda stage: stage.call_of_pass("linear", -2),
    "linear-head": lambda stage: stage.call_of_pass("linear"),
    "linear-output and norm": lambda stage: stage.call_of_pass("linear_add_norm", -2),
    "move_paths": move_paths,
    "clear_blocks": clear_blocks,
    "sample-greedy": partial(sample, params=SamplingParams(temperature=0)),
    "sample-T=0.8": partial(sample, params=SamplingParams(temperature=0.8)),
    "sample-T=0.8 top-p": partial(sample, params=SamplingParams(temperature=0.8, top_p=0.95)),
    "accept-greedy": partial(accept, draft_tree="dynamic", temperature=0.0),
    "accept-sampled": partial(accept, draft_tree="auto", temperature=0.8),
}
STEPS: dict[str, Prepare] = {"step-no draft": partial(step, draft=None), "step-draft": partial(step, draft=DEMO)}
"""Their calls can be made `NUM_STEPS` times."""
HOST: dict[str, Prepare] = {
    "schedule": lambda stage: partial(stage.engine.scheduler.schedule, NUM_DRAFT_TOKENS, stage.engine._lookahead),
    "build_batch": lambda stage: partial(target_batch, stage.plan, stage.trees, block_size=stage.kv.block_size),
    "plan_attention": lambda stage: stage.call_of_pass("plan_attention"),
    "grow-chain": partial(grow, tree="chain"),
    "grow-dynamic": partial(grow, tree="dynamic"),
    "commit": commit,
    **STEPS,
}

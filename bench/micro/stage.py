"""An engine stopped in the middle of a step: what the micro-benchmarks call its parts with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from titan import LLM, SamplingParams
from titan.bench.prompts import random_prompts
from titan.bench.workloads import Lengths
from titan.core.device_trees import Proposal
from titan.core.step import Acceptance, StepPlan
from titan.engine import Engine
from titan.execute.batch import RaggedBatch
from titan.models.decoder import Decoder
from titan.models.loader import DEMO
from titan.verify.accept import accept

CONTEXT_LEN = 128
NUM_DRAFT_TOKENS = 8
MAX_OUTPUT_LEN = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """The demo pair with requests in flight, behind the verification of a step and before its commit."""

    engine: Engine
    plan: StepPlan
    trees: Proposal
    batch: RaggedBatch
    logits: Tensor  # [L, vocab]
    acceptance: Acceptance

    @property
    def model(self) -> Decoder:
        """The target."""
        return self.engine.runner.model

    @property
    def kv(self) -> Tensor:
        """The target's KV."""
        return self.engine.kv.tensors["target"]


def make_engine(
    num_requests: int, seed: int, *, draft: str | None = DEMO, draft_tree: str = "dynamic", temperature: float = 0.0
) -> Engine:
    """Return an engine whose requests all have their prompts of `CONTEXT_LEN` random tokens behind them."""
    llm = LLM(
        DEMO,
        draft,
        max_draft_tokens=NUM_DRAFT_TOKENS,
        draft_tree=draft_tree,
        draft_sampling="sampled" if temperature else "auto",
        max_batch_size=num_requests,
        max_model_len=CONTEXT_LEN + MAX_OUTPUT_LEN,
        enable_prefix_caching=False,
    )
    engine = llm.engine
    prompts = random_prompts(Lengths(CONTEXT_LEN, CONTEXT_LEN), engine.model_config.vocab_size, seed)
    params = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=MAX_OUTPUT_LEN, ignore_eos=True)
    requests = [llm.frontend.make_request(next(prompts), params) for _ in range(num_requests)]
    for request in requests:
        engine.scheduler.add(request)
    while not all(request.num_output_tokens for request in requests):
        engine.step()
    return engine


@cache
def make_stage(num_requests: int, seed: int, *, draft_tree: str = "dynamic", temperature: float = 0.0) -> Stage:
    """Run the prompts, and the next step up to its commit; the same arguments give the same stage."""
    engine = make_engine(num_requests, seed, draft_tree=draft_tree, temperature=temperature)
    with torch.inference_mode():
        plan = engine.scheduler.schedule(NUM_DRAFT_TOKENS)
        trees = engine.drafter.propose(plan)
        batch = engine.build_batch(plan, trees)
        logits = engine.runner.forward(batch)
        return Stage(engine, plan, trees, batch, logits, accept(plan, trees, batch, logits))

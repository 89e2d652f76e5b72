"""An engine stopped in the middle of a step: what the micro-benchmarks call its parts with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from titan import LLM, SamplingParams
from titan.bench.profiling import model_of
from titan.bench.prompts import random_prompts
from titan.bench.workloads import Lengths
from titan.core.batch import RaggedBatch
from titan.core.growth import Feed
from titan.core.kv_tensor import KVTensor
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import DraftTrees
from titan.engine import Engine
from titan.execute.batch import target_batch
from titan.kernels.growth import grow_by_passes
from titan.kernels.interfaces import Backend, LayerOps
from titan.kernels.torch.runner import place_nodes
from titan.models.decoder import Decoder
from titan.models.loader import DEMO
from titan.verify.accept import collect, launch

CONTEXT_LEN = 128
NUM_DRAFT_TOKENS = 8
MAX_OUTPUT_LEN = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """The demo pair with requests in flight, after the target's pass of a step."""

    engine: Engine
    plan: StepPlan
    trees: DraftTrees
    batch: RaggedBatch  # with its nodes in their places
    logits: Tensor  # [L, vocab]

    @property
    def backend(self) -> Backend:
        """What all of it runs on."""
        return self.engine.backend

    @property
    def model(self) -> Decoder:
        """The target."""
        return model_of(self.engine.runner)

    @property
    def kv(self) -> KVTensor:
        """The target's KV."""
        return self.engine.kv.tensors["target"]

    def attention_layout(self, ops: LayerOps, batch: RaggedBatch) -> Any:
        """The layout of a batch as the operations plan the target's attention from it."""
        if ops.name != "Triton":
            return batch.attention
        from titan.kernels.triton.attention_plan import AttentionGeometry  # not every platform has triton
        from titan.kernels.triton.pass_inputs import upload_inputs

        config, kv = self.model.config, self.kv
        geometry = AttentionGeometry(config.num_heads, config.num_kv_heads, config.head_dim, kv.block_size, kv.layout.dtype)
        return upload_inputs(batch, geometry, self.backend.device, 1 + NUM_DRAFT_TOKENS).attention

    def verify(self) -> Acceptance:
        """Verify the trees."""
        launched = launch(self.backend, self.plan, self.trees, self.batch.logits_start_loc, self.logits)
        return collect(self.backend, launched)


class SilentRunner:
    """A runner without a model: logits are given, whatever is fed.

    Args:
        backend: of the logits.
        logits: [as many as any pass needs, vocab].
        block_size: tokens per KV block.
    """

    def __init__(self, backend: Backend, logits: Tensor, block_size: int) -> None:
        self.backend = backend
        self.logits = logits
        self.block_size = block_size

    def forward(self, batch: RaggedBatch) -> Tensor:
        return self.logits[: len(batch.logits_rows)]

    def grow(self, feeds: Sequence[Feed], num_rows: int, vocab_size: int) -> DraftTrees:
        return grow_by_passes(self.forward, self.backend, feeds, num_rows, vocab_size, self.block_size)


def make_engine(
    num_requests: int, seed: int, *, draft: str | None = DEMO, draft_tree: str = "dynamic", temperature: float = 0.0
) -> Engine:
    """Return an engine whose requests have all run their prompts of `CONTEXT_LEN` random tokens."""
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
    """Run the prompts, and the next step up to its verification; the same arguments give the same stage."""
    engine = make_engine(num_requests, seed, draft_tree=draft_tree, temperature=temperature)
    with torch.inference_mode():
        plan = engine.scheduler.schedule(NUM_DRAFT_TOKENS, engine._lookahead)
        trees = engine._propose(plan)
        batch = target_batch(plan, trees, block_size=engine.kv.block_size)
        logits = engine.runner.forward(batch)
        place_nodes(batch)
        return Stage(engine, plan, trees, batch, logits)

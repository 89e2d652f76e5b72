"""An engine stopped in the middle of a step: what the micro-benchmarks call its parts with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from titan import LLM, SamplingParams
from titan.bench.prompts import random_prompts
from titan.bench.step_times import model_of
from titan.bench.workloads import Lengths
from titan.core.batch import RaggedBatch
from titan.core.kv_tensor import KVTensor
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import DraftTrees
from titan.engine import Engine
from titan.execute.batch import target_batch
from titan.kernels.interfaces import Backend, LayerOps
from titan.kernels.torch.runner import TorchRunner, place_nodes
from titan.models.decoder import Decoder
from titan.models.loader import DEMO
from titan.verify.accept import collect, launch

CONTEXT_LEN = 128
NUM_DRAFT_TOKENS = 8
MAX_OUTPUT_LEN = 1024

Calls = dict[str, list[Callable[[], object]]]
"""Of operations, by their names, in the order of a pass."""


class Recorder:
    """The operations of a layer, which are carried out and can be called again.

    Args:
        ops: all of them, but for what reads weights.
        weight_ops: what the weights are packed for.
    """

    def __init__(self, ops: LayerOps, weight_ops: LayerOps) -> None:
        self.calls: Calls = defaultdict(list)
        self._ops = ops
        self._weight_ops = weight_ops

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._weight_ops if name.startswith("linear") else self._ops, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            self.calls[name].append(partial(operation, *args, **kwargs))
            return operation(*args, **kwargs)

        return run


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
        return self.engine.backend

    @property
    def model(self) -> Decoder:
        return model_of(self.engine.runner)

    @property
    def kv(self) -> KVTensor:
        return self.engine.kv.tensors["target"]

    def calls_of_pass(self, ops: LayerOps, batch: RaggedBatch) -> Calls:
        """Run a pass of the target by its single operations, and return them."""
        model, recorder = self.model, Recorder(ops, self.model.ops)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "ops", recorder)
            if ops.name == "Triton":
                from titan.kernels.triton.attention_plan import AttentionGeometry  # not every platform has triton
                from titan.kernels.triton.pass_inputs import upload_inputs

                config, kv = model.config, self.kv
                geometry = AttentionGeometry(config.num_heads, config.num_kv_heads, config.head_dim, kv.block_size, model.dtype)
                inputs = upload_inputs(batch, geometry, self.backend.device, 1 + NUM_DRAFT_TOKENS)
                model.logits(model.hidden_states(inputs, kv))
            else:
                TorchRunner(self.backend, model, self.kv).forward(batch)
        return recorder.calls

    def verify(self) -> Acceptance:
        """Verify the trees."""
        launched = launch(self.backend, self.plan, self.trees, self.batch.logits_start_loc, self.logits)
        return collect(self.backend, launched)


class SilentRunner(TorchRunner):
    """The runner of a target that does not run: logits, [as many as any pass needs, vocab], are given, whatever is fed."""

    def __init__(self, engine: Engine, logits: Tensor) -> None:
        super().__init__(engine.backend, model_of(engine.runner), engine.kv.tensors["target"])
        self._logits = logits

    def forward(self, batch: RaggedBatch) -> Tensor:
        return self._logits[: len(batch.logits_rows)]


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

"""An engine stopped in the middle of a step: what the micro-benchmarks call its parts with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import repeat
from unittest.mock import Mock, patch

import torch
from torch import Tensor

from titan.bench.engine_run import make_requests
from titan.bench.prompts import random_prompts
from titan.bench.step_times import model_of
from titan.bench.workloads import Lengths, take_workload
from titan.core.batch import RaggedBatch
from titan.core.kv_tensor import KVTensor
from titan.core.options import EngineConfig
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import DraftTrees
from titan.engine import Engine
from titan.execute.batch import target_batch
from titan.kernels.interfaces import Backend, LayerOps
from titan.kernels.torch.runner import TorchRunner, place_nodes
from titan.models.decoder import Decoder
from titan.models.files import ModelFiles
from titan.models.loader import DEMO, open_model, resolve_model
from titan.verify.accept import accept

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
        return self.engine.backend

    @property
    def model(self) -> Decoder:
        return model_of(self.engine.runner)

    @property
    def kv(self) -> KVTensor:
        return self.engine.kv.tensors["target"]

    def call_of_pass(
        self, operation: str, index: int = -1, *, ops: LayerOps | None = None, batch: RaggedBatch | None = None
    ) -> Callable[[], object]:
        """Run a pass of the target by its single operations, and return one of them, to be called again.

        Args:
            operation: its name.
            index: which of its calls, the last by default.
            ops: by default the model's, for which the weights are packed: these read them in any case.
            batch: by default that of the verification.
        """
        model, ops, batch = self.model, ops or self.model.ops, batch or self.batch
        owner = model.ops if operation.startswith("linear") else ops
        mixed = Mock(wraps=ops, **{name: getattr(model.ops, name) for name in ("look_up", "linear", "linear_add_norm")})
        with patch.object(mixed, operation, wraps=getattr(owner, operation)) as recorded, patch.object(model, "ops", mixed):
            if ops.name == "Triton":
                from titan.kernels.triton.pass_inputs import upload_inputs  # not every platform has triton

                inputs = upload_inputs(batch, self.backend.device, 1 + NUM_DRAFT_TOKENS)
                model.logits(model.hidden_states(inputs, self.kv))
            else:
                TorchRunner(self.backend, model, self.kv).forward(batch)
        call = recorded.call_args_list[index]
        return partial(getattr(owner, operation), *call.args, **call.kwargs)

    def verify(self) -> Acceptance:
        """Verify the trees."""
        return accept(self.backend, self.plan, self.trees, self.batch.logits_start_loc, self.logits)


class SilentRunner(TorchRunner):
    """The runner of a target that does not run: logits, [as many as any pass needs, vocab], are given, whatever is fed."""

    def __init__(self, engine: Engine, logits: Tensor) -> None:
        super().__init__(engine.backend, model_of(engine.runner), engine.kv.tensors["target"])
        self._logits = logits

    def forward(self, batch: RaggedBatch) -> Tensor:
        return self._logits[: len(batch.logits_rows)]


def make_engine(
    num_requests: int,
    seed: int,
    *,
    draft: str | None = DEMO,
    draft_tree: str = "dynamic",
    temperature: float = 0.0,
    kv_cache_dtype: str = "auto",
) -> Engine:
    """Return an engine whose requests have all run their prompts of `CONTEXT_LEN` random tokens."""
    config = EngineConfig.of(
        speculation="fixed",
        max_draft_tokens=NUM_DRAFT_TOKENS,
        draft_tree=draft_tree,
        draft_sampling="sampled" if temperature else "auto",
        max_batch_size=num_requests,
        max_model_len=CONTEXT_LEN + MAX_OUTPUT_LEN,
        enable_prefix_caching=False,
        kv_cache_dtype=kv_cache_dtype,
    )
    engine = Engine(config, open_model(ModelFiles(resolve_model(DEMO, "target"))), draft)
    prompts = random_prompts(Lengths(CONTEXT_LEN, CONTEXT_LEN), engine.model_config.vocab_size, seed)
    requests = make_requests(engine, take_workload(prompts, num_requests, repeat(MAX_OUTPUT_LEN)), temperature=temperature)
    for request in requests:
        engine.scheduler.add(request)
    while not all(request.num_output_tokens for request in requests):
        engine.step()
    return engine


@cache
def make_stage(
    num_requests: int, seed: int, *, draft_tree: str = "dynamic", temperature: float = 0.0, kv_cache_dtype: str = "auto"
) -> Stage:
    """Run the prompts, and the next step up to its verification; the same arguments give the same stage."""
    engine = make_engine(num_requests, seed, draft_tree=draft_tree, temperature=temperature, kv_cache_dtype=kv_cache_dtype)
    with torch.inference_mode():
        plan = engine.scheduler.schedule(NUM_DRAFT_TOKENS, engine.drafting.lookahead)
        trees = engine.drafting.propose(plan)
        batch = target_batch(plan, trees, block_size=engine.kv.block_size)
        logits = engine.runner.forward(batch)
        place_nodes(batch)
        return Stage(engine, plan, trees, batch, logits)

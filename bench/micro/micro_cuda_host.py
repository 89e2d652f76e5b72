"""The host's part of a speculative step on the CUDA path, also on a machine without a GPU.

    titan bench parts --select cuda_host

Scheduling, batches, uploads, growth, verification and commit run as they do on a GPU; kernels and graphs are launched in name only,
and a matrix product is an empty tensor. Each request drafts a chain, of which it accepts half: a greedy one, or with "auto" the one
that is made up as the choice of a beam of width one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import repeat
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime.jit import JITFunction

from titan.bench.engine_run import make_requests
from titan.bench.gpu import random_models
from titan.bench.gpu.interpreted import InterpretedBackend, capture_in_name
from titan.bench.prompts import random_prompts
from titan.bench.workloads import Lengths, take_workload
from titan.core.options import EngineConfig
from titan.core.trees import NODE_DTYPES, DraftTree
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.registry import register
from titan.engine import Engine
from titan.kernels.triton import tools
from titan.kernels.triton.layers import TritonOps
from titan.kernels.triton.sampling import TritonSampling
from titan.models.decoder import Decoder

CONTEXT_LEN, NUM_DRAFTS, NUM_STEPS, NUM_WARM_UPS = 8192, 6, 200, 8
OUTPUT_LEN = (NUM_STEPS + 2 * NUM_WARM_UPS) * (NUM_DRAFTS + 1)
VOCAB_SIZE, NUM_LIKELY = 512, 16
pytestmark = [
    pytest.mark.benchmark(group="host"),
    pytest.mark.skipif(tools.INTERPRETED, reason="the interpreter's kernels are other functions, which would run"),
]


def _chain_columns() -> list[NDArray[Any]]:
    """Return the columns of the nodes of a chain whose tokens are all 0."""
    chain, nodes = DraftTree.chain([0] * NUM_DRAFTS), np.arange(NUM_DRAFTS)
    of_chain = chain.token_ids, chain.parents, chain.topology.depths, chain.topology.ancestor_bits, 0 * nodes
    columns = zip((*of_chain, np.minimum(nodes, NUM_DRAFTS - 2)), NODE_DTYPES, strict=True)
    return [torch.tensor(column, dtype=dtype).numpy() for column, dtype in columns]


CHAIN_COLUMNS = _chain_columns()
"""What `titan.core.trees.NodeColumns` has of each tree."""


class IdleBackend(InterpretedBackend):
    """Launches nothing: tensors are on the CPU, and results are made up."""

    def __init__(self) -> None:
        super().__init__(lambda: capture_in_name)

    def free_memory(self) -> int:
        """See `titan.kernels.interfaces.Backend`; of memory that nothing is written to."""
        return 1 << 40

    def download(self, tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
        """Copy the tensors, then return paths, final tokens and, if there are trees, the columns of their nodes."""
        paths, final_tokens, *nodes = super().download(tensors)
        paths[:], final_tokens[:] = -1, 0
        if nodes and len(nodes[0]):
            paths[:, : NUM_DRAFTS // 2] = range(NUM_DRAFTS // 2)
            nodes = [np.tile(column, len(paths)) for column in CHAIN_COLUMNS]
        return [paths, final_tokens, *nodes]


@contextmanager
def launching_nothing() -> Iterator[None]:
    """Kernels of Triton are not run, products are empty, and a few tokens are the most likely ones."""
    top_candidates = TritonSampling.top_candidates
    stubs: list[tuple[Any, str, Callable[..., object]]] = [
        (tools, "is_launchable", lambda _: True),
        (JITFunction, "run", lambda *_, **__: None),
        (TritonOps, "linear", lambda _, x, weight, *__: x.new_empty(len(x), len(weight))),
        (TritonOps, "look_up", lambda _, token_ids, embedding, *__: embedding.new_empty(len(token_ids), embedding.shape[1])),
        (TritonSampling, "argmax", lambda _, logits: torch.zeros(len(logits), dtype=torch.int64)),
        (TritonSampling, "top_candidates", lambda ops, logits, *args: top_candidates(ops, logits[:, :NUM_LIKELY], *args)),
    ]
    with ExitStack() as stack:
        for owner, name, stub in stubs:
            stack.enter_context(patch.object(owner, name, stub))
        yield


def make_engine(draft_tree: str, num_requests: int, seed: int) -> Engine:
    """Return an engine whose requests have all run their prompts."""
    backend = IdleBackend()

    def decoder() -> Decoder:
        config = random_models.llama(32, 64, 2, 2, 1, 16, VOCAB_SIZE)
        config.max_position_embeddings = CONTEXT_LEN + OUTPUT_LEN
        return random_models.make_decoder(config, backend=backend, seed=seed)

    draft = f"idle, {draft_tree}, {num_requests}"
    register(draft, lambda context: DraftModelDrafter(draft, decoder(), context))
    config = EngineConfig.of(
        dtype="bfloat16", speculation="fixed", draft_tree=draft_tree, draft_sampling="greedy", max_draft_tokens=NUM_DRAFTS,
        max_batch_size=num_requests, max_num_batched_tokens=8192, warm_up=False,
        num_kv_blocks=num_requests * ((CONTEXT_LEN + OUTPUT_LEN) // 16 + 2),
    )  # fmt: skip
    engine = Engine(config, decoder(), draft, backend=backend)
    prompts = random_prompts(Lengths(CONTEXT_LEN, CONTEXT_LEN), VOCAB_SIZE, seed)
    requests = make_requests(engine, take_workload(prompts, num_requests, repeat(OUTPUT_LEN)))
    for request in requests:
        engine.scheduler.add(request)
    while not all(request.num_output_tokens for request in requests):
        engine.step()
    return engine


@pytest.mark.parametrize("num_requests", [1, 32, 128])
@pytest.mark.parametrize("draft_tree", ["chain", "auto"])
def test_cuda_step(benchmark: Any, draft_tree: str, num_requests: int, seed: int) -> None:
    """A step in which all requests decode."""
    with launching_nothing():
        engine = make_engine(draft_tree, num_requests, seed)
        benchmark.pedantic(engine.step, rounds=NUM_STEPS, warmup_rounds=NUM_WARM_UPS)

"""The host's part of a speculative step on the CUDA path, on a machine without a GPU: milliseconds per step.

    python -m titan.bench.gpu.host_time
    python -m titan.bench.gpu.host_time --requests 32 --context 32768

Scheduling, batches, uploads, growth, verification and commit run as they do on a GPU; kernels and graphs are launched in name only,
and a matrix product is an empty tensor. Each request drafts a chain, of which it accepts half: a greedy one, or with "auto" the one
that is made up as the choice of a beam of width one. A time is the thread's CPU time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product, repeat
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime.jit import JITFunction

from titan.bench.engine_run import make_requests
from titan.bench.gpu import random_models
from titan.bench.options import bench_parser, parse, positive
from titan.bench.prompts import random_prompts
from titan.bench.report import Report, figure_table, measure_and_publish
from titan.bench.samples import Row, Spread
from titan.bench.workloads import Lengths, take_workload
from titan.core.options import EngineConfig
from titan.core.trees import DraftTree
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.registry import register
from titan.engine import Engine
from titan.kernels.triton import tools
from titan.kernels.triton.backend import TritonBackend
from titan.kernels.triton.cuda_graphs import Replay
from titan.kernels.triton.layers import TritonOps
from titan.kernels.triton.sampling import TritonSampling
from titan.models.decoder import Decoder

NUM_DRAFTS, NUM_STEPS, NUM_WARM_UPS = 6, 200, 8
VOCAB_SIZE, NUM_LIKELY = 512, 8
COLUMNS = {"ms/step": "±.2f"}


class IdleBackend(TritonBackend):
    """Launches nothing: tensors are on the CPU, and results are made up."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), lambda: capture_in_name)

    def free_memory(self) -> int:
        """See `titan.kernels.interfaces.Backend`; of memory that nothing is written to."""
        return 1 << 40

    def download(self, tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
        """Return paths, final tokens and, if there are trees, the columns of their nodes."""
        paths, final_tokens, *nodes = (np.zeros(tensor.shape, tensor.numpy().dtype) for tensor in tensors)
        paths -= 1
        if nodes and len(nodes[0]):
            paths[:, : NUM_DRAFTS // 2] = np.arange(NUM_DRAFTS // 2)
            chain = DraftTree.chain([0] * NUM_DRAFTS)
            of_chain = chain.token_ids, chain.parents, chain.topology.depths, chain.topology.ancestor_bits, np.zeros(NUM_DRAFTS)
            columns = (*of_chain, np.minimum(np.arange(NUM_DRAFTS), NUM_DRAFTS - 2))
            nodes = [np.concatenate([column] * len(paths)).astype(each.dtype) for column, each in zip(columns, nodes, strict=True)]
        return [paths, final_tokens, *nodes]


def capture_in_name(function: Callable[[], Tensor]) -> Replay:
    """Run the host's part of passes once, as the capture of a graph does; a replay has none."""
    return Replay(lambda: None, function())


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


def milliseconds(draft_tree: str, num_requests: int, context_len: int, seed: int) -> list[float]:
    """Time the steps of requests that all decode after prompts of this length."""
    backend = IdleBackend()

    def decoder() -> Decoder:
        config = random_models.llama(32, 64, 2, 2, 1, 16, VOCAB_SIZE)
        config.max_position_embeddings = context_len + output_len
        return random_models.make_decoder(config, backend=backend, seed=seed)

    output_len = (NUM_STEPS + 2 * NUM_WARM_UPS) * (NUM_DRAFTS + 1)
    draft = f"idle, {draft_tree}, {num_requests} x {context_len}"
    register(draft, lambda context: DraftModelDrafter(draft, decoder(), context))
    config = EngineConfig.of(
        dtype="bfloat16", speculation="fixed", draft_tree=draft_tree, draft_sampling="greedy", max_draft_tokens=NUM_DRAFTS,
        max_batch_size=num_requests, max_num_batched_tokens=8192, warm_up=False,
        num_kv_blocks=num_requests * ((context_len + output_len) // 16 + 2),
    )  # fmt: skip
    engine = Engine(config, decoder(), draft, backend=backend)
    prompts = random_prompts(Lengths(context_len, context_len), VOCAB_SIZE, seed)
    requests = make_requests(engine, take_workload(prompts, num_requests, repeat(output_len)))
    for request in requests:
        engine.scheduler.add(request)
    while not all(request.num_output_tokens for request in requests):
        engine.step()
    for _ in range(NUM_WARM_UPS):
        engine.step()
    found = []
    for _ in range(NUM_STEPS):
        start = time.thread_time()
        engine.step()
        found.append(1e3 * (time.thread_time() - start))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        ValueError: an option is not allowed.
    """
    parser = bench_parser("gpu.host_time", __doc__)
    parser.add_argument("--trees", nargs="+", choices=["chain", "auto"], default=["chain", "auto"], help="that are drafted")
    parser.add_argument("--requests", nargs="+", type=positive, default=[1, 32, 128], help="that decode at once")
    parser.add_argument("--context", nargs="+", type=positive, default=[512, 8192], help="tokens of each prompt")
    args = parse(parser, argv)
    torch.set_num_threads(1)
    rows: list[Row] = []

    def measure() -> Iterator[Row]:
        with launching_nothing():
            for draft_tree, num_requests, context_len in product(args.trees, args.requests, args.context):
                times = milliseconds(draft_tree, num_requests, context_len, args.seed)
                labels = {"tree": draft_tree, "requests": num_requests, "context": context_len}
                first, middle, third = np.quantile(times, [0.25, 0.5, 0.75]).tolist()
                rows.append(Row(labels, {"ms/step": Spread(middle, first, third, NUM_STEPS)}))
                yield rows[-1]

    measure_and_publish(args, measure, lambda: make_report(rows))


def make_report(rows: Sequence[Row]) -> Report:
    """Medians, ± half of what is between the quartiles."""
    table = figure_table("Host time of a speculative step", rows, ["tree", "requests", "context"], COLUMNS)
    slowest = max((row.median("ms/step") or 0.0 for row in rows), default=0.0)
    return Report("Host", f"The host's part of a step takes up to {slowest:.2f} ms.", {"rows": rows}, [table])


if __name__ == "__main__":
    main()

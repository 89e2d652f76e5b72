"""Sampling, verification and a draft's choices over a whole vocabulary, by the back end's own operations, as a step calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from titan.bench.gpu.sections import Figures, Section, Setting, Task
from titan.bench.gpu.timing import Work, busy_seconds
from titan.core.proposals import TreeLimits, checked_trees
from titan.core.sampling_params import SamplingParams
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import DraftTree
from titan.kernels.interfaces import Backend
from titan.kernels.triton.backend import TritonBackend

VOCAB_SIZE, TINY_VOCAB_SIZE = 128_256, 300
BATCHES = (1, 8, 32, 72, 128)

GREEDY, HOT = SamplingParams(temperature=0), SamplingParams(temperature=0.8)
CUT = SamplingParams(temperature=0.8, top_k=50, top_p=0.9)


def verification(logits: Tensor, backend: Backend, params: SamplingParams, is_sampled: bool = False) -> Work:
    """Verify chains of the most likely tokens with the logits that they come from: [R, 1 + drafts, vocab]."""
    num_requests, num_rows, vocab_size = logits.shape
    rows = SamplingRows.of([(params, i, 100) for i in range(num_requests)])
    num_nodes = [num_rows - 1] * num_requests
    limits = TreeLimits(num_nodes, [is_sampled] * num_requests, num_nodes)
    chains = [DraftTree.chain(each.argmax(1).tolist(), each.float().softmax(1) if is_sampled else None) for each in logits[:, :-1]]
    upload, device = backend.upload, backend.device
    trees = checked_trees(chains, limits, drafter="bench", vocab_size=vocab_size, upload=upload, device=device)
    return partial(backend.trees.verify, logits.flatten(0, 1), trees, np.arange(num_requests), rows)


def top_candidates(logits: Tensor, backend: Backend) -> Work:
    """Find the 8 most likely tokens: [R, 1, vocab]."""
    [temperatures] = backend.upload([np.ones(len(logits), np.float32)])
    return partial(backend.sampling.top_candidates, logits[:, 0], 8, temperatures)


OPERATIONS: dict[str, tuple[int, Callable[[Tensor, Backend], Work]]] = {
    "sample, greedy": (0, partial(verification, params=GREEDY)),
    "sample": (0, partial(verification, params=HOT)),
    "sample, top-k and top-p": (0, partial(verification, params=CUT)),
    "verify, greedy": (6, partial(verification, params=GREEDY)),
    "verify greedy drafts, top-k and top-p": (6, partial(verification, params=CUT)),
    "verify sampled drafts": (6, partial(verification, params=HOT, is_sampled=True)),
    "verify sampled drafts, top-k and top-p": (6, partial(verification, params=CUT, is_sampled=True)),
    "draft, argmax": (0, lambda logits, backend: partial(backend.sampling.argmax, logits[:, 0])),
    "draft, top 8": (0, top_candidates),
}
"""Draft tokens of a request, and what makes the call that is timed."""


def measure(num_requests: int, operation: str, setting: Setting) -> Figures:
    """Time an operation, uploads of its options included; its floor is one reading of the logits at the speed of a copy."""
    device, (num_drafts, make) = setting.device, OPERATIONS[operation]
    shape = num_requests, 1 + num_drafts, TINY_VOCAB_SIZE if setting.is_tiny else VOCAB_SIZE
    generator = torch.Generator(device).manual_seed(setting.seed)
    logits = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=4, generator=generator)
    work = make(logits, TritonBackend(device))
    figures = {"us": 1e6 * Timer("work()", globals={"work": work}).blocked_autorange(min_run_time=0.1).median}
    if busy := busy_seconds(work, device):
        figures["on device, us"] = 1e6 * busy
    if setting.copy_bandwidth:
        figures["floor, us"] = 1e6 * logits.nbytes / setting.copy_bandwidth
    return figures


def make_tasks(setting: Setting) -> Sequence[Task]:
    """Every operation with every number of requests."""
    batches = (2,) if setting.is_tiny else BATCHES
    return [
        Task({"operation": name, "requests": batch}, partial(measure, batch, name, setting), 3)
        for name in OPERATIONS
        for batch in batches
    ]


SECTION = Section(
    "sampling",
    "Sampling and verification over 128,256 tokens",
    "Sampling: us, a call in a row of calls, of the host or the device, whichever takes longer; on device: what it runs there; "
    "floor: reading the logits once. Draft tokens are 6 per request.",
    seconds=50,
    columns={"us": ".1f", "on device, us": ".1f", "floor, us": ".1f"},
    make_tasks=make_tasks,
)

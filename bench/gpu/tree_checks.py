"""Draft trees that stay on the device: their choice."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from titan.bench.gpu.checks import held_to
from titan.bench.gpu.sections import Measurement, Setting, Task
from titan.core.limits import MAX_NODES
from titan.core.trees import allocate_nodes
from titan.kernels.interfaces import Candidates
from titan.kernels.torch.backend import TorchBackend
from titan.kernels.triton.tree_select import select_trees


def make_tasks(setting: Setting) -> Sequence[Task]:
    """One task per kernel."""
    return [Task("choice of trees", partial(check_choice, setting), seconds=3, rank=1)]


def check_choice(setting: Setting) -> Measurement:
    """Beams of random scores, many of which tie, and of which some do not exist; the same is chosen on the host by sorting."""
    num_requests, num_candidates = (4, 60) if setting.is_tiny else (128, 512)
    rng = np.random.default_rng(setting.seed)
    candidates = _random_beams(rng, num_requests, num_candidates)
    expected = TorchBackend(torch.device("cpu")).trees.select([candidates], num_requests)
    nodes = allocate_nodes(expected.num_nodes, setting.device)
    select_trees(
        candidates.token_ids.to(setting.device),
        candidates.scores.to(setting.device),
        candidates.parent_slots.to(setting.device),
        candidates.slots.to(setting.device),
        torch.from_numpy(expected.start_loc[:-1].astype(np.int32)).to(setting.device),
        torch.from_numpy(candidates.num_nodes.astype(np.int32)).to(setting.device),
        nodes,
    )
    is_wrong = np.zeros(expected.num_nodes, np.bool_)
    for found, wanted in zip(nodes, expected.nodes, strict=True):
        is_wrong |= found.cpu().numpy() != wanted.numpy()
    first_wrong = np.concatenate(([0], is_wrong.cumsum()))[expected.start_loc]
    num_wrong = int((np.diff(first_wrong) > 0).sum())
    return held_to(num_wrong, 0, f"{num_requests} trees of up to {MAX_NODES} of {num_candidates} candidates")


def _random_beams(rng: np.random.Generator, num_requests: int, num_candidates: int) -> Candidates:
    """Every second candidate is fed; below one that does not exist there is none. Trees have any number of places."""
    shape = num_requests, num_candidates
    slots = np.tile(np.where(np.arange(num_candidates) % 2, -1, np.arange(num_candidates) // 2), (num_requests, 1))
    parent_slots = np.stack([rng.integers(-1, np.maximum(np.arange(num_candidates) // 2, 0)) for _ in range(num_requests)])
    scores = rng.choice([0.0, -0.25, -0.5, -2.0, -np.inf], shape, p=[0.2, 0.3, 0.2, 0.25, 0.05]).astype(np.float32)
    for column in range(num_candidates):
        above = scores[np.arange(num_requests), 2 * parent_slots[:, column]]
        scores[:, column] += np.where(parent_slots[:, column] < 0, np.float32(0), above)
    return Candidates(
        rows=np.arange(num_requests),
        num_nodes=rng.integers(0, MAX_NODES, num_requests, endpoint=True),
        is_chain=np.zeros(num_requests, np.bool_),
        has_scores=True,
        token_ids=torch.from_numpy(rng.integers(0, 1000, shape)),
        scores=torch.from_numpy(scores),
        parent_slots=torch.from_numpy(parent_slots),
        slots=torch.from_numpy(slots),
    )

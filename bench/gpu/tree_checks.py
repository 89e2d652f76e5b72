"""Draft trees that stay on the device: their choice, and their nodes' way into a batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.bench.gpu.checks import held_to
from titan.bench.gpu.sections import Measurement, Setting, Task
from titan.core.limits import MAX_NODES
from titan.core.trees import NODE_DTYPES, DraftTree
from titan.kernels.interfaces import Candidates
from titan.kernels.torch.backend import TorchBackend
from titan.kernels.triton.place_nodes import place_nodes
from titan.kernels.triton.tree_select import select_trees


def make_tasks(setting: Setting) -> Sequence[Task]:
    """One task per kernel."""
    return [
        Task("choice of trees", partial(check_choice, setting), seconds=3, rank=1),
        Task("grown nodes in their places", partial(check_places, setting), seconds=3, rank=1),
    ]


def check_choice(setting: Setting) -> Measurement:
    """Beams of random scores, many of which tie, and of which some do not exist; the same is chosen on the host by sorting."""
    num_requests, num_candidates = (4, 60) if setting.is_tiny else (128, 512)
    rng = np.random.default_rng(setting.seed)
    candidates = _random_beams(rng, num_requests, num_candidates)
    expected = TorchBackend(torch.device("cpu")).trees.select([candidates], num_requests)
    nodes = [torch.empty(expected.num_nodes, dtype=dtype, device=setting.device) for dtype in NODE_DTYPES]
    select_trees(
        candidates.token_ids.to(setting.device),
        candidates.scores.to(setting.device),
        candidates.parent_slots.to(setting.device),
        candidates.slots.to(setting.device),
        _on_device(expected.start_loc[:-1].astype(np.int32), setting),
        _on_device(candidates.num_nodes.astype(np.int32), setting),
        nodes,
    )
    is_wrong = np.zeros(expected.num_nodes, np.bool_)
    for found, wanted in zip(nodes, expected.columns, strict=True):
        is_wrong |= found.cpu().numpy() != wanted.numpy()
    first_wrong = np.concatenate(([0], is_wrong.cumsum()))[expected.start_loc]
    num_wrong = int((np.diff(first_wrong) > 0).sum())
    return held_to(num_wrong, 0, f"{num_requests} trees of up to {MAX_NODES} of {num_candidates} candidates")


def check_places(setting: Setting) -> Measurement:
    """Random trees and chains after prefill chunks."""
    num_requests, max_nodes = (5, 9) if setting.is_tiny else (256, MAX_NODES)
    rng = np.random.default_rng(setting.seed)
    trees = _random_trees(rng, num_requests, max_nodes)
    num_committed = rng.integers(1, 40, num_requests)
    num_nodes = np.array([tree.num_nodes for tree in trees])
    counts = num_committed + num_nodes, num_nodes
    query_start_loc, node_start_loc = (np.cumsum([0, *each]).astype(np.int32) for each in counts)
    starts = np.where([tree.topology.is_chain for tree in trees], 0, rng.integers(1, 1000, num_requests)).astype(np.int32)
    expected = rng.integers(0, 1000, (3, int(query_start_loc[-1])))
    queries = _on_device(expected.copy(), setting)
    for tree, start, end in zip(trees, starts, query_start_loc[1:], strict=True):
        rows = slice(int(end) - tree.num_nodes, int(end))
        expected[0, rows] = tree.token_ids
        if start:
            expected[1, rows], expected[2, rows] = start - 1 + tree.topology.depths, tree.topology.ancestor_bits
    layout = (_on_device(each, setting) for each in (query_start_loc, starts, node_start_loc))
    columns = ([tree.token_ids, tree.topology.ancestor_bits, tree.topology.depths] for tree in trees)
    nodes = (_on_device(np.concatenate(column), setting) for column in zip(*columns, strict=True))
    place_nodes(*queries, *layout, *nodes)
    return held_to(int((queries.cpu().numpy() != expected).sum()), 0, f"{num_requests} trees of up to {max_nodes} nodes")


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


def _random_trees(rng: np.random.Generator, num_trees: int, max_nodes: int) -> list[DraftTree]:
    """Of up to so many nodes; every third is a chain."""
    trees = []
    for i in range(num_trees):
        num_nodes = int(rng.integers(0, max_nodes, endpoint=True))
        parents = [node - 1 if i % 3 == 0 else int(rng.integers(-1, node)) for node in range(num_nodes)]
        trees.append(DraftTree(rng.integers(0, 1000, num_nodes), np.array(parents, np.int32)))
    return trees


def _on_device(array: NDArray[Any], setting: Setting) -> Tensor:
    return torch.from_numpy(array).to(setting.device)

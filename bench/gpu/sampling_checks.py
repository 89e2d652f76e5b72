"""Sampling and acceptance over a vocabulary of real size: distributions, draws, walks and rejections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.bench.gpu.acceptance_reference import reference_reject, reference_walk
from titan.bench.gpu.checks import held_to
from titan.bench.gpu.sections import Measurement, Setting, Task
from titan.core.random import Purpose, philox_uniform
from titan.core.sampling_params import SamplingParams
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import DraftTree, DraftTrees, TreeLimits
from titan.kernels.triton.backend import TritonBackend
from titan.kernels.triton.row_distribution import RowDistributions, normalized_probs, row_distributions
from titan.kernels.triton.sample_rows import draw_rows
from titan.kernels.triton.tree_rejection import reject_trees
from titan.kernels.triton.tree_walk import VerifiedTrees, walk_matches

MAX_DEPTH = 8
CDF_TOLERANCE = 2e-5
"""Rounding of probabilities, added up over a vocabulary."""

OPTIONS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 50, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.8, 1000, 0.95, 0.0),
    (1.3, 0, 1.0, 0.02),
    (0.6, 20, 0.8, 0.1),
]
"""Temperature, top-k, top-p, min-p; rows take turns."""


def make_tasks(setting: Setting) -> Sequence[Task]:
    """One task per kernel."""
    return [
        Task("distributions after top-k, top-p, min-p", partial(check_distributions, setting), seconds=5, rank=1),
        Task("draws from them", partial(check_draws, setting), seconds=3, rank=1),
        Task("greedy walk down the trees", partial(check_walk, setting), seconds=3, rank=1),
        Task("rejection", partial(check_rejection, setting), seconds=8, rank=1),
        Task("acceptance behind the root", partial(check_root_matches, setting), seconds=5, rank=1),
    ]


def make_rows(setting: Setting) -> tuple[RowDistributions, Tensor]:
    """Distributions by the kernels, and in float64 by sorting, [R, vocab]."""
    num_rows, vocab_size = (len(OPTIONS), 300) if setting.is_tiny else (8 * len(OPTIONS), 128_256)
    generator = torch.Generator(setting.device).manual_seed(setting.seed)
    logits = (torch.randn(num_rows, vocab_size, generator=generator, device=setting.device) * 3).bfloat16()  # with many ties
    columns = torch.tensor([OPTIONS[i % len(OPTIONS)] for i in range(num_rows)], device=setting.device).T.contiguous()
    temperature, top_k, top_p, min_p = columns[0], columns[1].int(), columns[2], columns[3]
    distributions = row_distributions(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return distributions, exact_probs(logits, temperature, top_k, top_p, min_p)


def exact_probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """What rows are sampled from, float64 [R, vocab]: temperature, top-k, top-p on what is left, min-p; ties cut by token id.

    Args:
        logits: [R, vocab].
        temperature: [R]; 0 = all on the first of the most likely tokens.
        top_k: [R]; 0 = all.
        top_p: [R].
        min_p: [R], relative to the most likely token.
    """
    scores, order = logits.double().sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scores.shape[1], device=logits.device)
    divisor = torch.where(temperature > 0, temperature.double(), 1.0)
    weights = ((scores - scores[:, :1]) / divisor[:, None]).exp()
    limit = torch.where(top_k > 0, top_k, scores.shape[1])
    weights[ranks >= torch.where(temperature > 0, limit, 1)[:, None]] = 0
    before = weights.cumsum(-1) - weights
    weights[before >= top_p.double()[:, None] * weights.sum(-1, keepdim=True)] = 0
    weights[weights < min_p.double()[:, None]] = 0
    probs = torch.zeros_like(weights).scatter_(-1, order, weights)
    return probs / probs.sum(-1, keepdim=True)


def check_distributions(setting: Setting) -> Measurement:
    """Half the sum of the differences, the most that a probability can be off."""
    distributions, exact = make_rows(setting)
    error = float((normalized_probs(distributions).double() - exact).abs().sum(-1).max()) / 2
    return held_to(error, CDF_TOLERANCE, f"{exact.shape[0]} rows of {exact.shape[1]}")


def check_draws(setting: Setting) -> Measurement:
    """How far the random number lies outside the part of the cumulative distribution that belongs to the token."""
    distributions, exact = make_rows(setting)
    num_rows, vocab_size = exact.shape
    seeds, positions = np.arange(num_rows, dtype=np.uint64) * np.uint64(2**40 + 7), np.arange(num_rows) + 5
    tokens = draw_rows(
        distributions,
        torch.from_numpy(seeds.view(np.int64)).to(setting.device),
        torch.from_numpy(positions).to(setting.device),
        purpose=Purpose.SAMPLE,
    )
    uniform = torch.from_numpy(philox_uniform(seeds, positions, Purpose.SAMPLE)).to(setting.device)
    mass = exact.gather(1, tokens[:, None])[:, 0]
    end = exact.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    error = float(torch.maximum(end - mass - uniform, uniform - end).max().clamp(min=0))
    if int((mass == 0).sum()):
        error = float("inf")  # a token that was cut
    return held_to(error, CDF_TOLERANCE, f"{num_rows} rows of {vocab_size}")


def check_walk(setting: Setting) -> Measurement:
    """Random trees over few tokens, so that paths are long and siblings repeat."""
    num_requests, max_nodes = (16, 9) if setting.is_tiny else (256, 63)
    rng = np.random.default_rng(setting.seed)
    sizes = rng.integers(0, max_nodes, num_requests, endpoint=True)
    parents = [[int(rng.integers(max(-1, node - 3), node)) for node in range(size)] for size in sizes]
    tokens = [rng.integers(0, 3, size).tolist() for size in sizes]
    wanted = [rng.integers(0, 3, size + 1).tolist() for size in sizes]
    result = VerifiedTrees.of(
        _device_tensor([*chain.from_iterable(tokens)], torch.int64, setting),
        _device_tensor([*chain.from_iterable(parents)], torch.int32, setting),
        _device_tensor([0, *np.cumsum(sizes).tolist()], torch.int32, setting),
        max_depth=63,
    )
    walk_matches(result, _device_tensor([*chain.from_iterable(wanted)], torch.int64, setting))
    expected = [reference_walk(*each) for each in zip(tokens, parents, wanted, strict=True)]
    return held_to(_num_wrong(result, expected), 0, f"{num_requests} trees of up to {max_nodes} nodes")


@dataclass(frozen=True, slots=True)
class Drafts:
    """Trees whose nodes were sampled from q, and p at their roots and nodes; arrays are over a small part of the vocabulary."""

    trees: list[DraftTree]
    p: list[NDArray[np.float64]]  # per request [1 + nodes, small]
    q: list[NDArray[np.float64]]  # per request [1 + nodes, small], 0 where a node has no children
    ids: NDArray[np.int64]  # [small], ascending
    vocab_size: int

    def wide(self, values: NDArray[np.float64]) -> Tensor:
        """Over the whole vocabulary, float64 [rows, vocab]."""
        wide = torch.zeros(len(values), self.vocab_size, dtype=torch.float64)
        wide[:, torch.from_numpy(self.ids)] = torch.from_numpy(values)
        return wide


def make_drafts(setting: Setting) -> Drafts:
    """Random trees; the mass lies on few tokens, so that no sample is near the border between two."""
    num_requests, num_tokens, vocab_size = (48, 8, 300) if setting.is_tiny else (192, 8, 128_256)
    rng = np.random.default_rng(setting.seed)
    ids = np.sort(rng.permutation(vocab_size)[:num_tokens])
    trees, all_p, all_q = [], [], []
    for i in range(num_requests):
        num_nodes = int(rng.integers(3, MAX_DEPTH))
        shapes = [list(range(-1, num_nodes - 1)), [-1] * num_nodes, [int(rng.integers(-1, node)) for node in range(num_nodes)]]
        parents = shapes[i % len(shapes)]
        p = rng.dirichlet(np.full(num_tokens, 2.0), num_nodes + 1).astype(np.float32).astype(np.float64) + 1e-4
        q = rng.dirichlet(np.full(num_tokens, 0.7), num_nodes + 1) + 1e-4
        p, q = (each / each.sum(-1, keepdims=True) for each in (p, q))
        places: list[int] = []
        for node, parent in enumerate(parents):
            left = q[parent + 1].copy()
            left[[places[other] for other in range(node) if parents[other] == parent]] = 0
            places.append(int(rng.choice(num_tokens, p=left / left.sum())))
        q[[row for row in range(num_nodes + 1) if row - 1 not in parents]] = 0
        tree = DraftTree(ids[places], np.array(parents, np.int32))
        trees.append(tree)
        all_p.append(p)
        all_q.append(q)
    return Drafts(trees, all_p, all_q, ids, vocab_size)


def _verify_by_kernels(
    drafts: Drafts, setting: Setting
) -> tuple[RowDistributions, Tensor, Tensor, Tensor, NDArray[np.uint64], NDArray[np.int64]]:
    """Distributions, draft probabilities, their rows, node start locations, seeds and positions."""
    p, q = np.concatenate(drafts.p), np.concatenate(drafts.q)
    logits = drafts.wide(p).log().float().to(setting.device)
    ones, zeros = torch.ones(len(p), device=setting.device), torch.zeros(len(p), device=setting.device)
    distributions = row_distributions(logits, temperature=ones, top_k=zeros.int(), top_p=ones, min_p=zeros)
    is_inner = q.any(-1)
    draft_rows = np.where(is_inner, np.cumsum(is_inner) - 1, -1)
    start_loc = [0, *np.cumsum([tree.num_nodes for tree in drafts.trees]).tolist()]
    seeds = np.repeat(np.arange(len(drafts.trees), dtype=np.uint64) + np.uint64(2**33), [len(each) for each in drafts.p])
    return (
        distributions,
        drafts.wide(q[is_inner]).float().to(setting.device),
        _device_tensor(draft_rows.tolist(), torch.int32, setting),
        _device_tensor(start_loc, torch.int32, setting),
        seeds,
        np.arange(len(p)) + 11,
    )


def check_rejection(setting: Setting) -> Measurement:
    """Paths and final tokens, against rejection with residuals as vectors in float64."""
    drafts = make_drafts(setting)
    distributions, draft_probs, draft_rows, start_loc, seeds, positions = _verify_by_kernels(drafts, setting)
    result = VerifiedTrees.of(
        _device_tensor(np.concatenate([tree.token_ids for tree in drafts.trees]).tolist(), torch.int64, setting),
        _device_tensor(np.concatenate([tree.parents for tree in drafts.trees]).tolist(), torch.int32, setting),
        start_loc,
        max_depth=MAX_DEPTH,
    )
    reject_trees(
        result,
        torch.arange(len(drafts.trees), device=setting.device),
        distributions,
        draft_probs,
        draft_rows,
        torch.from_numpy(seeds.view(np.int64)).to(setting.device),
        torch.from_numpy(positions).to(setting.device),
    )

    def uniform(row: int, purpose: Purpose, sibling: int = 0) -> float:
        one = slice(row, row + 1)
        return float(philox_uniform(seeds[one], positions[one], purpose, sibling=sibling)[0])

    expected = []
    first = 0
    for tree, p, q in zip(drafts.trees, drafts.p, drafts.q, strict=True):
        path, place = reference_reject(
            torch.from_numpy(p),
            torch.from_numpy(q),
            np.searchsorted(drafts.ids, tree.token_ids).tolist(),
            tree.parents.tolist(),
            coin=lambda row, rank, first=first: uniform(first + row, Purpose.ACCEPT, rank),  # type: ignore[misc]
            uniform=lambda row, is_inner, first=first: uniform(  # type: ignore[misc]
                first + row, Purpose.RESIDUAL if is_inner else Purpose.SAMPLE
            ),
        )
        expected.append((path, int(drafts.ids[place])))
        first += len(p)
    return held_to(_num_wrong(result, expected), 0, f"{len(expected)} trees, {len(positions)} rows of {drafts.vocab_size}")


def check_root_matches(setting: Setting) -> Measurement:
    """How often a draft token would be accepted: p of q's most likely token, and ``sum(min(p, q))``."""
    drafts = make_drafts(setting)
    backend = TritonBackend(setting.device)
    trees = [
        replace(tree, draft_probs=drafts.wide(q[q.any(-1)]).float().to(setting.device))
        for tree, q in zip(drafts.trees, drafts.q, strict=True)
    ]
    limits = [TreeLimits(tree.num_nodes, may_sample=True) for tree in trees]
    options = SamplingRows.of((SamplingParams(temperature=1.0), 0, 0) for _ in trees)
    logits = drafts.wide(np.concatenate(drafts.p)).log().float().to(setting.device)
    joined = DraftTrees.of(
        trees, limits, drafter="check", vocab_size=drafts.vocab_size, upload=backend.upload, device=backend.device
    )
    matches = backend.trees.verify(logits, joined, np.arange(len(trees)), options).matches
    assert matches is not None, "all trees were sampled"
    found = matches.double().cpu().numpy()
    roots = [(p[0], q[0]) for p, q in zip(drafts.p, drafts.q, strict=True)]
    exact = np.array([(p[q.argmax()], np.minimum(p, q).sum()) for p, q in roots])
    return held_to(float(np.abs(found - exact).max()), CDF_TOLERANCE, f"{len(roots)} roots")


def _num_wrong(result: VerifiedTrees, expected: Sequence[tuple[list[int], int]]) -> int:
    """Requests whose path or final token is not as expected."""
    found = zip(result.paths.tolist(), result.final_tokens.tolist(), strict=True)
    wanted = ((path + [-1] * (result.paths.shape[1] - len(path)), token) for path, token in expected)
    return sum(each != want for each, want in zip(found, wanted, strict=True))


def _device_tensor(values: Sequence[int], dtype: torch.dtype, setting: Setting) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=setting.device)

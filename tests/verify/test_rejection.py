"""Recursive rejection over siblings: the rule by exact enumeration, back ends by the rule, number by number, and by chi-square."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from back_ends import BACK_ENDS, ON_HOST, make_back_end
from exact_rules import Probs, inverse_cdf, reference_outcome, reference_rejection, samples_without_replacement
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from titan.core.batch import prefix_sums
from titan.core.random import Purpose, philox_uniform
from titan.core.sampling_params import SamplingParams
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import DraftTree, DraftTrees, NodeColumns, TreeLimits
from titan.kernels.interfaces import Backend, Verified
from titan.kernels.torch import trees as torch_trees

VOCAB_SIZE = 5
POSITION = 7


def distributions(seed: int, *, sharpness: float, holes: int = 0) -> tuple[Probs, Probs]:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(VOCAB_SIZE, sharpness), size=2)
    p[rng.permutation(VOCAB_SIZE)[:holes]] = 0
    q[rng.permutation(VOCAB_SIZE)[:holes]] = 0
    return p / p.sum(), q / q.sum()


CASES = [distributions(seed, sharpness=sharpness, holes=holes) for seed in range(4) for sharpness in (0.3, 3.0) for holes in (0, 2)]


def emitted_distribution(p: Probs, q: Probs, claimed: Probs, num_children: int) -> Probs:
    """Of the token that one node emits by the rule, over all children of q and every coin, if q is said to be another."""
    emitted = np.zeros(VOCAB_SIZE)
    for children, probability in samples_without_replacement(q, num_children):
        accept_probs, residual = reference_rejection(p, claimed, children)
        reached = probability
        for child, accept_prob in zip(children, accept_probs, strict=True):
            emitted[child] += reached * accept_prob
            reached *= 1 - accept_prob
        emitted += reached * residual
    return emitted


@pytest.mark.parametrize("num_children", [1, 2, 3])
@pytest.mark.parametrize(("p", "q"), CASES)
def test_by_the_rule_the_emitted_token_is_distributed_as_the_targets_own(p: Probs, q: Probs, num_children: int) -> None:
    assert np.abs(emitted_distribution(p, q, q, num_children) - p).max() < 1e-7


@pytest.mark.parametrize("num_children", [1, 2])
def test_enumeration_notices_a_wrong_q(num_children: int) -> None:
    """The negative control: verifying with another q than the one that was sampled from is not lossless."""
    p, q = CASES[2]
    assert np.abs(emitted_distribution(p, q, np.roll(q, 1), num_children) - p).max() > 0.02


class Sampled(NamedTuple):
    """A tree whose children were sampled, with what belongs to its root and its nodes: [1 + nodes, vocab]."""

    tree: DraftTree
    p: Probs
    q: Probs


def sampled(token_ids: Sequence[int], parents: NDArray[np.int32], p: Probs, q: Probs) -> Sampled:
    q32 = torch.tensor(q[np.unique(parents) + 1], dtype=torch.float32)
    return Sampled(DraftTree(np.array(token_ids), parents, q32), p, q)


def verify(backend: Backend, trees: Sequence[DraftTree], logits: Tensor, seeds: Sequence[int]) -> Verified:
    """At temperature 1."""
    limits = [TreeLimits(tree.num_nodes, may_sample=True) for tree in trees]
    placed = [replace(tree, draft_probs=tree.draft_probs.to(backend.device)) for tree in trees if tree.draft_probs is not None]
    ready = DraftTrees.of(placed, limits, drafter="test", vocab_size=logits.shape[1], upload=backend.upload, device=backend.device)
    sampling = SamplingRows.of([(SamplingParams(), seed, POSITION) for seed in seeds])
    return backend.trees.verify(logits.to(backend.device), ready, np.arange(len(trees)), sampling)


def assert_by_the_rule(backend: Backend, cases: Sequence[Sampled], seeds: Sequence[int], least: float) -> list[int]:
    """Every path and final token, but where rounding could decide, is that of the rule; returns how many nodes each tree keeps."""
    with np.errstate(divide="ignore"):
        logits = torch.tensor(np.log(np.concatenate([case.p for case in cases])), dtype=torch.float32)
    verified = verify(backend, [case.tree for case in cases], logits, seeds)
    assert verified.matches is not None
    counts, finals = (verified.paths >= 0).sum(1).tolist(), verified.final_tokens.tolist()
    paths = verified.paths.tolist()
    num_clear = 0
    for case, seed, path, count, final, match in zip(cases, seeds, paths, counts, finals, verified.matches.tolist(), strict=True):
        p, q = case.p[0], case.q[0]
        assert match == pytest.approx([p[q.argmax()], np.minimum(p, q).sum()], abs=1e-5)
        outcome = reference_outcome(case.tree, case.p, case.q, seed, POSITION)
        if outcome.margin > 2e-5:
            assert (path[:count], final) == outcome[:2]
            num_clear += 1
    assert num_clear >= least * len(cases)
    return counts


@pytest.mark.parametrize("num_children", [1, 2, 3])
@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_back_ends_follow_the_rule_at_a_node(back_end: str, num_children: int) -> None:
    """For all children that can be sampled in each case, with a few coins each; Triton is asked for some of them.

    Left out are those before whose last one hardly anything of q is left, which float32 knows too roughly.
    """
    star = np.full(num_children, -1, np.int32)
    cases = [
        sampled(children, star, np.tile(p, (1 + num_children, 1)), np.tile(q, (1 + num_children, 1)))
        for p, q in CASES
        for children, _ in samples_without_replacement(q, num_children)
        if q[list(children[:-1])].sum() < 0.99
    ] * 3
    if back_end == "triton":
        cases = cases[:: len(cases) // 25]
    counts = assert_by_the_rule(make_back_end(back_end), cases, range(len(cases)), least=0.95)
    assert 0.2 < np.mean(counts) < 0.98


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_where_rounding_leaves_nothing_of_the_residual_p_itself_is_sampled_from(back_end: str) -> None:
    """Here q is above p everywhere, by more than rounding makes it, so that the coins that reject are found soon."""
    p = np.array([0.5, 0.0, 0.25, 0.125, 0.125])
    q = p * (1 + 2.0**-9)
    many = np.arange(60_000, dtype=np.uint64)
    coins = philox_uniform(many, POSITION, Purpose.ACCEPT)
    seeds = many[coins > 1 / (1 + 2.0**-9) + 1e-5][: 40 if back_end in ON_HOST else 12].tolist()
    assert len(seeds) >= 12
    tree = DraftTree(np.array([2]), np.array([-1], np.int32), torch.tensor(q[None], dtype=torch.float32))
    logits = torch.tensor(np.log(np.maximum(p, 1e-300)), dtype=torch.float32).masked_fill(torch.tensor(p == 0), -torch.inf)
    verified = verify(make_back_end(back_end), [tree] * len(seeds), logits.repeat(2 * len(seeds), 1), seeds)
    assert (verified.paths == -1).all()
    heights = philox_uniform(np.array(seeds, np.uint64), POSITION, Purpose.RESIDUAL)
    tokens = verified.final_tokens.tolist()
    assert tokens == [inverse_cdf(p, height)[0] for height in heights.tolist()]
    assert len(set(tokens)) > 2


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_a_sampled_tree_all_of_whose_places_are_empty_decodes(back_end: str) -> None:
    """Beside one that has an empty place, and whose node is accepted."""
    backend = make_back_end(back_end)
    p = torch.tensor(np.random.default_rng(0).dirichlet(np.ones(VOCAB_SIZE), size=2), dtype=torch.float32)
    certain = torch.zeros(VOCAB_SIZE)
    certain[3] = 1.0
    columns = [
        np.array([-1, -1, 3, -1]),
        np.array([-2, -2, -1, -2], np.int32),
        np.ones(4, np.int64),
        np.array([1, 2, 1, 2]),
        np.full(4, -np.inf, np.float32),
        np.full(4, -1, np.int32),
    ]
    flags = np.zeros((2, 2), np.bool_)
    q = torch.stack((torch.full((VOCAB_SIZE,), torch.nan), certain)).to(backend.device)
    draft_rows = torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32).to(backend.device)
    trees = DraftTrees(np.array([0, 2, 4]), flags[0], ~flags[0], flags[1], NodeColumns(*backend.upload(columns)), q, draft_rows)
    logits = torch.stack((p[0], p[0], p[0], certain, p[1], p[1])).log().to(backend.device)
    verified = backend.trees.verify(
        logits, trees, np.arange(2), SamplingRows.of([(SamplingParams(), seed, POSITION) for seed in (4, 5)])
    )
    assert (verified.paths >= 0).sum(1).tolist() == [0, 1] and verified.paths[1, 0] == 0
    assert (
        verified.matches is not None
        and verified.matches[0, 0].isnan()
        and verified.matches[1].tolist() == pytest.approx([1.0, 1.0])
    )
    heights = [float(philox_uniform(seed, POSITION + depth, Purpose.SAMPLE)) for seed, depth in ((4, 0), (5, 1))]
    assert verified.final_tokens.tolist() == [inverse_cdf(p[i].double().numpy(), height)[0] for i, height in enumerate(heights)]


PARENTS = {"chain": [-1, 0, 1], "star": [-1, -1, -1], "bushy": [-1, 0, -1, 0, 2, 1, 2]}
NUM_TREES = {"torch": 4_000, "cpu": 20_000}
TARGET, DRAFT = np.random.default_rng(3).dirichlet(np.ones(VOCAB_SIZE), size=(2, VOCAB_SIZE + 1))
"""Of the root, and behind each token."""

PAIRS = TARGET[0][:, None] * TARGET[1:]


@cache
def sampled_tokens(parents: tuple[int, ...], num_trees: int) -> NDArray[np.int64]:
    """Tokens of trees of that shape, sampled from `DRAFT`: [num_trees, nodes]."""
    rng, shape = np.random.default_rng(11), np.array(parents, np.int32)
    tokens = np.zeros((num_trees, len(parents)), np.int64)
    for row in tokens:
        for node in np.unique(shape):
            children = np.flatnonzero(shape == node)
            q = DRAFT[0 if node < 0 else row[node] + 1]
            row[children] = rng.choice(VOCAB_SIZE, size=len(children), replace=False, p=q)
    return tokens


def path_counts(backend: Backend, parents: list[int], num_trees: int, change: Callable[[Tensor], Tensor] = lambda q: q) -> Probs:
    """Sample trees, verify them, with another q if it is changed, and count the first two emitted tokens: [vocab, vocab]."""
    tokens, topology = sampled_tokens(tuple(parents), num_trees), DraftTree(np.array(parents), np.array(parents)).topology
    num_nodes = len(parents)
    rows = np.concatenate([np.zeros((num_trees, 1), np.int64), tokens + 1], 1).ravel()  # of the two tables
    flags = np.zeros((3, num_trees), np.bool_)
    columns = [
        tokens.ravel(),
        np.tile(np.array(parents, np.int32), num_trees),
        np.tile(topology.depths, num_trees),
        np.tile(topology.ancestor_bits, num_trees),
        np.zeros(tokens.size, np.float32),
        np.full(tokens.size, -1, np.int32),
    ]
    start_loc = prefix_sums([num_nodes] * num_trees)
    draft_probs, draft_rows = change(torch.tensor(DRAFT, dtype=torch.float32)), torch.from_numpy(rows.astype(np.int32))
    trees = DraftTrees(start_loc, flags[0], ~flags[1], flags[2], NodeColumns(*backend.upload(columns)), draft_probs, draft_rows)
    sampling = SamplingRows.of([(SamplingParams(), seed, POSITION) for seed in range(num_trees)])
    logits = torch.tensor(np.log(TARGET), dtype=torch.float32)[torch.from_numpy(rows)]
    verified = backend.trees.verify(logits, trees, np.arange(num_trees), sampling)
    rng = np.random.default_rng(12)
    counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    found = verified.paths.tolist(), (verified.paths >= 0).sum(1).tolist(), verified.final_tokens.tolist()
    for row, path, count, final in zip(tokens.tolist(), *found, strict=True):
        emitted = [*(row[node] for node in path[:count]), final]
        if len(emitted) == 1:  # the token after it comes from the next step, as it would without speculation
            emitted.append(int(rng.choice(VOCAB_SIZE, p=TARGET[final + 1])))
        counts[emitted[0], emitted[1]] += 1
    return counts


def p_value(counts: Probs) -> float:
    return float(stats.chisquare(counts.ravel(), PAIRS.ravel() * counts.sum()).pvalue)


@pytest.mark.parametrize("back_end", NUM_TREES)
@pytest.mark.parametrize("shape", PARENTS)
def test_whole_trees_emit_pairs_distributed_as_the_targets(shape: str, back_end: str) -> None:
    assert p_value(path_counts(make_back_end(back_end), PARENTS[shape], NUM_TREES[back_end])) > 1e-3


@pytest.mark.parametrize("back_end", NUM_TREES)
@pytest.mark.parametrize("shape", PARENTS)
def test_chi_square_notices_a_wrong_q(shape: str, back_end: str) -> None:
    def flattened(q: Tensor) -> Tensor:
        return (q + 0.3) / (1 + 0.3 * VOCAB_SIZE)

    assert p_value(path_counts(make_back_end(back_end), PARENTS[shape], NUM_TREES[back_end] // 2, flattened)) < 1e-6


def test_chi_square_notices_a_missing_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = torch_trees._Tree._try
    monkeypatch.setattr(torch_trees._Tree, "_try", lambda *args: (attempt(*args)[0], 0.0))  # p is scaled down by nothing
    assert p_value(path_counts(make_back_end("torch"), PARENTS["chain"], NUM_TREES["torch"] // 2)) < 1e-6

"""Recursive rejection over siblings: exact enumeration, and the vector form of the residuals as its oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from cpu_kernels import choose_cpu_kernels
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from titan.core.trees import DraftTree
from titan.kernels.cpu.library import load_library
from titan.kernels.torch.sampling import LazyProbs, softmax_at
from titan.verify import rejection
from titan.verify.reference import draws_without_replacement, reference_rejection
from titan.verify.rejection import reject, reject_by_torch, sibling_acceptance

VOCAB_SIZE = 5
Probs = NDArray[np.float64]


def distributions(seed: int, *, sharpness: float, holes: int = 0) -> tuple[Probs, Probs]:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(VOCAB_SIZE, sharpness), size=2)
    p[rng.permutation(VOCAB_SIZE)[:holes]] = 0
    q[rng.permutation(VOCAB_SIZE)[:holes]] = 0
    return p / p.sum(), q / q.sum()


CASES = [distributions(seed, sharpness=sharpness, holes=holes) for seed in range(4) for sharpness in (0.3, 3.0) for holes in (0, 2)]


def emitted_distribution(p: Probs, q: Probs, num_children: int) -> Probs:
    """Distribution of the token that one node emits, over every draw of its children and every coin, from the engine's numbers."""
    emitted = np.zeros(VOCAB_SIZE)
    for children, probability in draws_without_replacement(q, num_children):
        accept_probs, scale = sibling_acceptance(
            torch.tensor(p)[None], torch.tensor([0]), torch.tensor(q)[None], torch.tensor([children]), np.array([num_children])
        )
        reached = probability
        for rank, child in enumerate(children):
            emitted[child] += reached * float(accept_probs[0, rank])
            reached *= 1 - float(accept_probs[0, rank])
        rest = rejection.residual(torch.tensor(p)[None], torch.tensor(q)[None], scale)[0].numpy()
        emitted += reached * rest / rest.sum()
    return emitted


@pytest.mark.parametrize("num_children", [1, 2, 3])
@pytest.mark.parametrize(("p", "q"), CASES)
def test_the_emitted_token_is_distributed_as_the_targets_own(p: Probs, q: Probs, num_children: int) -> None:
    assert np.abs(emitted_distribution(p, q, num_children) - p).max() < 1e-6


@pytest.mark.parametrize("num_children", [1, 2, 3])
@pytest.mark.parametrize(("p", "q"), CASES)
def test_two_scalars_stand_for_the_residual_vectors(p: Probs, q: Probs, num_children: int) -> None:
    for children, _ in draws_without_replacement(q, num_children):
        expected, residual = reference_rejection(p, q, children)
        accept_probs, scale = sibling_acceptance(
            torch.tensor(p)[None], torch.tensor([0]), torch.tensor(q)[None], torch.tensor([children]), np.array([num_children])
        )
        reached = 1.0
        for rank, probability in enumerate(expected):
            if reached > 1e-6:  # what can never be tried may be anything
                assert float(accept_probs[0, rank]) == pytest.approx(probability, abs=1e-5)
            reached *= 1 - probability
        if reached > 1e-6:
            found = rejection.residual(torch.tensor(p)[None], torch.tensor(q)[None], scale)[0].numpy()
            assert found / found.sum() == pytest.approx(residual, abs=1e-5)


@pytest.mark.parametrize("num_children", [1, 2])
def test_enumeration_notices_a_wrong_q(num_children: int) -> None:
    """The negative control: verifying with another q than the one that was drawn from is not lossless."""
    p, q = CASES[2]
    claimed = np.roll(q, 1)
    emitted = np.zeros(VOCAB_SIZE)
    for children, probability in draws_without_replacement(q, num_children):
        accept_probs, residual = reference_rejection(p, claimed, children)
        for child, accept_prob in zip(children, accept_probs, strict=True):
            emitted[child] += probability * accept_prob
            probability *= 1 - accept_prob
        emitted += probability * residual
    assert np.abs(emitted - p).max() > 0.02


PARENTS = {"chain": [-1, 0, 1], "star": [-1, -1, -1], "bushy": [-1, 0, -1, 0, 2, 1, 2]}
NUM_TREES = 20_000


@cache
def drawn_trees(parents: tuple[int, ...], num_trees: int) -> list[DraftTree]:
    """Trees of that shape drawn from `DRAFT`."""
    rng = np.random.default_rng(11)
    shape = np.array(parents, np.int32)
    inner = np.unique(shape)
    trees = []
    for _ in range(num_trees):
        tokens = np.zeros(len(parents), np.int64)
        for node in inner:
            children = np.flatnonzero(shape == node)
            token = -1 if node < 0 else int(tokens[node])
            tokens[children] = rng.choice(VOCAB_SIZE, size=len(children), replace=False, p=DRAFT[token + 1])
        probs = torch.tensor(np.stack([DRAFT[0 if node < 0 else tokens[node] + 1] for node in inner]), dtype=torch.float32)
        trees.append(DraftTree(tokens, shape, probs))
    return trees


def path_counts(parents: list[int], num_trees: int, change: Callable[[DraftTree], DraftTree] = lambda tree: tree) -> Probs:
    """Draw trees, verify them with `reject`, and count the first two emitted tokens: [vocab, vocab]."""
    rng = np.random.default_rng(12)
    trees = [change(tree) for tree in drawn_trees(tuple(parents), NUM_TREES)[:num_trees]]
    rows = np.concatenate([np.append(0, tree.token_ids + 1) for tree in trees])
    num_rows = len(parents) + 1
    seeds = np.repeat(np.arange(num_trees, dtype=np.uint64), num_rows)
    positions = np.concatenate([np.append(7, 7 + tree.depths) for tree in trees])
    result = reject(trees, LazyProbs(torch.tensor(TARGET[rows], dtype=torch.float32), None), seeds, positions)
    counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    for i, (tree, row, final) in enumerate(zip(trees, result.last_rows.tolist(), result.final_tokens.tolist(), strict=True)):
        emitted = [*tree.token_ids[tree.path_to(row - i * num_rows - 1)].tolist(), final]
        if len(emitted) == 1:  # the token after it comes from the next step, as it would without speculation
            emitted.append(int(rng.choice(VOCAB_SIZE, p=TARGET[final + 1])))
        counts[emitted[0], emitted[1]] += 1
    return counts


TARGET, DRAFT = np.random.default_rng(3).dirichlet(np.ones(VOCAB_SIZE), size=(2, VOCAB_SIZE + 1))
PAIRS = TARGET[0][:, None] * TARGET[1:]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("shape", PARENTS)
def test_whole_trees_emit_pairs_distributed_as_the_targets(shape: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_cpu_kernels(monkeypatch, kernels)
    counts = path_counts(PARENTS[shape], NUM_TREES)
    assert stats.chisquare(counts.ravel(), PAIRS.ravel() * NUM_TREES).pvalue > 1e-3


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("shape", PARENTS)
def test_chi_square_notices_a_wrong_q(shape: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_cpu_kernels(monkeypatch, kernels)

    def flattened(tree: DraftTree) -> DraftTree:
        assert tree.draft_probs is not None
        return DraftTree(tree.token_ids, tree.parents, (tree.draft_probs + 0.3) / (1 + 0.3 * VOCAB_SIZE))

    counts = path_counts(PARENTS[shape], NUM_TREES // 2, flattened)
    assert stats.chisquare(counts.ravel(), PAIRS.ravel() * counts.sum()).pvalue < 1e-6


def test_chi_square_notices_a_missing_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_cpu_kernels(monkeypatch, "torch")
    monkeypatch.setattr(rejection, "residual", lambda probs, draft_probs, scale: probs)
    counts = path_counts(PARENTS["chain"], NUM_TREES // 2)
    assert stats.chisquare(counts.ravel(), PAIRS.ravel() * counts.sum()).pvalue < 1e-6


def random_trees(rng: np.random.Generator, vocab_size: int, kind: str) -> tuple[list[DraftTree], Tensor]:
    """Trees drawn from random q, and the logits of p at their rows."""
    trees, logits = [], []
    for _ in range(60):
        num_nodes = int(rng.integers(1, 9))
        parents = np.array([int(rng.integers(max(-1, node - 3), node)) for node in range(num_nodes)], np.int32)
        scores = rng.normal(size=(num_nodes + 1, vocab_size)) * (20 if kind == "certain" else 1.5)
        q = np.exp(scores + rng.normal(size=scores.shape) * (0 if kind == "equal" else 0.7))
        if kind == "holes":
            q *= rng.random(q.shape) < 0.5
        q += 1e-12
        q /= q.sum(-1, keepdims=True)
        token_ids = np.zeros(num_nodes, np.int64)
        inner = np.unique(parents)
        for node in inner:
            children = np.flatnonzero(parents == node)
            token_ids[children] = rng.choice(vocab_size, size=len(children), replace=False, p=q[node + 1])
        trees.append(DraftTree(token_ids, parents, torch.tensor(q[inner + 1], dtype=torch.float32)))
        logits.append(torch.from_numpy(scores))
    return trees, torch.cat(logits).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["near", "holes", "certain", "equal"])
@pytest.mark.parametrize("vocab_size", [11, 1300])
def test_the_compiled_walk_ends_where_pytorchs_does(vocab_size: int, kind: str, dtype: torch.dtype) -> None:
    """From logits, and from probabilities; a row that is not finite gives no token."""
    if load_library().library is None:
        pytest.skip(load_library().description)
    trees, logits = random_trees(np.random.default_rng(5), vocab_size, kind)
    logits = logits.to(dtype)
    logits[30:36] = torch.nan
    num_rows = [tree.num_nodes + 1 for tree in trees]
    temperatures = torch.linspace(0.8, 1.2, len(trees)).repeat_interleave(torch.tensor(num_rows))
    seeds = np.repeat(np.arange(len(trees), dtype=np.uint64) << np.uint64(50), num_rows)
    positions = np.concatenate([np.append(9, 9 + tree.depths) for tree in trees]) + 2**31
    probs = softmax_at(logits, temperatures)
    expected = reject_by_torch(trees, probs, seeds, positions)
    for target in (LazyProbs(logits, temperatures), LazyProbs(probs, None)):
        actual = reject(trees, target, seeds, positions)
        assert actual.last_rows.tolist() == expected.last_rows.tolist()
        assert actual.final_tokens.tolist() == expected.final_tokens.tolist()
        torch.testing.assert_close(actual.matches, expected.matches, rtol=1e-5, atol=1e-7, equal_nan=True)
    root_rows = np.cumsum([0] + [tree.num_nodes + 1 for tree in trees])[:-1]
    num_accepted = (expected.last_rows.numpy() > root_rows).sum()
    assert num_accepted > 5 and (num_accepted < 55 or kind in ("certain", "equal"))
    assert -1 in expected.final_tokens.tolist(), "no path ended at a row that is not finite"


def test_slices_that_follow_each_other_are_joined_without_a_copy() -> None:
    table = torch.arange(40.0).view(10, 4)
    following = [table[2:5], table[5:5], table[5:9]]
    assert torch.equal(rejection.joined(following), table[2:9])
    assert rejection.joined(following).data_ptr() == table[2].data_ptr()
    for parts in ([table[5:9], table[2:5]], [table[2:4], table[5:9]], [table[2:5].clone(), table[5:9]], [table[0:4:2], table[4:5]]):
        assert torch.equal(rejection.joined(parts), torch.cat(parts))

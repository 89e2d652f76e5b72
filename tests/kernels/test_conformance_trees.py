"""Choosing draft trees and verifying them: every back end against plain Python, with vectors in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from acceptance_reference import Option, reference_match, reference_probs, sampling_rows
from exact_rules import reference_outcome
from interpreted import ON_CUDA
from numpy.typing import NDArray
from stepping import trees_on
from torch import Tensor
from torch.nn.functional import pad

from titan.core.arrays import Ints
from titan.core.batch import prefix_sums
from titan.core.limits import MAX_NODES
from titan.core.sampling_rows import SamplingRows
from titan.core.trees import EMPTY_TREE, DraftTree, DraftTrees, NodeColumns, chain_parents, topology
from titan.kernels.cpu.backend import CpuBackend
from titan.kernels.interfaces import Backend, Candidates
from titan.kernels.torch.trees import Outcome, RuledTrees, TreeToVerify, lossless
from titan.kernels.triton.backend import TritonBackend

PLAIN, GREEDY, CUT = (1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (1.3, 6, 0.9, 0.05)
INF, NAN = torch.inf, torch.nan


# Choosing trees.


def random_candidates(rng: np.random.Generator, num_requests: int, num_candidates: int) -> dict[str, NDArray[np.generic]]:
    """Forests in which about every second candidate is fed; scores often tie, and what is not finite has nothing below it."""
    shape = num_requests, num_candidates
    parent_slots, slots = np.full(shape, -1), np.full(shape, -1)
    scores = np.full(shape, -np.inf, np.float32)
    for i in range(num_requests):
        fed: list[tuple[int, np.float32]] = []  # slots and scores of those that may be parents
        kind = rng.integers(3)
        for j in range(num_candidates):
            parent = (len(fed) - 1, int(rng.integers(-1, len(fed))), -1)[kind]
            parent_slots[i, j], above = fed[parent] if parent >= 0 else (-1, np.float32(0))
            step = rng.choice([0, -0.0, -0.25, -1, -rng.random(), -np.inf, np.nan], p=[0.1, 0.1, 0.2, 0.2, 0.36, 0.02, 0.02])
            scores[i, j] = above + np.float32(step)
            if kind == 0 or rng.random() < 0.5:
                slots[i, j] = (len(fed) * 7 + 3) % 1000  # in no order
                fed.append((slots[i, j], scores[i, j]))
    scores[np.isnan(scores) & (rng.random(shape) < 0.5)] = np.inf
    return {"token_ids": rng.integers(0, 9, shape), "scores": scores, "parent_slots": parent_slots, "slots": slots}


def make_candidates(backend: Backend, columns: dict[str, NDArray[np.generic]], rows: Ints, num_nodes: Ints) -> Candidates:
    flags = np.zeros(len(rows), np.bool_)
    tensors = {name: torch.from_numpy(column).to(backend.device) for name, column in columns.items()}
    return Candidates(rows, num_nodes, flags, True, **tensors)


def best_tree(columns: dict[str, NDArray[np.generic]], i: int, num_places: int) -> NodeColumns[list[Any]]:
    token_ids, scores, above, slots = (columns[name][i].tolist() for name in ("token_ids", "scores", "parent_slots", "slots"))
    ranked = sorted((j for j in range(len(scores)) if np.isfinite(scores[j])), key=lambda j: (-scores[j], j))[:num_places]
    path: list[int] = []
    slot = -1
    while (child := next((j for j in ranked if above[j] == slot and j not in path), None)) is not None:
        path.append(child)
        slot = slots[child]
        if slot < 0:
            break
    order = [*path, *(j for j in ranked if j not in path)]
    node_in_slot = {slots[j]: node for node, j in enumerate(order)} | {-1: -1}
    parents = [node_in_slot[above[j]] for j in order]
    shape, num_empty = topology(np.array(parents, np.int32).tobytes()), num_places - len(order)
    return NodeColumns(
        token_ids=[*(token_ids[j] for j in order), *[-1] * num_empty],
        parents=[*parents, *[-2] * num_empty],
        depths=[*shape.depths.tolist(), *[1] * num_empty],
        ancestor_bits=[*shape.ancestor_bits.tolist(), *(1 << node for node in range(len(order), num_places))],
        scores=[*(scores[j] for j in order), *[-INF] * num_empty],
        draft_slots=[*(slots[j] for j in order), *[-1] * num_empty],
    )


def assert_is_tree(trees: DraftTrees, row: int, columns: dict[str, NDArray[np.generic]], i: int) -> tuple[int, int]:
    """Compare a row of the trees with the choice of request ``i``: numbers of nodes and of empty places."""
    places = slice(int(trees.start_loc[row]), int(trees.start_loc[row + 1]))
    expected = best_tree(columns, i, places.stop - places.start)
    assert NodeColumns(*(column[places].tolist() for column in trees.nodes)) == expected
    num_empty = expected.parents.count(-2)
    return len(expected.parents) - num_empty, num_empty


@pytest.mark.parametrize(
    ("num_candidates", "num_requests"),
    [(1, 4), (6, 20), (33, 12), (64, 8), (130, 6), (512, 4), pytest.param(512, 128, marks=ON_CUDA)],
)
def test_the_best_ancestor_closed_trees_are_chosen(backend: Backend, num_candidates: int, num_requests: int) -> None:
    rng = np.random.default_rng(num_candidates)
    columns, most = random_candidates(rng, num_requests, num_candidates), min(MAX_NODES, num_candidates)
    columns["scores"][-1, num_candidates // 9 :] = -np.inf
    if num_candidates == 64:  # a chain that is as deep as can be
        columns["slots"][0] = np.arange(64)
        columns["parent_slots"][0], columns["scores"][0] = columns["slots"][0] - 1, 0
    num_nodes = rng.integers(0, most, num_requests, endpoint=True)
    num_nodes[-1] = most
    if num_candidates >= MAX_NODES:
        num_nodes[:3] = MAX_NODES, 1, MAX_NODES - 1
    rows = np.sort(rng.choice(num_requests + 3, num_requests, replace=False))  # others draft nothing
    trees = backend.trees.select([make_candidates(backend, columns, rows, num_nodes)], num_requests + 3)
    counts = np.zeros(num_requests + 3, np.int64)
    counts[rows] = num_nodes
    assert trees.counts.tolist() == counts.tolist() and trees.num_rows == len(counts)
    assert np.flatnonzero(trees.has_scores).tolist() == rows.tolist() and not trees.is_sampled.any()
    found = [assert_is_tree(trees, row, columns, i) for i, row in enumerate(rows.tolist())]
    num_whole, num_cut = sum(n > 1 and not empty for n, empty in found), sum(empty > 0 for _, empty in found)
    assert (num_whole and num_cut) or num_candidates == 1


def test_requests_that_grow_in_other_ways_come_together_and_keep_their_q(backend: Backend) -> None:
    rng = np.random.default_rng(2)
    first, second = random_candidates(rng, 3, 12), random_candidates(rng, 2, 5)
    probs = torch.rand(40, 11, generator=torch.Generator().manual_seed(0)).to(backend.device)
    probs_rows = rng.integers(0, 40, (2, 1 + int(second["slots"].max()) + 1))
    sampled = make_candidates(backend, second, np.array([0, 4]), np.array([5, 3]))
    sampled = replace(sampled, has_scores=False, is_chain=np.array([True, False]), probs=probs, probs_rows=probs_rows)
    trees = backend.trees.select([make_candidates(backend, first, np.array([1, 3, 5]), np.array([4, 12, 7])), sampled], 7)
    assert trees.counts.tolist() == [5, 4, 0, 12, 3, 7, 0]
    assert trees.is_sampled.tolist() == [i in (0, 4) for i in range(7)] and trees.is_chain.tolist() == [i == 0 for i in range(7)]
    assert trees.has_scores.tolist() == [i in (1, 3, 5) for i in range(7)]
    for row, (columns, i) in {0: (second, 0), 1: (first, 0), 3: (first, 1), 4: (second, 1), 5: (first, 2)}.items():
        assert_is_tree(trees, row, columns, i)
    assert trees.draft_probs is probs and trees.draft_rows is not None and trees.draft_rows.dtype == torch.int32
    for i, row in enumerate((0, 4)):
        slots = [-1, *trees.nodes.draft_slots[int(trees.start_loc[row]) : int(trees.start_loc[row + 1])].tolist()]
        entries = trees.draft_rows[int(trees.start_loc[row]) + row :][: len(slots)].tolist()
        assert entries == [probs_rows[i, 1 + slot] for slot in slots]


# Verifying them.


@dataclass(frozen=True)
class Case:
    """Trees of a plan, what the target says about those that are verified, and how these sample."""

    trees: list[DraftTree]
    logits: list[Tensor]  # of each verified tree, [1 + nodes, vocab]
    options: list[Option]  # of each verified tree
    rows: list[int] | None = None  # of the plan, which are verified; None: all
    num_empty: list[int] | None = None  # empty places behind the nodes of each tree of the plan

    @property
    def verified(self) -> list[int]:
        return list(range(len(self.trees))) if self.rows is None else self.rows

    @property
    def sampling(self) -> SamplingRows:
        return sampling_rows(self.options)

    def by(self, backend: Backend, dtype: torch.dtype = torch.float32, draft_probs: Tensor | None = None) -> list[Outcome]:
        """The outcome of a back end; with another q than the trees have, if one is given."""
        trees, counts = self.on_device(backend), self.num_empty or [0] * len(self.trees)
        if draft_probs is not None:
            trees = replace(trees, draft_probs=draft_probs.to(backend.device))
        logits = []
        for row, each in zip(self.verified, self.logits, strict=True):
            logits += [each, torch.full((counts[row], each.shape[1]), NAN)]
        table = torch.cat(logits).to(backend.device, dtype)
        result = backend.trees.verify(table, trees, np.array(self.verified), self.sampling)
        found = []
        for path, token in zip(result.paths.tolist(), result.final_tokens.tolist(), strict=True):
            kept = [node for node in path if node >= 0]
            assert path == kept + [-1] * (len(path) - len(kept))
            found.append(Outcome(kept, token))
        return found

    def on_device(self, backend: Backend) -> DraftTrees:
        qs = [None if each.draft_probs is None else each.draft_probs.to(backend.device) for each in self.trees]
        there = [replace(each, draft_probs=q) for each, q in zip(self.trees, qs, strict=True)]
        trees = trees_on(backend, there, self.logits[0].shape[1])
        return trees if self.num_empty is None else with_empty_places(trees, self.num_empty)

    def expected(self) -> list[Outcome]:
        """By residuals as vectors, with the same random numbers."""
        found, numbers = [], self.sampling.options
        for i, (row, logits, option) in enumerate(zip(self.verified, self.logits, self.options, strict=True)):
            tree, seed, position = self.trees[row], int(numbers["seed"][i]), int(numbers["position"][i])
            p = reference_probs(logits, [option] * len(logits))
            if tree.draft_probs is None or not tree.num_nodes:
                found.append(Outcome(*reference_match(tree, p, seed, position)))
                continue
            q = tree.draft_probs.double()[tree.topology.inner_rows.tolist()]
            found.append(Outcome(*reference_outcome(tree, p.numpy(), q.numpy(), seed, position)))
        return found

    def check(self, backend: Backend, dtype: torch.dtype = torch.float32) -> list[Outcome]:
        actual = self.by(backend, dtype)
        assert actual == self.expected()
        return actual


def with_empty_places(trees: DraftTrees, num_empty: Sequence[int]) -> DraftTrees:
    """The trees with so many empty places behind their nodes, of which a verification reads tokens, parents and depths."""

    def widen(values: Tensor, sizes: Ints, filler: float) -> Tensor:
        parts = zip(values.split(sizes.tolist()), num_empty, strict=True)
        return torch.cat([pad(part, (0, number), value=filler) for part, number in parts])

    counts, fillers = trees.counts, (-1, -2, 1, 0, -INF, -1)
    nodes = NodeColumns(*(widen(column, counts, filler) for column, filler in zip(trees.nodes, fillers, strict=True)))
    return replace(
        trees,
        start_loc=prefix_sums(counts + np.array(num_empty)),
        is_chain=trees.is_chain & np.equal(num_empty, 0),
        nodes=nodes,
        draft_rows=None if trees.draft_rows is None else widen(trees.draft_rows, counts + 1, 0),
    )


def random_parents(rng: np.random.Generator, num_nodes: int) -> NDArray[np.int32]:
    match rng.integers(4):
        case 0:
            return chain_parents(num_nodes)
        case 1:
            return np.full(num_nodes, -1, np.int32)
        case _:
            return np.array([rng.integers(-1, node) for node in range(num_nodes)], np.int32).reshape(num_nodes)


def sampled_tree(rng: np.random.Generator, parents: NDArray[np.int32], q: NDArray[np.float64]) -> DraftTree:
    """A tree whose siblings are sampled from q, [1 + nodes, vocab], without replacement: the first to arrive in a race."""
    arrivals = np.divide(rng.exponential(size=q.shape), q, where=q > 0, out=np.full(q.shape, np.inf))
    token_ids = np.argsort(arrivals)[parents + 1, topology(parents.tobytes()).child_ranks]
    return DraftTree(token_ids, parents, torch.tensor(q[np.unique(parents) + 1], dtype=torch.float32))


def sampled_case(kind: str, num_trees: int, vocab_size: int = 16, *, seed: int, option: Option = PLAIN) -> Case:
    rng = np.random.default_rng(seed)
    trees, logits = [], []
    for _ in range(num_trees):
        num_nodes = int(rng.integers(1, 8)) if kind not in ("siblings", "sure") else 12
        if kind == "certain":
            parents = chain_parents(num_nodes)
        else:
            parents = random_parents(rng, num_nodes) if num_nodes < 12 else np.full(num_nodes, -1, np.int32)
        scores = rng.normal(size=(num_nodes + 1, vocab_size)) * (25 if kind == "certain" else 1.5)
        q = np.exp(scores + rng.normal(size=scores.shape) * {"certain": 3, "equal": 0}.get(kind, 0.7))
        if kind == "holes":
            is_hole = np.tile(np.arange(vocab_size) % 2 == 0, (num_nodes + 1, 1))
            q[rng.permuted(is_hole, axis=1)] = 0
        elif kind == "sure":  # of a token, and where that is taken, of another, until what is left is below any rounding
            tier = rng.permutation([0, *([1, 2, 3] if rng.random() < 0.5 else [3, 3, 3]) * 5])
            q, scores = q * np.array([1, 1e-9, 1e-20, 1e-42])[tier], scores - tier
        elif kind == "apart":
            q[:, : vocab_size // 2] = 0
            scores[:, vocab_size // 2 :] = -np.inf
        trees.append(sampled_tree(rng, parents, q / q.sum(-1, keepdims=True)))
        logits.append(torch.from_numpy(scores).float())
    return Case(trees, logits, [option] * num_trees)


def matched_case(seed: int, sizes: Sequence[int], vocab_size: int, option: Option) -> Case:
    rng = np.random.default_rng(seed)
    trees = [DraftTree(rng.integers(0, 4, n), random_parents(rng, n)) for n in sizes]
    logits = [torch.from_numpy(rng.integers(0, 3, (n + 1, vocab_size))).float() for n in sizes]  # many are equal
    for each in logits:
        each[:, 4:] -= 1.0 if option == GREEDY else 9.0  # so that the first tokens are often wanted
        if option == CUT:  # which of equal ones is cut is not said
            each += torch.from_numpy(rng.random(each.shape)).float()
    return Case(trees, logits, [option] * len(sizes))


def num_trees_for(backend: Backend, number: int) -> int:
    return number // 4 if isinstance(backend, TritonBackend) else number


@pytest.mark.long_where("triton-option4")
@pytest.mark.parametrize(
    ("option", "dtype", "number"),
    [
        (GREEDY, torch.float32, 120),
        (GREEDY, torch.bfloat16, 60),
        (GREEDY, torch.float16, 24),
        (PLAIN, torch.float32, 48),
        (PLAIN, torch.bfloat16, 24),
        (CUT, torch.float32, 6),
    ],
)
def test_random_trees_are_walked_as_in_plain_python(backend: Backend, option: Option, dtype: torch.dtype, number: int) -> None:
    """Of equal logits the first counts, and of rows that are not finite there is no token."""
    rng = np.random.default_rng(2)
    sizes = [0, 1, {GREEDY: MAX_NODES, PLAIN: 20, CUT: 4}[option], *rng.integers(0, 13, num_trees_for(backend, number))]
    case = matched_case(3, sizes, {GREEDY: 600, PLAIN: 200, CUT: 12}[option], option)
    for each in case.logits:
        each[torch.from_numpy(rng.random(len(each)) < 0.05), 7] = NAN
    case.logits[1][0, 7] = NAN
    found = case.check(backend, dtype)
    assert sum(bool(each.path) for each in found) >= len(found) // 4 and any(each.final_token < 0 for each in found)


def test_a_chain_of_63_nodes_is_accepted_to_its_end(backend: Backend) -> None:
    logits = torch.zeros(MAX_NODES + 1, 5)
    logits[:, 2], logits[-1, 3] = 50.0, 100.0
    for option in (GREEDY, PLAIN):
        [outcome] = Case([DraftTree.chain([2] * MAX_NODES)], [logits], [option]).check(backend)
        assert outcome == (list(range(MAX_NODES)), 3)


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """Numbers that nobody wrote do not pass for zeros."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.long_where("triton-near-24")
@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize(
    ("kind", "number", "options"),
    [
        ("near", 24, {}),
        ("holes", 16, {}),
        ("apart", 12, {}),
        ("equal", 8, {}),
        ("certain", 20, {}),
        ("siblings", 14, {}),
        ("sure", 25, {}),
        ("near", 4, {"option": CUT}),
        ("near", 6, {"vocab_size": 2 * 4096 + 900}),
        pytest.param("certain", 64, {"vocab_size": 128_256}, marks=ON_CUDA),
    ],
)
def test_sampled_trees_are_verified_as_by_residual_vectors(
    backend: Backend, kind: str, number: int, options: dict[str, Any]
) -> None:
    num_trees = number // 2 if isinstance(backend, TritonBackend) else number
    case = sampled_case(kind, num_trees, seed=1, **options)
    found = case.check(backend)
    if number == 24:  # the negative control: another q than the one that was sampled from
        q = case.on_device(backend).draft_probs
        assert q is not None
        wrong = case.by(backend, draft_probs=(q + 1) / (1 + q.shape[1]))
        assert wrong != case.expected()
    if number >= 16 and kind != "sure":  # whose trees are one level
        assert len({len(each.path) for each in found}) >= 3, "all paths are the same: nothing is tested"


def mixed_case(seed: int) -> Case:
    """Greedy and sampling requests, with proposals that were sampled and not, roots alone, and rows that nothing is verified of."""
    rng = np.random.default_rng(seed)
    parts = [
        matched_case(seed, [5, 0, 3], 16, GREEDY),
        matched_case(seed + 1, [4, 0, 6], 16, PLAIN),
        matched_case(seed + 2, [3, 2], 16, CUT),
        sampled_case("near", 4, seed=seed),
        sampled_case("holes", 3, seed=seed + 1, option=(0.7, 5, 1.0, 0.0)),
    ]
    every = [each for part in parts for each in zip(part.trees, part.logits, part.options, strict=True)]
    trees, logits, options = zip(*(every[i] for i in rng.permutation(len(every))), strict=True)
    rows = np.sort(rng.choice(len(every) + 4, len(every), replace=False)).tolist()
    plan = [EMPTY_TREE] * (len(every) + 4)
    for row, tree in zip(rows, trees, strict=True):
        plan[row] = tree
    return Case(plan, list(logits), list(options), rows)


def test_all_kinds_side_by_side(backend: Backend) -> None:
    """Behind the nodes of every other tree empty places, with rows of logits that nobody looks at; and trees of these alone."""
    for seed in (1,) if isinstance(backend, TritonBackend) else (1, 2, 3):
        case = mixed_case(seed)
        matched = next(i for i, row in enumerate(case.verified) if case.trees[row].draft_probs is None)
        case.logits[matched][0] = NAN  # nothing can be sampled, and an empty place has no token either
        num_empty = [(i % 2) * 3 if i in case.verified else 0 for i in range(len(case.trees))]
        found = replace(case, num_empty=num_empty).check(backend)
        assert 3 < sum(bool(each.path) for each in found) < len(found)


def test_a_rule_of_ones_own_gets_what_the_back_end_has_without_empty_places(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores where there are some; and seed and position of those that sample alone, which do not depend on neighbours."""
    case = mixed_case(4)
    trees = [each if each.draft_probs is not None else replace(each, scores=-0.5 * each.topology.depths) for each in case.trees]
    case, seen = replace(case, trees=trees), list[tuple[object, ...]]()

    def rule(tree: TreeToVerify) -> Outcome:
        assert len(tree.probs) == len(tree.logits) == 1 + len(tree.parents)
        seen.append((tree.token_ids, tree.parents, tree.scores, tree.seed, tree.position))
        return lossless(tree)

    monkeypatch.setattr(backend, "trees", RuledTrees(backend, rule))
    replace(case, num_empty=[(i % 2) * 3 if i in case.verified else 0 for i in range(len(case.trees))]).check(backend)
    expected = []
    for row, options in zip(case.verified, case.sampling.options, strict=True):
        tree, is_greedy = case.trees[row], options["temperature"] == 0
        scores = [] if tree.scores is None else tree.scores.tolist()
        numbers = (0, 0) if is_greedy else (int(options["seed"]), int(options["position"]))
        expected.append((tree.token_ids.tolist(), tree.parents.tolist(), scores, *numbers))
    assert seen == expected and any(scores for _, _, scores, *_ in seen)


def test_requests_without_draft_tokens_sample_as_without_speculation(backend: Backend) -> None:
    """The first token whose running sum exceeds the uniform number, which is keyed by seed and position."""
    for vocab_size in (1, 3, 513, 4096, 9000):
        number = num_trees_for(backend, 48)
        logits = torch.randn(number, 1, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
        logits[:, :, ::3] -= 200.0 if vocab_size > 1 else 0.0  # impossible
        options = [PLAIN, (0.5, 0, 1.0, 0.0), (3.0, 0, 1.0, 0.0), GREEDY] * (number // 4)
        Case([EMPTY_TREE] * number, list(logits), options).check(backend)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's in the interpreter
@pytest.mark.parametrize(
    ("p", "q", "token_ids", "path", "finals"),
    [
        ([0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0], [], {1}),  # impossible for the target
        ([0.0, 0.5, 0.5], [1.0, 0.0, 0.0], [0, 2], [], {1, 2}),  # q had no mass left for the second child
        ([0.7, 0.3, 0.0], [0.0, 0.5, 0.5], [2, 1, 0], [], {0}),  # nor for the last one, behind a residual
        ([0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0], [], {1}),  # impossible for both, and no residual is left
        ([0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [1], [0], {0, 1}),  # the same distribution
        ([0.0, 1.0, 0.0], [0.4, 0.2, 0.4], [2, 1], [1], {1}),  # all that the residual has left
        ([0.0, 1.0, 0.0], [0.4, 0.2, 0.4], [2, 0], [], {1}),
        ([0.5, NAN, 0.5], [0.5, 0.5, 0.0], [1], [], {-1}),  # no distribution at the root
    ],
)
def test_outcomes_that_are_certain(
    backend: Backend, p: list[float], q: list[float], token_ids: list[int], path: list[int], finals: set[int]
) -> None:
    """Even where q is 0 at a token, which a drafter may not propose."""
    tree = DraftTree(np.array(token_ids), np.full(len(token_ids), -1, np.int32), torch.ones(1, 3) / 3)
    case = Case([tree], [torch.tensor([p] * (len(token_ids) + 1)).log()], [PLAIN])
    [outcome] = case.by(backend, draft_probs=torch.tensor([q]))
    assert outcome.path == path and outcome.final_token in finals


def test_a_sampled_node_without_a_distribution_ends_the_path_without_a_token(backend: Backend) -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.5, NAN, 0.5]])
    case = Case([DraftTree.chain([1], draft_probs=p[:1])], [p.log()], [PLAIN])
    assert case.by(backend) == [([0], -1)]


@pytest.mark.parametrize("token", [2, 1 << 40, -1, -(1 << 40)])
def test_a_sampled_token_beyond_the_vocabulary_is_not_accepted(backend: Backend, token: int) -> None:
    """Drafters answer for the tokens of their `DraftTrees`; whatever these are, the compiled C++ reads no other memory."""
    if not isinstance(backend, CpuBackend):
        pytest.skip("Python's errors, or those of a device")
    p, q = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.5, 0.5], [1e-3, 1 - 1e-3]])
    trees = Case([DraftTree.chain([1, 0], draft_probs=q)], [p.log()], [CUT]).on_device(backend)
    trees = replace(trees, nodes=trees.nodes._replace(token_ids=torch.tensor([token, 0])))
    result = backend.trees.verify(p.log(), trees, np.array([0]), sampling_rows([CUT]))
    assert result.paths.tolist() == [[-1, -1]] and result.final_tokens.tolist() == [1]

"""Trees grown over passes, the general form: on all back ends the same, and what is kept is what was fed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from back_ends import BACK_ENDS, make_back_end
from proposals import trees_on_host
from torch import Tensor

from titan.core.batch import RaggedBatch
from titan.core.growth import BeamSpec, Feed, GrowthSpec, ShapeSpec, main_path_order, shape_plan
from titan.core.sampling_params import SamplingParams
from titan.core.trees import DraftTrees, Parents, chain_parents
from titan.draft.policy import CHAIN_CHILDREN
from titan.draft.shapes import expected_shape
from titan.kernels.growth import grow_by_passes
from titan.kernels.interfaces import Backend

NUM_ROWS, VOCAB_SIZE, DRAFT_VOCAB_SIZE = 7, 24, 21
BUSHY = main_path_order(np.array([-1, 0, -1, 0, 1, 2, -1, 4, 3, 3], np.int32).tobytes()).parents


class RandomDraft:
    """A draft whose logits are random, the same ones whoever asks in the same order."""

    def __init__(self, backend: Backend, kind: str, vocab_size: int = DRAFT_VOCAB_SIZE) -> None:
        self.backend = backend
        self.kind = kind
        self.vocab_size = vocab_size
        self.rng = np.random.default_rng(len(kind))
        self.fed: list[tuple[list[int], list[int], list[int]]] = []  # by depth: queries of each request, tokens, ancestor bits

    def forward(self, batch: RaggedBatch) -> Tensor:
        if (nodes := batch.nodes) is not None:
            self.fed.append((np.diff(nodes.start_loc).tolist(), nodes.token_ids.tolist(), nodes.ancestor_bits.tolist()))
        logits = self.rng.normal(size=(len(batch.logits_rows), self.vocab_size)).astype(np.float32) * 2
        if self.kind == "few":
            logits[:, 2:] = -np.inf  # two possible tokens
        elif self.kind == "broken":
            logits[self.rng.random(len(logits)) < 0.3] = np.nan
        return torch.from_numpy(logits).to(self.backend.device)


def filled(parents: Parents) -> ShapeSpec:
    return ShapeSpec(shape_plan(parents.tobytes()))


def spec_of(kind: str, row: int) -> GrowthSpec:
    """Rows of different budgets and depths."""
    budget, temperature = 3 + row, 0.5 + row / 6
    depth = min(budget, 2 + row % 4)
    match kind:
        case "chain":
            return filled(chain_parents(budget))
        case "siblings":
            return BeamSpec(budget, depth, 1, CHAIN_CHILDREN, temperature)
        case "beam":
            return BeamSpec(budget, depth, 2, 3, temperature)
        case "shape":
            return filled(BUSHY[:budget])
    shape = chain_parents(budget) if budget % 3 == 0 else expected_shape((0.6, 0.3, 0.2), budget, is_caterpillar=False)
    return ShapeSpec(shape_plan(shape.tobytes()), SamplingParams(temperature=1.0, top_k=row // 2), row)


def feeds_of(specs: Sequence[tuple[int, GrowthSpec]]) -> list[Feed]:
    return [Feed(row, list(range(9 * row, 9 * row + 9)), 5 + row, [1, 2][: 1 + row % 2], spec) for row, spec in specs]


def grow(draft: RandomDraft, feeds: Sequence[Feed], num_rows: int = NUM_ROWS, vocab_size: int = VOCAB_SIZE) -> DraftTrees:
    return grow_by_passes(draft.forward, draft.backend, feeds, num_rows, vocab_size, 16)


KINDS = {kind: [kind] * NUM_ROWS for kind in ("chain", "siblings", "beam", "shape", "sampled")}
KINDS["mixed"] = ["sampled", "beam", "nothing", "chain", "beam", "sampled", "siblings"]


@pytest.mark.parametrize("logits", ["plain", "few", "broken"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("back_end", ["cpu", "triton"])
def test_trees_are_those_that_pytorch_grows(back_end: str, kind: str, logits: str) -> None:
    """Also where the draft has fewer tokens than the target, few possible ones, or NaN."""
    specs = [(row, spec_of(each, row)) for row, each in enumerate(KINDS[kind]) if each != "nothing"]
    drafts = [RandomDraft(make_back_end(name), logits) for name in (back_end, "torch")]
    found, expected = (grow(draft, feeds_of(specs)) for draft in drafts)
    for name in ("start_loc", "is_chain", "is_sampled", "has_scores"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()
    for one, other in zip(
        *(trees_on_host(draft.backend, each) for draft, each in zip(drafts, (found, expected), strict=True)), strict=True
    ):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.parents.tolist() == other.parents.tolist()
        assert one.draft_slots is not None and other.draft_slots is not None
        assert one.draft_slots.tolist() == other.draft_slots.tolist()
        assert (one.scores is None) == (other.scores is None)
        if one.scores is not None and other.scores is not None:
            np.testing.assert_allclose(one.scores, other.scores, rtol=1e-5, atol=1e-5)
        assert (one.draft_probs is None) == (other.draft_probs is None)
        if one.draft_probs is not None and other.draft_probs is not None:
            torch.testing.assert_close(one.draft_probs, other.draft_probs, rtol=1e-5, atol=1e-6)
    num_nodes = int((expected.nodes.token_ids >= 0).sum())
    assert num_nodes > (0 if logits == "broken" else NUM_ROWS)
    assert num_nodes < expected.num_nodes or logits == "plain" or kind == "chain", "places stay empty"
    assert int(expected.nodes.token_ids.max()) < DRAFT_VOCAB_SIZE
    if kind == "mixed":
        assert expected.counts[2] == 0 and found[2].num_nodes == 0


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_requests_that_only_feed_get_empty_trees(back_end: str) -> None:
    draft = RandomDraft(make_back_end(back_end), "plain")
    [feed] = feeds_of([(1, filled(chain_parents(2)))])
    assert grow(draft, [feed._replace(spec=None)]).counts.tolist() == [0] * NUM_ROWS
    assert draft.fed == []


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0])
def test_chains_of_near_certain_nodes_keep_their_parents(temperature: float, back_end: str) -> None:
    """A child with a log-probability of nearly 0 must not overtake its parent by rounding."""
    torch.manual_seed(0)
    n, vocab_size, backend = 64, 12, make_back_end(back_end)

    def forward(batch: RaggedBatch) -> Tensor:
        logits = torch.randn(n, vocab_size)
        logits[torch.arange(n), torch.randint(vocab_size, (n,))] += torch.where(torch.rand(n) < 0.5, 30 * temperature, 0.0)
        return logits.to(backend.device)

    feeds = [Feed(i, [0], 3, [1], BeamSpec(4, 6, 1, CHAIN_CHILDREN, temperature)) for i in range(n)]
    trees = trees_on_host(backend, grow_by_passes(forward, backend, feeds, n, vocab_size, 16))
    assert all(tree.num_nodes == 4 for tree in trees)


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_where_logits_tie_the_chain_that_is_proposed_is_the_one_that_was_fed(back_end: str) -> None:
    torch.manual_seed(0)
    n, vocab_size, depth, backend = 50, 300, 4, make_back_end(back_end)
    fed: list[list[int]] = []

    def forward(batch: RaggedBatch) -> Tensor:
        if batch.nodes is not None:
            fed.append(batch.nodes.token_ids.tolist())
        return torch.randint(4, (n, vocab_size)).bfloat16().to(backend.device)

    feeds = [Feed(i, [0], 3, [1], BeamSpec(depth, depth, 1, CHAIN_CHILDREN, 0.05)) for i in range(n)]
    num_checked = 0
    for i, tree in enumerate(trees_on_host(backend, grow_by_passes(forward, backend, feeds, n, vocab_size, 16))):
        assert tree.draft_slots is not None
        for node, slot in enumerate(tree.draft_slots.tolist()):
            if slot >= 0:
                assert tree.token_ids[node] == fed[slot][i]
                num_checked += 1
        for parent in tree.topology.inner.tolist():
            children = tree.token_ids[tree.parents == parent].tolist()
            assert len(set(children)) == len(children)
    assert num_checked > 20


@pytest.mark.parametrize("row", range(NUM_ROWS))
@pytest.mark.parametrize("kind", ["chain", "siblings", "beam", "shape", "sampled"])
def test_as_many_slots_are_written_as_the_spec_says_and_nodes_claim_no_others(kind: str, row: int) -> None:
    draft, ends = RandomDraft(make_back_end("torch"), "plain"), []

    def forward(batch: RaggedBatch) -> Tensor:
        ends.append(int(batch.attention.seq_lens.max()))
        return draft.forward(batch)

    [feed] = feeds_of([(row, spec_of(kind, row))])
    trees = trees_on_host(draft.backend, grow_by_passes(forward, draft.backend, [feed], NUM_ROWS, VOCAB_SIZE, 16))
    assert feed.spec is not None and trees[row].draft_slots is not None
    assert max(ends) == feed.root + 1 + feed.spec.num_slots
    assert trees[row].num_nodes > 1 and max(trees[row].draft_slots.tolist()) < feed.spec.num_slots

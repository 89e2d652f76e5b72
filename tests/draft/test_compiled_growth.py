"""Trees grown in one call of the compiled library, against the same trees grown depth by depth in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from back_ends import make_back_end
from proposals import assert_same_trees, filled, trees_on_host
from stepping import slots_in_order
from tiny_models import make_model
from twins import BLOCK_SIZE, GrowthTwins
from zoo import Zoo

from titan.core.growth import BeamSpec, Feed, GrowthSpec, ShapeSpec, Worth, main_path_order
from titan.core.limits import MAX_NODES
from titan.core.sampling_params import SamplingParams
from titan.core.trees import DraftTrees, Parents, chain_parents
from titan.kernels.cpu.runner import CompiledRunner

TEMPERATURES = [0.7, 1.0, 1.4, 0.3, 1.0]
BUSHY = np.array([-1, 0, 1, -1, 0, 3, 5, -1], np.int32)
WIDE = np.full(12, -1, np.int32)
LINE = chain_parents(5)
SHAPES = [BUSHY, LINE, WIDE, BUSHY, BUSHY]


def sampled(parents: Parents, i: int, **cuts: Any) -> ShapeSpec:
    return replace(filled(parents), params=SamplingParams(temperature=TEMPERATURES[i], **cuts), seed=i)


SPECS: dict[str, list[GrowthSpec]] = {
    "chains": [filled(chain_parents(n)) for n in (4, 1, 6, 2, 6)],
    "chains with siblings": [BeamSpec(6, depth, 1, 3, t) for depth, t in zip((4, 1, 6, 2, 6), TEMPERATURES, strict=True)],
    "beams": [BeamSpec(n, depth, 2, 3, t) for n, depth, t in zip((9, 1, 6, 2, 16), (5, 1, 4, 2, 5), TEMPERATURES, strict=True)],
    "large beams": [BeamSpec(MAX_NODES, 8, 7, 8, t) for t in TEMPERATURES],
    "wide beams": [BeamSpec(20, 2, 63, 64, 1.0), filled(chain_parents(3))],
    "shapes": [filled(shape) for shape in SHAPES],
    "sampled": [sampled(shape, i) for i, shape in enumerate(SHAPES)],
    "cut": [sampled(BUSHY, 0, top_k=3), sampled(LINE, 1), sampled(WIDE, 2, top_p=0.8), sampled(LINE, 3, min_p=0.2), filled(WIDE)],
    "of all that is cut": [sampled(BUSHY, i, top_k=60 - 9 * i, top_p=0.9, min_p=0.02 * i) for i in range(5)],
    "cuts that remove nothing": [sampled(BUSHY, 0, top_k=150), sampled(LINE, 1, top_p=1 - 1e-9, min_p=1e-60)],
    "all kinds": [sampled(BUSHY, 0), filled(WIDE), sampled(LINE, 2), filled(chain_parents(3)), BeamSpec(6, 3, 2, 3, 0.5)],
}


def assert_grown(twins: GrowthTwins, feeds: Sequence[Feed]) -> DraftTrees:
    """With the same nodes, scores and distributions as in the general form."""
    assert isinstance(twins.runner, CompiledRunner)
    trees = twins.grow(feeds)
    assert_same_trees(twins.backend, trees, twins.expected(feeds), range(7), 1e-4)
    return trees


@pytest.mark.long_where(*(f"{size}-{kind}-roots in the call" for size in (90, 150) for kind in SPECS))
@pytest.mark.parametrize("has_chunk", [False, True], ids=["roots in the call", "roots beside a chunk"])
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize(("draft", "vocab_size"), [("other", 131), ("narrow_window~", 131), ("other", 90), ("other", 150)])
def test_the_trees_are_those_that_are_grown_depth_by_depth(
    zoo: Zoo, draft: str, vocab_size: int, kind: str, has_chunk: bool
) -> None:
    """And the same KV; also where the target has fewer or more tokens than the draft."""
    twins = GrowthTwins(zoo.path(draft), vocab_size, make_back_end("cpu"))
    [kv] = twins.runner.kv.groups
    before = kv.clone()
    trees = assert_grown(twins, [*twins.feeds(SPECS[kind]), *([twins.chunk()] if has_chunk else [])])
    twins.assert_same_kv()
    assert not torch.equal(kv, before) and trees.num_nodes >= 5
    assert int(trees.nodes.token_ids.max()) < min(vocab_size, 131)


@pytest.mark.parametrize("has_chunk", [False, True], ids=["trees alone", "beside a chunk"])
def test_the_report_counts_each_pass_and_each_row(zoo: Zoo, has_chunk: bool) -> None:
    """Also the rows of a chunk, which are fed with the roots: their time is that of the draft."""
    twins = GrowthTwins(zoo.path("other"), 131, make_back_end("cpu"))
    feeds = [*twins.feeds(SPECS["chains"]), *([twins.chunk()] if has_chunk else [])]
    trees, expected = assert_grown(twins, feeds), twins.expected(feeds)
    assert trees.growth is not None and expected.growth is not None
    assert (trees.growth.num_passes, trees.growth.num_rows) == (expected.growth.num_passes, expected.growth.num_rows)
    assert trees.growth.seconds > 0
    assert trees.growth.first_scores.tolist() == pytest.approx(expected.growth.first_scores.tolist(), nan_ok=True)


def priced(pass_price: float, row_price: float = 0.01) -> list[GrowthSpec]:
    """Two beams and a chain of beams, each with prices of its own."""
    specs = BeamSpec(16, 5, 3, 4, 0.3), BeamSpec(9, 6, 2, 3, 0.25), BeamSpec(6, 6, 1, 3, 0.2)
    return [replace(spec, worth=Worth(0.9, 0.8, 0.01 + i / 99, row_price, pass_price)) for i, spec in enumerate(specs)]


PRICED: dict[str, tuple[list[GrowthSpec], int]] = {  # and the greatest depth
    "never": (priced(1e-6, -1.0), 6),
    "beside shapes": ([*priced(9.0, row_price=0.3), filled(LINE), sampled(BUSHY, 1)], 5),
    "after a shape": ([*priced(0.4), filled(WIDE), sampled(chain_parents(2), 0)], 3),
}


@pytest.mark.parametrize("case", PRICED)
def test_growth_that_ends_where_it_does_not_pay_is_that_of_the_general_form(zoo: Zoo, case: str) -> None:
    """And the KV that the nodes claim is theirs; in whatever order the requests come."""
    twins, (specs, max_depth) = GrowthTwins(zoo.path("other"), 131, make_back_end("cpu")), PRICED[case]
    feeds = twins.feeds(specs)
    trees = assert_grown(twins, feeds[::-1])
    assert int(trees.nodes.depths.max()) == max_depth
    slots = [
        feed.block_ids[slot // BLOCK_SIZE] * BLOCK_SIZE + slot % BLOCK_SIZE
        for feed, tree in zip(feeds, trees_on_host(twins.backend, trees), strict=False)
        for slot in (feed.root + 1 + tree.draft_slots[tree.draft_slots >= 0]).tolist()  # type: ignore[index, operator]
    ]
    assert len(slots) >= 3
    [kv], [expected] = (each.kv.groups for each in (twins.runner, twins.plain))
    torch.testing.assert_close(*(slots_in_order(each)[:, :, :, slots] for each in (kv, expected)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocab_size", [8, 11], ids=["the same vocabulary", "a larger one"])
@pytest.mark.parametrize("is_sampled", [False, True])
def test_a_shape_with_more_children_than_the_draft_has_tokens_has_fewer_nodes(zoo: Zoo, is_sampled: bool, vocab_size: int) -> None:
    """Also where a node that is missing would have children of its own, which are fed as if it were there."""
    twins = GrowthTwins(zoo.path("eight_other"), vocab_size, make_back_end("cpu"))
    wide = main_path_order([*[-1] * 12, 10, 10, 11, 0, 12]).parents
    feeds = twins.feeds([sampled(wide, i) if is_sampled else filled(wide) for i in range(5)])
    trees = assert_grown(twins, feeds)
    assert trees.counts.tolist() == [9] * 5 + [0] * 2, "a star of all eight, and one below"
    if trees.draft_probs is not None and trees.draft_rows is not None:
        assert trees.draft_probs.shape[1] == vocab_size and not trees.draft_probs[trees.draft_rows, 8:].any()
    assert (trees.draft_probs is not None) == is_sampled


def test_a_shape_with_more_children_than_there_are_possible_tokens_has_fewer_nodes(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama", num_hidden_layers=1)
    embedding, head = model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data
    embedding.add_(1000.0)  # so that all numbers of hidden states are near 1
    head[5:] = -3e38  # logits of -inf
    model.save_pretrained(tmp_path)
    twins = GrowthTwins(str(tmp_path), 131, make_back_end("cpu"))
    trees = assert_grown(twins, twins.feeds([filled(WIDE)] * 3))
    assert trees.counts[:3].tolist() == [5] * 3


@pytest.mark.parametrize("kind", ["chains", "beams", "all kinds"])
def test_a_tree_does_not_depend_on_its_neighbours(zoo: Zoo, kind: str) -> None:
    """Bit by bit."""
    twins = GrowthTwins(zoo.path("other"), 131, make_back_end("cpu"))
    feeds = twins.feeds(SPECS[kind])
    together, alone = (trees_on_host(twins.backend, twins.grow(each))[4] for each in (feeds, feeds[4:]))
    assert alone.token_ids.tolist() == together.token_ids.tolist() and alone.num_nodes > 2
    assert alone.scores is None or together.scores is None or alone.scores.tolist() == together.scores.tolist()


@pytest.mark.parametrize("kind", ["chains", "chains with siblings", "beams", "shapes", "sampled"])
def test_logits_that_are_not_finite_cost_the_neighbours_nothing(zoo: Zoo, kind: str) -> None:
    """A root whose logits are NaN, since its context is, may get any tree of known tokens, or none."""
    twins = GrowthTwins(zoo.path("other"), 131, make_back_end("cpu"))
    feeds = [*twins.feeds(SPECS[kind]), twins.chunk()]
    expected = twins.grow(feeds)
    twins.runner.kv.groups[0][:, twins.tables[2]] = torch.nan
    actual = twins.grow(feeds)
    assert_same_trees(twins.backend, actual, expected, [0, 1, 3, 4, 5, 6], 0.0)
    token_ids = trees_on_host(twins.backend, actual)[2].token_ids
    assert ((token_ids >= 0) & (token_ids < 131)).all()


def test_slots_without_blocks_and_positions_without_rotations_are_refused(zoo: Zoo) -> None:
    twins = GrowthTwins(zoo.path("other"), 131, make_back_end("cpu"))
    [beam] = twins.feeds([BeamSpec(MAX_NODES, 8, 7, 8, 1.0)])
    with pytest.raises(IndexError, match="does not cover slot"):
        twins.grow([beam._replace(block_ids=beam.block_ids[:2])])
    with pytest.raises(IndexError, match="256"):
        twins.grow([Feed(0, list(range(20)), 254, [5], filled(chain_parents(3)))])


@pytest.mark.parametrize("size", [(64, 1, 1), (9, 65, 1), (9, 9, 8)])
def test_beams_whose_ancestors_are_more_than_64_bits_are_refused(size: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="is too large: at most 63 are allowed"):
        BeamSpec(*size, 9, 1.0)

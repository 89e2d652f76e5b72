"""Both implementations of attention on a CPU against its slow twin in float64, on ragged mixes of everything a step can hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from titan.bench.gpu.attention_reference import reference_tree_attention
from titan.core.trees import DraftTree
from titan.execute.batch import Segment, build_batch, build_draft_passes
from titan.kernels.cpu.layers import CompiledOps
from titan.kernels.cpu.library import load_library
from titan.kernels.torch.layers import TorchOps

Ints = NDArray[np.int64]

CPU = torch.device("cpu")
HEAD_DIM = 16
OTHER_HEAD_DIMS = (40, 64, 80, 96, 128)  # a remainder behind whole vectors; whole tiles; those that are compiled for their size
SCALE = 0.3
KINDS = ("decode", "chain", "tree", "late_nodes", "chunk", "prompt", "long_chunk", "long_prompt")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def make_ops(name: str, dtype: torch.dtype) -> TorchOps | CompiledOps:
    if name == "torch":
        return TorchOps()
    loaded = load_library()
    if loaded.library is None:
        pytest.skip(loaded.description)
    return CompiledOps(loaded.library, dtype)


IMPLEMENTATIONS = ("torch", "compiled")


@dataclass
class Case:
    """Segments, the layout of their blocks, and per query token the slots it must see."""

    segments: list[Segment]
    num_blocks: int
    block_size: int
    visible_slots: list[list[int]]

    @property
    def block_table(self) -> list[list[int]]:
        return [segment.block_ids for segment in self.segments]

    @property
    def query_start_loc(self) -> list[int]:
        lengths = [len(segment.token_ids) + segment.tree.num_nodes - segment.first_node for segment in self.segments]
        return [0, *np.cumsum(lengths).tolist()]


def random_tree(rng: np.random.Generator, num_nodes: int) -> DraftTree:
    """Every second tree is deep, deeper than the shortest window."""
    is_deep = rng.random() < 0.5
    parents = [int(rng.integers(max(-1, node - 3) if is_deep else -1, node)) for node in range(num_nodes)]
    return DraftTree(np.zeros(num_nodes, np.int64), np.array(parents, np.int32))


def random_segment(rng: np.random.Generator, kind: str) -> Segment:
    """A segment whose ``block_ids`` are still to be given."""
    context = int(rng.integers(0, 70))
    tree, first_node, num_tokens = DraftTree.chain([]), 0, 1
    match kind:
        case "chain":
            tree, num_tokens = DraftTree.chain([0] * int(rng.integers(1, 7))), int(rng.integers(1, 3))
        case "tree":
            tree, num_tokens = random_tree(rng, int(rng.integers(2, 64))), int(rng.integers(1, 4))
        case "late_nodes":
            tree, num_tokens = random_tree(rng, int(rng.integers(4, 20))), 0
            first_node = int(rng.integers(1, tree.num_nodes))
            context += 1  # the root is there already
        case "chunk":
            num_tokens = int(rng.integers(2, 20))
        case "prompt":
            context, num_tokens = 0, int(rng.integers(1, 60))
        case "long_chunk":
            num_tokens = int(rng.integers(65, 90))
        case "long_prompt":
            context, num_tokens = 0, int(rng.integers(65, 90))
    root = context + num_tokens - 1
    return Segment([], context, [0] * num_tokens, tree, first_node, root)


def must_see(segment: Segment, window: int | None) -> list[list[int]]:
    """Per query token of the segment, the slots it must see: said without bits, lengths or masks."""

    def in_window(position: int, slots: range) -> list[int]:
        return [slot for slot in slots if window is None or position - slot < window]

    positions = range(segment.start, segment.start + len(segment.token_ids))
    rows = [in_window(position, range(position + 1)) for position in positions]
    root = segment.root_position
    for node in range(segment.first_node, segment.tree.num_nodes):
        path, ancestor = [], node  # upwards
        while ancestor >= 0:
            path.append(ancestor)
            ancestor = int(segment.tree.parents[ancestor])
        rows.append(in_window(root + len(path), range(root + 1)))
        rows[-1] += [root + 1 + ancestor for distance, ancestor in enumerate(path) if window is None or distance < window]
    return rows


def random_case(seed: int, kinds: list[str], layout: str, block_size: int, window: int | None) -> Case:
    rng = np.random.default_rng(seed)
    segments = [random_segment(rng, kind) for kind in kinds]
    sizes = [-(-(max(s.start + len(s.token_ids), s.root_position + 1 + s.tree.num_nodes)) // block_size) for s in segments]
    num_blocks = sum(sizes) + (7 if layout == "scattered" else 0)
    order = rng.permutation(num_blocks) if layout == "scattered" else np.arange(num_blocks)
    starts = np.cumsum([0, *sizes])
    placed = []
    for i, segment in enumerate(segments):
        block_ids = order[starts[i] : starts[i + 1]].tolist()
        if layout == "shared" and placed:  # a common prefix: the full blocks that neither of the two writes
            num_shared = min(segment.start, placed[0].start) // block_size
            block_ids[:num_shared] = placed[0].block_ids[:num_shared]
        placed.append(replace(segment, block_ids=block_ids))
    return Case(placed, num_blocks, block_size, [row for segment in placed for row in must_see(segment, window)])


def random_kv(rng: torch.Generator, case: Case, num_kv_heads: int, dtype: torch.dtype, head_dim: int = HEAD_DIM) -> Tensor:
    """NaN in blocks that nobody owns, and large values in slots that are owned, but that nobody may see."""
    kv = torch.randn(2, num_kv_heads, case.num_blocks, case.block_size, head_dim, generator=rng).to(dtype)
    seen = torch.zeros(case.num_blocks, case.block_size, dtype=torch.bool)
    owners = np.repeat(np.arange(len(case.segments)), np.diff(case.query_start_loc))
    for owner, slots in zip(owners, case.visible_slots, strict=True):
        for slot in slots:
            seen[case.block_table[owner][slot // case.block_size], slot % case.block_size] = True
    kv[:, :, ~seen] = 300.0
    free = sorted(set(range(case.num_blocks)) - {block for table in case.block_table for block in table})
    kv[:, :, free] = torch.nan
    return kv


def check(
    case: Case,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    dtype: torch.dtype,
    ops_name: str,
    head_dim: int = HEAD_DIM,
) -> None:
    ops = make_ops(ops_name, dtype)
    generator = torch.Generator().manual_seed(0)
    kv = random_kv(generator, case, num_kv_heads, dtype, head_dim)
    # as a model hands them over: in one tensor with keys and values
    q = torch.randn(case.query_start_loc[-1], num_heads + 2, head_dim, generator=generator).to(dtype)[:, :num_heads]
    windows = (None, window) if window is not None else (None,)
    plan = ops.plan_attention(build_batch(case.segments, block_size=case.block_size).attention, windows)
    output = ops.tree_attention(q, kv, plan, scale=SCALE, window=window)
    expected = reference_tree_attention(
        q, kv, query_start_loc=case.query_start_loc, block_table=case.block_table, visible_slots=case.visible_slots, scale=SCALE
    )
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=5),
    layout=st.sampled_from(("dense", "scattered", "shared")),
    heads=st.sampled_from(((4, 4), (4, 2), (4, 1), (1, 1))),
    block_size=st.sampled_from((8, 16, 32)),
    window=st.sampled_from((None, None, 5, 24)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    ops_name=st.sampled_from(IMPLEMENTATIONS),
    head_dim=st.sampled_from((HEAD_DIM, 64)),
)
def test_any_mix_of_queries(
    seed: int,
    kinds: list[str],
    layout: str,
    heads: tuple[int, int],
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    ops_name: str,
    head_dim: int,
) -> None:
    check(random_case(seed, kinds, layout, block_size, window), *heads, window, dtype, ops_name, head_dim)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ops_name", IMPLEMENTATIONS)
def test_each_kind_of_query_alone(ops_name: str, kind: str, window: int | None, dtype: torch.dtype) -> None:
    check(random_case(3, [kind], "scattered", 16, window), 4, 2, window, dtype, ops_name)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("num_kv_heads", [2, 4])
@pytest.mark.parametrize("head_dim", OTHER_HEAD_DIMS)
@pytest.mark.parametrize("ops_name", IMPLEMENTATIONS)
def test_other_sizes_of_heads(ops_name: str, head_dim: int, num_kv_heads: int, window: int | None, dtype: torch.dtype) -> None:
    case = random_case(6, ["decode", "tree", "chunk", "long_chunk"], "scattered", 16, window)
    check(case, 4, num_kv_heads, window, dtype, ops_name, head_dim)


@pytest.mark.parametrize("ops_name", IMPLEMENTATIONS)
def test_queries_may_lie_in_memory_by_heads(ops_name: str) -> None:
    ops, case = make_ops(ops_name, torch.float32), random_case(7, ["decode", "chunk"], "dense", 16, None)
    generator = torch.Generator().manual_seed(0)
    kv = random_kv(generator, case, 2, torch.float32)
    q = torch.randn(4, case.query_start_loc[-1], HEAD_DIM, generator=generator).transpose(0, 1)
    plan = ops.plan_attention(build_batch(case.segments, block_size=16).attention, (None,))
    expected = ops.tree_attention(q.contiguous(), kv, plan, scale=SCALE, window=None)
    torch.testing.assert_close(ops.tree_attention(q, kv, plan, scale=SCALE, window=None), expected, rtol=0, atol=0)


@pytest.mark.parametrize("num_nodes", [0, 7, 40])
@pytest.mark.parametrize("num_heads", [2, 6])
@pytest.mark.parametrize("head_dim", [HEAD_DIM, 64, 96, 128])
def test_in_bfloat16_only_weights_and_outputs_are_rounded(head_dim: int, num_heads: int, num_nodes: int) -> None:
    """Each by half a unit of its last bit, at most, and to either side."""
    ops, window, scale = make_ops("compiled", torch.bfloat16), None, 0.1
    tree = DraftTree.chain([0] * num_nodes)
    segment = Segment(list(range(30)), 400, [0], tree, root_position=400)
    case = Case([segment], 30, 16, must_see(segment, window))
    generator = torch.Generator().manual_seed(0)
    kv = random_kv(generator, case, 2, torch.bfloat16, head_dim)
    q = torch.randn(num_nodes + 1, num_heads, head_dim, generator=generator).bfloat16()
    plan = ops.plan_attention(build_batch([segment], block_size=16).attention, (window,))
    output = ops.tree_attention(q, kv, plan, scale=scale, window=window).double()

    def expected(kv_layer: Tensor) -> Tensor:
        return reference_tree_attention(
            q,
            kv_layer,
            query_start_loc=case.query_start_loc,
            block_table=case.block_table,
            visible_slots=case.visible_slots,
            scale=scale,
        )

    exact, sizes = expected(kv), expected(torch.stack([kv[0], kv[1].abs()]))  # of the terms that a result is the sum of
    assert ((output - exact).abs() <= 2 * 2**-8 * 1.01 * sizes).all()
    few = 2**-7 / output.numel() ** 0.5  # roundings, which do not quite cancel out
    assert abs(float((output * exact).sum() / exact.square().sum()) - 1) <= max(2**-11, few)


@pytest.mark.parametrize("num_heads", [2, 6])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("ops_name", IMPLEMENTATIONS)
def test_scores_far_beyond_the_first_ones_do_not_overflow(ops_name: str, dtype: torch.dtype, num_heads: int) -> None:
    """The last slot's score is larger than the first's by much more than exponentials of float32 reach."""
    ops, generator = make_ops(ops_name, dtype), torch.Generator().manual_seed(0)
    segment = Segment(list(range(6)), 90, [0])
    plan = ops.plan_attention(build_batch([segment], block_size=16).attention, (None,))
    q = torch.ones(1, num_heads, 64).to(dtype)
    kv = torch.randn(2, 2, 6, 16, 64, generator=generator).to(dtype)
    kv[0] = torch.arange(96).view(1, 6, 16, 1) / 64  # scores 0, 1, 2 ... at scale 1
    output = ops.tree_attention(q, kv, plan, scale=10.0, window=None).view(num_heads, 64)
    last = kv[1, :, 5, 90 % 16].repeat_interleave(num_heads // 2, 0)
    torch.testing.assert_close(output, last, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("head_dim", [HEAD_DIM, 64])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_chain_is_attended_as_its_tokens_alone(dtype: torch.dtype, head_dim: int, window: int | None) -> None:
    """Bit by bit, wherever the context ends, whatever lies behind it, and whoever is beside."""
    ops, generator = make_ops("compiled", dtype), torch.Generator().manual_seed(0)
    num_nodes = 9
    for root in (0, 3, 14, 31, 60, 127):
        kv = torch.randn(2, 2, 20, 16, head_dim, generator=generator).to(dtype)
        q = torch.randn(num_nodes + 1, 6, head_dim, generator=generator).to(dtype)

        def attend(segments: list[Segment], queries: Tensor, kv_layer: Tensor) -> Tensor:
            plan = ops.plan_attention(build_batch(segments, block_size=16).attention, (window,))
            return ops.tree_attention(queries, kv_layer, plan, scale=SCALE, window=window)

        blocks = list(range(10))
        chain = Segment(blocks, root, [0], DraftTree.chain([0] * num_nodes), root_position=root)
        neighbour = Segment(list(range(10, 20)), 50, [0] * 3, root_position=52)
        both = attend([neighbour, chain], torch.cat([q[:3], q]), kv)[3:]
        for i in range(num_nodes + 1):
            broken = kv.clone().flatten(2, 3)  # what is not there yet
            broken[:, :, root + i + 1 : 160] = torch.nan
            alone = attend([Segment(blocks, root + i, [0])], q[i : i + 1], broken.view(kv.shape))
            assert torch.equal(alone, both[i : i + 1])


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, HEAD_DIM), (torch.bfloat16, 64)])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("ops_name", IMPLEMENTATIONS)
def test_nan_in_one_visible_slot_shows(
    ops_name: str, num_kv_heads: int, dtype: torch.dtype, head_dim: int, window: int | None
) -> None:
    ops = make_ops(ops_name, dtype)
    segment = Segment([0, 1, 2], 47, [0])
    plan = ops.plan_attention(build_batch([segment], block_size=16).attention, (window,))
    q = torch.randn(1, 2, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    for broken in (0, 5, 31, 40, 47):
        kv = torch.randn(2, num_kv_heads, 3, 16, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)
        kv[0, :, broken // 16, broken % 16] = torch.nan
        is_visible = window is None or broken > 47 - window
        if is_visible or ops_name == "compiled":  # PyTorch's wants finite slots wherever a request may look
            assert bool(ops.tree_attention(q, kv, plan, scale=SCALE, window=window).isnan().all()) == is_visible


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, HEAD_DIM), (torch.bfloat16, 64)])
def test_a_broken_key_reaches_those_alone_that_see_it(dtype: torch.dtype, head_dim: int) -> None:
    """Two branches of a tree; the keys of one are infinite or NaN."""
    ops, generator = make_ops("compiled", dtype), torch.Generator().manual_seed(0)
    tree = DraftTree(np.zeros(4, np.int64), np.array([-1, -1, 0, 1], np.int32))
    segment = Segment([0, 1, 2], 40, [0], tree, root_position=40)
    plan = ops.plan_attention(build_batch([segment], block_size=16).attention, (None,))
    q = torch.randn(5, 4, head_dim, generator=generator).to(dtype)
    kv = torch.randn(2, 2, 3, 16, head_dim, generator=generator).to(dtype)
    clean = ops.tree_attention(q, kv, plan, scale=SCALE, window=None)
    for value in (torch.nan, torch.inf):
        broken = kv.clone()
        broken[0, :, 2, (42 + 1) % 16] = value  # node 2, a child of node 0
        output = ops.tree_attention(q, broken, plan, scale=SCALE, window=None)
        assert torch.equal(output[[0, 1, 2, 4]], clean[[0, 1, 2, 4]])
        assert not output[3].isfinite().any() or value == torch.inf


@pytest.mark.parametrize("layout", ["dense", "scattered", "shared"])
@pytest.mark.parametrize("ops_name", IMPLEMENTATIONS)
def test_many_decodes_of_very_different_length(ops_name: str, layout: str) -> None:
    check(random_case(4, ["decode"] * 12 + ["chain"] * 6, layout, 8, None), 4, 2, None, torch.float32, ops_name)


@pytest.mark.parametrize("kind", ["decode", "chain"])
@pytest.mark.parametrize("ops_name", IMPLEMENTATIONS)
def test_queries_of_equal_length_need_no_padding(ops_name: str, kind: str) -> None:
    case = random_case(0, [kind], "dense", 16, None)
    segments = [case.segments[0], *(shifted(case.segments[0], i * 9) for i in range(1, 4))]
    rows = [row for segment in segments for row in must_see(segment, None)]
    check(Case(segments, 40, 16, rows), 4, 2, None, torch.float32, ops_name)


def shifted(segment: Segment, offset: int) -> Segment:
    return replace(segment, block_ids=[block + offset for block in segment.block_ids])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    num_requests=st.integers(1, 5),
    heads=st.sampled_from(((4, 4), (4, 1))),
    window=st.sampled_from((None, 1, 2, 3, 9)),
    ops_name=st.sampled_from(IMPLEMENTATIONS),
)
def test_frontier_nodes_see_their_context_and_their_ancestors(
    seed: int, num_requests: int, heads: tuple[int, int], window: int | None, ops_name: str
) -> None:
    """`build_draft_passes`, whose ancestor bits come with the tokens: any nodes of each depth, in trees of any shape."""
    rng = np.random.default_rng(seed)
    ops, block_size = make_ops(ops_name, torch.float32), 8
    trees = [random_tree(rng, int(rng.integers(1, 20))) for _ in range(num_requests)]
    feeds: list[list[Ints]] = []
    for tree in trees:  # some nodes of every depth, down to a random one
        at_depths = [np.flatnonzero(tree.depths == depth) for depth in range(1, rng.integers(1, tree.depths.max() + 1) + 1)]
        feeds.append([np.sort(rng.choice(nodes, rng.integers(1, len(nodes) + 1), replace=False)) for nodes in at_depths])
    roots = rng.integers(0, 60, num_requests)
    sizes = [int(root + 1 + tree.num_nodes) // block_size + 1 for root, tree in zip(roots, trees, strict=True)]
    order = rng.permutation(sum(sizes) + 3)
    tables = [table.tolist() for table in np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1])]
    windows = (None,) if window is None else (window, None)
    passes = list(build_draft_passes(tables, roots, feeds, block_size=block_size))
    assert len(passes) == max(map(len, feeds))
    kv = torch.randn(2, heads[1], len(order), block_size, HEAD_DIM, generator=torch.Generator().manual_seed(2))
    for depth, draft_pass in enumerate(passes, start=1):
        going_on = [i for i, feed in enumerate(feeds) if len(feed) >= depth]
        nodes = [feeds[i][depth - 1] for i in going_on]
        bits = np.concatenate([trees[i].ancestor_bits[chosen] for i, chosen in zip(going_on, nodes, strict=True)])
        batch = draft_pass.with_nodes(torch.zeros(len(bits), dtype=torch.int64), torch.from_numpy(bits))
        visible, slots = [], []
        for i, chosen in zip(going_on, nodes, strict=True):
            segment = Segment(tables[i], int(roots[i]), [0], tree=trees[i], root_position=int(roots[i]))
            rows = must_see(segment, window)
            visible += [rows[1 + node] for node in chosen]
            slots += [tables[i][slot // block_size] * block_size + slot % block_size for slot in (roots[i] + 1 + chosen).tolist()]
        q = torch.randn(len(bits), heads[0], HEAD_DIM, generator=torch.Generator().manual_seed(1))
        output = ops.tree_attention(q, kv, ops.plan_attention(batch.attention, windows), scale=SCALE, window=window)
        expected = reference_tree_attention(
            q,
            kv,
            query_start_loc=[0, *np.cumsum([len(chosen) for chosen in nodes]).tolist()],
            block_table=[tables[i] for i in going_on],
            visible_slots=visible,
            scale=SCALE,
        )
        torch.testing.assert_close(output.double(), expected, rtol=2e-5, atol=2e-5)
        assert batch.positions.tolist() == np.repeat(roots[going_on] + depth, [len(chosen) for chosen in nodes]).tolist()
        assert batch.slot_mapping.tolist() == slots
        assert batch.logits_rows.tolist() == list(range(len(bits)))


@pytest.mark.parametrize("ops_name", IMPLEMENTATIONS)
def test_a_request_whose_own_kv_is_nan_does_not_touch_its_neighbours(ops_name: str) -> None:
    ops = make_ops(ops_name, torch.float32)
    case = random_case(5, ["decode", "tree", "long_chunk", "decode", "chunk"], "dense", 8, None)
    generator = torch.Generator().manual_seed(0)
    kv = random_kv(generator, case, 2, torch.float32)
    q = torch.randn(case.query_start_loc[-1], 4, HEAD_DIM, generator=generator)
    plan = ops.plan_attention(build_batch(case.segments, block_size=8).attention, (None,))
    clean = ops.tree_attention(q, kv, plan, scale=SCALE, window=None)
    for broken in range(len(case.segments)):
        broken_kv = kv.clone()
        broken_kv[:, :, case.block_table[broken]] = torch.nan
        output = ops.tree_attention(q, broken_kv, plan, scale=SCALE, window=None)
        rows = torch.zeros(len(q), dtype=torch.bool)
        rows[case.query_start_loc[broken] : case.query_start_loc[broken + 1]] = True
        assert output[rows].isnan().all()
        torch.testing.assert_close(output[~rows], clean[~rows], rtol=0, atol=0)

"""Passes that are padded and replayed: the same numbers as without, whatever came before.

Without a CUDA device a replay runs the pass again, over whatever lies in the static inputs by then.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call
from weakref import WeakSet, ref

import numpy as np
import pytest
import torch
from interpreted import DEVICE, eager_capture, triton_backend
from tiny_models import make_model
from torch import Tensor
from twins import BLOCK_SIZE, BLOCKS_PER_REQUEST, LIMITS, NUM_REQUESTS, Part, Twins

from titan.core.batch import NodeQueries, QueryRow
from titan.core.growth import BeamSpec, Feed, ShapeSpec, shape_plan
from titan.core.limits import MAX_NODES
from titan.core.trees import EMPTY_TREE, DraftTree
from titan.kernels.growth import _lay_out_frontiers
from titan.kernels.interfaces import PassCounts, PassLimits
from titan.kernels.triton import cuda_graphs, streams
from titan.kernels.triton.cache import _unlock_pages
from titan.kernels.triton.cuda_graphs import (
    CHUNKED_TOKENS,
    FEW_REQUESTS,
    GraphSizes,
    PassSize,
    Replay,
    Replays,
    cuda_graph_capture,
)
from titan.kernels.triton.streams import POOL_STREAMS, own_stream
from titan.kernels.triton.upload import ALIGNMENT, download, upload

# sizes


@pytest.mark.long_where("128")
@pytest.mark.parametrize(("num_requests", "query_len"), [(1, 1), (6, 7), (32, 7), (33, 4), (128, 7), (40, 17)])
def test_every_small_pass_finds_a_size_that_holds_it_and_these_are_few(
    num_requests: int, query_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPH_TOKENS", 512)
    sizes = GraphSizes(PassLimits(num_requests, query_len, num_blocks=8, num_tokens=2048))
    assert sizes.find(PassSize(num_requests + 1, num_requests + 1, 1)) is None
    found = set()
    for requests in range(1, num_requests + 1):
        for longest in range(1, query_len + 1):
            for num_tokens in range(requests + longest - 1, requests * longest + 1):
                size = sizes.find(PassSize(num_tokens, requests, longest))
                if size is None:
                    assert num_tokens > 512 / 2.5  # what padding may add
                    continue
                found.add(size)
                assert size.num_tokens >= num_tokens and size.num_requests >= requests and size.max_query_len >= longest
                assert size.num_tokens <= sizes.largest.num_tokens and size.num_requests <= sizes.largest.num_requests
                assert size.num_requests <= max(requests * 1.25, requests + 7)
    assert len(found) <= 8 * len(sizes.request_counts) or query_len == 17
    chunked, largest = set(), CHUNKED_TOKENS[-1]
    for requests in range(1, num_requests + 1):
        for num_tokens in range(requests + query_len, largest + 2):
            size = sizes.find(PassSize(num_tokens, requests, query_len + 1))
            assert (size is None) == (num_tokens > largest)
            if size is not None:
                chunked.add(size)
                assert size.num_tokens <= max(16, (1.34 if num_tokens > 128 else 2) * num_tokens)
                assert largest >= size.max_query_len == size.num_tokens >= num_tokens and size.num_requests >= requests
    assert len(chunked) <= (1 + (num_requests > FEW_REQUESTS)) * len(CHUNKED_TOKENS) and sizes.largest.num_tokens >= largest
    for reachable, expected in (sizes.without_chunks(), found), (sizes.with_chunks(), chunked):
        assert reachable == sorted(expected, reverse=True)


def test_no_size_is_small_where_no_pass_is() -> None:
    sizes = GraphSizes(PassLimits(num_requests=4, query_len=0, num_blocks=8, num_tokens=2048))
    assert sizes.find(PassSize(1, 1, 1)) is None and sizes.find(PassSize(20, 2, 19)) is None


def test_a_size_has_as_many_tokens_per_request_as_are_needed_unless_they_are_free() -> None:
    sizes = GraphSizes(PassLimits(num_requests=32, query_len=7, num_blocks=8, num_tokens=2048))
    assert sizes.find(PassSize(42, 6, 7)) == PassSize(56, 8, 7)
    assert sizes.find(PassSize(10, 4, 7)) == PassSize(28, 4, 7)
    assert sizes.find(PassSize(20, 14, 2)) == PassSize(32, 16, 2)
    for num_drafts in range(7):  # of as many requests each, by a drafter that may draft more
        assert sizes.find(PassSize(32 * (1 + num_drafts), 32, 1 + num_drafts)).num_tokens == 32 * (1 + num_drafts)
    assert sizes.find(PassSize(16, 16, 1)) == PassSize(16, 16, 1)


# uploading


def test_arrays_go_there_as_aligned_copies_and_come_back_as_they_were() -> None:
    arrays = [
        np.arange(5),
        np.array([[1, 2, 3]], np.int32),
        np.zeros((0, 4), np.float32),
        np.array([0.5, -np.inf]),
        np.array([2**40]),
    ]
    tensors = upload(arrays, torch.device("cpu"))
    assert all((tensor.data_ptr() - tensors[0].data_ptr()) % ALIGNMENT == 0 for tensor in tensors)
    for array, tensor, back in zip(arrays, tensors, download(tensors), strict=True):
        assert tensor.tolist() == back.tolist() == array.tolist()
        assert tensor.numpy().dtype == back.dtype == array.dtype and tensor.shape == back.shape == array.shape


# captures


@dataclass(frozen=True, slots=True)
class Stream:
    """No weak reference to it can be made: one to a stream of PyTorch dangles."""

    index: int


class Graph:
    replay = staticmethod(lambda: None)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """In the place of `torch.cuda`, which lends the streams of a pool in turn; "default" is the current stream."""
    cuda = MagicMock()
    cuda.current_stream.return_value = "default"
    cuda.Stream.side_effect = (Stream(i % POOL_STREAMS) for i in count())
    cuda.CUDAGraph.side_effect = Graph
    cuda.graph.return_value.__exit__.return_value = None  # raises what was raised inside
    cuda.graph_pool_handle.side_effect = ((0, i) for i in count(1))
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(streams, "_owners", WeakSet())
    cuda.ended = MagicMock(side_effect=RuntimeError("not currently recording to mempool_id"))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", cuda.ended, raising=False)
    return cuda


def test_an_owner_of_graphs_has_one_stream_that_no_other_has_as_long_as_it_lives(cuda: MagicMock) -> None:
    owners, seen, output = [cuda_graph_capture() for _ in range(POOL_STREAMS)], set(), torch.zeros(1)
    with pytest.raises(RuntimeError, match="no stream is left"):
        cuda_graph_capture()
    for capture in (*owners, owners[0]):
        replay = capture(lambda: output)
        assert replay is not None and replay.output is output and replay.run is Graph.replay
        options = cuda.graph.call_args.kwargs
        assert options["capture_error_mode"] == "thread_local" and options["pool"] == (0, 1 + len(seen) % POOL_STREAMS)
        seen.add(options["stream"])
    assert len(seen) == POOL_STREAMS and options["stream"] == Stream(0)
    del seen, options, owners[5], capture
    cuda.reset_mock()
    owners.append(cuda_graph_capture())
    owners[-1](lambda: output)
    assert cuda.graph.call_args.kwargs["stream"] == Stream(5)
    owners[6].itself = owners[6]  # type: ignore[attr-defined]
    del owners[6]
    cuda_graph_capture()(lambda: output)
    assert cuda.graph.call_args.kwargs["stream"] == Stream(7), "an owner in a cycle is collected before streams are short"


def test_a_capture_without_memory_gives_none_and_other_errors_are_raised(cuda: MagicMock) -> None:
    """Stream and pool are given back, and the graph is kept with the others: its end would free what they use."""
    graphs = list[ref[Graph]]()

    def noted() -> Graph:
        graphs.append(ref(graph := Graph()))
        return graph

    cuda.CUDAGraph.side_effect, capture = noted, cuda_graph_capture()
    error: Exception | None = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    for inside, at_end in (error, None), (error, RuntimeError("invalidated")), (None, RuntimeError("CUDA error: out of memory")):
        cuda.graph.return_value.__exit__.side_effect = at_end
        assert capture(MagicMock(side_effect=inside)) is None
    cuda.graph.return_value.__exit__.side_effect = error = inside = at_end = None
    for mock in (cuda, cuda.graph.return_value.__exit__):  # which have seen the graphs, and errors with their frames
        mock.reset_mock()
    gc.collect()
    assert all(graph() is not None for graph in graphs)
    cuda.graph.return_value.__exit__.side_effect = RuntimeError("not permitted when stream is capturing")
    with pytest.raises(RuntimeError, match="not permitted"):
        capture(MagicMock())
    assert cuda.set_stream.call_args_list == [call("default")]
    assert cuda.ended.call_args_list == [call(cuda.current_device(), (0, 1))]


def test_nothing_is_collected_and_nobody_waits_for_the_device_while_a_graph_is_captured(cuda: MagicMock) -> None:
    """Either would end the capture, in whichever thread."""
    capture, output = cuda_graph_capture(), torch.zeros(1)

    def is_free() -> bool:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: streams.WHOLE_DEVICE.acquire(blocking=False) and not streams.WHOLE_DEVICE.release()).result()

    inside = list[tuple[bool, bool]]()
    assert capture(lambda: inside.append((gc.isenabled(), is_free())) or output) is not None
    assert inside == [(False, False)] and gc.isenabled() and is_free()
    cuda.synchronize.side_effect = lambda _: inside.append((gc.isenabled(), is_free()))
    _unlock_pages(0, DEVICE)
    assert inside[1:] == [(True, False)] and is_free()


def test_the_graph_of_an_interrupted_capture_is_kept_with_the_others(cuda: MagicMock) -> None:
    """Its end would free what they use."""
    graphs, capture = list[ref[Graph]](), cuda_graph_capture()
    cuda.CUDAGraph.side_effect = lambda: (graph := Graph(), graphs.append(ref(graph)))[0]
    with pytest.raises(KeyboardInterrupt):
        capture(MagicMock(side_effect=KeyboardInterrupt))
    cuda.graph.return_value.__exit__.reset_mock()  # which has seen the graph in a frame of the error
    cuda.reset_mock()
    gc.collect()
    assert graphs[0]() is not None and gc.isenabled()


def test_the_stream_on_which_everybody_captures_is_nobody_s_own(cuda: MagicMock) -> None:
    cuda.graph.default_capture_stream = Stream(3)
    owners = [own_stream() for _ in range(POOL_STREAMS - 1)]
    assert Stream(3) not in [owner.stream for owner in owners]


def test_what_cannot_be_ended_keeps_its_pool_and_other_captures_share_another(cuda: MagicMock) -> None:
    """PyTorch takes no further capture in that pool; one that is ended, whatever it failed of, leaves it to the next."""
    capture = cuda_graph_capture()
    with pytest.raises(RuntimeError, match="looked at"):
        capture(MagicMock(side_effect=RuntimeError("looked at")))
    cuda.graph.return_value.__exit__.side_effect, cuda.ended.side_effect = RuntimeError("invalidated"), None
    with pytest.raises(RuntimeError, match="invalidated"):
        capture(MagicMock())
    cuda.graph.return_value.__exit__.side_effect = None
    capture(MagicMock())
    capture(MagicMock())
    assert [each.kwargs["pool"] for each in cuda.graph.call_args_list] == [(0, 1), (0, 1), (0, 2), (0, 2)]


# passes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, "qwen3", num_hidden_layers=1, sliding_window=20, use_sliding_window=True, max_window_layers=0)
    return folder


def test_replayed_passes_are_those_of_pytorch_as_batches_grow_and_shrink(folder: Path) -> None:
    """Every border of the sizes from both sides, twice, with other lengths, contexts, tables and trees each time."""
    twins = Twins(folder, triton_backend())
    shapes = [[3], [3, 3], [3, 3, 3], [3] * 4, [3, 3], [1], [2], [1] * 3, [2] * 3, [1, 3], [2, 1, 1, 3]]
    for _ in range(2):
        for shape in shapes:
            twins.run(twins.parts(shape))
    sizes = {GraphSizes(LIMITS).find(PassSize(sum(shape), len(shape), max(shape))) for shape in shapes}
    assert twins.counts == PassCounts(num_replayed=2 * len(shapes) - len(sizes), num_eager=len(sizes)), "captured once each"


FULL, WINDOWED = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.6}),
        ("gemma3_text", {"layer_types": [WINDOWED, FULL], "sliding_window": 20}),
        ("olmo3", {"layer_types": [WINDOWED, FULL], "sliding_window": 20}),
        ("smollm3", {"no_rope_layers": [1, 0]}),
    ],
)
def test_what_families_have_beyond_a_llama_is_replayed_as_well(tmp_path: Path, model_type: str, config: dict[str, Any]) -> None:
    make_model(tmp_path, model_type, num_hidden_layers=2, **config)
    twins = Twins(tmp_path, triton_backend())
    for shape in ([3, 1], [3, 1]):
        twins.run(twins.parts(shape))
    assert twins.counts == PassCounts(num_replayed=1, num_eager=1)


SPEC = ShapeSpec(shape_plan([-1]))
"""Of feeds whose nodes are given here."""
BEAM = BeamSpec(2, 2, 1, 3, 1.0)


def compare_nodes(twins: Twins, feeds: Sequence[Feed], fed_slots: Sequence[Any], *nodes: tuple[list[int], list[int]]) -> None:
    """One pass per depth of a draft, with these tokens and ancestor bits."""
    layouts = (_lay_out_frontiers(feeds, fed_slots, BLOCK_SIZE) for _ in range(2))
    for there, here, columns in zip(*layouts, nodes, strict=True):
        token_ids, bits = (torch.tensor(column) for column in columns)
        on_device = NodeQueries(here.logits_start_loc, token_ids.to(DEVICE), bits.to(DEVICE), None)
        on_host = NodeQueries(there.logits_start_loc, token_ids, bits, None)
        twins.compare(replace(there, nodes=on_host), replace(here, nodes=on_device))


def test_passes_of_a_draft_are_replayed_with_nodes_and_with_few_rows(folder: Path) -> None:
    """The first pass feeds one or two tokens and wants the last one's logits; the others feed nodes that hang at the roots."""
    twins = Twins(folder, triton_backend())
    for _ in range(2):
        tables = twins.tables()
        starts = twins.rng.integers(0, 40, 3).tolist()
        fed = [twins.tokens(1 + i % 2) for i in range(3)]
        twins.run([(QueryRow(table, start, each), EMPTY_TREE) for table, start, each in zip(tables, starts, fed, strict=False)])
        feeds = [Feed(i, tables[i], starts[i], fed[i], SPEC) for i in range(2)]
        fed_slots = [[np.array([0, 1]), np.array([2])], [np.array([0])]]
        compare_nodes(twins, feeds, fed_slots, ([5, 6, 7], [0b1, 0b10, 0b1]), ([8], [0b110]))
    assert twins.counts == PassCounts(num_replayed=3, num_eager=3)


def test_a_replay_has_the_very_bits_of_the_run_before_its_capture(folder: Path) -> None:
    """All are of one size, whose other tokens have no attention."""
    twins = Twins(folder, triton_backend())
    batch, other = (twins.batches(twins.parts(shape))[1] for shape in ([3, 3, 3], [3] * 4))
    outputs: list[Tensor] = []
    attend = twins.runner.model.ops.tree_attention
    twins.runner.model.ops.tree_attention = lambda *args, **options: outputs.append(attend(*args, **options)) or outputs[-1]
    with torch.inference_mode():
        first, kv = twins.runner.forward(batch), twins.kvs[1].clone()
        twins.runner.forward(other)
        twins.kvs[1].copy_(kv)
        assert torch.equal(twins.runner.forward(batch), first)
    assert twins.counts == PassCounts(num_replayed=2, num_eager=1)
    assert len(outputs[0]) == 12 and outputs[0][:9].any(1).all() and not outputs[0][9:].any()


def test_after_a_warm_up_every_small_pass_is_replayed_over_a_cache_that_was_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes with chunks are the last to take memory, and of each kind the largest the first."""
    keys, record = list[Any](), Replays.record
    monkeypatch.setattr(Replays, "record", lambda own, key, *args: (keys.append(key), record(own, key, *args))[1])
    twins = Twins(folder, triton_backend())
    before = twins.kvs[1].clone().view(torch.uint8)
    with torch.inference_mode():
        for run in (*twins.runner.warm_up([SPEC, BEAM], 131), *twins.runner.backend.warm_up(131, torch.float32)):
            run()
    assert torch.equal(twins.kvs[1].view(torch.uint8), before) and twins.counts == PassCounts()
    has_chunk = [isinstance(key, PassSize) and key.max_query_len > LIMITS.query_len for key in keys]
    assert has_chunk == sorted(has_chunk) and 0 < sum(has_chunk) < len(keys) - 2
    without, chunked = ([k for k, is_one in zip(keys, has_chunk, strict=True) if is_one == kind] for kind in (False, True))
    for sizes in ([k for k in without if isinstance(k, PassSize)], [k for k in without if not isinstance(k, PassSize)], chunked):
        assert len(sizes) > 1 and sizes == sorted(sizes, reverse=True)
    shapes = [[3], [1, 3], [3, 3, 3], [1], [20, 3, 1]]
    for shape in shapes:
        twins.run(chunks_and_trees(twins, shape))
    assert twins.counts == PassCounts(num_replayed=len(shapes))


def chunks_and_trees(twins: Twins, query_lens: Sequence[int]) -> list[Part]:
    """Verifications, and where queries are longer, chunks; every second of these needs logits."""
    parts = list[Part]()
    for (row, tree), query_len in zip(twins.parts(query_lens), query_lens, strict=True):
        is_chunk, needs_logits = query_len > LIMITS.query_len, query_len % 2 == 0
        chunk = QueryRow(row.block_ids, row.start, twins.tokens(query_len), needs_logits), EMPTY_TREE
        parts.append(chunk if is_chunk else (row, tree))
    return parts


def test_prefill_chunks_are_replayed_beside_verifications(folder: Path) -> None:
    """Each size twice, with other chunks, contexts and trees; what is too long runs eagerly, and so does a chunk before a tree."""
    twins = Twins(folder, triton_backend())
    for shape in ([9], [20, 3, 1], [5, 1, 4], [30], [2, 31, 3], [40, 7], [4, 4, 4, 4]):
        twins.run(chunks_and_trees(twins, shape))
    assert twins.counts == PassCounts(num_replayed=4, num_eager=3)
    too_long = list(range(BLOCKS_PER_REQUEST + MAX_NODES // BLOCK_SIZE + 2))
    branching = DraftTree(np.array([7, 8]), np.array([-1, -1], np.int32))
    for _ in range(2):
        twins.run(chunks_and_trees(twins, [48, 1]))
        twins.run([(QueryRow(too_long, 30, [9]), EMPTY_TREE)])
        twins.run([(QueryRow(too_long[:BLOCKS_PER_REQUEST], 3, twins.tokens(9)), branching)])
    assert twins.counts == PassCounts(num_replayed=4, num_eager=9)


def test_chunks_that_cannot_be_captured_are_padded_no_more_and_other_passes_are_replayed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, succeed, num_tokens = count(), eager_capture(), list[int]()
    twins = Twins(folder, triton_backend(lambda: lambda function: succeed(function) if next(captured) else None))
    run = twins.runner.model.hidden_states
    monkeypatch.setattr(
        twins.runner.model, "hidden_states", lambda inputs, kv: (num_tokens.append(len(inputs.token_ids)), run(inputs, kv))[1]
    )
    for shape in ([9], [9], [10, 1], [3], [20], [20]):
        twins.run(chunks_and_trees(twins, shape))
    assert num_tokens[:3] == [16, 9, 11], "the first size was tried once"
    assert num_tokens[3:] == [3, 32, 32], "the other ones are captured, and replayed"
    assert twins.counts == PassCounts(num_replayed=1, num_eager=5)


def test_a_beam_after_the_last_root_of_a_request_is_replayed(folder: Path) -> None:
    """It writes up to 63 nodes where the request itself has no slots any more."""
    twins = Twins(folder, triton_backend())
    blocks = twins.rng.permutation(NUM_REQUESTS * BLOCKS_PER_REQUEST)[: BLOCKS_PER_REQUEST + MAX_NODES // BLOCK_SIZE + 1]
    feed = Feed(0, blocks.tolist(), BLOCKS_PER_REQUEST * BLOCK_SIZE - 1, [4], SPEC)
    for _ in range(2):
        compare_nodes(twins, [feed], [[np.array([MAX_NODES - 2, MAX_NODES - 1])]], ([5, 6], [0b1 << 61, 0b11 << 61]))
    assert twins.counts == PassCounts(num_replayed=1, num_eager=1)
    assert twins.counts.hit_rate == 0.5 and PassCounts().hit_rate is None


def test_sizes_that_memory_is_too_short_for_run_without_a_graph(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first two captures fail: these sizes are right every time, and not tried again; others are replayed; one line tells."""
    tried = []
    succeed = eager_capture()

    def capture(function: Callable[[], Tensor]) -> Replay | None:
        tried.append(function)
        return None if len(tried) <= 2 else succeed(function)

    twins = Twins(folder, triton_backend(lambda: capture))
    for _ in range(2):
        for shape in ([2], [1], [3, 3]):
            twins.run(twins.parts(shape))
    assert len(tried) == 3 and twins.counts == PassCounts(num_replayed=1, num_eager=5)
    [record] = caplog.records
    assert record.levelname == "WARNING" and "has no memory for the CUDA graph of a pass of 2 tokens" in record.getMessage()

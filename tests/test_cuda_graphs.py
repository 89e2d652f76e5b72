"""Passes that are padded and replayed: the same numbers as without, whatever came before.

Without a CUDA device a replay runs the pass again, over whatever lies in the static inputs by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import DEVICE, eager_capture, triton_backend
from stepping import host_trees
from tiny_models import make_model
from torch import Tensor

from titan.core.batch import NodeQueries, QueryRow, RaggedBatch, build_batch
from titan.core.growth import Feed, ShapeSpec, shape_plan
from titan.core.kv_tensor import KVTensor
from titan.core.limits import MAX_NODES
from titan.core.trees import EMPTY_TREE, DraftTree, NodeColumns
from titan.kernels.growth import _lay_out_frontiers
from titan.kernels.interfaces import PassCounts, PassLimits
from titan.kernels.torch.backend import TorchBackend
from titan.kernels.triton import cuda_graphs
from titan.kernels.triton.backend import TritonBackend
from titan.kernels.triton.cuda_graphs import MAX_GRAPH_TOKENS, Capture, GraphSizes, PassSize, Replay, cuda_graph_capture
from titan.kernels.triton.runner import TritonRunner
from titan.kernels.triton.upload import ALIGNMENT, download, packed_size, upload
from titan.models.decoder import Decoder
from titan.models.loader import load_model

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, BLOCKS_PER_REQUEST = 16, 40, 4
LIMITS = PassLimits(num_requests=6, query_len=7, num_blocks=BLOCKS_PER_REQUEST)


# sizes


def test_six_requests_of_seven_tokens_find_a_size() -> None:
    sizes = GraphSizes(PassLimits(num_requests=32, query_len=7, num_blocks=8))
    assert sizes.find(PassSize(42, 6, 7)) == PassSize(56, 8, 7)


@pytest.mark.parametrize(("num_requests", "query_len"), [(1, 1), (6, 7), (32, 7), (33, 4), (128, 7), (200, 64)])
def test_every_small_pass_finds_a_size_that_holds_it_and_these_are_few(num_requests: int, query_len: int) -> None:
    sizes = GraphSizes(PassLimits(num_requests, query_len, num_blocks=8))
    found = set()
    for requests in range(1, num_requests + 1):
        for longest in range(1, query_len + 1):
            for num_tokens in {requests + longest - 1, (requests * longest + requests) // 2, requests * longest}:
                size = sizes.find(PassSize(num_tokens, requests, longest))
                if size is None:
                    assert num_tokens > MAX_GRAPH_TOKENS / 2.5  # what padding may add
                    continue
                found.add(size)
                assert size.num_tokens >= num_tokens and size.num_requests >= requests and size.max_query_len >= longest
                assert size.num_tokens <= sizes.largest.num_tokens and size.num_requests <= sizes.largest.num_requests
                assert size.num_requests <= max(requests * 1.25, requests + 7)
    assert len(found) <= len(sizes.request_counts) * len(sizes.query_lens) ** 2


def test_passes_beyond_the_limits_find_none() -> None:
    sizes = GraphSizes(PassLimits(num_requests=32, query_len=7, num_blocks=8))
    assert sizes.find(PassSize(32 * 7, 32, 7)) == PassSize(224, 32, 7)
    assert sizes.find(PassSize(33, 33, 1)) is None
    assert sizes.find(PassSize(8, 1, 8)) is None


# uploading


def test_uploaded_arrays_are_aligned_copies_and_come_to_the_same_places() -> None:
    arrays = [np.arange(5, dtype=np.int64), np.array([[1, 2, 3]], np.int32), np.zeros(0, np.float32), np.array([0.5])]
    memory = torch.full((packed_size(arrays) + 7,), 255, dtype=torch.uint8)
    for into in (None, memory):
        tensors = upload(arrays, CPU, into=into)
        for array, tensor in zip(arrays, tensors, strict=True):
            assert np.array_equal(tensor.numpy(), array) and tensor.numpy().dtype == array.dtype
            assert (tensor.data_ptr() - tensors[0].data_ptr()) % ALIGNMENT == 0
    before = [tensor.data_ptr() for tensor in tensors]
    assert before[0] == memory.data_ptr() and (memory[-7:] == 255).all()
    assert [tensor.data_ptr() for tensor in upload(arrays, CPU, into=memory)] == before


def test_downloaded_tensors_come_as_they_are() -> None:
    tensors = [torch.arange(3, dtype=torch.int32), torch.tensor([[1.5, -torch.inf]]), torch.zeros(0, 4), torch.tensor([-1, 2**40])]
    for array, tensor in zip(download(tensors), tensors, strict=True):
        assert np.array_equal(array, tensor.numpy()) and array.dtype == tensor.numpy().dtype and array.shape == tensor.shape


# captures


class FakeCuda:
    """As much of `torch.cuda` as a capture asks for; the end of one may fail, and then its stream stays the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = 0
        self.stream: object = "default"
        self.end_error: Exception | None = None
        self.streams: list[object] = []  # of the captures
        cuda_graphs._capture_stream.cache_clear()
        fakes: dict[str, Any] = {
            "graph_pool_handle": lambda: "pool",
            "CUDAGraph": FakeGraph,
            "current_device": lambda: self.device,
            "current_stream": lambda: self.stream,
            "set_stream": lambda stream: setattr(self, "stream", stream),
            "Stream": lambda device: ("stream", device, object()),
            "graph": self.capturing,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    @contextmanager
    def capturing(self, graph: object, *, pool: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        before, self.stream = self.stream, stream
        self.streams.append(stream)
        try:
            yield
        finally:
            if self.end_error is not None:
                raise self.end_error
            self.stream = before


class FakeGraph:
    def replay(self) -> None:
        raise AssertionError("nothing was replayed")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    yield FakeCuda(monkeypatch)
    cuda_graphs._capture_stream.cache_clear()


def test_captures_of_a_device_share_a_stream_which_is_the_device_s(cuda: FakeCuda) -> None:
    first, second = cuda_graph_capture(), cuda_graph_capture()
    output = torch.zeros(1)
    for capture, cuda.device in ((first, 1), (second, 1), (first, 0)):
        replay = capture(lambda: output)
        assert replay is not None and replay.output is output and cuda.stream == "default"
    assert cuda.streams[0] is cuda.streams[1] and [each[1] for each in cuda.streams] == [1, 1, 0]  # type: ignore[index]


@pytest.mark.parametrize(
    ("error", "end_error"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), None),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), RuntimeError("CUDA error: capture was invalidated")),
        (None, RuntimeError("CUDA error: out of memory")),
    ],
)
def test_a_capture_without_memory_gives_none_and_the_stream_back(
    cuda: FakeCuda, error: Exception | None, end_error: Exception | None
) -> None:
    def function() -> Tensor:
        if error is not None:
            raise error
        return torch.zeros(1)

    cuda.end_error = end_error
    assert cuda_graph_capture()(function) is None
    assert cuda.stream == "default"


def test_other_errors_of_a_capture_are_raised(cuda: FakeCuda) -> None:
    cuda.end_error = RuntimeError("CUDA error: operation not permitted when stream is capturing")
    with pytest.raises(RuntimeError, match="not permitted"):
        cuda_graph_capture()(lambda: torch.zeros(1))
    assert cuda.stream == "default"


# passes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, "qwen3", num_hidden_layers=1, sliding_window=20, use_sliding_window=True, max_window_layers=0)
    return folder


def random_tree(rng: np.random.Generator, num_nodes: int) -> DraftTree:
    parents = [int(rng.integers(-1, node)) if node else -1 for node in range(num_nodes)]
    return DraftTree(rng.integers(3, 131, num_nodes), np.array(parents, np.int32))


Part = tuple[QueryRow, DraftTree]  # committed tokens, and what hangs at the last of them


class Twins:
    """The model on PyTorch and on Triton, each with its own KV, run side by side."""

    def __init__(self, folder: Path, capture: Capture | None = None) -> None:
        plain = TorchBackend(CPU)
        triton = triton_backend() if capture is None else TritonBackend(DEVICE, lambda: capture)
        models = [load_model(str(folder), dtype="float32", backend=backend) for backend in (plain, triton)]
        self.counts = PassCounts()
        self.plain = plain.prepare(models[0], self.make_kv(models[0]), LIMITS, PassCounts())
        runner = triton.prepare(models[1], self.make_kv(models[1]), LIMITS, self.counts)
        assert isinstance(runner, TritonRunner)
        self.triton = runner
        self.kvs = self.triton.kv.groups[0], self.plain.kv.groups[0]  # type: ignore[attr-defined]
        self.rng = np.random.default_rng(0)

    def make_kv(self, model: Decoder) -> KVTensor:
        kv = KVTensor(model.kv_layout, NUM_BLOCKS, BLOCK_SIZE, model.device)
        [group] = kv.groups
        group.copy_(torch.randn(group.shape, generator=torch.Generator().manual_seed(0)))
        group[:, :, :, LIMITS.num_requests * BLOCKS_PER_REQUEST :] = torch.nan  # blocks of nobody
        return kv

    def tables(self) -> list[list[int]]:
        order = self.rng.permutation(LIMITS.num_requests * BLOCKS_PER_REQUEST).tolist()
        return [order[i :: LIMITS.num_requests] for i in range(LIMITS.num_requests)]

    def batches(self, parts: Sequence[Part]) -> tuple[RaggedBatch, RaggedBatch]:
        """For each twin its own, with nodes where it is."""
        rows, trees = zip(*parts, strict=True)
        there = host_trees(trees)
        here = replace(there, nodes=NodeColumns(*(column.to(DEVICE) for column in there.nodes)))
        return build_batch(rows, here, block_size=BLOCK_SIZE), build_batch(rows, there, block_size=BLOCK_SIZE)

    def run(self, parts: Sequence[Part]) -> None:
        """One pass; logits and KV must agree, and only the slots of this pass change."""
        batch, plain_batch = self.batches(parts)
        before = self.kvs[0].cpu().clone()
        self.compare(batch, plain_batch)
        untouched = torch.ones(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool)
        untouched[batch.slot_mapping] = False
        after, before, twin = (kv.flatten(3, 4) for kv in (self.kvs[0].cpu(), before, self.kvs[1]))
        assert torch.equal(after[:, :, :, untouched].view(torch.int32), before[:, :, :, untouched].view(torch.int32))
        written = batch.slot_mapping
        assert (after[:, :, :, written] - twin[:, :, :, written]).norm() <= 1e-5 * twin[:, :, :, written].norm()

    def compare(self, batch: RaggedBatch, plain_batch: RaggedBatch) -> None:
        with torch.inference_mode():
            logits, expected = self.triton.forward(batch).cpu(), self.plain.forward(plain_batch)
        assert logits.shape == expected.shape
        assert (logits - expected).norm() <= 1e-5 * expected.norm()

    def compare_nodes(self, feeds: Sequence[Feed], fed_slots: Sequence[Any], *nodes: tuple[list[int], list[int]]) -> None:
        """One pass per depth of a draft, with these tokens and ancestor bits."""
        layouts = (_lay_out_frontiers(feeds, fed_slots, BLOCK_SIZE) for _ in range(2))
        for here, there, columns in zip(*layouts, nodes, strict=True):
            token_ids, bits = (torch.tensor(column) for column in columns)
            on_device = NodeQueries(here.logits_start_loc, token_ids.to(DEVICE), bits.to(DEVICE), None)
            self.compare(
                replace(here, nodes=on_device), replace(there, nodes=NodeQueries(there.logits_start_loc, token_ids, bits, None))
            )

    def verification(self, query_lens: Sequence[int]) -> list[Part]:
        """Requests with trees, so that the root and its nodes make queries of these lengths, at random contexts."""
        parts = []
        for table, query_len in zip(self.tables(), query_lens, strict=False):
            start = int(self.rng.integers(0, BLOCKS_PER_REQUEST * BLOCK_SIZE - query_len))
            root = self.rng.integers(3, 131, 1).tolist()
            parts.append((QueryRow(table, start, root), random_tree(self.rng, query_len - 1)))
        return parts


def test_replayed_passes_are_those_of_pytorch_as_batches_grow_and_shrink(folder: Path) -> None:
    """Every border of the sizes from both sides, twice, with other lengths, contexts, tables and trees each time."""
    twins = Twins(folder)
    shapes = [[7] * n for n in (1, 2, 3, 4, 5, 6, 2)] + [[1], [2], [3], [1] * 5, [2] * 4, [1, 7], [4, 1, 1, 5], [5, 4]]
    for _ in range(2):
        for shape in shapes:
            twins.run(twins.verification(shape))
    sizes = {GraphSizes(LIMITS).find(PassSize(sum(shape), len(shape), max(shape))) for shape in shapes}
    assert twins.counts == PassCounts(num_replayed=2 * len(shapes) - len(sizes), num_eager=len(sizes)), "captured once each"


SPEC = ShapeSpec(shape_plan(np.array([-1], np.int32).tobytes()))
"""Of feeds whose nodes are given here."""


def test_passes_of_a_draft_are_replayed_with_nodes_and_with_few_rows(folder: Path) -> None:
    """The first pass feeds one or two tokens and wants the last one's logits; the others feed nodes that hang at the roots."""
    twins = Twins(folder)
    for _ in range(3):
        tables = twins.tables()
        starts = twins.rng.integers(0, 40, 5).tolist()
        fed = [twins.rng.integers(3, 131, 1 + i % 2).tolist() for i in range(5)]
        twins.run([(QueryRow(table, start, each), EMPTY_TREE) for table, start, each in zip(tables[:5], starts, fed, strict=True)])
        feeds = [Feed(i, tables[i], starts[i], fed[i], SPEC) for i in range(2)]
        fed_slots = [[np.array([0, 1]), np.array([2])], [np.array([0])]]
        twins.compare_nodes(feeds, fed_slots, ([5, 6, 7], [0b1, 0b10, 0b1]), ([8], [0b110]))
    assert (twins.counts.num_eager, twins.counts.num_replayed) == (3, 6)


def test_a_replay_has_the_very_bits_of_the_run_before_its_capture(folder: Path) -> None:
    twins = Twins(folder)
    batch, _ = twins.batches(twins.verification([7, 3, 7]))
    other, _ = twins.batches(twins.verification([7, 7, 7, 7]))
    with torch.inference_mode():
        first, kv = twins.triton.forward(batch), twins.kvs[0].clone()
        twins.triton.forward(other)
        twins.kvs[0].copy_(kv)
        assert torch.equal(twins.triton.forward(batch), first)
    assert twins.counts == PassCounts(num_replayed=2, num_eager=1), "all of one size"


def test_prefill_and_long_tables_run_eagerly(folder: Path) -> None:
    twins = Twins(folder)
    table = list(range(BLOCKS_PER_REQUEST))
    too_long = list(range(BLOCKS_PER_REQUEST + MAX_NODES // BLOCK_SIZE + 2))
    for _ in range(2):
        twins.run([(QueryRow(table, 3, list(range(3, 12)), needs_logits=False), EMPTY_TREE)])
        twins.run([(QueryRow(too_long, 30, [9]), EMPTY_TREE)])
    assert (twins.counts.num_eager, twins.counts.num_replayed, twins.counts.hit_rate) == (4, 0, 0.0)


def test_a_beam_behind_the_last_root_of_a_request_is_replayed(folder: Path) -> None:
    """It writes up to 63 nodes where the request itself has no slots any more."""
    twins = Twins(folder)
    blocks = twins.rng.permutation(LIMITS.num_requests * BLOCKS_PER_REQUEST)[: BLOCKS_PER_REQUEST + MAX_NODES // BLOCK_SIZE + 1]
    feed = Feed(0, blocks.tolist(), BLOCKS_PER_REQUEST * BLOCK_SIZE - 1, [4], SPEC)
    for _ in range(2):
        twins.compare_nodes([feed], [[np.array([MAX_NODES - 2, MAX_NODES - 1])]], ([5, 6], [0b1 << 61, 0b11 << 61]))
    assert twins.counts == PassCounts(num_replayed=1, num_eager=1)


def test_sizes_that_memory_is_too_short_for_run_without_a_graph(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first two captures fail: these sizes are right every time, and not tried again; others are replayed; one line tells."""
    tried = []
    succeed = eager_capture()

    def capture(function: Callable[[], Tensor]) -> Replay | None:
        tried.append(function)
        return None if len(tried) <= 2 else succeed(function)

    twins = Twins(folder, capture)
    for _ in range(3):
        for shape in ([2], [3, 3], [7] * 3):
            twins.run(twins.verification(shape))
    assert len(tried) == 3 and twins.counts == PassCounts(num_replayed=2, num_eager=7)
    [record] = caplog.records
    assert record.levelname == "WARNING" and "has no memory for the CUDA graph of a pass of 2 tokens" in record.getMessage()


def test_padded_tokens_have_no_attention(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(folder)
    outputs: list[Tensor] = []
    attend = twins.triton.model.ops.tree_attention

    def recorded(*args: Any, **options: Any) -> Tensor:
        outputs.append(attend(*args, **options))
        return outputs[-1]

    monkeypatch.setattr(twins.triton.model.ops, "tree_attention", recorded)
    twins.run(twins.verification([5, 5]))
    assert outputs[0].shape[0] == 14 and outputs[0][:10].any(1).all() and not outputs[0][10:].any()


def test_hit_rate_without_passes_is_none() -> None:
    assert PassCounts().hit_rate is None
    assert PassCounts(num_replayed=3, num_eager=1).hit_rate == 0.75

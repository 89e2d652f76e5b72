"""A model on PyTorch and on another back end, each with its own KV, run side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attention_cases import random_parents
from stepping import host_trees, slots_in_order
from zoo import random_prompts

from titan.core.batch import QueryRow, RaggedBatch, build_batch
from titan.core.growth import Feed, GrowthSpec
from titan.core.kv_tensor import KVTensor
from titan.core.trees import DraftTree, DraftTrees, NodeColumns
from titan.kernels.growth import grow_by_passes
from titan.kernels.interfaces import Backend, PassCounts, PassLimits
from titan.kernels.torch.backend import TorchBackend
from titan.kernels.torch.runner import TorchRunner
from titan.models.files import ModelFiles
from titan.models.loader import load_model, open_model

BLOCK_SIZE, NUM_BLOCKS = 16, 40
NUM_REQUESTS, BLOCKS_PER_REQUEST = 6, 4
LIMITS = PassLimits(num_requests=4, query_len=3, num_blocks=BLOCKS_PER_REQUEST, num_tokens=48)
BOUNDS = {"float32": 1e-5, "bfloat16": 4e-2}

Part = tuple[QueryRow, DraftTree]  # committed tokens, and what hangs at the last of them


class Twins:
    """The first runner is that of PyTorch, ``runner`` that of the other back end."""

    def __init__(self, folder: Path, backend: Backend, dtype: str = "float32") -> None:
        plain, opened = TorchBackend(torch.device("cpu")), open_model(ModelFiles(str(folder)))
        models: Any = [load_model(opened, dtype=dtype, backend=each) for each in (plain, backend)]
        kvs = [random_kv(model) for model in models]
        self.device = backend.device
        self.bound = BOUNDS[dtype]
        self.counts = PassCounts()
        self.plain = plain.prepare(models[0], kvs[0], LIMITS, PassCounts())
        self.runner: Any = backend.prepare(models[1], kvs[1], LIMITS, self.counts)
        self.caches = kvs
        self.kvs = [kv.groups[0] for kv in kvs]  # all there is of a native model
        self.rng = np.random.default_rng(0)

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(3, 131, count).tolist()  # type: ignore[no-any-return]

    def tables(self) -> list[list[int]]:
        order = self.rng.permutation(NUM_REQUESTS * BLOCKS_PER_REQUEST).tolist()
        return [order[i::NUM_REQUESTS] for i in range(NUM_REQUESTS)]

    def parts(self, query_lens: Sequence[int], *, have_chunks: bool = False) -> list[Part]:
        """Queries of these lengths, at random contexts: a root and a random tree; with chunks, several tokens before the tree."""
        parts = []
        for table, query_len in zip(self.tables(), query_lens, strict=False):
            start = int(self.rng.integers(0, BLOCKS_PER_REQUEST * BLOCK_SIZE - query_len))
            num_committed = int(self.rng.integers(1, query_len + 1)) if have_chunks else 1
            parents = np.array(random_parents(self.rng, query_len - num_committed), np.int32)
            tree = DraftTree(np.array(self.tokens(len(parents))), parents)
            needs_logits = not have_chunks or tree.num_nodes > 0 or self.rng.random() < 0.5
            parts.append((QueryRow(table, start, self.tokens(num_committed), needs_logits), tree))
        return parts

    def batches(self, parts: Sequence[Part]) -> list[RaggedBatch]:
        rows, trees = zip(*parts, strict=True)
        there = host_trees(trees)
        here = replace(there, nodes=NodeColumns(*(column.to(self.device) for column in there.nodes)))
        return [build_batch(rows, each, block_size=BLOCK_SIZE) for each in (there, here)]

    def run(self, parts: Sequence[Part]) -> None:
        """One pass; logits and KV must agree, and only the slots of this pass change."""
        batches = self.batches(parts)
        plain, other = self.caches
        befores = [group.cpu().clone() for group in other.groups]
        self.compare(*batches)
        written = batches[0].slot_mapping
        untouched = np.setdiff1d(np.arange(NUM_BLOCKS * BLOCK_SIZE), written)
        for groups in zip(plain.groups, other.groups, befores, strict=True):
            expected, after, before = (slots_in_order(kv.cpu()) for kv in groups)
            assert torch.equal(after[:, :, :, untouched].view(torch.uint8), before[:, :, :, untouched].view(torch.uint8))
            assert_near(after[:, :, :, written], expected[:, :, :, written], self.bound)

    def compare(self, plain_batch: RaggedBatch, batch: RaggedBatch) -> None:
        with torch.inference_mode():
            assert_near(self.runner.forward(batch).cpu(), self.plain.forward(plain_batch), self.bound)


class GrowthTwins:
    """A draft on PyTorch and on another back end, each with its own KV, and requests that it lacks a few tokens of."""

    def __init__(self, path: str, vocab_size: int, backend: Backend) -> None:
        plain_backend, self.backend = TorchBackend(torch.device("cpu")), backend
        opened = open_model(ModelFiles(path))
        plain, model = (load_model(opened, dtype="float32", backend=each) for each in (plain_backend, backend))
        kvs = [KVTensor(each.kv_layout, 56, BLOCK_SIZE, each.device) for each in (plain, model)]
        self.counts = PassCounts()
        self.plain = TorchRunner(plain_backend, plain, kvs[0])
        limits = PassLimits(num_requests=8, query_len=7, num_blocks=8, num_tokens=512)
        self.runner: Any = backend.prepare(model, kvs[1], limits, self.counts)
        self.vocab_size = vocab_size
        for kv in kvs:
            fill(kv)
        order = np.random.default_rng(0).permutation(56).tolist()
        self.tables = [order[i::7] for i in range(7)]

    def feeds(self, specs: Sequence[GrowthSpec]) -> list[Feed]:
        """Of one to three tokens, behind contexts of several lengths."""
        return [Feed(i, self.tables[i], 9 * i, [4, 5, 6][: 1 + i % 3], spec) for i, spec in enumerate(specs)]

    def chunk(self) -> Feed:
        """Of a prompt of which nothing has been fed; nothing grows."""
        return Feed(6, self.tables[6], 0, random_prompts(2, seed=9, max_len=50)[1], None)

    def grow(self, feeds: Sequence[Feed]) -> DraftTrees:
        with torch.inference_mode():
            trees: DraftTrees = self.runner.grow(feeds, 7, self.vocab_size)
        return trees

    def expected(self, feeds: Sequence[Feed]) -> DraftTrees:
        """The general form, with PyTorch's operations."""
        with torch.inference_mode():
            return grow_by_passes(self.plain.forward, self.plain.backend, feeds, 7, self.vocab_size, BLOCK_SIZE)

    def assert_same_kv(self) -> None:
        [kv], [expected] = self.runner.kv.groups, self.plain.kv.groups
        torch.testing.assert_close(kv.cpu(), expected, rtol=1e-4, atol=1e-4)


def fill(kv: KVTensor) -> None:
    """Random numbers, the same for all caches of a layout."""
    for group in kv.groups:
        by_head = group.movedim(1, 3)
        by_head.copy_(torch.randn(by_head.shape, generator=torch.Generator().manual_seed(0)))


def random_kv(model: Any) -> KVTensor:
    """The same for all models of a layout; NaN in the blocks of nobody."""
    kv = KVTensor(model.kv_layout, NUM_BLOCKS, BLOCK_SIZE, model.device)
    fill(kv)
    for group in kv.groups:
        group[:, NUM_REQUESTS * BLOCKS_PER_REQUEST :] = torch.nan
    return kv


def assert_near(actual: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert (actual - expected).float().norm() <= bound * expected.float().norm()

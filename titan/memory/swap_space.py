"""The swap space: blocks in the host's memory, for the KV of preempted requests and for cached prefixes that will be evicted.

Its pool is of the same kind as that of the KV cache. Blocks of swapped requests are referenced; those of prefixes are free and
cached, so that they are found by their hash until the space is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf

import numpy as np
import torch
from torch import Tensor

from titan.core.kv_tensor import KVTensor, Role
from titan.core.out_of_memory import is_out_of_memory
from titan.kernels.interfaces import CacheOps
from titan.memory.block_pool import BlockPool

KEPT_AHEAD = 32
"""Cached blocks, the next to be evicted, that are copied to the host at once: a step evicts few at a time."""

MAX_MEASURED_BLOCKS, NUM_MEASUREMENTS = 64, 3
"""Maximum blocks that are copied to measure the time that copies take, and how often."""


class SwapSpace:
    """Blocks on the host for copies of blocks of the attached caches; there are none until it is resized."""

    def __init__(self, enable_caching: bool, ops: CacheOps) -> None:
        self.pool = BlockPool(0, enable_caching)
        self.num_hits = 0  # blocks of prefixes that were found here, since the start
        self._ops = ops
        self._blocks: dict[Role, list[Tensor]] = {}

    def resize(self, num_blocks: int, tensors: Mapping[Role, KVTensor]) -> None:
        """Replace all blocks by this many blank ones for each of these caches; no request may hold one.

        If memory is not enough, the error is raised, and the swap space has no blocks any more.
        """
        self._blocks, self.pool = {}, BlockPool(0, self.pool.enable_caching)
        self._blocks = {role: self._ops.host_blocks(kv, num_blocks) for role, kv in tensors.items()}
        self.pool = BlockPool(num_blocks, self.pool.enable_caching)

    def copy_out(self, tensors: Mapping[Role, KVTensor], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks of all caches to the host."""
        if sources:
            for role, kv in tensors.items():
                self._ops.copy_out(kv, self._blocks[role], np.array(sources), np.array(targets))

    def copy_in(self, tensors: Mapping[Role, KVTensor], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Start copies of blocks of all caches from the host; `CacheOps.await_copies` waits for them."""
        if sources:
            for role, kv in tensors.items():
                self._ops.copy_in(kv, self._blocks[role], np.array(sources), np.array(targets))

    def keep_evicted(self, pool: BlockPool, count: int, tensors: Mapping[Role, KVTensor]) -> None:
        """Keep copies of the cached blocks that will be evicted, before a pool allocates ``count`` blocks of these caches.

        If one of them is not here yet, some that will be evicted after them are copied along.
        """
        if not self.pool.num_free:
            return
        evicted = pool.next_evicted(count)
        if any(self.pool.lookup(block_hash) is None for block_hash in evicted):
            num_ahead = min(KEPT_AHEAD, self.pool.num_free // 8)  # what is cached on both sides takes little of the space
            evicted = pool.next_evicted(max(count, num_ahead))
        self._keep(pool, evicted, tensors)

    def _keep(self, pool: BlockPool, evicted: Mapping[bytes, int], tensors: Mapping[Role, KVTensor]) -> None:
        """Keep copies of cached blocks, given by their hashes; they replace the least recently used ones here.

        A block that is here already is copied again only if the draft has written its KV since.
        """
        held = {block_hash: found for block_hash in evicted if (found := self.pool.lookup(block_hash)) is not None}
        self.pool.acquire(held.values())
        new = [block_hash for block_hash in evicted if block_hash not in held]
        new = new[max(0, len(new) - self.pool.num_free) :]
        targets = held | dict(zip(new, self.pool.allocate(len(new)), strict=True))
        redrafted = [each for each in held if pool.is_drafted[evicted[each]] > self.pool.is_drafted[held[each]]]
        copied = [*redrafted, *new]
        try:
            self.copy_out(tensors, [evicted[each] for each in copied], [targets[each] for each in copied])
            for block_hash in copied:
                self.pool.register(targets[block_hash], block_hash)
                self.pool.is_drafted[targets[block_hash]] = pool.is_drafted[evicted[block_hash]]
        except Exception as error:
            if not is_out_of_memory(error):  # else these prefixes are forgotten
                raise
        finally:
            self.pool.release([targets[each] for each in evicted if each in targets])

    def measure_copies(
        self, tensors: Mapping[Role, KVTensor], pool: BlockPool, wait: Callable[[Sequence[Tensor]], object]
    ) -> float:
        """Return the seconds of copying a block here and back: the least of a few measurements with blank blocks of the pool.

        ``wait`` returns once the copies have written the tensors that it is given.
        """
        count = min(MAX_MEASURED_BLOCKS, pool.num_blank, self.pool.num_blank)
        block_ids, swapped = pool.allocate(count), self.pool.allocate(count)
        seconds = inf
        for _ in range(NUM_MEASUREMENTS):
            start = time.perf_counter()
            self.copy_out(tensors, block_ids, swapped)
            self.copy_in(tensors, swapped, block_ids)
            self._ops.await_copies()
            wait([group[0, block_ids[0], 0, 0, 0].view(torch.uint8) for group in tensors["target"].groups])
            seconds = min(seconds, time.perf_counter() - start)
        pool.release(block_ids)
        self.pool.release(swapped)
        return seconds / count


def take_blocks(
    pool: BlockPool,
    found: Mapping[int, int],
    block_hashes: Sequence[bytes],
    sources: Mapping[int, int],
    source_pool: BlockPool,
    allocate: Callable[[int], list[int]],
    copy: Callable[[list[int], list[int]], None],
) -> list[int] | None:
    """Return blocks of a pool for a request, one reference each: those found there, and copies of the others.

    Copies of full blocks are cached there unless their hashes were forgotten in the source pool.

    Args:
        pool: the pool of the result.
        found: blocks of it, by their index in the request.
        block_hashes: of the request's full blocks.
        sources: blocks that the others are copied from, by their index in the request.
        source_pool: the pool of these.
        allocate: allocates blocks of ``pool``.
        copy: copies the content of blocks, given the sources and the targets.

    Returns:
        The blocks; ``None`` if the pool has too few free ones, and then nothing has changed.
    """
    missing = [i for i in sources if i not in found]
    held = list(found.values())
    pool.acquire(held)
    if len(missing) > pool.num_free:
        pool.release(held)
        return None
    try:
        new = allocate(len(missing))
        held += new
        copy([sources[i] for i in missing], new)
    except BaseException:
        pool.release(held)
        raise
    for i, block_id in zip(missing, new, strict=True):
        if i < len(block_hashes) and source_pool.lookup(block_hashes[i]) is not None:
            pool.register(block_id, block_hashes[i])
        pool.is_drafted[block_id] = source_pool.is_drafted[sources[i]]
    block_ids = {**found, **dict(zip(missing, new, strict=True))}
    return [block_ids[i] for i in range(len(block_ids))]

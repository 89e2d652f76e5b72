"""The block pool against a slow model of it, and its rules one by one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from titan.memory.block_pool import BlockPool, hash_block

HASHES = [hash_block(b"", [token], b"test") for token in range(6)]


class PoolMachine(RuleBasedStateMachine):
    """Random use of a pool by block tables; the model keeps the three kinds of free blocks in separate lists."""

    @initialize(num_blocks=st.integers(1, 9), enable_caching=st.booleans())
    def create(self, num_blocks: int, enable_caching: bool) -> None:
        self.pool = BlockPool(num_blocks, enable_caching)
        self.tables: list[list[int]] = []
        self.hashes: dict[int, bytes] = {}
        self.epochs = [-1] * num_blocks
        self.never_used = list(range(num_blocks))
        self.uncached: list[int] = []  # the last one freed is taken first
        self.cached: list[int] = []  # the first one freed is taken first

    def model_take(self) -> int:
        block_id = self.uncached.pop() if self.uncached else self.never_used.pop(0) if self.never_used else self.cached.pop(0)
        self.hashes.pop(block_id, None)
        self.epochs[block_id] = -1
        return block_id

    def model_release(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            if not any(block_id in table for table in self.tables):
                (self.cached if block_id in self.hashes else self.uncached).append(block_id)

    def draw_table(self, data: st.DataObject) -> list[int]:
        return self.tables[data.draw(st.integers(0, len(self.tables) - 1))]

    @rule(count=st.integers(0, 10))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            with pytest.raises(RuntimeError, match=f"cannot allocate {count} blocks"):
                self.pool.allocate(count)
            return
        block_ids = self.pool.allocate(count)
        assert block_ids == [self.model_take() for _ in range(count)]
        self.tables.append(block_ids)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = self.draw_table(data)
        shared = table[: data.draw(st.integers(0, len(table)))]
        self.pool.acquire(shared)
        self.tables.append(shared)

    @rule(block_hash=st.sampled_from(HASHES))
    def acquire_cached(self, block_hash: bytes) -> None:
        block_id = self.pool.lookup(block_hash)
        assert block_id == next((block for block, known in self.hashes.items() if known == block_hash), None)
        if block_id is not None:
            self.pool.acquire([block_id])
            self.tables.append([block_id])
            if block_id in self.cached:
                self.cached.remove(block_id)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), block_hash=st.sampled_from(HASHES))
    def register(self, data: st.DataObject, block_hash: bytes) -> None:
        block_id = data.draw(st.sampled_from(sorted({block for table in self.tables for block in table})))
        if self.hashes.get(block_id, block_hash) != block_hash:
            with pytest.raises(RuntimeError, match="another hash"):
                self.pool.register(block_id, block_hash)
            return
        self.pool.register(block_id, block_hash)
        if self.pool.enable_caching and block_hash not in self.hashes.values():
            self.hashes[block_id] = block_hash

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), epoch=st.integers(0, 3))
    def mark_drafted(self, data: st.DataObject, epoch: int) -> None:
        block_id = data.draw(st.sampled_from(sorted({block for table in self.tables for block in table})))
        self.pool.mark_drafted(block_id, epoch)
        self.epochs[block_id] = epoch

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        table = self.draw_table(data)
        length = data.draw(st.integers(0, len(table)))
        surplus = table[length:][::-1]
        del table[length:]
        self.pool.release(surplus)
        self.model_release(surplus)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(reversed(table))
        self.model_release(table[::-1])

    @rule(data=st.data())
    def misuse_of_a_free_block(self, data: st.DataObject) -> None:
        free = self.uncached + self.never_used + self.cached
        if free:
            block_id = data.draw(st.sampled_from(free))
            with pytest.raises(RuntimeError, match=f"double free of block {block_id}"):
                self.pool.release([block_id])
            if block_id not in self.cached:
                with pytest.raises(RuntimeError, match="free and not cached"):
                    self.pool.acquire([block_id])

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(self.tables)
            assert self.pool.num_free == len(self.uncached) + len(self.never_used) + len(self.cached)
            assert self.pool.draft_epochs == self.epochs


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None, derandomize=True)


def test_never_used_blocks_come_before_cached_ones_and_lowest_first() -> None:
    pool = BlockPool(4, enable_caching=True)
    assert pool.allocate(2) == [0, 1]
    pool.register(0, HASHES[0])
    pool.release([1, 0])
    assert pool.allocate(4) == [1, 2, 3, 0], "uncached, never used, cached"
    assert pool.lookup(HASHES[0]) is None, "allocation evicts"


def test_eviction_takes_the_oldest_request_first_and_its_tail_before_its_head() -> None:
    pool = BlockPool(4, enable_caching=True)
    first, second = pool.allocate(2), pool.allocate(2)
    for block_id, block_hash in zip(first + second, HASHES, strict=False):
        pool.register(block_id, block_hash)
    pool.release(reversed(second))
    pool.release(reversed(first))
    assert pool.allocate(4) == second[::-1] + first[::-1]


def test_a_hit_makes_a_block_recently_used() -> None:
    pool = BlockPool(2, enable_caching=True)
    for block_id in pool.allocate(2):
        pool.register(block_id, HASHES[block_id])
    pool.release([0, 1])
    pool.acquire([0])
    pool.release([0])
    assert pool.allocate(1) == [1]


def test_the_first_block_of_a_hash_is_kept() -> None:
    pool = BlockPool(2, enable_caching=True)
    pool.allocate(2)
    pool.register(0, HASHES[0])
    pool.register(1, HASHES[0])
    assert pool.lookup(HASHES[0]) == 0
    pool.release([1, 0])
    pool.check([])
    assert pool.allocate(1) == [1], "the private copy is not worth keeping"


def test_nothing_is_cached_when_caching_is_disabled() -> None:
    pool = BlockPool(1, enable_caching=False)
    pool.allocate(1)
    pool.register(0, HASHES[0])
    assert pool.lookup(HASHES[0]) is None


def test_a_draft_epoch_survives_a_free_and_ends_with_the_allocation() -> None:
    pool = BlockPool(1, enable_caching=True)
    pool.allocate(1)
    pool.register(0, HASHES[0])
    pool.mark_drafted(0, 3)
    pool.release([0])
    assert pool.draft_epochs == [3]
    pool.allocate(1)
    assert pool.draft_epochs == [-1]


def test_misuse_raises() -> None:
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockPool(0, enable_caching=True)
    pool = BlockPool(2, enable_caching=True)
    with pytest.raises(RuntimeError, match="cannot allocate 3 blocks: 2 of 2 are free"):
        pool.allocate(3)
    with pytest.raises(RuntimeError, match="cannot register block 1: it is free"):
        pool.register(1, HASHES[0])
    pool.allocate(1)
    pool.release([0])
    with pytest.raises(RuntimeError, match="double free of block 0"):
        pool.release([0])


def test_check_names_what_is_broken() -> None:
    pool = BlockPool(3, enable_caching=True)
    pool.allocate(2)
    pool.check([[0, 1]])
    with pytest.raises(AssertionError, match="block 1: 1 references, but 0 in the tables"):
        pool.check([[0]])
    with pytest.raises(AssertionError, match=r"blocks \[0\] are in table 1 more than once"):
        pool.check([[1], [0, 0]])
    pool.register(0, HASHES[0])
    pool._hash_of[1] = HASHES[0]
    with pytest.raises(AssertionError, match=r"both ways at blocks \[1\]"):
        pool.check([[0, 1]])
    del pool._hash_of[1]
    del pool._free_queue[2]
    with pytest.raises(AssertionError, match="block 2: free=False, 0 references"):
        pool.check([[0, 1]])


def test_the_hash_depends_on_parent_tokens_and_salt() -> None:
    digest = hash_block(b"", [1, 2], b"a")
    assert len(digest) == 16
    assert digest == hash_block(b"", (1, 2), b"a")
    others = [hash_block(digest, [1, 2], b"a"), hash_block(b"", [2, 1], b"a"), hash_block(b"", [1, 2], b"b")]
    assert len({digest, *others}) == 4

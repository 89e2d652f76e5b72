"""The block pool against a slow model of it."""

from __future__ import annotations

from itertools import chain, pairwise
from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from titan.memory.block_pool import BlockPool, hash_block, hash_root

HASHES = [hash_block(b"", [token]) for token in range(6)]
SEEDS = st.integers(0, 2**32)  # the choices inside a rule come from one draw, which keeps examples fast


class PoolMachine(RuleBasedStateMachine):
    """Random use of a pool by block tables; the model keeps the two kinds of free blocks in separate lists."""

    @initialize(num_blocks=st.integers(1, 9), enable_caching=st.booleans())
    def create(self, num_blocks: int, enable_caching: bool) -> None:
        self.pool = BlockPool(num_blocks, enable_caching)
        self.tables: list[list[int]] = []
        self.hashes: dict[int, bytes] = {}
        self.is_drafted = [False] * num_blocks
        self.blank = set(range(num_blocks))  # runs first
        self.cached: list[int] = []  # the first one freed is taken first

    def model_take(self, count: int, after: int) -> list[int] | None:
        """The blocks that a pool hands out: a run, or all blank blocks before these cached ones; ``None``: any blank ones."""
        if len(self.blank) < count:
            return sorted(self.cached[: count - len(self.blank)])
        runs = ([*range(first, first + count)] for first in (after + 1, *range(len(self.is_drafted))))
        return next((run for run in runs if self.blank >= {*run}), None)

    @rule(count=st.integers(0, 10), seed=SEEDS)
    def allocate(self, count: int, seed: int) -> None:
        count %= self.pool.num_free + 2  # seldom too many
        if count > self.pool.num_free:
            message = f"cannot allocate {count} blocks: {self.pool.num_free} of {self.pool.num_blocks} are free"
            with pytest.raises(RuntimeError, match=message):
                self.pool.allocate(count)
            return
        evicted, num_evicted = self.pool.next_evicted(count), self.pool.num_evicted
        after = Random(seed).randrange(-1, self.pool.num_blocks)
        expected = self.model_take(count, after)
        block_ids = self.pool.allocate(count, after)
        num_cached = max(0, count - len(self.blank))
        assert {*block_ids[: count - num_cached]} <= self.blank and len({*block_ids}) == count
        assert expected is None or block_ids[-len(expected) :] == expected or not count
        expected_evicted = [(self.hashes[block_id], block_id) for block_id in self.cached if block_id in block_ids]
        assert [*evicted.items()] == expected_evicted
        self.blank -= {*block_ids}
        self.cached = [block_id for block_id in self.cached if block_id not in block_ids]
        for block_id in block_ids:
            self.hashes.pop(block_id, None)
            self.is_drafted[block_id] = False
        assert self.pool.num_evicted - num_evicted == len(evicted)
        self.tables.append(block_ids)

    @precondition(lambda self: self.tables)
    @rule(seed=SEEDS)
    def fork(self, seed: int) -> None:
        table = Random(seed).choice(self.tables)
        shared = table[: seed % (len(table) + 1)]
        self.pool.acquire(shared)
        self.tables.append(shared)

    @rule(seed=SEEDS)
    def acquire_cached(self, seed: int) -> None:
        block_hash = Random(seed).choice([*self.hashes.values(), *HASHES])
        block_id = self.pool.lookup(block_hash)
        assert block_id == next((block for block, known in self.hashes.items() if known == block_hash), None)
        if block_id is not None:
            self.pool.acquire([block_id])
            self.tables.append([block_id])
            if block_id in self.cached:
                self.cached.remove(block_id)

    @precondition(lambda self: any(self.tables))
    @rule(seed=SEEDS)
    def fill(self, seed: int) -> None:
        random = Random(seed)
        table = random.choice([table for table in self.tables if table])
        for block_id in table:
            block_hash = random.choice(HASHES)
            if self.hashes.get(block_id, block_hash) != block_hash:
                with pytest.raises(RuntimeError, match="another hash"):
                    self.pool.register(block_id, block_hash)
            else:
                self.pool.register(block_id, block_hash)
                if self.pool.enable_caching and block_hash not in self.hashes.values():
                    self.hashes[block_id] = block_hash
        self.pool.is_drafted[table[0]] = self.is_drafted[table[0]] = True

    @rule(seed=SEEDS)
    def forget(self, seed: int) -> None:
        forgotten = Random(seed).sample(HASHES, seed % (len(HASHES) + 1))
        self.pool.forget(forgotten)
        self.hashes = {block_id: each for block_id, each in self.hashes.items() if each not in forgotten}
        self.blank |= {*self.cached} - {*self.hashes}
        self.cached = [block_id for block_id in self.cached if block_id in self.hashes]

    @rule()
    def forget_drafted(self) -> None:
        self.pool.forget_drafted()
        self.is_drafted = [False] * self.pool.num_blocks

    @precondition(lambda self: self.tables)
    @rule(seed=SEEDS)
    def truncate(self, seed: int) -> None:
        table = Random(seed).choice(self.tables)
        surplus = table[seed % (len(table) + 1) :][::-1]
        del table[len(table) - len(surplus) :]
        self.tables = [each for each in self.tables if each]
        self.pool.release(surplus)
        for block_id in surplus:
            if not any(block_id in each for each in self.tables):
                if block_id in self.hashes:
                    self.cached.append(block_id)
                else:
                    self.blank.add(block_id)

    @rule(num_blocks=st.integers(1, 12))
    def resize(self, num_blocks: int) -> None:
        held = {block_id for table in self.tables for block_id in table}
        if len(held) > num_blocks:
            with pytest.raises(ValueError, match=f"num_blocks={num_blocks} is less than the {len(held)} blocks in use"):
                self.pool.new_ids(num_blocks, self.tables)
            return
        self.cached = self.cached[max(len(held) + len(self.cached) - num_blocks, 0) :]
        kept = list(dict.fromkeys([*chain(*self.tables), *self.cached[::-1]]))
        new_ids = self.pool.new_ids(num_blocks, self.tables)
        assert list(new_ids.items()) == [(old, new) for new, old in enumerate(kept)]
        self.pool.resize(num_blocks, new_ids)
        self.tables = [[new_ids[block_id] for block_id in table] for table in self.tables]
        self.hashes = {new_ids[block_id]: each for block_id, each in self.hashes.items() if block_id in kept}
        drafted = {new for old, new in new_ids.items() if self.is_drafted[old]}
        self.is_drafted = [block_id in drafted for block_id in range(num_blocks)]
        self.blank = set(range(len(kept), num_blocks))
        self.cached = [new_ids[block_id] for block_id in self.cached]

    @precondition(lambda self: self.pool.num_free > 0)
    @rule(seed=SEEDS)
    def misuse_of_a_free_block(self, seed: int) -> None:
        block_id = Random(seed).choice([*self.blank, *self.cached])
        with pytest.raises(RuntimeError, match=f"double free of block {block_id}"):
            self.pool.release([block_id])
        if block_id not in self.cached:
            with pytest.raises(RuntimeError, match="free and not cached"):
                self.pool.acquire([block_id])
        if self.pool.enable_caching:
            with pytest.raises(RuntimeError, match=f"cannot register block {block_id}: it is free"):
                self.pool.register(block_id, HASHES[0])

    @invariant()
    def holds(self) -> None:
        self.pool.check(self.tables)
        assert self.pool.num_free == len(self.blank) + len(self.cached) and self.pool.num_blank == len(self.blank)
        assert list(self.pool.is_drafted) == self.is_drafted


TestPoolMachine = PoolMachine.TestCase


def test_hits_copies_and_drafted_blocks_of_a_small_pool() -> None:
    """What the machine meets by luck alone."""
    pool = BlockPool(2, enable_caching=True)
    for block_id in pool.allocate(2):
        pool.register(block_id, HASHES[0])
    pool.is_drafted[0] = 1
    assert pool.lookup(HASHES[0]) == 0
    pool.release([0, 1])
    assert pool.allocate(1) == [1], "a copy of what is cached is not worth keeping"
    pool.register(1, HASHES[1])
    pool.release([1])
    pool.acquire([0])
    pool.release([0])
    assert pool.allocate(1) == [1], "a hit makes a block recently used"
    assert list(pool.is_drafted) == [1, 0]
    assert pool.allocate(1) == [0] and not any(pool.is_drafted)


def mean_run(pool: BlockPool, *, is_local: bool) -> float:
    """Mean length of runs in the tables of 32 requests of all lengths that come and go, and grow block by block."""
    random, tables = Random(0), list[tuple[list[int], int]]()
    num_blocks = num_runs = 0
    for step in range(1500):
        while len(tables) < 32:
            tables.append((pool.allocate(random.randint(4, 40)), random.randint(6, 60)))
        for table, _ in tables:
            if random.random() < 1 / 16:
                table.extend(pool.allocate(1, table[-1] if is_local else -1))
        for table, most in [each for each in tables if len(each[0]) >= each[1]]:
            tables.remove((table, most))
            pool.release(random.sample(table, len(table)))
        if step >= 1000:
            num_blocks += sum(len(table) for table, _ in tables)
            num_runs += sum(1 + sum(after != before + 1 for before, after in pairwise(table)) for table, _ in tables)
    return num_blocks / num_runs


def test_blocks_of_a_request_stay_in_runs_as_requests_come_and_go() -> None:
    assert mean_run(BlockPool(1600, enable_caching=False), is_local=True) > 2.5  # one by one, the lowest first: 1.3
    assert mean_run(BlockPool(1600, enable_caching=False), is_local=False) < 2.5, "the place after the last block does not matter"


def test_runs_lie_behind_the_last_block_where_they_must_be_split() -> None:
    pool = BlockPool(8, enable_caching=False)
    pool.release(block_id for block_id in pool.allocate(8) if block_id in (0, 1, 6, 7))
    assert pool.allocate(4, after=5) == [6, 7, 0, 1]


def test_check_names_what_is_broken() -> None:
    pool = BlockPool(3, enable_caching=True)
    pool.allocate(2)
    pool.check([[0, 1]])
    with pytest.raises(AssertionError, match="block 1: 1 references, but 0 in the tables"):
        pool.check([[0]])
    with pytest.raises(AssertionError, match=r"a block is in table 1 more than once: \[0, 0\]"):
        pool.check([[1], [0, 0]])
    pool.register(0, HASHES[0])
    pool._hash_of[1] = HASHES[0]
    with pytest.raises(AssertionError, match="both ways"):
        pool.check([[0, 1]])
    del pool._hash_of[1]
    pool._blank[2] = 0
    with pytest.raises(AssertionError, match="block 2: blank=0, cached=False, 0 references"):
        pool.check([[0, 1]])


def test_the_hash_depends_on_parent_and_tokens() -> None:
    digest = hash_block(b"", [1, 2])
    assert len(digest) == 16
    assert digest == hash_block(b"", (1, 2))
    assert len({digest, hash_block(digest, [1, 2]), hash_block(b"", [2, 1]), hash_block(hash_root("salt"), [1, 2])}) == 4
    salt = "".join(map(chr, (65, *[0] * 7))) * 2  # the bytes of two tokens
    assert hash_root(salt) != hash_block(b"", [65, 65])

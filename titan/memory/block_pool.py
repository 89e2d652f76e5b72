"""The block pool: hands out physical block ids, counts references and finds cached blocks by their hash.

A block is either **free** (no references) or **referenced**. A free block that is **cached** keeps its content, and can be found
by its hash, until it is allocated again; the other free blocks are **blank**. Blank blocks are allocated first, in runs where
possible, since a processor reads adjacent blocks in less time; then cached ones, the least recently used first.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain, islice


class BlockPool:
    """Physical blocks ``0 .. num_blocks-1``.

    Args:
        num_blocks: size of the pool, the same for every cache it indexes.
        enable_caching: whether blocks can be found by hash; if not, `lookup` finds nothing and `register` does nothing.
    """

    def __init__(self, num_blocks: int, enable_caching: bool) -> None:
        self.enable_caching = enable_caching
        self.num_evicted = 0  # cached blocks that were allocated again, since the start
        self.num_touched = num_blocks
        """Number of leading blocks that may have been written; in a cache that was resized, the others take no memory yet."""
        self.reset(num_blocks)

    def reset(self, num_blocks: int) -> None:
        """Start over with this many blocks, all of them blank."""
        self.num_blocks = num_blocks
        self.num_touched = min(self.num_touched, num_blocks)
        self.is_drafted = bytearray(num_blocks)  # by block: whether it holds the current draft's KV of all its tokens
        self._ref_counts = [0] * num_blocks
        self._blank = bytearray(b"\1") * num_blocks  # by block: whether it is free and not cached
        self.num_blank = num_blocks
        """Number of free blocks that are not cached; they are allocated first."""
        self._cached: OrderedDict[int, None] = OrderedDict()  # free ones, the least recently used first
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated, cached ones included."""
        return self.num_blank + len(self._cached)

    def num_references(self, block_id: int) -> int:
        """Return how many block tables hold the block; 0: it is free."""
        return self._ref_counts[block_id]

    def next_evicted(self, count: int) -> dict[bytes, int]:
        """Return the cached blocks among the next ``count`` to be allocated, by their hashes, in that order."""
        return {self._hash_of[block_id]: block_id for block_id in islice(self._cached, max(0, count - self.num_blank))}

    def allocate(self, count: int, after: int = -1) -> list[int]:
        """Allocate ``count`` free blocks, one reference each: blank ones in runs, then cached ones, whose content is dropped.

        They follow the block ``after`` directly if the blocks there are blank.

        Raises:
            RuntimeError: fewer than ``count`` blocks are free; nothing is allocated.
        """
        if count > self.num_free:
            raise RuntimeError(f"cannot allocate {count} blocks: {self.num_free} of {self.num_blocks} are free")
        block_ids = self._take_blank(min(count, self.num_blank), after)
        if count > len(block_ids):
            evicted = [self._cached.popitem(last=False)[0] for _ in range(count - len(block_ids))]
            for block_id in evicted:
                del self._block_of[self._hash_of.pop(block_id)]
            self.num_evicted += len(evicted)
            block_ids += sorted(evicted)  # cached blocks of a table were released from its end to its beginning
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
            self.is_drafted[block_id] = 0
        return block_ids

    def _take_blank(self, count: int, after: int) -> list[int]:
        """Take blank blocks: those right after ``after``, else the first run of ``count``, else runs of half as many, and so on."""
        block_ids, size, place = list[int](), count, 0  # no run of this size starts before this place
        while left := count - len(block_ids):
            if left < size:
                size, place = left, 0
            run = b"\1" * size
            if self._blank.startswith(run, after + 1):
                start = after + 1
            elif (start := self._blank.find(run, place)) < 0:
                size, place = (size + 1) // 2, 0
                continue
            else:
                place = start
            self._blank[start : start + size] = bytes(size)
            block_ids.extend(range(start, start + size))
            after = block_ids[-1]
            self.num_touched = max(self.num_touched, after + 1)
        self.num_blank -= count
        return block_ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block, free and cached ones included.

        Raises:
            RuntimeError: a block is free and not cached, so its content is undefined.
        """
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                if block_id not in self._hash_of:
                    raise RuntimeError(f"cannot acquire block {block_id}: it is free and not cached")
                del self._cached[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference of each block. Pass tail blocks first, so that cached ones are reused before head blocks.

        Raises:
            RuntimeError: a block has no reference (double free).
        """
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                raise RuntimeError(f"double free of block {block_id}")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if block_id in self._hash_of:
                    self._cached[block_id] = None
                else:
                    self._make_blank(block_id)

    def _make_blank(self, block_id: int) -> None:
        self._blank[block_id] = 1
        self.num_blank += 1

    def lookup(self, block_hash: bytes) -> int | None:
        """Return the block that holds the tokens of this hash, if one is cached."""
        return self._block_of.get(block_hash)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Register a full block under its hash. If another block has this hash already, only that one is found.

        Raises:
            RuntimeError: the block is free, or is registered under another hash.
        """
        if not self.enable_caching:
            return
        if self._ref_counts[block_id] == 0:
            raise RuntimeError(f"cannot register block {block_id}: it is free")
        if self._hash_of.get(block_id, block_hash) != block_hash:
            raise RuntimeError(f"cannot register block {block_id}: it has another hash")
        if self._block_of.setdefault(block_hash, block_id) == block_id:
            self._hash_of[block_id] = block_hash

    def forget(self, block_hashes: Iterable[bytes]) -> None:
        """Forget hashes, so that their blocks are not found any more; those that are free become blank."""
        for block_hash in block_hashes:
            if (block_id := self._block_of.pop(block_hash, None)) is not None:
                del self._hash_of[block_id]
                if block_id in self._cached:
                    del self._cached[block_id]
                    self._make_blank(block_id)

    def forget_cached(self) -> None:
        """Forget all hashes."""
        self.forget([*self._block_of])

    def new_ids(self, num_blocks: int, tables: Iterable[Iterable[int]]) -> dict[int, int]:
        """Return new ids for the blocks that a pool of another size keeps, old id -> new id, so that each table becomes a run.

        Referenced blocks come first, table by table, then cached ones, the most recently used first. ``tables`` must be the block
        tables of all requests.

        Raises:
            ValueError: more blocks than ``num_blocks`` are referenced.
        """
        num_referenced = self.num_blocks - self.num_free
        if num_referenced > num_blocks:
            raise ValueError(f"num_blocks={num_blocks} is less than the {num_referenced} blocks in use: at least these are needed")
        referenced = dict.fromkeys(chain.from_iterable(tables))
        assert len(referenced) == num_referenced, "block tables are missing"
        kept = islice(chain(referenced, reversed(self._cached)), num_blocks)
        return {old: new for new, old in enumerate(kept)}

    def resize(self, num_blocks: int, new_ids: Mapping[int, int]) -> None:
        """Resize the pool and renumber its blocks, old id -> new id, after their content has moved; the others become blank."""
        if num_blocks != self.num_blocks:  # else blocks after these were written before the cache was compacted
            self.num_touched = len(new_ids)
        ref_counts, is_drafted = [0] * num_blocks, bytearray(num_blocks)
        for old, new in new_ids.items():
            ref_counts[new], is_drafted[new] = self._ref_counts[old], self.is_drafted[old]
        self.num_blocks, self._ref_counts, self.is_drafted = num_blocks, ref_counts, is_drafted
        self.num_blank = num_blocks - len(new_ids)
        self._blank = bytearray(len(new_ids)) + bytearray(b"\1") * self.num_blank
        self._cached = OrderedDict.fromkeys(new_ids[block_id] for block_id in self._cached if block_id in new_ids)
        self._hash_of = {new_ids[block_id]: each for block_id, each in self._hash_of.items() if block_id in new_ids}
        self._block_of = {block_hash: block_id for block_id, block_hash in self._hash_of.items()}

    def forget_drafted(self) -> None:
        """Forget which blocks hold the draft's KV: another draft, or none, is the current one."""
        self.is_drafted = bytearray(self.num_blocks)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Check the invariants of the pool, given the block tables of all its users.

        Raises:
            AssertionError: an invariant is broken; the message says which, and where.
        """
        tables = tuple(tables)
        for row, table in enumerate(tables):
            assert len(set(table)) == len(table), f"a block is in table {row} more than once: {list(table)}"
        expected = Counter(chain.from_iterable(tables))
        for block_id, (count, is_blank) in enumerate(zip(self._ref_counts, self._blank, strict=True)):
            assert count == expected[block_id], f"block {block_id}: {count} references, but {expected[block_id]} in the tables"
            kinds = is_blank + (block_id in self._cached) + (count > 0)
            assert kinds == 1, f"block {block_id}: blank={is_blank}, cached={block_id in self._cached}, {count} references"
        assert self.num_blank == self._blank.count(1), f"{self.num_blank} blocks count as blank, not {self._blank.count(1)}"
        self._check_hashes()

    def _check_hashes(self) -> None:
        inverse = {block_id: block_hash for block_hash, block_id in self._block_of.items()}
        assert len(inverse) == len(self._block_of), "two hashes lead to one block"
        assert inverse == self._hash_of, "hashes and blocks do not map both ways"
        assert self.enable_caching or not inverse, f"blocks {sorted(inverse)} have a hash, but caching is disabled"
        assert all(block_id in inverse for block_id in self._cached), "free blocks count as cached, but have no hash"
        assert not any(self._blank[block_id] for block_id in inverse), "free blocks with a hash count as blank"


def hash_root(salt: str | None) -> bytes:
    """Return the parent hash of the first block of a request with this cache salt; it is empty without one.

    It never equals the hash of a block, whatever the salt is.
    """
    return b"" if salt is None else blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"salt").digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a full block, 16 bytes: of its tokens and, by the parent's hash, of all tokens before them."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()

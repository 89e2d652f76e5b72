"""The block pool: hands out physical block ids, counts references and finds cached blocks by their hash.

A block is either **free** (in the free queue, no references) or **referenced**. A free block keeps its content, and can be
found by its hash, until it is allocated again.
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

    Raises:
        ValueError: the number of blocks is negative.
    """

    def __init__(self, num_blocks: int, enable_caching: bool) -> None:
        if num_blocks < 0:
            raise ValueError(f"num_blocks={num_blocks} is too small: at least 0 is needed")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.num_evicted = 0  # cached blocks that were allocated to somebody else, since the start
        self.draft_epochs = [-1] * num_blocks  # epoch of the draft whose KV is valid in the block, -1 = none
        self._ref_counts = [0] * num_blocks
        # Allocated from the front: first freed blocks without a hash, then blocks never used, then cached ones by age.
        self._free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated, cached ones included."""
        return len(self._free_queue)

    @property
    def num_blank(self) -> int:
        """Number of free blocks that are not cached; they are allocated first."""
        return sum(block_id not in self._hash_of for block_id in self._free_queue)

    def is_free(self, block_id: int) -> bool:
        """Whether the block has no references."""
        return block_id in self._free_queue

    def next_evicted(self, count: int) -> list[tuple[int, bytes]]:
        """Return the cached blocks among the next ``count`` to be allocated, with their hashes, in that order."""
        return [(block_id, self._hash_of[block_id]) for block_id in islice(self._free_queue, count) if block_id in self._hash_of]

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` free blocks, one reference each; their cached content is dropped.

        Raises:
            RuntimeError: fewer than ``count`` blocks are free; nothing is allocated.
        """
        if count > self.num_free:
            raise RuntimeError(f"cannot allocate {count} blocks: {self.num_free} of {self.num_blocks} are free")
        block_ids = [self._free_queue.popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
            self.draft_epochs[block_id] = -1
            block_hash = self._hash_of.pop(block_id, None)
            if block_hash is not None:
                del self._block_of[block_hash]
                self.num_evicted += 1
        return block_ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block; a cached free one leaves the free queue.

        Raises:
            RuntimeError: a block is free and not cached, so its content is undefined.
        """
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                if block_id not in self._hash_of:
                    raise RuntimeError(f"cannot acquire block {block_id}: it is free and not cached")
                del self._free_queue[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference of each block. Pass tail blocks first, so that they are reused before head blocks.

        Raises:
            RuntimeError: a block has no reference (double free).
        """
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                raise RuntimeError(f"double free of block {block_id}")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free_queue[block_id] = None
                if block_id not in self._hash_of:  # nothing to keep: reuse it first, so that the used range stays dense
                    self._free_queue.move_to_end(block_id, last=False)

    def lookup(self, block_hash: bytes) -> int | None:
        """Return the block that holds the tokens of this hash, if one is cached."""
        return self._block_of.get(block_hash)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Register a full block under its hash. If another block has this hash already, that one stays and this one is private.

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

    def forget_cached(self) -> None:
        """Forget all hashes, so that no block is found any more."""
        self._block_of.clear()
        self._hash_of.clear()

    def new_ids(self, num_blocks: int, tables: Iterable[Iterable[int]]) -> dict[int, int]:
        """Return the blocks that a pool of another size keeps, old id -> new id, so that each table becomes a run.

        First come the referenced blocks, in the order of their first table, then the cached ones that were used last.

        Args:
            num_blocks: of the new pool.
            tables: all block tables.

        Raises:
            ValueError: more blocks than ``num_blocks`` are referenced.
        """
        num_referenced = self.num_blocks - self.num_free
        if num_referenced > num_blocks:
            raise ValueError(f"num_blocks={num_blocks} is less than the {num_referenced} blocks in use: at least these are needed")
        referenced = dict.fromkeys(chain.from_iterable(tables))
        assert len(referenced) == num_referenced, "the tables are not all"
        cached = (block_id for block_id in reversed(self._free_queue) if block_id in self._hash_of)
        kept = islice(chain(referenced, cached), num_blocks)
        return {old: new for new, old in enumerate(kept)}

    def resize(self, num_blocks: int, new_ids: Mapping[int, int]) -> None:
        """Resize the pool and renumber its blocks, after their content has moved.

        Args:
            num_blocks: new size of the pool.
            new_ids: from `new_ids` of this size; the content of other blocks is forgotten.
        """
        ref_counts, draft_epochs = [0] * num_blocks, [-1] * num_blocks
        for old, new in new_ids.items():
            ref_counts[new], draft_epochs[new] = self._ref_counts[old], self.draft_epochs[old]
        cached = [new_ids[block_id] for block_id in self._free_queue if block_id in new_ids]
        self.num_blocks, self._ref_counts, self.draft_epochs = num_blocks, ref_counts, draft_epochs
        self._free_queue = OrderedDict.fromkeys((*range(len(new_ids), num_blocks), *cached))
        self._hash_of = {new_ids[block_id]: each for block_id, each in self._hash_of.items() if block_id in new_ids}
        self._block_of = {block_hash: block_id for block_id, block_hash in self._hash_of.items()}

    def mark_drafted(self, block_id: int, epoch: int) -> None:
        """Record that the draft of this epoch has written its KV of the whole block."""
        self.draft_epochs[block_id] = epoch

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Check the invariants of the pool, given the block tables of all its users.

        Raises:
            AssertionError: an invariant is broken; the message says which, and where.
        """
        tables = tuple(tables)
        for row, table in enumerate(tables):
            assert len(set(table)) == len(table), f"blocks {_repeated(table)} are in table {row} more than once"
        expected = Counter(chain.from_iterable(tables))
        for block_id, count in enumerate(self._ref_counts):
            assert count == expected[block_id], f"block {block_id}: {count} references, but {expected[block_id]} in the tables"
            assert self.is_free(block_id) == (count == 0), f"block {block_id}: free={self.is_free(block_id)}, {count} references"
        num_referenced = sum(count > 0 for count in self._ref_counts)
        total = self.num_free + num_referenced
        assert total == self.num_blocks, f"{self.num_free} free + {num_referenced} referenced blocks, not {self.num_blocks}"
        self._check_hashes()

    def _check_hashes(self) -> None:
        inverse = {block_id: block_hash for block_hash, block_id in self._block_of.items()}
        assert len(inverse) == len(self._block_of), "two hashes lead to one block"
        assert inverse == self._hash_of, f"hashes do not map both ways at blocks {_differing_keys(inverse, self._hash_of)}"
        assert self.enable_caching or not inverse, f"blocks {sorted(inverse)} have a hash, but caching is disabled"
        cached = [block_id in inverse for block_id in self._free_queue]
        assert cached == sorted(cached), f"cached blocks are ahead of others in the free queue {list(self._free_queue)}"
        for block_id, epoch in enumerate(self.draft_epochs):
            assert epoch >= -1, f"block {block_id}: draft epoch {epoch}"


def _repeated(block_ids: Sequence[int]) -> list[int]:
    return [block_id for block_id, count in Counter(block_ids).items() if count > 1]


def _differing_keys(left: dict[int, bytes], right: dict[int, bytes]) -> list[int]:
    return sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))


def hash_root(salt: str | None) -> bytes:
    """Return the parent of the first block of requests with this salt of the user's; it is empty for none."""
    return b"" if salt is None else blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def hash_block(parent: bytes, token_ids: Sequence[int], salt: bytes) -> bytes:
    """Return the hash of a full block, which identifies its tokens and all tokens before them.

    Args:
        parent: hash of the previous block; for the first one `hash_root`.
        token_ids: the block's tokens.
        salt: at most 64 bytes; hashes of different salts never match.

    Returns:
        16 bytes.
    """
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=16, key=salt).digest()

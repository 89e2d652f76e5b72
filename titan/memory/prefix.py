"""Search for blocks that already hold KV of a request: a sibling's, cached ones, and those in the swap space."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import takewhile
from typing import NamedTuple

from titan.core.request import Request
from titan.memory.block_pool import BlockPool, hash_block, hash_root
from titan.memory.swap_space import SwapSpace


class Prefix(NamedTuple):
    """Full blocks that are already computed and hold a prefix of a request's committed tokens."""

    block_ids: dict[int, int]  # blocks of the pool by their index in the prefix
    swapped: dict[int, int]  # blocks of the swap space by their index in the prefix
    block_hashes: list[bytes]  # one per block, or none without prefix caching
    num_drafted_blocks: int  # leading blocks that hold the current draft's KV as well


class PrefixFinder:
    """Finds blocks that hold KV of requests without blocks, and stores the hashes that it computes in the requests."""

    def __init__(self, pool: BlockPool, swap_space: SwapSpace, block_size: int) -> None:
        self._pool = pool
        self._swap_space = swap_space
        self._block_size = block_size

    def find(self, request: Request) -> Prefix:
        """Return the full blocks that hold KV of the longest prefix of a request without blocks, its root excluded.

        There are none if its prompt still needs logits, which blocks do not hold.
        """
        if request.prompt_logits(request.num_prompt_tokens):
            return Prefix({}, {}, [], 0)
        pool, space, size = self._pool, self._swap_space.pool, self._block_size
        sibling = request.leading_sibling
        num_shared = min(sibling.num_computed_tokens, request.num_common_tokens) // size
        block_ids = dict(enumerate(sibling.block_ids[:num_shared]))  # shared, whether or not they are cached
        swapped, are_drafted = dict[int, int](), list[int]()
        request.hash_chain += sibling.hash_chain[len(request.hash_chain) : num_shared]
        for i, block_hash in enumerate(self.block_hashes(request, num_shared) if pool.enable_caching else (), num_shared):
            if (block_id := pool.lookup(block_hash)) is not None:
                block_ids[i] = block_id
                are_drafted.append(pool.is_drafted[block_id])
            elif (block_id := space.lookup(block_hash)) is not None:
                swapped[i] = block_id
                are_drafted.append(space.is_drafted[block_id])
            else:
                break
        num_drafted_blocks = min(sibling.num_drafted_context // size, num_shared)
        if num_drafted_blocks == num_shared:
            num_drafted_blocks += len(list(takewhile(bool, are_drafted)))
        block_hashes = request.hash_chain[: num_shared + len(are_drafted)]
        return Prefix(block_ids, swapped, block_hashes, num_drafted_blocks)

    def find_own(self, request: Request, pool: BlockPool) -> dict[int, int]:
        """Return a pool's cached blocks that hold KV of a request, the draft's as far as there is any, by their index in it."""
        found, num_drafted_blocks = dict[int, int](), -(-request.num_drafted_context // self._block_size)
        for i, block_hash in enumerate(request.block_hashes):
            block_id = pool.lookup(block_hash)
            if block_id is not None and (i >= num_drafted_blocks or pool.is_drafted[block_id]):
                found[i] = block_id
        return found

    def found_blocks(self, request: Request) -> Collection[int]:
        """Return the blocks of the pool that hold KV of a request without blocks, so that it can share them."""
        return (self.find_own(request, self._pool) if request.is_swapped else self.find(request).block_ids).values()

    def block_hashes(self, request: Request, start: int) -> Iterator[bytes]:
        """Yield the hashes of the request's full blocks of committed tokens, from block ``start`` on; each is computed once."""
        chain, size = request.hash_chain, self._block_size
        for i in range(start, (request.num_tokens - 1) // size):
            while i >= len(chain):
                parent, first = chain[-1] if chain else hash_root(request.terms.cache_salt), len(chain) * size
                chain.append(hash_block(parent, request.token_ids[first : first + size]))
            yield chain[i]

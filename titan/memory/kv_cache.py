"""The KV cache: block tables of requests and the KV tensors that they index.

One block table per request indexes every attached cache, the target's and the draft's, so that prefix hits, rollback,
preemption and frees are decided once. Prefix hits and rollback are arithmetic on counters; KV is moved only for an accepted
path that is not the first nodes of its tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, takewhile
from typing import Literal, NamedTuple

import numpy as np

from titan.core.kv_tensor import KVTensor
from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.kernels.interfaces import CacheOps, PathMove
from titan.memory.block_pool import BlockPool, hash_block, hash_root

Role = Literal["target", "draft"]

HASH_SALT = b"titan"


class Prefix(NamedTuple):
    """Full blocks that are already computed and hold a prefix of a request's committed tokens."""

    block_ids: Sequence[int]
    block_hashes: list[bytes]  # one per block, or none without prefix caching
    num_drafted_blocks: int  # leading blocks that the current draft covers


class KVCache:
    """Allocates blocks to requests, commits accepted paths, and finds prefixes that were computed before.

    Args:
        num_blocks: blocks of every attached cache.
        block_size: tokens per block.
        enable_prefix_caching: whether full blocks are hashed and can be found again; if not, nothing is hashed.
        ops: move and clear the contents of the caches.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool, ops: CacheOps) -> None:
        self._ops = ops
        self.pool = BlockPool(num_blocks, enable_prefix_caching)
        self.block_size = block_size
        self.draft_epoch = 0
        self._new_block_ids: list[int] = []  # not cleared yet
        self._new_to_draft: set[int] = set()  # not cleared yet in the draft's cache
        self._tensors: dict[Role, KVTensor] = {}

    @property
    def num_blocks(self) -> int:
        """Number of blocks of every attached cache."""
        return self.pool.num_blocks

    @property
    def tensors(self) -> Mapping[Role, KVTensor]:
        """The attached caches."""
        return self._tensors

    def attach(self, role: Role, tensor: KVTensor) -> None:
        """Attach a cache, which the block tables then index.

        Raises:
            ValueError: the number or size of its blocks is not the pool's.
        """
        if (tensor.num_blocks, tensor.block_size) != (self.num_blocks, self.block_size):
            raise ValueError(
                f"the {role}'s KV tensor has {tensor.num_blocks} blocks of {tensor.block_size} slots: it must have "
                f"{self.num_blocks} of {self.block_size}"
            )
        self._tensors[role] = tensor
        if role == "draft":
            self._new_to_draft.clear()  # the tensor is new, and zero

    def detach(self, role: Role) -> None:
        """Detach a cache, if there is one."""
        self._tensors.pop(role, None)

    def num_missing_blocks(self, request: Request, num_slots: int) -> int:
        """Return how many free blocks it takes to cover ``num_slots`` slots, after a prefix match if the request has no blocks.

        Cached blocks without references count too, since a match takes them out of the free queue.
        """
        held = request.block_ids or [block for block in self._find_prefix(request).block_ids if not self.pool.is_free(block)]
        return max(self._num_blocks_of(num_slots) - len(held), 0)

    def match_prefix(self, request: Request) -> None:
        """Give a request without blocks the computed full blocks that hold the longest prefix of its committed tokens.

        These are cached blocks; without prefix caching, blocks of the prompt that a sibling holds. The root is never part of
        them, so that there is always something to compute. Sets the block table and its hashes, the counters of both caches
        and ``metrics.num_cached_tokens``.
        """
        prefix = self._find_prefix(request)
        self.pool.acquire(prefix.block_ids)
        request.extend_blocks(prefix.block_ids)
        request.mark_cached(prefix.block_hashes, prefix.num_drafted_blocks)
        request.commit(len(prefix.block_ids) * self.block_size)
        request.cover_draft(prefix.num_drafted_blocks * self.block_size)
        request.metrics.num_cached_tokens = len(prefix.block_hashes) * self.block_size

    def awaits_sibling(self, request: Request) -> bool:
        """Whether a sibling is computing the prompt's full blocks, which a request without blocks then need not compute."""
        num_computed = [sibling.num_computed_tokens for sibling in request.siblings if sibling.block_ids]
        return bool(num_computed) and max(num_computed) // self.block_size < self._num_prompt_blocks(request)

    def reserve(self, request: Request, num_slots: int) -> bool:
        """Extend the block table to cover ``num_slots`` slots, committed tokens and lookahead slots together.

        New blocks have undefined content until `clear_new_blocks`.

        Returns:
            Whether it covers them; if the pool has too few free blocks, nothing changes.
        """
        num_new = self._num_blocks_of(num_slots) - len(request.block_ids)
        if num_new <= 0:
            return True
        if num_new > self.pool.num_free:
            return False
        block_ids = self.pool.allocate(num_new)
        request.extend_blocks(block_ids)
        self._new_block_ids += block_ids
        return True

    def clear_new_blocks(self) -> None:
        """Zero the blocks reserved since the last call, before a pass: attention multiplies their content by zero weights.

        In the draft's cache this waits for `clear_draft_blocks`.
        """
        if self._new_block_ids:
            if "target" in self._tensors:
                self._ops.clear_blocks(self._tensors["target"], np.array(self._new_block_ids))
            self._new_to_draft.update(self._new_block_ids)
            self._new_block_ids.clear()

    def clear_draft_blocks(self, requests: Iterable[Request]) -> None:
        """Zero the blocks of requests in the draft's cache that are new to it, before the draft is fed these requests."""
        if "draft" in self._tensors and self._new_to_draft:
            block_ids = self._new_to_draft.intersection(chain(*(request.block_ids for request in requests)))
            if block_ids:
                self._ops.clear_blocks(self._tensors["draft"], np.array(sorted(block_ids)))
                self._new_to_draft -= block_ids

    def commit(self, plan: StepPlan, acceptance: Acceptance) -> None:
        """Move the accepted paths to the slots right after their roots, in every attached cache.

        Called before the requests' counters advance. The target's KV of node ``i`` is in slot ``root slot + 1 + i``, the
        draft's, if any, in ``root slot + 1 + draft_slots[i]``; that of the path's node ``k`` goes to ``root slot + 1 + k``. A path
        of the first slots, such as every path of a chain, moves nothing. The draft's coverage grows by the nodes it has KV of.
        """
        moves: dict[Role, list[PathMove]] = {"target": [], "draft": []}
        draft_slots, first_nodes = acceptance.trees.nodes.draft_slots.tolist(), acceptance.trees.start_loc.tolist()
        for request, num_tokens, first_node, path in zip(
            plan.requests, plan.num_tokens, first_nodes, acceptance.paths, strict=False
        ):
            if not path:
                continue
            drafted = [draft_slots[first_node + node] for node in path]
            if min(drafted) < 0:  # the draft may have no KV of the path's end
                drafted = list(takewhile((0).__le__, drafted))
            request.cover_draft(len(drafted))
            first_slot = request.num_computed_tokens + num_tokens  # of the nodes
            held: tuple[tuple[Role, list[int]], ...] = ("target", path), ("draft", drafted)
            for role, slots in held:
                if slots != list(range(len(slots))):
                    moves[role].append(PathMove(request.block_ids, first_slot, slots))
        for role, paths in moves.items():
            if paths and role in self._tensors:
                self._ops.move_paths(self._tensors[role], paths)

    def cache_full_blocks(self, request: Request) -> None:
        """Roll back to the committed tokens, and register their full blocks in the prefix cache.

        Called after the request's counters have advanced. Surplus blocks are released; full blocks are registered, and marked
        with the current draft's epoch where the draft covers them.
        """
        if len(request.block_ids) > (num_blocks := self._num_blocks_of(request.num_computed_tokens)):
            self.pool.release(request.roll_back(num_blocks))
        num_full_blocks = request.num_computed_tokens // self.block_size
        num_drafted_blocks = min(request.num_drafted_context // self.block_size, num_full_blocks)
        is_known = (len(request.block_hashes), request.num_draft_marked_blocks) == (num_full_blocks, num_drafted_blocks)
        if is_known or not self.pool.enable_caching:
            return
        block_hashes = request.block_hashes[-1:] or [hash_root(request.terms.cache_salt)]
        for i in range(len(request.block_hashes), num_full_blocks):
            block_hashes.append(self._hash_block(request, i, block_hashes[-1]))
            self.pool.register(request.block_ids[i], block_hashes[-1])
        for block_id in request.block_ids[request.num_draft_marked_blocks : num_drafted_blocks]:
            self.pool.mark_drafted(block_id, self.draft_epoch)
        request.mark_cached(block_hashes[1:], num_drafted_blocks)

    def free(self, request: Request) -> None:
        """Release all blocks of a request that is finished, aborted or preempted by recompute."""
        self.pool.release(request.release())

    def new_draft_epoch(self, requests: Iterable[Request]) -> None:
        """Start the epoch of a new draft, which covers no block and none of these unfinished requests."""
        self.draft_epoch += 1
        for request in requests:
            request.forget_draft()

    def _num_blocks_of(self, num_slots: int) -> int:
        return -(-num_slots // self.block_size)

    def _find_prefix(self, request: Request) -> Prefix:
        """Return the computed blocks that hold a prefix of the tokens of a request without blocks, its root excluded.

        There are none for a request whose prompt still needs logits, which blocks do not hold.
        """
        if request.prompt_logits(request.num_prompt_tokens):
            return Prefix([], [], 0)
        return self._cached_prefix(request) if self.pool.enable_caching else self._siblings_prefix(request)

    def _cached_prefix(self, request: Request) -> Prefix:
        prefix: dict[bytes, int] = {}
        block_hash = hash_root(request.terms.cache_salt)
        for i in range((request.num_tokens - 1) // self.block_size):
            block_hash = self._hash_block(request, i, block_hash)
            block_id = self.pool.lookup(block_hash)
            if block_id is None:
                break
            prefix[block_hash] = block_id
        num_drafted_blocks = 0
        for block_id in prefix.values():
            if self.pool.draft_epochs[block_id] != self.draft_epoch:
                break
            num_drafted_blocks += 1
        return Prefix(list(prefix.values()), list(prefix), num_drafted_blocks)

    def _siblings_prefix(self, request: Request) -> Prefix:
        sibling = max(request.family, key=lambda each: each.num_computed_tokens)
        num_shared = min(sibling.num_computed_tokens // self.block_size, self._num_prompt_blocks(request))
        return Prefix(sibling.block_ids[:num_shared], [], min(sibling.num_drafted_context // self.block_size, num_shared))

    def _num_prompt_blocks(self, request: Request) -> int:
        """Return the number of full blocks of the prompt, the root excluded."""
        return min(request.num_prompt_tokens, request.num_tokens - 1) // self.block_size

    def _hash_block(self, request: Request, i: int, parent: bytes) -> bytes:
        """Return the hash of the request's logical block ``i``, all of whose tokens are committed."""
        return hash_block(parent, request.token_ids[i * self.block_size : (i + 1) * self.block_size], HASH_SALT)

"""The KV cache: block tables of requests and the KV tensors that they index.

One block table per request indexes every attached cache, the target's and the draft's, so that prefix hits, rollback,
preemption and frees are decided once. Prefix hits and rollback are arithmetic on counters; KV is moved only for an accepted
path that is not the first nodes of its tree. It is copied to and from the swap space, and to a sibling that shares part of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from titan.core.kv_tensor import KVTensor, Role
from titan.core.out_of_memory import is_out_of_memory
from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.kernels.interfaces import CacheOps, PathMove
from titan.memory.block_pool import BlockPool
from titan.memory.prefix import PrefixFinder
from titan.memory.sizing import block_bytes
from titan.memory.swap_space import SwapSpace, take_blocks


class KVCache:
    """Allocates blocks to requests, commits accepted paths, and finds prefixes that were computed before.

    Args:
        num_blocks: blocks of every attached cache.
        block_size: tokens per block.
        enable_prefix_caching: whether full blocks are hashed and can be found again; if not, nothing is hashed.
        ops: move, copy and clear the contents of the caches.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool, ops: CacheOps) -> None:
        self._ops = ops
        self.swap_space = SwapSpace(enable_prefix_caching, ops)
        self.pool = BlockPool(num_blocks, enable_prefix_caching)
        self.block_size = block_size
        self.prefixes = PrefixFinder(self.pool, self.swap_space, block_size)
        self._new_blocks: set[int] = set()  # reserved blocks that were neither cleared nor copied to since
        self.tensors: Mapping[Role, KVTensor] = {}  # the attached caches, which have as many blocks as the pool

    @property
    def num_blocks(self) -> int:
        """Number of blocks of every attached cache."""
        return self.pool.num_blocks

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of all attached caches together."""
        return block_bytes(self.block_size, [tensor.layout for tensor in self.tensors.values()])

    def num_missing_blocks(self, request: Request, num_slots: int) -> int:
        """Return how many free blocks a request needs to cover ``num_slots`` slots, those for `admit` included if it has no blocks.

        Cached blocks that it would share count if they are free. Blocks that a sibling is computing do not: they will be shared.
        """
        num_held = len(request.block_ids)
        if not num_held and request.awaits_sibling:
            num_held = request.num_common_tokens // self.block_size
        elif not num_held:
            num_held = sum(map(bool, map(self.pool.num_references, self.prefixes.found_blocks(request))))
        return max(self._num_blocks_of(num_slots) - num_held, 0)

    def admit(self, request: Request) -> None:
        """Give a request without blocks the KV that is already computed: its own in the swap space, or that of a prefix."""
        try:
            if request.is_swapped:
                self._swap_in(request)
            else:
                self.match_prefix(request)
                self._copy_tail(request)
        except BaseException:
            self.await_copies()  # copies of one cache may be under way, into blocks that others get now
            self.free(request)
            raise

    def match_prefix(self, request: Request) -> None:
        """Give a request without blocks the computed full blocks that hold the longest prefix of its committed tokens.

        These are blocks of the prompt that a sibling holds, then cached blocks, copied in if they are in the swap space. The root
        is never part of them, so that there is always something to compute. Sets the block table and its hashes, and the counters
        of both caches.
        """
        prefix, space = self.prefixes.find(request), self.swap_space
        swapped = list(prefix.swapped.values())
        space.pool.acquire(swapped)  # else they might be evicted meanwhile
        try:
            request.extend_blocks(self._take(prefix.block_ids, prefix.block_hashes, prefix.swapped))
        finally:
            space.pool.release(swapped[::-1])
        space.num_hits += len(swapped)
        self._ops.await_copies()
        request.mark_cached(len(prefix.block_hashes), prefix.num_drafted_blocks)
        request.commit(len(request.block_ids) * self.block_size)
        request.cover_draft(prefix.num_drafted_blocks * self.block_size)

    def reserve(self, request: Request, num_slots: int) -> bool:
        """Extend the block table to cover ``num_slots`` slots, committed tokens and lookahead slots together.

        New blocks have undefined content until `clear_new_blocks`.

        Returns:
            Whether it covers them; if the pool has too few free blocks, nothing changes.
        """
        if len(request.block_ids) * self.block_size >= num_slots:
            return True
        num_new = self._num_blocks_of(num_slots) - len(request.block_ids)
        if num_new > self.pool.num_free:
            return False
        block_ids = self._allocate(num_new, request.block_ids[-1] if request.block_ids else -1)
        request.extend_blocks(block_ids)
        self._new_blocks.update(block_ids)
        return True

    def reserve_most(self, request: Request, num_slots: int) -> int:
        """Extend the block table to ``num_slots`` slots, or to as many as the free blocks allow; return how many it covers."""
        if not self.reserve(request, num_slots):
            num_slots = (len(request.block_ids) + self.pool.num_free) * self.block_size
            self.reserve(request, num_slots)
        return num_slots

    def clear_new_blocks(self) -> None:
        """Zero the blocks reserved since the last call, before a pass: attention multiplies their content by 0, and NaN stays."""
        if self._new_blocks:
            block_ids = np.array(sorted(self._new_blocks))
            for tensor in self.tensors.values():
                self._ops.clear_blocks(tensor, block_ids)
            self._new_blocks.clear()

    def commit(self, plan: StepPlan, acceptance: Acceptance) -> None:
        """Move the accepted paths to the slots right after their roots, in every attached cache, and count what the draft has.

        Called before the requests' counters advance. The target's KV of node ``i`` is in slot ``root slot + 1 + i``, the
        draft's, if any, in ``root slot + 1 + draft_slots[i]``; that of the path's node ``k`` goes to ``root slot + 1 + k``. A path
        of the first slots, such as every path of a chain, moves nothing. The draft's coverage grows by the nodes of the path
        that it has KV of.
        """
        moves: dict[Role, list[PathMove]] = {"target": [], "draft": []}
        draft_slots, first_nodes = acceptance.trees.nodes.draft_slots.tolist(), acceptance.trees.start_loc.tolist()
        for request, num_tokens, first_node, path in zip(
            plan.requests, plan.num_tokens, first_nodes, acceptance.paths, strict=False
        ):
            if not path:
                continue
            drafted = [draft_slots[first_node + node] for node in path]
            if -1 in drafted:  # the draft may have no KV of the path's end
                del drafted[drafted.index(-1) :]
            request.cover_draft(len(drafted))
            first_slot = request.num_computed_tokens + num_tokens  # of node 0
            if path[-1] != len(path) - 1:  # nodes come after their parents
                moves["target"].append(PathMove(request.block_ids, first_slot, path))
            if drafted != [*range(len(drafted))]:
                moves["draft"].append(PathMove(request.block_ids, first_slot, drafted))
        for role, paths in moves.items():
            if paths and role in self.tensors:
                self._ops.move_paths(self.tensors[role], paths)

    def roll_back(self, request: Request) -> None:
        """Release the blocks after those of the committed tokens, after the request's counters have advanced."""
        if len(request.block_ids) > (num_blocks := -(-request.num_computed_tokens // self.block_size)):
            self.pool.release(request.roll_back(num_blocks))

    def cache_full_blocks(self, request: Request) -> None:
        """Register the full blocks of committed tokens in the prefix cache, and mark those that the draft covers."""
        num_full_blocks = request.num_computed_tokens // self.block_size
        num_drafted_blocks = min(request.num_drafted_context // self.block_size, num_full_blocks)
        is_known = request.num_cached_blocks == num_full_blocks and request.num_draft_marked_blocks == num_drafted_blocks
        if is_known or not self.pool.enable_caching:
            return
        new = request.block_ids[request.num_cached_blocks : num_full_blocks]
        for block_id, block_hash in zip(new, self.prefixes.block_hashes(request, request.num_cached_blocks), strict=False):
            self.pool.register(block_id, block_hash)
        for block_id in request.block_ids[request.num_draft_marked_blocks : num_drafted_blocks]:
            self.pool.is_drafted[block_id] = 1
        request.mark_cached(num_full_blocks, num_drafted_blocks)

    def free(self, request: Request) -> None:
        """Release all blocks of a request that is finished, aborted or preempted by recompute, those in the swap space as well."""
        self.pool.release(request.release())
        self.swap_space.pool.release(request.leave_swap())

    def swap_out(self, request: Request) -> bool:
        """Move a request's KV to the swap space, and release its blocks; the counters stay.

        Full blocks that are cached there already are shared, not copied.

        Returns:
            Whether there was something to move, and room for it; if not, nothing changes.
        """
        space, num_blocks = self.swap_space.pool, self._num_blocks_of(request.num_computed_tokens)
        if not num_blocks or not space.num_blocks:
            return False
        request.commit(0)  # lowers the draft's coverage, which a failed step may have left too high
        sources = dict(enumerate(request.block_ids[:num_blocks]))
        found = self.prefixes.find_own(request, space)
        copy_out = partial(self.swap_space.copy_out, self.tensors)
        block_ids = take_blocks(space, found, request.block_hashes, sources, self.pool, space.allocate, copy_out)
        if block_ids is None:
            return False
        self.pool.release(request.swap_out(block_ids))
        return True

    def await_copies(self) -> None:
        """Let the passes from now on wait for the blocks that come from the swap space."""
        self._ops.await_copies()

    def forget_prefix(self, request: Request) -> None:
        """Forget the hashes of a request's blocks, in the swap space as well, so that no other request will find their KV."""
        for pool in (self.pool, self.swap_space.pool):
            pool.forget(request.block_hashes)

    def forget_cached(self) -> None:
        self.pool.forget_cached()
        self.swap_space.pool.forget_cached()

    def check(self, requests: Iterable[Request]) -> None:
        """Check the sizes of the tensors, and the invariants of both pools, given all unfinished requests.

        Raises:
            AssertionError: an invariant is broken; see `BlockPool.check`.
        """
        requests = tuple(requests)
        assert all((each.num_blocks, each.block_size) == (self.num_blocks, self.block_size) for each in self.tensors.values())
        self.pool.check([request.block_ids for request in requests])
        self.swap_space.pool.check([request.swapped_block_ids for request in requests])

    @contextmanager
    def lend_blocks(self, most: int) -> Iterator[Sequence[int]]:
        """Lend one to ``most`` blocks whose content in the target's cache may be overwritten within the context.

        They are blank; if no block is, block 0 is lent, and its content restored at the end.
        """
        if count := min(self.pool.num_blank, most):
            block_ids = self.pool.allocate(count)
            try:
                yield block_ids
            finally:
                self.pool.release(block_ids)
            return
        self.await_copies()  # a copy into the block may be under way
        groups = self.tensors["target"].groups
        kept = [group[:, 0].clone() for group in groups]
        try:
            yield [0]
        finally:
            for group, content in zip(groups, kept, strict=True):
                group[:, 0] = content

    def compact(self, requests: Sequence[Request], tensors: Mapping[Role, KVTensor] | None = None) -> int:
        """Move all blocks with content to the front of every attached cache, those of a request in a row.

        Attention over blocks in a row reads faster on a CPU than over scattered ones.

        Args:
            requests: all that have blocks.
            tensors: replace the attached caches, and may have another number of blocks, which becomes the pool's; the cached
                blocks that were used longest ago are dropped where they do not fit.

        Returns:
            How many blocks have a new place.

        Raises:
            ValueError: more blocks are in use than the tensors have; nothing changes.
            Exception: memory is not enough, which shows before the target's blocks move; what the draft covers is forgotten, and
                nothing else changes.
        """
        tensors = self.tensors if tensors is None else tensors
        num_blocks = tensors["target"].num_blocks
        self.await_copies()
        new_ids = self.pool.new_ids(num_blocks, [request.block_ids for request in requests])
        num_moved = sum(old != new for old, new in new_ids.items())
        if num_moved or tensors is not self.tensors:
            block_ids = np.fromiter(new_ids, np.int64, len(new_ids))
            try:
                for role, tensor in sorted(tensors.items()):
                    self._ops.gather_blocks(self.tensors[role], tensor, block_ids)
            except BaseException:
                self.forget_draft(requests)  # the draft's blocks come first: they may have moved, the target's have not
                raise
        self.tensors = dict(tensors)
        self.pool.resize(num_blocks, new_ids)
        for request in requests:
            request.renumber_blocks(new_ids)
        self._new_blocks = {new_ids[block_id] for block_id in self._new_blocks if block_id in new_ids}
        return num_moved

    def lose_content(self, requests: Iterable[Request]) -> None:
        """Make all blocks blank, in the swap space as well, and take theirs from all requests.

        Called after an interrupt, wherever it struck.
        """
        self.await_copies()  # copies may be under way, into blocks that others get now
        for request in requests:
            request.release()
            request.leave_swap()
        self.pool.reset(self.tensors["target"].num_blocks)
        self.swap_space.pool.reset(self.swap_space.pool.num_blocks)
        self._new_blocks.clear()

    def resize_swap_space(self, num_blocks: int, requests: Iterable[Request]) -> None:
        """Give the swap space another number of blocks; KV of these unfinished requests that is there will be computed again."""
        if num_blocks != self.swap_space.pool.num_blocks:
            for request in requests:
                if request.is_swapped:
                    self.free(request)
            self.swap_space.resize(num_blocks, self.tensors)

    def forget_draft(self, requests: Iterable[Request]) -> None:
        """Forget the draft's coverage of all blocks and of these unfinished requests, for another draft or none."""
        self.pool.forget_drafted()
        self.swap_space.pool.forget_drafted()
        for request in requests:
            request.forget_draft()

    def _num_blocks_of(self, num_slots: int) -> int:
        return -(-num_slots // self.block_size)

    def _allocate(self, count: int, after: int = -1) -> list[int]:
        """Allocate free blocks, right after the block ``after`` if possible; the swap space gets copies of what is evicted."""
        self.swap_space.keep_evicted(self.pool, count, self.tensors)
        return self.pool.allocate(count, after)

    def _swap_in(self, request: Request) -> None:
        """Move a request's KV back from the swap space; passes may use it after `await_copies`."""
        found, sources = self.prefixes.find_own(request, self.pool), dict(enumerate(request.swapped_block_ids))
        request.extend_blocks(self._take(found, request.block_hashes, sources))
        self.swap_space.pool.release(request.leave_swap())

    def _take(self, found: Mapping[int, int], block_hashes: Sequence[bytes], sources: Mapping[int, int]) -> list[int]:
        """Return a block table of blocks found in the pool and copies of the others from the swap space; see `take_blocks`."""
        block_ids = take_blocks(self.pool, found, block_hashes, sources, self.swap_space.pool, self._allocate, self._copy_in)
        assert block_ids is not None, "there is room for what is admitted"
        return block_ids

    def _copy_tail(self, request: Request) -> None:
        """Copy the last, partly filled block of the prompt from a sibling, if one has computed it.

        The sibling goes on writing to its block, which therefore cannot be shared.
        """
        num_tokens = request.num_common_tokens
        num_full_blocks, num_slots = divmod(num_tokens, self.block_size)
        sibling = request.leading_sibling
        is_wanted = num_slots and len(request.block_ids) == num_full_blocks and not request.prompt_logits(num_tokens)
        if not (is_wanted and sibling.num_computed_tokens >= num_tokens and self.pool.num_free):
            return
        source = sibling.block_ids[num_full_blocks]
        request.extend_blocks(self._allocate(1))
        try:
            for tensor in self.tensors.values():
                self._ops.copy_blocks(tensor, np.array([source]), np.array(request.block_ids[-1:]))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.pool.release(request.roll_back(num_full_blocks))
            return
        self._new_blocks.discard(request.block_ids[-1])
        if request.num_drafted_context == request.num_computed_tokens:
            request.cover_draft(max(min(sibling.num_drafted_context, num_tokens) - request.num_drafted_context, 0))
        request.commit(num_slots)

    def _copy_in(self, swapped_block_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        self.swap_space.copy_in(self.tensors, swapped_block_ids, block_ids)
        self._new_blocks.difference_update(block_ids)

"""The KV cache: block tables of requests and the KV tensors that they index.

One block table per request indexes every attached cache, the target's and the draft's, so that prefix hits, rollback,
preemption and frees are decided once. Prefix hits and rollback are arithmetic; only an accepted path that is not the first
nodes of its tree moves KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.execute.batch import pad_block_tables
from titan.kernels import backend
from titan.kernels.torch.cache import clear_blocks, move_kv
from titan.kernels.upload import upload
from titan.memory.block_pool import BlockPool, hash_block

Role = Literal["target", "draft"]

HASH_SALT = b"titan"


class Prefix(NamedTuple):
    """Full blocks that hold the beginning of a request's committed tokens, computed by others."""

    block_ids: list[int]
    block_hashes: list[bytes]  # as many, or none without prefix caching
    num_drafted_blocks: int  # the leading ones that the present draft covers


class PathMove(NamedTuple):
    """An accepted path whose KV goes to the first slots of its tree."""

    block_ids: list[int]  # of the request
    first_slot: int  # of the tree, in the request
    path: list[int]  # slots of the nodes, counted from there


class KVCache:
    """Gives requests blocks, keeps what was accepted, and finds what was computed before.

    Args:
        num_blocks: blocks of every attached cache.
        block_size: tokens per block.
        enable_prefix_caching: whether full blocks are hashed and found again; if not, nothing is hashed.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks, enable_prefix_caching)
        self.block_size = block_size
        self.draft_epoch = 0
        self._new_block_ids: list[int] = []  # not cleared yet
        self._tensors: dict[Role, Tensor] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks of every attached cache."""
        return self.pool.num_blocks

    @property
    def tensors(self) -> Mapping[Role, Tensor]:
        """The attached caches, ``[num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim]`` each."""
        return self._tensors

    def attach(self, role: Role, tensor: Tensor) -> None:
        """Let the block tables index ``tensor``, made by `allocate_kv`.

        Raises:
            ValueError: the tensor's blocks are not this cache's.
        """
        shape = tuple(tensor.shape)
        if len(shape) != 6 or (shape[1], shape[3], shape[4]) != (2, self.num_blocks, self.block_size):
            wanted = f"[num_layers, 2, num_kv_heads, {self.num_blocks}, {self.block_size}, head_dim]"
            raise ValueError(f"the {role}'s KV tensor has shape {list(shape)}: it must be {wanted}")
        self._tensors[role] = tensor

    def detach(self, role: Role) -> None:
        """Let go of a cache; nothing happens if there is none."""
        self._tensors.pop(role, None)

    def num_missing_blocks(self, request: Request, num_slots: int) -> int:
        """How many free blocks it would take to cover ``num_slots`` slots, after a prefix match if the request has no blocks.

        Cached blocks that nobody references count too, since a match takes them out of the free queue.
        """
        held = request.block_ids or [block for block in self._find_prefix(request).block_ids if not self.pool.is_free(block)]
        return max(self._num_blocks_of(num_slots) - len(held), 0)

    def match_prefix(self, request: Request) -> None:
        """Give a request without blocks the longest run of computed full blocks that begins its committed tokens.

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
        """Make the block table cover ``num_slots`` slots, committed tokens and lookahead slots together.

        New blocks hold anything until `clear_new_blocks`.

        Returns:
            Whether it does; if the pool has too few free blocks, nothing has changed.
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
        """Zero the blocks reserved since the last time, before a pass: attention multiplies zero weights with what is there."""
        if not self._new_block_ids:
            return
        block_ids = np.array(self._new_block_ids)
        self._new_block_ids.clear()
        for tensor in self._tensors.values():
            clear_blocks(tensor, block_ids)

    def commit(self, plan: StepPlan, acceptance: Acceptance) -> None:
        """Move the accepted paths to the slots right after their roots, in every attached cache.

        Called before the requests' counters advance. The target's KV of node ``i`` is in slot ``root slot + 1 + i``, the
        draft's in ``root slot + 1 + draft_slots[i]`` as far as it has it; that of the path's node ``k`` goes to ``root slot + 1
        + k``. A path of the first slots, as every path of a chain is, moves nothing. The draft's coverage grows by what it has.
        """
        moves: dict[Role, list[PathMove]] = {"target": [], "draft": []}
        rows = zip(plan.requests, plan.num_tokens, acceptance.trees, acceptance.paths, strict=True)
        for request, num_tokens, tree, path in rows:
            held: list[tuple[Role, list[int]]] = [("target", path)]
            if tree.draft_slots is not None:
                slot_of = tree.draft_slots.tolist()
                draft_slots = list(takewhile((0).__le__, [slot_of[node] for node in path]))
                held.append(("draft", draft_slots))
                request.cover_draft(len(draft_slots))
            first_slot = request.num_computed_tokens + num_tokens  # of the nodes
            for role, slots in held:
                if slots != list(range(len(slots))):
                    moves[role].append(PathMove(request.block_ids, first_slot, slots))
        for role, paths in moves.items():
            if paths and role in self._tensors:
                move = _move_by_kernel if backend.takes_triton(self._tensors[role].device) else _move_by_slots
                move(self._tensors[role], paths)

    def seal(self, request: Request) -> None:
        """Roll back to the committed tokens, and let others find them.

        Called after the request's counters have advanced: gives surplus blocks back, and makes full blocks known to the
        prefix cache, with the present draft's epoch where the draft covers them.
        """
        self.pool.release(request.roll_back(self._num_blocks_of(request.num_computed_tokens)))
        if not self.pool.enable_caching:
            return
        num_full_blocks = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        block_hashes = request.block_hashes[-1:] or [b""]
        for i in range(len(request.block_hashes), num_full_blocks):
            block_hashes.append(self._hash_block(request, i, block_hashes[-1]))
            self.pool.register(request.block_ids[i], block_hashes[-1])
        num_drafted_blocks = min(request.num_drafted_context // self.block_size, num_full_blocks)
        for block_id in request.block_ids[request.num_draft_marked_blocks : num_drafted_blocks]:
            self.pool.mark_drafted(block_id, self.draft_epoch)
        request.mark_cached(block_hashes[1:], num_drafted_blocks)

    def free(self, request: Request) -> None:
        """Take all blocks of a request away: it is finished, aborted or preempted by recompute."""
        self.pool.release(request.release())

    def new_draft_epoch(self, requests: Iterable[Request]) -> None:
        """The draft has changed: no block, and none of these unfinished requests, is covered by the new one."""
        self.draft_epoch += 1
        for request in requests:
            request.forget_draft()

    def _num_blocks_of(self, num_slots: int) -> int:
        return -(-num_slots // self.block_size)

    def _find_prefix(self, request: Request) -> Prefix:
        """The computed blocks that begin the tokens of a request without blocks, its root left out."""
        return self._cached_prefix(request) if self.pool.enable_caching else self._siblings_prefix(request)

    def _cached_prefix(self, request: Request) -> Prefix:
        prefix: dict[bytes, int] = {}
        block_hash = b""
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
        """Full blocks of the prompt, the root's left out."""
        return min(request.num_prompt_tokens, request.num_tokens - 1) // self.block_size

    def _hash_block(self, request: Request, i: int, parent: bytes) -> bytes:
        """Hash of the request's logical block ``i``, all of whose tokens are committed."""
        return hash_block(parent, request.token_ids[i * self.block_size : (i + 1) * self.block_size], HASH_SALT)


def allocate_kv(
    num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A cache of zeros, ``[num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim]``."""
    return torch.zeros(num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim, dtype=dtype, device=device)


def _move_by_slots(kv: Tensor, moves: Sequence[PathMove]) -> None:
    """Move paths by their physical slots."""
    block_size = kv.shape[4]
    slots: tuple[list[int], list[int]] = [], []
    for move in moves:
        for physical, nodes in zip(slots, (move.path, range(len(move.path))), strict=True):
            for slot in (move.first_slot + node for node in nodes):
                physical.append(move.block_ids[slot // block_size] * block_size + slot % block_size)
    sources, targets = np.array(slots)
    move_kv(kv, sources, targets)


def _move_by_kernel(kv: Tensor, moves: Sequence[PathMove]) -> None:
    """Move paths in one launch."""
    from titan.kernels.triton.kv_moves import move_paths  # not every platform has triton

    paths = np.zeros((len(moves), max(len(move.path) for move in moves)), np.int32)
    for row, move in zip(paths, moves, strict=True):
        row[: len(move.path)] = move.path
    block_table = pad_block_tables([move.block_ids for move in moves]).astype(np.int32)
    first_slots = np.array([move.first_slot for move in moves])
    num_accepted = np.array([len(move.path) for move in moves], np.int32)
    move_paths(kv, *upload([block_table, first_slots, paths, num_accepted], kv.device))


def num_blocks_for(memory_bytes: int, bytes_per_block: int) -> int:
    """How many blocks fit into the memory; ``bytes_per_block`` is of the target's and the draft's cache together.

    Raises:
        ValueError: not even one block fits.
    """
    if memory_bytes < bytes_per_block:
        raise ValueError(f"{memory_bytes} bytes of KV cache memory are too few: one block takes {bytes_per_block} bytes")
    return memory_bytes // bytes_per_block

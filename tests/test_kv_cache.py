"""The KV cache: after whatever happens to requests, their slots hold what a sequential fill would have put there.

Every token's KV is written as a number that depends on the cache, on the token and on all tokens before it, so that a
wrong slot, a wrong block or a stale draft shows. Free blocks that are not cached hold NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from itertools import takewhile
from random import Random
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stepping import host_trees
from torch import Tensor

from titan.core.kv_tensor import KVGroup, KVLayout, KVTensor
from titan.core.outputs import RequestMetrics
from titan.core.request import Request
from titan.core.sampling_params import SamplingParams
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import EMPTY_TREE, DraftTree
from titan.kernels.backend import choose_backend
from titan.kernels.interfaces import CacheOps, PathMove
from titan.memory.block_pool import hash_block
from titan.memory.kv_cache import HASH_SALT, KVCache, Role

NUM_BLOCKS, BLOCK_SIZE = 12, 4
CPU = torch.device("cpu")
LAYOUTS: dict[Role, KVLayout] = {
    "target": KVLayout((KVGroup(2, 1, 1), KVGroup(1, 2, 4)), torch.float64),
    "draft": KVLayout((KVGroup(1, 2, 3),), torch.float64),
}
SHARED_TOKENS = [0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 0, 1, 0, 1, 0]


def make_request(token_ids: Sequence[int]) -> Request:
    return Request("r", None, list(token_ids), SamplingParams(), 0, 1000, frozenset(), RequestMetrics(0.0), detokenizer=None)


def make_kv(num_blocks: int = NUM_BLOCKS, caching: bool = True, ops: CacheOps | None = None) -> KVCache:
    kv = KVCache(num_blocks, BLOCK_SIZE, caching, ops or choose_backend(CPU).cache)
    for role, layout in LAYOUTS.items():
        kv.attach(role, KVTensor(layout, num_blocks, BLOCK_SIZE, CPU))
    return kv


@cache
def value_of(model: str, prefix: tuple[int, ...]) -> float:
    """What the model's KV of the last token of ``prefix`` is."""
    return float(int.from_bytes(blake2b(f"{model} {prefix}".encode(), digest_size=5).digest()))


def values_of(model: str, prefixes: Sequence[Sequence[int]]) -> Tensor:
    """The same for several prefixes, for all layers, heads and dimensions: ``[n, 1]``."""
    return torch.tensor([value_of(model, tuple(prefix)) for prefix in prefixes], dtype=torch.float64)[:, None]


def physical(block_ids: Sequence[int], slots: Sequence[int]) -> Tensor:
    return torch.tensor([block_ids[slot // BLOCK_SIZE] * BLOCK_SIZE + slot % BLOCK_SIZE for slot in slots], dtype=torch.int64)


def node_path(tree: DraftTree, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = int(tree.parents[node])
    return path


def chained_hashes(token_ids: Sequence[int]) -> list[bytes]:
    hashes = [b""]
    for end in range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE):
        hashes.append(hash_block(hashes[-1], token_ids[end - BLOCK_SIZE : end], HASH_SALT))
    return hashes[1:]


def random_tree(random: Random) -> DraftTree:
    token_ids = random.choices((0, 1), k=random.randint(0, 6))
    slots = random.sample(range(len(token_ids) + NUM_SPARE_SLOTS), len(token_ids))
    draft_slots = np.array([slot if random.random() < 0.8 else -1 for slot in slots], np.int32)
    if random.random() < 0.3:
        return DraftTree.chain(token_ids, draft_slots=draft_slots)
    parents = [random.randint(-1, node - 1) for node in range(len(token_ids))]
    return DraftTree(np.array(token_ids, np.int64), np.array(parents, np.int32), draft_slots=draft_slots)


NUM_SPARE_SLOTS = 2  # a draft may feed more nodes than it proposes
SEEDS = st.integers(0, 2**32)  # the choices inside a rule come from one draw, which keeps examples long and fast


class KVMachine(RuleBasedStateMachine):
    """A small engine whose models write recognisable numbers."""

    @initialize(caching=st.booleans())
    def create(self, caching: bool) -> None:
        self.kv = make_kv(caching=caching)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.prefixes: dict[bytes, list[int]] = {}  # what every hash that may be registered stands for

    def model(self, role: Role) -> str:
        return "target" if role == "target" else f"draft {self.kv.draft_epoch}"

    @rule(num_shared=st.integers(0, 16), tail=st.lists(st.integers(0, 1), min_size=1, max_size=9), seed=SEEDS)
    def add(self, num_shared: int, tail: list[int], seed: int) -> None:
        self.waiting.append(make_request(SHARED_TOKENS[:num_shared] + tail))
        self.admit(seed)

    @rule(seed=SEEDS)
    def admit(self, seed: int) -> None:
        """Give a waiting request its cached prefix and some slots, if they are free."""
        if not self.waiting:
            return
        random = Random(seed)
        request = random.choice(self.waiting)
        num_slots = random.randint(1, request.num_tokens + 4)
        hits = self.cached_blocks(request)
        num_drafted = [*(self.kv.pool.draft_epochs[block] == self.kv.draft_epoch for block in hits), False].index(False)
        enough = self.kv.num_missing_blocks(request, num_slots) <= self.kv.pool.num_free
        self.kv.match_prefix(request)
        assert request.num_computed_tokens == request.metrics.num_cached_tokens == len(hits) * BLOCK_SIZE < request.num_tokens
        assert (request.block_ids, request.num_drafted_context) == (hits, num_drafted * BLOCK_SIZE)
        assert (self.kv.num_missing_blocks(request, num_slots) <= self.kv.pool.num_free) == enough
        assert self.kv.reserve(request, num_slots) == enough
        self.kv.clear_new_blocks()
        if enough:
            self.waiting.remove(request)
            self.running.append(request)
        else:
            self.kv.free(request)

    def cached_blocks(self, request: Request) -> list[int]:
        """The longest run of blocks that can be found of the request's tokens before its root."""
        blocks = map(self.kv.pool.lookup, chained_hashes(request.token_ids[:-1]))
        return [block for block in takewhile(lambda block: block is not None, blocks) if block is not None]

    @rule(seed=SEEDS, num_steps=st.integers(1, 6))
    def run(self, seed: int, num_steps: int) -> None:
        random = Random(seed)
        for _ in range(num_steps):
            self.step(random)
            self.holds()

    def step(self, random: Random) -> None:
        """Draft, verify, commit and cache a random subset of the running requests."""
        plan = StepPlan([], [], [], [])
        trees: list[DraftTree] = []
        paths: list[list[int]] = []
        token_ids: list[list[int]] = []
        is_drafted: list[bool] = []  # whether the draft was run
        for request in random.sample(self.running, random.randint(min(1, len(self.running)), len(self.running))):
            num_tokens = request.num_tokens - request.num_computed_tokens
            if random.random() < 0.5:
                num_tokens = random.randint(1, num_tokens)
            reaches_root = request.num_computed_tokens + num_tokens == request.num_tokens
            drafts = "draft" in self.kv.tensors and random.random() < 0.8
            tree = random_tree(random) if reaches_root and drafts else EMPTY_TREE
            num_slots = request.num_computed_tokens + num_tokens + tree.num_nodes + NUM_SPARE_SLOTS
            before = list(request.block_ids)
            missing = self.kv.num_missing_blocks(request, num_slots)
            if not self.kv.reserve(request, num_slots):
                assert missing > self.kv.pool.num_free and request.block_ids == before
                continue
            assert len(request.block_ids) == len(before) + missing
            plan.add(request, num_tokens, tree.num_nodes)
            trees.append(tree)
            is_drafted.append(drafts)
            paths.append(node_path(tree, random.randint(-1, tree.num_nodes - 1)))
            token_ids.append([*tree.token_ids[paths[-1]].tolist(), random.randint(0, 1)] if reaches_root else [])
        self.kv.clear_new_blocks()
        if not plan.requests:
            return
        for i, request in enumerate(plan.requests):
            self.run_models(request, plan.num_tokens[i], trees[i], is_drafted[i])
        before_commit = [request.num_drafted_context for request in plan.requests]
        self.kv.commit(plan, Acceptance(host_trees(trees), paths, token_ids, [None] * len(paths)))
        for i, request in enumerate(plan.requests):
            num_full_before = request.num_computed_tokens // BLOCK_SIZE
            held = [trees[i].draft_slots[node] >= 0 for node in paths[i]]  # type: ignore[index]
            assert request.num_drafted_context == before_commit[i] + [*held, False].index(False)
            request.token_ids += token_ids[i]
            request.commit(plan.num_tokens[i] + len(paths[i]))
            hashes = chained_hashes(request.token_ids[: request.num_computed_tokens])
            self.prefixes |= {each: request.token_ids[: (i + 1) * BLOCK_SIZE] for i, each in enumerate(hashes)}
            self.kv.cache_full_blocks(request)
            for block_hash in hashes[num_full_before:]:
                assert (self.kv.pool.lookup(block_hash) is not None) == self.kv.pool.enable_caching
            if self.kv.pool.enable_caching:
                drafted = request.block_ids[: request.num_drafted_context // BLOCK_SIZE]
                assert all(self.kv.pool.draft_epochs[block] == self.kv.draft_epoch for block in drafted)
            assert len(request.block_ids) == -(-request.num_computed_tokens // BLOCK_SIZE)

    def run_models(self, request: Request, num_tokens: int, tree: DraftTree, is_drafted: bool) -> None:
        end = request.num_computed_tokens + num_tokens
        node_slots: dict[Role, list[int]] = {"target": list(range(tree.num_nodes))}
        starts: dict[Role, int] = {"target": request.num_computed_tokens, "draft": request.num_drafted_context}
        if is_drafted:
            node_slots["draft"] = [] if tree.draft_slots is None else tree.draft_slots.tolist()
            request.cover_draft(end - request.num_drafted_context)
        for role, tensor in self.kv.tensors.items():
            if role in node_slots:
                prefixes = [request.token_ids[: slot + 1] for slot in range(starts[role], end)]
                written = [node for node, slot in enumerate(node_slots[role]) if slot >= 0]
                prefixes += [request.token_ids[:end] + tree.token_ids[node_path(tree, node)].tolist() for node in written]
                places = [*range(starts[role], end), *(end + node_slots[role][node] for node in written)]
                slots = physical(request.block_ids, places)
                for group in tensor.groups:
                    group.flatten(3, 4)[:, :, :, slots] = values_of(self.model(role), prefixes)

    @rule(seed=SEEDS, preempt=st.booleans())
    def free(self, seed: int, preempt: bool) -> None:
        if not self.running:
            return
        request = self.running.pop(Random(seed).randrange(len(self.running)))
        self.kv.free(request)
        assert (request.block_ids, request.num_computed_tokens, request.num_drafted_context) == ([], 0, 0)
        assert (request.block_hashes, request.num_draft_marked_blocks) == ([], 0)
        if preempt:
            self.waiting.append(request)

    @rule(present=st.booleans())
    def swap_draft(self, present: bool) -> None:
        self.kv.detach("draft")
        if present:
            self.kv.attach("draft", KVTensor(LAYOUTS["draft"], NUM_BLOCKS, BLOCK_SIZE, CPU))
        self.kv.new_draft_epoch(self.running)

    @invariant()
    def holds(self) -> None:
        pool = self.kv.pool
        pool.check([request.block_ids for request in self.running])
        for role, tensor in self.kv.tensors.items():
            for request in self.running:
                for group in tensor.groups:
                    assert group[:, :, :, request.block_ids].isfinite().all(), "a request sees what a free block held"
                length = request.num_computed_tokens if role == "target" else request.num_drafted_context
                self.check_slots(role, request.block_ids, request.token_ids, range(length))
            for block_id, block_hash in pool._hash_of.items():
                if role == "target" or pool.draft_epochs[block_id] == self.kv.draft_epoch:
                    prefix = self.prefixes[block_hash]
                    table = [block_id] * (len(prefix) // BLOCK_SIZE)
                    self.check_slots(role, table, prefix, range(len(prefix) - BLOCK_SIZE, len(prefix)))
            free = [block for block in range(NUM_BLOCKS) if pool.is_free(block) and block not in pool._hash_of]
            for group in tensor.groups:
                group[:, :, :, free] = torch.nan

    def check_slots(self, role: Role, block_ids: Sequence[int], token_ids: Sequence[int], slots: range) -> None:
        expected = values_of(self.model(role), [token_ids[: slot + 1] for slot in slots])
        for group in self.kv.tensors[role].groups:
            actual = group.flatten(3, 4)[:, :, :, physical(block_ids, slots)]
            assert (actual == expected).all(), f"{role}: wrong KV in {slots} of blocks {block_ids}"


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(deadline=None, derandomize=True)


def test_free_evicts_tails_first_and_a_preempted_request_finds_its_blocks_again() -> None:
    kv = make_kv(num_blocks=4)
    request = make_request(range(13))
    assert kv.reserve(request, 12)
    request.commit(12)
    kv.cache_full_blocks(request)
    kv.free(request)
    assert kv.reserve(make_request([99] * 8), 8)  # the unused block and the tail
    kv.match_prefix(request)
    assert (request.block_ids, request.num_computed_tokens) == ([0, 1], 8)


def test_commit_moves_the_paths_of_all_requests_at_once_and_those_of_the_first_nodes_not_at_all() -> None:
    ops = Mock(spec=CacheOps)
    kv = make_kv(ops=ops)
    requests = [make_request(range(3)), make_request(range(5))]
    for request in requests:
        assert kv.reserve(request, request.num_tokens + 5)
    plan = StepPlan(requests, [3, 5], [5, 5], [5, 5])
    tree = DraftTree(np.arange(5), np.array([-1, -1, 0, 1, 3], np.int32), draft_slots=np.array([1, 0, 3, 2, -1], np.int32))
    chain = DraftTree.chain(range(5), draft_slots=np.arange(5, dtype=np.int32))
    kv.commit(plan, Acceptance(host_trees([EMPTY_TREE, chain]), [[], [0, 1, 2]], [[9], [0, 1, 2, 9]], [None, None]))
    ops.move_paths.assert_not_called()
    kv.commit(plan, Acceptance(host_trees([tree, tree]), [[1, 3, 4], [0, 2]], [[1, 3, 4, 9], [0, 2, 9]], [None, None]))
    expected: dict[Role, list[PathMove]] = {
        "target": [PathMove([0, 1], 3, [1, 3, 4]), PathMove([2, 3, 4], 5, [0, 2])],
        "draft": [PathMove([0, 1], 3, [0, 2]), PathMove([2, 3, 4], 5, [1, 3])],
    }
    assert ops.move_paths.call_args_list == [call(kv.tensors[role], moves) for role, moves in expected.items()]


@pytest.mark.parametrize(("num_blocks", "block_size"), [(11, 4), (12, 8)])
def test_attach_refuses_a_tensor_of_another_pool(num_blocks: int, block_size: int) -> None:
    message = f"draft's KV tensor has {num_blocks} blocks of {block_size} slots: it must have 12 of 4"
    with pytest.raises(ValueError, match=message):
        make_kv().attach("draft", KVTensor(LAYOUTS["draft"], num_blocks, block_size, CPU))

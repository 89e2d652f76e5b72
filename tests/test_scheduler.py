"""The scheduler and the KV cache under random arrivals, aborts and draft swaps, with models that are functions of the tokens.

Every token's KV is written as a number that depends on the model, on the token and on all tokens before it, so that a wrong slot, a
wrong block or a stale draft shows. Free blocks that are not cached hold NaN.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from random import Random
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from back_ends import cpu_backend
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stepping import host_trees, make_request, slots_in_order
from torch import Tensor

from titan.core.kv_tensor import KVGroup, KVLayout, KVTensor, Role
from titan.core.metrics import EngineCounters
from titan.core.options import ScheduleOptions
from titan.core.outputs import RequestMetrics
from titan.core.request import Request, make_siblings
from titan.core.sampling_params import SamplingParams
from titan.core.step import Acceptance, StepPlan
from titan.core.terms import PRIORITIES, RequestTerms
from titan.core.trees import DraftTree
from titan.memory.block_pool import hash_block, hash_root
from titan.memory.kv_cache import KVCache
from titan.schedule.admission import max_num_blocks
from titan.schedule.policies.fcfs import FcfsPolicy
from titan.schedule.policies.priority import PriorityPolicy
from titan.schedule.scheduler import PrefillLimit, Scheduler

MAX_MODEL_LEN = 60
BLOCK_SIZE = 8
EOS = 0
CPU = torch.device("cpu")
LAYOUTS: dict[Role, KVLayout] = {
    "target": KVLayout((KVGroup(2, 1, 1), KVGroup(1, 2, 4)), torch.float64),
    "draft": KVLayout((KVGroup(1, 2, 3),), torch.float64),
}


def next_token(token_ids: list[int]) -> int:
    """The target: any function of all tokens will do. One token in 13 is the end."""
    return Random(str(token_ids)).randrange(13)


@cache
def value_of(model: str, prefix: tuple[int, ...]) -> float:
    """What the model's KV of the last token of ``prefix`` is."""
    return float(int.from_bytes(blake2b(f"{model} {prefix}".encode(), digest_size=5).digest()))


def chained_hashes(token_ids: Sequence[int], salt: str | None) -> list[bytes]:
    hashes = [hash_root(salt)]
    for end in range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE):
        hashes.append(hash_block(hashes[-1], token_ids[end - BLOCK_SIZE : end]))
    return hashes[1:]


class World:
    """A scheduler whose steps are carried out by `next_token`.

    Its drafter would like ``num_more_slots`` beyond its drafts, and takes ``max_draft_len`` tokens of a request; a share of the
    rows meets an error, at the root or after drafts.
    """

    def __init__(
        self,
        num_kv_blocks: int,
        *,
        enable_prefix_caching: bool = True,
        num_swap_blocks: int = 0,
        num_more_slots: int = 0,
        max_draft_len: int = MAX_MODEL_LEN,
        error_rate: float = 0.0,
        prefill_limit: PrefillLimit | None = None,
        **options: Any,
    ) -> None:
        self.options = ScheduleOptions(**options)
        self.num_more_slots, self.max_draft_len = num_more_slots, max_draft_len
        self.error_rate = error_rate
        self.kv = KVCache(num_kv_blocks, BLOCK_SIZE, enable_prefix_caching, cpu_backend().cache)
        self.kv.tensors = {role: KVTensor(layout, num_kv_blocks, BLOCK_SIZE, CPU) for role, layout in LAYOUTS.items()}
        self.kv.resize_swap_space(num_swap_blocks, ())
        self.counters = EngineCounters()
        self.now = 0.0
        self.scheduler = Scheduler(self.options, self.kv, self.counters, lambda: self.now, prefill_limit)
        self.is_fcfs = self.options.scheduling_policy == "fcfs"
        self.requests: list[Request] = []
        self.num_swaps = 0  # of drafts

    def add(self, prompt: list[int], max_tokens: int, terms: Mapping[str, Any] | None = None, **options: Any) -> Request:
        """Queue a request and its siblings, its limit lowered to what fits, as the engine does it."""
        room = min(MAX_MODEL_LEN, self.kv.num_blocks * BLOCK_SIZE) - len(prompt)
        params = SamplingParams(max_tokens=max_tokens, **options)
        family = tuple(
            make_request(
                prompt,
                params,
                request_id=str(len(self.requests) + index),
                max_tokens=min(max_tokens, room),
                stop_token_ids=frozenset(() if params.ignore_eos else {EOS}),
                metrics=RequestMetrics(self.now),
                index=index,
                terms=RequestTerms(**terms or {}),
            )
            for index in range(params.n)
        )
        if params.n > 1:
            make_siblings(*family)
        for request in family:
            self.scheduler.add(request)
            self.requests.append(request)
        return family[0]

    def lookahead(self, _: Sequence[Request], budgets: Sequence[int]) -> list[int]:
        return [budget and budget + self.num_more_slots for budget in budgets]

    def step(self, max_draft_tokens: int, random: Random) -> StepPlan:
        self.now += 1
        for request in self.scheduler.expire():
            assert request.finish_reason == "abort" and not request.block_ids
        assert all(request.is_finished for request in self.requests if request.expiry is not None and request.expiry <= self.now)
        running, num_preemptions = list(self.scheduler.running), self.counters.num_preemptions
        decoding = [request for request in running if request.num_uncomputed_tokens == 1]
        lacks_blocks = sum(self.kv.num_missing_blocks(each, each.num_tokens) for each in running) > self.kv.pool.num_free
        plan = self.scheduler.schedule(max_draft_tokens, self.lookahead, self.max_draft_len)
        self.check_plan(plan, max_draft_tokens, running, decoding)
        num_preempted = self.counters.num_preemptions - num_preemptions
        assert not num_preempted or self.options.reservation == "on_demand"
        if num_preempted > 0 and self.is_fcfs:
            assert self.scheduler.running == running[:-num_preempted], "the latest go, and none joins in their stead"
            assert lacks_blocks, "nobody gives way for drafts"
        if not plan.requests:
            return plan
        self.execute(plan, random)
        return plan

    def execute(self, plan: StepPlan, random: Random) -> None:
        self.kv.clear_new_blocks()
        rows = zip(plan.requests, plan.num_tokens, plan.draft_budgets, plan.num_slots, strict=True)
        trees = [self.run_models(*row, random) for row in rows]
        acceptance = Acceptance(host_trees(trees), [], [], [])
        for i, (request, tree) in enumerate(zip(plan.requests, trees, strict=True)):
            path, tokens = self.verify(request, tree) if plan.reaches_root(i) else ([], [])
            is_broken = bool(tokens) and random.random() < self.error_rate
            if is_broken:
                path = path[: random.randint(0, len(path))]
                tokens = tokens[: len(path)]
                path = path[:-1]  # the last token is the final one
            acceptance.paths.append(path)
            acceptance.token_ids.append(tokens)
            acceptance.errors.append("broken" if is_broken and not tokens else None)
        self.kv.commit(plan, acceptance)
        before = [request.num_computed_tokens for request in plan.requests]
        changed = self.scheduler.update(plan, acceptance)
        outcomes = zip(plan.requests, acceptance.token_ids, acceptance.errors, strict=True)
        of_plan = [request for request in changed if request in plan.requests]
        assert all(request.error == "RuntimeError: broken" for request in changed[len(of_plan) :]), "those without their prompt"
        assert of_plan == [request for request, tokens, error in outcomes if tokens or error]
        for request, num_computed_tokens in zip(plan.requests, before, strict=True):
            assert request.is_finished or request.num_computed_tokens > num_computed_tokens
            self.check_findable(request, num_computed_tokens // BLOCK_SIZE)

    def run_models(self, request: Request, num_tokens: int, budget: int, num_slots: int, random: Random) -> DraftTree:
        """Propose a chain or a tree, right now and then; the draft's cache keeps up with most requests, and has most nodes."""
        end = request.num_computed_tokens + num_tokens
        parents: list[int] = []
        paths: list[list[int]] = []
        for node in range(random.randint(0, budget)):
            parents.append(node - 1 if random.random() < 0.6 else random.randint(-1, node - 1))
            above = paths[parents[-1]] if parents[-1] >= 0 else []
            right = next_token(request.token_ids + above)
            paths.append([*above, right if random.random() < 0.7 else random.randrange(13)])
        self.write("target", request, request.num_computed_tokens, end, list(enumerate(paths)))
        random = Random(random.random())  # how much is drawn of it must not change the next request's drafts
        draft_slots = [-1] * len(paths)
        if "draft" in self.kv.tensors and random.random() < 0.8:
            places = range(len(paths)) if random.random() < 0.5 else random.sample(range(num_slots), len(paths))
            draft_slots = [place if random.random() < 0.8 else -1 for place in places]
            fed = [(slot, path) for slot, path in zip(draft_slots, paths, strict=True) if slot >= 0]
            self.write("draft", request, request.num_drafted_context, end, fed)
            request.cover_draft(end - request.num_drafted_context)
        token_ids = np.array([path[-1] for path in paths], np.int64)
        return DraftTree(token_ids, np.array(parents, np.int32), draft_slots=np.array(draft_slots, np.int32))

    def write(self, role: Role, request: Request, start: int, end: int, nodes: list[tuple[int, list[int]]]) -> None:
        """Fill slots with the KV of a request's tokens, and slots after them with that of nodes, given with their paths."""
        prefixes = [request.token_ids[: i + 1] for i in range(start, end)] + [request.token_ids[:end] + path for _, path in nodes]
        slots = np.array(self.physical(request.block_ids, [*range(start, end), *(end + slot for slot, _ in nodes)]), np.int64)
        for group in self.kv.tensors[role].groups:
            group.movedim(1, 3)[:, :, :, slots // BLOCK_SIZE, slots % BLOCK_SIZE] = self.values(role, prefixes)

    def physical(self, block_ids: Sequence[int], slots: Iterable[int]) -> list[int]:
        return [block_ids[slot // BLOCK_SIZE] * BLOCK_SIZE + slot % BLOCK_SIZE for slot in slots]

    def values(self, role: Role, prefixes: Iterable[Sequence[int]]) -> Tensor:
        """KV of the last token of each prefix, the same for all layers, heads and dimensions: ``[n, 1]``."""
        model = "target" if role == "target" else f"draft {self.num_swaps}"
        return torch.tensor([value_of(model, tuple(prefix)) for prefix in prefixes], dtype=torch.float64)[:, None]

    def swap_draft(self, *, has_kv: bool) -> None:
        """As the engine does it."""
        present, num_swap_blocks = self.scheduler.in_flight, self.kv.swap_space.pool.num_blocks
        self.kv.forget_draft(present)
        self.kv.resize_swap_space(0, present)
        tensors: dict[Role, KVTensor] = {"target": self.kv.tensors["target"]}
        if has_kv:
            tensors["draft"] = KVTensor(LAYOUTS["draft"], self.kv.num_blocks, BLOCK_SIZE, CPU)
        self.kv.tensors = tensors
        self.kv.resize_swap_space(num_swap_blocks, present)
        self.num_swaps += 1

    def resize(self, num_blocks: int) -> None:
        """As the engine does it; blocks behind those that are kept hold NaN."""
        allocate: Any = lambda size, **options: torch.full(size, torch.nan, **options)  # noqa: E731
        tensors = {role: KVTensor(each.layout, num_blocks, BLOCK_SIZE, CPU, allocate) for role, each in self.kv.tensors.items()}
        self.kv.compact((*self.scheduler.running, *self.scheduler.waiting), tensors)

    def verify(self, request: Request, tree: DraftTree) -> tuple[list[int], list[int]]:
        """The accepted nodes, and the emitted tokens: one more."""
        path: list[int] = []
        tokens: list[int] = []
        while len(tokens) == len(path):
            tokens.append(next_token(request.token_ids + tokens))
            is_child = tree.parents == (path[-1] if path else -1)
            path += np.flatnonzero(is_child & (tree.token_ids == tokens[-1]))[:1].tolist()
        return path, tokens

    def check_plan(self, plan: StepPlan, max_draft_tokens: int, ran: Sequence[Request], decoding: Sequence[Request]) -> None:
        options = self.options
        assert bool(plan.requests) == self.scheduler.has_unfinished, "there is always one that gets on"
        assert sum(plan.num_tokens) + sum(plan.draft_budgets) <= options.max_num_batched_tokens
        assert len(set(map(id, plan.requests))) == len(plan.requests) <= options.max_batch_size
        if self.scheduler.running and self.is_fcfs:
            assert self.scheduler.running[0] in plan.requests, "the first come is never passed over"
        decodes = [request in decoding for request in plan.requests if request in ran]
        assert decodes[: sum(decodes)] == [True] * sum(decodes), "decodes come first"
        for request in set(ran).intersection(self.scheduler.running):
            assert request in plan.requests or request.num_uncomputed_tokens > 1, "decodes are never passed over"
        prompt_tokens = [count for request, count in zip(plan.requests, plan.num_tokens, strict=True) if count > 1]
        assert sum(prompt_tokens) <= (options.max_prefill_tokens or options.max_num_batched_tokens)
        for i, request in enumerate(plan.requests):
            num_tokens, budget = plan.num_tokens[i], plan.draft_budgets[i]
            end = request.num_computed_tokens + num_tokens
            assert 1 <= num_tokens <= (options.prefill_chunk_size or options.max_num_batched_tokens) and end <= request.num_tokens
            assert 0 <= budget <= max_draft_tokens
            if budget:
                assert plan.reaches_root(i) and request.params.use_speculative
                assert request.params.max_draft_tokens is None or budget <= request.params.max_draft_tokens
                assert budget < request.num_remaining_tokens, "the final token needs no draft"
                assert request.num_tokens + budget <= self.max_draft_len
            assert plan.num_slots[i] in (budget, budget + self.num_more_slots if budget else 0)
            assert len(request.block_ids) * BLOCK_SIZE >= end + plan.num_slots[i], "a slot for every token, node and lookahead"
            for sibling in request.siblings:
                shared = set(request.block_ids) & set(sibling.block_ids) if sibling is not request else set()
                assert shared <= set(request.block_ids[: request.num_computed_tokens // BLOCK_SIZE]), "what is written is its own"
            assert request in self.scheduler.running

    def check(self) -> None:
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        self.kv.check((*running, *waiting))
        assert len(running) <= self.options.max_batch_size
        most = self.options.max_waiting_requests + self.options.max_batch_size
        assert len(waiting) <= most or not self.is_fcfs, "only preempted ones come on top"
        assert not any(request.is_finished for request in (*running, *waiting))
        if isinstance(policy := self.scheduler.policy, FcfsPolicy):
            order = [int(request.request_id) for request in (*running, *policy._waiting)]
            assert order == sorted(set(order)), "first come, first served: who came later neither runs nor waits ahead"
        for request in running:
            assert len(request.block_ids) == -(-request.num_computed_tokens // BLOCK_SIZE), "what was not accepted is given back"
        for request in waiting:
            assert len(request.block_ids) == 0
            assert len(request.swapped_block_ids) == -(-request.num_computed_tokens // BLOCK_SIZE), "both or neither"
            assert request.num_drafted_context <= request.num_computed_tokens
        for request in self.requests:
            assert set(request.holders) == {each for each in request.siblings if each.block_ids}
            metrics = request.metrics
            assert metrics.num_emitted_tokens == request.num_output_tokens
            extra = metrics.num_accepted_tokens + metrics.num_sequence_steps - metrics.num_emitted_tokens
            assert extra in ((0, 1) if request.finish_reason == "stop" else (0,)), "1: no final token followed"
        counters = self.counters
        assert counters.num_finished_requests == sum(request.is_finished for request in self.requests)
        for name in ("num_sequence_steps", "num_emitted_tokens", "num_preemptions"):
            assert getattr(counters, name) == sum(getattr(request.metrics, name) for request in self.requests)
        assert sum(counters.accepted_per_depth) == sum(request.metrics.num_accepted_tokens for request in self.requests)
        self.check_kv()

    def check_findable(self, request: Request, num_known: int) -> None:
        """Full blocks that have been computed since can be found, and are marked where the draft covers them."""
        pool = self.kv.pool
        for block_hash in chained_hashes(request.token_ids[: request.num_computed_tokens], request.terms.cache_salt)[num_known:]:
            failed = [each for each in self.requests if each.finish_reason == "error"]
            is_forgotten = any(block_hash in chained_hashes(each.token_ids, each.terms.cache_salt) for each in failed)
            assert is_forgotten or (pool.lookup(block_hash) is not None) == pool.enable_caching
        drafted = request.block_ids[: request.num_drafted_context // BLOCK_SIZE] if pool.enable_caching else []
        assert all(pool.is_drafted[block] for block in drafted)

    def check_kv(self) -> None:
        """What counts as computed, or can be found, is what a sequential fill would have put there."""
        pool = self.kv.pool
        prefixes = {}
        for request in self.requests:
            for i, block_hash in enumerate(chained_hashes(request.token_ids[:-1], request.terms.cache_salt)):  # never the root
                prefixes[block_hash] = request.token_ids[: (i + 1) * BLOCK_SIZE]
        for role, tensor in self.kv.tensors.items():
            host = self.kv.swap_space._blocks.get(role)
            for request in self.scheduler.waiting:
                length = request.num_computed_tokens if role == "target" else request.num_drafted_context
                self.check_slots(role, request.swapped_block_ids, request.token_ids, range(length), host)
            for request in self.scheduler.running:
                assert all(group[:, request.block_ids].isfinite().all() for group in tensor.groups), "a free block's is seen"
                length = request.num_computed_tokens if role == "target" else request.num_drafted_context
                self.check_slots(role, request.block_ids, request.token_ids, range(length))
            for each, blocks in ((pool, None), (self.kv.swap_space.pool, host)):
                for block_id, block_hash in each._hash_of.items():
                    if role == "target" or each.is_drafted[block_id]:
                        prefix = prefixes[block_hash]
                        table = [block_id] * (len(prefix) // BLOCK_SIZE)
                        self.check_slots(role, table, prefix, range(len(prefix) - BLOCK_SIZE, len(prefix)), blocks)
                free = [block for block in range(each.num_blocks) if not each.num_references(block) and block not in each._hash_of]
                for group in tensor.groups if blocks is None else (group.transpose(0, 1) for group in blocks):
                    group[:, free] = torch.nan

    def check_slots(
        self, role: Role, block_ids: Sequence[int], token_ids: Sequence[int], slots: range, host: Sequence[Tensor] | None = None
    ) -> None:
        """Hold what a table of the pool, or of the swap space, says to what a sequential fill would have put there."""
        expected = self.values(role, [token_ids[: slot + 1] for slot in slots])
        for group in self.kv.tensors[role].groups if host is None else (group.transpose(0, 1) for group in host):
            actual = slots_in_order(group)[:, :, :, self.physical(block_ids, slots)]
            assert (actual == expected).all(), f"{role}: wrong KV in {slots} of blocks {block_ids}"

    def drain(self, random: Random, max_draft_tokens: int = 4) -> None:
        steps = 0
        while self.scheduler.has_unfinished:
            self.step(max_draft_tokens, random)
            self.check()
            steps += 1
            assert steps < 5000
        assert self.kv.pool.num_free == self.kv.num_blocks
        assert self.kv.swap_space.pool.num_free == self.kv.swap_space.pool.num_blocks
        for request in self.requests:
            assert request.is_finished
            self.check_output(request)

    def check_output(self, request: Request) -> None:
        """Whatever happened in between, the tokens are those of the target alone."""
        tokens, is_end = list(request.prompt_token_ids), False
        while not is_end and len(tokens) < request.num_prompt_tokens + request.max_tokens:
            tokens.append(next_token(tokens))
            is_end = tokens[-1] == EOS and not request.params.ignore_eos
        if request.error is not None:
            assert re.match(
                r"(RuntimeError: )?broken|not wanted any more|timeout_s=\d+ is over", request.error or ""
            ) and request.num_tokens < len(tokens), "not after its end"
            assert request.token_ids == tokens[: request.num_tokens]
        else:
            assert (request.token_ids, request.finish_reason) == (tokens, "stop" if is_end else "length")


def test_scarce_blocks_preempt_the_latest_and_lookahead_preempts_nobody() -> None:
    """Without a prefix cache, which is the smaller the more blocks are written."""
    plans: dict[int, list[Any]] = {}
    for num_more_slots in (0, 5, 20):
        world = World(max_batch_size=4, num_kv_blocks=9, num_more_slots=num_more_slots, enable_prefix_caching=False)
        requests = [world.add([i + 1] * 10, 30, ignore_eos=True) for i in range(6)]
        random, num_looked_ahead = Random(0), 0
        plans[num_more_slots] = []
        while world.scheduler.has_unfinished:
            plan = world.step(4, random)
            plans[num_more_slots].append(([requests.index(each) for each in plan.requests], plan.num_tokens, plan.draft_budgets))
            num_looked_ahead += sum(plan.num_slots) - sum(plan.draft_budgets)
        assert world.counters.num_preemptions > 0 and requests[0].metrics.num_preemptions == 0
        assert (num_looked_ahead > 0) == (num_more_slots > 0)
    assert plans[0] == plans[5] == plans[20]


def test_one_sibling_goes_on_with_a_prompt_whose_leader_is_aborted() -> None:
    """The others wait for it as they waited for the first."""
    world = World(max_batch_size=3, num_kv_blocks=80, max_prefill_tokens=20, prefill_chunk_size=8)
    first = world.add([1] * 30, 9, ignore_eos=True, n=3)
    world.step(0, Random(0))
    world.scheduler.abort(first)
    assert [world.step(0, Random(0)).num_tokens for _ in range(5)] == [[8], [8], [6], [1, 1], [1, 1]]


def test_who_is_preempted_does_not_join_in_the_same_step() -> None:
    """Although it would find its prompt in the other's blocks."""
    world = World(max_batch_size=4, num_kv_blocks=5)
    first, second = (world.add([1] * 2 * BLOCK_SIZE, 5, ignore_eos=True) for _ in range(2))
    plans = [world.step(0, Random(0)).requests for _ in range(3)]
    assert plans == [[first, second], [first], [first, second]]


def test_drafts_after_the_end_do_not_count() -> None:
    """The draft does not know the end."""
    world = World(max_batch_size=1, num_kv_blocks=9)
    request = world.add([1], 20)
    plan = world.scheduler.schedule(2, lambda _, budgets: budgets)
    acceptance = Acceptance(host_trees([DraftTree.chain([EOS, 5])]), [[0, 1]], [[EOS, 5, 6]], [None])
    world.kv.commit(plan, acceptance)
    assert world.scheduler.update(plan, acceptance) == [request]
    assert (request.output_token_ids, request.finish_reason, request.error) == ([EOS], "stop", None)
    assert (request.metrics.proposed_per_depth, request.metrics.accepted_per_depth) == ([1, 1], [1])


@pytest.mark.parametrize(
    ("options", "prompts", "plans"),
    [
        ({"max_prefill_tokens": 8}, [20, 9], [[1, 8], [1, 4, 4], [1, 8], [1, 1, 5], [1, 1, 1]]),
        ({"max_prefill_tokens": 8}, [40, 9], [[1, 8], [1, 4, 4], [1, 4, 4], [1, 1, 8]]),
        (
            {"prefill_chunk_size": 4, "max_prefill_tokens": 8},
            [20, 9],
            [[1, 4, 4], [1, 4, 4], [1, 1, 4], [1, 1, 4], [1, 1, 4], [1, 1, 1]],
        ),
        ({"max_prefill_tokens": 8}, [20, 2], [[1, 8], [1, 6, 2], [1, 1, 6], [1, 1, 1]]),
        ({"max_prefill_tokens": 8, "max_batch_size": 5}, [20, 2, 2, 2], [[1, 8], [1, 4, 2, 2], [1, 1, 1, 8], [1, 1, 1, 1, 2]]),
        ({"max_prefill_tokens": 8, "num_kv_blocks": 5}, [20, 9], [[1, 8], [1, 8], [1, 4], [1, 1]]),
        ({"prefill_chunk_size": None}, [200, 9], [[1, 200, 9], [1, 1, 1]]),
        (
            {"max_num_batched_tokens": 12, "prefill_chunk_size": 7},
            [20, 20],
            [[1, 7, 4], [1, 6, 5], [1, 7, 4], [1, 1, 7], [1, 1, 1]],
        ),
        ({"max_prefill_tokens": 8, "max_batch_size": 2}, [20, 9], [[1, 8], [1, 8], [1, 4], [1, 1], [1, 1]]),
        (
            {"prefill_limit": lambda decodes, context, most: min(most, 3 * decodes)},
            [9, 5],
            [[1, 3], [1, 2, 1], [1, 2, 1], [1, 2, 1], [1, 1, 2], [1, 1, 1]],
        ),
    ],
)
def test_how_many_prompt_tokens_a_step_takes(options: dict[str, Any], prompts: list[int], plans: list[list[int]]) -> None:
    world = World(**{"max_batch_size": 4, "num_kv_blocks": 80, "enable_prefix_caching": False} | options)
    world.add([1], 40, ignore_eos=True)
    world.step(0, Random(0))
    for token, length in enumerate(prompts, start=2):
        world.add([token] * length, 30, ignore_eos=True)
    assert [world.step(0, Random(0)).num_tokens for _ in plans] == plans


def test_a_prompt_leaves_nothing_to_siblings_that_await_it() -> None:
    world = World(max_batch_size=3, num_kv_blocks=80, max_prefill_tokens=8)
    world.add([1] * 30, 9, ignore_eos=True, n=3)
    assert [world.step(0, Random(0)).num_tokens for _ in range(5)] == [[8], [8], [8], [6], [1, 1, 1]]


def test_what_is_computed_of_one_that_waits_is_looked_up_once_in_a_step() -> None:
    """Although a prompt that runs must know what those behind it want."""
    world = World(max_batch_size=3, num_kv_blocks=9, max_prefill_tokens=8)
    for token in (1, 2):
        world.add([token] * (5 * BLOCK_SIZE), 5, ignore_eos=True)
    world.step(0, Random(0))
    world.kv.prefixes.found_blocks = Mock(wraps=world.kv.prefixes.found_blocks)  # type: ignore[method-assign]
    plan = world.step(0, Random(0))
    assert (len(plan.requests), plan.shortage) == (1, "blocks") and world.kv.prefixes.found_blocks.call_count == 1


def test_siblings_that_need_no_tokens_do_not_hold_up_the_queue() -> None:
    """The short prompt behind them has its tokens as soon as it is the next one, beside the long one."""
    world = World(max_batch_size=5, num_kv_blocks=80, max_prefill_tokens=8)
    world.add([1] * 30, 9, ignore_eos=True, n=2)
    world.add([2] * 2, 9, ignore_eos=True)
    plans = [world.step(0, Random(0)) for _ in range(3)]
    assert [plan.num_tokens for plan in plans] == [[8], [6, 2], [1, 8]] and {plan.shortage for plan in plans} == {None, "tokens"}


def test_blocks_kept_for_one_that_starts_again_are_not_given_to_new_ones() -> None:
    world = World(10, max_batch_size=4)
    first, again = (world.add([token] * (3 * BLOCK_SIZE - 3), 30, ignore_eos=True) for token in (1, 2))
    world.step(0, Random(0))
    world.scheduler.queues.preempt(again)
    short, long = (world.add([token] * length, 30, ignore_eos=True) for token, length in ((3, 2), (4, 3 * BLOCK_SIZE - 3)))
    plan = world.step(0, Random(0))
    assert world.scheduler.running == [first, again, short] and plan.shortage == "blocks"
    assert [*world.scheduler.waiting] == [long] and world.kv.pool.num_free >= 2


def test_a_time_limit_of_prompts_is_not_halved_by_drafts() -> None:
    """The limit has counted them."""
    world = World(max_batch_size=4, num_kv_blocks=80, max_num_batched_tokens=20, prefill_limit=lambda *_: 6)
    for _ in range(3):
        world.add([1], 30, ignore_eos=True)
        world.step(0, Random(0))
    world.add([2] * 30, 9, ignore_eos=True)
    assert world.step(4, Random(0)).num_tokens == [1, 1, 1, 6]


@pytest.mark.parametrize(
    ("options", "prompts", "rows"),
    [
        ({}, [20], [([1, 1, 3], [3, 0, 0]), ([1, 1, 3], [3, 0, 0])]),
        ({}, [1], [([1, 1, 1], [4, 1, 0])]),
        ({"max_num_batched_tokens": 6, "max_batch_size": 3}, [1], [([1, 1, 1], [3, 0, 0])]),
        ({}, [1, 1], [([1, 1, 1, 1], [4, 0, 0, 0])]),
        ({}, [4, 4], [([1, 1, 3], [3, 0, 0]), ([1, 1, 1, 3], [2, 0, 0, 0])]),
        ({"max_batch_size": 2}, [20], [([1, 1], [4, 2])]),
        ({"num_kv_blocks": 4}, [20], [([1, 1], [4, 2])]),
    ],
)
def test_prompts_and_drafts_share_what_decodes_leave(
    options: dict[str, Any], prompts: list[int], rows: list[tuple[list[int], list[int]]]
) -> None:
    """Wherever a request runs or may join, and no more than it wants is kept from the drafts."""
    world = World(**{"max_batch_size": 8, "num_kv_blocks": 80, "max_num_batched_tokens": 8} | options)
    for token in (1, 2):
        world.add([token] * 2, 40, ignore_eos=True)
    world.step(0, Random(0))
    for token, length in enumerate(prompts, start=3):
        world.add([token] * length, 30, ignore_eos=True)
    plans = [world.step(4, Random(0)) for _ in rows]
    assert [(plan.num_tokens, plan.draft_budgets) for plan in plans] == rows


def test_drafts_of_a_prompt_that_ends_leave_tokens_to_those_behind() -> None:
    world = World(max_batch_size=2, num_kv_blocks=80, max_num_batched_tokens=8)
    for token, length in ((1, 2), (2, 5)):
        world.add([token] * length, 30, ignore_eos=True)
    plan = world.step(4, Random(0))
    assert (plan.num_tokens, plan.draft_budgets) == ([2, 5], [1, 0])


def test_drafts_take_free_blocks_only() -> None:
    """Nobody gives way for them, not even the one that would draft; prompts have their blocks first."""
    world = World(max_batch_size=2, num_kv_blocks=2)
    for token in (1, 2):
        world.add([token] * 2, 30 * token, ignore_eos=True)
    for _ in range(3):
        world.step(0, Random(0))
    plan = world.step(4, Random(0))
    assert (plan.num_tokens, plan.draft_budgets, world.counters.num_preemptions) == ([1, 1], [3, 3], 0)
    world = World(max_batch_size=2, num_kv_blocks=3, prefill_chunk_size=8)
    world.add([1] * 5, 19, ignore_eos=True)
    world.step(0, Random(0))
    world.add([2] * 15, 9, ignore_eos=True)
    world.step(0, Random(0))
    plan = world.step(4, Random(0))
    assert (plan.num_tokens, plan.draft_budgets, world.counters.num_preemptions) == ([1, 7], [1, 1], 0)


@pytest.mark.parametrize("options", [{"max_tokens": 6}, {"max_tokens": 14, "use_speculative": False}])
def test_no_blocks_are_kept_for_drafts_that_a_request_may_not_make(options: dict[str, Any]) -> None:
    """Each has a block for its tokens, and for its drafts, if it makes any; with as many as others make, it would need two."""
    world = World(max_batch_size=2, num_kv_blocks=2)
    for token in (1, 2):
        world.add([token] * 2, ignore_eos=True, **options)
    assert len(world.step(7, Random(0)).requests) == 2


def test_drafts_leave_a_token_to_a_sibling_that_awaits_its_prompt() -> None:
    world = World(max_batch_size=8, num_kv_blocks=80, max_num_batched_tokens=8)
    world.add([1] * 2, 40, ignore_eos=True)
    world.step(0, Random(0))
    world.add([2] * 12, 40, ignore_eos=True, n=2)
    assert [len(world.step(4, Random(0)).requests) for _ in range(5)] == [2, 2, 2, 3, 3]


@pytest.mark.parametrize(("reservation", "num_started"), [("on_demand", 3), ("max_tokens", 2)])
def test_whole_outputs_are_reserved_only_where_that_is_asked_for(reservation: str, num_started: int) -> None:
    world = World(max_batch_size=3, num_kv_blocks=8, reservation=reservation)
    for token in (1, 2, 3):
        world.add([token] * 9, 20, ignore_eos=True)
    assert len(world.step(2, Random(0)).requests) == num_started
    world.drain(Random(0))
    assert (world.counters.num_preemptions > 0) == (reservation == "on_demand")


def test_a_request_times_out_without_room_to_wait_in() -> None:
    world = World(max_batch_size=1, num_kv_blocks=40, max_waiting_requests=1)
    for _ in range(2):
        world.add([1], 4, ignore_eos=True)
        world.step(0, Random(0))
    with pytest.raises(ValueError, match="max_waiting_requests=1"):
        world.add([3], 4, {"timeout_s": 5})
    late = make_request(max_tokens=4, metrics=RequestMetrics(-5.0), terms=RequestTerms(timeout_s=5))
    with pytest.raises(ValueError, match="max_waiting_requests=1"):
        world.scheduler.add(late)
    world.scheduler.time_out(late)
    assert late.finish_reason == "abort" and "timeout_s=5 is over" in late.error and "waiting" in late.error  # type: ignore[operator]
    assert len(world.scheduler.waiting) == 1 and not world.scheduler.expire()


def test_an_interrupt_in_the_policy_loses_no_request() -> None:
    """A request is where it comes from until the policy knows that it has left, and already where it goes to."""
    told = list[str]()

    class Watching(FcfsPolicy):
        def add(self, request: Request) -> None:
            if request.metrics.num_preemptions:
                assert request in world.scheduler.waiting and request in world.scheduler.running
                told.append("preempted")
            super().add(request)

        def remove(self, request: Request) -> None:
            super().remove(request)
            assert request in world.scheduler.waiting and (request in world.scheduler.running) != request.is_finished
            told.append("aborted" if request.is_finished else "started")

        def end(self, request: Request) -> None:
            assert request in world.scheduler.in_flight
            told.append("ended")

    world = World(max_batch_size=4, num_kv_blocks=6, prefill_chunk_size=4, scheduling_policy=Watching())
    requests = [world.add([i] * 9, 12, ignore_eos=True) for i in range(5)]
    world.scheduler.abort(requests[-1], "not wanted any more")
    world.drain(Random(0))
    assert {*told} == {"preempted", "aborted", "started", "ended"} and not world.scheduler.has_unfinished


def test_a_request_that_would_soon_be_preempted_does_not_join() -> None:
    world = World(max_batch_size=4, num_kv_blocks=5, prefill_chunk_size=4)
    first = world.add([1] * 20, 10, ignore_eos=True)
    world.add([2] * 17, 4, ignore_eos=True)
    assert world.step(4, Random(0)).requests == [first], "the other's first chunk would fit, its prompt would not"
    world.drain(Random(0))
    assert world.counters.num_preemptions == 0


@pytest.mark.parametrize("caching", [True, False])
def test_what_is_swapped_goes_on_where_it_was(caching: bool) -> None:
    """With room in the swap space nothing is computed twice, whatever drafts; without, what has no room is."""
    num_computed = {}
    for num_swap_blocks in (0, 3, 40):
        world, random = World(9, enable_prefix_caching=caching, num_swap_blocks=num_swap_blocks, max_batch_size=4), Random(0)
        requests = [world.add([i + 1] * (10 + i), 30, ignore_eos=True) for i in range(6)]
        num_computed[num_swap_blocks] = 0
        while world.scheduler.has_unfinished:
            num_computed[num_swap_blocks] += sum(world.step(3, random).num_tokens)
            world.check()
        world.drain(random)
        counters = world.counters
        assert counters.num_swapped_out == counters.num_swapped_in <= counters.num_preemptions
        assert (counters.num_swapped_out > 0, counters.num_swapped_out == counters.num_preemptions) == (
            num_swap_blocks > 0, num_swap_blocks == 40,
        )  # fmt: skip
    num_accepted = sum(request.metrics.num_accepted_tokens for request in requests)
    assert num_computed[40] == sum(request.num_tokens - 1 for request in requests) - num_accepted < num_computed[0]


@pytest.mark.parametrize("drafts", [[0], [0, 6]])
def test_what_is_swapped_in_gets_on_before_it_is_swapped_out_again(drafts: list[int]) -> None:
    """Also where the number of drafts, and so the blocks that all need, goes up and down, as with adaptive speculation."""
    world, random = World(20, num_swap_blocks=400, max_batch_size=6, preemption_mode="swap", swap_space=1), Random(0)
    requests = [world.add([i + 1] * random.randint(1, 20), 40, ignore_eos=True) for i in range(24)]
    at_last_swap = dict[Request, int]()
    while world.scheduler.has_unfinished:
        before = [request.metrics.num_preemptions for request in requests]
        world.step(random.choice(drafts), random)
        for request, num_preemptions in zip(requests, before, strict=True):
            if request.is_swapped and request.metrics.num_preemptions > num_preemptions:
                assert at_last_swap.get(request, -1) < request.num_output_tokens
                at_last_swap[request] = request.num_output_tokens
    assert len(at_last_swap) > 12, "blocks are scarce"
    assert world.counters.num_swapped_out <= world.counters.num_emitted_tokens / 30
    world.drain(random)


@pytest.mark.parametrize("error", [RuntimeError("the copy failed"), MemoryError()])
@pytest.mark.parametrize("failing", ["copy_out", "copy_in", "copy_blocks"])
def test_a_copy_that_fails_loses_neither_blocks_nor_requests(
    failing: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory lacks, what was to be copied is computed again, and nobody is told."""
    world, random = World(10, num_swap_blocks=20, max_batch_size=6), Random(0)
    for i in range(20):
        world.add([i // 2 + 1] * (10 + 7 * (i % 6)), 30, ignore_eos=True, n=2)
    copy, fail, num_failures = getattr(cpu_backend().cache, failing), Mock(side_effect=error), 0
    while world.scheduler.has_unfinished:
        monkeypatch.setattr(cpu_backend().cache, failing, fail if random.random() < 0.5 else copy)
        try:
            plan = world.scheduler.schedule(3, lambda _, budgets: budgets)
        except RuntimeError:
            num_failures += 1
        else:
            world.execute(plan, random)
        world.kv.check((*world.scheduler.running, *world.scheduler.waiting))
    assert fail.call_count > 2
    assert num_failures == (fail.call_count if isinstance(error, RuntimeError) else 0)
    for request in world.requests:
        world.check_output(request)


@pytest.mark.parametrize("error", [RuntimeError("broken"), MemoryError()])
def test_a_copy_that_fails_for_a_sibling_of_requests_that_end_loses_nothing_of_theirs(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory lacks, the sibling computes its prompt itself; else it ends."""
    world, random = World(8, max_batch_size=4), Random(0)
    first, *others = world.add([1] * 10, 1, ignore_eos=True, n=3).family
    plan = world.scheduler.schedule(0, lambda _, budgets: budgets)
    with monkeypatch.context() as patch:
        patch.setattr(cpu_backend().cache, "copy_blocks", Mock(side_effect=error))
        world.execute(plan, random)
    assert first.finish_reason == "length" and first not in world.scheduler.running
    world.kv.check(world.scheduler.running)
    is_of_memory = isinstance(error, MemoryError)
    assert [each.error for each in others] == [None if is_of_memory else "RuntimeError: broken"] * 2
    world.drain(random)
    assert [each.num_output_tokens for each in others] == [1 if is_of_memory else 0] * 2


def test_a_completion_that_ends_costs_no_look_at_those_that_wait_or_have_their_prompt() -> None:
    world, random = World(8, max_batch_size=2), Random(0)
    first = world.add([1] * 10, 1, ignore_eos=True, n=30)
    with patch.object(world.scheduler.queues, "ensure_kv", wraps=world.scheduler.queues.ensure_kv) as ensure_kv:
        world.drain(random)
    assert all(each.is_finished for each in first.family) and ensure_kv.call_count < 3 * 30


SEEDS = st.integers(0, 2**32)  # the choices inside a rule come from one draw, which keeps examples fast
OPTIONS: list[dict[str, Any]] = [
    {"use_speculative": False},
    {"max_draft_tokens": 2},
    {"ignore_eos": True},
    {"n": 2},
    {"n": 4, "ignore_eos": True},
]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(seed=SEEDS)
    def create(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.max_draft_tokens = random.randint(0, 6)
        batch_size = random.randint(1, 5)
        self.world = World(
            num_kv_blocks=random.randint(3, 14),
            enable_prefix_caching=random.random() < 0.5,
            num_swap_blocks=random.choice([0, 2, 9, 30]),
            num_more_slots=random.choice([0, 0, 3, 20]),
            max_draft_len=random.choice([MAX_MODEL_LEN, random.randint(1, MAX_MODEL_LEN)]),
            error_rate=random.choice([0.0, 0.0, 0.1]),
            max_batch_size=batch_size,
            max_num_batched_tokens=batch_size + random.choice([0, 3, 10, 40]),
            prefill_chunk_size=random.choice([None, random.randint(1, 20)]),
            max_prefill_tokens=random.choice([None, None, random.randint(1, 20)]),
            prefill_limit=random.choice([None, lambda _decodes, _context, most: random.randint(1, most)]),
            scheduling_policy=random.choice(["fcfs", "fair", "priority", PriorityPolicy(ageing_s=random.randint(0, 20))]),
            reservation=random.choice(["on_demand", "on_demand", "max_tokens"]),
            max_waiting_requests=6,
        )

    @rule(seed=SEEDS)
    def add(self, seed: int) -> None:
        random = Random(seed)
        room = min(MAX_MODEL_LEN, self.world.kv.num_blocks * BLOCK_SIZE)
        prompt = ([5, 6, 7] * 20)[: random.randint(1, room - 1)]
        if random.random() < 0.6:
            prompt[random.randrange(len(prompt)) :] = [random.randrange(1, 13)]
        options = random.choice([{}, {}, *OPTIONS])
        num_waiting, most = len(self.world.scheduler.waiting), self.world.options.max_waiting_requests
        if num_waiting == most:
            with pytest.raises(ValueError, match=f"max_waiting_requests={most}"):
                self.world.add(prompt, 5)
        elif num_waiting + options.get("n", 1) <= most:
            terms = {
                "priority": random.choice(PRIORITIES),
                "deadline_s": random.choice([None, random.randint(1, 30)]),
                "timeout_s": random.choice([None, None, random.randint(1, 30)]),
                "user": random.choice([None, "a", "b"]),
                "cache_salt": random.choice([None, None, "salt"]),
            }
            self.world.add(prompt, random.randint(1, 30), terms, **options)

    @rule(steps=st.integers(1, 6))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step(self.max_draft_tokens, self.random)
            self.world.check()

    @rule(seed=SEEDS)
    def abort(self, seed: int) -> None:
        present = [*self.world.scheduler.running, *self.world.scheduler.waiting]
        if present:
            request = Random(seed).choice(present)
            self.world.scheduler.abort(request, "not wanted any more")
            assert (request.finish_reason, request.error, len(request.block_ids)) == ("abort", "not wanted any more", 0)

    @rule(drafts=st.integers(0, 6), has_kv=st.booleans())
    def swap_draft(self, drafts: int, has_kv: bool) -> None:
        self.max_draft_tokens = drafts
        self.world.swap_draft(has_kv=has_kv)

    @rule(num_blocks=st.integers(1, 16))
    def resize(self, num_blocks: int) -> None:
        scheduler, pool = self.world.scheduler, self.world.kv.pool
        tables = [list(request.block_ids) for request in scheduler.running]
        present = (*scheduler.running, *scheduler.waiting)
        if (num_live := pool.num_blocks - pool.num_free) > num_blocks:
            with pytest.raises(ValueError, match=f"num_blocks={num_blocks} is less than the {num_live} blocks in use"):
                self.world.resize(num_blocks)
            assert tables == [list(request.block_ids) for request in scheduler.running]
            return
        least = most = max((max_num_blocks(request, BLOCK_SIZE) for request in present), default=3)
        if self.world.options.reservation == "max_tokens":
            missing = [(len(request.block_ids), max_num_blocks(request, BLOCK_SIZE)) for request in scheduler.running]
            most = max(most, num_live + sum(number - held for held, number in missing))
            least = max(least, num_live + sum(number - held for held, number in missing if held))  # the others may share a prompt
        if num_blocks >= most:
            scheduler.check_num_blocks(num_blocks)
            self.world.resize(num_blocks)
        elif present and num_blocks < least:
            with pytest.raises(ValueError, match=f"num_blocks={num_blocks} is too few for re"):
                scheduler.check_num_blocks(num_blocks)

    @rule()
    def compact(self) -> None:
        pool = self.world.kv.pool
        num_kept, cached = pool.num_blocks - pool.num_blank, set(pool._block_of)
        self.world.kv.compact((*self.world.scheduler.running, *self.world.scheduler.waiting))
        assert not any(pool._blank[:num_kept]) and all(pool._blank[num_kept:]), "what is blank is behind the rest"
        assert pool._block_of.keys() == cached
        if (running := self.world.scheduler.running) and not any(request.siblings for request in running):
            assert running[0].block_ids.tolist() == list(range(len(running[0].block_ids))), "in a row"

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):  # else `create` failed
            self.world.drain(self.random, self.max_draft_tokens)
            assert not self.world.scheduler._expiries


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=20)

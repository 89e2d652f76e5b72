"""The scheduler under random arrivals and aborts, with a model that is a function of the tokens: no tensors, many steps."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stepping import host_trees

from titan.core.metrics import EngineCounters
from titan.core.options import ScheduleOptions
from titan.core.outputs import RequestMetrics
from titan.core.request import Request
from titan.core.sampling_params import SamplingParams
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import EMPTY_TREE, DraftTree
from titan.kernels.backend import choose_backend
from titan.memory.kv_cache import KVCache
from titan.schedule.scheduler import Scheduler

MAX_MODEL_LEN = 60
BLOCK_SIZE = 8
EOS = 0
CACHE_OPS = choose_backend(torch.device("cpu")).cache


def next_token(token_ids: list[int]) -> int:
    """The target: any function of all tokens will do. One token in 13 is the end."""
    return Random(str(token_ids)).randrange(13)


class World:
    """A scheduler whose steps are carried out by `next_token`; its drafter would like ``num_more_slots`` beyond its drafts."""

    def __init__(self, num_kv_blocks: int, *, enable_prefix_caching: bool = True, num_more_slots: int = 0, **options: Any) -> None:
        self.options = ScheduleOptions(**options)
        self.num_more_slots = num_more_slots
        self.kv = KVCache(num_kv_blocks, BLOCK_SIZE, enable_prefix_caching, CACHE_OPS)
        self.counters = EngineCounters()
        self.scheduler = Scheduler(self.options, self.kv, self.counters)
        self.requests: list[Request] = []

    def add(self, prompt: list[int], max_tokens: int, **options: Any) -> Request:
        """Queue a request and its siblings, its limit lowered to what fits, as the engine does it."""
        room = min(MAX_MODEL_LEN, self.kv.num_blocks * BLOCK_SIZE) - len(prompt)
        params = SamplingParams(max_tokens=max_tokens, **options)
        family = tuple(
            Request(
                str(len(self.requests) + index), None, prompt, params, 0, min(max_tokens, room),
                frozenset() if params.ignore_eos else frozenset({EOS}), RequestMetrics(0.0), None, index,
            )
            for index in range(params.n)
        )  # fmt: skip
        for request in family:
            if params.n > 1:
                request.siblings = family
            self.scheduler.add(request)
            self.requests.append(request)
        return family[0]

    def step(self, max_draft_tokens: int, random: Random) -> StepPlan:
        running, num_preemptions = list(self.scheduler.running), self.counters.num_preemptions
        plan = self.scheduler.schedule(max_draft_tokens, lambda _, budget: budget + self.num_more_slots)
        self.check_plan(plan, max_draft_tokens)
        if self.counters.num_preemptions > num_preemptions:
            assert running[: len(self.scheduler.running)] == self.scheduler.running, "the latest go, and none joins in their stead"
        if not plan.requests:
            return plan
        trees = [self.draft(request, budget, random) for request, budget in zip(plan.requests, plan.draft_budgets, strict=True)]
        acceptance = Acceptance(host_trees(trees), [], [], [None] * len(trees))
        for i, (request, tree) in enumerate(zip(plan.requests, trees, strict=True)):
            path, tokens = self.verify(request, tree) if plan.reaches_root(i) else ([], [])
            acceptance.paths.append(path)
            acceptance.token_ids.append(tokens)
            if random.random() < 0.7:  # the draft's cache keeps up with some
                request.cover_draft(request.num_computed_tokens + plan.num_tokens[i] - request.num_drafted_context)
        self.kv.commit(plan, acceptance)
        before = [request.num_computed_tokens for request in plan.requests]
        changed = self.scheduler.update(plan, acceptance)
        assert changed == [request for request, tokens in zip(plan.requests, acceptance.token_ids, strict=True) if tokens]
        for request, num_computed_tokens in zip(plan.requests, before, strict=True):
            assert request.is_finished or request.num_computed_tokens > num_computed_tokens
        return plan

    def draft(self, request: Request, budget: int, random: Random) -> DraftTree:
        """A chain or a tree, right now and then."""
        num_nodes = random.randint(0, budget)
        if num_nodes == 0:
            return EMPTY_TREE
        parents = [node - 1 if random.random() < 0.6 else random.randint(-1, node - 1) for node in range(num_nodes)]
        paths: list[list[int]] = []
        for parent in parents:
            above = paths[parent] if parent >= 0 else []
            right = next_token(request.token_ids + above)
            paths.append([*above, right if random.random() < 0.7 else random.randrange(13)])
        return DraftTree(np.array([path[-1] for path in paths]), np.array(parents, np.int32))

    def verify(self, request: Request, tree: DraftTree) -> tuple[list[int], list[int]]:
        """The accepted nodes, and the emitted tokens: one more."""
        path: list[int] = []
        tokens: list[int] = []
        while len(tokens) == len(path):
            tokens.append(next_token(request.token_ids + tokens))
            is_child = tree.parents == (path[-1] if path else -1)
            path += np.flatnonzero(is_child & (tree.token_ids == tokens[-1]))[:1].tolist()
        return path, tokens

    def check_plan(self, plan: StepPlan, max_draft_tokens: int) -> None:
        options = self.options
        assert bool(plan.requests) == self.scheduler.has_unfinished, "there is always one that gets on"
        assert sum(plan.num_tokens) + sum(plan.draft_budgets) <= options.max_num_batched_tokens
        assert len(set(map(id, plan.requests))) == len(plan.requests) <= options.max_batch_size
        if self.scheduler.running:
            assert plan.requests[0] is self.scheduler.running[0], "the first come is never passed over"
        for i, request in enumerate(plan.requests):
            num_tokens, budget = plan.num_tokens[i], plan.draft_budgets[i]
            end = request.num_computed_tokens + num_tokens
            assert 1 <= num_tokens <= options.prefill_chunk_size and end <= request.num_tokens
            assert 0 <= budget <= max_draft_tokens
            if budget:
                assert plan.reaches_root(i) and request.params.use_speculative
                assert request.params.max_draft_tokens is None or budget <= request.params.max_draft_tokens
                assert budget < request.num_remaining_tokens, "the final token needs no draft"
            assert plan.num_slots[i] in (budget, budget + self.num_more_slots if budget else 0)
            assert len(request.block_ids) * BLOCK_SIZE >= end + plan.num_slots[i], "a slot for every token, node and lookahead"
            for sibling in request.siblings:
                shared = set(request.block_ids) & set(sibling.block_ids) if sibling is not request else set()
                assert shared <= set(request.block_ids[: request.num_computed_tokens // BLOCK_SIZE]), "what is written is its own"
            assert request in self.scheduler.running

    def check(self) -> None:
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        self.kv.pool.check([request.block_ids for request in running])
        assert len(running) <= self.options.max_batch_size
        assert len(waiting) <= self.options.max_waiting_requests + self.options.max_batch_size, "only preempted ones come on top"
        assert not any(request.is_finished for request in (*running, *waiting))
        order = [int(request.request_id) for request in (*running, *waiting)]
        assert order == sorted(set(order)), "first come, first served: who came later neither runs nor waits ahead"
        for request in running:
            assert len(request.block_ids) == -(-request.num_computed_tokens // BLOCK_SIZE), "what was not accepted is given back"
        for request in waiting:
            assert (request.block_ids, request.num_computed_tokens, request.num_drafted_context) == ([], 0, 0)
        for request in self.requests:
            metrics = request.metrics
            assert metrics.num_emitted_tokens == request.num_output_tokens
            extra = metrics.num_accepted_tokens + metrics.num_sequence_steps - metrics.num_emitted_tokens
            assert extra in ((0, 1) if request.finish_reason == "stop" else (0,))
        counters = self.counters
        assert counters.num_finished_requests == sum(request.is_finished for request in self.requests)
        for name in ("num_sequence_steps", "num_emitted_tokens", "num_preemptions"):
            assert getattr(counters, name) == sum(getattr(request.metrics, name) for request in self.requests)
        assert sum(counters.accepted_per_depth) == sum(request.metrics.num_accepted_tokens for request in self.requests)

    def drain(self, random: Random, max_draft_tokens: int = 4) -> None:
        steps = 0
        while self.scheduler.has_unfinished:
            self.step(max_draft_tokens, random)
            self.check()
            steps += 1
            assert steps < 5000
        assert self.kv.pool.num_free == self.kv.num_blocks
        for request in self.requests:
            assert request.is_finished
            self.check_output(request)

    def check_output(self, request: Request) -> None:
        """Whatever happened in between, the tokens are those of the target alone."""
        tokens, is_end = list(request.prompt_token_ids), False
        while not is_end and len(tokens) < request.num_prompt_tokens + request.max_tokens:
            tokens.append(next_token(tokens))
            is_end = tokens[-1] == EOS and not request.params.ignore_eos
        if request.finish_reason == "abort":
            assert request.token_ids == tokens[: request.num_tokens]
        else:
            assert (request.token_ids, request.finish_reason) == (tokens, "stop" if is_end else "length")


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
            num_more_slots=random.choice([0, 0, 3, 20]),
            max_batch_size=batch_size,
            max_num_batched_tokens=batch_size + random.randint(0, 40),
            prefill_chunk_size=random.randint(1, 20),
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
            self.world.add(prompt, random.randint(1, 30), **options)

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
            assert (request.finish_reason, request.error, request.block_ids) == ("abort", "not wanted any more", [])

    @rule(drafts=st.integers(0, 6))
    def swap_draft(self, drafts: int) -> None:
        self.max_draft_tokens = drafts
        self.world.kv.new_draft_epoch(self.world.scheduler.running)

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.drain(self.random, self.max_draft_tokens)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(deadline=None, derandomize=True)


def test_lookahead_is_reserved_where_blocks_are_free_and_given_back() -> None:
    world = World(max_batch_size=2, num_kv_blocks=3, num_more_slots=6)
    requests = [world.add([i] * 5, 6, ignore_eos=True) for i in (1, 2)]
    plan = world.scheduler.schedule(2, lambda _, budget: budget + 6)
    assert (plan.draft_budgets, plan.num_slots) == ([2, 2], [8, 2]), "the third block is the first come's"
    assert [len(request.block_ids) for request in requests] == [2, 1]
    nothing = Acceptance(host_trees([EMPTY_TREE] * 2), [[], []], [[9], [9]], [None, None])
    world.kv.commit(plan, nothing)
    world.scheduler.update(plan, nothing)
    assert [len(request.block_ids) for request in requests] == [1, 1]
    without = world.scheduler.schedule(0, lambda _, budget: budget + 6)
    assert without.num_slots == [0, 0], "who drafts nothing looks ahead at nothing"


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


def test_prompts_are_computed_in_chunks_of_what_the_running_requests_leave() -> None:
    world = World(max_batch_size=4, num_kv_blocks=40, max_num_batched_tokens=12, prefill_chunk_size=7)
    world.add([1] * 3, 20, ignore_eos=True)
    world.step(0, Random(0))
    for token in (2, 3):
        world.add([token] * 20, 1, ignore_eos=True)
    plans = [world.step(0, Random(0)).num_tokens for _ in range(5)]
    assert plans == [[1, 7, 4], [1, 7, 4], [1, 6, 5], [1, 7], [1]]


def test_finished_requests_leave_and_waiting_ones_join_at_the_next_step() -> None:
    world = World(max_batch_size=2, num_kv_blocks=40)
    short, long, late = (world.add([i], length, ignore_eos=True) for i, length in ((1, 2), (2, 6), (3, 2)))
    plans = [world.step(0, Random(0)).requests for _ in range(6)]
    assert plans == [[short, long]] * 2 + [[long, late]] * 2 + [[long]] * 2


def test_a_request_that_would_soon_be_preempted_does_not_join() -> None:
    world = World(max_batch_size=4, num_kv_blocks=5, prefill_chunk_size=4)
    first = world.add([1] * 20, 10, ignore_eos=True)
    world.add([2] * 17, 4, ignore_eos=True)
    assert world.step(4, Random(0)).requests == [first], "the other's first chunk would fit, its prompt would not"
    world.drain(Random(0))
    assert world.counters.num_preemptions == 0

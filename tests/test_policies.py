"""Who starts next and who gives way, by policy: single choices, and the bounds that the policies state under random arrivals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
from bounds import AgeingWatch, FairnessWatch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepping import host_trees, make_engine, make_request
from zoo import Zoo

from titan.core.metrics import EngineCounters, UserMetrics
from titan.core.options import ScheduleOptions
from titan.core.outputs import RequestMetrics
from titan.core.request import Request
from titan.core.sampling_params import SamplingParams
from titan.core.step import Acceptance
from titan.core.terms import PRIORITIES, RequestTerms
from titan.core.trees import EMPTY_TREE
from titan.kernels.interfaces import CacheOps
from titan.memory.kv_cache import KVCache
from titan.schedule import service
from titan.schedule.heap import Heap
from titan.schedule.policies.fair import FairPolicy
from titan.schedule.policies.fcfs import FcfsPolicy
from titan.schedule.policies.priority import AGED_TURN, PriorityPolicy
from titan.schedule.scheduler import Scheduler

BLOCK_SIZE = 8


class Server:
    """A scheduler whose requests emit a token per step, on a clock of steps."""

    def __init__(self, policy: Any, *, num_kv_blocks: int = 1000, caching: bool = False, **options: Any) -> None:
        options = ScheduleOptions(scheduling_policy=policy, **{"max_batch_size": 1} | options)
        kv = KVCache(num_kv_blocks, BLOCK_SIZE, caching, ops=Mock(spec=CacheOps))
        self.now = 0.0
        self.scheduler = Scheduler(options, kv, EngineCounters(), lambda: self.now)
        self.requests: list[Request] = []
        self.starts: list[Request] = []  # in order, those after a preemption too

    def add(self, terms: Mapping[str, Any], prompt_len: int = 1, max_tokens: int = 1, token_id: int = 5) -> Request:
        request = make_request(
            [token_id] * prompt_len,
            SamplingParams(max_tokens=max_tokens),
            request_id=str(len(self.requests)),
            max_tokens=max_tokens,
            metrics=RequestMetrics(self.now),
            terms=RequestTerms(**terms),
        )
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self) -> None:
        before = {request: request.metrics.num_preemptions for request in self.scheduler.running}
        plan = self.scheduler.schedule(0, lambda _, budgets: budgets)
        running = self.scheduler.running
        assert all(request in running for request in plan.requests)
        self.starts += [each for each in running if before.get(each) != each.metrics.num_preemptions]
        tokens = [[7] if plan.reaches_root(i) else [] for i in range(len(plan.requests))]
        empty = [list[int]() for _ in tokens]
        self.scheduler.update(plan, Acceptance(host_trees([EMPTY_TREE] * len(tokens)), empty, tokens, [None] * len(tokens)))
        self.now += 1

    def drain(self) -> list[str]:
        """The requests in order of their starts."""
        while self.scheduler.has_unfinished:
            self.step()
        assert self.scheduler.kv.pool.num_free == self.scheduler.kv.num_blocks
        return [request.request_id for request in self.starts]

    def service(self, user: str) -> float:
        """Of a user, by what was computed: prompts that were started, and output, which weighs twice."""
        own = [request for request in self.requests if request.terms.user == user]
        return sum((each in self.starts) * each.num_prompt_tokens + 2 * each.num_output_tokens for each in own)


class Lifo(FcfsPolicy):
    name = "lifo"

    def first(self, now: float) -> Request:
        return next(reversed(self._waiting))


CRITICAL, NORMAL, BATCH = ({"priority": priority} for priority in PRIORITIES)
A, B = {"user": "a"}, {"user": "b"}


@pytest.mark.parametrize(
    ("policy", "requests", "expected"),  # requests: terms, tokens of the prompt, of the output
    [
        ("fcfs", [(BATCH, 9, 9), (CRITICAL, 1, 1), (NORMAL, 1, 1)], "012"),
        (Lifo(), [(BATCH, 9, 9), (CRITICAL, 1, 1), (NORMAL, 1, 1)], "210"),
        ("priority", [(BATCH, 1, 1), (NORMAL, 1, 1), (CRITICAL, 9, 9), (NORMAL, 1, 1)], "2130"),
        ("priority", [({"deadline_s": 9}, 1, 1), ({}, 1, 1), ({"deadline_s": 5}, 9, 9), ({"deadline_s": 7}, 1, 1)], "2301"),
        ("priority", [({}, 3, 3), ({}, 1, 4), ({}, 4, 2), ({}, 2, 1)], "3102"),
        ("priority", [({"priority": "batch", "deadline_s": 1}, 1, 1), (NORMAL, 9, 9)], "10"),
        (PriorityPolicy(ageing_s=0), [(BATCH, 1, 1), *[(CRITICAL, 1, 1)] * 4], "12304"),
        (PriorityPolicy(ageing_s=4), [(BATCH, 1, 1), *[(CRITICAL, 1, 1)] * 8], "123456708"),
        ("fair", [(A, 1, 2), (A, 1, 2), (A, 1, 2), (B, 1, 2), (B, 1, 2)], "03142"),
        ("fair", [(A, 1, 9), (A, 1, 1), (B, 1, 1), (B, 1, 1), (B, 1, 9), (B, 1, 1)], "023415"),
        ("fair", [(A, 1, 1), (A, 1, 1), ({}, 1, 1), ({}, 1, 1)], "0213"),
        (FairPolicy({"b": 3}), [(A, 1, 1)] * 3 + [(B, 1, 1)] * 5, "03451672"),
        (FairPolicy(prompt_weight=0), [(A, 90, 1), (A, 1, 1), (B, 1, 1), (B, 1, 1)], "0213"),
        (FairPolicy(), [(A, 90, 1), (A, 1, 1), (B, 1, 1), (B, 1, 1)], "0231"),
    ],
)
def test_the_order_of_starts(policy: Any, requests: Sequence[tuple[dict[str, Any], int, int]], expected: str) -> None:
    server = Server(policy)
    for request in requests:
        server.add(*request)
    assert "".join(server.drain()) == expected


def test_a_user_who_did_not_ask_has_saved_up_nothing() -> None:
    server = Server("fair")
    for _ in range(20):
        server.add(A)
    for _ in range(10):
        server.step()
    for _ in range(5):
        server.add(B)
    server.drain()
    assert "".join(request.terms.user or "" for request in server.starts[10:]) in ("ba" * 5 + "a" * 5, "ab" * 5 + "a" * 5)


def test_users_without_requests_are_forgotten_once_they_would_start_at_the_least_service_anyway() -> None:
    server = Server("fair", max_batch_size=4)
    for i in range(500):
        server.add({"user": str(i)}, 1, 1 + i % 3)
        server.step()
    assert len(server.scheduler.policy._service) < 20


@pytest.mark.parametrize(
    ("waiting", "running", "options", "displaced"),
    [
        (CRITICAL, [BATCH, NORMAL], {}, "0"),
        (CRITICAL, [BATCH, BATCH], {}, "1"),  # who has more work left
        (CRITICAL, [BATCH, BATCH], {"reservation": "max_tokens"}, ""),
        (CRITICAL, [NORMAL, CRITICAL], {}, ""),
        (NORMAL, [BATCH, BATCH], {}, ""),
        (CRITICAL, [BATCH, BATCH], {"scheduling_policy": PriorityPolicy(ageing_s=1)}, ""),
        (CRITICAL, [BATCH, BATCH], {"scheduling_policy": "fcfs"}, ""),
        (CRITICAL, [BATCH, BATCH], {"scheduling_policy": "fair"}, ""),
        (CRITICAL, [BATCH, BATCH], {"max_batch_size": 5, "num_kv_blocks": 13}, ""),  # there is room
        (CRITICAL, [BATCH, BATCH], {"max_batch_size": 5, "num_kv_blocks": 7}, "1"),
        (CRITICAL, [BATCH, NORMAL], {"max_batch_size": 5, "num_kv_blocks": 5}, ""),  # it would not fit even then
    ],
)
def test_critical_requests_take_the_place_of_batch_ones(
    waiting: dict[str, Any], running: list[dict[str, Any]], options: dict[str, Any], displaced: str
) -> None:
    policy = options.get("scheduling_policy", "priority")
    server = Server(policy, **{"max_batch_size": 2} | {key: value for key, value in options.items() if key != "scheduling_policy"})
    present = [server.add(terms, 9, 10 + 10 * i) for i, terms in enumerate(running)]
    server.step()
    server.add(waiting, 30, 5)
    for _ in range(2):
        server.step()
    assert "".join(each.request_id for each in present if each.metrics.num_preemptions) == displaced
    server.drain()
    assert [request.num_output_tokens for request in server.requests] == [10, 20, 5]


@pytest.mark.parametrize(("prompt_len", "num_displaced"), [(38, 0), (30, 1)])
def test_blocks_that_others_share_make_no_room(prompt_len: int, num_displaced: int) -> None:
    """Of the five blocks of a batch request, one is its own."""
    server = Server("priority", max_batch_size=3, num_kv_blocks=10, caching=True)
    server.add(NORMAL, 40, 6)
    server.step()
    batch = server.add(BATCH, 40, 5)
    server.step()
    assert len(batch.block_ids) == 5 and server.scheduler.kv.pool.num_free == 3
    critical = server.add(CRITICAL, prompt_len, token_id=6)
    server.step()
    assert batch.metrics.num_preemptions == critical.num_output_tokens == num_displaced
    server.drain()
    assert [request.num_output_tokens for request in server.requests] == [6, 5, 1]


@pytest.mark.parametrize(
    ("token_id", "prompt_len", "num_displaced"),
    [(6, 32, 1), (6, 40, 2), (6, 80, 2), (6, 81, 0), (5, 72, 1), (5, 80, 2), (5, 81, 0)],
)
def test_blocks_that_victims_share_make_room_once_all_of_them_give_way(token_id: int, prompt_len: int, num_displaced: int) -> None:
    """A normal request holds one of the eleven blocks, so that ten are the most; of the prompt of token 5, five are computed."""
    server = Server("priority", max_batch_size=4, num_kv_blocks=11, caching=True)
    server.add(NORMAL, 1, 5)
    batch = []
    for _ in range(2):
        batch.append(server.add(BATCH, 40, 9))
        server.step()
    assert [len(each.block_ids) for each in batch] == [6, 5] and server.scheduler.kv.pool.num_free == 3
    critical = server.add(CRITICAL, prompt_len, token_id=token_id)
    server.step()
    assert sum(each.metrics.num_preemptions for each in batch) == num_displaced
    assert critical.num_output_tokens == (num_displaced > 0)
    server.drain()


def test_one_that_nobody_can_make_room_for_costs_a_step_one_look_at_each_block() -> None:
    server = Server("priority", max_batch_size=50, num_kv_blocks=251)
    server.add(NORMAL, 1, 9)
    for i in range(40):
        server.add(BATCH, 40, 9, token_id=i)
    for _ in range(3):
        server.step()
    critical, pool = server.add(CRITICAL, 2007), server.scheduler.kv.pool
    pool.num_references = Mock(wraps=pool.num_references)  # type: ignore[method-assign]
    server.step()
    assert critical in server.scheduler.waiting and server.scheduler.counters.num_preemptions == 0
    assert 0 < pool.num_references.call_count <= pool.num_blocks


def test_a_batch_request_gives_way_once() -> None:
    server = Server("priority")
    batch = server.add(BATCH, 1, 30)
    for num_steps in (1, 2, 0):
        for _ in range(num_steps):
            server.step()
        server.add(CRITICAL)
    assert server.drain() == ["0", "1", "0", "2", "3"] and batch.metrics.num_preemptions == 1


def test_batch_requests_give_way_to_an_aged_one_before_a_critical_one() -> None:
    """Else the critical one would wait as long as the aged one, at every fourth start, although others could make room for both."""
    server = Server(PriorityPolicy(ageing_s=10), max_batch_size=2)
    aged = server.add(BATCH, 1, 30)
    for _ in range(5):
        server.add(NORMAL, 1, 4)
    for _ in range(8):
        server.step()
    batch = [server.add(BATCH | {"deadline_s": 1}, 1, 30) for _ in range(2)]
    while not set(batch) <= set(server.starts):
        server.step()
    assert aged not in server.starts and len(server.starts) % AGED_TURN == AGED_TURN - 1
    server.step()
    assert not any(each.metrics.num_preemptions for each in batch), "it gets the next place that is free"
    critical = server.add(CRITICAL)
    for _ in range(2):
        server.step()
    assert [each.metrics.num_preemptions for each in batch] == [1, 1] and critical.is_finished
    assert server.starts[-2:] == [aged, critical]
    server.drain()


@pytest.mark.parametrize(
    ("policy", "requests", "victim"),
    [
        ("fcfs", [BATCH, NORMAL, CRITICAL], 2),
        ("priority", [NORMAL, BATCH, CRITICAL], 1),
        ("priority", [NORMAL | {"deadline_s": 5}, NORMAL | {"deadline_s": 9}, CRITICAL], 1),
        (PriorityPolicy(ageing_s=1), [CRITICAL, CRITICAL, BATCH], 2),  # all aged
        ("fair", [A, A, B], 1),
    ],
)
def test_who_is_preempted_for_lack_of_blocks(policy: Any, requests: list[dict[str, Any]], victim: int) -> None:
    server = Server(policy, max_batch_size=3, num_kv_blocks=4)
    present = [server.add(terms, 3, 20) for terms in requests]
    while not any(request.metrics.num_preemptions for request in present):
        server.step()
    assert [request.metrics.num_preemptions for request in present] == [int(i == victim) for i in range(3)]
    server.drain()
    assert all(request.num_output_tokens == 20 for request in present)


def test_who_is_preempted_after_it_was_planned_is_not_in_the_step() -> None:
    server = Server("priority", max_batch_size=2, num_kv_blocks=2)
    batch = server.add(BATCH, 3, 4)
    server.step()
    critical = server.add(CRITICAL, 8, 2)
    server.step()
    server.step()
    assert (batch.num_output_tokens, critical.num_output_tokens, batch.metrics.num_preemptions) == (2, 2, 1)
    server.drain()


def test_a_policy_that_chooses_what_there_is_not_is_named() -> None:
    server = Server(Lifo(), max_batch_size=2, num_kv_blocks=3)
    stranger = server.add({}, 7, 3)
    server.drain()
    for _ in range(2):
        server.add({}, 7, 9)
    server.scheduler.policy.first = lambda _now: stranger  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"policy 'lifo' starts Request\(.*which does not wait"):
        server.step()
    del server.scheduler.policy.first
    server.scheduler.policy.victim = lambda _running, _now: stranger  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"policy 'lifo' preempts Request\(.*which does not run"):
        server.drain()
    server = Server(Lifo(), max_batch_size=1)
    server.scheduler.policy.displaceable = lambda *_: [None]  # type: ignore[method-assign,list-item,return-value]
    for _ in range(2):
        server.add({}, 3, 4)
    with pytest.raises(RuntimeError, match="policy 'lifo' preempts None, which does not run"):
        server.drain()
    server = Server(Lifo(), max_batch_size=2, max_num_batched_tokens=8)
    server.scheduler.policy.prefill_order = lambda prefills, _: prefills[:1]  # type: ignore[method-assign,assignment,misc]
    for _ in range(2):
        server.add({}, 30)
    with pytest.raises(RuntimeError, match=r"policy 'lifo' orders prompts as \[Request.* allowed are \[Request.* each once"):
        server.drain()


@pytest.mark.parametrize(("policy", "least", "most"), [("priority", 1, 2), ("fcfs", 9, 999)])
def test_whose_prompt_is_computed_first(policy: str, least: int, most: int) -> None:
    """A critical one waits for no more than the step that it starts in, however many others were begun before."""
    server = Server(policy, max_batch_size=17, max_num_batched_tokens=64)
    for _ in range(16):
        server.add(BATCH, 2000)
    for _ in range(4):
        server.step()
    urgent, num_steps = server.add(CRITICAL, 20), 0
    while not urgent.is_finished:
        server.step()
        num_steps += 1
    assert least <= num_steps <= most


class Faulty(FcfsPolicy):
    """Fails in one of its methods, at every call or at the requests of one user."""

    name = "faulty"

    def __init__(self, method: str) -> None:
        super().__init__()
        self.called = getattr(self, method)
        setattr(self, method, self.fail)

    def fail(self, *args: Any) -> Any:
        if not isinstance(args[0], Request) or args[0].terms.user == "unlucky":
            raise KeyError("mine")
        return self.called(*args)


@pytest.mark.parametrize("method", ["serve", "first", "prefill_order", "victim", "displaceable", "remove"])
def test_a_policy_that_fails_in_a_step_is_named(method: str) -> None:
    has_prompts = method == "prefill_order"  # two that take several steps
    server = Server(Faulty(method), max_batch_size=2, num_kv_blocks=9 if has_prompts else 3, max_num_batched_tokens=8)
    for _ in range(3):
        server.add({"user": "unlucky"}, 30 if has_prompts else 7, 9)
    with pytest.raises(RuntimeError, match="the scheduling policy 'faulty' failed: KeyError: 'mine'"):
        server.drain()
    server.scheduler.end_all("a step failed")
    assert not server.scheduler.in_flight and all(each.error == "a step failed" for each in server.requests)


def test_a_policy_that_fails_at_a_new_request_costs_that_one_alone() -> None:
    server = Server(Faulty("add"))
    others = [server.add({}, 3, 4)]
    failed = server.add({"user": "unlucky", "timeout_s": 1.0}, 3, 4)
    others.append(server.add({}, 3, 4))
    assert failed.finish_reason == "error" and failed.error == "the scheduling policy 'faulty' failed: KeyError: 'mine'"
    server.drain()
    assert [each.num_output_tokens for each in others] == [4, 4] and not failed.num_output_tokens


@pytest.mark.parametrize("method", ["remove", "end"])
def test_a_policy_that_fails_at_a_request_that_has_ended_costs_nothing(method: str) -> None:
    server = Server(Faulty(method))
    other, aborted = server.add({}, 3, 4), server.add({"user": "unlucky"}, 3, 4)
    server.step()
    with pytest.warns(RuntimeWarning, match="the scheduling policy 'faulty' failed: KeyError: 'mine', which ends no request"):
        server.scheduler.abort(aborted, "not wanted any more")
    assert server.scheduler.in_flight == (other,) and aborted.error == "not wanted any more"
    if method == "end":
        server.drain()
        assert other.num_output_tokens == 4


MAX_PROMPT_LEN, MAX_TOKENS, BATCH_SIZE = 12, 5, 3
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 1.0}
BOUND = 2 * (MAX_PROMPT_LEN + 2 * BATCH_SIZE * MAX_TOKENS)  # the least weight is 1


def largest_gap(policy: Any, random: Random, num_arrivals: int) -> float:
    """Of service over weights, between two users while both have waiting requests."""
    server, watch = Server(policy, max_batch_size=BATCH_SIZE), FairnessWatch(WEIGHTS)
    rates = random.choices([0.02, 0.2, 1], k=3)
    while len(server.requests) < num_arrivals or server.scheduler.has_unfinished:
        if len(server.requests) < num_arrivals and random.random() < 0.4:
            [user] = random.choices("abc", rates)
            for _ in range(random.choice([1, 1, 20])):
                server.add({"user": user}, random.randint(1, MAX_PROMPT_LEN), random.randint(1, MAX_TOKENS))
        before = {user: server.service(user) for user in WEIGHTS}
        server.step()
        watch.note(before, {user: server.service(user) for user in WEIGHTS}, server.scheduler.waiting)
    return watch.largest_gap


@settings(max_examples=9)
@given(st.integers(0, 2**32))
def test_no_backlogged_user_falls_behind_another_by_more_than_the_bound(seed: int) -> None:
    assert largest_gap(FairPolicy(WEIGHTS), Random(seed), 60) <= BOUND


def test_first_come_first_served_breaks_the_bound_of_fairness() -> None:
    assert max(largest_gap("fcfs", Random(seed), 60) for seed in range(5)) > BOUND
    assert max(largest_gap(FairPolicy(), Random(seed), 60) for seed in range(5)) > BOUND, "with the wrong weights"


AGEING_S = 10.0


def worst_excess(policy: Any, random: Random) -> int:
    """By how many starts an aged request waited longer than it should, at most."""
    server, watch = Server(policy, max_batch_size=2), AgeingWatch(AGEING_S)
    while server.now < 150 or server.scheduler.has_unfinished:
        if server.now < 150:
            for _ in range(random.choice([0, 1, 1, 2])):  # at most twice as many as there is room for
                [priority] = random.choices(PRIORITIES, [6, 2, 1])
                server.add({"priority": priority}, 1, random.randint(1, 3))
        watch.note([*server.scheduler.waiting], server.scheduler.running, len(server.starts), server.now)
        server.step()
    return watch.worst_excess


@settings(max_examples=9)
@given(st.integers(0, 2**32))
def test_an_aged_request_starts_within_the_bound(seed: int) -> None:
    assert worst_excess(PriorityPolicy(AGEING_S), Random(seed)) <= 0


def test_without_ageing_requests_starve() -> None:
    assert worst_excess(PriorityPolicy(ageing_s=1e9), Random(0)) > 0


def test_a_heap_is_sorted_whatever_leaves_it() -> None:
    random, heap, keys = Random(0), Heap[int](), dict[int, int]()
    for item in range(2000):
        heap.push(item, random.randrange(100))
        keys[item] = heap._entries[item][0]
        if random.random() < 0.9:
            gone = random.choice([*keys])
            heap.discard(gone)
            del keys[gone]
        if keys:
            again = random.choice([*keys])
            keys[again] = random.randrange(100)
            heap.push(again, keys[again])
            assert heap.top()[1] == min(keys.values()) == keys[heap.top()[0]]
        assert len(heap) == len(keys) and len(heap._heap) <= 3 * len(keys) + 20


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_the_service_of_users_and_their_waiting_are_counted(policy: str) -> None:
    """Whatever the policy: with preemptions, an abort before and one after the start, and a user without a name."""
    server = Server(policy, max_batch_size=3, num_kv_blocks=7)
    for i in range(12):
        server.add(({}, A, B)[i % 3], 3 + i, 8 + i)
    service = server.scheduler.service
    for step in range(400):
        if step == 3:
            server.scheduler.abort(server.requests[11])
            server.scheduler.abort(server.scheduler.running[0])
        server.step()
        expected = {}
        for user in (None, "a", "b"):
            own = [request for request in server.requests if request.terms.user == user]
            started = [request for request in own if request.metrics.first_scheduled_time is not None]
            expected[user] = sum(each.num_prompt_tokens for each in started), sum(each.num_output_tokens for each in own)
        in_flight = [*server.scheduler.running, *server.scheduler.waiting]
        found = {user: (each.num_prompt_tokens, each.num_output_tokens) for user, each in service.users(in_flight).items()}
        assert found == {user: tokens for user, tokens in expected.items() if user in found} and len(found) == 3
        if not server.scheduler.has_unfinished:
            break
    firsts = [
        request.metrics.first_scheduled_time for request in server.requests if request.metrics.first_scheduled_time is not None
    ]
    assert sorted(service.queue_s) == sorted(firsts) and len(firsts) == 11 and server.scheduler.counters.num_preemptions


def test_users_who_asked_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one asked again just before."""
    monkeypatch.setattr(service, "MAX_USERS", 50)
    server = Server("fcfs", max_batch_size=9)
    later = range(50, 99)
    for i in (*range(50), 0, *later):
        server.add({"user": str(i)})
        server.step()
    users = server.scheduler.service.users([])
    assert list(users) == [str(i) for i in (0, *later)] and users.pop("0") == UserMetrics(2, 2)
    assert set(users.values()) == {UserMetrics(1, 1)}


def test_one_engine_at_a_time_uses_a_policy(zoo: Zoo) -> None:
    """Its order of the waiting would be that of the requests of both."""
    policy = FairPolicy()
    engine = make_engine(zoo.path("llama"), scheduling_policy=policy)
    with pytest.raises(ValueError, match=r"scheduling_policy=.* is in use by another LLM.*allowed is one for each"):
        make_engine(zoo.path("llama"), scheduling_policy=policy)
    del engine
    with pytest.raises(ValueError, match="kv_cache_memory=100") as error:
        make_engine(zoo.path("llama"), scheduling_policy=policy, kv_cache_memory=100)
    make_engine(zoo.path("llama"), scheduling_policy=policy)  # of the engine that could not be made, the error keeps what there is
    assert error.value


def test_a_policy_may_be_wrapped_and_must_have_all_members() -> None:
    class Wrapper:
        def __init__(self, hidden: str | None = None) -> None:
            self._wrapped, self._hidden = FcfsPolicy(), hidden

        def __getattr__(self, name: str) -> Any:
            if name == self._hidden:
                raise AttributeError(name)
            return getattr(self._wrapped, name)

    policy: Any = Wrapper()
    assert ScheduleOptions(scheduling_policy=policy).scheduling_policy is policy
    for hidden in ("name", "first"):
        with pytest.raises(ValueError, match="scheduling_policy"):
            ScheduleOptions(scheduling_policy=Wrapper(hidden))  # type: ignore[arg-type]

"""A whole engine under random arrivals, aborts, time-outs, swaps of the draft, resizes and faults, step by step.

Whatever happens, a request emits what it would alone, in an engine that neither drafts, nor caches, nor cuts prompts, on PyTorch's
operations; one that is aborted emits the beginning of that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from auditor import Auditor
from back_ends import make_back_end
from bounds import AgeingWatch, FairnessWatch
from custom_drafters import Refusing
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from stepping import AMPLE, DEFAULTS, check_blocks, drain, submit
from torch import Tensor
from zoo import EOS_TOKEN_IDS, Zoo, random_prompts

from titan.bench.load_scenarios import ClassBlindPolicy
from titan.core.options import EngineConfig
from titan.core.policy import SchedulingPolicy
from titan.core.request import Request
from titan.core.sampling_params import SamplingParams
from titan.core.terms import PRIORITIES, RequestTerms
from titan.draft.registry import DraftSpec
from titan.engine import Engine
from titan.frontend.input_processor import InputProcessor
from titan.kernels.interfaces import Backend
from titan.models.decoder import Decoder
from titan.models.files import ModelFiles
from titan.models.loader import load_model, open_model
from titan.schedule.policies.fair import FairPolicy
from titan.schedule.policies.priority import PriorityPolicy

MAX_PROMPT_LEN, MAX_TOKENS = 44, 24
PROMPTS = random_prompts(5, seed=4, max_len=MAX_PROMPT_LEN)
WEIGHTS = {"a": 1.0, "b": 2.0}
AGEING_S = 20.0
DRAFTS = (None, "ngram", "llama~", "other")
MARGINS = {"auto": 1e-3, "int8": 0.1}
"""Least difference of the two largest logits at which rounding decides nothing; that of int8 may turn into another number."""
SEEDS = st.binary(min_size=4, max_size=4)  # of integers, many would be 0
OF_DRAFTER = ("propose", "propose late", "commit")
OF_PASSES = ("forward", "clear_blocks", "move_paths")
OF_COPIES = ("copy_out", "copy_in", "copy_blocks")


class Fault(Exception):  # noqa: N818 - injected, of whatever kind
    """Not of memory."""


class WatchedPriority(PriorityPolicy):
    num_starts = 0

    def remove(self, request: Request) -> None:
        self.num_starts += not request.is_finished
        super().remove(request)


class WatchedFair(FairPolicy):
    def __init__(self) -> None:
        super().__init__(WEIGHTS)
        self.service, self.num_output_tokens = dict.fromkeys(WEIGHTS, 0.0), 0

    def serve(self, request: Request, num_prompt_tokens: int, num_output_tokens: int) -> None:
        assert request.terms.user is not None
        self.service[request.terms.user] += num_prompt_tokens + 2 * num_output_tokens
        self.num_output_tokens += num_output_tokens
        super().serve(request, num_prompt_tokens, num_output_tokens)


@cache
def load(path: str, back_end: str) -> tuple[Decoder, Backend]:
    backend = make_back_end(back_end)
    return load_model(open_model(ModelFiles(path)), dtype="float32", backend=backend), backend


def make_engine(target: Decoder, backend: Backend, draft: DraftSpec = None, **options: Any) -> Engine:
    return Engine(EngineConfig.of(**(DEFAULTS | options)), target, draft, backend=backend)


@cache
def lonely(path: str, prompt: tuple[int, ...], temperature: float, seed: int, kv_dtype: str) -> list[int]:
    """What a request emits alone, as far as rounding decides nothing.

    That is up to a near-tie of a greedy one, and as far as the back ends agree on a sampled one.
    """
    runs = []
    for back_end in ("torch", "cpu")[: 2 if temperature else 1]:
        engine = make_engine(*load(path, back_end), kv_cache_dtype=kv_dtype, enable_prefix_caching=False, **AMPLE)
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)
        runs += submit(engine, [prompt], [params])
        drain(engine)
    if temperature:
        pairs = zip(*(run.output_token_ids for run in runs), strict=True)
        ends = [i for i, (one, other) in enumerate(pairs) if one != other]
    else:
        tops = [sorted((each.logprob for each in entry.values()), reverse=True) for entry in runs[0].logprobs or ()]
        ends = [i for i, top in enumerate(tops) if top[0] - top[1] < MARGINS[kv_dtype]]
    return runs[0].output_token_ids[: ends[0] if ends else None]


def broken_at(length: int, token_ids: list[int], logits: Tensor) -> Tensor:
    """A logits processor that fails after so many tokens."""
    if len(token_ids) >= length:
        raise Fault("processor")
    return logits


class EngineMachine(RuleBasedStateMachine):
    """Each rule ends with arrivals and steps. Most choices come from seeds, which keeps examples fast."""

    zoo: Zoo
    make_policy: Callable[[], SchedulingPolicy | str]

    @initialize(seed=SEEDS)
    def create(self, seed: bytes) -> None:
        self.policy = type(self).make_policy()
        self.random = random = Random(seed + type(self).__name__.encode())
        self.kv_dtype = random.choice(["auto", "auto", "auto", "auto", "int8"])
        self.batch_size = random.choice([1, 4, 4, 5, 5, 6, 6])
        self.draft = random.choice(DRAFTS)
        target, backend = load(self.zoo.path("llama"), random.choice(["torch", "cpu"]))
        self.engine = make_engine(
            target, backend, self.spec(self.draft), block_size=8, kv_cache_dtype=self.kv_dtype,
            draft_kv_cache_dtype=self.kv_dtype, num_kv_blocks=random.randint(8, 10), max_batch_size=self.batch_size,
            max_num_batched_tokens=self.batch_size + random.choice([3, 20, 100]),
            prefill_chunk_size=random.choice([None, random.randint(1, 20)]),
            max_prefill_tokens=random.choice([None, None, random.randint(1, 20)]),
            enable_prefix_caching=(caches := random.random() < 0.7),
            swap_space=(swap_space := random.choice([0, 2**17, 2**18, 2**18, 2**18])),
            preemption_mode=random.choice(["auto"] * 6 + ["recompute" if caches or not swap_space else "auto"]),
            scheduling_policy=self.policy,
            reservation=random.choice(["on_demand"] * 4 + ["max_tokens"]), max_waiting_requests=8,
            max_draft_tokens=random.choice([*range(1, 7), 20]), draft_tree=random.choice(["auto", "chain"]),
        )  # fmt: skip
        self.now, self.num_steps, self.has_failed = 0.0, 0, False
        self.engine.scheduler.queues.clock = lambda: self.now
        self.inputs = InputProcessor(self.engine)
        self.requests, self.unfinished = list[Request](), list[Request]()
        self.auditor = Auditor(self.zoo, self.engine, "llama")
        self.fairness, self.ageing = FairnessWatch(WEIGHTS), AgeingWatch(AGEING_S)
        for _ in range(4):
            self.add()

    def spec(self, draft: str | None) -> DraftSpec:
        return self.zoo.path(draft) if draft in ("llama~", "other") else draft

    def add(self) -> None:
        random, scheduler = self.random, self.engine.scheduler
        for _ in range(random.choice([0, 1, 2, 5])):
            prompt = random.choice(PROMPTS)
            prompt = prompt[: random.choice([len(prompt), len(prompt), 1 + len(prompt) // 2])]
            is_sampled = self.kv_dtype == "auto" and random.random() < 0.3
            temperature, own_seed = (0.8, random.choice([1, 2])) if is_sampled else (0.0, 0)
            room = len(lonely(self.zoo.path("llama"), tuple(prompt), temperature, own_seed, self.kv_dtype))
            processor = partial(broken_at, len(prompt) + random.randint(0, MAX_TOKENS))
            if not room or len(scheduler.waiting) > 5:
                continue
            params = SamplingParams(
                temperature=temperature, seed=own_seed, max_tokens=random.choice([room, room, random.randint(1, room)]),
                ignore_eos=random.random() < 0.7,
                n=1 if is_sampled else random.choice([1, 1, 1, 2, 3]), use_speculative=random.random() < 0.9,
                logits_processors=[processor] if random.random() < 0.1 else None,
            )  # fmt: skip
            terms = RequestTerms(
                priority=random.choice([*PRIORITIES, "critical", "batch"]), user=random.choice([*WEIGHTS]),
                deadline_s=random.choice([None, random.randint(1, 30)]),
                timeout_s=random.choice([None] * 5 + [random.randint(1, 60)]),
                cache_salt=random.choice([None, None, "salt"]),
            )  # fmt: skip
            if len(prompt) + params.max_tokens > self.engine.kv.num_blocks * 8:
                with pytest.raises(ValueError, match="could never fit"):
                    self.inputs.make_request(prompt, params, terms)
                continue
            family = self.inputs.make_request(prompt, params, terms).family
            for request in family:
                scheduler.add(request)
            self.requests += family
            self.unfinished += family

    @rule(seed=SEEDS)
    def go_on(self, seed: bytes) -> None:
        """Requests arrive, and steps are made, depending on all that was before: examples that are alike go different ways."""
        self.random.seed(self.random.randbytes(4) + seed)
        self.add()
        for _ in range(self.random.randint(1, 4)):
            self.step()

    @rule(seed=SEEDS)
    def abort(self, seed: bytes) -> None:
        random, scheduler = self.random, self.engine.scheduler
        if self.unfinished:
            request = random.choice(self.unfinished)
            if random.random() < 0.5:
                for each in request.family:
                    if not each.is_finished:
                        scheduler.abort(each, "not wanted any more")
            else:
                scheduler.abort(request, "not wanted any more")
            assert request.is_finished and not request.block_ids and not request.swapped_block_ids
        self.go_on(seed)

    @rule(draft=st.sampled_from(DRAFTS), is_refused=st.booleans(), seed=SEEDS)
    def swap_draft(self, draft: str | None, is_refused: bool, seed: bytes) -> None:
        if is_refused:
            with pytest.raises(ValueError, match="this draft wants another cache"):
                self.engine.swap_draft(Refusing())
        else:
            self.engine.swap_draft(self.spec(draft))
            self.draft = draft
        self.go_on(seed)
        self.audit()

    @rule(num_blocks=st.integers(6, 11), faulty_call=st.sampled_from([0, 0, 1, 2]), seed=SEEDS)
    def resize(self, num_blocks: int, faulty_call: int, seed: bytes) -> None:
        tables, size = self.tables(), self.engine.kv.num_blocks
        with self.failing(self.engine.backend.cache, "gather_blocks", Fault("gather_blocks"), faulty_call):
            try:
                self.engine.resize_kv_cache(num_blocks)
                size = num_blocks
            except (ValueError, Fault):
                assert self.tables() == tables
        assert {each.num_blocks for each in self.engine.kv.tensors.values()} == {size} == {self.engine.limits.num_kv_blocks}
        self.audit()
        self.go_on(seed)

    @rule(faulty_call=st.sampled_from([0, 0, 1, 2]), seed=SEEDS)
    def compact(self, faulty_call: int, seed: bytes) -> None:
        tables = self.tables()
        with self.failing(self.engine.backend.cache, "gather_blocks", Fault("gather_blocks"), faulty_call):
            try:
                self.engine.compact_kv_cache()
            except Fault:
                assert self.tables() == tables
            else:
                assert self.engine.compact_kv_cache() == 0
        self.audit()
        self.go_on(seed)

    @rule(
        name=st.sampled_from(OF_DRAFTER + OF_PASSES + OF_COPIES),
        is_memory=st.booleans(),
        call=st.integers(1, 3),
        aborts=st.sampled_from([False, False, True]),
        seed=SEEDS,
    )
    def fail(self, name: str, is_memory: bool, call: int, aborts: bool, seed: bytes) -> None:
        """A step in which one call fails, for want of memory or otherwise; after one that raises, all are aborted or go on."""
        error: Exception = MemoryError(name) if is_memory else Fault(name)
        engine = self.engine
        owner: Any = engine.drafter if name in OF_DRAFTER else engine.runner if name == "forward" else engine.backend.cache
        attribute, is_late = name.split()[0], "late" in name
        has_raised = False
        with warnings.catch_warnings(record=True) as caught, self.failing(owner, attribute, error, call, is_late) as failed:
            warnings.simplefilter("always")
            try:
                self.step()
            except type(error):
                has_raised = True
        if has_raised:
            assert name not in OF_DRAFTER and not (is_memory and name == "forward"), "drafts and smaller passes are tried first"
            if aborts or name == "move_paths":  # which may leave caches half moved
                for request in (*engine.scheduler.running, *engine.scheduler.waiting):
                    engine.scheduler.abort(request, f"Fault: {error}")
        assert len(caught) == (bool(failed) and name in OF_DRAFTER)
        self.has_failed = self.has_failed or bool(failed)
        self.check()
        self.audit()
        self.go_on(seed)

    @contextmanager
    def failing(self, owner: Any, name: str, error: Exception, call: int, is_late: bool = False) -> Iterator[list[None]]:
        """The n-th call of a method fails, at its end if so asked; 0: none does. The list says whether it has."""
        method, num_calls, failed = getattr(owner, name), 0, list[None]()

        def fail(*args: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == call:
                failed.append(None)
                if is_late:
                    method(*args)
                raise error
            return method(*args)

        with patch.object(owner, name, fail):
            yield failed

    def tables(self) -> list[list[int]]:
        return [list(request.block_ids) for request in self.engine.scheduler.running]

    def step(self) -> None:
        engine, policy, waiting = self.engine, self.policy, (*self.engine.scheduler.waiting,)
        self.now += 1
        self.num_steps += 1
        if isinstance(policy, WatchedPriority):
            self.ageing.note(waiting, engine.scheduler.running, policy.num_starts, self.now)
            assert self.ageing.worst_excess <= 0, "an aged request starves"
        before = dict(policy.service) if isinstance(policy, WatchedFair) else {}
        with ExitStack() as stack:
            stack.callback(self.check)
            engine.step()
        for request in () if self.has_failed else engine.scheduler.running:
            assert len(request.block_ids) == -(-request.num_computed_tokens // 8), "what was not accepted is given back"
        if isinstance(policy, WatchedFair):
            self.fairness.note(before, policy.service, engine.scheduler.waiting)
            assert self.fairness.largest_gap <= 2 * (MAX_PROMPT_LEN + 2 * self.batch_size * MAX_TOKENS)
            assert policy.num_output_tokens == sum(request.num_output_tokens for request in self.requests)
        if self.num_steps % 8 == 0:
            self.audit()

    def audit(self) -> None:
        """The KV behind the counters is what transformers computes."""
        if self.kv_dtype == "auto":
            self.auditor.check(self.draft if self.draft in ("llama~", "other") else None, has_failed=self.has_failed)

    def check(self) -> None:
        scheduler = self.engine.scheduler
        check_blocks(self.engine)
        present = {*scheduler.running, *scheduler.waiting}
        assert len(scheduler.running) <= self.batch_size
        for request in self.unfinished:
            assert request.is_finished != (request in present)
            timeout_s = request.terms.timeout_s
            assert request.is_finished or timeout_s is None or self.now - request.metrics.arrival_time < timeout_s
            self.check_output(request)
        self.unfinished = [request for request in self.unfinished if not request.is_finished]

    def check_output(self, request: Request) -> None:
        params, actual = request.params, request.output_token_ids
        seed, path = 0 if params.is_greedy else request.seed, self.zoo.path("llama")
        expected = lonely(path, tuple(request.prompt_token_ids), params.temperature, seed, self.kv_dtype)[: request.max_tokens]
        ends = [] if params.ignore_eos else [i + 1 for i, token in enumerate(expected) if token in EOS_TOKEN_IDS]
        expected = expected[: ends[0] if ends else None]
        processors = [processor.args[0] for processor in params.logits_processors or ()]
        most = min([len(expected), *(length - request.num_prompt_tokens for length in processors)])
        assert actual == expected[: len(actual)] and len(actual) <= most
        if request.is_finished and request.error is None:
            assert actual == expected
        if request.error is not None:
            reasons = ("not wanted", "timeout_s=", "Fault: ", "out of memory in a pass of one token: ")
            assert request.error.startswith(reasons) or ("processor" in request.error and len(actual) == most < len(expected))

    def teardown(self) -> None:
        if not hasattr(self, "ageing"):  # `create` failed
            return
        engine, most = self.engine, self.num_steps + 1000
        while engine.scheduler.has_unfinished:
            self.step()
            assert self.num_steps < most, "the engine does not get on"
        assert not self.unfinished and not engine.scheduler._expiries
        drain(engine)


@pytest.fixture(scope="module", autouse=True)
def _models(zoo: Zoo) -> None:
    EngineMachine.zoo = zoo


class Fcfs(EngineMachine):
    make_policy = ClassBlindPolicy


class Priority(EngineMachine):
    make_policy = partial(WatchedPriority, AGEING_S)


class Fair(EngineMachine):
    make_policy = WatchedFair


TestFcfs, TestPriority, TestFair = Fcfs.TestCase, Priority.TestCase, Fair.TestCase
TestPriority.settings = TestFair.settings = settings(
    max_examples=6,  # from ten on, most would be slight variations of one before
    stateful_step_count=16,
)
TestFcfs.settings = settings(TestFair.settings, max_examples=2)  # the same rules as with the others

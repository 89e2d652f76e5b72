"""Interrupts anywhere in a step cost the requests in flight, and the engine serves the next ones as if it were new."""

from __future__ import annotations

import dis
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepping import SCARCE, greedy, make_engine
from text_tools import make_tokenizer
from zoo import Zoo, random_prompts

import titan
from titan import RequestOutput, SamplingParams
from titan.core.policy import SchedulingPolicy
from titan.core.request import Request
from titan.core.terms import RequestTerms
from titan.frontend import step_loop
from titan.frontend.front_end import FrontEnd
from titan.kernels.torch import backend as torch_backend
from titan.schedule.policies.fair import FairPolicy
from titan.schedule.policies.fcfs import FcfsPolicy
from titan.schedule.policies.priority import PriorityPolicy

Place = tuple[str, str, int, int]  # file and function, line, and instruction

PACKAGE = Path(titan.__file__).parent
OF_STEPS = ("schedule/", "memory/", "draft/", "verify/", "execute/", "core/", "engine.py")
OF_CALLERS = ("frontend/step_loop.py", "kernels/torch/backend.py")
OF_ANSWERS = ("frontend/step_loop.py", "frontend/front_end.py", "frontend/output_processor.py", "core/request.py")
SIGNAL_CHECKS = ("CALL", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD")
"""Instructions after which Python looks whether there was a signal."""

PROMPTS = random_prompts(7, seed=3, max_len=40)
PARAMS = [
    greedy(19, ignore_eos=True),
    greedy(12, n=2, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=1, max_tokens=8, logprobs=1),
    greedy(20, stop=["e"]),
    greedy(12, ignore_eos=True),
    greedy(4),
    SamplingParams(max_tokens=6, seed=2, prompt_logprobs=1),
]
PRIORITIES = ["batch", "batch", "normal", "batch", "normal", "critical", "critical"]
TERMS = [
    RequestTerms(request_id=f"own {i}", priority=priority, user="abc"[i % 3], timeout_s=50.0 if i % 4 == 1 else None)
    for i, priority in enumerate(PRIORITIES)
]
FRESH = PROMPTS[2:5]


def make_front_end(zoo: Zoo, policy: SchedulingPolicy) -> FrontEnd:
    options = SCARCE | {"num_kv_blocks": 8, "swap_space": 2**17, "preemption_mode": "swap", "scheduling_policy": policy}
    engine = make_engine(zoo.path("llama+text"), zoo.path("llama~"), draft_tree="auto", **options)
    return FrontEnd(engine, make_tokenizer())


def terms_with(front_end: FrontEnd) -> list[RequestTerms]:
    has_classes = isinstance(front_end.engine.scheduler.policy, PriorityPolicy)
    return TERMS if has_classes else [replace(each, priority="normal") for each in TERMS]


def generate(front_end: FrontEnd, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    outputs = front_end.generate(prompts, params, False, terms_with(front_end)[: len(prompts)])
    assert [each.error for each in outputs] == [None] * len(outputs)
    return [each.outputs[0].token_ids for each in outputs]


def check_serves(front_end: FrontEnd, zoo: Zoo) -> None:
    """What transformers says comes from an engine that may still have had requests in flight, and has none then, nor their ids."""
    expected = [zoo.greedy("llama+text", prompt, 5, ignore_eos=True) for prompt in FRESH]
    assert generate(front_end, FRESH, [greedy(5, ignore_eos=True)] * len(FRESH)) == expected
    while front_end.engine.scheduler.has_unfinished:
        front_end.engine.step()
    front_end.engine.kv.check([])
    loop = front_end.loop
    assert not loop._runs and not loop._abandoned and not loop._callers


def check_is_empty(front_end: FrontEnd) -> None:
    engine = front_end.engine
    assert not engine.scheduler.in_flight and not len(engine.scheduler._expiries)
    for pool in (engine.kv.pool, engine.kv.swap_space.pool):
        pool.check([])
        assert pool.num_blank == pool.num_blocks
    policy = vars(engine.scheduler.policy)
    known = [policy[name] for name in ("_waiting", "_by_key", "_by_age", "_backlogged", "_in_flight") if name in policy]
    assert known and not any(map(len, known))


@contextmanager
def watching(files: Sequence[str], visit: Callable[[Place], None], *, by_instruction: bool = False) -> Iterator[None]:
    """Call a function at each line that is executed in some files, or wherever Python looks for signals."""
    before, last = sys.gettrace(), dict[FrameType, int]()

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        if event == "return":
            last.pop(frame, None)
        elif event == "line" and not by_instruction:
            visit((*where(frame.f_code), frame.f_lineno, 0))
        elif event == "opcode":
            previous, last[frame] = last.get(frame), frame.f_lasti
            if previous is not None and names(frame.f_code)[previous] in SIGNAL_CHECKS:
                visit((*where(frame.f_code), frame.f_lineno, frame.f_lasti))
        return watch

    def enter(frame: FrameType, _: str, __: Any) -> Any:
        if not is_in(frame.f_code.co_filename, tuple(files)):
            return None
        frame.f_trace_opcodes = by_instruction
        last.pop(frame, None)
        return watch

    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


@cache
def is_in(path: str, files: tuple[str, ...]) -> bool:
    return path.startswith(str(PACKAGE)) and path[len(str(PACKAGE)) + 1 :].startswith(files)


@cache
def where(code: CodeType) -> tuple[str, str]:
    return code.co_filename[len(str(PACKAGE)) + 1 :], code.co_qualname


@cache
def names(code: CodeType) -> dict[int, str]:
    return {each.offset: each.opname for each in dis.get_instructions(code)}


@contextmanager
def interrupted_at(place: Place, is_due: Callable[[], bool], **options: Any) -> Iterator[list[Place]]:
    """Interrupt what is done at a place, once it is visited when that is due; the list has the place if that was so."""
    struck = list[Place]()

    def interrupt(visited: Place) -> None:
        if visited == place and not struck and is_due():
            struck.append(place)
            raise KeyboardInterrupt

    with watching(place[:1], interrupt, **options):
        try:
            yield struck
        except KeyboardInterrupt:
            assert struck
        else:
            assert not struck, "the interrupt was lost"


@pytest.mark.parametrize("make_policy", [FcfsPolicy, PriorityPolicy, FairPolicy])
def test_an_interrupt_at_any_line_of_a_step_leaves_an_engine_that_serves(
    zoo: Zoo, make_policy: Callable[[], SchedulingPolicy]
) -> None:
    front_end, visits = make_front_end(zoo, make_policy()), Counter[Place]()
    expected, loop = generate(front_end, PROMPTS, PARAMS), front_end.loop
    with watching(OF_STEPS, lambda place: visits.update([place] if loop._leader else ())):
        generate(front_end, PROMPTS, PARAMS)
    metrics = front_end.engine.metrics()
    assert metrics.num_swapped_in and metrics.num_evicted_blocks and sum(metrics.accepted_per_depth) and len(visits) > 900
    places, strikes = sorted(visits), list[bool]()

    @settings(max_examples=7)
    @given(st.integers(0, 2**32))
    def interrupt(seed: int) -> None:
        random = Random(seed)
        place = random.choice(places)
        turns = count(-random.randrange(visits[place]))
        with interrupted_at(place, lambda: loop._leader is not None and next(turns) == 0) as struck:
            generate(front_end, PROMPTS, PARAMS)
        strikes.append(bool(struck))
        if struck:
            check_is_empty(front_end)
        check_serves(front_end, zoo)

    interrupt()
    assert sum(strikes) > 0.5 * len(strikes), "what is cached may keep a place from being visited as often again"
    assert front_end.engine.kv.swap_space.pool.num_blocks and generate(front_end, PROMPTS, PARAMS) == expected


def test_an_interrupt_of_the_callers_loop_leaves_an_engine_that_serves(zoo: Zoo) -> None:
    """Wherever Python looks for signals, which is not at every line: so no lock stays locked."""
    front_end, visits, num_threads = make_front_end(zoo, FcfsPolicy()), Counter[Place](), torch.get_num_threads()
    prompts, params = PROMPTS[:2], [greedy(3, ignore_eos=True), greedy(2, n=2, ignore_eos=True)]
    with watching(OF_CALLERS, lambda place: visits.update([place]), by_instruction=True):
        generate(front_end, prompts, params)
    strikes = list[bool]()
    for place in sorted(visits):
        with interrupted_at(place, lambda: True, by_instruction=True) as struck:
            generate(front_end, prompts, params)
        strikes.append(bool(struck))
        assert front_end.loop._leader is None and not front_end.loop._lock._is_owned()  # type: ignore[attr-defined]
        assert not torch_backend._open_contexts
        check_serves(front_end, zoo)
        torch.set_num_threads(num_threads)  # an interrupt while it is set back leaves another
    assert sum(strikes) > 0.8 * len(strikes)


def test_an_interrupt_of_a_swap_of_the_draft_leaves_an_engine_that_serves(zoo: Zoo) -> None:
    """With a request in flight; there may be no swap space until the next swap."""
    front_end, visits, is_swapping = make_front_end(zoo, FcfsPolicy()), Counter[Place](), threading.Event()
    engine, expected = front_end.engine, generate(front_end, PROMPTS, PARAMS)
    drafts = None, zoo.path("llama~"), zoo.path("llama3_rope")  # the last has as many layers as the one before, but other heads

    def swap() -> None:
        is_swapping.set()
        try:
            for draft in drafts:
                engine.swap_draft(draft)
        finally:
            is_swapping.clear()

    def begun() -> Iterator[RequestOutput]:
        stream = front_end.stream(PROMPTS[0], PARAMS[0], terms_with(front_end)[0])
        next(stream)
        return stream

    stream = begun()
    with watching(OF_STEPS, lambda place: visits.update([place] * is_swapping.is_set())):
        front_end.loop.between_steps(swap)
    *_, last = stream
    assert last.outputs[0].token_ids == expected[0]
    random, num_struck = Random(0), 0
    exchange = [(place, visits[place] - 1) for place in sorted(visits) if place[1] == "Engine._use_drafter"]  # of the last two
    for place, turn in [*((each, random.randrange(visits[each])) for each in random.sample(sorted(visits), 40)), *exchange]:
        turns = count(-turn)
        with interrupted_at(place, partial(lambda turns: is_swapping.is_set() and next(turns) == 0, turns)) as struck:
            stream = begun()
            front_end.loop.between_steps(swap)
        if struck:
            num_struck += 1
            with pytest.raises(RuntimeError, match="a step failed, which ended all requests in flight: KeyboardInterrupt"):
                next(stream)
            check_is_empty(front_end)
            cache = engine.kv.tensors.get("draft")
            assert (cache and cache.layout) == engine.drafter.kv, "a drafter with the cache of another would write past its end"
        del stream  # which may still be in flight
        check_serves(front_end, zoo)
    assert num_struck > 40 and len(visits) > 200 and len(exchange) > 10
    front_end.loop.between_steps(swap)
    assert engine.kv.swap_space.pool.num_blocks and generate(front_end, PROMPTS, PARAMS) == expected


def test_an_interrupt_of_the_thread_that_leads_costs_no_other_what_is_complete(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream beside it, of a request that has finished, gets its last output, wherever its leader is interrupted."""
    monkeypatch.setattr(step_loop, "PATIENCE_S", 0.01)  # its wake-up may be lost
    front_end, visits, finished = make_front_end(zoo, FcfsPolicy()), Counter[Place](), list[Request]()
    engine, loop = front_end.engine, front_end.loop
    outputs, errors, step = list[RequestOutput](), list[RuntimeError](), engine.step
    leader, thread = threading.get_ident(), threading.Thread()

    def step_and_tell() -> list[Request]:
        finished.clear()
        while threading.get_ident() == leader and thread.is_alive() and len(loop._callers) < 2:
            time.sleep(0.001)  # until the stream waits again
        changed = step()
        finished.extend(each for each in changed if each.is_finished and each.request_id == "beside")
        return changed

    monkeypatch.setattr(engine, "step", step_and_tell)

    def generate_beside_stream() -> None:
        nonlocal thread
        finished.clear()

        def join(*_: Any) -> None:  # inside the first step
            engine.observers.remove(join)
            thread.start()
            while len(loop._callers) < 2:
                time.sleep(0.001)

        engine.observers.append(join)
        thread = threading.Thread(target=stream, daemon=True)
        try:
            generate(front_end, PROMPTS[:1], [greedy(12, ignore_eos=True, use_speculative=False)])
        finally:
            thread.join(60)
            assert not thread.is_alive(), "it hangs"

    def stream() -> None:
        try:
            outputs.extend(front_end.stream(PROMPTS[2], greedy(4, ignore_eos=True, logprobs=1), RequestTerms(request_id="beside")))
        except RuntimeError as error:
            errors.append(error)

    def last_of(outputs: list[RequestOutput]) -> tuple[list[int], str, list[str | None]]:
        """All but numbers that rounding decides."""
        [completion] = outputs[-1].outputs
        assert completion.finish_reason == "length" and completion.logprobs is not None
        total = sum(each[token_id].logprob for each, token_id in zip(completion.logprobs, completion.token_ids, strict=True))
        assert completion.cumulative_logprob == pytest.approx(total)
        return (
            completion.token_ids,
            completion.text,
            [each.decoded_token for entry in completion.logprobs for each in entry.values()],
        )

    with watching(OF_ANSWERS, lambda place: visits.update([place] * len(finished)), by_instruction=True):
        generate_beside_stream()
    expected, num_struck = last_of(outputs), 0
    for place in sorted(visits):
        for turn in range(visits[place]):
            outputs.clear()
            is_due = partial(lambda turns: bool(finished) and next(turns) == 0, count(-turn))
            with interrupted_at(place, is_due, by_instruction=True) as struck:
                generate_beside_stream()
            num_struck += bool(struck)
            assert last_of(outputs) == expected and not errors, (place, turn)
            check_serves(front_end, zoo)
    assert num_struck > len(visits) > 50

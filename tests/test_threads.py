"""One `LLM` for many threads: what each gets is what it would get alone, and nobody waits for ever."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
from stepping import greedy
from zoo import Zoo

from titan import LLM, RequestOutput, SamplingParams, engine
from titan.core.request import Request
from titan.core.step import StepPlan
from titan.core.trees import DraftTree
from titan.draft.base import Drafter, NoDrafter
from titan.draft.registry import open_drafter
from titan.frontend import step_loop
from titan.frontend.step_loop import StepLoop

WATCHDOG_S = 60
"""A test that takes so long hangs."""
PROMPTS = ["the quick brown fox", "in the morning", "the", "dog jumps over the lazy dog"]
PARAMS = [
    greedy(9),
    greedy(30, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=5, n=2, max_tokens=12, repetition_penalty=1.2),
    SamplingParams(temperature=0.7, seed=6, max_tokens=20, stop=["e"], top_p=0.9),
]


@pytest.fixture(scope="module")
def llm(zoo: Zoo) -> LLM:
    options: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "speculation": "fixed",
        "num_kv_blocks": 64,
        "max_batch_size": 8,
    }
    return LLM(zoo.path("llama+text"), zoo.path("llama~+text"), draft_sampling="greedy", **options)


@pytest.fixture(autouse=True)
def _engine_is_left_clean(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(step_loop, "PATIENCE_S", 9 * WATCHDOG_S)  # nobody needs to look for itself
    faulthandler.dump_traceback_later(3 * WATCHDOG_S, exit=True)  # if the main thread is the one that hangs
    yield
    faulthandler.cancel_dump_traceback_later()
    assert not llm.engine.scheduler.has_unfinished
    llm.engine.kv.pool.check([])


def generate(llm: LLM, prompt: str, params: SamplingParams) -> list[tuple[list[int], str, str | None]]:
    return essence(llm.generate(prompt, params, use_tqdm=False)[0])


def essence(output: RequestOutput) -> list[tuple[list[int], str, str | None]]:
    """All but numbers that rounding decides."""
    return [(each.token_ids, each.text, each.finish_reason) for each in output.outputs]


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """What each function returns, or the error that it raises."""
    results: list[Any] = [None] * len(functions)

    def run(i: int) -> None:
        try:
            results[i] = functions[i]()
        except BaseException as error:  # noqa: BLE001
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + WATCHDOG_S
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return results


def in_next_step(llm: LLM, function: Callable[[], None]) -> None:
    """Call a function inside the next step."""

    def observe(*_: Any) -> None:
        llm.engine.observers.remove(observe)
        function()

    llm.engine.observers.append(observe)


def await_callers(llm: LLM, count: int) -> None:
    """Inside a step: wait until so many threads wait for the loop."""
    while len(llm.frontend.loop._callers) < count:
        time.sleep(0.001)


def test_every_output_of_8_threads_with_50_calls_each_is_the_lonely_one(llm: LLM, zoo: Zoo) -> None:
    lonely = {(prompt, i): generate(llm, prompt, params) for prompt in PROMPTS for i, params in enumerate(PARAMS)}
    drafts = ["ngram", None, zoo.path("llama~+text"), zoo.path("other")]

    def call_50_times(seed: int) -> None:
        random = Random(seed)
        for _ in range(50):
            key = prompt, i = random.choice(PROMPTS), random.randrange(len(PARAMS))
            match random.choice(["generate"] * 4 + ["stream"] * 2 + ["abandon", "abandon", "swap", "metrics", "compact", "resize"]):
                case "generate":
                    assert generate(llm, prompt, PARAMS[i]) == lonely[key]
                case "stream":
                    assert essence([*llm.stream(prompt, PARAMS[i])][-1]) == lonely[key]
                case "abandon":
                    stream = llm.stream(prompt, PARAMS[i])
                    for _ in range(random.randrange(4)):
                        next(stream, None)
                case "swap":
                    llm.swap_draft(random.choice(drafts))
                case "compact":
                    assert llm.compact_kv_cache() >= 0
                case "resize":
                    with suppress(ValueError):  # more are in use
                        llm.resize_kv_cache(random.randint(16, 96))
                case "metrics":
                    assert 0 <= llm.metrics().num_running <= 8 and isinstance(llm.diagnose(), list)

    num_finished = llm.metrics().num_finished_requests
    assert in_threads(*(lambda seed=seed: call_50_times(seed) for seed in range(8))) == [None] * 8
    assert llm.metrics().num_finished_requests > num_finished + 200


def test_a_request_that_another_thread_aborts_ends_with_what_it_has(llm: LLM) -> None:
    """The last one in flight: nothing is left to step for, while its caller has been asked already."""
    prompts, params = [PROMPTS[0], PROMPTS[1]], [SamplingParams(max_tokens=60, ignore_eos=True), SamplingParams(max_tokens=1)]

    def generate_both() -> list[RequestOutput]:
        aborting: list[threading.Thread] = []

        def observe(*_: Any) -> None:  # inside a step in which the second request has ended
            if len(llm.engine.scheduler.running) == 1 and not aborting:
                aborting.append(threading.Thread(target=lambda: results.append(llm.abort("first")), daemon=True))
                aborting[0].start()
                await_callers(llm, 2)

        llm.engine.observers.append(observe)
        try:
            return llm.generate(prompts, params, use_tqdm=False, request_id=["first", "second"])
        finally:
            llm.engine.observers.remove(observe)
            aborting[0].join(WATCHDOG_S)

    results: list[int] = []
    [outputs] = in_threads(generate_both)
    assert [each.outputs[0].finish_reason for each in outputs] == ["abort", "length"] and results == [1]
    assert 0 < len(outputs[0].outputs[0].token_ids) < 60 and "was called" in (outputs[0].error or "")


def test_threads_join_one_batch(llm: LLM) -> None:
    """The first step is that of the thread that came first; all others join in the second: 16 steps, for 15 tokens each."""
    llm.swap_draft(None)
    before = llm.metrics()
    params = greedy(15, ignore_eos=True)
    in_next_step(llm, lambda: await_callers(llm, 8))
    in_threads(*(lambda prompt=prompt: generate(llm, prompt, params) for prompt in PROMPTS * 2))
    after = llm.metrics()
    assert (after.num_steps - before.num_steps, after.num_emitted_tokens - before.num_emitted_tokens) == (16, 8 * 15)


def test_requests_go_on_while_a_draft_is_looked_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, found = generate(llm, "the", greedy(5)), []

    def open_slowly(*args: Any) -> Callable[[], Drafter]:
        found.extend(in_threads(lambda: generate(llm, "the", greedy(5))))
        return open_drafter(*args)

    monkeypatch.setattr(engine, "open_drafter", open_slowly)
    llm.swap_draft("ngram")
    assert found == [expected] and llm.engine.drafter.name == "ngram"


CALLS: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate("the"),
    "stream": lambda llm: llm.stream("the"),
    "swap_draft": lambda llm: llm.swap_draft(None),
    "metrics": lambda llm: llm.metrics(),
    "diagnose": lambda llm: llm.diagnose(),
    "compact": lambda llm: llm.compact_kv_cache(),
    "resize": lambda llm: llm.resize_kv_cache(64),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_from_inside_a_step_is_refused(llm: LLM, name: str) -> None:
    expected, refusals = generate(llm, "the", greedy(5)), []

    def call() -> None:
        with pytest.raises(RuntimeError, match="an LLM cannot be called from inside its own step"):
            CALLS[name](llm)
        refusals.append(name)

    class Calling(NoDrafter):
        max_draft_tokens = 1

        def propose(self, plan: StepPlan) -> Sequence[DraftTree]:
            call()
            return super().propose(plan)

    in_next_step(llm, call)
    assert generate(llm, "the", greedy(5)) == expected
    llm.swap_draft(Calling())
    assert generate(llm, "the", greedy(5)) == expected
    llm.swap_draft("ngram")
    assert len(refusals) > 2
    [output] = llm.generate("the", greedy(5, logits_processors=[lambda _, logits: CALLS[name](llm) or logits]), use_tqdm=False)
    assert output.error is not None and output.error.startswith("logits_processors: RuntimeError: an LLM cannot be called from in")


def test_a_stream_may_be_abandoned_inside_a_step_and_in_another_thread(llm: LLM) -> None:
    expected = generate(llm, "the", PARAMS[1])
    streams = [llm.stream(prompt, greedy(200, ignore_eos=True)) for prompt in PROMPTS[:3]]
    assert all(map(next, streams))

    def abandon() -> None:
        streams.pop()
        [error] = in_threads(streams.pop().close)  # type: ignore[attr-defined]
        assert error is None

    in_next_step(llm, abandon)
    assert generate(llm, "the", PARAMS[1]) == expected
    assert len(llm.engine.scheduler.running) == 1
    in_threads(streams.clear)
    assert not llm.engine.scheduler.has_unfinished


def test_an_interrupt_of_a_policy_where_the_first_of_some_requests_ends_costs_no_blocks(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [greedy(6, ignore_eos=True)] * 4
    expected = [essence(output) for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    policy, num_finished = llm.engine.scheduler.policy, llm.metrics().num_finished_requests
    with monkeypatch.context() as patch:
        patch.setattr(policy, "end", Mock(side_effect=[KeyboardInterrupt, *[None] * 3]))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, params, use_tqdm=False)
    assert llm.metrics().num_finished_requests == num_finished + 4
    assert [essence(output) for output in llm.generate(PROMPTS, params, use_tqdm=False)] == expected


@pytest.mark.parametrize("error", [ValueError("out of luck"), KeyboardInterrupt()], ids=repr)
def test_a_step_that_fails_ends_all_requests_in_flight_and_the_engine_goes_on(llm: LLM, error: BaseException) -> None:
    expected = [generate(llm, prompt, PARAMS[1]) for prompt in PROMPTS]
    paused = llm.stream("the", greedy(40, ignore_eos=True))
    next(paused)

    def fail() -> None:
        await_callers(llm, 4)
        raise error

    in_next_step(llm, fail)
    results = in_threads(*(lambda prompt=prompt: generate(llm, prompt, PARAMS[1]) for prompt in PROMPTS))
    assert sum(each is error for each in results) == 1, "the thread that stepped"
    with pytest.raises(RuntimeError) as ended:
        next(paused)
    assert str(ended.value) == f"a step failed, which ended all requests in flight: {type(error).__name__}: {error}"
    for each, alone in zip(results, expected, strict=True):  # requests that were not in flight yet run as if nothing had been
        assert each is error or each == alone or str(each) == str(ended.value)
    assert [generate(llm, prompt, PARAMS[1]) for prompt in PROMPTS] == expected


def test_a_step_that_fails_after_some_have_finished_leaves_the_engine_sound(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rows of the step have ended; the failure strikes at a later one."""
    params = [greedy(length, ignore_eos=True) for length in (6, 6, 30, 30)]
    expected = [essence(output) for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    scheduler = llm.engine.scheduler
    finished, serve = list[Request](), scheduler.policy.serve

    def fail(request: Request, num_prompt_tokens: int, num_output_tokens: int) -> None:
        serve(request, num_prompt_tokens, num_output_tokens)
        finished.extend([request] * request.is_finished)
        if finished and not request.is_finished and finished[-1] in scheduler.running:
            patch.undo()
            raise ValueError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(scheduler.policy, "serve", fail)
        with pytest.raises(RuntimeError, match="the scheduling policy 'fcfs' failed: ValueError: out of luck") as failure:
            llm.generate(PROMPTS, params, use_tqdm=False)
    assert [each.error for each in finished] == [f"RuntimeError: {failure.value}"] * len(finished) and finished
    assert [essence(output) for output in llm.generate(PROMPTS, params, use_tqdm=False)] == expected


def test_what_a_failed_step_has_left_anywhere_is_gone(llm: LLM) -> None:
    expected, scheduler, pool = generate(llm, "the", greedy(5)), llm.engine.scheduler, llm.engine.kv.pool

    def fail() -> None:
        pool.allocate(1)  # a block that is nobody's
        raise ValueError("out of luck")

    in_next_step(llm, fail)
    with pytest.raises(ValueError, match="out of luck"):
        generate(llm, "the", greedy(5))
    assert pool.num_blank == pool.num_blocks
    in_next_step(llm, scheduler.running.clear)
    with pytest.raises(RuntimeError, match="neither waiting nor running"):
        generate(llm, "the", greedy(5))
    assert generate(llm, "the", greedy(5)) == expected


def test_an_engine_that_could_not_recover_does_before_anything_else(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second interrupt strikes while the requests of the failed step are ended."""
    expected, paused = generate(llm, "the", greedy(5)), llm.stream("the", greedy(40, ignore_eos=True))
    next(paused)

    def fail() -> None:
        monkeypatch.setattr(llm.engine.kv, "lose_content", Mock(side_effect=KeyboardInterrupt("again")))
        raise ValueError("out of luck")

    in_next_step(llm, fail)
    with pytest.raises(KeyboardInterrupt, match="again"):
        generate(llm, "the", greedy(5))
    monkeypatch.undo()
    assert llm.engine.scheduler.has_unfinished and llm.metrics().num_running == 0
    with pytest.raises(RuntimeError, match="a step failed, which ended all requests in flight: ValueError: out of luck"):
        next(paused)
    assert generate(llm, "the", greedy(5)) == expected


def beside_interrupted_leader(llm: LLM, monkeypatch: pytest.MonkeyPatch, function: Callable[[], object]) -> None:
    """Run a function in a thread that joins in the first step of one that will be interrupted; take all patches back."""
    other = threading.Thread(target=function, daemon=True)
    in_next_step(llm, lambda: (other.start(), await_callers(llm, 2)))
    monkeypatch.setattr(step_loop, "PATIENCE_S", 0.01)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, "in the morning", greedy(30, ignore_eos=True))
    other.join(WATCHDOG_S)
    monkeypatch.undo()


def test_a_caller_that_an_interrupt_dropped_is_asked_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that leads is interrupted while it puts the other last."""
    put_last, results, errors = StepLoop._put_last, list[Any](), list[str]()

    def fail(loop: StepLoop, caller: Any) -> None:
        if len(loop._callers) == 2 and not errors:
            loop._callers.clear()  # the other one too: nothing may depend on who was moved
            errors.append("struck")
            raise KeyboardInterrupt
        put_last(loop, caller)

    def wait_for_the_end() -> None:
        try:
            generate(llm, "the", greedy(50))
        except RuntimeError as error:
            results.append(str(error))

    monkeypatch.setattr(StepLoop, "_put_last", fail)
    beside_interrupted_leader(llm, monkeypatch, wait_for_the_end)
    assert errors and len(results) == 1 and "a step failed, which ended all requests in flight" in results[0]


def test_what_is_called_between_steps_is_called_once_although_its_leader_is_interrupted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it wakes the caller, who sleeps when a third thread leads."""
    is_answered, leader = step_loop._Caller.is_answered.fget, threading.get_ident()  # type: ignore[attr-defined]

    def fail(caller: Any) -> bool:
        if is_answered(caller) and threading.get_ident() == leader:
            raise KeyboardInterrupt
        return bool(is_answered(caller))

    def generate_in_vain() -> None:
        with pytest.raises(RuntimeError, match="a step failed"):
            generate(llm, "the", greedy(5))

    def call_beside_it() -> None:
        for i, thread in enumerate(threads):
            thread.start()
            await_callers(llm, 2 + i)
        monkeypatch.setattr(step_loop._Caller, "is_answered", property(fail))

    calls, results = list[int](), list[None]()
    others = [generate_in_vain, lambda: results.append(llm.frontend.loop.between_steps(lambda: calls.append(1)))]
    threads = [threading.Thread(target=call, daemon=True) for call in others]
    in_next_step(llm, call_beside_it)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, "in the morning", greedy(30, ignore_eos=True))
    for each in threads:
        each.join(WATCHDOG_S)
    monkeypatch.undo()
    assert (calls, results) == ([1], [None])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts, also where the tests were started in the background, which ignores it."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("interruptible")
def test_a_thread_that_is_interrupted_while_it_waits_costs_no_other(llm: LLM) -> None:
    expected, leads = generate(llm, "the", PARAMS[1]), threading.Event()

    def interrupt() -> None:
        leads.set()
        await_callers(llm, 2)
        while len(llm.frontend.loop._callers) > 1:  # a signal that comes just before the thread sleeps does not wake it
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            has_left.wait(1)

    results, has_left = list[Any](), threading.Event()
    in_next_step(llm, interrupt)
    thread = threading.Thread(target=lambda: results.append(generate(llm, "the", PARAMS[1])), daemon=True)
    thread.start()
    assert leads.wait(WATCHDOG_S)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, "in the morning", PARAMS[1])
    has_left.set()
    thread.join(WATCHDOG_S)
    assert results == [expected]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a platform without fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("name", [*CALLS, "next", "make"])
def test_a_forked_process_is_refused(llm: LLM, zoo: Zoo, name: str) -> None:
    stream = llm.stream("the", greedy(40, ignore_eos=True))
    next(stream)
    path = zoo.path("llama+text")
    calls = CALLS | {"next": lambda _: next(stream), "make": lambda _: LLM(path, device="cpu")}
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(WATCHDOG_S)
        try:
            calls[name](llm)
            message = "was not refused"
        except BaseException as error:  # noqa: BLE001
            message = f"{type(error).__name__}: {error}"
        os.write(writer, message.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        message = file.read()
    assert os.waitpid(child, 0) == (child, 0)
    assert message.startswith(f"RuntimeError: process {child} was forked from process {os.getpid()}") and "'spawn'" in message
    stream.close()


def test_a_stream_joins_although_another_caller_keeps_the_queue_full(zoo: Zoo) -> None:
    llm = LLM(zoo.path("llama+text"), dtype="float32", device="cpu", num_kv_blocks=64, max_waiting_requests=2, max_batch_size=1)
    many, params = [f"the {i}" for i in range(12)], greedy(6, n=3, ignore_eos=True)
    alone = [generate(llm, prompt, params) for prompt in ["in the", *many]]
    stream = llm.stream("in the", params)
    first = next(stream)
    together = llm.generate(many, params, use_tqdm=False)
    assert not first.finished
    assert [essence(each) for each in (list(stream)[-1], *together)] == alone


def test_a_stream_that_is_complete_outlives_a_step_that_fails(llm: LLM) -> None:
    stream = llm.stream("the", greedy(6, ignore_eos=True))
    next(stream)
    llm.generate("in the", greedy(12, ignore_eos=True), use_tqdm=False)  # steps the stream to its end as well

    def fail(*_: object) -> None:
        raise OSError("observed")

    llm.engine.observers.append(fail)
    try:
        with pytest.raises(OSError, match="observed"):
            llm.generate("the", greedy(2), use_tqdm=False)
    finally:
        llm.engine.observers.remove(fail)
    *_, last = stream
    assert last.finished and last.error is None

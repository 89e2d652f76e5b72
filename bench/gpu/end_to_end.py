"""Tokens per second of whole engines: Titan with and without speculation, and transformers on the very same weights.

Every figure of Titan is of a window of steps in which all requests decode: it begins some steps after the last prompt is done, when
graphs are captured, and ends before a request does. With speculation, a draft model of a tenth of the target's cost runs in full,
and a recording, corrupted with a dialled probability, takes the place of its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np

from titan import SamplingParams
from titan.bench.gpu.paid_replay import PaidReplayDrafter
from titan.bench.gpu.random_models import (
    DRAFT_OF_1B,
    DRAFT_OF_8B,
    LLAMA_1B,
    LLAMA_8B,
    Shape,
    as_transformers,
    continuation,
    make_decoder,
    weight_bytes_per_step,
)
from titan.bench.gpu.sections import Goal, Row, Section, Setting, Task
from titan.bench.gpu.timing import busy_seconds, synchronize
from titan.bench.peers.transformers_peer import ContinuousPeer, StaticPeer
from titan.bench.predict import expected_tokens
from titan.core.options import EngineConfig
from titan.core.request import Request
from titan.draft.base import DraftContext, Drafter
from titan.draft.registry import register
from titan.draft.replay import ReplayDrafter
from titan.engine import Engine
from titan.frontend import FrontEnd
from titan.kernels.backend import choose_backend
from titan.kernels.interfaces import Backend
from titan.models.decoder import Decoder

GOAL_ACCEPTANCE = 0.8
EXTREMES = (1.0, 0.0)
"""Acceptances that make the largest and the smallest passes."""
SPARE_STEPS = 6
"""In which the first requests decode already while the last prompts are computed."""
NUM_BATCHED_TOKENS = 8192
NUM_DRAFTS = 6

SPEED_UP_GOALS = {1: 2.2, 8: 1.6, 32: 1.2}
"""By batch, at `GOAL_ACCEPTANCE`."""
WEIGHT_SHARE_GOAL = 0.8
HOST_SHARE_GOAL = 0.05
HOST_SHARE_BATCH = 32

COLUMNS = {
    "tokens/s": ".0f",
    "x plain": ".2f",
    "tokens/step": ".2f",
    "expected": ".2f",
    "ms/step": ".3f",
    "weights' share": ".0%",
    "host": ".1%",
    "graphs": ".0%",
}
NOTES = (
    "{name}: tokens/s while all requests decode, and over Titan without speculation at the same batch; tokens/step per request, "
    "and what the acceptance promises for {num_drafts} draft tokens; weights' share: the time that the step's weights take at the "
    "speed of a copy, over the step; host: share of the step in which the device runs nothing; graphs: passes replayed as CUDA "
    "graphs. The draft ({draft} parameters) reads a tenth of what the target reads."
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared, and how long everything is, in tokens and steps."""

    target: Shape
    draft: Shape
    has_goals: bool = False
    batches: Sequence[int] = (1, 4, 8, 16, 32, 64, 128)
    acceptances: Sequence[float] = (0.6, 0.7, 0.8, 0.9)
    peer_batches: Sequence[int] = (1, 8, 32)
    prompt_len: int = 128
    min_rows: int = 512  # steps times requests of a window, so that acceptance is measured to a few per cent
    min_steps: int = 32
    num_warm_ups: int = 2  # at every extreme of the acceptance, so that graphs of all sizes are captured
    num_profiled: int = 8
    peer_output_lens: tuple[int, int] = (8, 40)  # their difference is timed, so that the prompts are not

    def num_steps(self, batch: int) -> int:
        """Steps of a window."""
        return max(self.min_rows // batch, self.min_steps)

    def max_output_len(self, batch: int) -> int:
        """More than a request emits."""
        num_others = len(EXTREMES) * self.num_warm_ups + self.num_profiled + SPARE_STEPS
        return (self.num_steps(batch) + num_others) * (NUM_DRAFTS + 1)

    @property
    def max_len(self) -> int:
        """More than any request has, prompt and output."""
        return self.prompt_len + self.max_output_len(1)

    def shrunk(self) -> Plan:
        """The plan at a size for a CPU."""
        return replace(
            self,
            target=Shape("tiny", 64, 128, 2, 4, 2, 16, vocab_size=300),
            draft=Shape("tinier", 32, 64, 1, 2, 1, 16, vocab_size=300),
            batches=(1, 3),
            acceptances=(GOAL_ACCEPTANCE,),
            peer_batches=(2,),
            prompt_len=6,
            min_rows=8,
            min_steps=3,
            num_warm_ups=1,
            num_profiled=1,
            peer_output_lens=(2, 4),
        )


@dataclass(frozen=True, slots=True)
class Window:
    """A run of steps."""

    seconds: float
    num_steps: int
    num_tokens: int
    graph_hit_rate: float | None
    busy_seconds: float | None  # of a step, by the profiler


class EndToEnd:
    """One target with its draft; models and engine are made when they are first needed."""

    def __init__(self, plan: Plan, setting: Setting) -> None:
        self.plan = plan
        self.setting = setting
        self.plain_rates: dict[int, float] = {}  # tokens per second by batch

    @cached_property
    def backend(self) -> Backend:
        """What the models and the engine run on."""
        return choose_backend(self.setting.device)

    @cached_property
    def target(self) -> Decoder:
        """The target."""
        return self._make_decoder(self.plan.target)

    @cached_property
    def replay(self) -> ReplayDrafter:
        """What dials the acceptance; recordings are given per run."""
        return ReplayDrafter({}, acceptance=1.0, vocab_size=self.plan.target.vocab_size, max_draft_tokens=NUM_DRAFTS)

    @cached_property
    def engine(self) -> Engine:
        """One engine for all runs of Titan, with and without speculation."""
        max_batch, plan = max(self.plan.batches), self.plan
        num_tokens = max(batch * (plan.prompt_len + plan.max_output_len(batch)) for batch in plan.batches)
        config = EngineConfig.of(
            dtype="bfloat16",
            max_draft_tokens=NUM_DRAFTS,
            draft_tree="chain",
            draft_sampling="greedy",
            max_batch_size=max_batch,
            max_num_batched_tokens=NUM_BATCHED_TOKENS,
            max_model_len=plan.max_len,
            num_kv_blocks=num_tokens // 16 + 2 * max_batch,
            enable_prefix_caching=False,
        )
        draft = self._make_decoder(self.plan.draft)

        def make_drafter(context: DraftContext) -> Drafter:
            return PaidReplayDrafter(draft, self.replay, context)

        name = f"replay at the cost of {self.plan.draft.name}"
        register(name, make_drafter)
        return Engine(config, self.target, name, backend=self.backend)

    @cached_property
    def transformers_model(self) -> Any:
        """The target in transformers."""
        return as_transformers(self.target, self.plan.target)

    def measure_titan(self, batch: int, acceptance: float | None) -> Row:
        """One window; ``None``: without speculation."""
        window = self.run_titan(batch, acceptance)
        rate, step = window.num_tokens / window.seconds, window.seconds / window.num_steps
        figures = {"tokens/s": rate, "tokens/step": window.num_tokens / window.num_steps / batch, "ms/step": step * 1e3}
        goals: list[Goal] = []
        if window.graph_hit_rate is not None:
            figures["graphs"] = window.graph_hit_rate
        if window.busy_seconds is not None:
            figures["host"] = 1 - window.busy_seconds / step
        if acceptance is None:
            self.plain_rates[batch] = rate
            if self.setting.copy_bandwidth is not None:
                figures["weights' share"] = weight_bytes_per_step(self.target) / self.setting.copy_bandwidth / step
                if batch == 1:
                    goals.append(Goal("share of the weight-bandwidth limit", WEIGHT_SHARE_GOAL, figures["weights' share"]))
            if batch == HOST_SHARE_BATCH and "host" in figures:
                goals.append(Goal("host share of the step", HOST_SHARE_GOAL, figures["host"], is_at_most=True))
        else:
            figures["expected"] = expected_tokens(acceptance, NUM_DRAFTS)
            if batch in self.plain_rates:
                figures["x plain"] = rate / self.plain_rates[batch]
                if acceptance == GOAL_ACCEPTANCE and batch in SPEED_UP_GOALS:
                    goals.append(Goal("speed-up", SPEED_UP_GOALS[batch], figures["x plain"]))
        return Row(figures, goals if self.plan.has_goals else ())

    def run_titan(self, batch: int, acceptance: float | None) -> Window:
        """Bring ``batch`` requests to their window, measure it, and end them.

        Raises:
            RuntimeError: the model has written something else than its weights say, or a request ended early.
        """
        engine, plan, vocab_size = self.engine, self.plan, self.plan.target.vocab_size
        prompts = self._prompts(batch)
        max_tokens = plan.max_output_len(batch)
        recordings = {tuple(prompt): continuation(prompt, max_tokens, vocab_size) for prompt in prompts}
        self.replay.recordings, self.replay.acceptance = recordings, 0.0
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, use_speculative=acceptance is not None)
        frontend = FrontEnd(engine)
        requests = [frontend.make_request(prompt, params) for prompt in prompts]
        with _running(engine, requests):
            while any(request.metrics.first_token_time is None for request in requests):
                engine.step()
                _check_running(requests)
            for extreme in EXTREMES:
                self.replay.acceptance = extreme
                self._steps(plan.num_warm_ups)
            self.replay.acceptance = acceptance or 0.0
            window = self._measure(plan.num_steps(batch), is_profiled=acceptance in (None, GOAL_ACCEPTANCE))
            _check_running(requests)
            for request in requests:
                expected = recordings[tuple(request.prompt_token_ids)][: request.num_output_tokens]
                if request.output_token_ids != expected:
                    raise RuntimeError(f"request {request.request_id} wrote other tokens than its weights say")
        return window

    def _steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()

    def _measure(self, num_steps: int, *, is_profiled: bool) -> Window:
        engine, device, num_profiled = self.engine, self.setting.device, self.plan.num_profiled
        passes = replace(engine.passes)
        num_tokens = engine.counters.num_emitted_tokens
        synchronize(device)
        start = time.perf_counter()
        self._steps(num_steps)
        synchronize(device)
        seconds = time.perf_counter() - start
        num_tokens = engine.counters.num_emitted_tokens - num_tokens
        num_replayed = engine.passes.num_replayed - passes.num_replayed
        num_passes = num_replayed + engine.passes.num_eager - passes.num_eager
        busy = busy_seconds(partial(self._steps, num_profiled), device) if is_profiled else None
        return Window(
            seconds,
            num_steps,
            num_tokens,
            num_replayed / num_passes if num_passes else None,
            None if busy is None else busy / num_profiled,
        )

    def measure_peer(self, batch: int, make_peer: Callable[[Any, int], Any]) -> Row:
        """A mode of transformers: seconds of a longer output less those of a shorter one, after a warm-up."""
        short, long = self.plan.peer_output_lens
        peer = make_peer(self.transformers_model, self.plan.prompt_len + long)
        prompts = self._prompts(batch)

        def run(output_len: int) -> float:
            found = peer.run([{"prompt": prompt, "output_len": output_len} for prompt in prompts], batch)
            return float(found["seconds"])

        run(short)
        seconds = run(long) - run(short)
        rate = batch * (long - short) / seconds
        figures = {"tokens/s": rate, "tokens/step": 1.0, "ms/step": seconds / (long - short) * 1e3}
        if batch in self.plain_rates:
            figures["x plain"] = rate / self.plain_rates[batch]
        return Row(figures)

    def _make_decoder(self, shape: Shape) -> Decoder:
        return make_decoder(shape, max_positions=self.plan.max_len, backend=self.backend, seed=self.setting.seed)

    def _prompts(self, batch: int) -> list[list[int]]:
        rng = np.random.default_rng(self.setting.seed)
        prompts: list[list[int]] = rng.integers(0, self.plan.target.vocab_size, (batch, self.plan.prompt_len)).tolist()
        return prompts


@contextmanager
def _running(engine: Engine, requests: Sequence[Request]) -> Iterator[None]:
    """Queue requests, and end those that are unfinished when the context does."""
    for request in requests:
        engine.scheduler.add(request)
    try:
        yield
    finally:
        for request in requests:
            if not request.is_finished:
                engine.scheduler.abort(request)


def _check_running(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.is_finished:
            raise RuntimeError(f"request {request.request_id} ended early: {request.error or request.finish_reason}")


PEERS: dict[str, Callable[[Any, int], Any]] = {
    "transformers generate": lambda model, _: StaticPeer(model),
    "transformers continuous batching": ContinuousPeer,
}


def make_tasks(plan: Plan, setting: Setting) -> Sequence[Task]:
    """Without speculation and with it, then transformers; what goals speak of comes first."""
    if setting.is_tiny:
        plan = plan.shrunk()
    bench = EndToEnd(plan, setting)
    batches = sorted(plan.batches, key=lambda batch: batch not in SPEED_UP_GOALS)
    others = [acceptance for acceptance in plan.acceptances if acceptance != GOAL_ACCEPTANCE]
    tasks = []
    for acceptances in ([None, GOAL_ACCEPTANCE], others):
        for batch, acceptance in product(batches, acceptances):
            what = "plain" if acceptance is None else f"acceptance {acceptance:g}"
            tasks.append(Task(f"{batch}, {what}", partial(bench.measure_titan, batch, acceptance), 4 if acceptance is None else 6))
    for (name, make_peer), batch in product(PEERS.items(), plan.peer_batches):
        tasks.append(Task(f"{batch}, {name}", partial(bench.measure_peer, batch, make_peer), 10, is_peer=True))
    return tasks


def _make_section(name: str, plan: Plan, seconds: float) -> Section:
    return Section(
        name,
        f"End to end, Llama of {plan.target.name} parameters, requests at once",
        NOTES.format(name=name, draft=plan.draft.name, num_drafts=NUM_DRAFTS),
        seconds=seconds,
        columns=COLUMNS,
        make_tasks=partial(make_tasks, plan),
    )


SECTION_8B = _make_section("end_to_end_8b", Plan(LLAMA_8B, DRAFT_OF_8B, has_goals=True), seconds=140)
SECTION_1B = _make_section("end_to_end_1b", Plan(LLAMA_1B, DRAFT_OF_1B), seconds=60)

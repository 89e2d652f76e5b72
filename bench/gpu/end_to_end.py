"""Tokens per second of whole engines: Titan with and without speculation, and transformers on the very same weights.

Every figure of Titan is of a window of steps in which all requests decode: it begins some steps after the last prompt is done, when
graphs are captured, and ends before a request does. With speculation, a draft model of a tenth of the target's cost runs in full,
and a recording, corrupted with a dialled probability, takes the place of its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from titan.bench.engine_run import make_idle, make_requests
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
from titan.bench.gpu.sections import Figures, Goal, Row, Section, Setting, Task, WrongNumbersError
from titan.bench.gpu.timing import busy_seconds, synchronize
from titan.bench.peers.transformers_peer import ContinuousPeer, StaticPeer
from titan.bench.predict import expected_tokens
from titan.bench.prompts import random_prompts
from titan.bench.samples import with_ratio
from titan.bench.workloads import Lengths, Workload, take_workload
from titan.core.options import EngineConfig
from titan.draft.base import DraftContext, Drafter
from titan.draft.registry import register
from titan.draft.replay import ReplayDrafter
from titan.engine import Engine
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

PEERS: dict[str, Callable[[Any, int], Any]] = {
    "transformers generate": lambda model, _: StaticPeer(model),
    "transformers continuous batching": ContinuousPeer,
}


def mode_name(acceptance: float | None) -> str:
    """What a mode of Titan is called; ``None``: without speculation."""
    return "plain" if acceptance is None else f"acceptance {acceptance:g}"


PLAIN, AT_GOAL = mode_name(None), mode_name(GOAL_ACCEPTANCE)
GOALS_OF_8B = {
    (1, PLAIN): Goal("weights' share", 0.8),
    (32, PLAIN): Goal("host", 0.05, is_at_most=True),
    (1, AT_GOAL): Goal("x plain", 2.2),
    (8, AT_GOAL): Goal("x plain", 1.6),
    (32, AT_GOAL): Goal("x plain", 1.2),
}
"""By requests and mode."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared, and how long everything is, in tokens and steps."""

    target: Shape
    draft: Shape
    batches: Sequence[int] = (1, 8, 32, 4, 16, 64, 128)  # the most important first, as with acceptances
    acceptances: Sequence[float] = (GOAL_ACCEPTANCE, 0.6, 0.7, 0.9)
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


TINY = Plan(
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


class EndToEnd:
    """One target with its draft; models and engine are made when they are first needed."""

    def __init__(self, plan: Plan, setting: Setting) -> None:
        self.plan = plan
        self.setting = setting

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

    def workload(self, num_requests: int, output_len: int) -> Workload:
        """Requests with random prompts."""
        prompts = random_prompts(Lengths(self.plan.prompt_len, self.plan.prompt_len), self.plan.target.vocab_size, self.setting.seed)
        return take_workload(prompts, num_requests, Lengths(output_len, output_len).stream(0))

    def measure_titan(self, batch: int, acceptance: float | None) -> Figures:
        """Bring ``batch`` requests to their window, measure it, and end them; ``None``: without speculation.

        Raises:
            WrongNumbersError: the model has written something else than its weights say.
            RuntimeError: a request ended early.
        """
        engine, plan, replay = self.engine, self.plan, self.replay
        workload = self.workload(batch, plan.max_output_len(batch))
        requests = make_requests(engine, workload, use_speculative=acceptance is not None)
        texts = [continuation(prompt, plan.max_output_len(batch), plan.target.vocab_size) for prompt in workload.prompts]
        replay.recordings = dict(zip(map(tuple, workload.prompts), texts, strict=True))
        replay.acceptance = 0.0

        def step(num_steps: int) -> None:
            for _ in range(num_steps):
                engine.step()

        def check_unfinished() -> None:
            if any(request.is_finished for request in requests):
                raise RuntimeError("a request ended early")

        try:
            for request in requests:
                engine.scheduler.add(request)
            while any(request.metrics.first_token_time is None for request in requests):
                step(1)
                check_unfinished()
            for replay.acceptance in EXTREMES:
                step(plan.num_warm_ups)
            replay.acceptance = acceptance or 0.0
            figures = self._measure_window(step, batch)
            if acceptance in (None, GOAL_ACCEPTANCE):
                busy = busy_seconds(partial(step, plan.num_profiled), self.setting.device)
                if busy is not None:
                    figures["host"] = 1 - busy / plan.num_profiled / (figures["ms/step"] / 1e3)
            check_unfinished()
        finally:
            make_idle(engine)
        if any(request.output_token_ids != text[: request.num_output_tokens] for request, text in zip(requests, texts, strict=True)):
            raise WrongNumbersError("other tokens were written than the weights say")
        if acceptance is not None:
            figures["expected"] = expected_tokens(acceptance, NUM_DRAFTS)
        elif self.setting.copy_bandwidth is not None:
            floor = weight_bytes_per_step(self.target) / self.setting.copy_bandwidth
            figures["weights' share"] = floor / (figures["ms/step"] / 1e3)
        return figures

    def _measure_window(self, step: Callable[[int], None], batch: int) -> dict[str, float]:
        engine, num_steps = self.engine, self.plan.num_steps(batch)
        passes, num_tokens = replace(engine.passes), engine.counters.num_emitted_tokens
        synchronize(self.setting.device)
        start = time.perf_counter()
        step(num_steps)
        synchronize(self.setting.device)
        seconds = time.perf_counter() - start
        num_tokens = engine.counters.num_emitted_tokens - num_tokens
        figures = {
            "tokens/s": num_tokens / seconds,
            "tokens/step": num_tokens / num_steps / batch,
            "ms/step": 1e3 * seconds / num_steps,
        }
        num_replayed = engine.passes.num_replayed - passes.num_replayed
        num_passes = num_replayed + engine.passes.num_eager - passes.num_eager
        return figures | ({"graphs": num_replayed / num_passes} if num_passes else {})

    def measure_peer(self, batch: int, make_peer: Callable[[Any, int], Any]) -> Figures:
        """A mode of transformers: seconds of a longer output less those of a shorter one, after a warm-up."""
        short, long = self.plan.peer_output_lens
        peer = make_peer(self.transformers_model, self.plan.prompt_len + long)
        prompts = self.workload(batch, long).prompts

        def run(output_len: int) -> float:
            found = peer.run([{"prompt": prompt, "output_len": output_len} for prompt in prompts], batch)
            return float(found["seconds"])

        run(short)
        seconds, num_steps = run(long) - run(short), long - short
        return {"tokens/s": batch * num_steps / seconds, "tokens/step": 1.0, "ms/step": 1e3 * seconds / num_steps}

    def _make_decoder(self, shape: Shape) -> Decoder:
        return make_decoder(shape, max_positions=self.plan.max_len, backend=self.backend, seed=self.setting.seed)


def make_tasks(plan: Plan, setting: Setting) -> Sequence[Task]:
    """Without speculation and with it, then transformers; what goals speak of comes first."""
    bench = EndToEnd(TINY if setting.is_tiny else plan, setting)
    plan = bench.plan
    first, *others = plan.acceptances
    runs: list[tuple[int, float | None]] = [(batch, each) for batch in plan.batches for each in (None, first)]
    runs += [(batch, each) for batch in plan.batches for each in others]
    return [
        *(
            Task({"requests": batch, "mode": mode_name(each)}, partial(bench.measure_titan, batch, each), 4 if each is None else 6)
            for batch, each in runs
        ),
        *(
            Task({"requests": batch, "mode": name}, partial(bench.measure_peer, batch, make_peer), 10, is_peer=True)
            for name, make_peer in PEERS.items()
            for batch in plan.peer_batches
        ),
    ]


def goals(by_row: Mapping[tuple[object, object], Goal], row: Row) -> Sequence[Goal]:
    """What rows are held to, by requests and mode."""
    goal = by_row.get((row.labels["requests"], row.labels["mode"]))
    return () if goal is None else (goal,)


def make_section(name: str, plan: Plan, goals_by_row: Mapping[tuple[object, object], Goal], seconds: float) -> Section:
    """One pair of models."""
    return Section(
        name,
        f"End to end, Llama of {plan.target.name} parameters, requests at once",
        f"{name}: tokens/s while all requests decode, and over Titan without speculation at the same batch; tokens/step per request, "
        f"and what the acceptance promises for {NUM_DRAFTS} draft tokens; weights' share: the time that the step's weights take at "
        "the speed of a copy, over the step; host: share of the step in which the device runs nothing; graphs: passes replayed as "
        f"CUDA graphs. The draft ({plan.draft.name} parameters) reads a tenth of what the target reads.",
        seconds=seconds,
        columns={
            "tokens/s": ".0f",
            "x plain": ".2f",
            "tokens/step": ".2f",
            "expected": ".2f",
            "ms/step": ".3f",
            "weights' share": ".0%",
            "host": ".1%",
            "graphs": ".0%",
        },
        make_tasks=partial(make_tasks, plan),
        compare=partial(with_ratio, name="x plain", figure="tokens/s", mode=PLAIN),
        goals=partial(goals, goals_by_row),
    )


SECTION_8B = make_section("end_to_end_8b", Plan(LLAMA_8B, DRAFT_OF_8B), GOALS_OF_8B, seconds=140)
SECTION_1B = make_section("end_to_end_1b", Plan(LLAMA_1B, DRAFT_OF_1B), {}, seconds=60)

"""Tokens per second of whole engines: Titan with and without speculation, and transformers on the very same weights.

Every figure of Titan is of a window of steps in which all requests decode: it begins some steps after the last prompt is done, when
graphs are captured, and ends before a request does. With speculation, a draft model of a tenth of the target's cost runs in full,
and a recording, corrupted with a dialled probability, takes the place of its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import repeat
from typing import Any

import numpy as np
from transformers import LlamaConfig

from titan.bench.engine_run import make_idle, make_requests
from titan.bench.gpu import random_models
from titan.bench.gpu.sections import Figures, Section, Setting, Task, WrongNumbersError
from titan.bench.gpu.timing import busy_seconds, synchronize
from titan.bench.peers.transformers_peer import ContinuousPeer, StaticPeer
from titan.bench.predict import expected_tokens
from titan.bench.prompts import random_prompts
from titan.bench.samples import with_ratio
from titan.bench.workloads import Lengths, Workload, take_workload
from titan.core.options import EngineConfig
from titan.core.step import StepPlan
from titan.core.trees import DraftTrees
from titan.draft.base import DraftContext
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.registry import register
from titan.draft.replay import ReplayDrafter
from titan.engine import Engine
from titan.kernels.backend import choose_backend
from titan.kernels.interfaces import Backend
from titan.models.decoder import Decoder

NUM_DRAFTS = 6
NUM_WARM_UPS = 2
"""Steps at each extreme of the acceptance, so that graphs of all sizes are captured."""
NUM_PROFILED = 8
"""Steps after a window by which it is measured how busy the device is."""
NUM_OTHERS = 6 + 2 * NUM_WARM_UPS + NUM_PROFILED
"""Steps outside the window, those included in which the first requests decode while the last prompts are computed."""
SHORT, LONG = 8, 40
"""Outputs of transformers in tokens; the difference is timed, so that the prompts are not."""

PEERS: dict[str, Callable[[Any, int], Any]] = {
    "transformers generate": lambda model, _: StaticPeer(model),
    "transformers continuous batching": ContinuousPeer,
}
PLAIN = "plain"
MODES = {PLAIN: None, **{f"acceptance {each:g}": each for each in (0.8, 0.6, 0.7, 0.9)}}
"""Of Titan: the acceptance of draft tokens, or no speculation; the most important first."""
AT_GOAL = "acceptance 0.8"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared, and for how long; ``goals`` are by requests and mode."""

    target: LlamaConfig
    draft: LlamaConfig
    goals: Mapping[tuple[int, str], Figures] = field(default_factory=dict)
    modes: Sequence[str] = tuple(MODES)
    batches: Sequence[int] = (1, 8, 32, 4, 16, 64, 128)  # the most important first
    peer_batches: Sequence[int] = (1, 8, 32)
    prompt_len: int = 128
    min_rows: int = 512  # steps times requests of a window, so that acceptance is measured to a few per cent
    min_steps: int = 32

    def num_steps(self, batch: int) -> int:
        return max(self.min_rows // batch, self.min_steps)

    def max_output_len(self, batch: int) -> int:
        """More tokens than a request emits."""
        return (self.num_steps(batch) + NUM_OTHERS) * (NUM_DRAFTS + 1)


PLAN_8B = Plan(
    random_models.LLAMA_8B,
    random_models.DRAFT_OF_8B,
    {
        (1, PLAIN): {"weights' share": 0.8},
        (32, PLAIN): {"busy": 0.95},
        (1, AT_GOAL): {"x plain": 2.2},
        (8, AT_GOAL): {"x plain": 1.6},
        (32, AT_GOAL): {"x plain": 1.2},
    },
)
PLAN_1B = Plan(random_models.LLAMA_1B, random_models.DRAFT_OF_1B)
TINY = Plan(
    target=random_models.llama(64, 128, 2, 4, 2, 16, vocab_size=300),
    draft=random_models.llama(32, 64, 1, 2, 1, 16, vocab_size=300),
    modes=(PLAIN, AT_GOAL),
    batches=(1, 3),
    peer_batches=(2,),
    prompt_len=6,
    min_rows=8,
    min_steps=3,
)


class PaidReplayDrafter(DraftModelDrafter):
    """Proposes what a `ReplayDrafter` proposes, after all the passes that a draft model takes for as many tokens.

    The draft model drafts greedy chains (so the engine's ``draft_tree`` must be "chain"), writes their KV and hears what was
    accepted; what it would have proposed does not matter. Its trees stay on the device, as they do without a recording: one more
    copy brings the recorded tokens there.
    """

    def __init__(self, model: Decoder, replay: ReplayDrafter, context: DraftContext) -> None:
        super().__init__("replay, paid", model, context)
        self.replay = replay

    def propose(self, plan: StepPlan) -> DraftTrees:
        recordings = self.replay.propose(plan)
        # no more is drafted than was recorded; it may be less
        drafted = super().propose(replace(plan, draft_budgets=[recording.num_nodes for recording in recordings]))
        pairs = zip(recordings, drafted.counts.tolist(), strict=True)
        [token_ids] = self._context.backend.upload([np.concatenate([recording.token_ids[:count] for recording, count in pairs])])
        return replace(drafted, nodes=drafted.nodes._replace(token_ids=token_ids))


class EndToEnd:
    """One target with its draft, and one engine for all runs of Titan, with and without speculation."""

    def __init__(self, plan: Plan, setting: Setting, backend: Backend) -> None:
        self.plan = plan
        self.setting = setting
        self.replay = ReplayDrafter({}, acceptance=1.0, vocab_size=plan.target.vocab_size, max_draft_tokens=NUM_DRAFTS)
        self.target = random_models.make_decoder(plan.target, backend=backend, seed=setting.seed)
        draft = random_models.make_decoder(plan.draft, backend=backend, seed=setting.seed)
        name = f"replay at the cost of {plan.draft.num_hidden_layers} layers"
        register(name, lambda context: PaidReplayDrafter(draft, self.replay, context))
        max_batch = max(plan.batches)
        num_tokens = max(batch * (plan.prompt_len + plan.max_output_len(batch)) for batch in plan.batches)
        config = EngineConfig.of(
            dtype="bfloat16",
            max_draft_tokens=NUM_DRAFTS,
            draft_tree="chain",
            draft_sampling="greedy",
            max_batch_size=max_batch,
            max_num_batched_tokens=8192,
            max_model_len=plan.prompt_len + plan.max_output_len(1),
            num_kv_blocks=num_tokens // 16 + 2 * max_batch,
            enable_prefix_caching=False,
        )
        self.engine = Engine(config, self.target, name, backend=backend)

    @cached_property
    def transformers_model(self) -> Any:
        """The target in transformers."""
        return random_models.as_transformers(self.target, self.plan.target)

    def workload(self, num_requests: int, output_len: int) -> Workload:
        """Requests with random prompts."""
        length = Lengths(self.plan.prompt_len, self.plan.prompt_len)
        prompts = random_prompts(length, self.plan.target.vocab_size, self.setting.seed)
        return take_workload(prompts, num_requests, repeat(output_len))

    def measure_titan(self, batch: int, mode: str) -> Figures:
        """Bring ``batch`` requests to their window, measure it, and end them.

        Raises:
            WrongNumbersError: the model has written something else than its weights say.
            RuntimeError: a request ended early.
        """
        engine, device, acceptance = self.engine, self.setting.device, MODES[mode]
        output_len, num_steps = self.plan.max_output_len(batch), self.plan.num_steps(batch)
        vocab_size, workload = self.plan.target.vocab_size, self.workload(batch, output_len)
        requests = make_requests(engine, workload, use_speculative=acceptance is not None)
        texts = [[(prompt[-1] + 1 + i) % vocab_size for i in range(output_len)] for prompt in workload.prompts]
        self.replay.recordings = dict(zip(map(tuple, workload.prompts), texts, strict=True))

        def step(num_steps: int, acceptance: float | None) -> None:
            self.replay.acceptance = acceptance or 0.0
            for _ in range(num_steps):
                engine.step()
            synchronize(device)
            if any(request.is_finished for request in requests):
                raise RuntimeError("a request ended early")

        try:
            for request in requests:
                engine.scheduler.add(request)
            while any(request.metrics.first_token_time is None for request in requests):
                step(1, 0.0)
            step(NUM_WARM_UPS, 1.0)
            step(NUM_WARM_UPS, 0.0)
            passes, num_tokens = engine.passes, engine.counters.num_emitted_tokens
            passes.num_replayed = passes.num_eager = 0
            start = time.perf_counter()
            step(num_steps, acceptance)
            seconds = time.perf_counter() - start
            num_tokens, graphs = engine.counters.num_emitted_tokens - num_tokens, passes.hit_rate
            is_profiled = mode in (PLAIN, AT_GOAL)
            busy = busy_seconds(partial(step, NUM_PROFILED, acceptance), device) if is_profiled else None
        finally:
            make_idle(engine)
        pairs = zip(requests, texts, strict=True)
        if any(request.output_token_ids != text[: request.num_output_tokens] for request, text in pairs):
            raise WrongNumbersError("other tokens were written than the weights say")
        bandwidth, weights = self.setting.copy_bandwidth, random_models.weight_bytes_per_step(self.target)
        found = {
            "tokens/s": num_tokens / seconds,
            "tokens/step": num_tokens / num_steps / batch,
            "expected": None if acceptance is None else expected_tokens(acceptance, NUM_DRAFTS),
            "ms/step": 1e3 * seconds / num_steps,
            "weights' share": weights / bandwidth * num_steps / seconds if bandwidth and acceptance is None else None,
            "busy": None if busy is None else busy / NUM_PROFILED * num_steps / seconds,
            "graphs": graphs,
        }
        return {name: figure for name, figure in found.items() if figure is not None}

    def measure_peer(self, batch: int, name: str) -> Figures:
        """Time a mode of transformers, after a warm-up."""
        peer = PEERS[name](self.transformers_model, self.plan.prompt_len + LONG)
        prompts = self.workload(batch, LONG).prompts

        def run(output_len: int) -> float:
            found = peer.run([{"prompt": prompt, "output_len": output_len} for prompt in prompts], batch)
            return float(found["seconds"])

        run(SHORT)
        seconds, num_steps = run(LONG) - run(SHORT), LONG - SHORT
        return {"tokens/s": batch * num_steps / seconds, "tokens/step": 1.0, "ms/step": 1e3 * seconds / num_steps}


def make_tasks(plan: Plan, setting: Setting) -> Sequence[Task]:
    """Without speculation and with it, then transformers; what goals speak of comes first."""
    plan = TINY if setting.is_tiny else plan
    bench = EndToEnd(plan, setting, choose_backend(setting.device))
    runs = [(batch, mode) for modes in (plan.modes[:2], plan.modes[2:]) for batch in plan.batches for mode in modes]
    peer_runs = [(batch, name) for name in PEERS for batch in plan.peer_batches]

    def task(batch: int, mode: str, measure: Callable[[int, str], Figures], seconds: float) -> Task:
        goals = plan.goals.get((batch, mode), {})
        return Task({"requests": batch, "mode": mode}, partial(measure, batch, mode), seconds, mode in PEERS, goals)

    return [
        *(task(*run, bench.measure_titan, 4 if run[1] == PLAIN else 6) for run in runs),
        *(task(*run, bench.measure_peer, 10) for run in peer_runs),
    ]


def make_section(name: str, title: str, plan: Plan, seconds: float) -> Section:
    """The section of a plan."""
    return Section(
        name,
        f"End to end, {title}, requests at once",
        "End to end: tokens/s while all requests decode, x plain over Titan without speculation at the same batch; tokens/step per "
        f"request, and expected of the acceptance for {NUM_DRAFTS} draft tokens; weights' share: the time that the step's weights "
        "take at the speed of a copy, over the step; busy: share of the step in which the device runs something; graphs: passes "
        "replayed as CUDA graphs. Drafts read a tenth of what their targets read.",
        seconds,
        columns={
            "tokens/s": ".0f",
            "x plain": ".2f",
            "tokens/step": ".2f",
            "expected": ".2f",
            "ms/step": ".3f",
            "weights' share": ".0%",
            "busy": ".1%",
            "graphs": ".0%",
        },
        make_tasks=partial(make_tasks, plan),
        compare=partial(with_ratio, name="x plain", figure="tokens/s", mode=PLAIN),
    )


SECTION_8B = make_section("end_to_end_8b", "Llama of 8 B parameters with a draft of 0.75 B", PLAN_8B, 140)
SECTION_1B = make_section("end_to_end_1b", "Llama of 1 B parameters with a draft of 0.12 B", PLAN_1B, 60)

"""Tokens per second of whole engines, with and without speculation.

Every figure of decoding is of a window of steps in which all requests decode: it begins some steps after the last prompt is done,
when graphs are captured, and ends before a request does. With speculation, a draft model runs in full, and a recording, corrupted
with a dialled probability, takes the place of its tokens; sampled ones stay, and are all right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig

from titan.bench.engine_run import make_idle, make_requests
from titan.bench.gpu import random_models
from titan.bench.gpu.interpreted import InterpretedBackend
from titan.bench.gpu.random_models import known_text
from titan.bench.gpu.sections import Figures, Row, Section, Setting, Task, WrongNumbersError
from titan.bench.gpu.timing import busy_seconds, heaviest, synchronize
from titan.bench.prompts import random_prompts
from titan.bench.samples import Label, with_ratio
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
from titan.kernels.triton.tools import INTERPRETED
from titan.models.decoder import Decoder

NUM_DRAFTS = 6
NUM_WARM_UPS = 2
"""Steps at each extreme of the acceptance, so that graphs of all sizes are captured."""
NUM_PROFILED = 8
"""Steps after a window by which it is measured how busy the device is."""
NUM_OTHERS = 6 + 2 * NUM_WARM_UPS + 2 * NUM_PROFILED
"""Steps outside the window, those included in which the first requests decode while the last prompts are computed."""

SAMPLED = "sampled"
"""The drafter that samples with the first draft; those beside recordings have the names of their drafts."""
NO_DRAFT = "-"
SAMPLING = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}


@dataclass(frozen=True, slots=True)
class Mode:
    """A way in which Titan generates."""

    acceptance: float | None = None  # of draft tokens, each on its own; None: no speculation
    drafter: str | None = None  # None: a draft beside a recording
    options: Mapping[str, Any] = field(default_factory=dict)  # of the requests


PLAIN, AT_GOAL = "plain", "acceptance 0.8"
PLAIN_SAMPLED, DRAFTS_SAMPLED = "plain, sampled", "drafts sampled, acceptance 1"
MODES = {
    PLAIN: Mode(),
    **{f"acceptance {each:g}": Mode(each) for each in (0.8, 0.6, 0.7, 0.9)},
    PLAIN_SAMPLED: Mode(options=SAMPLING),
    DRAFTS_SAMPLED: Mode(1.0, SAMPLED, SAMPLING),
}
"""Modes of Titan, the most important first."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared, and for how long; ``goals`` are by requests and mode."""

    target: LlamaConfig
    drafts: Mapping[str, tuple[LlamaConfig, int | None]]  # with the bits of weights; the first is measured in all modes and batches
    goals: Mapping[tuple[int, str], Figures] = field(default_factory=dict)
    modes: Sequence[str] = (PLAIN, AT_GOAL, "acceptance 0.6", "acceptance 0.7", "acceptance 0.9")
    batches: Sequence[int] = (1, 8, 32, 128, 40, 72, 4, 16, 64)  # the most important first
    few_batches: Sequence[int] = (1, 8, 32)  # when sampling, and with other drafts
    prefills: Sequence[tuple[int, int]] = ((1, 512), (1, 2048), (16, 512))  # requests, tokens each
    profiled: Sequence[int] = (1, 32)
    num_swapping: int = 8  # requests
    prompt_len: int = 128
    min_rows: int = 512  # steps times requests of a window, so that acceptance is measured to a few per cent
    min_steps: int = 32

    def num_steps(self, batch: int) -> int:
        return max(self.min_rows // batch, self.min_steps)

    def max_output_len(self, batch: int) -> int:
        """More tokens than a request emits."""
        return (self.num_steps(batch) + NUM_OTHERS) * (NUM_DRAFTS + 1)


PLAN = Plan(
    random_models.LLAMA_8B,
    {
        "1 B": (random_models.LLAMA_1B, None),
        "1 B, 8 bits": (random_models.LLAMA_1B, 8),
        "0.1 B": (random_models.DRAFT_OF_8B, None),
        "0.1 B, 8 bits": (random_models.DRAFT_OF_8B, 8),
    },
    {
        (1, PLAIN): {"weights' share": 0.8},
        (32, PLAIN): {"busy": 0.8},
        (1, AT_GOAL): {"x plain": 2.2},
        (8, AT_GOAL): {"x plain": 1.6},
        (32, AT_GOAL): {"x plain": 1.2, "busy": 0.8},
    },
)
TINY = Plan(
    target=random_models.llama(64, 128, 2, 4, 2, 16, vocab_size=300),
    drafts=dict.fromkeys(("tiny", "tiny, too"), (random_models.llama(32, 64, 1, 2, 1, 16, vocab_size=300), None)),
    modes=(PLAIN, AT_GOAL),
    batches=(1, 3),
    few_batches=(1,),
    prefills=((2, 20),),
    profiled=(1,),
    num_swapping=2,
    prompt_len=6,
    min_rows=4,
    min_steps=2,
)


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Tokens of a step with a chain of drafts, final token included (Leviathan et al. 2023, equation 1)."""
    return sum(acceptance**depth for depth in range(num_drafts + 1))


class PaidReplayDrafter(DraftModelDrafter):
    """Proposes what a `ReplayDrafter` proposes, after all the passes that a draft model takes for as many tokens.

    The draft model drafts greedy chains (so the engine's ``draft_tree`` must be "chain"), writes their KV and hears what was
    accepted; ``num_wrong`` counts the tokens, of those that it would have proposed, that its weights do not say. Its trees stay on
    the device, as they do without a recording: one more copy brings the recorded tokens there, and those that the weights say.
    """

    def __init__(self, name: str, model: Decoder, replay: ReplayDrafter, num_wrong: Tensor, context: DraftContext) -> None:
        super().__init__(name, model, context)
        self.replay = replay
        self.num_wrong = num_wrong  # [], on the device

    def propose(self, plan: StepPlan) -> DraftTrees:
        recordings = self.replay.propose(plan)
        # no more is drafted than was recorded; it may be less
        drafted = super().propose(replace(plan, draft_budgets=[recording.num_nodes for recording in recordings]))
        counts, roots = drafted.counts.tolist(), [request.token_ids[-1] for request in plan.requests]
        recorded = [recording.token_ids[:count] for recording, count in zip(recordings, counts, strict=True)]
        said = [known_text(root, count, self.vocab_size) for root, count in zip(roots, counts, strict=True)]
        token_ids, expected = self.context.backend.upload([np.concatenate(recorded), np.concatenate(said)])
        self.num_wrong += (drafted.nodes.token_ids != expected).sum()
        return replace(drafted, nodes=drafted.nodes._replace(token_ids=token_ids))


class EndToEnd:
    """One target with its drafts, and one engine for all runs of Titan, with and without speculation."""

    def __init__(self, plan: Plan, setting: Setting, backend: Backend) -> None:
        self.plan = plan
        self.setting = setting
        self.replay = ReplayDrafter({}, acceptance=1.0, vocab_size=plan.target.vocab_size, max_draft_tokens=NUM_DRAFTS)
        self.target = random_models.make_decoder(plan.target, backend=backend, seed=setting.seed)
        drafts = {
            name: random_models.make_decoder(config, backend=backend, seed=setting.seed, weight_bits=weight_bits)
            for name, (config, weight_bits) in plan.drafts.items()
        }
        self.num_wrong = torch.zeros((), dtype=torch.int64, device=backend.device)
        for name, draft in drafts.items():
            register(name, partial(PaidReplayDrafter, name, draft, self.replay, self.num_wrong))
        first, draft = next(iter(drafts.items()))
        register(SAMPLED, lambda context: DraftModelDrafter(SAMPLED, draft, replace(context, draft_sampling="sampled")))
        max_batch = max(plan.batches)
        num_tokens = max(batch * (plan.prompt_len + plan.max_output_len(batch)) for batch in plan.batches)
        config = EngineConfig.of(
            dtype="bfloat16",
            speculation="fixed",
            max_draft_tokens=NUM_DRAFTS,
            draft_tree="chain",
            draft_sampling="greedy",
            max_batch_size=max_batch,
            max_num_batched_tokens=8192,
            max_model_len=plan.prompt_len + plan.max_output_len(1),
            num_kv_blocks=num_tokens // 16 + 2 * max_batch,
            enable_prefix_caching=False,
        )
        self.engine = Engine(config, self.target, first, backend=backend)

    def workload(self, num_requests: int, output_len: int, prompt_len: int | None = None) -> Workload:
        """Requests with random prompts."""
        length = prompt_len or self.plan.prompt_len
        prompts = random_prompts(Lengths(length, length), self.plan.target.vocab_size, self.setting.seed)
        return take_workload(prompts, num_requests, repeat(output_len))

    @contextmanager
    def window(self, batch: int, mode: str, draft: str) -> Iterator[Callable[[int], float]]:
        """Bring ``batch`` requests to their window, and end them after it; yields a function that runs steps and returns seconds.

        Raises:
            WrongNumbersError: the model or its draft has written something else than its weights say.
            RuntimeError: a request ended early.
        """
        engine, vocab_size, acceptance = self.engine, self.plan.target.vocab_size, MODES[mode].acceptance
        if acceptance is not None and engine.drafter.name != (drafter := MODES[mode].drafter or draft):
            engine.swap_draft(drafter)
        output_len = self.plan.max_output_len(batch)
        workload = self.workload(batch, output_len)
        requests = make_requests(engine, workload, use_speculative=acceptance is not None, **MODES[mode].options)
        texts = [known_text(prompt[-1], output_len, vocab_size).tolist() for prompt in workload.prompts]
        self.replay.recordings = dict(zip(map(tuple, workload.prompts), texts, strict=True))

        def step(num_steps: int, acceptance: float = acceptance or 0.0) -> float:
            self.replay.acceptance = acceptance
            start = time.perf_counter()
            for _ in range(num_steps):
                engine.step()
            synchronize(self.setting.device)
            if any(request.is_finished for request in requests):
                raise RuntimeError("a request ended early")
            return time.perf_counter() - start

        self.num_wrong.zero_()
        try:
            for request in requests:
                engine.scheduler.add(request)
            while any(request.metrics.first_token_time is None for request in requests):
                step(1, 0.0)
            step(NUM_WARM_UPS, 1.0)
            step(NUM_WARM_UPS, 0.0)
            yield step
        finally:
            make_idle(engine)
        pairs = zip(requests, texts, strict=True)
        if any(request.output_token_ids != text[: request.num_output_tokens] for request, text in pairs):
            raise WrongNumbersError("other tokens were written than the weights say")
        if num_wrong := int(self.num_wrong):
            raise WrongNumbersError(f"the draft would have proposed {num_wrong} tokens that its weights do not say")

    def measure_titan(self, batch: int, mode: str, draft: str) -> Figures:
        """Measure a window."""
        passes, counters, num_steps = self.engine.passes, self.engine.counters, self.plan.num_steps(batch)
        acceptance = MODES[mode].acceptance
        with self.window(batch, mode, draft) as step:
            num_tokens = counters.num_emitted_tokens
            passes.num_replayed = passes.num_eager = 0
            seconds = step(num_steps)
            num_tokens, graphs = counters.num_emitted_tokens - num_tokens, passes.hit_rate
            work = partial(step, NUM_PROFILED)
            is_profiled = mode in (PLAIN, AT_GOAL)
            busy = busy_seconds(work, self.setting.device) if is_profiled else None
            parts = heaviest(work, self.setting.device, NUM_PROFILED) if is_profiled and batch in self.plan.profiled else {}
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
        return {name: figure for name, figure in found.items() if figure is not None} | parts

    def measure_swap(self, batch: int, mode: str, draft: str) -> Figures:
        """Change the draft in the middle of a window, for another one like it: what the change costs, and the step after it."""
        engine, device, num_steps = self.engine, self.setting.device, self.plan.num_steps(batch) // 2
        with self.window(batch, mode, draft) as step:
            before = step(num_steps)
            start = time.perf_counter()
            engine.swap_draft(engine.drafter.name)
            synchronize(device)
            swap = time.perf_counter() - start
            if device.type == "cuda":
                torch.cuda.empty_cache()  # what graphs of the target still write to must not be gone
            first, warm_up, after = step(1), step(NUM_WARM_UPS), step(num_steps)
        found = {"swap, ms": swap, "first step, ms": first, "warm-up, ms": warm_up, "ms/step": after / num_steps}
        return {**{name: 1e3 * seconds for name, seconds in found.items()}, "x before": after / before}

    def measure_prefill(self, num_requests: int, prompt_len: int) -> Figures:
        """Time prompts in chunks, after a warm-up."""
        engine, device = self.engine, self.setting.device
        for _ in range(2):
            num_steps, requests = 0, make_requests(engine, self.workload(num_requests, 2, prompt_len), use_speculative=False)
            for request in requests:
                engine.scheduler.add(request)
            start = time.perf_counter()
            while any(request.metrics.first_token_time is None for request in requests):
                engine.step()
                num_steps += 1
            synchronize(device)
            seconds = time.perf_counter() - start
            make_idle(engine)
        rate, peak = num_requests * prompt_len / seconds, self.setting.peak
        # the output head runs for the last token of a prompt alone
        num_weights = sum(each.numel() for name, each in self.target.named_parameters() if name not in ("embedding", "lm_head"))
        figures = {"prompt tokens/s": rate, "ms/step": 1e3 * seconds / num_steps}
        return figures | ({"of peak": 2 * num_weights * rate / peak} if peak else {})


def make_tasks(setting: Setting) -> Sequence[Task]:
    """Without speculation and with it, then the rest; what goals speak of comes first."""
    plan = TINY if setting.is_tiny else PLAN
    plan = replace(plan, batches=setting.batches or plan.batches)
    bench = EndToEnd(plan, setting, InterpretedBackend() if INTERPRETED else choose_backend(setting.device))
    first, *others = plan.drafts

    def task(batch: int, mode: str, draft: str, figures: Callable[[], Figures], seconds: float) -> Task:
        labels: Mapping[str, Label] = {"requests": batch, "mode": mode, "draft": draft}
        return Task(labels, figures, seconds, goals=plan.goals.get((batch, mode), {}))

    def run(batch: int, mode: str, draft: str = first) -> Task:
        is_plain = MODES[mode].acceptance is None
        draft = NO_DRAFT if is_plain else draft
        return task(batch, mode, draft, partial(bench.measure_titan, batch, mode, draft), 4 if is_plain else 8)

    swap = partial(bench.measure_swap, plan.num_swapping, AT_GOAL, first)
    tasks = [
        *(run(batch, mode) for batch in plan.few_batches for mode in plan.modes[:2]),
        *(run(batch, AT_GOAL, draft) for draft in others for batch in plan.few_batches),
        *(run(batch, mode) for batch in plan.batches if batch not in plan.few_batches for mode in plan.modes[:2]),
        *(task(n, f"prefill of {size}", NO_DRAFT, partial(bench.measure_prefill, n, size), 4) for n, size in plan.prefills),
        task(plan.num_swapping, "swap of the draft", first, swap, 8),
        *(run(batch, mode) for mode in (PLAIN_SAMPLED, DRAFTS_SAMPLED) for batch in plan.few_batches),
        *(run(batch, mode) for batch in plan.batches for mode in plan.modes[2:]),
    ]
    return [each for each in tasks if not setting.batches or each.labels["requests"] in setting.batches]


def compare(rows: Sequence[Row]) -> list[Row]:
    """Add tokens/s over those without speculation at the same batch; sampled drafts are over plain sampling."""
    over = {mode: with_ratio(rows, "x plain", "tokens/s", mode=mode, draft=NO_DRAFT) for mode in (PLAIN, PLAIN_SAMPLED)}
    pairs = zip(over[PLAIN], over[PLAIN_SAMPLED], strict=True)
    return [sampled if sampled.labels.get("mode") == DRAFTS_SAMPLED else greedy for greedy, sampled in pairs]


SECTION = Section(
    "end_to_end_8b",
    "End to end, Llama of 8 B parameters with drafts of 1 B and 0.1 B, requests at once",
    "End to end: tokens/s while all requests decode, x plain over Titan without speculation at the same batch, which "
    "samples, too, where drafts are sampled; tokens/step per request, and expected of the acceptance for "
    f"{NUM_DRAFTS} draft tokens; weights' share: the time that the step's weights take at the speed of a copy, over the step; "
    "busy: share of the step in which the device runs something; graphs: passes replayed as CUDA graphs; of peak: "
    "operations of the prompts' products, over those of a large product in the same time; x before: a step after a swap "
    "of the draft over one before; start: until the models are made, and all that the engine needs is compiled and recorded.",
    seconds=200,
    columns={
        "tokens/s": ".0f",
        "x plain": ".2f",
        "tokens/step": ".2f",
        "expected": ".2f",
        "ms/step": ".3f",
        "weights' share": ".0%",
        "busy": ".1%",
        "graphs": ".0%",
        "prompt tokens/s": ".0f",
        "of peak": ".0%",
        "swap, ms": ".1f",
        "first step, ms": ".1f",
        "warm-up, ms": ".1f",
        "x before": ".2f",
        "start, s": ".1f",
    },
    make_tasks=make_tasks,
    compare=compare,
)

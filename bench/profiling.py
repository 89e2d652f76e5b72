"""Where the time of Titan's steps goes, measured from outside, but for what is a part of one call."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from titan import SamplingParams
from titan.bench.workloads import Workload
from titan.draft.draft_model import DraftModelDrafter
from titan.engine import Engine
from titan.frontend import FrontEnd
from titan.kernels.cpu.decoder import GrowingStruct
from titan.kernels.cpu.runner import CompiledRunner
from titan.kernels.interfaces import Runner
from titan.models.decoder import Decoder


@dataclass(slots=True)
class Timer:
    """Calls of one function."""

    num_calls: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Shares:
    """Parts of the time in `Engine.step`, each between 0 and 1; host, draft and target add up to 1."""

    num_steps: int
    step_seconds: float  # mean
    host: float  # all but the forward passes of target and draft
    draft: float  # forward passes of the draft
    target: float  # forward passes of the target
    attention: float  # attention over paged blocks, of target and draft


Measure = Callable[[Any], tuple[float, int]]
"""From the result of a call its seconds, and how many calls it counts for."""


@contextmanager
def timed(owner: Any, name: str, timer: Timer | None = None, *, measure: Measure | None = None) -> Iterator[Timer]:
    """Time the calls of ``owner.name`` as long as the context lasts.

    Args:
        owner: has the function.
        name: of the function.
        timer: to add to; a new one if it is not given.
        measure: what is timed, as the result of a call tells it; the whole call if it is not given.
    """
    timer = timer or Timer()
    original = getattr(owner, name)
    is_own = name in vars(owner)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = original(*args, **kwargs)
        seconds, num_calls = (time.perf_counter() - start, 1) if measure is None else measure(result)
        timer.seconds += seconds
        timer.num_calls += num_calls
        return result

    setattr(owner, name, wrapper)
    try:
        yield timer
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


@contextmanager
def timed_passes(runner: Runner) -> Iterator[Timer]:
    """Time the passes of a runner as long as the context lasts, and no choices between them."""
    timer = Timer()
    with ExitStack() as stack:
        stack.enter_context(timed(runner, "forward", timer))
        if isinstance(runner, CompiledRunner):
            stack.enter_context(timed(runner, "_run_growth", timer, measure=_passes_of_trees))
        yield timer


def _passes_of_trees(grown: GrowingStruct) -> tuple[float, int]:
    return grown.pass_seconds, grown.num_passes


def model_of(runner: Runner) -> Decoder:
    """The model of a runner; those of all back ends have it as an attribute."""
    model: Decoder = runner.model  # type: ignore[attr-defined]
    return model


def greedy_params(output_len: int, *, use_speculative: bool = True) -> SamplingParams:
    """Return the parameters of every benchmark request: temperature 0, ``output_len`` tokens, whatever they are."""
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, use_speculative=use_speculative)


def profile_shares(
    engine: Engine, workload: Workload, *, use_speculative: bool = True, skip_prefill: bool = False
) -> Shares | None:
    """Run a workload and say where the time of the steps went.

    Args:
        engine: idle.
        workload: its requests arrive together.
        use_speculative: whether they may have drafts.
        skip_prefill: count only the steps after every request has its first token.

    Returns:
        The shares; ``None`` on a GPU, where a call returns before its work is done.
    """
    if engine.backend.device.type != "cpu":
        return None
    frontend, requests = FrontEnd(engine), []
    for prompt, output_len in zip(workload.prompts, workload.output_lens, strict=True):
        requests.append(frontend.make_request(prompt, greedy_params(output_len, use_speculative=use_speculative)))
        engine.scheduler.add(requests[-1])
    while skip_prefill and any(request.metrics.first_token_time is None for request in requests):
        engine.step()
    runners = [engine.runner]
    if isinstance(engine.drafter, DraftModelDrafter):
        runners.append(engine.drafter.runner)
    with ExitStack() as stack:
        passes = [stack.enter_context(timed_passes(runner)) for runner in runners]
        attention = [stack.enter_context(timed(model_of(runner).ops, "tree_attention")) for runner in runners]
        step = stack.enter_context(timed(engine, "step"))
        before = _compiled_attention_seconds(runners)
        while not all(request.is_finished for request in requests):
            engine.step()
    target, draft = passes[0].seconds, sum(timer.seconds for timer in passes[1:])
    attended = sum(timer.seconds for timer in attention) + _compiled_attention_seconds(runners) - before
    return Shares(
        num_steps=step.num_calls,
        step_seconds=step.seconds / step.num_calls,
        host=1 - (target + draft) / step.seconds,
        draft=draft / step.seconds,
        target=target / step.seconds,
        attention=attended / step.seconds,
    )


def _compiled_attention_seconds(runners: Sequence[Runner]) -> float:
    return sum(runner.attention_seconds for runner in runners if isinstance(runner, CompiledRunner))

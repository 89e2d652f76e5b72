"""Where the time of Titan's steps goes, measured from outside: the engine itself carries no timing code."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from titan import SamplingParams
from titan.bench.workloads import Workload
from titan.engine import Engine
from titan.models import decoder, layers


@dataclass(slots=True)
class Timer:
    """Calls of one function."""

    num_calls: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Shares:
    """Parts of the time in `Engine.step`, each between 0 and 1."""

    num_steps: int
    step_seconds: float  # mean
    host: float  # all but the forward passes of target and draft
    attention: float  # attention over paged blocks, of target and draft


@contextmanager
def timed(owner: Any, name: str) -> Iterator[Timer]:
    """Time the calls of ``owner.name`` as long as the context lasts."""
    timer = Timer()
    original = getattr(owner, name)
    is_own = name in vars(owner)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            timer.seconds += time.perf_counter() - start
            timer.num_calls += 1

    setattr(owner, name, wrapper)
    try:
        yield timer
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def greedy_params(output_len: int) -> SamplingParams:
    """Return the parameters of every benchmark request: temperature 0, ``output_len`` tokens, whatever they are."""
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)


def profile_shares(engine: Engine, workload: Workload, *, skip_prefill: bool = False) -> Shares | None:
    """Run a workload and say where the time of the steps went.

    Args:
        engine: idle.
        workload: its requests arrive together.
        skip_prefill: count only the steps after every request has its first token.

    Returns:
        The shares; ``None`` on a GPU, where a call returns before its work is done.
    """
    if engine.device.type != "cpu":
        return None
    params = greedy_params(workload.output_len)
    requests = [engine.make_request(None, prompt, params) for prompt in workload.prompts]
    for request in requests:
        engine.scheduler.add(request)
    while skip_prefill and any(request.metrics.first_token_time is None for request in requests):
        engine.step()
    with ExitStack() as stack:
        models = [engine.runner.model, getattr(engine.drafter, "model", None)]
        forwards = [stack.enter_context(timed(model, "forward")) for model in models if model is not None]
        users = [module for module in (layers, decoder) if hasattr(module, "tree_attention")]
        attention = [stack.enter_context(timed(module, "tree_attention")) for module in users]
        step = stack.enter_context(timed(engine, "step"))
        while not all(request.is_finished for request in requests):
            engine.step()
    return Shares(
        num_steps=step.num_calls,
        step_seconds=step.seconds / step.num_calls,
        host=1 - sum(timer.seconds for timer in forwards) / step.seconds,
        attention=sum(timer.seconds for timer in attention) / step.seconds,
    )

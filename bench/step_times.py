"""Where the time of Titan's steps goes, measured from outside, but for what is a part of one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import titan.engine
from titan.core.metrics import ratio
from titan.draft.draft_model import DraftModelDrafter
from titan.engine import Engine
from titan.kernels.cpu.runner import CompiledRunner
from titan.kernels.interfaces import Runner
from titan.models.decoder import Decoder


@dataclass(slots=True)
class Timer:
    """Calls of a function."""

    num_calls: int = 0
    seconds: float = 0.0


@contextmanager
def timed(owner: Any, name: str, timer: Timer, *, measure: Callable[[Any], tuple[float, int]] | None = None) -> Iterator[None]:
    """Add the calls of ``owner.name`` to a timer as long as the context lasts.

    ``measure`` tells, from what a call returns, the seconds it took and how many calls it counts for, where that is known better.
    """
    original = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = original(*args, **kwargs)
        seconds, num_calls = (time.perf_counter() - start, 1) if measure is None else measure(result)
        timer.seconds += seconds
        timer.num_calls += num_calls
        return result

    with patch.object(owner, name, wrapper):
        yield


@dataclass(slots=True)
class StepTimes:
    """Steps and their parts."""

    step: Timer = field(default_factory=Timer)
    target: Timer = field(default_factory=Timer)  # its forward passes
    draft: Timer = field(default_factory=Timer)  # those of the draft
    propose: Timer = field(default_factory=Timer)
    speculation: Timer = field(default_factory=Timer)  # the target's batch, and acceptance

    @property
    def figures(self) -> dict[str, float]:
        """Milliseconds of a step and of passes, and the parts of a step; host, draft and target add up to 1. None without steps."""
        whole, num_steps = self.step.seconds, self.step.num_calls
        if not num_steps:
            return {}
        figures = {
            "ms/step": 1e3 * whole / num_steps,
            "host": 1 - (self.target.seconds + self.draft.seconds) / whole,
            "draft": self.draft.seconds / whole,
            "target": self.target.seconds / whole,
            "trees, batch, acceptance": (self.propose.seconds + self.speculation.seconds - self.draft.seconds) / whole,
            "ms/target pass": 1e3 * ratio(self.target.seconds, self.target.num_calls),
        }
        if self.draft.num_calls:
            figures["draft passes"] = self.draft.num_calls / num_steps
            figures["ms/draft pass"] = 1e3 * self.propose.seconds / self.draft.num_calls  # choosing between them included
        return figures


@contextmanager
def step_times(engine: Engine) -> Iterator[StepTimes]:
    """Time the steps of an engine as long as the context lasts; none on a GPU, where a call returns before its work is done."""
    times = StepTimes()
    if engine.backend.device.type != "cpu":
        yield times
        return
    runners = [(engine.runner, times.target)]
    if isinstance(engine.drafter, DraftModelDrafter):
        runners.append((engine.drafter.runner, times.draft))
    with ExitStack() as stack:
        for runner, timer in runners:
            stack.enter_context(timed(runner, "forward", timer))
            if isinstance(runner, CompiledRunner):
                measure = attrgetter("pass_seconds", "num_passes")  # of the passes of a tree, which are one call
                stack.enter_context(timed(runner, "_run_growth", timer, measure=measure))
        for name in ("target_batch", "launch", "collect"):  # what a step calls for its trees, besides `Engine._propose`
            stack.enter_context(timed(titan.engine, name, times.speculation))
        stack.enter_context(timed(engine, "_propose", times.propose))
        stack.enter_context(timed(engine, "step", times.step))
        yield times


def model_of(runner: Runner) -> Decoder:
    """The model of a runner; those of all back ends have it as an attribute."""
    model: Decoder = runner.model  # type: ignore[attr-defined]
    return model

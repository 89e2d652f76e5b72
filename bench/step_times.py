"""Where the time of Titan's steps goes, as the engine measures it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from titan.core.step import StepPlan
from titan.core.step_times import StepTimes
from titan.core.trees import DraftTrees, GrowthReport
from titan.engine import Engine
from titan.kernels.interfaces import Runner
from titan.models.decoder import Decoder


@dataclass(slots=True)
class TimedSteps:
    """Times of steps, and what growing their draft trees took."""

    steps: list[StepTimes] = field(default_factory=list)
    growths: list[GrowthReport] = field(default_factory=list)  # of the steps in which a draft model grew trees

    @property
    def figures(self) -> dict[str, float]:
        """Milliseconds of a step and of passes, and the parts of a step; host, draft and target add up to 1. None without steps."""
        num_steps, num_passes = len(self.steps), sum(each.num_passes for each in self.growths)
        if not num_steps:
            return {}
        whole, propose = sum(each.whole for each in self.steps), sum(each.draft for each in self.steps)
        target, of_growths = sum(each.backlog + each.target for each in self.steps), [each.seconds for each in self.growths]
        draft = propose if None in of_growths else sum(filter(None, of_growths))
        speculation = propose + sum(each.inputs + each.verify for each in self.steps)
        figures = {
            "ms/step": 1e3 * whole / num_steps,
            "host": 1 - (target + draft) / whole,
            "draft": draft / whole,
            "target": target / whole,
            "trees, batch, acceptance": (speculation - draft) / whole,
            "ms/target pass": 1e3 * target / num_steps,
        }
        if num_passes:
            figures["draft passes"] = num_passes / num_steps
            figures["ms/draft pass"] = 1e3 * propose / num_passes  # choosing between them included
        return figures


@contextmanager
def step_times(engine: Engine) -> Iterator[TimedSteps]:
    """Collect the times of an engine's steps as long as the context lasts."""
    times, note, propose = TimedSteps(), engine._log.note, engine.drafting.propose

    def note_and_keep(end: float, parts: StepTimes, *rest: Any) -> None:
        times.steps.append(parts)
        note(end, parts, *rest)

    def propose_and_keep(plan: StepPlan) -> DraftTrees:
        trees = propose(plan)
        if trees.growth is not None:
            times.growths.append(trees.growth)
        return trees

    with patch.object(engine._log, "note", note_and_keep), patch.object(engine.drafting, "propose", propose_and_keep):
        yield times


def model_of(runner: Runner) -> Decoder:
    """The model of a runner; those of all back ends have it as an attribute."""
    model: Decoder = runner.model  # type: ignore[attr-defined]
    return model

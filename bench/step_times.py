"""Where the time of Titan's steps goes, as the engine measures it, and what the products and the KV of a pass take alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from timeit import repeat
from typing import Any
from unittest.mock import patch

import torch

from titan.core.step import StepPlan
from titan.core.step_times import StepTimes
from titan.core.trees import DraftTrees, GrowthReport
from titan.engine import Engine
from titan.kernels.interfaces import Runner
from titan.models.decoder import Decoder


@dataclass(slots=True)
class TimedSteps:
    """Times of steps, what growing draft trees took, and blocks of KV; a decode step is one in which no prompt is computed."""

    steps: list[StepTimes] = field(default_factory=list)
    decodes: list[StepTimes] = field(default_factory=list)
    growths: list[GrowthReport] = field(default_factory=list)  # of the decode steps in which a draft model grew trees
    kv_use: list[float] = field(default_factory=list)  # share of blocks that each step holds, before any is freed

    @property
    def figures(self) -> dict[str, float]:
        """Milliseconds of a decode step and of its passes, and its parts; host, draft and target add up to 1. None without one."""
        num_steps, num_passes = len(self.decodes), sum(each.num_passes for each in self.growths)
        if not num_steps:
            return {}
        whole, propose = sum(each.whole for each in self.decodes), sum(each.draft for each in self.decodes)
        target, of_growths = sum(each.backlog + each.target for each in self.decodes), [each.seconds for each in self.growths]
        draft = propose if None in of_growths else sum(filter(None, of_growths))
        speculation = propose + sum(each.inputs + each.verify for each in self.decodes)
        figures = {
            "ms/decode step": 1e3 * whole / num_steps,
            "host": 1 - (target + draft) / whole,
            "draft": draft / whole,
            "target": target / whole,
            "trees, batch, acceptance": (speculation - draft) / whole,
            "adapt": sum(each.adapt for each in self.decodes) / whole,
            "ms/target pass": 1e3 * target / num_steps,
        }
        if num_passes:
            figures["draft passes"] = num_passes / num_steps
            figures["ms/draft pass"] = 1e3 * propose / num_passes  # choosing between them included
        return figures


@contextmanager
def step_times(engine: Engine) -> Iterator[TimedSteps]:
    """Collect the times of an engine's steps as long as the context lasts."""
    times, note, propose, is_decode = TimedSteps(), engine._log.note, engine.drafting.propose, False
    pool = engine.kv.pool

    def note_and_keep(end: float, parts: StepTimes, *rest: Any) -> None:
        times.steps.append(parts)
        if is_decode:
            times.decodes.append(parts)
        note(end, parts, *rest)

    def propose_and_keep(plan: StepPlan) -> DraftTrees:
        nonlocal is_decode
        times.kv_use.append(1 - pool.num_free / pool.num_blocks)
        is_decode = all(request.num_output_tokens for request in plan.requests)
        trees = propose(plan)
        if is_decode and trees.growth is not None:
            times.growths.append(trees.growth)
        return trees

    with patch.object(engine._log, "note", note_and_keep), patch.object(engine.drafting, "propose", propose_and_keep):
        yield times


def model_of(runner: Runner) -> Decoder:
    """The model of a runner; those of all back ends have it as an attribute."""
    model: Decoder = runner.model  # type: ignore[attr-defined]
    return model


def product_and_kv_seconds(engine: Engine, num_requests: int, context_len: float) -> float:
    """Time what a pass on a CPU consists of, where each of ``num_requests`` decodes one token after ``context_len`` others.

    That is its products, by the same kernels, and reading its KV at the plain speed of memory. Each is the fastest of nine calls
    from Python, which take longer than the same work within a pass that is one call: a pass may take less than the sum.
    """
    model = model_of(engine.runner)
    sizes = model.config.hidden_size, model.config.num_heads * model.config.head_dim, model.config.intermediate_size
    hidden, heads, ffn = (torch.ones(num_requests, size, dtype=model.dtype) for size in sizes)

    def multiply_all() -> None:
        for layer in model.layer_weights:
            weights = layer.qkv_weight, layer.output_weight, layer.gate_up_weight, layer.down_weight
            for x, weight in zip((hidden, heads, hidden, ffn), weights, strict=True):
                model.ops.linear(x, weight, None)
        model.logits(hidden)

    buffer = torch.ones(2**26, dtype=torch.int64)  # far more than caches hold
    per_byte = min(repeat(buffer.sum, number=1, repeat=9)) / buffer.nbytes
    num_kv_bytes = num_requests * context_len * engine.kv.tensors["target"].layout.bytes_per_token
    return min(repeat(multiply_all, number=1, repeat=9)) + num_kv_bytes * per_byte

"""A clock for benches under test."""

from __future__ import annotations

import pytest

from titan.bench import engine_run, side_by_side
from titan.engine import Engine


class StepClock:
    """Time that passes only while its engine steps, a second each, or is slept away."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = 100.0
        step = engine.step
        monkeypatch.setattr(engine, "step", lambda: self.sleep(1.0) or step())
        for module in (engine_run, side_by_side):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.time

    process_time = monotonic

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.time += seconds

"""Runs side by side: who goes on for how long, whose time passes, and what becomes of one that fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from titan.bench import side_by_side
from titan.bench.runs import Run
from titan.bench.side_by_side import OwnTime, Steps, run_alone, run_side_by_side
from titan.bench.turns import Turns

TOKENS = 24


class FakeTime:
    """Passes as steps say."""

    def __init__(self) -> None:
        self.now, self.cpu = 100.0, 7.0

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.cpu


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    clock = FakeTime()
    monkeypatch.setattr(side_by_side, "time", clock)
    monkeypatch.setattr(side_by_side, "SLICE_S", 0.5)
    return clock


def maker(
    clock: FakeTime, log: list[tuple[str, int]], name: str, step_s: float, tokens: int, fails_at: int = -1
) -> Callable[..., Steps]:
    """Makes runs of steps of so many seconds, of two processors, and tokens; to make ready takes a minute."""

    def start(own_time: OwnTime) -> Steps:
        clock.now, clock.cpu = clock.now + 60, clock.cpu + 60

        def steps() -> Steps:
            for emitted in range(tokens, TOKENS + 1, tokens):
                if emitted == fails_at:
                    raise ValueError("it broke")
                clock.now, clock.cpu = clock.now + step_s, clock.cpu + 2 * step_s
                log.append((name, emitted))
                yield emitted
            return Run([], own_time.seconds(), {"CPU": own_time.cpu_seconds()})

        return steps()

    return start


def test_each_goes_on_until_it_is_as_far_as_the_first_whose_time_is_over(clock: FakeTime) -> None:
    """Whatever the speed of each, all are as far at the end of a cycle; time passes for the one alone that runs."""
    log, problems = list[tuple[str, int]](), list[str]()
    speeds = {"plain": (0.125, 1), "drafts": (0.25, 3), "slow": (0.5, 1)}
    with Turns(3, problems, lambda _: None) as turns:
        starts = {name: maker(clock, log, name, *each) for name, each in speeds.items()}
        runs = run_side_by_side(turns, "here", starts)
        assert turns._bar.n == 3
        num_before = len(log)
        run_side_by_side(turns, "in the next round", starts, 1)
        assert log[num_before] == ("drafts", 3)
    assert log[: 4 + 2 + 4] == [
        *(("plain", i + 1) for i in range(4)),
        ("drafts", 3),
        ("drafts", 6),
        *(("slow", i + 1) for i in range(4)),
    ]
    second = log[10:]  # whose first are the drafts: two steps of a quarter of a second, to which the others catch up
    assert second[:2] == [("drafts", 9), ("drafts", 12)] and second[2:10] == [("slow", i) for i in range(5, 13)]
    assert second[10:18] == [("plain", i) for i in range(5, 13)]
    assert {name: (run.seconds, run.figures["CPU"]) for name, run in runs.items()} == {
        name: (step_s * TOKENS / tokens, 2 * step_s * TOKENS / tokens) for name, (step_s, tokens) in speeds.items()
    }
    assert list(runs) == list(speeds) and not problems


def test_one_that_fails_is_left_out_and_the_next_leads(clock: FakeTime) -> None:
    log, problems, failed = list[tuple[str, int]](), list[str](), list[str]()
    with Turns(3, problems, failed.append) as turns:
        starts = {"bad": maker(clock, log, "bad", 0.125, 1, fails_at=3), "good": maker(clock, log, "good", 0.25, 1)}
        runs = run_side_by_side(turns, "here", starts)
        again = run_side_by_side(turns, "there", starts)
        assert turns._bar.n == 4
    assert list(runs) == list(again) == ["good"] and failed == ["bad"]
    assert problems == ["bad ended here: it broke"]
    assert log[:4] == [("bad", 1), ("bad", 2), ("good", 1), ("good", 2)] and runs["good"].seconds == again["good"].seconds == 6.0


def test_a_run_alone_is_all_steps(clock: FakeTime) -> None:
    assert run_alone(maker(clock, [], "plain", 0.125, 1)).seconds == 3.0

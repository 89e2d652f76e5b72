"""The GPU check: its bookkeeping with made-up sections, and its sections at tiny shapes in Triton's interpreter."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from titan.bench import gpu_check
from titan.bench.gpu import attention, ceilings, end_to_end, sampling, splits
from titan.bench.gpu.attention import KERNELS, LLAMA_3_8B, TITAN
from titan.bench.gpu.attention_batches import uniform_shape
from titan.bench.gpu.end_to_end import AT_GOAL, DRAFTS_SAMPLED, PLAIN, EndToEnd, Mode, PaidReplayDrafter, expected_tokens
from titan.bench.gpu.sections import Figures, Row, Section, Setting, Task, WrongNumbersError, run_isolated, run_tasks
from titan.bench.gpu.timing import covered_seconds
from titan.bench.step_times import step_times
from titan.kernels.backend import choose_backend
from titan.kernels.triton.tools import INTERPRETED
from titan.models.decoder import Decoder

TINY = Setting(torch.device("cpu" if INTERPRETED else "cuda:0"), is_tiny=True, copy_bandwidth=1e9)


def fail(error: Exception) -> Figures:
    raise error


BROKEN = Task({"row": "broken"}, partial(fail, RuntimeError("it did\nnot work")), 1)
FINE = Task({"row": "fine"}, lambda: {"figure": 1.0}, 1, goals={"figure": 0.5, "other": 1.0})


def section_of(*tasks: Task, name: str = "made up", seconds: float = 10) -> Section:
    return Section(name, name.title(), f"What {name} is.", seconds, {"figure": ".1f"}, lambda setting: tasks)


def in_this_process(section: Section, setting: Setting, seconds: float) -> Iterator[Row]:
    return run_tasks(section.make_tasks(setting), seconds, lambda: 0.0)


def test_an_error_ends_its_own_task_only_peers_may_fail_and_tasks_without_time_say_so() -> None:
    wrong = Task({}, partial(fail, WrongNumbersError("numbers are off")), 1)
    rows = list(run_tasks([BROKEN, replace(BROKEN, is_peer=True), replace(FINE, seconds=3), wrong, FINE], 2, lambda: 0.0))
    assert [(row.status, row.problem) for row in rows] == [
        ("failed", "RuntimeError: it did not work"),
        ("unavailable", "RuntimeError: it did not work"),
        ("skipped", "out of time: 2 s are left, it takes 3 s"),
        ("wrong", "numbers are off"),
        ("ok", None),
    ]


MADE_UP_MODULE = """
import os, signal, time
from functools import partial
from pathlib import Path
from titan.bench.gpu import device_tests, sections
from titan.bench.gpu.sections import Task

def lose_the_device(setting):
    def fail(device):
        raise RuntimeError("an illegal memory access was encountered")
    sections.synchronize = fail
    fail(setting.device)

WORK = {
    "fine": lambda setting: {"figure": float(setting.seed)},
    "status": lambda setting: os._exit(7),
    "signal": lambda setting: os.kill(os.getpid(), signal.SIGSEGV),
    "hang": lambda setting: time.sleep(1000),
    "device": lose_the_device,
    "error": lambda setting: 1 / 0,
}

def make_tasks(names, setting):
    labels = [{"row": name, "process": os.getpid()} for name in names]
    return [Task(each, partial(WORK[each["row"]], setting), 0, is_peer=each["row"] == "signal") for each in labels]

def make_tests(root, setting):
    device_tests.ROOT = Path(root)
    return device_tests.make_tasks(setting)
"""


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module that other processes can import."""
    (tmp_path / "made_up_tasks.py").write_text(MADE_UP_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__("made_up_tasks")
    del sys.modules["made_up_tasks"]


@pytest.mark.long
def test_what_ends_a_process_or_its_device_costs_one_row_and_the_next_begins_in_a_new_process(made_up: Any) -> None:
    names = ["fine", "status", "fine", "signal", "device", "error", "hang", "fine"]
    section = replace(section_of(), make_tasks=partial(made_up.make_tasks, names))
    start, *rows = run_isolated(section, replace(TINY, seed=5), 1000, grace=2)
    assert start.labels == {"row": "start"} and start.figures["start, s"] > 0
    assert [row.labels["row"] for row in rows] == names
    assert [row.figures for row in rows if row.status == "ok"] == [{"figure": 5.0}] * 3
    assert [(row.status, row.problem) for row in rows if row.status != "ok"] == [
        ("failed", "its process ended with status 7"),
        ("unavailable", "its process ended with status -11"),
        ("failed", "RuntimeError: an illegal memory access was encountered"),
        ("failed", "ZeroDivisionError: division by zero"),
        ("failed", "its process was ended after 2 s without an answer"),
    ]
    processes = [row.labels["process"] for row in rows]
    assert [list(processes).index(each) for each in processes] == [0, 0, 2, 2, 4, 5, 5, 7]


MADE_UP_TESTS = """
import os, warnings, pytest

@pytest.mark.parametrize("back_end", ["torch", "a draft-triton", *(f"triton-{i}" for i in range(4))])
def test_it(back_end):
    warnings.warn("is shown")
    if back_end == "triton-1":
        os._exit(9)
    if back_end == "triton-3":
        pytest.skip("no")
    assert back_end != "triton-2", "wrong"

def test_output_with_triton(): pass
def test_the_host(): pass
@pytest.mark.cuda
def test_a_device(): pass
"""


@pytest.fixture
def section_of_tests(made_up: Any, tmp_path: Path) -> Section:
    """Of a checkout that has these tests, and one of what is riskier."""
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nfilterwarnings = ['error']\nmarkers = ['cuda']\n")
    (tmp_path / "tests" / "new").mkdir(parents=True)
    (tmp_path / "tests" / "new" / "test_new.py").write_text(MADE_UP_TESTS)
    (tmp_path / "tests" / "test_cuda_graphs.py").write_text("def test_the_host(): pass")
    return replace(section_of(), make_tasks=partial(made_up.make_tests, str(tmp_path)))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_tests_of_triton_and_of_a_device_are_rows_the_riskiest_first_and_one_that_crashes_costs_the_others_nothing(
    section_of_tests: Section, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "get_context", lambda _, get=multiprocessing.get_context: get("fork"))  # without imports
    _, *rows = run_isolated(section_of_tests, Setting(torch.device("cpu"), is_tiny=False), 1000)
    device, *others = (f"tests/new/test_new.py::test_{each}" for each in ("a_device", *(f"it[triton-{i}]" for i in range(4))))
    others += [f"tests/new/test_new.py::test_{each}" for each in ("it[a draft-triton]", "output_with_triton")]
    assert [row.labels["test"] for row in rows] == [device, "tests/test_cuda_graphs.py::test_the_host", *others]
    passed = {"passed": 1.0}, None
    assert [(row.figures, row.problem) for row in rows] == [
        *(passed, passed, passed),
        ({}, "its process ended with status 9"),
        ({}, "AssertionError: wrong assert 'triton-2' != 'triton-2'"),
        ({"skipped": 1.0}, None),
        *(passed, passed),
    ]


def test_time_that_a_section_leaves_is_the_next_one_s(monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = iter(range(100, 200, 6)), []
    monkeypatch.setattr("titan.bench.gpu_check.time.monotonic", lambda: next(now))

    def take(section: Section, setting: Setting, seconds: float) -> Iterator[Row]:
        given.append(seconds)
        yield from ()

    assert list(gpu_check.run_sections([section_of(seconds=10), section_of(seconds=30)], TINY, 80, take)) == []
    assert given == [20 - 6, 80 - 12]


def test_the_check_hands_the_bandwidth_on_writes_rows_as_they_come_and_fails_with_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = ceilings.SECTION, section_of(BROKEN, FINE, name="bad"), section_of(FINE, name="last")
    monkeypatch.setattr(gpu_check, "SECTIONS", {section.name: section for section in sections})
    path, seen, written = tmp_path / "check.json", {}, []

    def run_and_look(section: Section, setting: Setting, seconds: float) -> Iterator[Row]:
        seen[section.name] = setting.copy_bandwidth
        written.append(len(json.loads(path.read_text())["rows"]) if path.exists() else 0)
        return in_this_process(section, setting, seconds)

    assert gpu_check.main(["--tiny", "--json", str(path), "--threads", "1"], run_and_look) == 1
    assert list(seen) == ["ceilings", "bad", "last"] and seen["ceilings"] is None and seen["bad"] == seen["last"] > 0
    assert written == [0, 2, 4]
    assert [row["status"] for row in json.loads(path.read_text())["rows"]] == ["ok", "ok", "failed", "ok", "ok"]
    shown = capsys.readouterr().out
    assert "4 of 5 rows are right, and 2 of 2 goals are met." in shown and "figure at least 0.5: met" in shown
    assert "failed: RuntimeError: it did not work" in shown and "1 warning: bad, broken: RuntimeError" in shown
    assert gpu_check.main(["--tiny", "--only", "last", "--threads", "1"], in_this_process) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_full_shapes_need_a_device() -> None:
    with pytest.raises(ValueError, match="a CUDA device is needed: there is none; --tiny"):
        gpu_check.main([])


def test_overlapping_work_of_a_device_counts_once() -> None:
    assert covered_seconds([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.0), (2.2, 2.9)], max_gap=0.5) == 4.0
    assert covered_seconds([(0.0, 1.0), (1.25, 2.0)], max_gap=0.5) == 2.0  # between two kernels of a graph
    assert covered_seconds([], max_gap=1.0) == 0.0


# ----- attention


def test_others_agree_with_titan_at_tiny_shapes() -> None:
    tasks = attention.SECTION.make_tasks(TINY)
    rows = attention.SECTION.compare(list(run_tasks(tasks, 1000, lambda: 0.0)))
    flashinfer = rows.pop()
    assert flashinfer.status == "unavailable" and "No module named 'flashinfer'" in str(flashinfer.problem)
    assert [row.problem for row in rows if row.status != "ok"] == []
    kernels = [row.labels["kernel"] for row in rows]
    assert kernels == [TITAN] * 3 + ["gather + SDPA"]
    titan, sdpa = rows[1].figures, rows[3].figures
    assert sdpa["x titan"] == pytest.approx(sdpa["us"] / titan["us"])
    assert titan["plan, us"] > 0 and "plan, us" not in sdpa
    assert titan["of bandwidth"] == pytest.approx(titan["floor, us"] / titan["us"])


def test_the_planners_split_is_compared_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*splits.chunks(4007)] == [4016, 2016, 1008, 512, 256, 128], "and 63 parts would be shorter than half of the least chunk"
    times = iter((3e-6, 4e-6, 2e-6))
    monkeypatch.setattr(splits, "seconds_per_layer", lambda case, attend: (attend(0), next(times))[1])
    [task] = splits.SECTION.make_tasks(TINY)
    figures = task.measure()
    assert list(figures.values())[2:] == pytest.approx([2, 2, 1.5]) and figures["us"] == pytest.approx(3)
    with pytest.raises(StopIteration):
        next(times)


def test_a_kernel_that_sees_other_slots_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = uniform_shape(attention.TINY, 2, 20)
    monkeypatch.setattr(type(shape), "visible", lambda step, context, device: torch.ones(7, context + 7, device=device) > 0)
    with pytest.raises(WrongNumbersError, match="disagrees by"):
        attention.measure(shape, KERNELS[TITAN], TINY)


@pytest.mark.parametrize(("batch", "context", "microseconds"), [(1, 32768, 31.3), (8, 8192, 62.7), (128, 32768, 4000)])
def test_floors_are_those_of_the_roofline(batch: int, context: int, microseconds: float) -> None:
    num_bytes = uniform_shape(LLAMA_3_8B, batch, context).num_bytes
    assert num_bytes / 4.3e12 * 1e6 == pytest.approx(microseconds, rel=0.005)


# ----- end to end


@pytest.fixture(autouse=True)
def _no_drafter_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan.draft.registry._FACTORIES", {})


@pytest.fixture
def bench() -> EndToEnd:
    return EndToEnd(end_to_end.TINY, TINY, choose_backend(TINY.device))


def test_whole_engines_run_at_tiny_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_to_end, "InterpretedBackend", partial(choose_backend, TINY.device))  # it takes a tenth of the time
    section = end_to_end.SECTION
    rows = section.compare(list(run_tasks(section.make_tasks(TINY), 1000, lambda: 0.0)))
    assert [row.problem for row in rows if row.status != "ok"] == []
    found = {tuple(row.labels.values()): row.figures for row in rows}
    decoding = [(1, PLAIN, "-"), (1, AT_GOAL, "tiny"), (1, AT_GOAL, "tiny, too"), (3, PLAIN, "-"), (3, AT_GOAL, "tiny")]
    others = [(2, "prefill of 20", "-"), (2, "swap of the draft", "tiny"), (1, "plain, sampled", "-"), (1, DRAFTS_SAMPLED, "tiny")]
    assert list(found) == decoding + others
    assert found[others[-1]]["tokens/step"] == 7.0
    assert any(name.startswith("host, us/step: aten::") for name in found[decoding[0]])
    plain, drafted = found[decoding[0]], found[decoding[2]]
    assert plain["tokens/step"] == 1.0 and drafted["expected"] == pytest.approx(3.951, abs=1e-3)
    assert drafted["x plain"] == pytest.approx(drafted["tokens/s"] / plain["tokens/s"])
    plain, drafted = found[others[2]], found[others[3]]
    assert drafted["x plain"] == pytest.approx(drafted["tokens/s"] / plain["tokens/s"])  # which samples, too


@pytest.mark.parametrize(("acceptance", "tokens_per_step"), [(1.0, 7), (0.0, 1)])
def test_acceptance_is_dialled_and_the_draft_is_paid_for(
    acceptance: float, tokens_per_step: int, bench: EndToEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(end_to_end.MODES, "dialled", Mode(acceptance))
    with step_times(bench.engine) as times:
        assert bench.measure_titan(2, "dialled", "tiny")["tokens/step"] == tokens_per_step
    assert times.figures["draft passes"] == 6
    assert not bench.engine.scheduler.has_unfinished
    assert bench.measure_titan(2, "dialled", "tiny, too")["tokens/step"] == tokens_per_step
    assert bench.engine.drafter.name == "tiny, too"


def test_a_swap_of_the_draft_in_a_window_is_one(bench: EndToEnd) -> None:
    drafter, found = bench.engine.drafter, []
    bench.engine.observers.append(lambda plan, acceptance: found.append((bench.engine.drafter, len(plan.requests))))
    figures = bench.measure_swap(2, AT_GOAL, "tiny")
    assert bench.engine.drafter is not drafter and {each for each, _ in found} == {drafter, bench.engine.drafter}
    assert found[-1][1] == 2 and all(figure > 0 for figure in figures.values())


def test_a_request_that_ends_early_and_a_text_that_the_weights_do_not_say_are_noticed(
    bench: EndToEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(end_to_end.Plan, "max_output_len", lambda plan, batch: 3)
        with pytest.raises(RuntimeError, match="ended early"):
            bench.measure_titan(1, PLAIN, "-")
    assert not bench.engine.scheduler.has_unfinished
    drafter = bench.engine.drafter
    assert isinstance(drafter, PaidReplayDrafter) and isinstance(drafter.model, Decoder)
    drafter.model.final_norm.neg_()
    with pytest.raises(WrongNumbersError, match=r"the draft would have proposed \d+ tokens that its weights do not say"):
        bench.measure_titan(1, AT_GOAL, "tiny")
    bench.target.final_norm.neg_()
    with pytest.raises(WrongNumbersError, match="other tokens were written than the weights say"):
        bench.measure_titan(1, PLAIN, "-")


# ----- the rest


@pytest.mark.long
@pytest.mark.parametrize("make_tasks", [ceilings.make_product_tasks, sampling.make_tasks])
def test_products_and_sampling_run_at_tiny_shapes(make_tasks: Any) -> None:
    rows = list(run_tasks(make_tasks(replace(TINY, peak=1e9)), 1000, lambda: 0.0))
    assert [row.problem for row in rows if row.status != "ok"] == []
    assert all(figure > 0 for row in rows for figure in row.figures.values())


def test_rows_are_compared_with_those_of_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fine = replace(FINE, labels={"row": "fine", "draft": "-"}, measure=lambda: {"other": 4.0, "figure": 3.0})
    monkeypatch.setattr(gpu_check, "SECTIONS", {"a": section_of(FINE, name="a")})
    options = ["--tiny", "--threads", "1", "--json", str(tmp_path / "base.json")]
    gpu_check.main(options, in_this_process)
    monkeypatch.setattr(gpu_check, "SECTIONS", {"a": section_of(fine, replace(fine, labels={"row": "new"}), name="a")})
    options = ["--tiny", "--threads", "1", "--json", str(tmp_path / "new.json"), "--base", str(tmp_path / "base.json")]
    gpu_check.main(options, in_this_process)
    first, second = json.loads((tmp_path / "new.json").read_text())["rows"]
    assert first["figures"] == {"other": 4.0, "figure": 3.0, "x base": 3.0} and "x base" not in second["figures"]


@pytest.mark.parametrize("gamma", [0, 1, 5])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_expected_tokens_are_the_mean_over_all_outcomes(alpha: float, gamma: int) -> None:
    """Of coins, one per draft token: tokens up to the first rejection, and the final token."""
    coins = list(product([True, False], repeat=gamma))
    chances = [alpha ** sum(each) * (1 - alpha) ** (gamma - sum(each)) for each in coins]
    lengths = [1 + [*each, False].index(False) for each in coins]
    assert expected_tokens(alpha, gamma) == pytest.approx(np.dot(chances, lengths))

"""The GPU check: its bookkeeping with made-up sections, and its sections at tiny shapes in Triton's interpreter."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreted import triton_backend
from torch import Tensor
from transformers import LlamaConfig

from titan.bench import gpu_check
from titan.bench.gpu import attention, ceilings, end_to_end
from titan.bench.gpu.attention import LLAMA_3_8B, UNIFORM
from titan.bench.gpu.attention_batches import uniform_shape
from titan.bench.gpu.attention_kernels import KERNELS, TITAN
from titan.bench.gpu.end_to_end import AT_GOAL, PLAIN, EndToEnd
from titan.bench.gpu.random_models import DRAFT_OF_1B, DRAFT_OF_8B, LLAMA_1B, LLAMA_8B, weight_bytes_per_step
from titan.bench.gpu.sections import Figures, Goal, Row, Section, Setting, Task, WrongNumbersError, run_isolated, run_tasks
from titan.bench.gpu.timing import covered_seconds
from titan.bench.peers.transformers_peer import StaticPeer
from titan.bench.step_times import step_times
from titan.core.step import Acceptance
from titan.kernels.torch.backend import TorchBackend
from titan.kernels.triton.tools import INTERPRETED
from titan.models.config import ModelConfig
from titan.models.decoder import Decoder

TINY = Setting(torch.device("cpu" if INTERPRETED else "cuda:0"), is_tiny=True, copy_bandwidth=1e9)


def fail(error: Exception) -> Figures:
    raise error


BROKEN = Task({"row": "broken"}, partial(fail, RuntimeError("it did\nnot work")), 1)
FINE = Task({"row": "fine"}, lambda: {"figure": 1.0}, 1)


def section_of(*tasks: Task, name: str = "made up", seconds: float = 10) -> Section:
    return Section(name, name.title(), f"What {name} is.", seconds, {"figure": ".1f"}, lambda setting: tasks)


def in_this_process(section: Section, setting: Setting, seconds: float) -> Iterator[Row]:
    return run_tasks(section.make_tasks(setting), seconds, lambda: 0.0)


def test_an_error_ends_its_own_task_only_and_peers_may_fail() -> None:
    wrong = Task({"row": "wrong"}, partial(fail, WrongNumbersError("numbers are off")), 1)
    rows = list(run_tasks([BROKEN, replace(BROKEN, is_peer=True), FINE, wrong], 10, lambda: 0.0))
    assert [row.status for row in rows] == ["failed", "unavailable", "ok", "wrong"]
    assert [row.problem for row in rows] == ["RuntimeError: it did not work"] * 2 + [None, "numbers are off"]


def test_tasks_without_time_say_so() -> None:
    now = 0.0

    def take(seconds: float) -> Figures:
        nonlocal now
        now += seconds
        return {}

    tasks = [Task({}, partial(take, real), planned) for real, planned in [(7, 5), (4, 4), (2, 2)]]
    rows = list(run_tasks(tasks, 10, lambda: now))
    assert [(row.status, row.seconds) for row in rows] == [("ok", 7.0), ("skipped", 0.0), ("ok", 2.0)]
    assert rows[1].problem == "out of time: 3 s are left, it takes 4 s"


def test_a_goal_is_met_from_its_side() -> None:
    for measured, is_met in [(2.0, (True, True)), (1.9, (False, True)), (2.1, (True, False)), (float("nan"), (False, False))]:
        assert (Goal("a", 2.0).is_met({"a": measured}), Goal("a", 2.0, is_at_most=True).is_met({"a": measured})) == is_met


MADE_UP_MODULE = """
import os, time
from titan.bench.gpu.sections import Task

def crash(setting):
    return [Task({"row": "lives"}, lambda: {"figure": float(setting.seed)}, 1), Task({}, lambda: os._exit(7), 1)]

def hang(setting):
    return [Task({}, lambda: time.sleep(1000), 1)]
"""


def test_a_process_that_dies_or_hangs_costs_the_rows_it_has_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_up_tasks.py").write_text(MADE_UP_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))  # other processes can import it
    made_up = __import__("made_up_tasks")
    first, last = run_isolated(replace(section_of(), make_tasks=made_up.crash), replace(TINY, seed=5), 1000)
    assert (first.labels, first.figures, first.status) == ({"row": "lives"}, {"figure": 5.0}, "ok")
    assert (last.status, last.problem) == ("failed", "what came next ended the process with status 7")
    (row,) = run_isolated(replace(section_of(), make_tasks=made_up.hang), TINY, 0, grace=0.1)
    assert (row.status, row.problem) == ("failed", "what came next was ended after 0 s without an answer")
    del sys.modules["made_up_tasks"]


def test_time_that_a_section_leaves_is_the_next_one_s(monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = 100.0, []
    monkeypatch.setattr("titan.bench.gpu_check.time.monotonic", lambda: now)

    def take_six(section: Section, setting: Setting, seconds: float) -> Iterator[Row]:
        nonlocal now
        now += 6
        given.append(seconds)
        yield from ()

    sections = [section_of(seconds=10), section_of(seconds=30)]
    assert list(gpu_check.run_sections(sections, TINY, 80, take_six)) == []
    assert given == [20, 74]
    assert sum(section.seconds for section in gpu_check.SECTIONS.values()) <= 335  # 6 minutes, with the task that is still at it


@pytest.fixture
def made_up_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = ceilings.SECTION, section_of(BROKEN, FINE, name="bad"), section_of(FINE, name="last")
    monkeypatch.setattr(gpu_check, "SECTIONS", {section.name: section for section in sections})


@pytest.mark.usefixtures("made_up_sections")
def test_the_check_writes_after_every_row_and_fails_with_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, seen = tmp_path / "check.json", []

    def run_and_look(section: Section, setting: Setting, seconds: float) -> Iterator[Row]:
        seen.append((section.name, setting.copy_bandwidth, json.loads(path.read_text()) if path.exists() else None))
        return in_this_process(section, setting, seconds)

    assert gpu_check.main(["--tiny", "--json", str(path), "--threads", "1"], run_and_look) == 1
    names, bandwidths, documents = zip(*seen, strict=True)
    assert names == ("ceilings", "bad", "last")
    assert bandwidths[0] is None and bandwidths[1] == bandwidths[2] > 0
    assert documents[0] is None and documents[1]["warnings"] == ["the check has not come to its end"]
    assert [row["labels"]["section"] for row in documents[1]["rows"]] == ["ceilings", "ceilings"]
    final = json.loads(path.read_text())
    assert {"triton", "torch"} <= final["provenance"]["versions"].keys()
    assert [row["status"] for row in final["rows"]] == ["ok", "ok", "failed", "ok", "ok"]
    shown = capsys.readouterr().out
    assert "failed: RuntimeError: it did not work" in shown and "1 warning: bad, broken: RuntimeError" in shown
    assert "What last is." in shown
    assert gpu_check.main(["--tiny", "--only", "last", "--threads", "1"], in_this_process) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_full_shapes_need_a_device() -> None:
    with pytest.raises(ValueError, match="gpu_check needs a CUDA device: there is none; --tiny"):
        gpu_check.main([])


def test_overlapping_work_of_a_device_counts_once() -> None:
    assert covered_seconds([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.0), (2.2, 2.9)], max_gap=0.5) == 4.0
    assert covered_seconds([(0.0, 1.0), (1.25, 2.0)], max_gap=0.5) == 2.0  # between two kernels of a graph
    assert covered_seconds([], max_gap=1.0) == 0.0


# ----- attention


def sample(section: str, figures: Figures, **labels: str | int) -> Row:
    return Row({"section": section, **labels}, 0, figures)


def test_goals_follow_from_floors_and_kernels_and_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        sample("attention", {"us": floor / 0.8, "floor, us": floor, "of bandwidth": 0.8}, requests=n, context=context, kernel=TITAN)
        for n, context, floor in [(32, 8192, 250.0), (8, 8192, 60.0), (1, 32768, 30.0), (1, 8192, 8.0), (32, 1000, 300.0)]
    ]
    for n, kernel in [(8, "FlashInfer, fa2"), (1, "FlashInfer, fa2"), (1, "gather + SDPA")]:
        rows.append(sample("attention", {"us": 90.0}, requests=n, context=8192, kernel=kernel))
    report = gpu_check.make_report(rows, is_tiny=False)
    goals = [[f"{goal}: {goal.is_met(row.figures)}" for goal in row.goals] for row in report.results["rows"]]
    expected = [f"of bandwidth at least {share}: {share < 0.8}" for share in (0.85, 0.75, 0.65)]
    assert goals == [*([each] for each in expected), [], [], ["x titan at least 1: True"], [], ["x titan at least 4: True"]]
    assert report.answer == "8 of 8 rows are right, and 4 of 5 goals are met."
    assert "of bandwidth at least 0.85: missed" in report.tables[0].rows[0]
    assert not any(row.goals for row in gpu_check.make_report(rows, is_tiny=True).results["rows"])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_others_agree_with_titan_at_tiny_shapes() -> None:
    tasks = attention.SECTION.make_tasks(TINY)
    rows = attention.SECTION.judge(list(run_tasks(tasks, 1000, lambda: 0.0)))
    flashinfer = rows.pop()
    assert flashinfer.status == "unavailable" and "No module named 'flashinfer'" in str(flashinfer.problem)
    assert [row.problem for row in rows if row.status != "ok"] == []
    kernels = [row.labels["kernel"] for row in rows]
    assert kernels == [TITAN] * 3 + ["plan of a step", "titan, unsplit", "gather + SDPA", "FlexAttention, compiled"]
    titan, sdpa = rows[1].figures, rows[5].figures
    assert sdpa["x titan"] == pytest.approx(sdpa["us"] / titan["us"])
    assert titan["of bandwidth"] == pytest.approx(titan["floor, us"] / titan["us"])


class FakeFlashInfer:
    """The documented semantics of FlashInfer's wrapper, one request after the other."""

    def __init__(self, workspace: Tensor, kv_layout: str, *, backend: str) -> None:
        assert kv_layout == "HND" and workspace.dtype == torch.uint8

    def plan(self, *arguments: Any, **options: Any) -> None:
        assert all(tensor.dtype == torch.int32 for tensor in arguments[:4])
        self.q_starts, self.page_starts, self.pages, self.last_page_lens, *_, self.page_size = arguments
        self.mask, self.scale = options["custom_mask"], options["sm_scale"]

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        outputs, masks = [], self.mask
        for i, rows in enumerate(torch.tensor_split(q, self.q_starts[1:-1].cpu().long())):
            pages = self.pages[self.page_starts[i] : self.page_starts[i + 1]].long()
            kv_len = (len(pages) - 1) * self.page_size + int(self.last_page_lens[i])
            keys, values = (each[pages].transpose(0, 1).flatten(1, 2)[None, :, :kv_len] for each in kv)
            mask, masks = masks[: len(rows) * kv_len].view(len(rows), kv_len), masks[len(rows) * kv_len :]
            attended = F.scaled_dot_product_attention(
                rows.transpose(0, 1)[None], keys, values, mask, scale=self.scale, enable_gqa=True
            )
            outputs.append(attended[0].transpose(0, 1))
        assert len(masks) == 0
        return torch.cat(outputs)


def test_flashinfer_is_told_the_same_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = FakeFlashInfer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    shape = replace(uniform_shape(attention.TINY, 2, 20), contexts=(20, 41))
    assert attention.measure(shape, KERNELS["FlashInfer, fa2"], TINY)["disagreement"] < 1e-2


def test_a_kernel_that_sees_other_slots_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = uniform_shape(attention.TINY, 2, 20)
    monkeypatch.setattr(type(shape), "visible", lambda step, context, device: torch.ones(7, context + 7, device=device) > 0)
    with pytest.raises(WrongNumbersError, match="disagrees with titan by"):
        attention.measure(shape, KERNELS["gather + SDPA"], TINY)


@pytest.mark.parametrize(
    ("batch", "context", "kv_megabytes", "microseconds"),
    [(1, 32768, 134, 31.3), (8, 8192, 269, 62.7), (128, 32768, 17184, 4000)],
)
def test_floors_are_those_of_the_roofline(batch: int, context: int, kv_megabytes: float, microseconds: float) -> None:
    num_bytes = uniform_shape(LLAMA_3_8B, batch, context).num_bytes
    assert num_bytes / 4.3e12 * 1e6 == pytest.approx(microseconds, rel=0.005)
    assert num_bytes - batch * 7 * 32 * 128 * 4 == pytest.approx(kv_megabytes * 1e6, rel=0.01)


def test_titan_comes_first_and_then_all_kernels_where_they_are_compared() -> None:
    rows = [tuple(task.labels.values()) for task in attention.make_tasks(replace(TINY, is_tiny=False))]
    assert rows[: len(UNIFORM)] == [(*each, TITAN) for each in UNIFORM]
    assert {(*each, kernel) for each in attention.COMPARED for kernel in KERNELS} < set(rows)


# ----- end to end


@pytest.fixture(scope="module")
def bench() -> EndToEnd:
    return EndToEnd(end_to_end.TINY, TINY)


def test_whole_engines_run_at_tiny_shapes(bench: EndToEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_to_end, "EndToEnd", lambda plan, setting: bench)
    section = end_to_end.SECTION_8B
    rows = section.judge(list(run_tasks(section.make_tasks(TINY), 1000, lambda: 0.0)))
    assert [row.problem for row in rows if row.status != "ok"] == []
    found = {(row.labels["requests"], row.labels["mode"]): row for row in rows}
    assert list(found)[:4] == [(1, PLAIN), (1, AT_GOAL), (3, PLAIN), (3, AT_GOAL)]
    assert list(found)[-2:] == [(2, "transformers generate"), (2, "transformers continuous batching")]
    plain, drafted = found[1, PLAIN].figures, found[1, AT_GOAL].figures
    assert plain["tokens/step"] == 1.0 and drafted["expected"] == pytest.approx(3.951, abs=1e-3)
    assert drafted["x plain"] == pytest.approx(drafted["tokens/s"] / plain["tokens/s"])
    assert [str(goal) for goal in found[1, AT_GOAL].goals] == ["x plain at least 2.2"]


@pytest.mark.parametrize(("acceptance", "tokens_per_step"), [(1.0, 7), (0.0, 1)])
def test_acceptance_is_dialled_and_the_draft_is_paid_for(
    acceptance: float, tokens_per_step: int, bench: EndToEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(end_to_end.MODES, "dialled", acceptance)
    with step_times(bench.engine) as times:
        assert bench.measure_titan(2, "dialled")["tokens/step"] == tokens_per_step
    assert times.draft.num_calls == 6 * times.step.num_calls
    assert not bench.engine.scheduler.has_unfinished


def test_recorded_tokens_take_the_place_of_those_that_a_draft_left_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting, the target's pass and verification are what they are without a recording; warm-ups accept nothing, too."""
    monkeypatch.setattr("titan.draft.registry._FACTORIES", {})  # each engine registers its drafter
    monkeypatch.setitem(end_to_end.MODES, "all", 1.0)
    bench = EndToEnd(replace(end_to_end.TINY, batches=(2,), min_rows=2, min_steps=1), TINY)
    bench.backend = triton_backend()
    found: list[Acceptance] = []
    bench.engine.observers.append(lambda plan, acceptance: found.append(acceptance))
    assert bench.measure_titan(2, "all")["tokens/step"] == 7  # it refuses other tokens than those of the recording
    assert {len(path) for each in found for path in each.paths} == {0, 6}
    trees = [each.trees for each in found[1:]]  # the first step is the prefill's
    assert all((each.counts == 6).all() and each.is_chain.all() for each in trees)
    assert all(each[row].draft_slots.tolist() == [0, 1, 2, 3, 4, -1] for each in trees for row in range(2))  # type: ignore[union-attr]


def test_the_same_weights_write_the_same_in_transformers(bench: EndToEnd) -> None:
    prompts = bench.workload(2, 5).prompts
    written = StaticPeer(bench.transformers_model).run([{"prompt": prompt, "output_len": 5} for prompt in prompts], 2)
    expected = [[(prompt[-1] + 1 + i) % 300 for i in range(5)] for prompt in prompts]
    assert [each["token_ids"] for each in written["requests"]] == expected


def test_a_text_that_the_weights_do_not_say_and_a_request_that_ends_early_are_noticed(
    bench: EndToEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("titan.bench.gpu.random_models.continuation", lambda prompt, length, vocab_size: [0] * length)
        with pytest.raises(WrongNumbersError, match="other tokens were written than the weights say"):
            bench.measure_titan(1, PLAIN)
    monkeypatch.setattr(end_to_end.Plan, "max_output_len", lambda plan, batch: 3)
    with pytest.raises(RuntimeError, match="ended early"):
        bench.measure_titan(1, PLAIN)
    assert not bench.engine.scheduler.has_unfinished


@pytest.mark.parametrize(("target", "draft"), [(LLAMA_8B, DRAFT_OF_8B), (LLAMA_1B, DRAFT_OF_1B)])
def test_a_draft_reads_a_tenth_of_its_target(target: LlamaConfig, draft: LlamaConfig) -> None:
    sizes = []
    for each in (target, draft):
        config = ModelConfig.read(each, "LlamaForCausalLM")
        sizes.append(weight_bytes_per_step(Decoder(config, dtype=torch.bfloat16, backend=TorchBackend(torch.device("meta")))))
    assert sizes[1] / sizes[0] == pytest.approx(0.1, abs=0.005)

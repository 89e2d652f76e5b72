"""The GPU check: its bookkeeping with made-up sections, and its sections at tiny shapes in Triton's interpreter."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from interpreted import triton_backend
from torch import Tensor

from titan.bench import gpu_check
from titan.bench.gpu import attention, ceilings, end_to_end
from titan.bench.gpu.attention import LLAMA_3_8B, AttentionBench, uniform_shape
from titan.bench.gpu.attention_batches import Shape as Step
from titan.bench.gpu.attention_batches import make_layout
from titan.bench.gpu.attention_peers import PEERS
from titan.bench.gpu.end_to_end import EndToEnd, Plan
from titan.bench.gpu.random_models import DRAFT_OF_1B, DRAFT_OF_8B, LLAMA_1B, LLAMA_8B, Shape, weight_bytes_per_step
from titan.bench.gpu.sections import Goal, Row, Section, Setting, Task, run_isolated, run_section
from titan.bench.gpu.timing import covered_seconds
from titan.bench.peers.transformers_peer import StaticPeer
from titan.bench.profiling import timed_passes
from titan.core.step import Acceptance
from titan.kernels.torch.backend import TorchBackend
from titan.kernels.triton.tools import INTERPRETED
from titan.models.config import ModelConfig
from titan.models.decoder import Decoder

TINY = Setting(torch.device("cpu" if INTERPRETED else "cuda:0"), is_tiny=True, copy_bandwidth=1e9)


def fail() -> Row:
    raise RuntimeError("it did\nnot work")


def section_of(tasks: Sequence[Task], name: str = "made up", seconds: float = 10) -> Section:
    return Section(name, name.title(), f"What {name} is.", seconds, {"figure": ".1f"}, lambda setting: tasks)


def run(section: Section, seconds: float = 1000, setting: Setting = TINY, clock: Callable[[], float] = lambda: 0.0) -> list[Row]:
    rows: list[Row] = []
    run_section(section, setting, seconds, rows.append, clock)
    return rows


def test_an_error_ends_its_own_task_only_and_peers_may_fail() -> None:
    tasks = [
        Task("broken", fail, 1),
        Task("absent", fail, 1, is_peer=True),
        Task("fine", lambda: Row({"figure": 1.0}), 1),
        Task("wrong", lambda: Row({"figure": 2.0}, problem="numbers are off"), 1),
    ]
    rows = run(section_of(tasks))
    assert [(row.name, row.status) for row in rows] == [
        ("broken", "failed"),
        ("absent", "unavailable"),
        ("fine", "ok"),
        ("wrong", "wrong"),
    ]
    assert [row.problem for row in rows] == ["RuntimeError: it did not work"] * 2 + [None, "numbers are off"]


def test_tasks_without_time_say_so() -> None:
    now = 0.0

    def take(seconds: float) -> Row:
        nonlocal now
        now += seconds
        return Row()

    tasks = [Task("important", partial(take, 7), 5), Task("long", partial(take, 4), 4), Task("short", partial(take, 2), 2)]
    rows = run(section_of(tasks), seconds=10, clock=lambda: now)
    assert [(row.name, row.status, row.seconds) for row in rows] == [
        ("important", "ok", 7.0),
        ("long", "skipped", 0.0),
        ("short", "ok", 2.0),
    ]
    assert rows[1].problem == "out of time: 3 s are left, it takes 4 s"


def test_goals_of_tiny_shapes_are_nobody_s() -> None:
    goal = Goal("speed", 1.0, 2.0)
    section = section_of([Task("goal", lambda: Row(goals=[goal]), 1)])
    assert run(section)[0].goals == ()
    assert run(section, setting=replace(TINY, is_tiny=False))[0].goals == (goal,)


def test_a_goal_is_met_from_its_side() -> None:
    assert Goal("", 2.0, 2.0).is_met and not Goal("", 2.0, 1.9).is_met
    assert Goal("", 2.0, 2.0, is_at_most=True).is_met and not Goal("", 2.0, 2.1, is_at_most=True).is_met
    assert not Goal("", 2.0, float("nan")).is_met and not Goal("", 2.0, float("nan"), is_at_most=True).is_met


MADE_UP_MODULE = """
import os, time
from titan.bench.gpu.sections import Row, Section, Task

def crash(setting):
    return [Task("lives", lambda: Row({"figure": float(setting.seed)}), 1), Task("dies", lambda: os._exit(7), 1)]

def hang(setting):
    return [Task("hangs", lambda: time.sleep(1000), 1)]

CRASHING, HANGING = (Section(f.__name__, "", "", 10, {}, f) for f in (crash, hang))
"""


def test_a_process_that_dies_or_hangs_costs_the_rows_it_has_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_up_sections.py").write_text(MADE_UP_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))  # other processes can import it
    made_up = __import__("made_up_sections")
    told: list[Row] = []
    rows = run_isolated(made_up.CRASHING, replace(TINY, seed=5), 1000, told.append)
    assert [(row.name, row.status, row.problem) for row in rows] == [
        ("lives", "ok", None),
        ("what came next", "failed", "the process ended with status 7"),
    ]
    assert rows[0].figures == {"figure": 5.0} and told == rows
    (row,) = run_isolated(made_up.HANGING, TINY, 0, told.append, grace=0.1)
    assert row.status == "failed" and row.problem == "ended after 0 s without an answer"
    del sys.modules["made_up_sections"]


def in_this_process(section: Section, setting: Setting, seconds: float, note: Callable[[Row], None]) -> list[Row]:
    rows = run(section, seconds, setting)
    for row in rows:
        note(row)
    return rows


def test_time_that_a_section_leaves_is_the_next_one_s(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("titan.bench.gpu_check.time.monotonic", lambda: now)
    given = []

    def take_six(section: Section, setting: Setting, seconds: float, note: Callable[[Row], None]) -> list[Row]:
        nonlocal now
        now += 6
        given.append(seconds)
        return []

    assert list(gpu_check.run_sections([section_of([], "first", 10), section_of([], "second", 30)], TINY, 80, take_six)) == [[], []]
    assert given == [20, 74]


def test_the_check_writes_after_every_section_and_fails_with_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = section_of([Task("broken", fail, 1), Task("fine", lambda: Row({"figure": 1.0}), 1)], "bad")
    last = section_of([Task("goal", lambda: Row({"figure": 2.0}), 1)], "last")
    monkeypatch.setattr(gpu_check, "SECTIONS", (ceilings.SECTION, bad, last))
    path = tmp_path / "check.json"
    seen = []

    def run_and_look(section: Section, setting: Setting, seconds: float, note: Callable[[Row], None]) -> list[Row]:
        seen.append((section.name, setting.copy_bandwidth, json.loads(path.read_text()) if path.exists() else None))
        return in_this_process(section, setting, seconds, note)

    assert gpu_check.main(["--tiny", "--json", str(path), "--threads", "1"], run_and_look) == 1
    names, bandwidths, documents = zip(*seen, strict=True)
    assert names == ("ceilings", "bad", "last")
    assert bandwidths[0] is None and bandwidths[1] == bandwidths[2] > 0
    assert documents[0] is None and not documents[1]["is_complete"]
    assert [row["section"] for row in documents[1]["rows"]] == ["ceilings", "ceilings"]
    final = json.loads(path.read_text())
    assert final["is_complete"] and {"triton", "torch"} <= final["provenance"]["versions"].keys()
    assert [(row["name"], row["status"]) for row in final["rows"]][2:] == [("broken", "failed"), ("fine", "ok"), ("goal", "ok")]
    shown = capsys.readouterr()
    assert "failed: RuntimeError: it did not work" in shown.out and "warning: bad, broken: RuntimeError" in shown.out
    assert "What last is." in shown.out
    assert gpu_check.main(["--tiny", "--only", "last", "--threads", "1"], in_this_process) == 0


def test_an_interrupted_check_shows_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(section: Section, setting: Setting, seconds: float, note: Callable[[Row], None]) -> list[Row]:
        if section is not ceilings.SECTION:
            raise KeyboardInterrupt
        return in_this_process(section, setting, seconds, note)

    assert gpu_check.main(["--tiny", "--threads", "1"], interrupted) == 0
    shown = capsys.readouterr().out
    assert "## Ceilings" in shown and "interrupted" in shown and "## Attention" not in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_full_shapes_need_a_device() -> None:
    with pytest.raises(ValueError, match="gpu_check needs a CUDA device: there is none; --tiny"):
        gpu_check.main([])


def test_goals_are_listed_with_what_became_of_them() -> None:
    goals = Goal("speed-up", 2.2, 2.5), Goal("host share", 0.05, 0.5, is_at_most=True)
    assert gpu_check.goal_table([Row(goals=goals, section="speed", name="fast")]).rows == [
        ["speed: fast", "speed-up", "at least 2.2", "2.5", "met"],
        ["speed: fast", "host share", "at most 0.05", "0.5", "missed"],
    ]


def test_all_sections_fit_into_six_minutes() -> None:
    assert sum(section.seconds for section in gpu_check.SECTIONS) <= 335  # and 20 s for the task that is still at it


def test_overlapping_work_of_a_device_counts_once() -> None:
    assert covered_seconds([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.0), (2.2, 2.9)], max_gap=0.5) == 4.0
    assert covered_seconds([(0.0, 1.0), (1.25, 2.0)], max_gap=0.5) == 2.0  # between two kernels of a graph
    assert covered_seconds([], max_gap=1.0) == 0.0


# ----- attention


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_others_agree_with_titan_at_tiny_shapes() -> None:
    rows = {row.name: row for row in run(attention.SECTION)}
    flashinfer = rows.pop("2 x 150, FlashInfer, fa2")
    assert flashinfer.status == "unavailable" and "No module named 'flashinfer'" in str(flashinfer.problem)
    assert {name: row.problem for name, row in rows.items() if row.status != "ok"} == {}
    assert list(rows) == [
        "1 x 40, titan",
        "2 x 150, titan",
        "30 and 90, titan",
        "2 x 150, plan of a step",
        "2 x 150, titan, unsplit",
        "2 x 150, gather + SDPA",
        "2 x 150, FlexAttention, compiled",
    ]
    titan, sdpa = rows["2 x 150, titan"].figures, rows["2 x 150, gather + SDPA"].figures
    assert sdpa["x titan"] == pytest.approx(sdpa["us"] / titan["us"])  # type: ignore[operator]
    assert titan["of bandwidth"] == pytest.approx(titan["floor us"] / titan["us"])  # type: ignore[operator]


class FakeFlashInfer:
    """The documented semantics of FlashInfer's wrapper, densely."""

    def __init__(self, workspace: Tensor, kv_layout: str, *, backend: str) -> None:
        assert kv_layout == "HND" and workspace.dtype == torch.uint8

    def plan(self, *arguments: Any, **options: Any) -> None:
        self.q_starts, self.page_starts, self.pages, self.last_page_lens, *self.sizes = arguments
        self.options = options
        for tensor in arguments[:4]:
            assert tensor.dtype == torch.int32

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        num_heads, num_kv_heads, _, page_size = self.sizes
        output, mask_start = torch.empty_like(q), 0
        for i, last in enumerate(self.last_page_lens.tolist()):
            rows = q[self.q_starts[i] : self.q_starts[i + 1]]
            pages = self.pages[self.page_starts[i] : self.page_starts[i + 1]].long()
            kv_len = (len(pages) - 1) * page_size + last
            keys, values = (
                each[pages].transpose(0, 1).flatten(1, 2)[:, :kv_len].repeat_interleave(num_heads // num_kv_heads, 0) for each in kv
            )
            mask = self.options["custom_mask"][mask_start : mask_start + len(rows) * kv_len].view(len(rows), kv_len)
            mask_start += mask.numel()
            scores = torch.einsum("thd,hnd->htn", rows.float(), keys.float()) * self.options["sm_scale"]
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            output[self.q_starts[i] : self.q_starts[i + 1]] = torch.einsum("htn,hnd->thd", weights, values.float()).to(q.dtype)
        assert mask_start == self.options["custom_mask"].numel()
        return output


def test_flashinfer_is_told_the_same_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = FakeFlashInfer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    measured = AttentionBench(TINY).measure_peer(Step("", attention.TINY, (20, 41)), "FlashInfer, fa2")
    assert measured.problem is None and measured.goals == []


def test_a_peer_that_sees_other_slots_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Step("", attention.TINY, (20, 20))
    monkeypatch.setattr(Step, "visible", lambda step, context, device: torch.ones(7, context + 7, device=device) > 0)
    problem = AttentionBench(TINY).measure_peer(shape, "gather + SDPA").problem
    assert problem is not None and problem.startswith("disagrees with titan by")


@pytest.mark.parametrize(
    ("batch", "context", "kv_megabytes", "microseconds"),
    [(1, 32768, 134, 31.3), (8, 8192, 269, 62.7), (32, 8192, 1075, 251), (128, 1024, 541, 129), (128, 32768, 17184, 4000)],
)
def test_floors_are_those_of_the_roofline(batch: int, context: int, kv_megabytes: float, microseconds: float) -> None:
    num_bytes = uniform_shape(LLAMA_3_8B, batch, context).num_bytes
    assert num_bytes / 4.3e12 * 1e6 == pytest.approx(microseconds, rel=0.005)
    assert num_bytes - batch * 7 * 32 * 128 * 4 == pytest.approx(kv_megabytes * 1e6, rel=0.01)


@pytest.mark.parametrize(("batch", "context", "goal"), [(32, 8192, 0.85), (8, 8192, 0.75), (1, 32768, 0.65), (1, 8192, None)])
def test_the_goal_of_a_row_follows_from_its_floor(
    batch: int, context: int, goal: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = AttentionBench(replace(TINY, copy_bandwidth=4.3e12))
    monkeypatch.setattr(bench, "make_case", lambda shape: None)
    monkeypatch.setattr(attention, "titan_attention", lambda case: None)
    monkeypatch.setattr(bench, "time_layer", lambda case, attend: 1e-3)
    goals = bench.measure_titan(uniform_shape(LLAMA_3_8B, batch, context)).goals
    assert [each.required for each in goals] == ([] if goal is None else [goal])


def test_every_compared_row_has_all_peers_behind_titan_s_own() -> None:
    names = [task.name for task in attention.make_tasks(replace(TINY, is_tiny=False))]
    of_titan = [f"{batch} x {context}, titan" for batch, context in attention.SHAPES]
    assert names[: len(of_titan)] == of_titan
    assert {f"{batch} x {context}, {peer}" for batch, context in attention.COMPARED for peer in PEERS} < set(names)


def test_blocks_that_form_pages_stay_together() -> None:
    layout = make_layout(Step("", attention.TINY, (100, 300)), seed=1, device=TINY.device, blocks_per_page=8)
    pages = layout.block_table.view(2, -1, 8)
    assert ((pages - pages[:, :, :1]) == torch.arange(8, device=TINY.device)).all() and (pages[:, :, 0] % 8 == 0).all()
    assert len({*pages[0, :1, 0].tolist(), *pages[1, :3, 0].tolist()}) == 4


# ----- end to end


@pytest.fixture(scope="module")
def bench() -> EndToEnd:
    return EndToEnd(Plan(LLAMA_8B, DRAFT_OF_8B, has_goals=True).shrunk(), TINY)


def test_whole_engines_run_at_tiny_shapes(bench: EndToEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_to_end, "EndToEnd", lambda plan, setting: bench)
    rows = {row.name: row for row in run(end_to_end.SECTION_8B)}
    assert {name: row.problem for name, row in rows.items() if row.status != "ok"} == {}
    assert list(rows) == [
        "1, plain",
        "1, acceptance 0.8",
        "3, plain",
        "3, acceptance 0.8",
        "2, transformers generate",
        "2, transformers continuous batching",
    ]
    plain, drafted = rows["1, plain"].figures, rows["1, acceptance 0.8"].figures
    assert plain["tokens/step"] == 1.0 and drafted["expected"] == pytest.approx(3.951, abs=1e-3)
    assert drafted["x plain"] == pytest.approx(drafted["tokens/s"] / plain["tokens/s"])  # type: ignore[operator]


@pytest.mark.parametrize(("acceptance", "tokens_per_step"), [(1.0, 7), (0.0, 1)])
def test_acceptance_is_dialled_and_the_draft_is_paid_for(acceptance: float, tokens_per_step: int, bench: EndToEnd) -> None:
    drafter: Any = bench.engine.drafter
    window = bench.run_titan(2, acceptance)
    assert window.num_tokens == 2 * window.num_steps * tokens_per_step
    num_steps = bench.engine.counters.num_steps
    with timed_passes(drafter.runner) as passes:
        bench.run_titan(2, acceptance)
    assert passes.num_calls == 6 * (bench.engine.counters.num_steps - num_steps)
    assert not bench.engine.scheduler.has_unfinished


def test_recorded_tokens_take_the_place_of_those_that_a_draft_left_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting, the target's pass and verification are what they are without a recording; warm-ups accept nothing, too."""
    monkeypatch.setattr("titan.draft.registry._FACTORIES", {})  # each engine registers its drafter
    bench = EndToEnd(Plan(LLAMA_8B, DRAFT_OF_8B).shrunk(), TINY)
    bench.backend = triton_backend()
    found: list[Acceptance] = []
    bench.engine.observers.append(lambda plan, acceptance: found.append(acceptance))
    window = bench.run_titan(2, 1.0)  # which refuses other tokens than those of the recording
    assert window.num_tokens == 2 * window.num_steps * 7
    assert len(found) > window.num_steps and {len(path) for each in found for path in each.paths} == {0, 6}
    trees = [each.trees for each in found[1:]]  # the first step is the prefill's
    assert all((each.counts == 6).all() and each.is_chain.all() for each in trees)
    assert all(each[row].draft_slots.tolist() == [0, 1, 2, 3, 4, -1] for each in trees for row in range(2))  # type: ignore[union-attr]


def test_the_same_weights_write_the_same_in_transformers(bench: EndToEnd) -> None:
    prompts = bench._prompts(2)
    written = StaticPeer(bench.transformers_model).run([{"prompt": prompt, "output_len": 5} for prompt in prompts], 2)
    expected = [[(prompt[-1] + 1 + i) % 300 for i in range(5)] for prompt in prompts]
    assert [each["token_ids"] for each in written["requests"]] == expected
    weights = dict(bench.transformers_model.named_parameters())
    assert weights["model.layers.1.self_attn.k_proj.weight"].data_ptr() > bench.target.layers[1]["qkv_weight"].data_ptr()  # type: ignore[index]


def test_a_text_that_the_weights_do_not_say_is_noticed(bench: EndToEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_to_end, "continuation", lambda prompt, length, vocab_size: [0] * length)
    with pytest.raises(RuntimeError, match="wrote other tokens than its weights say"):
        bench.run_titan(1, None)
    assert not bench.engine.scheduler.has_unfinished


def test_a_request_that_ends_early_is_noticed_and_does_not_hang(bench: EndToEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "max_output_len", lambda plan, batch: 3)
    with pytest.raises(RuntimeError, match="ended early: length"):
        bench.run_titan(1, None)
    assert not bench.engine.scheduler.has_unfinished


@pytest.mark.parametrize(("target", "draft"), [(LLAMA_8B, DRAFT_OF_8B), (LLAMA_1B, DRAFT_OF_1B)])
def test_a_draft_reads_a_tenth_of_its_target(target: Shape, draft: Shape) -> None:
    sizes = []
    for shape in (target, draft):
        config = ModelConfig.read(shape.config(64), "LlamaForCausalLM")
        sizes.append(weight_bytes_per_step(Decoder(config, dtype=torch.bfloat16, backend=TorchBackend(torch.device("meta")))))
    assert sizes[1] / sizes[0] == pytest.approx(0.1, abs=0.005)

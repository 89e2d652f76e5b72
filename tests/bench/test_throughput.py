"""The throughput bench: every mode gives a row, rows add up, and bad input gets a clear line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import Zoo

from titan.bench import runners, throughput
from titan.bench.charts import LineChart, StackedBars
from titan.bench.noise import Spread
from titan.bench.profiling import Shares
from titan.bench.runners import PeerMode, TitanRunner
from titan.bench.runs import Percentiles, RequestRun, Run, StepCounts
from titan.bench.throughput import Bench, main, modes_at, parse_arguments
from titan.bench.throughput_report import (
    bound_notes,
    bound_table,
    claim_table,
    latency_table,
    make_charts,
    make_claims,
    throughput_answer,
)
from titan.bench.throughput_rows import Sample, ShareSample, make_rows, make_sample
from titan.bench.workloads import Workload
from titan.cli import main as titan_main

FAKE = PeerMode("a fake", str(Path(__file__).with_name("fake_peer")))


@pytest.fixture
def fake_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines beside Titan: one that answers, one that fails in its second run."""
    monkeypatch.setitem(runners.PEER_MODES, "fake", FAKE)
    monkeypatch.setitem(runners.PEER_MODES, "broken", replace(FAKE, options={"fails": "run"}))
    for name in ("fake", "broken"):
        monkeypatch.setitem(runners.DESCRIPTIONS, name, "a fake")


def run(zoo: Zoo, folder: Path, *options: str) -> dict[str, Any]:
    models = ["--model", zoo.path("llama"), "--draft-model", zoo.path("llama~"), "--threads", str(torch.get_num_threads())]
    files = [f"--{kind}={folder / 'run'}.{kind}" for kind in ("json", "markdown", "html")]
    main([*models, "--dtype", "float32", *files, *options])
    result: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return result


SIZES = ["--prompt-len", "4-20", "--output-len", "3-12", "--rounds", "2", "--waves", "2"]


@pytest.mark.usefixtures("fake_peers")
def test_every_mode_gives_a_row_and_titan_the_same_outputs(zoo: Zoo, tmp_path: Path) -> None:
    modes = ["titan", "titan-draft", "titan-static", "titan-single", "fake", "broken"]
    result = run(zoo, tmp_path, *SIZES, "--concurrency", "1", "3", "--modes", *modes)
    rows = {(row["mode"], row["concurrency"]): row for row in result["rows"]}
    same_at_one = {"titan-static", "titan-single"}
    assert set(rows) == {(mode, 3) for mode in modes[:5]} | {(mode, 1) for mode in modes[:5] if mode not in same_at_one}
    for (mode, concurrency), row in rows.items():
        assert row["num_rounds"] == 2 and row["num_outputs"] == 4 * concurrency
        assert row["num_equal"] == (0 if mode == "fake" else row["num_outputs"]), mode
        assert row["ratios"].keys() == {other for other, at in rows if at == concurrency} - {mode}
        assert row["latency"]["p50"] <= row["latency"]["p90"] <= row["latency"]["p99"]
        assert ("p50" in row["latency_ratios"]) == (mode != "titan")
        assert (row["host_share"] is not None) == (mode in ("titan", "titan-draft"))
        assert row["cpu_use"] >= 0
    assert rows["titan", 3]["mean_acceptance_length"] == 1 < rows["titan-draft", 3]["mean_acceptance_length"]
    assert rows["titan-single", 3]["mean_batch_size"] == 1 < rows["titan", 3]["mean_batch_size"] <= 3
    assert len(rows["titan-draft", 3]["acceptance_per_depth"]) > 1
    [problem] = [line for line in result["warnings"] if "broken" in line]
    assert problem == "broken ended at 1 request at once in float32: broken failed: RuntimeError: out of memory"
    assert result["provenance"]["versions"]["fake"] == "1.0"
    text, page = (tmp_path / "run.markdown").read_text(), (tmp_path / "run.html").read_text()
    for title in (
        "Throughput, float32",
        "Latency of requests, float32, 3 at once",
        "Acceptance per depth",
        "Speed-up over acceptance",
    ):
        assert title in page
    assert "time goes" in page and "broken failed" in text
    assert "tokens/s over no batching" in text and "## What bounds the gain of drafts" in text


def test_a_profile_counts_decode_steps_at_the_context_asked_for(zoo: Zoo, tmp_path: Path) -> None:
    sizes = ["--context-len", "24", "--output-len", "8", "--rounds", "1", "--concurrency", "4"]
    result = run(zoo, tmp_path, "--profile", *sizes)
    assert result["rows"] == []
    assert [entry["mode"] for entry in result["shares"]] == ["titan", "titan-draft"]
    for entry in result["shares"]:
        assert entry["concurrency"] == 4 and entry["context_len"] == 24
        parts = [entry["shares"][name] for name in ("host", "draft", "target")]
        assert sum(parts) == pytest.approx(1) and all(0 < part < 1 for part in parts[::2])
        assert (parts[1] > 0) == (entry["mode"] == "titan-draft")
    assert result["shares"][0]["shares"]["num_steps"] == 7  # the first token comes from the prefill
    assert "| float32 | titan       |" in (tmp_path / "run.markdown").read_text()


def test_an_interrupt_keeps_what_was_measured(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_all = Bench._run_all

    def interrupt_second(self: Bench, modes: Any, place: Any, round_id: int | None, *rest: Any) -> None:
        if round_id == 1:
            raise KeyboardInterrupt
        run_all(self, modes, place, round_id, *rest)

    monkeypatch.setattr(Bench, "_run_all", interrupt_second)
    result = run(zoo, tmp_path, *SIZES, "--concurrency", "2", "--modes", "titan", "titan-single")
    assert [(row["mode"], row["num_rounds"]) for row in result["rows"]] == [("titan", 1), ("titan-single", 1)]
    assert not result["is_complete"]
    assert "interrupted: only what was measured until then is shown" in (tmp_path / "run.markdown").read_text()


def test_a_mode_that_fails_is_dropped_and_the_others_go_on(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The draft's step fails in the second round, with requests in the engine that the other modes share."""
    run_titan, calls = TitanRunner.run, []

    def run_or_fail(self: TitanRunner, workload: Workload, concurrency: int) -> Run:
        calls.append(self.uses_draft)
        assert not self.llm.engine.scheduler.has_unfinished
        if calls.count(True) == 4 and self.uses_draft:  # each round is a warm-up and a run
            with monkeypatch.context() as patch:
                patch.setattr(self.llm.engine.kv, "commit", lambda *_: 1 / 0)
                return run_titan(self, workload, concurrency)
        return run_titan(self, workload, concurrency)

    monkeypatch.setattr(TitanRunner, "run", run_or_fail)
    result = run(zoo, tmp_path, *SIZES, "--concurrency", "2", "--modes", "titan", "titan-draft", "titan-static")
    rows = {row["mode"]: row for row in result["rows"]}
    assert {mode: row["num_rounds"] for mode, row in rows.items()} == {"titan": 2, "titan-draft": 1, "titan-static": 2}
    assert all(row["num_equal"] == row["num_outputs"] for row in rows.values())
    [problem] = [line for line in result["warnings"] if "ended" in line]
    assert problem == "titan-draft ended at 2 requests at once in float32: ZeroDivisionError: division by zero"
    assert result["is_complete"]
    last = [line for line in capsys.readouterr().err.splitlines() if "profiled" in line][-1]
    assert "] 6/6 " in last  # two rounds of titan, two static ones, one with the draft, a profile: nothing that did not run


def test_a_mode_whose_profile_fails_is_dropped(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_with_draft(*_: Any, use_speculative: bool, **__: Any) -> Shares:
        if use_speculative:
            raise RuntimeError("out\nof memory")
        return Shares(num_steps=1, step_seconds=1.0, host=0.5, draft=0.0, target=0.5, attention=0.25)

    monkeypatch.setattr(throughput, "profile_shares", fail_with_draft)
    sizes = ["--context-len", "24", "--output-len", "8", "--rounds", "2", "--concurrency", "2"]
    result = run(zoo, tmp_path, "--profile", *sizes)
    assert [entry["mode"] for entry in result["shares"]] == ["titan", "titan"]
    assert result["warnings"] == ["titan-draft ended at 2 requests at once in float32: RuntimeError: out of memory"]


def test_what_was_measured_is_published_before_an_error_goes_on(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "_measure_shares", lambda *_, **__: 1 / 0)  # nothing that a mode does
    with pytest.raises(ZeroDivisionError):
        run(zoo, tmp_path, *SIZES, "--concurrency", "2", "--modes", "titan")
    result = json.loads((tmp_path / "run.json").read_text())
    assert [row["num_rounds"] for row in result["rows"]] == [2] and not result["is_complete"]


def test_rows_that_a_bad_draft_rules_out_do_not_stop_the_others(zoo: Zoo, tmp_path: Path) -> None:
    result = run(
        zoo, tmp_path, *SIZES, "--draft-model", zoo.path("small_vocab"), "--concurrency", "2", "--modes", "titan", "titan-draft"
    )
    assert [row["mode"] for row in result["rows"]] == ["titan"]
    assert any(line.startswith("titan-draft is left out: ") and "another vocabulary" in line for line in result["warnings"])


def test_nothing_that_can_run_is_one_line_and_no_file(
    zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where there are no environments
    options = ["--model", zoo.path("llama"), "--modes", "vllm", "--dtype", "float32", "--json", "run.json"]
    assert titan_main(["bench", "throughput", *options, "--threads", str(torch.get_num_threads())]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("titan: nothing was measured; vllm is left out: not installed in .peers/vllm: make it with")
    assert not (tmp_path / "run.json").exists()


def sample(mode: str, round_id: int, seconds: float, *, length: float = 1.0, num_steps: int = 10) -> Sample:
    """A run of two requests of 50 tokens each, the second of which ends at ``seconds``."""
    steps = StepCounts(num_steps, seconds / num_steps, 2.0, 0.25, 0.5, [4, 2], [3, 1])
    requests = [RequestRun([1] * 50, 0.1, seconds / 2), RequestRun([2] * 50, 0.1, seconds)]
    run_ = Run(requests, seconds, cpu_seconds=seconds, mean_acceptance_length=length, steps=steps)
    return make_sample(("float32", 2, mode), round_id, run_, num_threads=2, num_equal=1, load_average=float(round_id))


def test_rows_sum_up_rounds() -> None:
    samples = [sample("titan", 0, 10.0), sample("titan-draft", 0, 5.0), sample("titan", 1, 100.0), sample("titan-draft", 1, 25.0)]
    plain, draft = make_rows(samples, [])
    assert draft.tokens_per_second == Spread(12.0, 4.0, 20.0, 2)
    assert draft.ratios == {"titan": Spread(3.0, 2.0, 4.0, 2)}  # of the ratios within the rounds
    assert draft.latency_ratios["p50"].median == pytest.approx((0.5 + 0.25) / 2)
    assert draft.latency == Percentiles.of([2.5, 5.0, 12.5, 25.0])
    assert draft.requests_per_second == pytest.approx((2 / 5 + 2 / 25) / 2)
    assert draft.acceptance_per_depth == [0.75, 0.5]
    assert (draft.cpu_use, draft.mean_batch_size, draft.mean_kv_usage, draft.peak_kv_usage) == (0.5, 2.0, 0.25, 0.5)
    assert (draft.num_equal, draft.num_outputs, draft.load_average) == (2, 4, 1.0)
    assert plain.latency_ratios == {} and plain.ratios["titan-draft"].median == pytest.approx((0.5 + 0.25) / 2)


def test_each_percentile_of_the_latency_is_compared_with_its_own() -> None:
    samples = [replace(sample("titan", 0, 4.0), latencies=[1.0, 4.0]), replace(sample("titan-draft", 0, 4.0), latencies=[2.0, 4.0])]
    ratios = make_rows(samples, [])[1].latency_ratios
    assert ratios["p50"].median == pytest.approx(3.0 / 2.5)
    assert ratios["p99"].median == pytest.approx(3.98 / 3.97)


def test_the_headline_stands_beside_the_row_with_the_most_requests() -> None:
    few = [replace(sample(mode, 0, 10.0), concurrency=1) for mode in ("titan", "titan-draft")]
    many = [sample("titan", 0, 10.0), sample("titan-draft", 0, 8.0), sample("titan-single", 0, 40.0)]
    claims = make_claims(make_rows([*few, *many], []))
    assert [claim.headline for claim in claims] == [9.3, 1.5, 0.53, 0.39]
    assert [claim.measured.median for claim in claims if claim.measured] == pytest.approx([5.0, 1.25, 0.8, 0.8])
    assert {claim.concurrency for claim in claims} == {2}


def test_beside_the_headline_stands_what_bounds_each_figure_here() -> None:
    """Steps: 1 s for two requests, 0.8 s for one, 2 s with drafts."""
    plain, single = sample("titan", 0, 10.0), sample("titan-single", 0, 40.0, num_steps=50)
    drafted = sample("titan-draft", 0, 8.0, length=3.0, num_steps=4)
    table = claim_table(make_claims(make_rows([plain, single, drafted], [])))
    assert [(row[1], row[2], row[4], row[5]) for row in table.rows] == [
        (
            "tokens/s over no batching",
            "batching: 2.0 requests per step of 1.25x the time of one request's = 1.60x, times the gain of drafts",
            "9.3",
            "5.00",
        ),
        (
            "tokens/s over continuous batching",
            "drafts: 3.00 tokens per step of 2.00x the time of one without = 1.50x",
            "1.5",
            "1.25",
        ),
        (
            "P50 latency over continuous batching",
            "1 over the gain in tokens/s, as all requests are there from the start",
            "0.53",
            "0.80",
        ),
        ("P99 latency over continuous batching", "the same, for outputs whose drafts are accepted least", "0.39", "0.80"),
    ]
    unknown = make_claims(make_rows([replace(drafted, steps=None)], []))
    assert [claim.bound for claim in unknown][:2] == ["batching, times the gain of drafts", "drafts"]


def test_the_bound_is_the_acceptance_length_over_the_ratio_of_the_steps() -> None:
    samples = [sample("titan", 0, 10.0), sample("titan-draft", 0, 8.0, length=3.0, num_steps=4)]
    shares = Shares(num_steps=4, step_seconds=2.0, host=0.2, draft=0.3, target=0.5, attention=0.1)
    assert len(bound_notes(make_rows(samples, []))) == 1 and bound_notes(make_rows(samples[:1], [])) == []
    for known, parts in (
        ([ShareSample("float32", 2, "titan-draft", 9.0, shares, 0.0)], ["0.60", "1.00", "0.40"]),
        ([], ["-", "-", "-"]),
    ):
        [row] = bound_table(make_rows(samples, []), known).rows
        assert row == ["float32", "2", "3.00", "2.00", *parts, "1.50", "1.25"]


def test_a_round_in_which_the_machine_slept_does_not_move_the_bound() -> None:
    samples = [sample("titan", i, 10.0) for i in range(3)]
    samples += [sample("titan-draft", i, seconds, length=3.0, num_steps=4) for i, seconds in enumerate((8.0, 8.0, 4000.0))]
    [row] = bound_table(make_rows(samples, []), []).rows
    assert row[3].startswith("2.00 ±") and row[-2] == "1.50" and row[-1].startswith("1.25 ±")
    assert make_rows(samples, [])[1].step_seconds == 2.0


def test_the_end_of_a_batch_is_not_taken_for_the_pace_of_its_tokens() -> None:
    rows = make_rows([sample("titan", 0, 10.0), sample("titan-static", 0, 10.0), sample("transformers-static", 0, 10.0)], [])
    assert [row.between_tokens is None for row in rows] == [False, True, True]
    assert latency_table(rows).rows[1][-2:] == ["-", "-"]


def test_the_answer_is_what_speculation_gains_or_else_the_fastest_mode() -> None:
    samples = [sample(mode, i, rate) for i in range(2) for mode, rate in (("titan", 10.0), ("titan-draft", 5.0 + i))]
    rows = make_rows(samples, [])
    ratio = rows[1].ratios["titan"].format(2)
    assert throughput_answer(rows, []) == f"Tokens/s with speculation over none: {ratio} at 2 at once in float32."
    assert throughput_answer(rows[:1], []).startswith("Fastest: titan, ")


def test_charts_show_the_samples() -> None:
    samples = [sample("titan", 0, 10.0), sample("titan-draft", 0, 8.0, length=3.0)]
    charts = {chart.title: chart for chart in make_charts(make_rows(samples, []), samples, [])}
    throughput_chart, speed_up = charts["Throughput, float32"], charts["Speed-up over acceptance"]
    assert isinstance(throughput_chart, LineChart) and isinstance(speed_up, LineChart)
    assert {each.name: each.points for each in throughput_chart.series} == {"titan": [(2, 10.0)], "titan-draft": [(2, 12.5)]}
    assert [each.points for each in speed_up.series] == [[(3.0, 1.25)]]
    depths = charts["Acceptance per depth"]
    assert isinstance(depths, LineChart) and depths.series[0].points == [(1, 0.75), (2, 0.5)]
    assert not any(isinstance(chart, StackedBars) for chart in charts.values())


def test_one_request_at_a_time_is_measured_once() -> None:
    modes = ["titan-static", "titan-single", "transformers-assisted", "titan-draft", "titan"]
    assert modes_at(modes, 1) == ["titan", "transformers-assisted", "titan-draft"]
    assert modes_at(modes, 8) == ["titan", "titan-static", "titan-single", "titan-draft"]
    assert modes_at(["titan-single"], 1) == ["titan-single"]


def test_quick_is_a_preset_that_other_options_refine() -> None:
    quick = parse_arguments(["--quick"])
    assert (quick.dtype, quick.concurrency, str(quick.output_len), quick.rounds, quick.waves) == (
        ["float32"],
        [1, 8],
        "16-64",
        3,
        4,
    )
    assert quick.modes == ["titan", "titan-draft", "titan-static", "titan-single", "transformers-static"]
    assert parse_arguments(["--quick", "--concurrency", "4"]).concurrency == [4]
    full = parse_arguments([])
    assert (full.dtype, full.concurrency, str(full.output_len), full.rounds, full.waves) == (
        ["float32", "bfloat16"], [1, 8, 32], "128", 3, 1,
    )  # fmt: skip
    assert parse_arguments(["--output-len", "16-512"]).waves == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "at least 1"),
        (["--output-len", "9-3"], "'9-3' is not a length"),
        (["--peer", "triton=x"], "'triton=x' is not allowed: give NAME=WHERE, where NAME is one of vllm, openvino, llama.cpp"),
    ],
)
def test_bad_options_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(options)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "x", "--modes", "titan-draft"], "give --draft-model"),
        (["--draft-model", "ngram", "--modes", "vllm-draft"], "--modes vllm-draft is not possible here"),
        (["--draft-model", "ngram", "--profile", "--modes", "transformers-static"], "allowed are titan, titan-draft"),
        (["--draft-model", "ngram", "--profile", "--context-len", "64"], "more than half of --output-len 128"),
        (["--profile", "--output-len", "4-8"], "--output-len 4-8, which --profile takes as one length"),
        (["--draft-model", "./nowhere"], "'./nowhere' does not exist"),
    ],
)
def test_what_does_not_go_together_is_one_line_without_the_usage(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert titan_main(["bench", "throughput", *options]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("titan: ") and message in line


def test_bad_prompts_are_a_line_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput.Bench, "run", lambda self: pytest.fail("it began to work"))
    (tmp_path / "empty.txt").write_text("\n \n")
    threads = ["--threads", str(torch.get_num_threads())]
    for prompts, message in (("poetry", "prompts 'poetry' are unknown"), (str(tmp_path / "empty.txt"), "is empty")):
        assert titan_main(["bench", "throughput", "--quick", "--prompts", prompts, *threads]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("titan: ") and message in line


def test_the_command_lists_its_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert titan_main(["bench", "--help"]) == 0
    assert "throughput " in capsys.readouterr().out
    assert titan_main(["bench"]) == 2

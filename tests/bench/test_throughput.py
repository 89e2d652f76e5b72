"""The throughput bench: every mode gives a row, figures mean what they say, and bad input gets a clear line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from zoo import Zoo

from titan.bench.engine_run import run_workload
from titan.bench.modes import MODES, Mode
from titan.bench.runs import RequestRun, Run
from titan.bench.samples import Sample, make_rows
from titan.bench.throughput import (
    ThroughputBench,
    main,
    parse_arguments,
    throughput_answer,
    throughput_tables,
    timed_sample,
    with_ratios,
)
from titan.bench.workloads import Workload
from titan.cli import main as titan_main
from titan.engine import Engine

FAKE = Mode("a fake", engine=str(Path(__file__).with_name("fake")))
OURS = ["titan", "titan-draft", "titan-static", "titan-single"]
SIZES = ["--prompt-len", "4-20", "--output-len", "3-12", "--rounds", "2", "--waves", "2", "--concurrency"]


def run(zoo: Zoo, folder: Path, *options: str) -> dict[str, Any]:
    models = ["--model", zoo.path("llama"), "--draft-model", zoo.path("llama~"), "--threads", str(torch.get_num_threads())]
    files = [f"--{kind}={folder / 'run'}.{kind}" for kind in ("json", "markdown")]
    main([*models, "--dtype", "float32", *files, *options])
    result: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return result


def test_every_mode_gives_a_row_and_titan_the_same_outputs(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines beside Titan: one answers, the other fails in its first run."""
    monkeypatch.setitem(MODES, "fake", FAKE)
    monkeypatch.setitem(MODES, "broken", replace(FAKE, options={"fails": "run"}))
    result = run(zoo, tmp_path, *SIZES, "1", "3", "--modes", *OURS, "fake", "broken")
    rows = {(row["labels"]["mode"], row["labels"]["at once"]): row["figures"] for row in result["rows"]}
    assert set(rows) == {(mode, 3) for mode in (*OURS, "fake")} | {(mode, 1) for mode in ("titan", "titan-draft", "fake")}
    for (mode, at_once), figures in rows.items():
        assert figures["tokens/s"]["num_rounds"] == 2
        assert figures["equal outputs"]["minimum"] == figures["equal outputs"]["maximum"] == (mode != "fake"), mode
        assert {f"x {other}" for other, at in rows if at == at_once} - {f"x {mode}"} <= figures.keys()
        assert (figures["CPU"]["median"] > 0 or mode == "fake") and ("P50 x titan" in figures) == (mode != "titan")
        assert ("between tokens P50, ms" in figures) == (mode != "titan-static")  # where requests end with their batch
    assert rows["titan", 3]["tokens/step"]["median"] == 1 < rows["titan-draft", 3]["tokens/step"]["median"]
    assert rows["titan-single", 3]["batch"]["median"] == 1 < rows["titan", 3]["batch"]["median"] <= 3
    assert {mode for (mode, _), figures in rows.items() if "host" in figures} == {*OURS}
    assert result["warnings"] == ["broken ended at 1 request at once in float32: RuntimeError: out of memory"]
    versions = result["provenance"]["versions"]
    assert versions["fake"] == "1.0" and "kernels" in versions
    assert "Titan over the others" in (tmp_path / "run.markdown").read_text()


def test_decode_steps_have_their_mean_context_and_a_pass_is_over_its_products_and_kv(zoo: Zoo, tmp_path: Path) -> None:
    sizes = ["--prompt-len", "20", "--output-len", "8", "--rounds", "2", "--concurrency", "4", "--device", "cpu"]
    result = run(zoo, tmp_path, *sizes, "--modes", *OURS[:2])
    assert [sample["labels"]["mode"] for sample in result["samples"]] == [*OURS[:2], *OURS[1::-1]]
    for sample in result["samples"]:
        figures, is_plain = sample["figures"], sample["labels"]["mode"] == "titan"
        assert figures["context"] == 24 and (figures["draft"] > 0) != is_plain
        assert ("ms/products and KV" in figures) == ("pass x products and KV" in figures) == is_plain
        if is_plain:
            assert figures["ms/target pass"] == pytest.approx(figures["ms/products and KV"] * figures["pass x products and KV"])
            assert figures["ms/products and KV"] > 0


@pytest.mark.parametrize(
    ("error", "warning"),
    [
        (KeyboardInterrupt(), "interrupted: only what was measured until then is shown"),
        (ValueError("no"), "titan-draft ended at 2 requests at once in float32: no"),
    ],
)
def test_what_was_measured_before_an_end_is_kept(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, warning: str
) -> None:
    """The draft's step fails in the second round, with requests in the engine that the other modes share, or is interrupted."""
    calls: list[int] = []

    def fail(engine: Engine, workload: Workload, concurrency: int) -> Run:
        calls.append(concurrency)
        with monkeypatch.context() as patch:
            if len(calls) == 4:  # each turn is a warm-up and a run
                patch.setattr(engine.kv, "commit", Mock(side_effect=error))
            return run_workload(engine, workload, concurrency)

    monkeypatch.setitem(MODES, "titan-draft", replace(MODES["titan-draft"], run=fail))
    result = run(zoo, tmp_path, *SIZES, "2", "--modes", *OURS[:3])
    rounds = {row["labels"]["mode"]: row["figures"]["tokens/s"]["num_rounds"] for row in result["rows"]}
    others = 1 if isinstance(error, KeyboardInterrupt) else 2  # whose turns of that round come afterwards
    assert rounds == {"titan": others, "titan-draft": 1, "titan-static": others}
    assert all(row["figures"]["equal outputs"]["minimum"] == 1 for row in result["rows"])
    assert result["warnings"] == [warning]


def test_modes_that_cannot_run_are_left_out_with_a_reason(
    zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where there are no environments
    names = ["titan", "titan-draft", "vllm"]
    result = run(zoo, tmp_path, *SIZES, "2", "--draft-model", zoo.path("small_vocab"), "--modes", *names)
    assert [row["labels"]["mode"] for row in result["rows"]] == ["titan"]
    draft, vllm = result["warnings"]
    assert draft.startswith("titan-draft left out: ") and "another vocabulary" in draft
    assert vllm == "vllm left out: there is no .peers/vllm/bin/python: bench/results/README.md says how to install vllm"
    (tmp_path / "run.json").unlink()
    assert "run/s" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"^nothing was measured; vllm left out: there is no "):
        run(zoo, tmp_path, "--modes", "vllm")
    assert "run/s" not in capsys.readouterr().err, "no bar of nothing"
    assert not (tmp_path / "run.json").exists()


def sample(mode: str, round_id: int, seconds: float) -> Sample:
    """A run of two requests of 50 tokens each, the second of which ends at ``seconds``."""
    requests = [RequestRun([1] * 50, seconds / 2, 0.1), RequestRun([2] * 50, seconds, 0.1)]
    return timed_sample({"dtype": "float32", "mode": mode, "at once": 2}, round_id, Run(requests, seconds), 0.0)


RUNS = [("titan", 0, 10.0), ("titan-draft", 0, 5.0), ("titan-single", 0, 40.0), ("titan", 1, 100.0), ("titan-draft", 1, 25.0)]
SAMPLES = with_ratios([sample(*each) for each in RUNS])


def test_tables_show_titan_over_the_others() -> None:
    tables = {table.title: table for table in throughput_tables(make_rows(SAMPLES))}
    over = tables["Titan over the others, tokens/s"]
    assert list(over.header) == ["dtype", "mode", "at once", "x titan", "x titan-draft", "x titan-single"]
    assert list(over.rows[0]) == ["float32", "titan", "2", "-", "0.38 ±33 %", "4.00"]


def test_latencies_are_over_those_of_titan_in_the_same_round() -> None:
    draft = make_rows(SAMPLES)[1]
    assert [draft.median(name) for name in ("P50 x titan", "P99 x titan")] == pytest.approx([0.375, 0.375])


def test_the_answer_is_what_speculation_gains() -> None:
    rows = make_rows(SAMPLES)
    assert throughput_answer(rows) == "Tokens/s with speculation over none: 3.00x ±33 % with 2 requests at once in float32."
    assert throughput_answer(rows[::2]) == "Fastest: titan, 5.5 ±82 % tokens/s with 2 requests at once in float32."


def test_quick_is_a_preset_that_other_options_refine() -> None:
    options = ["--threads", str(torch.get_num_threads())]
    quick = parse_arguments(["--quick", "--concurrency", "4", *options])
    assert (quick.dtype, quick.concurrency, str(quick.output_len), quick.waves) == (["float32"], [4], "16-64", 4)
    assert quick.modes == [*OURS, "transformers-static"]
    many, single = (parse_arguments(["--concurrency", number, *options]).modes for number in ("8", "1"))
    assert set(MODES) - set(many) == {"transformers-assisted"} and set(MODES) - set(single) == {"titan-static", "titan-single"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--peer", "triton=x"], "'triton=x' is not allowed: give NAME=FOLDER, where NAME is one of vllm, openvino"),
        (["--model", "x", "--modes", "titan-draft"], "give a model as --draft-model"),
        (["--modes", "transformers-assisted", "--concurrency", "8"], "it is measured with --concurrency 1 only"),
        (["--draft-model", "ngram", "--modes", "vllm-draft"], "--modes vllm-draft is not possible here"),
        (["--draft-model", "./nowhere"], "'./nowhere' does not exist"),
        (["--quick", "--device", "abacus"], "device='abacus'"),
        (["--quick", "--prompts", "poetry"], "prompts 'poetry' are unknown"),
    ],
)
def test_bad_options_are_a_line_before_anything_is_loaded(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThroughputBench, "run", lambda _: pytest.fail("it began to work"))
    try:
        status: Any = titan_main(["bench", "throughput", "--threads", str(torch.get_num_threads()), *options])
    except SystemExit as exit_:
        status = exit_.code
    line = capsys.readouterr().err.splitlines()[-1]
    assert status == 2 and line.startswith("titan") and message in line

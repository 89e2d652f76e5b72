from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from titan.bench import throughput
from titan.bench.make_pair import make_pair, pair_config, save_pair
from titan.bench.profiling import timed
from titan.bench.report import Spread, table_lines
from titan.bench.runners import MODES
from titan.bench.throughput import Bench, Sample, count_equal, make_rows
from titan.bench.workloads import random_prompts, take_workload


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_pair(make_pair(pair_config(vocab_size=131, hidden_size=32, intermediate_size=64, num_layers=3, num_heads=2)), folder)
    return folder


def run(pair: Path, folder: Path, *options: str) -> dict[str, Any]:
    models = ["--model", str(pair / "target"), "--draft-model", str(pair / "draft"), "--threads", str(torch.get_num_threads())]
    throughput.main([*models, "--json", str(folder / "run.json"), "--markdown", str(folder / "run.md"), *options])
    result: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return result


def sample(mode: str, round_id: int, tokens_per_second: float) -> Sample:
    return Sample("float32", 1, mode, round_id, tokens_per_second, None, 1, 0.0)


def test_every_mode_gives_a_row_and_the_same_outputs_in_float32(pair: Path, tmp_path: Path) -> None:
    sizes = ["--prompt-len", "20", "--output-len", "12", "--repeats", "1"]
    result = run(pair, tmp_path, "--dtype", "float32", "--concurrency", "1", "3", *sizes)
    rows = {(row["mode"], row["concurrency"]): row for row in result["rows"]}
    assert set(rows) == {(mode, 1) for mode in MODES} | {(mode, 3) for mode in MODES if mode != "transformers-assisted"}
    for (mode, concurrency), row in rows.items():
        assert row["dtype"] == "float32" and row["num_rounds"] == 1
        assert row["num_equal"] == row["num_outputs"] == concurrency, mode
        assert row["tokens_per_second"]["median"] > 0
        assert row["ratios"].keys() == {"titan", "transformers-static", "transformers-continuous"} - {mode}
        assert ("titan" in mode) == (row["host_share"] is not None) == (row["attention_share"] is not None)
    assert rows["titan", 3]["mean_acceptance_length"] == 1
    assert rows["titan-draft", 3]["mean_acceptance_length"] > 1
    assert rows["transformers-assisted", 1]["mean_acceptance_length"] > 1
    assert 0 < rows["titan", 3]["attention_share"] < 1 - rows["titan", 3]["host_share"] < 1


def test_provenance_stands_in_both_files(pair: Path, tmp_path: Path) -> None:
    sizes = ["--prompt-len", "8", "--output-len", "4", "--repeats", "1", "--concurrency", "1"]
    result = run(pair, tmp_path, "--dtype", "bfloat16", "--modes", "titan", *sizes)
    provenance, text = result["provenance"], (tmp_path / "run.md").read_text()
    assert provenance["command"].startswith("python -m titan.bench.throughput --model ")
    assert provenance["versions"].keys() >= {"titan", "torch", "transformers"}
    assert result["options"]["prompt_len"] == 8
    for value in ("command", "commit", "date", "machine"):
        assert provenance[value] and provenance[value] in text
    assert "load average" in text and "| bfloat16 | titan |" in text


def test_profile_counts_decode_steps_at_the_context_asked_for(pair: Path, tmp_path: Path) -> None:
    result = run(pair, tmp_path, "--profile", "--dtype", "float32", "--repeats", "1", "--context-len", "48", "--output-len", "8")
    assert result["rows"] == []
    assert [entry["mode"] for entry in result["shares"]] == ["titan", "titan-draft"]
    for entry in result["shares"]:
        assert entry["concurrency"] == 32 and entry["context_len"] == 48
        assert 0 < entry["shares"]["attention"] < 1 - entry["shares"]["host"] < 1
    assert result["shares"][0]["shares"]["num_steps"] == 7  # the first token comes from the prefill


def test_interrupt_keeps_the_rounds_before_it(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_round = Bench._measure_round

    def interrupt_second(self: Bench, dtype: str, round_id: int, *rest: Any) -> None:
        if round_id == 1:
            raise KeyboardInterrupt
        measure_round(self, dtype, round_id, *rest)

    monkeypatch.setattr(Bench, "_measure_round", interrupt_second)
    sizes = ["--prompt-len", "8", "--output-len", "4", "--concurrency", "1"]
    result = run(pair, tmp_path, "--dtype", "float32", "--modes", "titan", *sizes)
    assert [(row["mode"], row["num_rounds"]) for row in result["rows"]] == [("titan", 1)]


def test_ratio_is_the_median_of_the_ratios_within_rounds() -> None:
    bench = Bench(throughput.parse_arguments(["--draft-model", "ngram"]))
    for round_id, (slow, fast) in enumerate([(10.0, 20.0), (1.0, 3.0), (100.0, 110.0)]):
        bench.samples += [sample("titan", round_id, slow), sample("titan-draft", round_id, fast)]
    row = make_rows(bench, ["titan"])[1]
    assert row.ratios == {"titan": Spread(2.0, 1.1, 3.0)}
    assert row.tokens_per_second == Spread(20.0, 3.0, 110.0)


def test_outputs_that_differ_are_not_counted() -> None:
    assert count_equal([[1, 2], [3], [4]], [[1, 2], [3, 4], [4]]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "x", "--modes", "titan-draft"], "give --draft-model"),
        (["--draft-model", "ngram", "--profile", "--modes", "transformers-static"], "allowed are titan, titan-draft"),
        (["--draft-model", "ngram", "--profile", "--context-len", "64"], "more than half of --output-len 128"),
        (["--draft-model", "./nowhere"], "'./nowhere' does not exist"),
        (["--repeats", "0"], "at least 1"),
    ],
)
def test_bad_options_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        throughput.parse_arguments(options)
    assert message in capsys.readouterr().err


def test_random_prompts_are_distinct_and_reproducible() -> None:
    first, second = (take_workload(random_prompts(16, 131, seed=0), 8, output_len=4) for _ in range(2))
    assert first == second and first.num_output_tokens == 32
    assert len({tuple(prompt) for prompt in first.prompts}) == 8


def test_timer_counts_calls_and_leaves_no_trace() -> None:
    model = torch.nn.Linear(2, 2)
    with timed(model, "forward") as timer:
        model(torch.zeros(1, 2))
        model(torch.zeros(1, 2))
    assert timer.num_calls == 2 and timer.seconds > 0
    assert "forward" not in vars(model)


def test_table_is_aligned() -> None:
    assert table_lines(["mode", "n"], [["a", "10"]], num_text_columns=1) == ["| mode |  n |", "| ---- | -: |", "| a    | 10 |"]

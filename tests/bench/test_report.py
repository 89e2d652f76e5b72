"""Reports: the same figures on the terminal, in Markdown and JSON, and where they come from."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from zoo import Zoo

from titan.bench import adaptive, drafts, load, throughput
from titan.bench.loading import threads_on
from titan.bench.modes import load_modes
from titan.bench.options import KERNEL_VARIABLES, add_draft, add_target, bench_parser, parse
from titan.bench.provenance import collect_provenance, describe_checkout, describe_model
from titan.bench.report import Report, figure_table, measure_and_publish, table_lines
from titan.bench.samples import Row, Sample, make_rows

ROWS = make_rows(Sample({"mode": "<one>", "at once": 8}, i, {"tokens/s": value}) for i, value in enumerate((1.0, 1.5, 2.0)))
OTHERS = make_rows([Sample({"mode": "b"}, 0, {"P50, ms": 2.0})])
TABLE = figure_table("Speeds", [*ROWS, *OTHERS], ["mode", "at once"], {"tokens/s": "±.1f", "P50, ms": ".0f", "GPU": ".0%"})


@pytest.fixture
def report() -> Report:
    return Report("A <measurement>", "It is 1.5.", {"rows": ROWS}, [TABLE], ["What it is."], ["noisy & slow", "hot"])


def options(folder: Path, *argv: str) -> argparse.Namespace:
    """Of a run that writes all kinds of files to a new folder."""
    files = [part for kind in ("json", "markdown") for part in (f"--{kind}", str(folder / "new" / f"run.{kind}"))]
    return parse(bench_parser("latency", "Measures."), [*files, "--threads", "1", "--seed", "3", *argv])


@pytest.mark.parametrize(
    ("argv", "draft"),
    [([], "demo"), (["--model", "x"], None), (["--draft-model", "ngram"], "ngram"), (["--model", "x", "--draft-model", "y"], "y")],
)
def test_the_demo_s_draft_is_the_default_for_its_target_only(argv: list[str], draft: str | None) -> None:
    parser = bench_parser("latency", "Measures.")
    add_target(parser)
    add_draft(parser)
    assert parse(parser, ["--threads", "1", *argv]).draft_model == draft


@pytest.mark.parametrize(
    ("bench", "argv"),
    [
        ("drafts", "--temperature 0 0.0"),
        ("drafts", "--prompts code prose code"),
        ("drafts", "--draft ngram --draft demo --draft ngram"),
        ("adaptive", "--concurrency 1 1"),
        ("adaptive", "--fixed 4 4"),
        ("load", "--rate 2 4 2.0"),
        ("throughput", "--modes titan titan"),
        ("load", "--scenario fair fair"),
    ],
)
def test_variants_that_could_not_be_told_apart_are_refused_by_name(bench: str, argv: str) -> None:
    option = argv.split()[0]
    with pytest.raises(ValueError, match=f"{option} .* has a value twice: allowed is each once"):
        import_module(f"titan.bench.{bench}").main(["--threads", "1", *argv.split()])


@pytest.fixture
def three_threads() -> Iterator[list[str]]:
    """Options for as many, more than there may be cores; afterwards there are as many as before."""
    before = torch.get_num_threads()
    yield ["--threads", "3", "--dtype", "float32"]
    torch.set_num_threads(before)


def test_by_default_a_bench_has_the_threads_that_an_llm_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan.bench.options.available_cores", lambda: 3)
    for given, expected in ((1, 1), (8, 3)):  # to PyTorch, as by OMP_NUM_THREADS
        monkeypatch.setattr(torch, "get_num_threads", lambda given=given: given)
        assert bench_parser("any", None).get_default("threads") == expected


def test_titan_has_the_threads_that_other_engines_have_and_the_report_names(zoo: Zoo, three_threads: list[str]) -> None:
    given = [*three_threads, "--model", zoo.path("llama"), "--prompt-len", "4"]
    both = [*given, "--draft-model", zoo.path("llama~")]
    back_ends = [
        load.LoadBench(load.parse_arguments([*both, "--scenario", "fair"]))._backend,
        adaptive.AdaptiveBench(adaptive.parse_arguments([*both, "--device", "cpu"]))._backend,
        drafts.DraftBench(drafts.parse_arguments([*given, "--draft", "ngram"])).engine.backend,
    ]
    plain = throughput.ThroughputBench(throughput.parse_arguments([*both, "--device", "cpu"]))._options
    with load_modes(["titan"], {**plain, "dtype": "float32"}, {}, []) as loaded:
        assert loaded.engine is not None
        back_ends.append(loaded.engine.backend)
    for backend in back_ends:
        assert backend.facts()["device"] == "cpu, 3 threads" or not backend.is_host
    assert collect_provenance("").num_threads == 3 and threads_on(torch.device("cuda", 0)) is None


def test_a_table_has_labels_and_the_figures_that_any_row_has() -> None:
    assert table_lines(TABLE) == [
        "| mode  | at once |  tokens/s | P50, ms |",
        "| ----- | ------- | --------: | ------: |",
        "| <one> | 8       | 1.5 ±33 % |       - |",
        "| b     | -       |         - |       2 |",
    ]


def test_all_files_answer_first_and_hold_figures_warnings_and_provenance(
    report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in os.environ if each.startswith(KERNEL_VARIABLES)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TITAN_CPU_KERNELS", "torch")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "A B")
    measure_and_publish(options(tmp_path), tuple, lambda: replace(report, versions={"kernels": "PyTorch"}), {"target": "demo"})
    document, text = ((tmp_path / "new" / f"run.{kind}").read_text() for kind in ("json", "markdown"))
    shown, result = capsys.readouterr().out, json.loads(document)
    assert result["rows"][0]["figures"]["tokens/s"] == {"median": 1.5, "minimum": 1.0, "maximum": 2.0, "num_rounds": 3}
    assert result["answer"] == "It is 1.5." and result["warnings"] == ["noisy & slow", "hot"] and result["options"]["threads"] == 1
    provenance = result["provenance"]
    assert provenance["command"].startswith("ONEDNN_MAX_CPU_ISA='A B' TITAN_CPU_KERNELS=torch titan bench latency --json ")
    assert provenance["seed"] == 3 and provenance["versions"].keys() == {"titan", "torch", "transformers", "python", "kernels"}
    assert list(provenance["models"]) == ["target"] and re.fullmatch(r"demo \(fingerprint \w{12}\)", provenance["models"]["target"])
    for laid_out in (text, shown):
        places = [laid_out.index(part) for part in ("It is 1.5.", "one", "2 warnings", "hot", "What it is.", provenance["commit"])]
        assert places == sorted(places) and provenance["machine"] in laid_out and "load average" in laid_out
    assert "2 warnings: noisy & slow; hot" in text


@pytest.mark.parametrize("rows", [ROWS, []])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError("a step failed")])
def test_what_was_measured_is_published_whatever_ends_the_measurement(
    report: Report, tmp_path: Path, error: BaseException, rows: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    def measure() -> tuple[()]:
        raise error

    args = options(tmp_path)
    is_raised = isinstance(error, ZeroDivisionError) or not rows
    with pytest.raises(type(error)) if is_raised else nullcontext():
        measure_and_publish(args, measure, lambda: replace(report, results={"rows": rows}))
    assert args.json.exists() == bool(rows) == ("interrupted: only what was measured until then" in capsys.readouterr().out)


def test_nothing_measured_and_a_file_that_cannot_be_written_are_errors_and_do_not_cost_the_other_files(
    report: Report, tmp_path: Path
) -> None:
    args = options(tmp_path)
    with pytest.raises(ValueError, match=r"^nothing was measured; noisy & slow; hot$"):
        measure_and_publish(args, tuple, lambda: replace(report, results={"rows": []}))
    args.json.mkdir(parents=True)  # since the options were read
    with pytest.raises(ValueError, match=r"run\.json could not be written: IsADirectoryError"):
        measure_and_publish(args, tuple, lambda: report)
    assert args.markdown.exists()


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "run.json"):
        with pytest.raises(SystemExit):
            options(tmp_path, "--json", str(path))
        assert f"{path} is not allowed: it is a folder, or {path if path == tmp_path else path.parent}" in capsys.readouterr().err


def test_a_fingerprint_tells_models_apart_to_their_last_byte(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    names = []
    for last in (b"a", b"b", b"a"):
        (tmp_path / "model.safetensors").write_bytes(bytes(3 << 20) + last)
        names.append(describe_model(str(tmp_path)))
    assert names[0] == names[2] != names[1] and describe_model("ngram") == "ngram"
    assert describe_model("demo", "draft") != describe_model("demo", "target")


def test_a_new_python_file_is_a_change_and_a_new_result_is_none(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        name = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", "-C", str(tmp_path), *name, *words], check=True, capture_output=True, text=True).stdout

    git("init")
    git("commit", "--allow-empty", "-m", "first")
    folder = tmp_path / "bench"
    (folder / "results").mkdir(parents=True)
    assert describe_checkout(folder) == "unknown"  # a repository that does not hold this folder
    (folder / "runs.py").touch()
    git("add", "bench/runs.py")
    git("commit", "-m", "second")
    (folder / "results" / "plot.py").touch()
    commit = git("rev-parse", "HEAD").strip()
    assert describe_checkout(folder) == commit
    (tmp_path / "new.py").touch()
    assert describe_checkout(folder) == f"{commit} with changes"

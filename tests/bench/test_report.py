"""Reports: the same figures on the terminal, in Markdown, JSON and HTML."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from titan.bench import progress as progress_module
from titan.bench import report as report_module
from titan.bench.charts import LineChart, Series
from titan.bench.progress import Progress
from titan.bench.provenance import collect_provenance, describe_checkout, describe_model
from titan.bench.report import Report, Table, add_report_options, count, html, measure_and_publish, positive, publish, table_lines


@dataclass(frozen=True)
class Figure:
    name: str
    value: float


@pytest.fixture
def report() -> Report:
    return Report(
        title="A measurement",
        answer="It is 1.5.",
        provenance=collect_provenance("latency", ["--model", "a b"], models={"target": "demo", "draft": None}, seed=3),
        options={"path": Path("x")},
        results={"rows": [Figure("<one>", 1.5)]},
        tables=[Table("Figures", ["name", "value"], [["<one>", "1.5"]])],
        charts=[LineChart("Curve", "x", "y", [Series("s", [(1, 2)])])],
        notes=["What it is."],
        warnings=["noisy"],
        is_complete=False,
    )


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_report_options(parser)
    return parser.parse_args(argv)


def test_all_files_hold_figures_warnings_and_provenance(report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {kind: tmp_path / "new" / f"run.{kind}" for kind in ("json", "markdown", "html")}
    publish(report, parse(*(part for kind, path in files.items() for part in (f"--{kind}", str(path)))))
    document = json.loads(files["json"].read_text())
    assert document["rows"] == [{"name": "<one>", "value": 1.5}]
    assert document["options"] == {"path": "x"} and document["warnings"] == ["noisy"] and not document["is_complete"]
    provenance = document["provenance"]
    assert provenance["command"] == "titan bench latency --model 'a b'" and provenance["seed"] == 3
    assert re.fullmatch(r"demo \(fingerprint [0-9a-f]{12}\)", provenance["models"]["target"])
    assert list(provenance["models"]) == ["target"]
    assert provenance["versions"].keys() >= {"titan", "torch", "transformers", "python"}
    assert isinstance(provenance["has_changes"], bool)
    text, page, shown = files["markdown"].read_text(), files["html"].read_text(), capsys.readouterr().out
    for value in (
        provenance["commit"],
        provenance["date"],
        provenance["machine"],
        "load average",
        "noisy",
        "interrupted",
        "What it is.",
    ):
        assert value in text and value in page and value in shown
    for laid_out in (text, page, shown):
        places = [laid_out.index(part) for part in ("It is 1.5.", "one", "2 warnings", "What it is.", provenance["commit"])]
        assert places == sorted(places)
    assert page.index("It is 1.5.") < page.index("<svg") < page.index("<table") and "2 warnings: interrupted" in text
    assert "| <one> |   1.5 |" in text and "| <one> |   1.5 |" in shown
    assert '<td class="text">&lt;one&gt;</td><td>1.5</td>' in page and "<one>" not in page


def test_the_page_loads_nothing_from_elsewhere(report: Report) -> None:
    page = html(report)
    assert "<svg" in page
    assert not re.search(r'(src|href)="[^#]|url\([^#]|@import|<script', page)


def test_a_terminal_gets_a_drawn_table(report: Report, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    publish(report, parse())
    out = capsys.readouterr().out
    assert "┃" in out and "<one>" in out and "| <one>" not in out


def test_a_table_is_aligned() -> None:
    assert table_lines(["mode", "n"], [["a", "10"]], num_text_columns=1) == ["| mode |  n |", "| ---- | -: |", "| a    | 10 |"]


def test_a_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"one")
    first = describe_model(str(tmp_path))
    assert first == describe_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert describe_model(str(tmp_path)) != first
    assert describe_model("ngram") == "ngram"
    assert describe_model("demo", "draft") != describe_model("demo", "target")


def test_a_fingerprint_covers_all_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    names = []
    for last in (b"a", b"b"):
        (tmp_path / "model.safetensors").write_bytes(bytes(3 << 20) + last)
        names.append(describe_model(str(tmp_path)))
    assert names[0] != names[1]


def test_a_new_python_file_is_a_change_and_a_new_result_is_none(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        name = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", "-C", str(tmp_path), *name, *words], check=True, capture_output=True, text=True).stdout

    git("init")
    git("commit", "--allow-empty", "-m", "first")
    for name in ("bench/results/run.json", "bench/results/plot.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    folder = tmp_path / "bench"
    assert describe_checkout(folder) == (git("rev-parse", "HEAD").strip(), False)
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "new.py").touch()
    assert describe_checkout(folder)[1]


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for path, message in ((tmp_path, "it is a folder"), (tmp_path / "file" / "run.json", "is no folder")):
        with pytest.raises(SystemExit):
            parse("--json", str(path))
        assert message in capsys.readouterr().err
    assert parse("--json", str(tmp_path / "a" / "b.json")).json == tmp_path / "a" / "b.json"
    assert not (tmp_path / "a").exists()


def test_a_page_without_matplotlib_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report_module, "find_spec", lambda _: None)
    with pytest.raises(SystemExit):
        parse("--html", str(tmp_path / "run.html"))
    assert "a page needs matplotlib: pip install 'titan-spec[bench]'" in capsys.readouterr().err


def test_a_file_that_fails_does_not_cost_the_others(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {kind: tmp_path / f"run.{kind}" for kind in ("json", "markdown", "html")}
    args = parse(*(part for kind, path in files.items() for part in (f"--{kind}", str(path))))
    files["json"].mkdir()  # since the options were read
    monkeypatch.setattr(report_module, "print_report", lambda _: None)
    with pytest.raises(ValueError, match=r"run\.json could not be written"):
        publish(report, args)
    assert files["markdown"].exists() and files["html"].exists()


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5"])
def test_what_is_no_positive_integer_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text} is not allowed"):
        positive(text)


def test_the_time_left_leaves_out_what_came_before_the_first_unit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "log", lambda text: print(text, file=sys.stderr))
    times = iter([100.0, 104.0, 104.0])  # when the first unit is done, when the third is, and when that is asked again
    with Progress(5, clock=lambda: next(times)) as progress:
        progress.advance("a")
        assert progress.seconds_left is None
        progress.num_done += 1
        progress.advance("c")
        assert progress.seconds_left == 4.0  # two units at two seconds
    assert capsys.readouterr().err == "1/5 a\n3/5 c; about 4 s left\n"


def end_with(error: BaseException | None) -> None:
    """A measurement."""
    if error is not None:
        raise error


@pytest.mark.parametrize("error", [None, KeyboardInterrupt(), ZeroDivisionError("a step failed")])
def test_what_was_measured_is_published_whatever_ends_the_measurement(
    report: Report, tmp_path: Path, error: BaseException | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"

    def work() -> None:
        measure_and_publish(
            lambda: end_with(error), lambda is_complete: replace(report, is_complete=is_complete), parse("--json", str(path))
        )

    if isinstance(error, ZeroDivisionError):
        with pytest.raises(ZeroDivisionError, match="a step failed"):
            work()
    else:
        work()
    document = json.loads(path.read_text())
    assert document["rows"] == [{"name": "<one>", "value": 1.5}] and document["is_complete"] == (error is None)
    assert ("interrupted: reporting" in capsys.readouterr().err) == isinstance(error, KeyboardInterrupt)


@pytest.mark.parametrize(
    ("error", "message"),
    [(None, "^nothing was measured; noisy$"), (KeyboardInterrupt(), None), (ZeroDivisionError("a step failed"), "a step failed")],
)
def test_an_earlier_file_stays_as_it_is_if_nothing_was_measured(
    report: Report, tmp_path: Path, error: BaseException | None, message: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    path.write_text("the last run")
    empty = replace(report, results={"rows": []})
    with pytest.raises(ValueError if error is None else type(error), match=message):
        measure_and_publish(lambda: end_with(error), lambda _: empty, parse("--json", str(path)))
    assert path.read_text() == "the last run" and capsys.readouterr().out == ""


def test_one_thing_is_singular() -> None:
    assert [count(number, "request") for number in (1, 2)] == ["1 request", "2 requests"]

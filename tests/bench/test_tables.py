"""The README's tables come from the files in bench/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from titan.bench.tables import ROOT, drafts_table, latency_table, main, ratios_table, render, trees_table


def spread(median: float) -> dict[str, float]:
    return {"median": median, "minimum": median * 0.9, "maximum": median * 1.1}


def row(mode: str, concurrency: int, rate: float, **ratios: float) -> dict[str, Any]:
    figures = {"tokens_per_second": spread(rate), "ratios": {name: spread(value) for name, value in ratios.items()}}
    return {"dtype": "float32", "mode": mode, "concurrency": concurrency} | figures


def document(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"options": {"max_draft_tokens": 3}, "rows": list(rows)}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a page and one file of results."""
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    run = document(row("titan", 1, 50.0), row("titan-draft", 1, 75.0, titan=1.5))
    (results / "run.json").write_text(json.dumps(run))
    page = "before\n<!-- table: rates run.json -->\nold\n<!-- end of table -->\nafter\n"
    (tmp_path / "README.md").write_text(page)
    return tmp_path


def test_the_readme_is_up_to_date() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("<!-- table: ") >= 2
    assert main(["--check"]) == 0


def test_a_table_is_written_between_its_comments(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = ["--root", str(checkout)]
    assert main([*root, "--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert main(root) == 0 and main([*root, "--check"]) == 0
    lines = (checkout / "README.md").read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after" and "old" not in lines
    assert lines[2].split("|")[1:-1] == [" dtype   ", " mode        ", "    1 at once "]
    assert lines[4:6] == ["| float32 | titan       |         50.0 |", "| float32 | titan-draft | 75.0 (1.50x) |"]


def test_a_changed_figure_is_noticed(checkout: Path) -> None:
    root = ["--root", str(checkout)]
    main(root)
    path = checkout / "bench" / "results" / "run.json"
    path.write_text(path.read_text().replace("75.0", "76.0"))
    assert main([*root, "--check"]) == 1


def test_ratios_are_named_and_the_later_file_wins() -> None:
    old = document(row("titan", 1, 5.0, **{"transformers-static": 2.0}), row("titan-draft", 8, 9.0, titan=0.9))
    new = document(row("titan", 1, 5.0, **{"transformers-static": 2.5, "titan-draft": 0.5}))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ratios_table([old, new])]
    assert cells[0] == ["tokens/s", "requests", "float32"]
    assert cells[2:] == [
        ["Titan without a draft, over `transformers` `generate` (static batch)", "1", "2.50x ±10 %"],
        ["Titan with 3 draft tokens, over Titan without a draft", "8", "0.90x ±10 %"],
    ]


def cells_of(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_latency_is_laid_out_by_engine_and_rate() -> None:
    percentiles = {"p50": 0.25, "p90": 0.5, "p99": 1.5}
    figures = {"to_first_token": percentiles, "latency": percentiles, "goodput": spread(3.0)}
    rows = [{"engine": "no draft", "rate": rate, "excess": excess} | figures for rate, excess in ((2.0, -1.0), (4.5, 0.5))]
    cells = cells_of(latency_table([{"rows": rows}]))
    assert cells[2:] == [
        ["no draft", "2", "0.25", "1.50", "0.25", "1.50", "3.00", "no"],
        ["no draft", "4.5", "0.25", "1.50", "0.25", "1.50", "3.00", "yes"],
    ]


def test_drafts_are_laid_out_by_workload_and_temperature() -> None:
    def found(draft: str, temperature: float, length: float) -> dict[str, Any]:
        figures = {"mean_acceptance_length": length, "speed_up": spread(length / 2)}
        return {"draft": draft, "workload": "code", "temperature": temperature} | figures

    rows = [found("no draft", 0.0, 1.0), found("ngram", 0.0, 1.5), found("demo", 0.0, 3.0), found("demo", 0.8, 2.0)]
    cells = cells_of(drafts_table([{"rows": rows}]))
    assert cells[0] == ["draft", "code", "code at temperature 0.8"]
    assert cells[2:] == [["ngram", "1.50 (0.75x)", "-"], ["demo", "3.00 (1.50x)", "2.00 (1.00x)"]]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (
            "<!-- table: pies run.json -->\n<!-- end of table -->",
            "table 'pies' is unknown: allowed are ratios, rates, trees, latency, drafts",
        ),
        ("<!-- table: rates no.json -->\n<!-- end of table -->", "names no.json, which .* does not have"),
        ("<!-- table: rates run.json -->\n", "a table has no end"),
    ],
)
def test_a_comment_that_is_wrong_is_refused(checkout: Path, page: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(page, checkout / "bench" / "results")


def test_a_tree_without_the_figures_of_no_draft_has_no_ratio() -> None:
    figures = [
        {"variant": "auto, 6", "temperature": t, "tokens_per_step": 2.0, "speed_up": ratio}
        for t, ratio in ((0, None), (1, spread(1.5)))
    ]
    [*_, cells] = trees_table([document(*figures)])
    assert [cell.strip() for cell in cells.split("|")[2:4]] == ["2.00", "2.00 (1.50x)"]

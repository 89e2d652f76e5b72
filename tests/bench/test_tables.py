"""The README's tables come from the files in bench/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from titan.bench.tables import ROOT, main, render

PAIRS = """files = ["old.json", "new.json"]
rows = ["tokens/s", "at once"]
columns = "dtype"
cells = [
    { "tokens/s" = "Titan over vLLM", mode = "titan", text = "{x vllm:±.2fx}" },
    { "tokens/s" = "drafts", mode = "titan-draft", text = "{tokens/s:.1f} ({x titan:.2fx})" },
]
"""
TREES = """files = ["trees.json"]
rows = ["tree"]
columns = "temperature"
cells = [{ text = "{tokens/step:.2f} ({x no draft:.2fx})" }]
"""


def page(arguments: str) -> str:
    return f"before\n<!-- table\n{arguments}-->\nold\n<!-- end of table -->\nafter\n"


def row(labels: dict[str, Any], **figures: float) -> dict[str, Any]:
    spreads = {
        name.replace("_", " "): {"median": value, "minimum": 0.9 * value, "maximum": 1.1 * value, "num_rounds": 3}
        for name, value in figures.items()
    }
    return {"labels": labels, "figures": spreads}


def timed(mode: str, at_once: int, **figures: float) -> dict[str, Any]:
    return row({"dtype": "float32", "mode": mode, "at once": at_once}, **figures)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a page and files of results."""
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    draft = timed("titan-draft", 8, **{"tokens/s": 75.0, "x_titan": 0.9, "x_vllm": 9.0})
    trees = [
        row({"tree": tree, "temperature": temperature}, **{"tokens/step": 2.0}, **ratio)
        for temperature, tree, ratio in (
            (0.0, "no draft", {}),
            (0.0, "auto", {"x_no_draft": 1.25}),
            (0.7, "no draft", {}),
            (0.7, "sampled", {"x_no_draft": 1.5}),
            (0.7, "auto", {"x_no_draft": 1.75}),
        )
    ]
    files = {
        "old": [timed("titan", 1, x_vllm=2.0), timed("titan", 8, x_vllm=3.0), draft],
        "new": [timed("titan", 1, x_vllm=2.5), timed("vllm", 1, x_titan=0.4)],
        "trees": trees,
    }
    for name, rows in files.items():
        (results / f"{name}.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "README.md").write_text(page(PAIRS))
    return tmp_path


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]


def test_the_readme_is_up_to_date() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("<!-- table\n") >= 2
    assert main(["--check"]) == 0


def test_a_table_is_written_between_its_comments_and_the_last_file_wins(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = ["--root", str(checkout)]
    assert main([*root, "--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert main(root) == 0 and main([*root, "--check"]) == 0
    text = (checkout / "README.md").read_text()
    begin, end = page(PAIRS).split("\nold\n")
    assert text.startswith(begin) and text.endswith(end)
    assert cells(text) == [
        ["tokens/s", "at once", "float32"],
        ["-" * 15, "------:", "-" * 11 + ":"],
        ["Titan over vLLM", "1", "2.50x ±10 %"],
        ["", "8", "3.00x ±10 %"],
        ["drafts", "8", "75.0 (0.90x)"],
    ]
    path = checkout / "bench" / "results" / "new.json"
    path.write_text(path.read_text().replace("2.5", "2.6"))
    assert main([*root, "--check"]) == 1


def test_a_row_without_a_figure_has_no_cell_and_the_fullest_column_says_the_order(checkout: Path) -> None:
    assert cells(render(page(TREES), checkout / "bench" / "results"))[::2] == [
        ["tree", "temperature 0", "temperature 0.7"],
        ["sampled", "-", "2.00 (1.50x)"],
    ]
    assert cells(render(page(TREES), checkout / "bench" / "results"))[3] == ["auto", "2.00 (1.25x)", "2.00 (1.75x)"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (page(PAIRS.replace("x vllm", "x pies")), "'{x pies:±.2fx}'.* old.json, new.json have no such row"),
        (page(PAIRS).replace("<!-- end of table -->", ""), "a table has no end"),
        (page("files = pair.json"), "Invalid value"),
    ],
)
def test_a_comment_that_is_wrong_is_refused(checkout: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(text, checkout / "bench" / "results")

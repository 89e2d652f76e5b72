"""Micro-benchmarks: one real run in a process of its own, and comparisons with a stored one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import titan
from titan.bench import kernels
from titan.bench.kernels import make_rows, read_stored, slower_rows

ROOT = Path(titan.__file__).resolve().parents[1]


def benchmark(name: str, group: str, minimum: float) -> dict[str, Any]:
    return {"name": f"test_{name}", "group": group, "stats": {"min": minimum, "median": minimum * 2, "iqr": 0.1, "rounds": 7}}


NOW = [
    benchmark("norm[1]", "kernel", 3.0),
    benchmark("reference_kernel", "kernel", 2.0),
    benchmark("schedule[1]", "host", 8.0),
    benchmark("reference_host", "host", 4.0),
    benchmark("new", "host", 1.0),
]


def stored(name: str, minimum: float, relative: float | None) -> dict[str, Any]:
    return {"name": name, "minimum": minimum, "relative": relative}


def test_times_are_compared_over_the_reference_of_their_part_so_that_a_slower_machine_changes_nothing() -> None:
    before = [stored("norm[1]", 1.5, 1.5), stored("reference_kernel", 1.0, 1.0), stored("schedule[1]", 1.0, 1.0)]
    rows = {row.name: row for row in make_rows(NOW, before)}
    assert list(rows) == ["reference_host", "new", "schedule[1]", "reference_kernel", "norm[1]"]
    assert (rows["norm[1]"].relative, rows["norm[1]"].stored_ratio) == (1.5, 1.0)
    assert (rows["schedule[1]"].relative, rows["schedule[1]"].stored_ratio) == (2.0, 2.0)
    assert rows["reference_kernel"].stored_ratio == 2.0  # the machine itself
    assert rows["new"].stored_ratio is None
    assert (rows["norm[1]"].minimum, rows["norm[1]"].median, rows["norm[1]"].num_rounds) == (3.0, 6.0, 7)
    assert [row.name for row in slower_rows(list(rows.values()), 1.25)] == ["schedule[1]"]
    assert slower_rows(list(rows.values()), 2.0) == []


def test_an_interrupt_before_anything_was_measured_leaves_the_stored_run_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "run_benchmarks", lambda *_: ([], [], False))
    (tmp_path / "run.json").write_text("the last run")
    with pytest.raises(KeyboardInterrupt):
        kernels.main(["--save", str(tmp_path / "run.json"), "--threads", str(torch.get_num_threads())])
    assert (tmp_path / "run.json").read_text() == "the last run"


def test_without_a_reference_nothing_is_compared() -> None:
    [row] = make_rows([NOW[0]], [stored("norm[1]", 1.5, 1.5)])
    assert row.relative is None and row.stored_ratio is None


@pytest.mark.parametrize("content", [None, "", "{}", '{"rows": [{"draft": 1}], "provenance": {"machine": ""}}', "[1]"])
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=r"run\.json is not a run of titan bench kernels"):
        read_stored(tmp_path / "run.json")


def test_limits_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="must both be above 0"):
        kernels.main(["--threshold", "0"])


def test_the_faster_of_two_references_counts() -> None:
    found = [benchmark("reference_host[first]", "host", 4.0), benchmark("norm", "host", 6.0)]
    found.append(benchmark("reference_host[last]", "host", 3.0))
    assert {row.name: row.relative for row in make_rows(found, [])}["norm"] == 2.0
    assert make_rows(found[:2], [])[1].relative == 1.5  # interrupted before the last


def test_a_comparison_that_compares_less_than_it_should_warns_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, now = tmp_path / "first.json", tmp_path / "now.json"
    run_main(monkeypatch, path)
    document = json.loads(path.read_text())
    rows = document["rows"]

    def compare(kept: list[dict[str, Any]], *options: str) -> int:
        path.write_text(json.dumps(document | {"rows": kept}))
        capsys.readouterr()
        return run_main(monkeypatch, now, "--compare", str(path), "--fail", *options)

    assert compare([row for row in rows if row["name"] != "new"]) == 0
    assert "1 rows could not be compared" in capsys.readouterr().out
    assert compare([row for row in rows if row["name"].startswith("reference")]) == 1
    assert "3 rows could not be compared" in capsys.readouterr().out
    gone = [*rows, rows[-1] | {"name": "gone"}]
    assert compare(gone) == 1
    assert "missing, although the stored run has them: gone" in capsys.readouterr().out
    assert compare(gone, "--select", "norm") == 0
    with pytest.raises(ValueError, match="--fail is not allowed without --compare"):
        kernels.main(["--fail"])


def run_main(monkeypatch: pytest.MonkeyPatch, path: Path, *options: str) -> int:
    """Run the command line as if the benchmarks had found ``NOW``."""
    monkeypatch.setattr(kernels, "run_benchmarks", lambda *_: (NOW, [], True))
    return kernels.main(["--threads", "1", "--json", str(path), *options])


def test_a_run_that_is_slower_than_the_stored_one_warns_and_fails_if_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert run_main(monkeypatch, first) == 0
    assert run_main(monkeypatch, second, "--compare", str(first), "--fail") == 0
    document = json.loads(first.read_text())
    next(row for row in document["rows"] if row["name"] == "norm[1]")["relative"] /= 2
    first.write_text(json.dumps(document))
    capsys.readouterr()
    assert run_main(monkeypatch, second, "--compare", str(first)) == 0
    assert "warning: norm[1]: 2.00 x the stored run, more than 1.25" in capsys.readouterr().out
    assert run_main(monkeypatch, second, "--compare", str(first), "--fail") == 1
    assert run_main(monkeypatch, second, "--compare", str(first), "--fail", "--threshold", "2.5") == 0


SCRIPT = """
import sys
from titan.bench.kernels import main, run_benchmarks

status = main(sys.argv[1:])
try:
    run_benchmarks("nothing_of_that_name", 0.01, 0)
except ValueError as error:
    print("refused:", error)
sys.exit(status)
"""


def test_it_measures_kernels_and_the_host_and_refuses_a_selection_that_names_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    options = ["--threads", "1", "--seconds", "0.01", "--select", "norm and 1- or build_batch and 1]", "--save", str(path)]
    # in a process of its own, because pytest does not nest; and for pytest-benchmark none of a worker
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    command = [sys.executable, "-c", SCRIPT, *options]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    order = re.findall(r"\d/7 ([^;\n]+)", result.stderr)  # as the progress tells
    assert sorted(order[:2]) == ["reference_host[first]", "reference_kernel[first]"]
    assert sorted(order[-2:]) == ["reference_host[last]", "reference_kernel[last]"]
    assert {"reference_host[first]", "reference_kernel[last]", "build_batch[1]", "rms_norm[1-chosen]"} <= rows.keys()
    assert not [name for name in rows if "32" in name]
    assert all(0 < row["minimum"] <= row["median"] and row["relative"] > 0 for row in rows.values())
    assert "refused: --select 'nothing_of_that_name' names no benchmark" in result.stdout

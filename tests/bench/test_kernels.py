"""Micro-benchmarks: a real run, and comparisons with a stored one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from titan.bench import kernels
from titan.bench.kernels import FASTEST, MEDIAN, OVER_STORED, RELATIVE, complaints, make_rows, read_stored


def benchmark(name: str, part: str, fastest: float) -> dict[str, Any]:
    stats = {"min": fastest, "median": fastest * 2, "q1": fastest, "q3": fastest * 3, "rounds": 7}
    return {"name": f"test_{name}", "group": part, "stats": stats}


FOUND = [benchmark("norm[1]", "kernel", 3e-6), benchmark("schedule[1]", "host", 8e-6), benchmark("new[1]", "host", 1e-6)]
REFERENCES = {"kernel": 2e-6, "host": 4e-6}
STORED = {"norm[1]": 1.5, "schedule[1]": 1.0}
SLOWER = "schedule[1]: 2.00 x the stored run, more than 1.25"


def test_times_are_compared_over_the_reference_of_their_part_so_that_a_slower_machine_changes_nothing() -> None:
    rows = {str(row.labels["benchmark"]): row for row in make_rows(FOUND, REFERENCES, STORED)}
    found = {name: (row.median(RELATIVE), row.median(OVER_STORED)) for name, row in rows.items()}
    assert found == {"norm[1]": (1.5, 1.0), "schedule[1]": (2.0, 2.0), "new[1]": (0.25, None)}
    assert f"{rows['norm[1]'].figures[MEDIAN]:±.1f}" == "6.0 ±50 %"


def test_it_complains_of_what_is_slower_or_gone_and_when_nothing_compares() -> None:
    rows = make_rows(FOUND, REFERENCES, STORED)
    assert complaints(rows, STORED, 1.25, is_selection=False) == [SLOWER]
    assert complaints(rows, STORED, 2.5, is_selection=False) == []
    gone = STORED | {"gone": 1.0}
    assert complaints(rows, gone, 1.25, is_selection=False) == [SLOWER, "missing, although the stored run has them: gone"]
    assert complaints(rows, gone, 1.25, is_selection=True) == [SLOWER]
    assert complaints(make_rows(FOUND, REFERENCES, {}), {}, 1.25, is_selection=False) == ["nothing could be compared"]


@pytest.mark.parametrize("content", [None, "", "{}", '{"rows": [{"draft": 1}], "provenance": {"machine": ""}}', "[1]"])
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=r"run\.json is not a run of titan bench kernels"):
        read_stored(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("options", "message"), [(["--threshold", "0"], "must both be above 0"), (["--fail"], "without --compare")]
)
def test_options_that_are_not_allowed_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.main(options)


def test_a_run_measures_kernels_and_the_host_and_fails_the_next_if_asked_to(tmp_path: Path) -> None:
    """In processes of their own, because pytest does not nest; for pytest-benchmark they are no workers, and none interprets."""
    path = tmp_path / "run.json"
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name and name != "TRITON_INTERPRET"}

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        start = "from titan.cli import main; raise SystemExit(main())"
        command = [sys.executable, "-c", start, "bench", "kernels", "--threads", "1", "--seconds", "0.01", *options]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)

    first = run("--select", "rms_norm and 1- or build_batch and 1] or cuda_step and auto-1]", "--json", str(path))
    assert first.returncode == 0, first.stderr
    rows = {row["labels"]["benchmark"]: row["figures"] for row in json.loads(path.read_text())["rows"]}
    assert rows.keys() >= {"build_batch[1]", "cuda_step[auto-1]"} and any("rms_norm" in name for name in rows)
    assert not any("32" in name for name in rows)
    assert all(0 < row[FASTEST]["median"] <= row[MEDIAN]["median"] and row[RELATIVE]["median"] > 0 for row in rows.values())
    second = run("--select", "build_batch and 1]", "--compare", str(path), "--fail", "--threshold", "1e-9")
    assert second.returncode == 1 and "1 benchmark ran; 1 of 1 are slower than stored by more than 1e-09 x." in second.stdout
    assert "--select 'nothing' names no benchmark" in run("--select", "nothing").stderr

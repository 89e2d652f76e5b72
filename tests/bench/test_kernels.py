"""Micro-benchmarks: a real run, and what times are shown over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from titan.bench.kernels import FASTEST, MEDIAN, RELATIVE, make_rows


def benchmark(name: str, part: str, fastest: float) -> dict[str, Any]:
    stats = {"min": fastest, "median": fastest * 2, "q1": fastest, "q3": fastest * 3, "rounds": 7}
    return {"name": f"test_{name}", "group": part, "stats": stats}


def test_times_are_over_the_reference_of_their_part() -> None:
    found = [benchmark("swap[1]", "kernel", 3e-6), benchmark("schedule[1]", "host", 8e-6)]
    rows = {str(row.labels["benchmark"]): row for row in make_rows(found, {"kernel": 2e-6, "host": 4e-6})}
    assert {name: row.median(RELATIVE) for name, row in rows.items()} == {"swap[1]": 1.5, "schedule[1]": 2.0}
    assert f"{rows['swap[1]'].figures[MEDIAN]:±.1f}" == "6.0 ±50 %"


def test_a_run_measures_kernels_and_the_host(tmp_path: Path) -> None:
    """In processes of their own, because pytest does not nest; for pytest-benchmark they are no workers, and none interprets."""
    path = tmp_path / "run.json"
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name and name != "TRITON_INTERPRET"}

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        start = "from titan.cli import main; raise SystemExit(main())"
        command = [sys.executable, "-c", start, "bench", "kernels", "--threads", "1", "--seconds", "0.01", *options]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)

    found = run("--select", "copy_of or cuda_step and auto-1]", "--json", str(path))
    assert found.returncode == 0, found.stderr
    rows = {row["labels"]["benchmark"]: row["figures"] for row in json.loads(path.read_text())["rows"]}
    assert rows.keys() == {"copy_of_swapped_bytes", "cuda_step[auto-1]"}
    assert all(0 < row[FASTEST]["median"] <= row[MEDIAN]["median"] and row[RELATIVE]["median"] > 0 for row in rows.values())
    assert "--select 'nothing' names no benchmark" in run("--select", "nothing").stderr

"""Micro-benchmarks: a real run, and what is shown of times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan.bench.parts import FASTEST, MEDIAN, make_rows


def test_times_are_in_microseconds_and_medians_have_their_quartiles() -> None:
    stats = {"min": 3e-6, "median": 6e-6, "q1": 3e-6, "q3": 9e-6, "rounds": 7}
    [row] = make_rows([{"name": "test_swap[1]", "group": "kernel", "stats": stats}])
    assert row.labels == {"benchmark": "swap[1]", "part": "kernel"}
    assert [f"{row.figures[name]:±.1f}" for name in (FASTEST, MEDIAN)] == ["3.0", "6.0 ±50 %"]


@pytest.mark.long
def test_a_run_measures_copies_and_the_host(tmp_path: Path) -> None:
    """In processes of their own, because pytest does not nest; for pytest-benchmark they are no workers, and none interprets."""
    path = tmp_path / "run.json"
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name and name != "TRITON_INTERPRET"}

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        start = "from titan.cli import main; raise SystemExit(main())"
        command = [sys.executable, "-c", start, "bench", "parts", "--threads", "1", "--seconds", "0.01", *options]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)

    found = run("--select", "copy_of or cuda_step and auto-1]", "--json", str(path))
    assert found.returncode == 0, found.stderr
    rows = {row["labels"]["benchmark"]: row["figures"] for row in json.loads(path.read_text())["rows"]}
    assert rows.keys() == {"copy_of_swapped_bytes", "cuda_step[auto-1]"}
    assert all(0 < row[FASTEST]["median"] <= row[MEDIAN]["median"] for row in rows.values())
    assert "--select 'nothing' names no benchmark" in run("--select", "nothing").stderr

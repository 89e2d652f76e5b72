"""Micro-benchmarks: one real run in a process of its own, and comparisons with a stored one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import titan
from titan.bench import kernels
from titan.bench.kernels import FASTEST, MEDIAN, OVER_STORED, RELATIVE, complaints, make_rows, read_stored

ROOT = Path(titan.__file__).resolve().parents[1]


def benchmark(name: str, part: str, fastest: float) -> dict[str, Any]:
    stats = {"min": fastest, "median": fastest * 2, "q1": fastest, "q3": fastest * 3, "rounds": 7}
    return {"name": name, "group": part, "stats": stats}


NOW = [
    benchmark("norm[1]", "kernel", 3e-6),
    benchmark("reference_kernel[first]", "kernel", 2.5e-6),
    benchmark("reference_kernel[last]", "kernel", 2e-6),  # the faster of the two counts
    benchmark("schedule[1]", "host", 8e-6),
    benchmark("reference_host", "host", 4e-6),
    benchmark("new", "host", 1e-6),
]
STORED = {"norm[1]": {RELATIVE: 1.5}, "reference_host": {FASTEST: 2.0, RELATIVE: 1.0}, "schedule[1]": {RELATIVE: 1.0}}


def test_times_are_compared_over_the_reference_of_their_part_so_that_a_slower_machine_changes_nothing() -> None:
    rows = {str(row.labels["benchmark"]): row for row in make_rows(NOW, STORED)}
    assert list(rows) == ["reference_host", "new", "schedule[1]", "reference_kernel[first]", "reference_kernel[last]", "norm[1]"]
    found = {name: [row.median(RELATIVE), row.median(OVER_STORED)] for name, row in rows.items()}
    assert found["norm[1]"] == pytest.approx([1.5, 1.0]) and found["schedule[1]"] == pytest.approx([2.0, 2.0])
    assert found["reference_host"] == pytest.approx([1.0, 2.0])  # the machine itself
    assert found["new"][1] is None
    assert f"{rows['norm[1]'].figures[MEDIAN]:±.1f}" == "6.0 ±50 %"
    [row] = make_rows(NOW[:1], STORED)
    assert row.median(RELATIVE) is None and row.median(OVER_STORED) is None


def test_it_complains_of_what_is_slower_or_gone_and_when_nothing_compares() -> None:
    rows = make_rows(NOW, STORED)
    slower = "schedule[1]: 2.00 x the stored run, more than 1.25"
    assert complaints(rows, STORED, 1.25, is_selection=False) == [slower]
    assert complaints(rows, STORED, 2.5, is_selection=False) == []
    gone = STORED | {"gone": {RELATIVE: 1.0}}
    assert complaints(rows, gone, 1.25, is_selection=False) == [slower, "missing, although the stored run has them: gone"]
    assert complaints(rows, gone, 1.25, is_selection=True) == [slower]
    assert complaints(make_rows(NOW[:1], {}), {}, 1.25, is_selection=False) == ["nothing could be compared"]


@pytest.mark.parametrize("content", [None, "", "{}", '{"rows": [{"draft": 1}], "provenance": {"machine": ""}}', "[1]"])
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=r"run\.json is not a run of titan bench kernels"):
        read_stored(tmp_path / "run.json")


def test_a_stored_run_is_compared_and_fails_the_next_if_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = [benchmark("norm[1]", "kernel", 6e-6), *NOW[1:]]
    first = tmp_path / "first.json"
    compare = ["--compare", str(first)]
    for found, options, status in [
        (NOW, ["--save", str(first)], 0),
        (slow, compare, 0),
        (slow, [*compare, "--fail"], 1),
        (slow, [*compare, "--fail", "--threshold", "2.5"], 0),
    ]:
        monkeypatch.setattr(kernels, "run_benchmarks", lambda *_, found=found: (found, [], False))
        assert kernels.main(["--threads", "1", *options]) == status
    assert "; 1 of 3 are slower than stored by more than 1.25 x." in capsys.readouterr().out
    monkeypatch.setattr(kernels, "run_benchmarks", lambda *_: ([], [], True))
    stored = first.read_text()
    with pytest.raises(KeyboardInterrupt):  # before anything was measured
        kernels.main(["--threads", "1", "--save", str(first)])
    assert first.read_text() == stored


def test_options_that_are_not_allowed_are_refused() -> None:
    for options, message in [
        (["--threshold", "0"], "must both be above 0"),
        (["--fail"], "--fail is not allowed without --compare"),
    ]:
        with pytest.raises(ValueError, match=message):
            kernels.main(options)


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
    rows = {row["labels"]["benchmark"]: row["figures"] for row in json.loads(path.read_text())["rows"]}
    references = {f"reference_{part}[{moment}]" for part in ("host", "kernel") for moment in ("first", "last")}
    assert references | {"build_batch[1]", "operation[1-chosen-rms_norm]"} <= rows.keys()
    assert not [name for name in rows if "32" in name]
    assert all(0 < row[FASTEST]["median"] <= row[MEDIAN]["median"] and row[RELATIVE]["median"] > 0 for row in rows.values())
    assert "refused: --select 'nothing_of_that_name' names no benchmark" in result.stdout

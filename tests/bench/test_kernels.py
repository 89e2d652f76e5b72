"""Micro-benchmarks: a real run, and comparisons with a stored one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titan.bench import kernels
from titan.bench.kernels import FASTEST, MEDIAN, OVER_STORED, RELATIVE, call_seconds, complaints, make_rows, read_stored

TIMES = {("kernel", "norm[1]"): [3e-6, 6e-6, 6e-6, 9e-6], ("host", "schedule[1]"): [8e-6] * 4, ("host", "new[1]"): [1e-6] * 4}
REFERENCES = {"kernel": 2e-6, "host": 4e-6}
STORED = {"norm[1]": 1.5, "schedule[1]": 1.0}


def test_times_are_compared_over_the_reference_of_their_part_so_that_a_slower_machine_changes_nothing() -> None:
    rows = {str(row.labels["benchmark"]): row for row in make_rows(TIMES, REFERENCES, STORED)}
    found = {name: (row.median(RELATIVE), row.median(OVER_STORED)) for name, row in rows.items()}
    assert found == {"norm[1]": (1.5, 1.0), "schedule[1]": (2.0, 2.0), "new[1]": (0.25, None)}
    assert rows["norm[1]"].median(FASTEST) == pytest.approx(3.0)
    assert f"{rows['norm[1]'].figures[MEDIAN]:±.1f}" == "6.0 ±38 %"  # quartiles at 3.75 and 8.25


def test_it_complains_of_what_is_slower_or_gone_and_when_nothing_compares() -> None:
    rows = make_rows(TIMES, REFERENCES, STORED)
    slower = "schedule[1]: 2.00 x the stored run, more than 1.25"
    assert complaints(rows, STORED, 1.25, is_selection=False) == [slower]
    assert complaints(rows, STORED, 2.5, is_selection=False) == []
    gone = STORED | {"gone": 1.0}
    assert complaints(rows, gone, 1.25, is_selection=False) == [slower, "missing, although the stored run has them: gone"]
    assert complaints(rows, gone, 1.25, is_selection=True) == [slower]
    assert complaints(make_rows(TIMES, REFERENCES, {}), {}, 1.25, is_selection=False) == ["nothing could be compared"]


def test_a_call_is_made_no_more_often_than_it_may_be() -> None:
    made: list[int] = []
    assert len(call_seconds(lambda: made.append(1), 0.0, 1e9)) == kernels.MIN_ROUNDS
    made.clear()
    call_seconds(lambda: made.append(sum(range(10_000))), 10.0, 20)
    assert len(made) <= 20


@pytest.mark.parametrize("content", [None, "", "{}", '{"rows": [{"draft": 1}], "provenance": {"machine": ""}}', "[1]"])
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=r"run\.json is not a run of titan bench kernels"):
        read_stored(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fail"], "--fail is not allowed without --compare"),
        (["--select", "norm", "sample"], "--select norm sample is in no benchmark's name: there are tree_attention-verify-chosen"),
    ],
)
def test_options_that_are_not_allowed_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.main(options)


def test_a_run_measures_kernels_and_the_host_and_fails_the_next_if_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "NUM_REQUESTS", (1,))
    path = tmp_path / "run.json"
    options = ["--threads", "1", "--seconds", "0.001"]
    assert kernels.main([*options, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    rows = {row["labels"]["benchmark"]: row["figures"] for row in document["rows"]}
    assert len(rows) >= 24 and {"step-draft[1]", "rms_norm-verify-chosen[1]"} <= rows.keys() and not document["warnings"]
    assert all(0 < row[FASTEST]["median"] <= row[MEDIAN]["median"] and row[RELATIVE]["median"] > 0 for row in rows.values())
    compared = [*options, "--select", "schedule", "--compare", str(path)]
    for more, status in [([], 0), (["--fail"], 1), (["--fail", "--threshold", "1e9"], 0)]:
        assert kernels.main([*compared, "--threshold", "1e-9", *more]) == status
    assert "1 benchmark ran; 1 of 1 are slower than stored by more than 1e-09 x." in capsys.readouterr().out


def test_a_benchmark_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kernels, "NUM_REQUESTS", (1,))
    monkeypatch.setitem(kernels.KERNELS, "schedule_nothing", lambda stage: lambda: 1 / 0)
    assert kernels.main(["--threads", "1", "--seconds", "0.001", "--select", "schedule"]) == 1
    shown = capsys.readouterr().out
    assert "1 benchmark ran" in shown and "schedule_nothing[1] ended with the demo pair: ZeroDivisionError" in shown

"""The tuner: what it chooses when times are given, and what it says."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from titan.bench import tune
from titan.bench.gpu.sections import Row, Setting
from titan.bench.tune import RELATIVE, tuning_shapes
from titan.kernels.triton import tuning
from titan.kernels.triton.tools import INTERPRETED
from titan.kernels.triton.tuning import TileConfig, tile_config

TINY = Setting(torch.device("cpu" if INTERPRETED else "cuda:0"), is_tiny=True)
KEY = (tuning.SM90, 128, 2)
PRESENT = tuple(TileConfig(block_m, 64, 4, 5, 2) for block_m in tune.NUM_NODES)


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that tuning does not change, and less to try."""
    monkeypatch.setattr(tuning, "TABLE", {KEY: PRESENT})
    monkeypatch.setattr(tune, "TILES", [(16, 4, 3), (32, 4, 3)])
    monkeypatch.setattr(tune, "PROGRAMS", (2, 3))


def test_an_entry_is_for_the_device_that_it_is_timed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (10, 3))
    assert tune.table_key(64, torch.device("cuda:0")) == (103, 64, 2) and tune.table_key(64, torch.device("cpu")) == (90, 64, 2)


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({(16, 2): 0.9, (32, 2): 1.2, (32, 3): 0.5}, TileConfig(32, 32, 4, 3, 3)),  # with its number of programs
        ({(16, 2): 0.99}, PRESENT[1]),  # noise replaces nothing
    ],
)
def test_the_fastest_candidate_wins_if_it_is_faster_by_more_than_noise(
    times: dict[tuple[int, int], float], best: TileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds_per_layer(case: Any, attend: Any) -> float:
        (config,) = tuning.TABLE[KEY]
        return 1.0 if config in PRESENT else times.get((config.block_n, config.programs_per_multiprocessor), 2.0)

    monkeypatch.setattr(tune, "seconds_per_layer", seconds_per_layer)
    rows: list[Row] = []
    assert list(tune.tune(KEY, 32, TINY, rows))[-1] == best
    found = {(row.labels["block_n"], row.labels["programs"]): row.figures[RELATIVE] for row in rows}
    candidates = [*product((16, 32), (2, 3)), (64, 3)]  # but the present one
    assert len(rows) == len(candidates) and found == pytest.approx({each: times.get(each, 2.0) for each in candidates})
    assert tuning.TABLE == {KEY: PRESENT}


def test_a_candidate_must_be_faster_by_turns_with_the_present_one_mostly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one seems so by chance, the second is slowed once."""
    times = {TileConfig(32, 16, 4, 3, 2): [0.1, 0.1, 1.0, 1.0], TileConfig(32, 32, 4, 3, 2): [0.5, 5.0, 0.5, 0.5]}

    def seconds_per_layer(case: Any, attend: Any) -> float:
        (config,) = tuning.TABLE[KEY]
        return 1.0 if config in PRESENT else times[config].pop(0)

    monkeypatch.setattr(tune, "seconds_per_layer", seconds_per_layer)
    monkeypatch.setattr(tune, "PROGRAMS", (2,))
    rows: list[Row] = []
    assert list(tune.tune(KEY, 32, TINY, rows))[-1] == TileConfig(32, 32, 4, 3, 2)
    assert {row.labels["block_n"]: row.figures[RELATIVE] for row in rows} == pytest.approx({16: 1.0, 32: 0.5})
    assert not any(times.values())


def test_a_candidate_that_is_wrong_or_does_not_run_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    original = tune.titan

    def titan(case: Any) -> Any:
        (config,) = tuning.TABLE[KEY]
        if config.block_n == 16:
            raise RuntimeError("out of shared memory")
        output = original(case)(0)
        return lambda layer: output * 1.1 if config.block_n == 32 else output

    monkeypatch.setattr(tune, "titan", titan)
    monkeypatch.setattr(tune, "seconds_per_layer", lambda *_: 1.0)
    rows: list[Row] = []
    assert set(tune.tune(KEY, 32, TINY, rows)) == {PRESENT[1]}
    failed, wrong = tune.make_report(rows, {}, "").warnings
    assert failed == "1 candidate left out: RuntimeError: out of shared memory"
    assert wrong.startswith("1 candidate left out: disagrees by 1.0e-01")


@pytest.mark.parametrize("block_m", tune.NUM_NODES)
def test_the_batches_of_a_number_of_rows_get_tiles_of_as_many(block_m: int) -> None:
    for shape in tuning_shapes(128, block_m, is_tiny=False):
        rows, dtype = shape.query_len * shape.geometry.group, shape.geometry.dtype
        assert tile_config(rows, head_dim=128, dtype=dtype, device=torch.device("cpu")).block_m == block_m


def test_a_rehearsal_reports_what_it_tried_and_a_line_for_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "tune.json"
    assert tune.main(["--tiny", "--head-dims", "128", "--block-m", "16", "--json", str(report), "--threads", "1"]) == 0
    candidates = json.loads(report.read_text())["candidates"]
    assert candidates and all(each["problem"] is None and each["figures"][RELATIVE] > 0 for each in candidates)
    shown = capsys.readouterr().out
    assert f"{len(candidates)} of {len(candidates)} candidates could run" in shown
    assert "| (90, 128, 2) | TileConfig(16, " in shown

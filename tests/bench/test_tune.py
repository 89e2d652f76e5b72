"""The tuner: what it writes, and what it chooses when times are given."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from titan.bench import tune
from titan.bench.gpu.attention import AttentionBench
from titan.bench.gpu.sections import Setting
from titan.bench.tune import Space, Tuner, only, tuning_shapes, with_entry
from titan.kernels.triton import tuning
from titan.kernels.triton.tools import INTERPRETED
from titan.kernels.triton.tuning import TileConfig, tile_config

TINY = Setting(torch.device("cpu" if INTERPRETED else "cuda:0"), is_tiny=True)
SOURCE = Path(tuning.__file__).read_text(encoding="utf-8")
SPACE = Space(block_ns=(16, 32), num_warps=(4,), num_stages=(3,), programs=(2, 3))
KEY = (tuning.SM90, 128, 2)
PRESENT = tuple(TileConfig(block_m, 64, 4, 5, 2) for block_m in tune.BLOCK_MS)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that tuning does not change."""
    monkeypatch.setattr(tuning, "TABLE", {KEY: PRESENT})


def table_of(source: str) -> dict[tuple[int, int, int], tuple[TileConfig, ...]]:
    names: dict[str, Any] = {"__name__": tuning.__name__}
    exec(compile(source, "tuning.py", "exec", dont_inherit=True), names)
    table: dict[tuple[int, int, int], tuple[TileConfig, ...]] = names["TABLE"]
    return {key: tuple(TileConfig(*config_numbers(config)) for config in configs) for key, configs in table.items()}


def config_numbers(config: Any) -> tuple[int, ...]:
    """Of a class of the text's own."""
    return tuple(getattr(config, name) for name in TileConfig.__dataclass_fields__)


def test_an_entry_takes_the_place_of_the_one_that_is_there_and_nothing_else_changes() -> None:
    configs = (TileConfig(16, 128, 8, 7, 4), TileConfig(32, 64, 4, 3, 1))
    changed = with_entry(SOURCE, KEY, configs, "a card, Triton 9")
    assert table_of(changed) == table_of(SOURCE) | {KEY: configs}
    assert "    (SM90, 128, 2): (  # a card, Triton 9\n" in changed
    (old,) = re.findall(r"    \(SM90, 128, 2\): \(.*?\n    \),\n", SOURCE, re.DOTALL)
    (new,) = re.findall(r"    \(SM90, 128, 2\): \(.*?\n    \),\n", changed, re.DOTALL)
    assert changed.replace(new, old) == SOURCE
    assert with_entry(changed, KEY, configs, "a card, Triton 9") == changed


def test_an_entry_of_another_card_comes_last() -> None:
    changed = with_entry(SOURCE, (100, 64, 2), (TileConfig(16, 32, 4, 3, 2),), "B200")
    assert table_of(changed) == table_of(SOURCE) | {(100, 64, 2): (TileConfig(16, 32, 4, 3, 2),)}


def test_only_the_candidate_is_planned_with_as_long_as_it_is_tried() -> None:
    def chosen(max_rows: int | None) -> TileConfig:
        return tile_config(max_rows, head_dim=128, dtype=torch.bfloat16, device=torch.device("cpu"))

    before, candidate = [chosen(1), chosen(None)], TileConfig(32, 16, 4, 3, 2)
    with only(KEY, candidate):
        assert [chosen(1), chosen(None)] == [candidate] * 2
    assert [chosen(1), chosen(None)] == before


def fake_times(monkeypatch: pytest.MonkeyPatch, seconds: dict[tuple[int, int], float]) -> None:
    """Times by block_n and programs; 1 for the present configuration."""

    def time_layer(bench: AttentionBench, case: Any, attend: Any) -> float:
        (config,) = tuning.TABLE[KEY]
        return 1.0 if config in PRESENT else seconds.get((config.block_n, config.programs_per_multiprocessor), 2.0)

    monkeypatch.setattr(AttentionBench, "time_layer", time_layer)


def test_the_fastest_candidate_wins_with_its_number_of_programs(table: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, {(16, 2): 0.9, (32, 2): 1.2, (32, 3): 0.5})
    tuner = Tuner(TINY, SPACE)
    assert tuner.tune(128, 32) == TileConfig(32, 32, 4, 3, 3)
    relatives = {(each.config.block_n, each.config.programs_per_multiprocessor): each.relative for each in tuner.candidates}
    assert relatives == pytest.approx({(16, 2): 0.9, (32, 2): 1.2, (16, 3): 2.0, (32, 3): 0.5})


def test_noise_replaces_nothing(table: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, {(16, 2): 0.99})
    assert Tuner(TINY, SPACE).tune(128, 32) == PRESENT[1]


def test_a_candidate_that_is_wrong_or_does_not_run_is_none(table: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, dict.fromkeys([(16, 2), (16, 3), (32, 2), (32, 3)], 0.1))
    original = tune.titan_attention

    def titan_attention(case: Any) -> Any:
        (config,) = tuning.TABLE[KEY]
        attend = original(case)
        if config.block_n == 16:
            raise RuntimeError("out of shared memory")
        is_candidate = config.block_n == 32
        output: Tensor = attend(0)
        return lambda layer: output * 1.1 if is_candidate else output

    monkeypatch.setattr(tune, "titan_attention", titan_attention)
    tuner = Tuner(TINY, SPACE)
    assert tuner.tune(128, 32) == PRESENT[1]
    problems = sorted(str(each.problem) for each in tuner.candidates)
    assert problems == ["RuntimeError: out of shared memory", "disagrees with the present one by 1.0e-01"]


@pytest.mark.parametrize("block_m", tune.BLOCK_MS)
def test_the_batches_of_a_number_of_rows_get_tiles_of_as_many(block_m: int, table: None) -> None:
    for shape in tuning_shapes(128, block_m, is_tiny=False):
        geometry = shape.geometry
        rows = shape.query_len * geometry.group
        config = tile_config(rows, head_dim=128, dtype=geometry.dtype, device=torch.device("cpu"))
        assert config.block_m == block_m


def test_a_rehearsal_writes_a_copy_and_reports_what_it_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy, report = tmp_path / "tuning.py", tmp_path / "tune.json"
    copy.write_text(SOURCE)
    options = ["--tiny", "--output", str(copy), "--head-dims", "64", "--block-m", "16", "--json", str(report), "--threads", "1"]
    tune.main(options)
    before, after = table_of(SOURCE), table_of(copy.read_text())
    key = (tuning.SM90, 64, 2)
    assert {each: configs for each, configs in after.items() if each != key} == {
        each: configs for each, configs in before.items() if each != key
    }
    assert [config.block_m for config in after[key]] == [config.block_m for config in before[key]]
    assert after[key][1:] == before[key][1:]
    assert re.search(r"\(SM90, 64, 2\): \(  # .*, Triton \d", copy.read_text())
    candidates = json.loads(report.read_text())["candidates"]
    assert candidates and all(each["problem"] is None and each["relative"] > 0 for each in candidates)
    assert f"{len(candidates)} tried, 0 of them could not run" in capsys.readouterr().out
    assert Path(tuning.__file__).read_text(encoding="utf-8") == SOURCE


def test_a_rehearsal_does_not_touch_the_table() -> None:
    with pytest.raises(ValueError, match="--tiny needs --output, a copy of kernels"):
        tune.main(["--tiny"])


def test_a_file_without_the_table_is_refused_before_the_work(tmp_path: Path) -> None:
    path = tmp_path / "other.py"
    path.write_text("TABLES = {}\n")
    with pytest.raises(ValueError, match="the text has no table: it must be that of kernels"):
        tune.main(["--tiny", "--output", str(path)])

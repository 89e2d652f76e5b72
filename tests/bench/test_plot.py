"""Plots of adaptive speculation show what was measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import Zoo

from titan.bench import adaptive
from titan.bench.plot import PANELS, check_plot, draw, main
from titan.bench.samples import Sample, make_rows

pytest.importorskip("matplotlib")

RATES = {(1, "off"): (50, 60, 70), (32, "off"): (200, 210, 260), (1, "adaptive"): (80, 100, 110), (32, "adaptive"): (190, 220, 230)}
NODES = {(1, "off"): (0, 0, 0), (32, "off"): (0, 0, 0), (1, "adaptive"): (2.0, 2.5, 4.0), (32, "adaptive"): (0, 0.125, 0.5)}
SAMPLES = [
    Sample({"at once": at_once, "setting": setting}, i, {"tokens/s": rate, "nodes/step": NODES[at_once, setting][i]})
    for (at_once, setting), rates in RATES.items()
    for i, rate in enumerate(rates)
]
ROWS = make_rows([*SAMPLES, Sample({"at once": "all", "setting": "off"}, 0, {"tokens/s": 7.0})])


@pytest.fixture
def result(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"title": "Adaptive speculation", "rows": [asdict(row) for row in ROWS]}))
    return path


def test_lines_are_medians_with_their_ranges() -> None:
    for axes, title, measured in zip(draw(ROWS).axes, PANELS.values(), (RATES, NODES), strict=True):
        assert axes.get_ylabel() == title and axes.get_xlabel() == "requests at once"
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "32"] and axes.get_ylim()[0] == 0
        lines: list[Any] = axes.containers
        assert [line.get_label() for line in lines] == ["off", "adaptive"]
        for line in lines:
            medians, _, (ranges,) = line
            shown = [measured[at_once, line.get_label()] for at_once in (1, 32)]
            assert medians.get_xydata().tolist() == [[1, shown[0][1]], [32, shown[1][1]]]
            assert [[y for _, y in each] for each in ranges.get_segments()] == [[low, high] for low, _, high in shown]


def test_a_result_gives_the_same_file_each_time(result: Path, tmp_path: Path) -> None:
    for name in "ab":
        main([str(result), str(tmp_path / f"{name}.svg")])
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert all(f">{label}</text>" in text for label in (*PANELS.values(), "off", "adaptive", "32"))


def test_the_bench_draws_what_it_measured(zoo: Zoo, tmp_path: Path) -> None:
    models = ["--model", zoo.path("llama"), "--draft-model", zoo.path("llama~"), "--threads", str(torch.get_num_threads())]
    sizes = ["--dtype", "float32", "--prompt-len", "4", "--output-len", "4", "--rounds", "1", "--concurrency", "2", "--fixed", "1"]
    adaptive.main([*models, *sizes, f"--plot={tmp_path / 'run.svg'}"])
    assert ">fixed 1</text>" in (tmp_path / "run.svg").read_text()


def test_what_cannot_be_drawn_is_refused(result: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no plot can be written to run.txt: allowed are names that end in .*\.png.*\.svg"):
        check_plot(Path("run.txt"))
    with pytest.raises(ValueError, match=r"no plot can be written to run\.md"):  # before anything is measured
        adaptive.parse_arguments(["--plot", "run.md"])
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"title": "Throughput", "rows": []}))
    with pytest.raises(ValueError, match="'Throughput': allowed are files of titan bench adaptive"):
        main([str(other), str(tmp_path / "other.svg")])
    assert not (tmp_path / "other.svg").exists()

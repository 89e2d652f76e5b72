"""The bench of tree shapes: what is particular to it; the rest it has in common with that of drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from zoo import Zoo

from titan.bench.draft_rows import NO_DRAFT
from titan.bench.samples import Row, Spread
from titan.bench.trees import main, node_charts


def run(zoo: Zoo, folder: Path, *options: str) -> dict[str, Any]:
    models = ["--model", zoo.path("llama"), "--draft-model", zoo.path("llama~"), "--dtype", "float32"]
    sizes = ["--concurrency", "2", "--prompt-len", "8", "--output-len", "12", "--repeats", "1", "--threads", "1"]
    main([*models, *sizes, "--json", str(folder / "trees.json"), *options])
    result: dict[str, Any] = json.loads((folder / "trees.json").read_text())
    return result


def test_every_shape_is_measured_at_every_temperature(zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(zoo, tmp_path, "--nodes", "6", "8", "--temperature", "0", "1", "--waves", "3")
    sizes = [f"{tree}, {count}" for count in (6, 8) for tree in ("dynamic", "auto")]
    names = {0.0: [NO_DRAFT, "chain, greedy, 6", *sizes], 1.0: [NO_DRAFT, "chain, greedy, 6", "chain, sampled, 6", *sizes]}
    found = [(each["labels"]["temperature"], each["labels"]["tree"]) for each in result["rows"]]
    assert found == [(temperature, name) for temperature, each in names.items() for name in each]
    for row in result["rows"]:
        figures = {name: spread["median"] for name, spread in row["figures"].items()}
        assert (figures["tokens/step"] == 1) == (row["labels"]["tree"] == NO_DRAFT)
        assert 0 < figures["trees, batch, acceptance"] < figures["host"] < 1
    assert "3 requests per slot" in capsys.readouterr().out


def test_a_chart_has_a_line_for_each_kind_of_tree() -> None:
    speeds = {"no draft": None, "chain, greedy, 6": 1.5, "auto, 6": 1.6, "auto, 16": 1.2}
    rows = [
        Row({"temperature": 0.0, "tree": tree}, {} if speed is None else {"x no draft": Spread(speed, speed - 0.1, speed + 0.2, 3)})
        for tree, speed in speeds.items()
    ]
    [chart] = node_charts(rows)
    assert {each.name: each.points for each in chart.series} == {"chain, greedy": [(6, 1.5)], "auto": [(6, 1.6), (16, 1.2)]}
    assert chart.series[0].ranges == [(1.4, 1.7)]


@pytest.mark.parametrize(
    ("draft", "message"),
    [("ngram", "--draft-model ngram is not a draft model"), ("./nowhere", "dynamic, 6; auto, 6.*'./nowhere' does not exist")],
)
def test_a_draft_without_shapes_is_refused(zoo: Zoo, tmp_path: Path, draft: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(zoo, tmp_path, "--draft-model", draft)

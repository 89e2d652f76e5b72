"""The bench of tree shapes: what is particular to it; the rest it has in common with that of drafts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from zoo import Zoo

from titan.bench.samples import NO_DRAFT
from titan.bench.trees import main


def run(zoo: Zoo, folder: Path, *options: str) -> dict[str, Any]:
    models = ["--model", zoo.path("llama"), "--draft-model", zoo.path("llama~"), "--dtype", "float32"]
    sizes = ["--concurrency", "2", "--prompt-len", "8", "--output-len", "12", "--repeats", "1", "--threads", "1"]
    main([*models, *sizes, "--json", str(folder / "trees.json"), *options])
    result: dict[str, Any] = json.loads((folder / "trees.json").read_text())
    return result


def test_every_shape_is_measured_at_every_temperature(zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "trees.html"
    result = run(zoo, tmp_path, "--nodes", "6", "8", "--temperature", "0", "1", "--waves", "3", "--html", str(page))
    sizes = [f"{tree}, {count}" for count in (6, 8) for tree in ("dynamic", "auto")]
    names = {0.0: [NO_DRAFT, "chain, greedy, 6", *sizes], 1.0: [NO_DRAFT, "chain, greedy, 6", "chain, sampled, 6", *sizes]}
    found = [(each["labels"]["temperature"], each["labels"]["tree"]) for each in result["rows"]]
    assert found == [(temperature, name) for temperature, each in names.items() for name in each]
    for row in result["rows"]:
        figures = {name: spread["median"] for name, spread in row["figures"].items()}
        assert (figures["tokens/step"] == 1) == (row["labels"]["tree"] == NO_DRAFT)
    assert "3 requests per slot" in capsys.readouterr().out
    first_plot = page.read_text().split("<svg")[1]
    assert re.findall(r">(chain, \w+|dynamic|auto)</text>", first_plot) == ["chain, greedy", "dynamic", "auto"]


def test_a_draft_without_shapes_is_refused(zoo: Zoo, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--draft-model ngram is not a draft model"):
        run(zoo, tmp_path, "--draft-model", "ngram")
    with pytest.raises(ValueError, match=r"dynamic, 6; auto, 6.*'\./nowhere' does not exist"):
        run(zoo, tmp_path, "--draft-model", "./nowhere")

"""The bench of tree shapes: every variant runs, and what it says of a run adds up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from zoo import Zoo

from titan.bench.trees import Sample, TreeBench, Variant, main, make_rows, make_variants, tree_table


def test_it_measures_every_variant_and_writes_what_it_found(
    zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_prompts = set()
    original = TreeBench._run

    def counted(self: TreeBench, variant: Variant, prompts: Any, temperature: float, round_id: int) -> Sample:
        num_prompts.add(len(prompts))
        return original(self, variant, prompts, temperature, round_id)

    monkeypatch.setattr(TreeBench, "_run", counted)
    main([
        "--model", zoo.path("llama"), "--draft-model", zoo.path("llama~"), "--dtype", "float32", "--concurrency", "2",
        "--nodes", "6", "--waves", "3",
        "--prompt-len", "8", "--output-len", "12", "--repeats", "1", "--temperature", "0", "1", "--threads", "1",
        "--json", str(tmp_path / "trees.json"), "--markdown", str(tmp_path / "trees.md"),
    ])  # fmt: skip
    document = json.loads((tmp_path / "trees.json").read_text())
    rows = {(row["temperature"], row["variant"]): row for row in document["rows"]}
    assert list(rows) == [(t, variant.name) for t in (0.0, 1.0) for variant in make_variants(t, [6])]
    assert all(row["tokens_per_step"] == 1 for (_, variant), row in rows.items() if variant == "no draft")
    assert all(row["tokens_per_step"] > 1 for (_, variant), row in rows.items() if variant != "no draft")
    assert all(0 < row["speculation_share"] < row["host_share"] < 1 for row in rows.values())
    assert "| chain, sampled, 6 |" in capsys.readouterr().out
    text = (tmp_path / "trees.md").read_text()
    assert text.startswith("# Draft trees") and "3 requests per slot" in text
    assert num_prompts == {6}


def test_ratios_are_taken_within_a_round() -> None:
    samples = [
        Sample(0.0, variant, round_id, speed * slowness, 1.0, 0.1, 0.1, 0.05)
        for round_id, slowness in enumerate((1.0, 0.5, 0.1))
        for variant, speed in (("no draft", 100.0), ("auto, 6", 150.0))
    ]
    _, row = make_rows(samples)
    assert row.speed_up is not None and (row.speed_up.minimum, row.speed_up.maximum) == (1.5, 1.5)
    assert row.tokens_per_second.median == 75.0


def test_a_variant_that_fails_is_left_out_and_an_interrupt_keeps_the_others(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TreeBench._run

    def fail_or_interrupt(self: TreeBench, variant: Variant, prompts: Any, temperature: float, round_id: int) -> Sample:
        assert not self.llm.engine.scheduler.has_unfinished
        if round_id == 1 and variant.draft_tree == "dynamic":
            raise KeyboardInterrupt
        if round_id == 0 and variant.draft_tree == "chain":
            with monkeypatch.context() as patch:
                patch.setattr(self.llm.engine.kv, "commit", lambda *_: 1 / 0)
                return original(self, variant, prompts, temperature, round_id)
        return original(self, variant, prompts, temperature, round_id)

    monkeypatch.setattr(TreeBench, "_run", fail_or_interrupt)
    main([
        "--model", zoo.path("llama"), "--draft-model", zoo.path("llama~"), "--dtype", "float32", "--concurrency", "2",
        "--nodes", "6", "--prompt-len", "8", "--output-len", "6", "--repeats", "2", "--temperature", "0", "--threads", "1",
        "--json", str(tmp_path / "trees.json"),
    ])  # fmt: skip
    result = json.loads((tmp_path / "trees.json").read_text())
    assert [row["variant"] for row in result["rows"]] == ["no draft", "dynamic, 6", "auto, 6"]
    assert [len([each for each in result["samples"] if each["variant"] == row["variant"]]) for row in result["rows"]] == [2, 1, 1]
    assert not result["is_complete"] and result["rows"][1]["speed_up"]["num_rounds"] == 1
    assert "chain, greedy, 6 ended at temperature 0: ZeroDivisionError: division by zero" in result["warnings"]


def test_without_the_figures_of_no_draft_there_are_no_ratios() -> None:
    [row] = make_rows([Sample(0.0, "auto, 6", 0, 150.0, 2.0, 0.1, 0.1, 0.05)])
    assert row.speed_up is None and tree_table([row]).rows[0][4] == "-"


def test_a_draft_without_a_model_has_no_shapes_to_compare(zoo: Zoo) -> None:
    with pytest.raises(ValueError, match="--draft-model ngram is not a draft model"):
        main(["--model", zoo.path("llama"), "--draft-model", "ngram", "--threads", "1"])

"""The bench of a server's load: each scenario runs, its requests are what it says, and what no clock decides is right."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from zoo import Zoo

from titan.bench.load import LoadBench, main, parse_arguments
from titan.bench.load_scenarios import LONG_LEN, SHORT_PER_LONG, Goal, make_scenarios


def options(zoo: Zoo, *more: str) -> list[str]:
    sizes = ["--prompt-len", "4-20", "--output-len", "3-6", "--num-requests", "44", "--rounds", "1", "--max-batch-size", "4"]
    limits = ["--seconds", "0.2", "--kv-memory", "1", "--inter-token-ms", "5", "--threads", "1", "--dtype", "float32"]
    return ["--model", zoo.path("llama"), "--draft-model", zoo.path("llama~"), *sizes, *limits, *more]


@pytest.mark.parametrize("name", ["long-prompts", "priority", "fair", "prefix", "int8", "int8-memory", "load"])
def test_a_scenario_has_a_row_per_setting_with_the_figures_of_its_goals(zoo: Zoo, tmp_path: Path, name: str) -> None:
    args = options(zoo, "--scenario", name)
    main([*args, "--json", str(tmp_path / "run.json"), "--markdown", str(tmp_path / "run.md")])
    result: dict[str, Any] = json.loads((tmp_path / "run.json").read_text())
    scenario = LoadBench(parse_arguments(args)).scenarios[name]
    rows = {row["labels"]["setting"]: row["figures"] for row in result["rows"]}
    assert list(rows) == list(scenario.settings) and not result["warnings"]
    assert all(goal.figure in rows[goal.setting] for goal in scenario.goals)
    assert f"of {len(scenario.goals)} goal" in result["answer"] and f"## {name}" in (tmp_path / "run.md").read_text()
    if name == "fair":  # all arrive together: the steps are the same, however long they take
        fcfs, fair = (rows[each]["service, x equal share"]["median"] for each in ("fcfs", "fair"))
        assert fcfs < 0.3 and fair > 0.8
    if name == "int8-memory":
        assert rows["auto"]["running"]["median"] < rows["int8"]["running"]["median"] < 256
        assert rows["int8"]["preemptions"]["median"] == 0


def test_the_requests_are_what_the_scenarios_say_and_the_same_for_all_settings(zoo: Zoo) -> None:
    bench = LoadBench(parse_arguments(options(zoo)))
    drawn = {name: each.draw(bench.args, 210, 1) for name, each in bench.scenarios.items()}
    half, lengths = bench.args.max_len // 2, [len(prompt) for prompt in drawn["long-prompts"].prompts]
    assert lengths.count(half) == 10 and max(lengths[:10] + lengths[11:31]) <= 20 and SHORT_PER_LONG == 20
    classes = Counter(each.priority for each in drawn["priority"].terms)
    assert classes.keys() == {"critical", "batch"} and 10 <= classes["critical"] <= 32
    assert Counter(each.user for each in drawn["fair"].terms) == {"heavy": 191, "light": 19}
    shared = min(512, bench.args.max_len - 21)
    assert len({tuple(prompt[:shared]) for prompt in drawn["prefix"].prompts}) == 1 < len({*map(tuple, drawn["prefix"].prompts)})
    priority = bench.scenarios["priority"]
    first, again, other = (bench._arrive(priority, 500.0, round_id) for round_id in (1, 1, 2))
    assert len(first) == 100 and first == again and first.arrivals != other.arrivals


def test_a_long_prompt_is_one_that_the_texts_have_however_long_the_model(zoo: Zoo) -> None:
    """With a tokenizer."""
    args = parse_arguments(["--threads", "1"])
    args.max_len = 131_072
    scenario = make_scenarios(args)["long-prompts"]
    lengths = [len(prompt) for prompt in scenario.draw(args, 42, 0).prompts]
    assert sorted(lengths)[-2:] == [LONG_LEN] * 2 and sorted(lengths)[-3] <= 128
    assert scenario.settings["not chunked"]["max_num_batched_tokens"] == LONG_LEN + args.max_batch_size
    args.max_len = 2048  # where there is room in a step as it is
    assert make_scenarios(args)["long-prompts"].settings["not chunked"]["max_num_batched_tokens"] == 2048


@pytest.mark.parametrize("seed", range(5))
def test_an_engine_has_room_for_the_longest_request_of_any_round(zoo: Zoo, seed: int) -> None:
    bench = LoadBench(parse_arguments(options(zoo, "--seed", str(seed), "--num-requests", "11", "--rounds", "5")))
    for scenario in bench.scenarios.values():
        rounds = [bench._arrive(scenario, 500.0, round_id) for round_id in range(1, 6)]
        assert max(each.max_len for each in rounds) <= bench._longest(scenario) <= bench.args.max_len


def test_goals_are_bounds_from_their_side() -> None:
    assert [Goal("", "", side, 0.5).is_met(value) for side in ("at most", "at least") for value in (0.4, 0.5, 0.6)] == [
        *(True, True, False),
        *(False, True, True),
    ]


def test_a_load_scenario_without_a_draft_is_refused(zoo: Zoo) -> None:
    with pytest.raises(ValueError, match="needs a draft: give --draft-model"):
        parse_arguments(["--model", zoo.path("llama")])

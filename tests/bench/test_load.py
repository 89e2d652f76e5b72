"""The bench of a server's load: each scenario runs, its requests arrive as it says, and what no clock decides is right."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from step_clock import StepClock
from stepping import make_engine
from zoo import Zoo

from titan.bench import load, load_scenarios
from titan.bench.engine_run import serve
from titan.bench.load import OVER_FIRST, RATE, LoadBench, main, parse_arguments
from titan.bench.load_scenarios import (
    LONG_LEN,
    SHORT_PER_LONG,
    ClassBlindPolicy,
    _measure_classes,
    _measure_decoding,
    _measure_first_tokens,
    make_scenarios,
)
from titan.bench.workloads import Workload, draw_arrivals
from titan.core.terms import RequestTerms


def options(zoo: Zoo, *more: str) -> list[str]:
    sizes = ["--prompt-len", "4-20", "--output-len", "3-6", "--num-requests", "44", "--rounds", "1", "--max-batch-size", "4"]
    limits = ["--seconds", "0.2", "--inter-token-ms", "5", "--threads", "1", "--dtype", "float32"]
    return ["--model", zoo.path("llama"), "--draft-model", zoo.path("llama~"), *sizes, *limits, *more]


@pytest.mark.parametrize("name", ["long-prompts", "priority", "fair", "prefix", "int8", "int8-memory"])
def test_a_scenario_has_a_row_per_setting_and_ratios_to_the_first(zoo: Zoo, tmp_path: Path, name: str) -> None:
    args = options(zoo, "--scenario", name)
    main([*args, "--json", str(tmp_path / "run.json"), "--markdown", str(tmp_path / "run.md")])
    result: dict[str, Any] = json.loads((tmp_path / "run.json").read_text())
    scenario = LoadBench(parse_arguments(args)).scenarios[name]
    rows = {row["labels"]["setting"]: row["figures"] for row in result["rows"]}
    first, *others = scenario.settings
    assert list(rows) == [first, *others] and not result["warnings"] and "kernels" in result["provenance"]["versions"]
    for ratio in scenario.ratios:
        assert ratio in rows[first] and ratio + OVER_FIRST not in rows[first]
        assert all(ratio + OVER_FIRST in rows[each] for each in others)
    value = rows[others[-1]][scenario.ratios[0] + OVER_FIRST]["median"]
    assert result["answer"].startswith(f"{name}: {scenario.ratios[0]} of {others[-1]!r} over {first!r}: {value:.3g}")
    assert f"## {name}" in (tmp_path / "run.md").read_text()
    if name == "int8-memory":
        assert rows["auto"]["running"]["median"] == 64 < rows["int8"]["running"]["median"] < 256
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
    args.max_len, args.bytes_per_token = 131_072, 1
    scenario = make_scenarios(args)["long-prompts"]
    lengths = [len(prompt) for prompt in scenario.draw(args, 42, 0).prompts]
    assert sorted(lengths)[-2:] == [LONG_LEN] * 2 and sorted(lengths)[-3] <= 128
    assert scenario.settings["not chunked"]["max_num_batched_tokens"] == LONG_LEN + args.max_batch_size
    args.max_len = 2048  # where there is room in a step as it is
    assert make_scenarios(args)["long-prompts"].settings["not chunked"]["max_num_batched_tokens"] == 2048


@pytest.mark.parametrize("seed", range(3))
def test_an_engine_has_room_for_the_longest_request_of_any_round(zoo: Zoo, seed: int) -> None:
    bench = LoadBench(parse_arguments(options(zoo, "--seed", str(seed), "--num-requests", "11", "--rounds", "5")))
    for scenario in bench.scenarios.values():
        rounds = [bench._arrive(scenario, 500.0, round_id) for round_id in range(1, 6)]
        assert max(each.max_len for each in rounds) <= bench._longest(scenario) <= bench.args.max_len


@pytest.mark.parametrize(("num_requests", "most", "share"), [(105, 32, 0.8), (44, 4, 0.8), (22, 8, 0.4)])
def test_the_user_who_sends_less_waits_for_a_fair_share(zoo: Zoo, num_requests: int, most: int, share: float) -> None:
    """By default, with few at once, and with --quick, where one of two waits; the steps are the same, however long they take."""
    given = ["--num-requests", str(num_requests), "--max-batch-size", str(most)]
    bench = LoadBench(parse_arguments(options(zoo, "--scenario", "fair", *given)))
    assert len([*bench.run()]) == 1 and not bench.problems
    fcfs, fair = (each.figures["service, x equal share"] for each in bench.samples)
    assert fcfs < 0.3 and share < fair < 1.2


@pytest.mark.parametrize("name", ["rates", "long-prompts"])
def test_requests_of_one_token_have_no_time_between_steps(zoo: Zoo, name: str) -> None:
    given = ["--scenario", name, "--num-requests", "4", "--output-len", "1", "--rate", "400"]
    bench = LoadBench(parse_arguments(options(zoo, *given)))
    assert len([*bench.run()]) == 1 and not bench.problems
    assert all(each.figures["first token P50, ms"] > 0 for each in bench.samples)
    assert not [figure for each in bench.samples for figure in each.figures if "between" in figure]


def run_rates(zoo: Zoo, folder: Path, *more: str) -> dict[str, Any]:
    main(options(zoo, "--scenario", "rates", "--num-requests", "6", "--rounds", "2", "--json", str(folder / "run.json"), *more))
    result: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return result


def test_all_rates_have_the_same_requests_stretched_and_both_engines_take_turns(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = []

    def watched(engine: Any, workload: Any, *rest: Any) -> Any:
        served.append(workload)
        return serve(engine, workload, *rest)

    def warmed(engine: Any, workload: Any) -> None:
        assert len(served) == len(warm_ups), "before each run"
        warm_ups.append(workload)

    warm_ups: list[Any] = []
    monkeypatch.setattr(load_scenarios, "serve", watched)
    monkeypatch.setattr(load, "run_workload", warmed)
    result = run_rates(zoo, tmp_path, "--rate", "400", "200", "--slo-ttft", "1e-9")
    assert len(warm_ups) == 8 and all(each == warm_ups[0] and len(each) == 4 for each in warm_ups)
    settings = ["no draft", "adaptive"]
    orders = settings, settings[::-1]
    found = [(each["round_id"], each["labels"][RATE], each["labels"]["setting"]) for each in result["samples"]]
    assert found == [(round_id, rate, setting) for round_id in (0, 1) for rate in (200, 400) for setting in orders[round_id]]
    for slow, fast in ((0, 2), (1, 3), (4, 6), (5, 7)):
        assert (served[slow].prompts, served[slow].output_lens) == (served[fast].prompts, served[fast].output_lens)
        assert 2 * np.array(served[fast].arrivals) == pytest.approx(served[slow].arrivals)
    assert served[0] == served[1] and served[0].prompts != served[4].prompts
    figures = [row["figures"] for row in result["rows"]]
    assert all(each["within target"]["median"] == 0 and each["requests/s"]["median"] > 0 for each in figures)
    assert ["latency P50, ms / first" in each for each in figures] == [False, True] * 2 and not result["warnings"]


def test_rates_are_shares_of_what_the_first_setting_bears(zoo: Zoo, tmp_path: Path) -> None:
    result = run_rates(zoo, tmp_path, "--slo-ttft", "1e9", "--slo-tpot", "1e9")
    rates = sorted({row["labels"][RATE] for row in result["rows"]})
    assert np.array(rates) / rates[0] == pytest.approx([1, 2, 3, 4], rel=0.02)
    assert all(row["figures"]["within target"]["median"] == 1 for row in result["rows"])


def test_a_critical_request_waits_from_its_arrival_to_its_first_token_or_the_end(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """One place, a second per token: a critical one waits 4 s, the next 2 s by the end, and the last comes later."""
    engine = make_engine(zoo.path("llama"), max_batch_size=1, scheduling_policy=ClassBlindPolicy(), max_model_len=80)
    StepClock(engine, monkeypatch)
    terms = [RequestTerms(priority=each) for each in ("batch", *["critical"] * 3)]
    workload = Workload([[5]] * 4, [3, 1, 1, 1], [0.0, 0.0, 2.0, 7.0], terms)
    assert _measure_classes(engine, workload, 4.0) == pytest.approx(
        {
            "tokens/s": 1,
            "critical first token P50, ms": 3000,
            "critical first token P90, ms": 3800,
            "critical first token P99, ms": 3980,
            "critical completed": 1,
            "batch completed": 1,
        }
    )


def test_first_tokens_are_timed_one_after_the_other_without_the_first(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 1, 3 and 2 steps."""
    engine = make_engine(zoo.path("llama"), prefill_chunk_size=16, max_model_len=80, enable_prefix_caching=False)
    StepClock(engine, monkeypatch)
    found = _measure_first_tokens(engine, Workload([[5], [6] * 40, [7] * 30], [1] * 3))
    assert found == pytest.approx({"first token P50, ms": 2500, "first token P90, ms": 2900, "first token P99, ms": 2990})


def test_decoding_is_timed_from_the_last_first_token_on(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one's comes in the third step; then there are 4 of 3 + 5 tokens, and the others take 4 s."""
    engine = make_engine(zoo.path("llama"), prefill_chunk_size=16, max_model_len=80, enable_prefix_caching=False)
    StepClock(engine, monkeypatch)
    assert _measure_decoding(engine, Workload([[5], [6] * 40], [3, 5])) == {"tokens/s": 4 / 4}


def test_gaps_between_arrivals_are_exponential_with_a_mean_of_a_second() -> None:
    arrivals = draw_arrivals(20_000, seed=3)
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0 and len(arrivals) == 20_000
    assert gaps.mean() == pytest.approx(1, abs=0.03) and gaps.std() == pytest.approx(1, abs=0.03)
    assert np.median(gaps) == pytest.approx(np.log(2), abs=0.03)
    assert arrivals[:50] == draw_arrivals(50, seed=3) != draw_arrivals(50, seed=2)


def test_what_cannot_be_measured_is_refused(zoo: Zoo) -> None:
    with pytest.raises(ValueError, match="needs a draft: give --draft-model"):
        parse_arguments(["--model", zoo.path("llama")])
    with pytest.raises(ValueError, match="--num-requests 1 is not allowed with --scenario prefix"):
        parse_arguments(options(zoo, "--num-requests", "1"))

"""Titan's ways to batch: the same tokens, and what sets them apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from stepping import make_engine, submit
from zoo import Zoo, random_prompts

from titan import LLM
from titan.bench.engine_run import run_continuous, run_static
from titan.bench.profiling import greedy_params, profile_shares, timed, timed_passes
from titan.bench.runs import Percentiles, RequestRun, Run, count_equal
from titan.bench.workloads import Workload
from titan.draft.draft_model import DraftModelDrafter
from titan.engine import Engine
from titan.kernels.cpu.runner import CompiledRunner
from titan.kernels.torch.backend import TorchBackend

OUTPUT_LENS = [3, 12, 5, 6, 20, 4]


@pytest.fixture(scope="module")
def engine(zoo: Zoo) -> Engine:
    options = {"max_draft_tokens": 3, "max_batch_size": 4, "max_model_len": 80, "enable_prefix_caching": False}
    return LLM(zoo.path("llama"), zoo.path("llama~"), dtype="float32", device="cpu", **options).engine  # type: ignore[arg-type]


@pytest.fixture
def workload() -> Workload:
    return Workload(random_prompts(6, seed=1), OUTPUT_LENS)


RUNS: dict[str, Callable[[Engine, Workload], Run]] = {
    "single": lambda engine, workload: run_continuous(engine, workload, 1, use_speculative=False),
    "static": lambda engine, workload: run_static(engine, workload, 3),
    "continuous": lambda engine, workload: run_continuous(engine, workload, 3, use_speculative=False),
    "draft": lambda engine, workload: run_continuous(engine, workload, 3, use_speculative=True),
}


@pytest.mark.parametrize("mode", RUNS)
def test_every_mode_gives_each_request_its_own_tokens(zoo: Zoo, engine: Engine, workload: Workload, mode: str) -> None:
    run = RUNS[mode](engine, workload)
    for prompt, wanted, request in zip(workload.prompts, OUTPUT_LENS, run.requests, strict=True):
        assert request.token_ids == zoo.greedy("llama", prompt, wanted, ignore_eos=True)
        assert request.first_token_seconds is not None
        assert 0 < request.first_token_seconds <= request.finished_seconds <= run.seconds
    assert run.num_tokens == sum(OUTPUT_LENS)
    assert run.cpu_seconds is not None and run.cpu_seconds > 0
    assert not engine.scheduler.has_unfinished


def test_steps_add_up(engine: Engine, workload: Workload) -> None:
    """Without a draft each step gives a running request one token, and a new request's prompt takes none of its own."""
    counts = {mode: RUNS[mode](engine, workload).steps for mode in RUNS}
    num_steps = {mode: steps.num_steps for mode, steps in counts.items() if steps is not None}
    assert num_steps["single"] == sum(OUTPUT_LENS)
    assert num_steps["static"] == max(OUTPUT_LENS[:3]) + max(OUTPUT_LENS[3:])
    slots = [0, 0, 0]  # when each is free
    for length in OUTPUT_LENS:
        slots[slots.index(min(slots))] += length
    assert num_steps["continuous"] == max(slots) < num_steps["static"]
    assert num_steps["draft"] < num_steps["continuous"]
    batch_sizes = {mode: steps.mean_batch_size for mode, steps in counts.items() if steps is not None}
    assert batch_sizes["single"] == 1 and batch_sizes["static"] == 3
    assert batch_sizes["continuous"] == pytest.approx(sum(OUTPUT_LENS) / max(slots))


def test_a_static_batch_starts_when_the_one_before_it_is_over(zoo: Zoo) -> None:
    """Also where its requests are out of step, as a long prompt takes several steps and a short one does not."""
    engine = LLM(zoo.path("llama"), dtype="float32", device="cpu", prefill_chunk_size=4, max_model_len=80).engine
    workload = Workload([[5], [6] * 40, [7], [8]], [3, 2, 1, 1])
    requests = run_static(engine, workload, 2).requests
    assert requests[0].finished_seconds == requests[1].finished_seconds
    assert all(request.first_token_seconds > requests[0].finished_seconds for request in requests[2:])  # type: ignore[operator]


def test_kv_use_is_the_share_of_blocks_that_requests_hold(engine: Engine) -> None:
    run = run_continuous(engine, Workload([[5] * 16, [6] * 16], [2, 17]), 2, use_speculative=False)
    assert run.steps is not None
    # the prompts fill a block each, the second step needs one more of each, and then only the long request is left
    num_blocks = [2, 4, *[2] * 15]
    assert run.steps.peak_kv_usage == pytest.approx(max(num_blocks) / engine.kv.pool.num_blocks)
    assert run.steps.mean_kv_usage == pytest.approx(sum(num_blocks) / len(num_blocks) / engine.kv.pool.num_blocks)
    assert engine.observers == []


def test_drafts_are_counted_by_depth(engine: Engine, workload: Workload) -> None:
    run = RUNS["draft"](engine, workload)
    assert run.steps is not None and run.mean_acceptance_length is not None
    proposed, accepted = run.steps.proposed_per_depth, run.steps.accepted_per_depth
    assert sum(proposed) > 0 and all(part <= whole for part, whole in zip(accepted, proposed, strict=False))
    num_rows = run.steps.mean_batch_size * run.steps.num_steps
    assert run.mean_acceptance_length == pytest.approx(run.num_tokens / num_rows)
    plain = RUNS["continuous"](engine, workload)
    assert plain.mean_acceptance_length == 1 and plain.steps is not None and sum(plain.steps.proposed_per_depth) == 0


def test_equal_outputs_are_counted_in_place() -> None:
    def run(*token_ids: list[int]) -> Run:
        return Run([RequestRun(each, None, 1.0) for each in token_ids], 1.0, None, None)

    assert count_equal(run([1, 2], [3], [4]), run([1, 2], [3, 4], [4])) == 2


def test_time_between_tokens_counts_from_the_first() -> None:
    assert RequestRun([1, 2, 3], 1.0, 2.0).between_tokens_seconds == 0.5
    assert RequestRun([1], 1.0, 1.0).between_tokens_seconds is None
    assert RequestRun([1, 2], None, 1.0).between_tokens_seconds is None


def test_percentiles_are_interpolated() -> None:
    assert Percentiles.of([float(value) for value in range(101)]) == Percentiles(50.0, 90.0, 99.0)
    assert Percentiles.of([1.0, 2.0]) == Percentiles(1.5, pytest.approx(1.9), pytest.approx(1.99))  # type: ignore[arg-type]
    assert Percentiles.of([]) is None


@pytest.mark.parametrize("use_speculative", [False, True])
def test_shares_of_a_step_add_up(engine: Engine, workload: Workload, use_speculative: bool) -> None:
    shares = profile_shares(engine, workload, use_speculative=use_speculative)
    assert shares is not None
    assert shares.host + shares.draft + shares.target == pytest.approx(1)
    assert 0 < shares.draft + shares.target < 1
    assert (shares.draft > 0) == use_speculative


@pytest.fixture(params=["as it is", "operation by operation"])
def chain_engine(zoo: Zoo, request: pytest.FixtureRequest) -> Engine:
    """An engine whose small passes are compiled, where there are compiled ones, and one that has none."""
    backend = None if request.param == "as it is" else TorchBackend(torch.device("cpu"))
    return make_engine(zoo.path("llama"), zoo.path("llama~"), backend=backend, max_draft_tokens=3, max_model_len=80)


def test_the_share_of_attention_is_told(chain_engine: Engine, workload: Workload) -> None:
    shares = profile_shares(chain_engine, workload)
    assert shares is not None and 0 < shares.attention < shares.draft + shares.target


def test_attention_inside_of_compiled_passes_counts(chain_engine: Engine, workload: Workload) -> None:
    if not isinstance(chain_engine.runner, CompiledRunner):
        pytest.skip("no compiled passes")
    shares = profile_shares(chain_engine, workload, skip_prefill=True)
    assert shares is not None and 0 < shares.attention < shares.draft + shares.target


def test_each_pass_of_a_chain_counts_also_if_all_of_them_are_one_call(chain_engine: Engine) -> None:
    """Three draft tokens take three passes: two follow the one that reads what the step before emitted."""
    drafter = chain_engine.drafter
    assert isinstance(drafter, DraftModelDrafter)
    submit(chain_engine, [[5] * 8], [greedy_params(40)])
    chain_engine.step()  # the prefill
    with timed_passes(drafter.runner) as draft, timed_passes(chain_engine.runner) as target:
        for _ in range(4):
            chain_engine.step()
    assert (target.num_calls, draft.num_calls) == (4, 4 * 3)
    assert target.seconds > 0 and draft.seconds > 0


def test_a_profile_can_leave_out_the_prefill(engine: Engine) -> None:
    shares = profile_shares(engine, Workload([[5] * 8, [6] * 9], [8, 8]), use_speculative=False, skip_prefill=True)
    assert shares is not None and shares.num_steps == 7  # the first token comes from the prefill


def test_a_timer_counts_calls_and_leaves_no_trace() -> None:
    class Counter:
        def count(self) -> int:
            return 1

    counter = Counter()
    with timed(counter, "count") as timer:
        assert counter.count() + counter.count() == 2
    assert timer.num_calls == 2 and timer.seconds > 0
    assert "count" not in vars(counter)

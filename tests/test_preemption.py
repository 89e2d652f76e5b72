"""Preemption by swap: when it pays, what it says of itself, and sizes of the swap space that are refused."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
from stepping import SCARCE, check_blocks, drain, greedy, make_engine, make_request, submit
from torch import Tensor
from zoo import Zoo, random_prompts

from titan.core.kv_tensor import KVTensor
from titan.core.metrics import TierMetrics
from titan.memory.sizing import check_swap_space
from titan.schedule.preemption import SwapRule

BYTES = 2 * 2 * 2 * 16 * 4 * SCARCE["block_size"]  # of a block of one cache of these models


@pytest.mark.parametrize(
    ("mode", "block_s", "pass_s", "expected"),
    [
        ("swap", 9.0, lambda rows, context: 0.0, True),
        ("recompute", 0.0, lambda rows, context: 9.0 * rows, False),
        ("auto", 9.0, None, True),
        # chunks of 8, 8 and 4 tokens, at 2 s for a row and 1 s for a token of context: 2 * 20 + 0 + 8 + 16
        ("auto", 63.9 / 3, lambda rows, context: 100 + 2 * rows + context, True),
        ("auto", 64.1 / 3, lambda rows, context: 100 + 2 * rows + context, False),
    ],
)
def test_auto_takes_what_is_expected_to_be_shorter(mode: str, block_s: float, pass_s: Any, expected: bool) -> None:
    request = make_request(range(21))
    request.extend_blocks([3, 1, 2])
    request.commit(20)
    assert SwapRule(mode, 8, block_s, pass_s).prefers_swap(request) == expected


@pytest.mark.parametrize("pays", [True, False])
def test_an_engine_goes_by_its_measured_passes(zoo: Zoo, pays: bool) -> None:
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), speculation="adaptive", swap_space=2**20, **SCARCE)
    rule, cost = engine.scheduler.queues.swap_rule, engine._profiler.target
    assert cost is not None and rule.pass_s == cost.predict and rule.block_s > 0
    rule.pass_s = lambda rows, context: rows * 1e3 * pays
    submit(engine, random_prompts(8, seed=1, max_len=45), [greedy(20, ignore_eos=True)] * 8)
    drain(engine)
    assert (engine.counters.num_swapped_out > 0) == pays and engine.counters.num_preemptions > 0


def test_copies_of_fewer_bytes_take_less_time(zoo: Zoo) -> None:
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), swap_space=2**20, **SCARCE)
    rule = engine.scheduler.queues.swap_rule
    of_both = rule.block_s
    engine.swap_draft("ngram")
    assert rule.block_s == pytest.approx(of_both / 2)
    engine.swap_draft(zoo.path("llama~"))
    assert rule.block_s == pytest.approx(of_both)


def test_the_swap_space_keeps_its_bytes_with_other_drafts(zoo: Zoo) -> None:
    """Blocks of target and draft take twice the bytes of the target's. What was swapped is computed again, with the same tokens."""
    engine = make_engine(zoo.path("llama"), None, preemption_mode="swap", swap_space=81 * BYTES, **SCARCE)
    prompts = random_prompts(8, seed=1, max_len=45)
    requests = submit(engine, prompts, [greedy(30, ignore_eos=True)] * 8)
    for draft, num_blocks in ((zoo.path("llama~"), 40), ("ngram", 81), (None, 81), (zoo.path("llama~"), 40)):
        while not engine.metrics().num_swapped:
            engine.step()
        engine.swap_draft(draft)
        check_blocks(engine)
        assert (engine.metrics().num_swapped, engine.metrics().swap_space.num_blocks) == (0, num_blocks)
        assert {len(block) for blocks in engine.kv.swap_space._blocks.values() for block in blocks} == {num_blocks}
    drain(engine)
    assert [each.output_token_ids for each in requests] == [zoo.greedy("llama", each, 30, ignore_eos=True) for each in prompts]


@pytest.mark.parametrize(
    ("swap_space", "free_memory", "message"),
    [
        (BYTES, 10**9, f"swap_space={BYTES} is not enough: one block takes {2 * BYTES} bytes"),
        (0, 1000, f"the draft '.*' takes {14 * BYTES} bytes for the KV of 14 blocks, and 1000 are free: allowed are at most these"),
    ],
)
def test_a_draft_without_room_for_its_kv_is_refused(
    zoo: Zoo, swap_space: int, free_memory: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(zoo.path("llama"), "ngram", swap_space=swap_space, **SCARCE)
    monkeypatch.setattr(engine.backend, "free_memory", lambda: free_memory)
    with pytest.raises(ValueError, match=message):
        engine.swap_draft(zoo.path("llama~"))
    assert engine.metrics().draft == "ngram" and [*engine.kv.tensors] == ["target"]
    assert engine.metrics().swap_space.num_bytes == swap_space


def test_no_swap_space_needs_no_memory() -> None:
    check_swap_space(0, 16, -1)  # of a host whose pool has taken all, and others a little more
    with pytest.raises(ValueError, match="swap_space=1 is more than the 0 bytes of the host that are free"):
        check_swap_space(1, 16, 0)


@pytest.mark.parametrize("before", ["ngram", "llama"])
def test_another_draft_takes_no_more_of_the_host_than_the_swap_space_has(
    zoo: Zoo, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are never as many blocks as before of target and draft together, nor those of two drafts."""
    draft = before if before == "ngram" else zoo.path(before)
    engine = make_engine(zoo.path("llama"), draft, preemption_mode="swap", swap_space=81 * BYTES, **SCARCE)
    space, host_blocks, most = engine.kv.swap_space, engine.backend.cache.host_blocks, list[int]()

    def record(kv: KVTensor, num_blocks: int) -> list[Tensor]:
        most.append(sum(block.nbytes for blocks in space._blocks.values() for block in blocks) + num_blocks * BYTES)
        return host_blocks(kv, num_blocks)

    monkeypatch.setattr(engine.backend.cache, "host_blocks", record)
    engine.swap_draft(zoo.path("llama~"))
    assert max(most) <= 81 * BYTES and engine.metrics().swap_space.num_blocks == 40


@pytest.mark.parametrize(
    ("before", "after", "num_blocks"), [("llama~", "ngram", 81), ("ngram", "llama", 40), ("llama~", "llama", 40)]
)
def test_without_memory_for_the_swap_space_another_draft_goes_without(
    zoo: Zoo, before: str, after: str, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = (name if name == "ngram" else zoo.path(name) for name in (before, after))
    engine = make_engine(zoo.path("llama"), before, preemption_mode="swap", swap_space=81 * BYTES, **SCARCE)
    prompts = random_prompts(8, seed=1, max_len=45)
    requests = submit(engine, prompts, [greedy(20, ignore_eos=True)] * 8)
    while not engine.metrics().num_swapped:
        engine.step()
    host_blocks = engine.backend.cache.host_blocks

    def fail(kv: KVTensor, num_blocks: int) -> list[Tensor]:
        if num_blocks:
            raise MemoryError
        return host_blocks(kv, 0)

    with monkeypatch.context() as patch:
        patch.setattr(engine.backend.cache, "host_blocks", fail)
        with pytest.warns(RuntimeWarning, match=f"no memory for {num_blocks} blocks of swap space any more, so that there is none"):
            engine.swap_draft(after)
    check_blocks(engine)
    assert (engine.metrics().num_swapped, engine.metrics().swap_space.num_blocks) == (0, 0)
    assert ("draft" in engine.kv.tensors) == (num_blocks == 40)
    drain(engine)
    assert [each.output_token_ids for each in requests] == [zoo.greedy("llama", each, 20, ignore_eos=True) for each in prompts]
    engine.swap_draft(zoo.path("llama~"))
    assert engine.metrics().swap_space.num_blocks == 40, "a later one may find memory again"


def test_a_preempted_request_was_not_found_in_the_cache_by_finding_its_own_blocks_again(zoo: Zoo) -> None:
    engine = make_engine(zoo.path("llama"), preemption_mode="recompute", **SCARCE)
    requests = submit(engine, random_prompts(8, seed=1, max_len=45), [greedy(30, ignore_eos=True)] * 8)
    drain(engine)
    assert engine.counters.num_preemptions > 0 and engine.counters.num_cached_tokens > 0
    assert [each.metrics.num_cached_tokens for each in requests] == [0] * 8


def test_metrics_of_swaps_and_an_abort_that_frees_both_pools(zoo: Zoo) -> None:
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), preemption_mode="swap", swap_space=40 * 2 * BYTES + 5, **SCARCE)
    requests = submit(engine, random_prompts(8, seed=1, max_len=45), [greedy(30, ignore_eos=True)] * 8)
    swapped, num_aborted = requests[:0], 0
    while engine.scheduler.has_unfinished:
        engine.step()
        metrics = engine.metrics()
        swapped = [request for request in requests if request.is_swapped]
        num_blocks = len({block_id for request in swapped for block_id in request.swapped_block_ids})
        assert metrics.swap_space == TierMetrics(40, num_blocks, 40 * 2 * BYTES, num_blocks * 2 * BYTES)
        assert metrics.num_swapped == len(swapped)
        assert metrics.num_swapped_out - metrics.num_swapped_in - num_aborted == len(swapped)
        if swapped and not num_aborted:
            engine.scheduler.abort(swapped[0])
            num_aborted += 1
        check_blocks(engine)
    assert num_aborted and engine.kv.swap_space.pool.num_free == 40 and metrics.num_swapped_in > 0


@pytest.mark.parametrize(
    ("swap_space", "message"),
    [
        (psutil.virtual_memory().total + 1, "swap_space=.* is more than the .* bytes of the host that are free"),
        (2 * BYTES - 1, f"swap_space={2 * BYTES - 1} is not enough: one block takes {2 * BYTES} bytes"),
    ],
)
def test_a_swap_space_of_a_size_that_cannot_be(zoo: Zoo, swap_space: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(zoo.path("llama"), zoo.path("llama~"), swap_space=swap_space, **SCARCE)

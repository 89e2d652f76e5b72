"""Memory that is compacted, given back, extended or missing while requests are in flight: they emit what they would alone.

`test_engine_machine` compacts and resizes caches at any time, and lets that fail.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
from auditor import Auditor
from back_ends import make_back_end
from stepping import AMPLE, SCARCE, check_blocks, drain, greedy, make_engine, run_all, submit
from zoo import VOCAB_SIZE, Zoo, random_prompts

from titan import LLM
from titan.core.batch import RaggedBatch
from titan.core.growth import Worth
from titan.core.kv_tensor import KVGroup, KVLayout, KVTensor
from titan.core.request import Request
from titan.core.step import StepPlan
from titan.core.trees import DraftTree
from titan.diagnosis import faults
from titan.draft.replay import ReplayDrafter
from titan.frontend.step_loop import StepLoop

PROMPTS = random_prompts(9, seed=3, max_len=45)
PARAMS = [greedy(8 + 2 * i, ignore_eos=True) for i in range(len(PROMPTS))]
MIB = 2**20


def lonely(zoo: Zoo) -> list[list[int]]:
    return [
        zoo.greedy("llama", prompt, 30, ignore_eos=True)[: params.max_tokens]
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]


def test_a_cache_shrinks_to_what_is_reserved(zoo: Zoo) -> None:
    """Running requests never wait for blocks where all that they may need is theirs."""
    engine = make_engine(zoo.path("llama"), **SCARCE | {"num_kv_blocks": 40, "reservation": "max_tokens"})
    requests = submit(engine, PROMPTS[:2], [greedy(40, ignore_eos=True)] * 2)
    engine.step()
    num_reserved = sum(-(-(len(prompt) + 40) // SCARCE["block_size"]) for prompt in PROMPTS[:2])
    with pytest.raises(
        ValueError, match=f"num_blocks={num_reserved - 1} is too few for reservation='max_tokens': at least {num_reserved}"
    ):
        engine.resize_kv_cache(num_reserved - 1)
    engine.resize_kv_cache(num_reserved)
    drain(engine)
    assert [request.output_token_ids for request in requests] == [
        zoo.greedy("llama", each, 40, ignore_eos=True) for each in PROMPTS[:2]
    ]
    assert engine.counters.num_preemptions == 0


@pytest.mark.long_where(
    "resize_kv_cache(200)-draft", "resize_kv_cache(200)-tables", "compact_kv_cache()-draft", "compact_kv_cache()-pool"
)
@pytest.mark.parametrize("interrupted", ["draft", "target", "pool", "tables"])
@pytest.mark.parametrize("call", ["resize_kv_cache(200)", "compact_kv_cache()"])
def test_an_interrupt_while_blocks_move_ends_the_requests(
    zoo: Zoo, interrupted: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some content, and some block tables, may be of before; what comes later is right."""
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), backend=make_back_end("torch"), **AMPLE)
    requests, gather, loop = submit(engine, PROMPTS, PARAMS), engine.backend.cache.gather_blocks, StepLoop(engine)

    def fail(source: KVTensor, target: KVTensor, block_ids: Any) -> None:
        gather(source, target, block_ids)
        if source is engine.kv.tensors[interrupted]:  # type: ignore[index]
            raise KeyboardInterrupt

    def renumber(request: Request, new_ids: Any, original: Any = Request.renumber_blocks) -> None:
        original(request, new_ids)
        raise KeyboardInterrupt

    for _ in range(4):
        engine.step()
    engine.scheduler.abort(engine.scheduler.running[0])  # the blocks of the others then have another place to go to
    with monkeypatch.context() as patch:
        if interrupted in ("draft", "target"):
            patch.setattr(engine.backend.cache, "gather_blocks", fail)
        elif interrupted == "pool":
            patch.setattr(engine.kv.pool, "resize", Mock(side_effect=KeyboardInterrupt))
        else:
            patch.setattr(Request, "renumber_blocks", renumber)
        with pytest.raises(KeyboardInterrupt):
            loop.between_steps(lambda: engine.resize_kv_cache(200) if call.startswith("resize") else engine.compact_kv_cache())
    assert {request.error for request in requests} == {"KeyboardInterrupt: ", None}
    assert not engine.scheduler.has_unfinished and engine.runner.kv is engine.kv.tensors["target"]  # type: ignore[attr-defined]
    assert engine.kv.pool.num_touched <= engine.kv.num_blocks == engine.kv.tensors["target"].num_blocks
    check_blocks(engine)
    assert run_all(engine, PROMPTS, PARAMS) == lonely(zoo) and engine.metrics().num_cached_tokens == 0


def test_a_drafter_that_does_not_take_its_cache_back_is_let_go(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have kept the smaller cache, whose end the block tables pass."""
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), **AMPLE)
    requests, attach, kept = submit(engine, PROMPTS, PARAMS), type(engine.drafter).attach, list[KVTensor]()  # type: ignore[attr-defined]

    def fail(kv: KVTensor) -> None:
        if not kept:
            attach(engine.drafter, kv)
        kept.append(kv)
        raise OSError(f"cache {len(kept)} is refused")

    engine.step()
    monkeypatch.setattr(engine.drafter, "attach", fail)
    with (
        pytest.warns(RuntimeWarning, match="did not take its KV cache back, so there is no speculation: cache 2 is refused"),
        pytest.raises(OSError, match="cache 1 is refused"),
    ):
        engine.resize_kv_cache(100)
    assert len(kept) == 2 and engine.metrics().draft == "none" and set(engine.kv.tensors) == {"target"}
    assert engine.kv.num_blocks == AMPLE["num_kv_blocks"]
    engine.step()
    engine.swap_draft(zoo.path("llama~"))
    kept.clear()
    monkeypatch.setattr(engine.drafter, "attach", fail)
    warnings.simplefilter("error")
    with pytest.raises(RuntimeWarning, match="did not take"):
        engine.resize_kv_cache(100)
    assert engine.metrics().draft == "none"
    drain(engine)
    assert [request.output_token_ids for request in requests] == lonely(zoo)


def test_cached_prefixes_outlive_a_resize_as_far_as_there_is_room(zoo: Zoo) -> None:
    engine = make_engine(zoo.path("llama"), block_size=8, num_kv_blocks=40)
    for token in (3, 4):
        run_all(engine, [[token] * 33], [greedy(2)])
    engine.resize_kv_cache(6)
    assert engine.kv.pool.num_blank == 0
    engine.resize_kv_cache(30)
    hits = []
    for token in (3, 4):
        [request] = submit(engine, [[token] * 33], [greedy(2)])
        drain(engine)
        hits.append(request.metrics.num_cached_tokens)
    assert hits == [16, 32], "the one used last, and of the other what is left; its tail goes first"


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def test_memory_is_given_back_and_taken_again(zoo: Zoo) -> None:
    """At 16 KiB a block, target and draft; while requests are in flight."""
    path = zoo.path("llama+text")
    llm = LLM(path, zoo.path("llama~+text"), dtype="float32", device="cpu", speculation="fixed", num_kv_blocks=8000)
    expected = llm.generate("the quick", greedy(40, ignore_eos=True), use_tqdm=False)[0].outputs[0].text
    stream = llm.stream("the quick", greedy(40, ignore_eos=True))
    next(stream)
    before = resident()
    llm.resize_kv_cache(500)
    assert 7400 * 16 * 1024 < before - resident() < 8100 * 16 * 1024  # of the 500, only those in use are taken yet
    assert not list(llm.stream("the", greedy(40)))[-1].error
    llm.resize_kv_cache(9000)
    assert llm.metrics().num_kv_blocks == 9000
    assert list(stream)[-1].outputs[0].text == expected


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_hardly_any_memory_is_taken_twice() -> None:
    """Caches of 128 MiB: while all of it moves, little more than the 8 MiB of a layer is resident twice."""
    layout = KVLayout((KVGroup(16, 1, 64),), torch.float32)
    ops, cpu = make_back_end("torch").cache, torch.device("cpu")
    source, target = KVTensor(layout, 1024, 16, cpu), KVTensor(layout, 1025, 16, cpu, torch.empty)
    before = resident()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    except OSError:
        pytest.skip("the peak cannot be forgotten")
    ops.gather_blocks(source, target, np.arange(1024))
    [peak] = [
        int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    ]
    assert 3 * MIB < peak - before < 12 * MIB
    del source


def test_a_size_that_cannot_be_is_refused_and_costs_nothing(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(zoo.path("llama"), block_size=8, num_kv_blocks=20)
    requests = submit(engine, PROMPTS[:3], PARAMS[:3])
    engine.step()
    held = engine.kv.pool.num_blocks - engine.kv.pool.num_free
    largest = max(-(-(len(prompt) + params.max_tokens) // 8) for prompt, params in zip(PROMPTS[:3], PARAMS[:3], strict=True))
    assert 3 < largest < held
    for size, message in {
        0: "num_blocks=0 is not allowed: it must be an integer >= 1",
        held - 1: f"num_blocks={held - 1} is less than the {held} blocks in use: at least these are needed",
        10**12: r"num_blocks=1000000000000 takes more than the free memory: at most \d+ are allowed",
        2**63: r"num_blocks=9223372036854775808 takes more than the free memory: at most \d+ are allowed",
        1.5: "num_blocks=1.5 is not allowed: it must be an integer >= 1",
    }.items():
        with pytest.raises(ValueError, match=message):
            engine.resize_kv_cache(size)  # type: ignore[arg-type]
    monkeypatch.setattr(engine.backend, "is_host", False)
    with pytest.raises(ValueError, match="num_blocks=19 is refused: on cpu the KV cache cannot be resized, since recorded graphs"):
        engine.resize_kv_cache(19)
    monkeypatch.undo()
    assert engine.kv.num_blocks == engine.limits.num_kv_blocks == 20
    drain(engine)
    assert [request.output_token_ids for request in requests] == lonely(zoo)[:3]
    [waiting] = submit(engine, [[5] * 30], [greedy(10)])
    with pytest.raises(ValueError, match=f"=4 is too few for request {waiting.request_id}, which may need 5: at least these"):
        engine.resize_kv_cache(4)
    engine.resize_kv_cache(5)
    drain(engine)
    assert waiting.error is None


def test_memory_that_a_larger_cache_has_yet_to_take_is_not_free(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has as much free memory after a resize as before, since what no request has had is not written."""
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), block_size=8, num_kv_blocks=40)
    num_bytes = engine.kv.bytes_per_block
    monkeypatch.setattr(engine.backend, "free_memory", lambda: 100 * num_bytes)
    run_all(engine, PROMPTS, PARAMS)
    engine.resize_kv_cache(140)
    engine.resize_kv_cache(140)  # changes nothing
    num_kept = 140 - engine.kv.pool.num_blank
    for num_touched, num_free in ((num_kept, 0), (100, 60)):
        engine.kv.pool.release(engine.kv.pool.allocate(num_touched - num_kept))
        with pytest.raises(ValueError, match=f"={140 + num_free + 1} takes more than the free .* {140 + num_free} are allowed"):
            engine.resize_kv_cache(140 + num_free + 1)
        with pytest.raises(ValueError, match=f"and {num_free * num_bytes} are free"):
            engine.swap_draft(zoo.path("llama~"))
    engine.kv.pool.release(engine.kv.pool.allocate(140 - num_kept))
    engine.compact_kv_cache()
    tensors = dict(engine.kv.tensors)
    engine.resize_kv_cache(140)
    assert engine.kv.tensors == tensors, "new ones would have to be paid for"
    engine.swap_draft(zoo.path("llama~"))
    engine.resize_kv_cache(240)


def test_a_request_that_was_admitted_for_a_larger_cache_ends_by_name(zoo: Zoo) -> None:
    llm = LLM(zoo.path("llama+text"), dtype="float32", device="cpu", num_kv_blocks=64)
    stream = llm.stream("the", greedy(100, ignore_eos=True))
    llm.resize_kv_cache(4)
    [output] = stream
    assert output.error is not None and output.error.startswith("the KV cache was resized to 4 blocks, and the request may need 7")
    with pytest.raises(ValueError, match=r"could never fit: .* as the KV cache holds 64 tokens \(num_kv_blocks=4\)"):
        llm.stream("the", greedy(100))
    assert llm.generate("the", greedy(5), use_tqdm=False)[0].error is None


class Memory:
    """A target's `forward` for which memory is enough up to some tokens, and never for one token id."""

    def __init__(self, engine: Any, most: int, error: Exception, bad_token: int = -1) -> None:
        self.forward, self.most, self.error, self.bad_token = engine.runner.forward, most, error, bad_token
        self.num_failures, self.sizes = 0, list[int]()
        engine.runner.forward = self

    def __call__(self, batch: RaggedBatch) -> torch.Tensor:
        if len(batch.token_ids) > self.most or self.bad_token in batch.token_ids:
            self.num_failures += 1
            raise self.error
        self.sizes.append(len(batch.token_ids))
        return self.forward(batch)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("most", "draft", "error"),
    [
        (1, "llama~", MemoryError()),
        (7, "llama~", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")),
        (6, None, RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")),
    ],
)
def test_smaller_passes_are_tried_before_requests_are_lost(zoo: Zoo, most: int, draft: str | None, error: Exception) -> None:
    engine = make_engine(zoo.path("llama"), None if draft is None else zoo.path(draft), draft_tree="auto", **SCARCE)
    auditor, memory = Auditor(zoo, engine, "llama"), Memory(engine, most, error)
    requests = submit(engine, PROMPTS[:6], PARAMS[:6])
    while engine.scheduler.has_unfinished:
        engine.step()
        check_blocks(engine)
        auditor.check(draft)
    assert [request.output_token_ids for request in requests] == lonely(zoo)[:6]
    assert memory.num_failures > 10 and max(memory.sizes) <= most


@pytest.mark.parametrize("drafts_prompts", [True, False])
def test_parts_of_a_plan_feed_the_draft_what_the_plan_would(zoo: Zoo, drafts_prompts: bool) -> None:
    [request] = submit(make_engine(zoo.path("llama"), **AMPLE), [range(5, 14)], [greedy(1)])
    parts, sizes = [StepPlan([request], [9], [0], [0], drafts_prompts=drafts_prompts)], list[int]()
    while parts:
        [part] = parts
        assert (part.drafts_prompts, part.reaches_root(0)) == (drafts_prompts, part.num_tokens[0] == 9)
        sizes.append(part.num_tokens[0])
        parts = part.split()
    assert sizes == [9, 4, 2, 1]


def test_parts_of_a_plan_draft_as_it_would(zoo: Zoo) -> None:
    requests = submit(make_engine(zoo.path("llama"), **AMPLE), PROMPTS[:3], [greedy(9)] * 3)
    worths = {i: Worth(0.5, 0.5, price, 0.0, 1.0) for i, price in ((0, 0.1), (2, 0.2))}
    plan = StepPlan(requests, [1, 1, 1], [4, 5, 6], [7, 8, 9], worths, reviews=[1])
    assert plan.split() == [
        StepPlan(requests[:1], [1], [4], [7], {0: worths[0]}),
        StepPlan(requests[1:], [1, 1], [5, 6], [8, 9], {1: worths[2]}),
    ]
    assert plan.without_drafts([0, 2]) == StepPlan(requests[::2], [1, 1], [0, 0], [0, 0])


def test_a_request_that_alone_takes_too_much_ends_by_name_and_the_others_do_not(zoo: Zoo) -> None:
    outputs = lonely(zoo)
    used = {token for tokens in (*outputs, *PROMPTS) for token in tokens}
    bad_token = next(token for token in range(5, 131) if token not in used)
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), **SCARCE)
    Memory(engine, 1000, RuntimeError("not enough memory: you tried to allocate 5 bytes.\nMore."), bad_token)
    prompts = [*PROMPTS[:5], [7, 8, bad_token, 9], *PROMPTS[5:]]
    requests = submit(engine, prompts, [*PARAMS[:5], greedy(9), *PARAMS[5:]])
    drain(engine)
    ended = requests.pop(5)
    assert ended.error == "out of memory in a pass of one token: not enough memory: you tried to allocate 5 bytes."
    assert ended.finish_reason == "error" and [request.output_token_ids for request in requests] == outputs


def fill_the_disk(plan: StepPlan) -> list[DraftTree]:
    raise OSError("disk is full")


def build_nonsense(plan: StepPlan) -> list[DraftTree]:
    return [DraftTree.chain([1.5]) for _ in plan.requests]  # type: ignore[list-item]


def raise_budgets(plan: StepPlan) -> list[DraftTree]:
    plan.draft_budgets[:] = plan.num_slots[:] = [60] * len(plan.requests)
    return [DraftTree.chain([5] * budget) for budget in plan.draft_budgets]


def place_in(function: FunctionType) -> str:
    """The file and the first line of a function's body, as a pattern."""
    return f"{re.escape(__file__)}:{function.__code__.co_firstlineno + 1}"


@pytest.mark.parametrize(
    ("method", "fault", "message"),
    [
        ("propose", fill_the_disk, rf"OSError: disk is full \({place_in(fill_the_disk)}, from "),
        ("propose", build_nonsense, rf"ValueError: token_ids has \[1.5\]: .*trees.py:.*, from {place_in(build_nonsense)}, from"),
        (
            "propose",
            lambda plan: [[5]] * len(plan.requests),
            r"ValueError: .* proposed .*must return a list of one DraftTree per row",
        ),
        ("propose", lambda plan: [DraftTree.chain([5000][:each]) for each in plan.draft_budgets], "ValueError: .* proposed .*5000"),
        ("propose", raise_budgets, "ValueError: .* proposed 60 nodes: at most . were allowed"),
        ("commit", lambda *_: {}[5], "KeyError: 5"),
    ],
)
def test_a_drafters_fault_is_told_by_name_and_costs_no_request(
    zoo: Zoo, method: str, fault: Callable[..., Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are right until something goes wrong in every third step."""
    outputs, calls = lonely(zoo), count(1)
    recordings = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, outputs, strict=True)}
    drafter = ReplayDrafter(recordings, acceptance=1.0, vocab_size=VOCAB_SIZE, max_draft_tokens=3)
    right = getattr(drafter, method)
    monkeypatch.setattr(drafter, method, lambda *args: (right if next(calls) % 3 else fault)(*args))
    engine = make_engine(zoo.path("llama"), drafter, draft_tree="auto", **AMPLE)
    with pytest.warns(RuntimeWarning, match=f"the drafter 'replay' failed, which costs drafts and no request: {message}"):
        assert run_all(engine, PROMPTS, PARAMS) == outputs
    metrics = engine.metrics()
    assert metrics.mean_acceptance_length > 2 and metrics.num_draft_failures > 0
    assert faults(metrics) == [f"the draft 'replay' failed {metrics.num_draft_failures} times, which cost drafts: see the warnings"]
    engine.swap_draft("ngram")
    assert engine.metrics().num_draft_failures == 0


def test_a_move_within_a_cache_that_lacks_memory_has_moved_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second group of layers, when the first would have moved already."""
    layout = KVLayout((KVGroup(1, 1, 16), KVGroup(2, 1, 16)), torch.float64)
    kv, rooms, new_empty = KVTensor(layout, 4, 8, torch.device("cpu")), list[Any](), torch.Tensor.new_empty
    for group in kv.groups:
        group.copy_(torch.arange(4.0).view(1, 4, 1, 1, 1, 1).expand_as(group))

    def fail(tensor: torch.Tensor, *size: int) -> torch.Tensor:
        rooms.append(size)
        if len(rooms) == 2:
            raise MemoryError
        return new_empty(tensor, *size)

    monkeypatch.setattr(torch.Tensor, "new_empty", fail)
    with pytest.raises(MemoryError):
        make_back_end("torch").cache.gather_blocks(kv, kv, np.array([2, 0]))
    assert all((group[0, :, 0, 0, 0, 0] == torch.arange(4)).all() for group in kv.groups)


def test_blocks_are_moved_on_the_engine_s_device_whatever_the_caller_s_is(zoo: Zoo) -> None:
    """Or on its stream, which steps are ordered by."""
    engine = make_engine(zoo.path("llama"), backend=make_back_end("triton"), num_kv_blocks=20)
    requests = submit(engine, [PROMPTS[0], PROMPTS[1]], [greedy(1, ignore_eos=True), greedy(8, ignore_eos=True)])
    engine.step()
    with torch.device("meta"):
        assert engine.compact_kv_cache() >= 0
        engine.end_all("a test")
    assert all(request.is_finished for request in requests) and engine.kv.pool.num_free == 20

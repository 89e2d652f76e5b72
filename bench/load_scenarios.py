"""What a server meets, for `titan bench load`: requests, and the engines that serve them."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from math import inf
from typing import Any

import numpy as np

from titan.bench.engine_run import make_idle, make_requests, serve
from titan.bench.options import model_options
from titan.bench.prompts import prompt_stream
from titan.bench.runs import RequestRun, Run, latency_figures, percentiles
from titan.bench.workloads import Lengths, Workload, take_workload
from titan.core.options import EngineConfig
from titan.core.request import Request
from titan.core.terms import RequestTerms
from titan.engine import Engine
from titan.schedule.policies.fair import FairPolicy
from titan.schedule.policies.fcfs import FcfsPolicy

Figures = dict[str, float]
Options = Mapping[str, Any]
Draw = Callable[[argparse.Namespace, int, int], Workload]
"""Draws so many requests of a round, as the command line says; ``max_len`` are the positions of the model."""
SHORT_PER_LONG = 20
LONG_LEN = 4096
"""Tokens of a long prompt, or half the model's length, if that is less."""
SHARED_LEN = 512
"""Tokens of a system prompt, and of the context where attention takes most of a step."""
CRITICAL_SHARE = 0.1
HEAVY_SHARE = 10
"""Requests of one user for one of the other."""
NUM_FITTING, MOST_RUNNING = 64, 256
"""Requests of 128 tokens that run at once where memory is the limit: in the model's dtype, and at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One question: engines that differ in some options serve the same requests.

    Args:
        settings: these options by name; the first is what ratios compare with.
        draw: returns the requests.
        measure: serves them.
        ratios: figures that are compared with the first setting's.
        shares: rates of arrivals, over what the first setting finishes per second if all come at once; none: they come at once.
        is_timed: whether a run ends by the clock.
        options: of all engines.
    """

    settings: Mapping[str, Options]
    draw: Draw
    measure: Callable[[Engine, Workload], Figures]
    ratios: Sequence[str]
    shares: Sequence[float] = ()
    is_timed: bool = False
    options: Options = field(default_factory=dict)


class ClassBlindPolicy(FcfsPolicy):
    """First come, first served, of requests with classes, too, which "fcfs" refuses because it does not look at them."""


def make_scenarios(args: argparse.Namespace) -> dict[str, Scenario]:
    """All scenarios, by name; ``args`` are the command line."""
    stream = partial(_measure_stream, to_first_token=args.slo_ttft, between_tokens=args.slo_tpot)
    targets = {f"target {each:g} ms": {"max_inter_token_s": each / 1e3} for each in args.inter_token_ms}
    # the long prompt goes into one step, beside the other requests
    most_tokens = max(EngineConfig().schedule.max_num_batched_tokens, _long_len(args) + args.max_batch_size)
    whole = {"prefill_chunk_size": None, "max_num_batched_tokens": most_tokens}
    return {
        "rates": Scenario(
            settings={"no draft": {}, "adaptive": {"speculation": "adaptive"}},
            draw=_take,
            measure=stream,
            ratios=["latency P50, ms", "latency P99, ms"],
            shares=(0.3, 0.6, 0.9, 1.2),
        ),
        "long-prompts": Scenario(
            settings={"not chunked": whole, "chunks": {}, **targets},
            draw=_draw_long,
            measure=stream,
            ratios=["between steps P99, ms", "tokens/s"],
            shares=(0.8,),
        ),
        "priority": Scenario(
            settings={
                "fcfs": {"scheduling_policy": ClassBlindPolicy()},
                "priority": {"scheduling_policy": "priority"},
            },
            draw=_draw_classes,
            measure=partial(_measure_classes, seconds=args.seconds),
            ratios=["critical first token P99, ms", "batch completed"],
            shares=(1.5,),
            is_timed=True,
        ),
        "fair": Scenario(
            settings={"fcfs": {}, "fair": {"scheduling_policy": "fair"}},
            draw=_draw_users,
            measure=_measure_users,
            ratios=["service, x equal share", "tokens/s"],
            # half of the places are fewer than the requests of "light", which must wait to be counted
            options={"max_batch_size": min(args.max_batch_size, max(1, args.num_requests // (1 + HEAVY_SHARE)))},
        ),
        "prefix": Scenario(
            settings={"no cache": {}, "cache": {"enable_prefix_caching": True}},
            draw=_draw_shared,
            measure=_measure_first_tokens,
            ratios=["first token P50, ms"],
        ),
        "int8": Scenario(
            settings={"auto": {}, "int8": {"kv_cache_dtype": "int8"}},
            draw=_draw_contexts,
            measure=_measure_decoding,
            ratios=["tokens/s"],
            options={"max_batch_size": 32, "enable_prefix_caching": True},
        ),
        "int8-memory": Scenario(
            settings={"auto": {}, "int8": {"kv_cache_dtype": "int8"}},
            draw=lambda args, _, round_id: _fixed(args, MOST_RUNNING, round_id, 64, 64),
            measure=_measure_room,
            ratios=["running"],
            options={
                "num_kv_blocks": None,
                "kv_cache_memory": NUM_FITTING * 128 * args.bytes_per_token,
                "reservation": "max_tokens",
                "max_batch_size": MOST_RUNNING,
            },
        ),
    }


def _take(args: argparse.Namespace, num_requests: int, round_id: int, prompt_len: Lengths | None = None) -> Workload:
    """Requests that arrive together."""
    seed = args.seed + round_id
    prompts = prompt_stream(args.model, "auto", prompt_len or args.prompt_len, seed, **model_options(args))
    return take_workload(prompts, num_requests, args.output_len.stream(f"{seed}/outputs"))


def _fixed(args: argparse.Namespace, num_requests: int, round_id: int, prompt_len: int, output_len: int) -> Workload:
    """Requests of one length, cut to what the model takes."""
    length = min(prompt_len, args.max_len - output_len)
    return replace(_take(args, num_requests, round_id, Lengths(length, length)), output_lens=[output_len] * num_requests)


def _long_len(args: argparse.Namespace) -> int:
    length: int = min(LONG_LEN, args.max_len // 2)
    return length


def _draw_long(args: argparse.Namespace, num_requests: int, round_id: int) -> Workload:
    """In the middle of each `SHORT_PER_LONG` short requests one of `LONG_LEN`."""
    workload = _take(args, num_requests, round_id)
    places = range(SHORT_PER_LONG // 2, num_requests, SHORT_PER_LONG + 1)
    long = _fixed(args, len(places), round_id, _long_len(args), args.output_len.high).prompts
    prompts = dict(enumerate(workload.prompts)) | dict(zip(places, long, strict=True))
    return replace(workload, prompts=list(prompts.values()))


def _draw_classes(args: argparse.Namespace, num_requests: int, round_id: int) -> Workload:
    """`CRITICAL_SHARE` of them critical, the others of the class "batch"."""
    generator = random.Random(f"{args.seed + round_id}/classes")
    classes = generator.choices(["critical", "batch"], [CRITICAL_SHARE, 1 - CRITICAL_SHARE], k=num_requests)
    return replace(_take(args, num_requests, round_id), terms=[RequestTerms(priority=each) for each in classes])


def _draw_users(args: argparse.Namespace, num_requests: int, round_id: int) -> Workload:
    users = islice(cycle(["heavy"] * HEAVY_SHARE + ["light"]), num_requests)
    return replace(_take(args, num_requests, round_id), terms=[RequestTerms(user=each) for each in users])


def _draw_shared(args: argparse.Namespace, num_requests: int, round_id: int) -> Workload:
    """A system prompt and a question, to which one token is the answer."""
    [system] = _fixed(args, 1, round_id, SHARED_LEN, args.prompt_len.high + 1).prompts
    workload = _take(args, num_requests, round_id)
    return Workload([system + prompt[:16] for prompt in workload.prompts], [1] * num_requests)


def _draw_contexts(args: argparse.Namespace, num_requests: int, round_id: int) -> Workload:  # noqa: ARG001
    """Contexts that grow to the middle of their outputs; the same in all rounds, so that prompts are in the cache."""
    return _fixed(args, 32, 0, SHARED_LEN - 32, 64)


def _run(engine: Engine, workload: Workload, seconds: float = inf) -> tuple[list[Request], list[list[float]], float]:
    """Serve until all is done or the time is over; returns requests, the times at which each emitted, and the end."""
    requests = make_requests(engine, workload)
    times: dict[Request, list[float]] = {request: [] for request in requests}
    now = 0.0
    for now, changed in serve(engine, workload, requests, len(requests)):
        for request in changed:
            times[request].append(now)
        if now >= seconds:
            break
    done = [request.finish_reason == "length" for request in requests]
    make_idle(engine)
    assert all(done) or now >= seconds
    return requests, list(times.values()), now


def _measure_stream(engine: Engine, workload: Workload, to_first_token: float, between_tokens: float) -> Figures:
    """Latencies; times from one step with tokens of a request to its next; and the share of requests within these limits."""
    requests, times, end = _run(engine, workload)
    found = [
        RequestRun(request.output_token_ids, mine[-1], mine[0], arrival)
        for request, mine, arrival in zip(requests, times, workload.arrivals, strict=True)
    ]
    num_good = sum(
        (each.to_first_token or 0.0) <= to_first_token and (each.between_tokens or 0.0) <= between_tokens for each in found
    )
    gaps = np.concatenate([np.diff(each) for each in times]).tolist()
    between_steps = percentiles("between steps", gaps) if gaps else {}
    if between_steps:
        between_steps["P99 / P50"] = between_steps["between steps P99, ms"] / between_steps["between steps P50, ms"]
    return {
        **Run(found, end - workload.arrivals[0]).rates,
        "within target": num_good / len(found),
        **latency_figures(found),
        **between_steps,
    }


def _measure_classes(engine: Engine, workload: Workload, seconds: float) -> Figures:
    """A critical request without a token by the end waits at least until then, and counts with that."""
    requests, times, end = _run(engine, workload, seconds)
    waits: dict[str, list[float]] = {name: [] for name in ("critical", "batch")}
    completed = dict.fromkeys(waits, 0)
    for request, mine, arrival in zip(requests, times, workload.arrivals, strict=True):
        if arrival < end:
            waits[request.terms.priority].append((mine[0] if mine else end) - arrival)
            completed[request.terms.priority] += request.finish_reason == "length"
    figures = {f"{name} completed": float(number) for name, number in completed.items() if waits[name]}
    first_tokens = percentiles("critical first token", waits["critical"]) if waits["critical"] else {}
    return {"tokens/s": sum(request.num_output_tokens for request in requests) / end, **first_tokens, **figures}


def _measure_users(engine: Engine, workload: Workload) -> Figures:
    """Service as the policy "fair" counts it, for as long as the user who sends less has requests that wait."""
    policy, requests = FairPolicy(), make_requests(engine, workload)
    service: dict[str, float] = {}
    now = 0.0
    for now, _ in serve(engine, workload, requests, len(requests)):  # noqa: B007 - the last counts
        if any(request.terms.user == "light" for request in engine.scheduler.waiting):
            service = {"heavy": 0.0, "light": 0.0}
            for each in requests:
                prompt = policy.prompt_weight * each.num_prompt_tokens * (each.num_computed_tokens > 0)
                service[str(each.terms.user)] += prompt + policy.output_weight * each.num_output_tokens
    share = {"service, x equal share": 2 * service["light"] / sum(service.values())} if service else {}
    return {"tokens/s": sum(request.num_output_tokens for request in requests) / now, **share}


def _measure_first_tokens(engine: Engine, workload: Workload) -> Figures:
    """One request after the other, without the first, which nobody has prepared."""
    ends = [now for now, changed in serve(engine, workload, make_requests(engine, workload), 1) if changed]
    return percentiles("first token", np.diff(ends).tolist())


def _measure_decoding(engine: Engine, workload: Workload) -> Figures:
    """From the step in which the last request has its first token."""
    requests = make_requests(engine, workload)
    start, num_before = inf, 0
    now = 0.0
    for now, _ in serve(engine, workload, requests, len(requests)):
        if start == inf and all(request.num_output_tokens for request in requests):
            start, num_before = now, sum(request.num_output_tokens for request in requests)
    return {"tokens/s": (sum(workload.output_lens) - num_before) / (now - start)}


def _measure_room(engine: Engine, workload: Workload) -> Figures:
    """Requests that run at once, each of them to its end."""
    requests = make_requests(engine, workload)
    num_before = engine.counters.num_preemptions
    steps = islice(serve(engine, workload, requests, len(requests)), min(workload.output_lens) - 1)
    running = max(len(engine.scheduler.running) for _ in steps)
    make_idle(engine)
    return {"running": float(running), "preemptions": float(engine.counters.num_preemptions - num_before)}

"""Other engines: the process that they live in, and the adapters that run here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from runpy import run_path
from typing import Any
from unittest.mock import MagicMock, patch

import psutil
import pytest
from zoo import Zoo, random_prompts

from titan.bench.peers import client, serve, transformers_peer
from titan.bench.peers.client import PeerError, PeerProcess
from titan.bench.workloads import Workload

FAKE = Path(__file__).with_name("fake_peer")
WORKLOAD = Workload([[7], [7, 8, 9]], [2, 4])


def make_process(**options: Any) -> PeerProcess:
    return PeerProcess(str(FAKE), sys.executable, options)


def test_a_peer_answers_round_after_round_is_stopped_in_between_and_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/this/environment")
    with closing(make_process(spins=True)) as process:
        leader = psutil.Process(int(process.versions["pid"]))
        for concurrency in (1, 3):
            run = process.run(WORKLOAD, concurrency)
            assert [request.token_ids for request in run.requests] == [[1, 2], [3, 4, 5, 6]]
            assert run.requests[1].finished == concurrency and run.requests[1].first_token == 0.5
            assert run.rates == {"tokens/s": 3.0, "requests/s": 1.0}
            assert run.figures["tokens/step"] == 1.5 and "CPU" in run.figures
            for _ in range(10_000):  # the signal is on its way
                if leader.status() == psutil.STATUS_STOPPED:
                    break
            before = leader.cpu_times()
            sum(range(5_000_000))  # time in which its thread that spins would be seen
            assert leader.cpu_times() == before
    assert not leader.is_running()
    assert process.versions["fake"] == "1.0" and "/of/this/environment" not in process.versions["folders"]


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("load", "^ValueError: no such\nmodel$"),
        ("run", "^RuntimeError: out of memory$"),
        ("exit", r"^it ended: noise of a library \| last words$"),
        ("short", r"^it generated \[1, 3\] tokens, not \[2, 4\]$"),
        ("answer", r"^it did not answer within 0\.1 s: "),
    ],
)
def test_a_peer_that_fails_says_why(fails: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerError, match=message), closing(make_process(fails=fails)) as peer:  # noqa: PT012
        monkeypatch.setattr(client, "ANSWER_SECONDS", 0.1 if fails == "answer" else 60.0)
        peer.run(WORKLOAD, 1)


class Stepped:
    """An engine that is stepped, and gives each request up to three tokens a step."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def add(self, request: dict[str, Any]) -> Iterator[int]:
        return iter(range(request["output_len"]))

    def step(self, handles: list[Iterator[int]]) -> list[tuple[Iterator[int], list[int]]]:
        self.batches.append(len(handles))
        return [(handle, list(islice(handle, 3))) for handle in handles]


def test_engines_that_are_stepped_have_at_most_so_many_requests() -> None:
    peer, output_lens = Stepped(), [4, 1, 7, 3]
    answer = serve.run_steps(peer, [{"output_len": wanted} for wanted in output_lens], 2)
    assert [result["token_ids"] for result in answer["requests"]] == [list(range(wanted)) for wanted in output_lens]
    assert peer.batches == [2, 2, 2, 1] and answer["figures"] == {"tokens/step": 15 / 7}
    ends = [result["finished_seconds"] for result in answer["requests"]]
    assert ends[1] <= ends[0] <= ends[3] <= ends[2] <= answer["seconds"]
    assert all(0 <= result["first_token_seconds"] <= result["finished_seconds"] for result in answer["requests"])


@pytest.mark.parametrize(
    ("adapter", "device", "is_cpu"),
    [("openvino_peer", "cuda:0", True), ("vllm_peer", "cuda:0", True), ("vllm_peer", "cpu", False), ("vllm_peer", "cuda:1", False)],
)
def test_an_engine_that_runs_elsewhere_is_refused(adapter: str, device: str, is_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the adapters alone: the engines are not installed here."""
    modules = {
        name: MagicMock(__version__="1")
        for name in ("vllm", "vllm.platforms", "vllm.sampling_params", "openvino", "openvino_genai")
    }
    modules["vllm.platforms"].current_platform.is_cpu.return_value = is_cpu
    with patch.dict(sys.modules, modules), patch.dict(os.environ):
        load = run_path(str(client.HERE / f"{adapter}.py"))["load"]
        with pytest.raises(ValueError, match=f"^device={device} is not that of "):
            load({"device": device})


@pytest.mark.parametrize("mode", ["static", "continuous", "assisted"])
def test_transformers_generates_what_it_generates_alone(zoo: Zoo, mode: str) -> None:
    prompts, output_lens = random_prompts(5, max_len=20, seed=3), [4, 9, 2, 7, 5]
    options = {"model": zoo.path("llama"), "draft_model": zoo.path("llama~"), "dtype": "float32", "device": "cpu", "threads": 1}
    peer = transformers_peer.load(options | {"mode": mode, "max_draft_tokens": 3, "max_model_len": 40})
    requests = [{"prompt": prompt, "output_len": wanted} for prompt, wanted in zip(prompts, output_lens, strict=True)]
    for _ in range(2):
        answer = peer.run(requests, 2)
        for request, result in zip(requests, answer["requests"], strict=True):
            assert result["token_ids"] == zoo.greedy("llama", request["prompt"], request["output_len"], ignore_eos=True)
            assert 0 < result["first_token_seconds"] <= result["finished_seconds"] <= answer["seconds"] + 1e-6
        if mode == "static":  # batches of two end together, one after the other
            ends = [result["finished_seconds"] for result in answer["requests"]]
            assert ends[0] == ends[1] < ends[2] == ends[3] < ends[4]
    assert 1 < answer["figures"].get("tokens/step", 4) <= 4 and bool(answer["figures"]) == (mode == "assisted")
    if mode == "continuous":
        peer.model.destroy_cached_continuous_batching_manager()

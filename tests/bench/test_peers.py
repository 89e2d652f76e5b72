"""Other engines: the process that they live in, and the adapters that run here."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from zoo import Zoo, random_prompts

from titan.bench.peers import llama_cpp_peer, make_env, serve, transformers_peer
from titan.bench.peers.client import PeerError, PeerProcess
from titan.bench.runners import PEER_MODES, RunnerOptions, Runners, installed_modes, peer_python
from titan.bench.workloads import Workload

FAKE = Path(__file__).with_name("fake_peer.py")
WORKLOAD = Workload([[7], [7, 8, 9]], [2, 4])


def make_process(**options: Any) -> PeerProcess:
    return PeerProcess("fake", FAKE, sys.executable, {"threads": 1} | options)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerProcess]:
    monkeypatch.setenv("PYTHONPATH", "of this environment")
    peer = make_process()
    yield peer
    peer.close()


def test_a_peer_answers_round_after_round(process: PeerProcess) -> None:
    for concurrency in (1, 3):
        run = process.run(WORKLOAD, concurrency)
        assert [request.token_ids for request in run.requests] == [[1, 2], [3, 4, 5, 6]]
        assert run.requests[1].finished_seconds == concurrency and run.requests[1].first_token_seconds == 0.5
        assert (run.seconds, run.num_tokens, run.tokens_per_second, run.mean_acceptance_length) == (2.0, 6, 3.0, 1.5)
        assert run.cpu_seconds is not None and run.cpu_seconds >= 0
    assert process.versions["fake"] == "1.0"


def test_a_peer_does_not_see_the_packages_of_this_environment(process: PeerProcess) -> None:
    assert process.versions["path"] == "none"


def test_a_peer_is_stopped_between_its_runs(tmp_path: Path) -> None:
    peer = make_process(counts_in=str(tmp_path / "count"))
    try:
        for _ in range(2):
            peer.run(WORKLOAD, 1)
            leader = psutil.Process(int(peer.versions["pid"]))
            for _ in range(10_000):  # the signal is on its way
                if leader.status() == psutil.STATUS_STOPPED:
                    break
            assert leader.status() == psutil.STATUS_STOPPED
            before = leader.cpu_times()
            sum(range(5_000_000))  # time in which a thread that spins would be seen
            assert leader.cpu_times() == before
    finally:
        peer.close()


def test_a_closed_peer_is_gone(process: PeerProcess) -> None:
    process.close()
    assert not psutil.pid_exists(int(process.versions["pid"]))
    process.close()  # and may be closed again


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("run", "fake failed: RuntimeError: out of memory"),
        ("exit", "fake ended: noise of a library | last words"),
        ("short", r"fake generated \[1, 3\] tokens, not \[2, 4\]"),
    ],
)
def test_a_peer_that_fails_says_so_in_one_line(fails: str, message: str) -> None:
    peer = make_process(fails=fails)
    with pytest.raises(PeerError, match=message.replace("|", r"\|")) as error:
        peer.run(WORKLOAD, 1)
    assert "\n" not in str(error.value)
    peer.close()


def test_a_peer_that_cannot_load_says_so_in_one_line() -> None:
    with pytest.raises(PeerError, match=r"^fake failed: ValueError: no such model$"):
        make_process(fails="load")
    with pytest.raises(PeerError, match="fake cannot be started with /nowhere/python"):
        PeerProcess("fake", FAKE, "/nowhere/python", {"threads": 1})


def test_a_peer_that_does_not_answer_is_given_up() -> None:
    peer = make_process(fails="answer")
    peer._answer_seconds = 0.1
    try:
        with pytest.raises(PeerError, match=r"^fake did not answer within 0\.1 s: "):
            peer.run(WORKLOAD, 1)
    finally:
        peer.close()


def test_an_environment_does_not_wipe_what_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Path] = []
    monkeypatch.setattr(make_env.venv, "create", lambda folder, **_: made.append(folder))
    monkeypatch.setattr(make_env.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0))
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SystemExit, match=r"^vllm: folder=.* is not allowed: it holds something else than an environment"):
        make_env.main(["vllm", str(tmp_path)])
    with pytest.raises(SystemExit, match="is not allowed"):
        make_env.main(["vllm", str(tmp_path / "thesis.tex")])
    assert made == []
    (tmp_path / "empty").mkdir()
    (tmp_path / "pyvenv.cfg").touch()  # it is an environment: made anew
    for folder in (tmp_path / "new", tmp_path / "empty", tmp_path):
        make_env.main(["vllm", str(folder)])
        assert made.pop() == folder


def test_after_a_failed_load_nothing_is_answered() -> None:
    answers = io.StringIO()
    adapter = serve.load_adapter(str(FAKE))
    serve.serve(adapter, io.StringIO('{"fails": "load"}\n{"requests": [], "concurrency": 1}\n'), answers)
    [answer] = answers.getvalue().splitlines()
    assert json.loads(answer) == {"error": "ValueError: no such\nmodel"}


def test_adapters_and_their_loop_need_nothing_of_titan() -> None:
    folder = Path(serve.__file__).parent
    adapters = {f"{mode.adapter}.py" for mode in PEER_MODES.values()} | {"serve.py"}
    for name in adapters:
        assert "titan" not in [part.split(".")[0] for part in imported(folder / name)], name


def imported(path: Path) -> list[str]:
    import ast

    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return plain + [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]


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
    assert (answer["mean_acceptance_length"] is None) == (mode != "assisted")
    if mode == "assisted":
        assert 1 < answer["mean_acceptance_length"] <= 4
    elif mode == "continuous":
        peer.model.destroy_cached_continuous_batching_manager()


class Server(BaseHTTPRequestHandler):
    """What llama.cpp's server answers, with numbers for tokens."""

    questions: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._begin()
        self.wfile.write(b'{"build_info": "b1234"}')

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.questions.append(question)
        self._begin()
        for token in range(question["n_predict"]):
            event = {"content": "x", "tokens": [question["prompt"][0] + token], "stop": False}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b'data: {"content": "", "tokens": [], "stop": true}\n\n')

    def _begin(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Server.questions = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()
        thread.join()


def test_the_server_of_llama_cpp_is_asked_over_http(server: str) -> None:
    peer = llama_cpp_peer.load({"url": server})
    assert peer.versions == {"llama.cpp": "b1234"}
    answer = peer.run([{"prompt": [10], "output_len": 3}, {"prompt": [20, 1], "output_len": 2}], 2)
    assert [result["token_ids"] for result in answer["requests"]] == [[10, 11, 12], [20, 21]]
    assert all(0 < result["first_token_seconds"] <= result["finished_seconds"] for result in answer["requests"])
    for question in Server.questions:
        assert question["temperature"] == 0 and question["ignore_eos"] and not question["cache_prompt"]


def test_what_is_not_installed_is_named_with_the_way_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not installed in .*: make it with `python -m titan.bench.peers.make_env vllm "):
        peer_python(PEER_MODES["vllm"], str(tmp_path))
    with pytest.raises(ValueError, match=r"give the address of a running server: --peer llama\.cpp=http://HOST:PORT"):
        peer_python(PEER_MODES["llama.cpp"], str(tmp_path))


def test_what_is_installed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    python = tmp_path / ".peers" / "openvino" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    found = installed_modes({"llama.cpp": "http://localhost:1"})
    assert {"openvino", "openvino-draft", "llama.cpp", "transformers-static", "titan"} <= set(found)
    assert not {"vllm", "vllm-draft"} & set(found)


def test_rows_that_cannot_run_are_left_out_with_a_reason(zoo: Zoo, tmp_path: Path) -> None:
    options = RunnerOptions(
        model=zoo.path("llama"),
        draft_model=zoo.path("small_vocab"),
        dtype="float32",
        device="cpu",
        max_draft_tokens=2,
        max_batch_size=2,
        max_model_len=32,
        threads=1,
        peers={"vllm": str(tmp_path)},
    )
    with Runners(["titan", "titan-draft", "transformers-assisted", "vllm"], options, note=lambda _: None) as runners:
        assert list(runners.by_mode) == ["titan"]
        assert [problem.split(" is left out: ")[0] for problem in runners.problems] == [
            "titan-draft",
            "transformers-assisted",
            "vllm",
        ]
        assert all("another vocabulary" in problem for problem in runners.problems[:2])
        assert "not installed" in runners.problems[2]

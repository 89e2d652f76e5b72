"""A peer in a process and an environment of its own, stopped dead while it has nothing to do."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from titan.bench.runs import RequestRun, Run
from titan.bench.workloads import Workload

HERE = Path(__file__).resolve().parent
ANSWER_SECONDS = 3600.0  # without an answer; loading, compiling and the longest runs take less


class PeerError(Exception):
    """A peer could not be loaded or failed."""


class PeerProcess:
    """Runs an adapter; between two runs its processes are stopped by a signal, so none of its threads disturbs the others.

    Args:
        adapter: a module in this folder, or the path of one, without its suffix.
        python: interpreter of the peer's environment.
        options: see `serve.py`; the threads are those of torch here.

    Raises:
        PeerError: the adapter cannot load, or does not answer in time.
    """

    def __init__(self, adapter: str, python: str, options: Mapping[str, Any]) -> None:
        self._num_threads = torch.get_num_threads()
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [python, "-Iu", str(HERE / "serve.py"), str(HERE / adapter)],  # I: without the packages of this environment
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(self._num_threads)},
            process_group=0,  # Ctrl-C is not for it, and a signal reaches its children as well
        )
        try:
            self.versions: dict[str, str] = self._ask({**options, "threads": self._num_threads})["versions"]
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def run(self, workload: Workload, concurrency: int) -> Run:
        """Run a workload, at most ``concurrency`` requests at once.

        Raises:
            PeerError: the peer failed, did not answer in time, or did not generate what it was asked for.
        """
        pairs = zip(workload.prompts, workload.output_lens, strict=True)
        requests = [{"prompt": prompt, "output_len": output_len} for prompt, output_len in pairs]
        self._signal(signal.SIGCONT)
        cpu_start = self._cpu_seconds()
        answer = self._ask({"requests": requests, "concurrency": concurrency})
        cpu_seconds = self._cpu_seconds() - cpu_start
        self._signal(signal.SIGSTOP)
        runs = [RequestRun(each["token_ids"], each["finished_seconds"], each["first_token_seconds"]) for each in answer["requests"]]
        output_lens = [len(each.token_ids) for each in runs]
        if output_lens != workload.output_lens:
            raise PeerError(f"it generated {output_lens} tokens, not {workload.output_lens}")
        figures = {**answer["figures"], "CPU": cpu_seconds / answer["seconds"] / self._num_threads}
        return Run(runs, answer["seconds"], figures)

    def close(self) -> None:
        """End the process and its children."""
        if self._process.returncode is None:
            self._signal(signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            assert pipe is not None
            pipe.close()

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with suppress(BrokenPipeError):  # it has ended: its last words are in the log
            print(json.dumps(question), file=stdin, flush=True)
        if not select.select([stdout], [], [], ANSWER_SECONDS)[0]:
            raise PeerError(f"it did not answer within {ANSWER_SECONDS:g} s: {self._last_words()}")
        line = stdout.readline()
        if not line:
            raise PeerError(f"it ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def _cpu_seconds(self) -> float:
        leader = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in (leader, *leader.children(recursive=True))]
        return float(sum(each.user + each.system for each in times))

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return " | ".join(lines[-3:]) or "it said nothing"

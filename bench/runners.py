"""The modes that are compared: Titan's ways to batch, and other engines on the same requests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from titan import LLM
from titan.bench.engine_run import make_idle, run_continuous, run_static
from titan.bench.peers.client import PeerError, PeerProcess
from titan.bench.runs import Run
from titan.bench.workloads import Workload
from titan.draft.ngram import NgramDrafter
from titan.kernels.backend import choose_device
from titan.models.loader import load_config, resolve_model

TITAN = "titan"
TITAN_DRAFT = "titan-draft"
TITAN_STATIC = "titan-static"
TITAN_SINGLE = "titan-single"
PEERS_FOLDER = Path(".peers")
"""Where `make_env` puts environments, and where they are looked for."""


@dataclass(frozen=True, slots=True)
class PeerMode:
    """A mode of another engine.

    ``peer`` names the environment ("" = this one), ``adapter`` the file; ``needs_url`` is for a server that runs already.
    """

    description: str
    adapter: str
    peer: str = ""
    uses_draft: bool = False
    needs_url: bool = False
    only_single: bool = False  # one request at a time, so measured at concurrency 1 only
    options: Mapping[str, Any] = field(default_factory=dict)


TITAN_MODES = {
    TITAN: "continuous batching: Titan without a draft",
    TITAN_DRAFT: "the Titan design: continuous batching with the draft",
    TITAN_STATIC: "static batching: Titan without a draft, in batches that run until their longest request ends",
    TITAN_SINGLE: "no batching: Titan without a draft, one request at a time",
}
PEER_MODES = {
    "transformers-static": PeerMode(
        "transformers' generate: static batches, dynamic cache", "transformers_peer", options={"mode": "static"}
    ),
    "transformers-continuous": PeerMode(
        "transformers' continuous batching (generate_batch), paged cache, its default attention (sdpa on a CPU)",
        "transformers_peer",
        options={"mode": "continuous"},
    ),
    "transformers-assisted": PeerMode(
        "transformers' assisted generation: one request at a time, constant number of draft tokens",
        "transformers_peer",
        uses_draft=True,
        only_single=True,
        options={"mode": "assisted"},
    ),
    "vllm": PeerMode("vLLM without a draft", "vllm_peer", "vllm"),
    "vllm-draft": PeerMode("vLLM with the draft model", "vllm_peer", "vllm", uses_draft=True),
    "openvino": PeerMode("OpenVINO GenAI's continuous batching without a draft", "openvino_peer", "openvino"),
    "openvino-draft": PeerMode("OpenVINO GenAI's continuous batching with the draft", "openvino_peer", "openvino", uses_draft=True),
    "llama.cpp": PeerMode("llama.cpp's server, as it was started", "llama_cpp_peer", "llama.cpp", needs_url=True),
}
DESCRIPTIONS = TITAN_MODES | {name: mode.description for name, mode in PEER_MODES.items()}
DRAFT_MODES = (TITAN_DRAFT, *(name for name, mode in PEER_MODES.items() if mode.uses_draft))
PEERS = ("vllm", "openvino", "llama.cpp")
STATIC_MODES = (TITAN_STATIC, "transformers-static")
"""A request ends with its batch here, so its end does not say how long its tokens took."""


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """What all runners of one dtype share."""

    model: str
    draft_model: str | None
    dtype: str
    device: str
    max_draft_tokens: int
    max_batch_size: int
    max_model_len: int  # tokens
    threads: int
    peers: Mapping[str, str]  # environment folder or URL by peer, where it is not the default


class Runner(Protocol):
    """Runs workloads greedily, ignoring the end of sequence."""

    def run(self, workload: Workload, concurrency: int) -> Run: ...


class TitanRunner:
    """One of Titan's modes; all of them share an engine. ``llm`` is open to be profiled."""

    def __init__(self, llm: LLM, mode: str) -> None:
        self.llm = llm
        self.uses_draft = mode == TITAN_DRAFT
        self._mode = mode

    def run(self, workload: Workload, concurrency: int) -> Run:
        if self._mode == TITAN_STATIC:
            return run_static(self.llm.engine, workload, concurrency)
        concurrency = 1 if self._mode == TITAN_SINGLE else concurrency
        return run_continuous(self.llm.engine, workload, concurrency, use_speculative=self.uses_draft)


class Runners:
    """The runners of one dtype by mode, in order; a context manager that ends the peers' processes.

    A mode that cannot run is left out, and ``problems`` says why, a line each.

    Args:
        modes: keys of `DESCRIPTIONS`.
        options: for all of them.
        note: is told what is being loaded.

    Raises:
        ValueError: the target cannot be loaded.
    """

    def __init__(self, modes: Sequence[str], options: RunnerOptions, note: Callable[[str], None]) -> None:
        self.problems: list[str] = []
        self.versions: dict[str, str] = {}
        self.by_mode: dict[str, Runner] = {}
        self._options = options
        self._processes: list[PeerProcess] = []
        self._draft_problem: str | None = None
        titan_modes = [mode for mode in modes if mode in TITAN_MODES]
        if titan_modes:
            note(f"{options.dtype}: loading titan")
            self._add_titan(titan_modes)
        try:
            for mode in modes:
                if mode in PEER_MODES:
                    note(f"{options.dtype}: loading {mode}")
                    self._add_peer(mode)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Runners:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def drop(self, mode: str) -> None:
        """Leave a mode that failed out from now on: end its process, or make the engine idle again for Titan's other modes."""
        runner = self.by_mode.pop(mode)
        if isinstance(runner, PeerProcess):
            runner.close()
        elif isinstance(runner, TitanRunner):
            make_idle(runner.llm.engine)

    def close(self) -> None:
        """End the peers' processes."""
        for process in self._processes:
            process.close()
        self._processes.clear()

    def _add_titan(self, modes: Sequence[str]) -> None:
        draft = self._options.draft_model if TITAN_DRAFT in modes else None
        try:
            llm = self._make_llm(draft)
        except ValueError as error:
            if draft is None:
                raise
            llm = self._make_llm(None)
            self._draft_problem = str(error)
            self.problems.append(f"{TITAN_DRAFT} is left out: {error}")
            modes = [mode for mode in modes if mode != TITAN_DRAFT]
        for mode in modes:
            self.by_mode[mode] = TitanRunner(llm, mode)

    def _make_llm(self, draft_model: str | None) -> LLM:
        options = self._options
        return LLM(
            options.model,
            draft_model,
            dtype=options.dtype,
            device=options.device,
            max_draft_tokens=options.max_draft_tokens,
            max_batch_size=options.max_batch_size,
            max_model_len=options.max_model_len,
            enable_prefix_caching=False,  # the modes see the same prompts one after the other
        )

    def _add_peer(self, name: str) -> None:
        mode, options = PEER_MODES[name], self._options
        where = options.peers.get(mode.peer, str(PEERS_FOLDER / mode.peer))
        try:
            if mode.uses_draft and self._draft_problem is not None:
                raise ValueError(self._draft_problem)
            python = peer_python(mode, where)
            process = PeerProcess(
                name,
                mode.adapter,
                python,
                {
                    "model": resolve_model(options.model, "target"),
                    "draft_model": resolve_model(options.draft_model, "draft") if mode.uses_draft and options.draft_model else None,
                    "dtype": options.dtype,
                    "device": str(choose_device(options.device)),
                    "max_draft_tokens": options.max_draft_tokens,
                    "max_batch_size": options.max_batch_size,
                    "max_model_len": options.max_model_len,
                    "threads": options.threads,
                    "url": where,
                }
                | dict(mode.options),
            )
        except (PeerError, ValueError) as error:
            self.problems.append(f"{name} is left out: {error}")
            return
        self._processes.append(process)
        self.by_mode[name] = process
        self.versions |= {key: value for key, value in process.versions.items() if key != "torch"}
        if "torch" in process.versions and mode.peer:
            self.versions[f"torch of {mode.peer}"] = process.versions["torch"]


def peer_python(mode: PeerMode, where: str) -> str:
    """Return the interpreter that runs a mode's adapter.

    Args:
        mode: of another engine.
        where: folder of the peer's environment, or URL of its server.

    Raises:
        ValueError: the environment does not exist, or a URL is missing.
    """
    if mode.needs_url:
        if not where.startswith("http://"):
            raise ValueError(f"give the address of a running server: --peer {mode.peer}=http://HOST:PORT")
        return sys.executable
    if not mode.peer:
        return sys.executable
    python = Path(where, "bin", "python")
    if not python.exists():
        raise ValueError(f"not installed in {where}: make it with `python -m titan.bench.peers.make_env {mode.peer} {where}`")
    return str(python)


def installed_modes(peers: Mapping[str, str]) -> list[str]:
    """The modes that need nothing that is missing here.

    Args:
        peers: environment folder or URL by peer, where it is not the default.
    """
    found = []
    for name, mode in PEER_MODES.items():
        try:
            peer_python(mode, peers.get(mode.peer, str(PEERS_FOLDER / mode.peer)))
        except ValueError:
            continue
        found.append(name)
    return [*TITAN_MODES, *found]


def possible_modes(modes: Sequence[str], draft_model: str | None) -> list[str]:
    """The modes among ``modes`` that this draft allows: other engines need a model, Titan takes any drafter.

    Raises:
        ValueError: the draft is unknown.
    """
    has_model = draft_model is not None and _names_a_model(draft_model)
    return [mode for mode in modes if mode not in DRAFT_MODES or has_model or (draft_model is not None and mode == TITAN_DRAFT)]


def _names_a_model(draft_model: str) -> bool:
    """Whether a draft is a model; the n-gram drafter is none.

    Raises:
        ValueError: it is neither.
    """
    if draft_model == NgramDrafter.name:
        return False
    try:
        load_config(resolve_model(draft_model, "draft"))
    except ValueError as error:
        raise ValueError(
            f"draft_model={draft_model!r} cannot be used; besides models, {NgramDrafter.name!r} is allowed: {error}"
        ) from error
    return True

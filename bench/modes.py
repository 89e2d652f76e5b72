"""The modes that are compared: Titan's ways to batch, and other engines on the same requests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titan import LLM
from titan.bench.engine_run import make_idle, run_static, run_workload
from titan.bench.peers.client import PeerError, PeerProcess
from titan.bench.runs import Run
from titan.bench.turns import log
from titan.bench.workloads import Workload
from titan.draft.ngram import NgramDrafter
from titan.engine import Engine
from titan.models.loader import load_config, resolve_model

TITAN = "titan"
TITAN_DRAFT = "titan-draft"
TITAN_STATIC = "titan-static"
TITAN_SINGLE = "titan-single"
PEERS = ("vllm", "openvino", "llama.cpp")
PEERS_FOLDER = Path(".peers")
"""Where `make_env` puts environments, and where they are looked for."""


@dataclass(frozen=True, slots=True)
class Mode:
    """What is compared; all modes run greedily and ignore the end of sequence."""

    description: str
    _: KW_ONLY
    uses_draft: bool = False
    ends_together: bool = False  # a request ends with its batch, so its end does not say how long its tokens took


@dataclass(frozen=True, slots=True)
class TitanMode(Mode):
    """A way to run Titan's engine: ``run`` takes engine, workload, and the most requests at once."""

    run: Callable[[Engine, Workload, int], Run]


@dataclass(frozen=True, slots=True)
class PeerMode(Mode):
    """Another engine.

    ``adapter`` is a file in `titan.bench.peers`; ``peer`` names the environment ("" = this one); ``options`` are the adapter's own.
    """

    adapter: str
    peer: str = ""
    _: KW_ONLY
    needs_url: bool = False  # a server that runs already
    only_single: bool = False  # one request at a time, so measured with one only
    options: Mapping[str, Any] = field(default_factory=dict)


TITAN_MODES = {
    TITAN: TitanMode("continuous batching: Titan without a draft", partial(run_workload, use_speculative=False)),
    TITAN_DRAFT: TitanMode("the Titan design: continuous batching with the draft", run_workload, uses_draft=True),
    TITAN_STATIC: TitanMode(
        "static batching: Titan without a draft, in batches that run until their longest request ends",
        run_static,
        ends_together=True,
    ),
    TITAN_SINGLE: TitanMode(
        "no batching: Titan without a draft, one request at a time",
        lambda engine, workload, _: run_workload(engine, workload, 1, use_speculative=False),
    ),
}
PEER_MODES = {
    "transformers-static": PeerMode(
        "transformers' generate: static batches, dynamic cache", "transformers_peer", ends_together=True, options={"mode": "static"}
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
MODES: dict[str, Mode] = {**TITAN_MODES, **PEER_MODES}


@dataclass(frozen=True, slots=True)
class LoadedModes:
    """Modes of one dtype that can run: those of Titan share an engine, other engines are processes."""

    dtype: str
    engine: Engine | None
    names: list[str] = field(default_factory=list)
    processes: dict[str, PeerProcess] = field(default_factory=dict)

    def run(self, name: str, workload: Workload, concurrency: int) -> Run:
        """Run a workload in a mode, at most ``concurrency`` requests at once."""
        if name in self.processes:
            return self.processes[name].run(workload, concurrency)
        assert self.engine is not None
        return TITAN_MODES[name].run(self.engine, workload, concurrency)

    def recover(self, name: str) -> None:
        """After a mode failed, end its process, or make the engine idle for Titan's other modes."""
        if name in self.processes:
            self.processes[name].close()
        elif self.engine is not None:
            make_idle(self.engine)

    @property
    def versions(self) -> dict[str, str]:
        """Of the other engines."""
        return {name: number for process in self.processes.values() for name, number in process.versions.items()}


@contextmanager
def load_modes(
    names: Sequence[str],
    model: str,
    draft_model: str | None,
    options: Mapping[str, Any],
    peers: Mapping[str, str],
    problems: list[str],
) -> Iterator[LoadedModes]:
    """Load modes, and end the other engines' processes with the context.

    Args:
        names: keys of `MODES`.
        model: folder or hub id of the target.
        draft_model: those of the draft, or "ngram".
        options: of `LLM`, for other engines too: dtype, device, max_draft_tokens, max_batch_size and max_model_len.
        peers: environment folder or URL by peer, where it is not the default.
        problems: gets a line for what cannot run; it is left out.

    Raises:
        ValueError: the target cannot be loaded.
    """
    engine = None
    if any(name in TITAN_MODES for name in names):
        log(f"loading {TITAN} in {options['dtype']}")
        try:
            engine = _load_engine(model, draft_model if TITAN_DRAFT in names else None, options)
        except ValueError as error:
            drafted = [name for name in names if MODES[name].uses_draft]
            if not drafted:
                raise
            engine = _load_engine(model, None, options)
            problems.append(f"{', '.join(drafted)} left out: {error}")
            names = [name for name in names if name not in drafted]
    loaded = LoadedModes(options["dtype"], engine)
    with ExitStack() as stack:
        for name in names:
            if name in PEER_MODES:
                log(f"loading {name} in {options['dtype']}")
                mode = PEER_MODES[name]
                models = {"model": model, "draft_model": draft_model if mode.uses_draft else None}
                try:
                    python, url = locate_peer(mode, peers)
                    shared = {**models, **options, "threads": torch.get_num_threads(), "url": url}
                    process = PeerProcess(name, mode.adapter, python, {**shared, **mode.options})
                except (PeerError, ValueError) as error:
                    problems.append(f"{name} left out: {error}")
                    continue
                stack.callback(process.close)
                loaded.processes[name] = process
            loaded.names.append(name)
        yield loaded


def locate_peer(mode: PeerMode, peers: Mapping[str, str]) -> tuple[str, str]:
    """The interpreter that runs a mode's adapter, and its environment's folder or its server's URL; ``peers`` as of `load_modes`.

    Raises:
        ValueError: the environment does not exist, or a URL is missing.
    """
    where = peers.get(mode.peer, str(PEERS_FOLDER / mode.peer))
    if mode.needs_url and not where.startswith("http://"):
        raise ValueError(f"give the address of a running server: --peer {mode.peer}=http://HOST:PORT")
    if mode.needs_url or not mode.peer:
        return sys.executable, where
    python = Path(where, "bin", "python")
    if not python.exists():
        raise ValueError(f"not installed in {where}: make it with `python -m titan.bench.peers.make_env {mode.peer} {where}`")
    return str(python), where


def installed_modes(peers: Mapping[str, str]) -> list[str]:
    """The modes that need nothing that is missing here; ``peers`` as of `load_modes`."""
    found = list(TITAN_MODES)
    for name, mode in PEER_MODES.items():
        try:
            locate_peer(mode, peers)
        except ValueError:
            continue
        found.append(name)
    return found


def possible_modes(draft_model: str | None) -> list[str]:
    """The modes that a draft allows: other engines need a model, Titan takes any drafter.

    Raises:
        ValueError: the draft is neither a model nor the n-gram drafter.
    """
    if draft_model is None or draft_model == NgramDrafter.name:
        return [name for name, mode in MODES.items() if not mode.uses_draft or (draft_model and name == TITAN_DRAFT)]
    try:
        load_config(resolve_model(draft_model, "draft"))
    except ValueError as error:
        allowed = f"besides models, {NgramDrafter.name!r} is allowed"
        raise ValueError(f"draft_model={draft_model!r} cannot be used; {allowed}: {error}") from error
    return list(MODES)


def _load_engine(model: str, draft_model: str | None, options: Mapping[str, Any]) -> Engine:
    return LLM(model, draft_model, enable_prefix_caching=False, **options).engine  # all modes see the same prompts

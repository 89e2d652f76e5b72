"""The modes that are compared: Titan's ways to batch, and other engines on the same requests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from titan import LLM
from titan.bench.engine_run import make_idle, profile_workload, run_static, run_workload
from titan.bench.peers.client import PeerError, PeerProcess
from titan.bench.peers.make_env import PACKAGES
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
LLAMA_CPP = "llama.cpp"
PEERS = (*PACKAGES, LLAMA_CPP)
"""Engines that need an environment of their own, or the address of a server."""


@dataclass(frozen=True, slots=True)
class TitanMode:
    """A way to run Titan's engine: ``run`` takes engine, workload, and the most requests at once."""

    description: str
    run: Callable[[Engine, Workload, int], Run]
    uses_draft: bool = False
    ends_together: bool = False  # a request ends with its batch, so its end does not say how long its tokens took


@dataclass(frozen=True, slots=True)
class PeerMode:
    """A way to run another engine, by the adapter of that name in `titan.bench.peers`, with ``options`` that only that knows."""

    description: str
    engine: str
    options: Mapping[str, Any] = field(default_factory=dict)
    uses_draft: bool = False
    ends_together: bool = False  # as of `TitanMode`
    only_single: bool = False  # one request at a time, so measured with one only


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
        "transformers' generate in static batches", "transformers", {"mode": "static"}, ends_together=True
    ),
    "transformers-continuous": PeerMode(
        "transformers' generate_batch: continuous batching, paged cache, its default attention",
        "transformers",
        {"mode": "continuous"},
    ),
    "transformers-assisted": PeerMode(
        "transformers' assisted generation: one request at a time, constant number of draft tokens",
        "transformers",
        {"mode": "assisted"},
        uses_draft=True,
        only_single=True,
    ),
    "vllm": PeerMode("vLLM without a draft", "vllm"),
    "vllm-draft": PeerMode("vLLM with the draft model", "vllm", uses_draft=True),
    "openvino": PeerMode("OpenVINO GenAI's continuous batching without a draft", "openvino"),
    "openvino-draft": PeerMode("OpenVINO GenAI's continuous batching with the draft", "openvino", uses_draft=True),
    LLAMA_CPP: PeerMode("llama.cpp's server, as it was started", "llama_cpp"),
}
MODES: dict[str, TitanMode | PeerMode] = {**TITAN_MODES, **PEER_MODES}


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

    def profile(self, name: str, workload: Workload, concurrency: int) -> Run:
        """Run a workload in continuous batching, with or without the draft, and time the parts of its steps."""
        assert self.engine is not None
        return profile_workload(self.engine, workload, concurrency, use_speculative=TITAN_MODES[name].uses_draft)

    def recover(self, name: str) -> None:
        """After a mode failed, end its process, or make the engine idle for Titan's other modes."""
        if name in self.processes:
            self.processes[name].close()
        elif self.engine is not None:
            make_idle(self.engine)


@contextmanager
def load_modes(
    names: Sequence[str], options: Mapping[str, Any], peers: Mapping[str, str], problems: list[str]
) -> Iterator[LoadedModes]:
    """Load modes, and end the other engines' processes with the context.

    Args:
        names: keys of `MODES`.
        options: model, draft_model, dtype, device, max_draft_tokens, max_batch_size and max_model_len of `LLM`, for all modes; the
            models are folders or hub ids.
        peers: environment folder or URL by name in `PEERS`, where it is not the default.
        problems: gets a line for what cannot run; it is left out.

    Raises:
        ValueError: the target cannot be loaded.
    """
    plain = {**options, "draft_model": None}
    engine = None
    if any(name in TITAN_MODES for name in names):
        log(f"loading {TITAN} in {options['dtype']}")
        try:
            engine = _load_engine(options if TITAN_DRAFT in names else plain)
        except ValueError as error:
            engine = _load_engine(plain)
            drafted = [name for name in names if MODES[name].uses_draft]
            problems.append(f"{', '.join(drafted)} left out: {error}")
            names = [name for name in names if name not in drafted]
    loaded = LoadedModes(options["dtype"], engine)
    with ExitStack() as stack:
        for name in names:
            if name in PEER_MODES:
                log(f"loading {name} in {options['dtype']}")
                mode = PEER_MODES[name]
                wanted = {**(options if mode.uses_draft else plain), **mode.options, "url": peers.get(LLAMA_CPP)}
                try:
                    process = PeerProcess(name, f"{mode.engine}_peer", find_python(mode.engine, peers), wanted)
                except (PeerError, ValueError, OSError) as error:
                    problems.append(f"{name} left out: {error}")
                    continue
                stack.callback(process.close)
                loaded.processes[name] = process
            loaded.names.append(name)
        yield loaded


def find_python(engine: str, peers: Mapping[str, str]) -> str:
    """The interpreter that runs an engine's adapter: that of its environment, if it needs one.

    Args:
        engine: of a `PeerMode`.
        peers: as of `load_modes`.

    Raises:
        ValueError: there is no such environment.
    """
    if engine not in PACKAGES:
        return sys.executable
    folder = peers.get(engine, f".peers/{engine}")
    python = Path(folder, "bin", "python")
    if not python.exists():
        raise ValueError(f"not installed in {folder}: make it with `python -m titan.bench.peers.make_env {engine} {folder}`")
    return str(python)


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
        raise ValueError(f"--draft-model {draft_model} cannot be used; {allowed}: {error}") from error
    return list(MODES)


def _load_engine(options: Mapping[str, Any]) -> Engine:
    return LLM(**options, enable_prefix_caching=False).engine  # all modes see the same prompts

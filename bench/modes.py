"""The modes that are compared: Titan's ways to batch, and other engines on the same requests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from titan import LLM
from titan.bench.engine_run import make_idle, run_static, run_workload
from titan.bench.peers.client import PeerProcess
from titan.bench.runs import Run
from titan.bench.turns import error_line, log
from titan.bench.workloads import Workload
from titan.draft.ngram import NgramDrafter
from titan.engine import Engine
from titan.models.files import ModelFiles, resolve_model
from titan.models.loader import open_model

TITAN = "titan"
TITAN_DRAFT = "titan-draft"
TITAN_STATIC = "titan-static"
TITAN_SINGLE = "titan-single"
PEERS = ("vllm", "openvino")
"""Engines that need an environment of their own."""
RunMode = Callable[[Workload, int], Run]
"""Takes the most requests at once."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to run an engine: Titan's by ``run``, another by the adapter of its name in `titan.bench.peers`."""

    description: str
    run: Callable[[Engine, Workload, int], Run] | None = None  # takes the most requests at once
    engine: str = TITAN
    options: Mapping[str, Any] = field(default_factory=dict)  # that only the adapter knows
    uses_draft: bool = False
    ends_together: bool = False  # a request ends with its batch, so its end does not say how long its tokens took
    only_single: bool = False  # one request at a time, so measured with one only


MODES = {
    TITAN: Mode("continuous batching: Titan without a draft", partial(run_workload, use_speculative=False)),
    TITAN_DRAFT: Mode("the Titan design: continuous batching with the draft", run_workload, uses_draft=True),
    TITAN_STATIC: Mode(
        "static batching: Titan without a draft, in batches that run until their longest request ends",
        run_static,
        ends_together=True,
    ),
    TITAN_SINGLE: Mode(
        "no batching: Titan without a draft, one request at a time",
        lambda engine, workload, _: run_workload(engine, workload, 1, use_speculative=False),
    ),
    "transformers-static": Mode(
        "transformers' generate in static batches", engine="transformers", options={"mode": "static"}, ends_together=True
    ),
    "transformers-continuous": Mode(
        "transformers' generate_batch: continuous batching, paged cache, its default attention",
        engine="transformers",
        options={"mode": "continuous"},
    ),
    "transformers-assisted": Mode(
        "transformers' assisted generation: one request at a time, constant number of draft tokens",
        engine="transformers",
        options={"mode": "assisted"},
        uses_draft=True,
        only_single=True,
    ),
    "vllm": Mode("vLLM without a draft", engine="vllm"),
    "vllm-draft": Mode("vLLM with the draft model", engine="vllm", uses_draft=True),
    "openvino": Mode("OpenVINO GenAI's continuous batching without a draft", engine="openvino"),
    "openvino-draft": Mode("OpenVINO GenAI's continuous batching with the draft", engine="openvino", uses_draft=True),
}


@dataclass(frozen=True, slots=True)
class LoadedModes:
    """Modes of one dtype that can run, by name: those of Titan share an engine, other engines are processes."""

    dtype: str
    engine: Engine | None
    runs: dict[str, RunMode] = field(default_factory=dict)
    processes: dict[str, PeerProcess] = field(default_factory=dict)

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
        options: model, draft_model, dtype, device, max_draft_tokens, max_batch_size, max_num_batched_tokens and max_model_len of
            `LLM`, for all modes; the models are folders or hub ids. Others are Titan's alone.
        peers: environment folder by name in `PEERS`, where it is not the default.
        problems: gets a line for what cannot run; it is left out.

    Raises:
        ValueError: the target cannot be loaded.
    """
    plain = {**options, "draft_model": None}
    engine = None
    if any(MODES[name].run is not None for name in names):
        engine = LLM(**plain, speculation="fixed", enable_prefix_caching=False).engine  # all modes see the same prompts
    loaded = LoadedModes(options["dtype"], engine)
    with ExitStack() as stack:
        for name in names:
            log(f"loading {name} in {options['dtype']}")
            mode = MODES[name]
            try:
                if mode.run is not None and engine is not None:
                    if mode.uses_draft:
                        engine.swap_draft(options["draft_model"])
                    loaded.runs[name] = partial(mode.run, engine)
                else:
                    wanted = {**(options if mode.uses_draft else plain), **mode.options}
                    process = PeerProcess(f"{mode.engine}_peer", find_python(mode.engine, peers), wanted)
                    loaded.processes[name] = stack.enter_context(closing(process))
                    loaded.runs[name] = process.run
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one mode, the others are measured
                problems.append(f"{name} left out: {error_line(error)}")
        yield loaded


def find_python(engine: str, peers: Mapping[str, str]) -> str:
    """The interpreter that runs an engine's adapter: that of its environment, if it needs one; ``peers`` as of `load_modes`.

    Raises:
        ValueError: there is no such environment.
    """
    if engine not in PEERS:
        return sys.executable
    python = Path(peers.get(engine, f".peers/{engine}"), "bin", "python")
    if not python.exists():
        raise ValueError(f"there is no {python}: bench/results/README.md says how to install {engine}")
    return str(python)


def possible_modes(draft_model: str | None, model_impl: str = "auto", *, trust_remote_code: bool = False) -> list[str]:
    """The modes that a draft allows: other engines need a model, Titan takes any drafter.

    Raises:
        ValueError: the draft cannot be loaded.
    """
    if draft_model is None or draft_model == NgramDrafter.name:
        return [name for name, mode in MODES.items() if not mode.uses_draft or (draft_model and name == TITAN_DRAFT)]
    open_model(ModelFiles(resolve_model(draft_model, "draft")), model_impl, trust_remote_code=trust_remote_code)
    return list(MODES)


def modes_at(modes: Iterable[str], at_once: int) -> list[str]:
    """The modes that make sense with this many requests at once.

    One request at a time is the same with static, continuous and no batching; some engines know nothing else.
    """
    if at_once > 1:
        return [mode for mode in modes if not MODES[mode].only_single]
    return [mode for mode in modes if mode not in (TITAN_STATIC, TITAN_SINGLE) or TITAN not in modes]

"""Where figures come from: command, commit, machine, versions, models, seed."""

from __future__ import annotations

import datetime
import hashlib
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
import torch

import titan
from titan.kernels.cpu.kinds import processor_fact
from titan.kernels.cpu.threads import available_cores
from titan.models.files import resolve_model


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where figures come from."""

    command: str
    commit: str  # "with changes" if the checkout has any
    date: str  # UTC
    machine: str
    num_threads: int
    load_average: list[float]  # over 1, 5 and 15 minutes, before the run
    versions: dict[str, str]
    models: dict[str, str]  # by role, with a fingerprint
    seed: int


def collect_provenance(command: str, *, models: Mapping[str, str | None] | None = None, seed: int = 0) -> Provenance:
    """Describe this process, here and now.

    Args:
        command: line, as it was given.
        models: folder, hub id, "demo" or another draft by role, such as "target"; ``None`` is left out.
        seed: of prompts and sampling.
    """
    return Provenance(
        command=command,
        commit=describe_checkout(Path(__file__).resolve().parent),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=machine_name(),
        num_threads=torch.get_num_threads(),
        load_average=list(psutil.getloadavg()),
        versions={
            "titan": titan.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
        },
        models={role: describe_model(model, role) for role, model in (models or {}).items() if model is not None},
        seed=seed,
    )


def provenance_lines(provenance: Provenance) -> list[str]:
    """Describe a run, a fact per line."""
    versions = ", ".join(f"{name} {number}" for name, number in provenance.versions.items())
    return [
        f"command: `{provenance.command}`",
        f"commit: {provenance.commit}",
        f"date: {provenance.date}",
        f"machine: {provenance.machine}; threads: {provenance.num_threads}",
        f"versions: {versions}",
        *(f"{role}: {model}" for role, model in provenance.models.items()),
        f"seed: {provenance.seed}",
        f"load average before the run: {', '.join(f'{value:.2f}' for value in provenance.load_average)}",
    ]


def machine_name() -> str:
    """Name the processor, its cores, the memory, and the GPU if there is one."""
    parts = [_cpu_name(), f"{available_cores()} cores", f"{psutil.virtual_memory().total / 2**30:.0f} GiB"]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    return ", ".join(parts)


def describe_model(model: str, role: str = "target") -> str:
    """Name a model with a fingerprint of its config and weights; what is no folder of a model is only named.

    Args:
        model: "demo", a folder, a hub id, or a name such as "ngram".
        role: of the demo pair it is the target for "target", else the draft.
    """
    if not (model == "demo" or Path(model).is_dir()):
        return model
    folder = Path(resolve_model(model, "target" if role == "target" else "draft"))
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")]):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return f"{model} (fingerprint {digest.hexdigest()[:12]})"


def describe_checkout(folder: Path) -> str:
    """Name a checkout's commit, "with changes" if anything but results differs from it, new Python files included.

    Args:
        folder: in the checkout; the commit is "unknown" outside one, and of files that the repository around them does not hold.
    """
    command = ["git", "-C", str(folder), "status", "--porcelain=v2", "--branch", "--untracked-files=all", "--", ":/"]
    try:
        status = subprocess.run([*command, ":(top,exclude)bench/results"], capture_output=True, text=True, check=True).stdout
        if not subprocess.run(["git", "-C", str(folder), "ls-files"], capture_output=True, check=True).stdout:
            return "unknown"  # it is installed inside of another project
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    [commit] = re.findall(r"^# branch\.oid (.+)$", status, re.MULTILINE)
    return f"{commit} with changes" if re.search(r"^[^#?]|\.py$", status, re.MULTILINE) else str(commit)


def _cpu_name() -> str:
    return processor_fact("model name") or platform.processor() or platform.machine()

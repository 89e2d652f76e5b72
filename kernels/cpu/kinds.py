"""Kinds of processors that the C++ of this folder is compiled for, and the choice of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

CPU_KERNELS = "TITAN_CPU_KERNELS"
"""Environment variable that selects the kernels: a kind, "auto" for the best one, or "torch" for PyTorch's operations."""

X86_64_V4 = ("-march=x86-64-v4", "-mtune=native", "-mprefer-vector-width=512")  # or GCC takes halves of them for Intel's
X86_64_V3 = ("-march=x86-64-v3", "-mtune=native")
V3_FEATURES = {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
V4_FEATURES = V3_FEATURES | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
"""What these levels of x86-64 take for granted, by Linux's names."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Processors with the same instructions for products."""

    name: str
    description: str
    flags: tuple[str, ...]  # of the compiler
    is_here: Callable[[], bool]  # whether this processor has the instructions, and the system permits their use


KINDS = (
    Kind(
        "amx",
        "matrix units (AMX)",
        (*X86_64_V4, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"),
        lambda: _has(V4_FEATURES | {"amx_tile", "amx_bf16", "avx512_bf16", "avx512_vnni"}) and torch.cpu._init_amx(),
    ),
    Kind(
        "avx512bf16",
        "AVX-512 with products of bfloat16",
        (*X86_64_V4, "-mavx512bf16", "-mavx512vnni"),
        lambda: _has(V4_FEATURES | {"avx512_bf16", "avx512_vnni"}),
    ),
    Kind("avx512", "AVX-512", X86_64_V4, lambda: _has(V4_FEATURES)),
    Kind("avx2", "AVX2 and FMA", X86_64_V3, lambda: _has(V3_FEATURES)),
    Kind("native", "what the compiler finds", ("-march=native",), lambda: True),
)
"""From the fastest on, but for Intel's processors."""


def kinds_here() -> list[Kind]:
    """Return the kinds that can run on this processor, from the fastest on.

    A product of 16 pairs of bfloat16 took the Intel Xeon that was measured two cycles, in which it does four of 16 float32 numbers.
    """
    here = [kind for kind in KINDS if kind.is_here()]
    names = [kind.name for kind in here]
    if "avx512bf16" in names and processor_fact("vendor_id") == "GenuineIntel":
        here.insert(names.index("avx512"), here.pop(names.index("avx512bf16")))
    return here


def _has(features: set[str]) -> bool:
    """Whether the first processor has these, and the system lets programs use them."""
    return features <= _features()


@cache
def _features() -> frozenset[str]:
    """Return what Linux says that the first processor has; it takes long to say it where there are many."""
    return frozenset((processor_fact("flags") or "").split())


def processor_fact(name: str) -> str | None:
    """Return a fact about the first processor, such as "vendor_id" or "model name", where Linux tells it."""
    return next((line.partition(":")[2].strip() for line in cpu_info() if line.startswith(name)), None)


def cpu_info() -> list[str]:
    """Return what Linux says of the processors, line by line; nothing elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def choose_kind() -> Kind | None:
    """Return the kind that the user asks for, by default the fastest; ``None``: PyTorch's operations.

    Raises:
        ValueError: the environment variable `CPU_KERNELS` has an unknown value, or names a kind that this processor is not.
    """
    choice, here = os.environ.get(CPU_KERNELS) or "auto", kinds_here()
    if choice in ("auto", "torch"):
        return here[0] if choice == "auto" else None
    if (kind := next((each for each in here if each.name == choice), None)) is not None:
        return kind
    reason = "this processor lacks it" if choice in [kind.name for kind in KINDS] else "it is unknown"
    allowed = ", ".join(map(repr, ("auto", "torch", *(each.name for each in here))))
    raise ValueError(f"{CPU_KERNELS}={choice} is not allowed: {reason}; allowed are {allowed}")

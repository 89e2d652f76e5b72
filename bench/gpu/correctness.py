"""Every Triton kernel at the sizes of a real model against float64, on the device itself."""

from __future__ import annotations

from collections.abc import Sequence

from titan.bench.gpu import attention_checks, layer_checks, sampling_checks, tree_checks
from titan.bench.gpu.checks import COLUMNS
from titan.bench.gpu.sections import Section, Setting, Task


def make_tasks(setting: Setting) -> Sequence[Task]:
    """All checks: attention, the other kernels of a layer, then those of sampling and acceptance."""
    modules = attention_checks, layer_checks, sampling_checks, tree_checks
    return [task for module in modules for task in module.make_tasks(setting)]


SECTION = Section(
    "correctness",
    "Correctness",
    "Correctness: the error against float64 and what is allowed; a row whose error is larger is wrong. Of attention it is the norm "
    "of the difference over the norm; of other kernels the largest difference, relative to the number where that is above 1; of "
    "what must be equal, the number of those that are not.",
    seconds=120,
    columns=COLUMNS,
    make_tasks=make_tasks,
)

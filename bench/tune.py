"""Finds the fastest tiles of tree attention on this CUDA device, for the checked-in table `titan.kernels.triton.tuning.TABLE`.

    python -m titan.bench.tune                                 heads of 64 and 128
    python -m titan.bench.tune --head-dims 128 --block-m 32
    TRITON_INTERPRET=1 python -m titan.bench.tune --tiny       a rehearsal

An entry of the table holds, for a compute capability, a padded head_dim and the bytes per element, one configuration for each
number of query rows of a tile (block_m). Every candidate runs the batches that get its tiles: decodes for 16 rows; draft trees of
6, 15 and 63 nodes for 32, 64 and 128; prefill chunks for 128 as well. Its figure is the geometric mean of its times over those of
the present configuration, which were taken before; a candidate that seems faster by more than noise is timed again, by turns with
the present one, and its figure is the median of these ratios. It must agree with the present one's output. What is best is printed
as lines of the table, also after Ctrl-C; the JSON file is written after each candidate.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from importlib.metadata import version
from itertools import product
from operator import ne
from statistics import geometric_mean, median
from unittest.mock import patch

import torch
from torch import Tensor

from titan.bench.gpu.attention import check_agreement, seconds_per_layer, titan
from titan.bench.gpu.attention_batches import Case, Shape, make_case, uniform_shape
from titan.bench.gpu.sections import Figures, Row, Setting, Task, run_tasks
from titan.bench.gpu_check import choose_check_device
from titan.bench.options import bench_parser, parse
from titan.bench.report import Report, Table, count, figure_table, measure_and_publish
from titan.bench.turns import log
from titan.kernels.triton import tuning
from titan.kernels.triton.attention_plan import AttentionGeometry
from titan.kernels.triton.tuning import TileConfig

NUM_NODES = {16: 0, 32: 6, 64: 15, 128: 63}
"""Nodes of the draft trees whose queries get tiles of so many rows, with four query heads per KV head."""
UNIFORM = ((1, 8192), (1, 32768), (8, 8192), (32, 2048), (128, 1024))
"""Requests and contexts of the batches."""
MIN_GAIN = 0.02
"""Share of time by which a candidate must be faster to replace the present configuration."""
NUM_TURNS = 3
"""Number of times that a candidate which seems faster, and the present configuration, are timed by turns."""
TILES = list(product((32, 64, 128), (4, 8), (3, 5, 7)))
"""What is tried as block_n, numbers of warps and of stages."""
PROGRAMS = (1, 2, 3, 4)
"""Programs per multiprocessor that are tried."""
NUM_TINY = 2
"""Tiles and numbers of programs in a rehearsal."""
NUM_REFINED = 3
"""Number of the best candidates that are tried with other numbers of programs."""
LABELS = ("head_dim", "block_m", "block_n", "warps", "stages", "programs")
RELATIVE = "x present"

Key = tuple[int, int, int]
"""Key of `titan.kernels.triton.tuning.TABLE`: capability, padded head_dim, bytes per element."""


def tune(key: Key, block_m: int, setting: Setting, tried: list[Row]) -> Iterator[TileConfig]:
    """Yield after each candidate the fastest configuration so far for tiles of so many rows; the present one if none beats it.

    All other tiles are tried with the present number of programs, those most like the present ones first, then the best of all with
    other numbers; ``tried`` gets each.
    """
    configs = tuning.TABLE.get(key, tuning.SAFE_CONFIGS)
    present = next((config for config in configs if config.block_m >= block_m), configs[-1])
    cases = [make_case(shape, setting) for shape in tuning_shapes(key[1], block_m, setting.is_tiny)]
    baseline = [run(key, present, case) for case in cases]
    num_tried = NUM_TINY if setting.is_tiny else None
    relatives = {present: 1.0}

    def attempt(config: TileConfig) -> TileConfig:
        labels = dict(zip(LABELS, (key[1], *astuple(config)), strict=True))
        [row] = run_tasks([Task(labels, partial(compare, key, config, present, cases, baseline), 0)], math.inf)
        log(f"heads of {key[1]}: {config}: {row.problem or format(row.figures[RELATIVE], '.3f')}")
        tried.append(row)
        if row.status == "ok":
            relatives[config] = row.figures[RELATIVE]
        best = min(relatives, key=relatives.__getitem__)
        return best if relatives[best] <= 1 - MIN_GAIN else present

    others = {TileConfig(block_m, *tile, present.programs_per_multiprocessor) for tile in TILES} - {present}
    for config in sorted(others, key=lambda each: (num_differences(each, present), astuple(each)))[:num_tried]:
        yield attempt(config)
    for good in sorted(relatives, key=relatives.__getitem__)[:NUM_REFINED]:
        for programs in PROGRAMS[:num_tried]:
            if programs != present.programs_per_multiprocessor:
                yield attempt(replace(good, block_m=block_m, programs_per_multiprocessor=programs))


def num_differences(config: TileConfig, other: TileConfig) -> int:
    """How many fields of two configurations differ."""
    return sum(map(ne, astuple(config), astuple(other)))


def compare(
    key: Key, config: TileConfig, present: TileConfig, cases: Sequence[Case], baseline: Sequence[tuple[Tensor, float]]
) -> Figures:
    """Time a configuration over the present one, whose outputs and seconds are the baseline; by turns with it if it seems faster.

    Raises:
        WrongNumbersError: the outputs are others.
    """
    figures, ratios = {}, []
    for case, (expected, present_seconds) in zip(cases, baseline, strict=True):
        output, seconds = run(key, config, case)
        check_agreement(output, expected)
        ratios.append(seconds / present_seconds)
        figures[f"{len(case.shape.contexts)} x {case.shape.name}, us"] = seconds * 1e6
    relative = geometric_mean(ratios)
    if relative <= 1 - MIN_GAIN:  # of many candidates timed once, one seems so by chance
        turns = ([run(key, config, case)[1] / run(key, present, case)[1] for case in cases] for _ in range(NUM_TURNS))
        relative = median(map(geometric_mean, turns))
    return {RELATIVE: relative, **figures}


def run(key: Key, config: TileConfig, case: Case) -> tuple[Tensor, float]:
    """Let every number of rows take a configuration: output of the first layer, and seconds per layer."""
    with patch.object(tuning, "TABLE", {**tuning.TABLE, key: (config,)}):
        attend = titan(case)
        return attend(0), seconds_per_layer(case, attend)


def tuning_shapes(head_dim: int, block_m: int, is_tiny: bool) -> list[Shape]:
    """Batches whose tiles have that many rows, of a model with four query heads per KV head."""
    geometry = AttentionGeometry(32, 8, head_dim, 16, torch.bfloat16)
    parents = tuple((node - 1) // 2 if node else -1 for node in range(NUM_NODES[block_m]))
    if is_tiny:
        return [uniform_shape(replace(geometry, num_heads=4, num_kv_heads=1), 1, 20, parents)]
    shapes = [uniform_shape(geometry, *each, parents) for each in UNIFORM]
    if block_m == max(NUM_NODES):
        shapes.append(Shape("chunk of 512 behind 2048", geometry, (2048,) * 4, (), num_tokens=512))
    return shapes


def table_key(head_dim: int, device: torch.device) -> Key:
    """Where the table has the configurations of bfloat16 and float16."""
    return tuning.capability_of(device), head_dim, torch.bfloat16.itemsize


def entry_table(found: Mapping[tuple[Key, int], TileConfig]) -> Table:
    """What is best, as lines for the table; ``found`` is by its key and the number of rows of tiles."""
    rows = [[str(key), f"TileConfig({', '.join(map(str, astuple(config)))}),"] for (key, _), config in sorted(found.items())]
    return Table("Lines of the table in kernels/triton/tuning.py", ["key", "line"], rows, num_text_columns=2)


def make_report(tried: Sequence[Row], found: Mapping[tuple[Key, int], TileConfig], note: str) -> Report:
    """What is best, the fastest for each head_dim and number of rows, and what became of the others."""
    ran = sorted((row for row in tried if row.status == "ok"), key=lambda row: row.figures[RELATIVE], reverse=True)
    fastest = {(row.labels["head_dim"], row.labels["block_m"]): row for row in ran}  # the last of each kind
    gain = f"; the fastest takes {ran[-1].figures[RELATIVE]:.3f} x the time of the present one" if ran else ""
    times = dict.fromkeys((name for row in ran for name in row.figures if name != RELATIVE), ".1f")
    problems = Counter(row.problem for row in tried if row.status != "ok")
    return Report(
        "Tiles of tree attention",
        f"{len(ran)} of {count(len(tried), 'candidate')} could run{gain}.",
        {"candidates": tried},
        [
            entry_table(found),
            figure_table("The fastest candidates", [fastest[kind] for kind in sorted(fastest)], LABELS, {RELATIVE: ".3f", **times}),
        ],
        notes=[note, f"{RELATIVE}: time over that of the configuration in the table; us: of one layer, requests x context."],
        warnings=[f"{count(number, 'candidate')} left out: {problem}" for problem, number in problems.items()],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the status is 1 if a candidate gave wrong numbers, or none could run.

    Raises:
        ValueError: there is no device to tune for.
    """
    args = parse(make_parser(), argv)
    device = choose_check_device(args.tiny)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the interpreter"
    timed_on = f"{name}, Triton {version('triton')}"
    setting = Setting(device, args.tiny, args.seed, args.threads)
    tried: list[Row] = []
    found: dict[tuple[Key, int], TileConfig] = {}

    def measure() -> Iterator[None]:
        for head_dim in args.head_dims:
            key = table_key(head_dim, device)
            for block_m in args.block_m:
                for best in tune(key, block_m, setting, tried):
                    found[key, block_m] = best
                    yield

    measure_and_publish(args, measure, lambda: make_report(tried, found, f"Timed on {timed_on}."))
    statuses = {row.status for row in tried}
    return int("wrong" in statuses or "ok" not in statuses)


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = bench_parser("tune", __doc__)
    parser.add_argument("--head-dims", nargs="+", type=int, choices=(64, 128, 256), default=[64, 128], help="default: 64 and 128")
    parser.add_argument("--block-m", nargs="+", type=int, choices=NUM_NODES, default=list(NUM_NODES), help="rows (default: all)")
    parser.add_argument("--tiny", action="store_true", help="one tiny batch; times mean nothing then")
    return parser


if __name__ == "__main__":
    sys.exit(main())

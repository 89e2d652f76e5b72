"""Finds the fastest tiles of tree attention on this CUDA device and writes them to the checked-in table.

    python -m titan.bench.tune                                 heads of 64 and 128, into kernels/triton/tuning.py
    python -m titan.bench.tune --head-dims 128 --block-m 32
    TRITON_INTERPRET=1 python -m titan.bench.tune --tiny --output FILE    a rehearsal; FILE is a copy of kernels/triton/tuning.py

An entry of the table holds, for a compute capability, a padded head_dim and the bytes per element, one configuration for each
number of query rows of a tile (block_m), and names the device that it was timed on. Every candidate runs the batches that get its
tiles: decodes for 16 rows; draft trees of 6, 15 and 63 nodes for 32, 64 and 128; prefill chunks for 128 as well. Its figure is the
geometric mean of its times over those of the present configuration. It must agree with the present one's output, and be faster by
more than noise. The file is written after each number of rows, so that an interrupted run keeps what it found.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from importlib.metadata import version
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from titan.bench.gpu.attention import MAX_DISAGREEMENT, AttentionBench, titan_attention
from titan.bench.gpu.attention_batches import Case, Shape, relative_error
from titan.bench.gpu.sections import Setting, describe
from titan.bench.gpu_check import choose_check_device
from titan.bench.provenance import collect_provenance
from titan.bench.report import Report, Table, add_report_options, count, format_figure, publish, use_threads
from titan.kernels.triton import tuning
from titan.kernels.triton.attention_plan import AttentionGeometry
from titan.kernels.triton.tuning import TileConfig

BLOCK_MS = (16, 32, 64, 128)
HEAD_DIMS = (64, 128)
MIN_GAIN = 0.02
"""So much less time must a candidate take to replace the present configuration."""
NUM_SHOWN = 5
NUM_REFINED = 3
"""Of the best candidates, how many are tried with other numbers of programs."""

Key = tuple[int, int, int]
"""Of `titan.kernels.triton.tuning.TABLE`: capability, padded head_dim, bytes per element."""


@dataclass(frozen=True, slots=True)
class Space:
    """What is tried."""

    block_ns: Sequence[int] = (32, 64, 128)
    num_warps: Sequence[int] = (4, 8)
    num_stages: Sequence[int] = (3, 5, 7)
    programs: Sequence[int] = (1, 2, 3, 4)  # per multiprocessor

    def candidates(self, present: TileConfig, block_m: int) -> list[TileConfig]:
        """All tiles of that many rows, with the present number of programs."""
        return [
            TileConfig(block_m, *each, present.programs_per_multiprocessor)
            for each in product(self.block_ns, self.num_warps, self.num_stages)
        ]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration and what became of it."""

    head_dim: int
    config: TileConfig
    relative: float | None  # geometric mean of its times over the present configuration's
    microseconds: dict[str, float] = field(default_factory=dict)  # of one layer, by batch
    problem: str | None = None


class Tuner:
    """Times candidates on one device.

    Args:
        setting: where, and whether at tiny shapes.
        space: what is tried.
    """

    def __init__(self, setting: Setting, space: Space) -> None:
        self.setting = setting
        self.space = space
        self.candidates: list[Candidate] = []
        self._bench = AttentionBench(setting)

    def key(self, head_dim: int) -> Key:
        """Where the table has the configurations of bfloat16 and float16."""
        capability = tuning.SM90
        if self.setting.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(self.setting.device)
            capability = 10 * major + minor
        return capability, head_dim, torch.bfloat16.itemsize

    def tune(self, head_dim: int, block_m: int) -> TileConfig:
        """The best configuration for a head_dim and a number of rows; the present one if nothing beats it."""
        key = self.key(head_dim)
        present = present_config(key, block_m)
        cases = {shape.name: self._bench.make_case(shape) for shape in tuning_shapes(head_dim, block_m, self.setting.is_tiny)}
        baseline = {name: self._run(key, present, case) for name, case in cases.items()}
        tried = [self._try(key, config, cases, baseline) for config in self.space.candidates(present, block_m)]
        for good in _ranked(tried)[:NUM_REFINED]:
            others = [count for count in self.space.programs if count != present.programs_per_multiprocessor]
            configs = [replace(good.config, programs_per_multiprocessor=count) for count in others]
            tried += [self._try(key, config, cases, baseline) for config in configs]
        self.candidates += tried
        faster = [each.config for each in _ranked(tried) if each.relative is not None and each.relative <= 1 - MIN_GAIN]
        return faster[0] if faster else present

    def _try(
        self,
        key: Key,
        config: TileConfig,
        cases: dict[str, Case],
        baseline: dict[str, tuple[Tensor, float]],
    ) -> Candidate:
        seconds = {}
        for name, case in cases.items():
            expected, _ = baseline[name]
            try:
                output, seconds[name] = self._run(key, config, case)
            except Exception as error:  # noqa: BLE001 (one that does not fit on the device is no candidate)
                return Candidate(key[1], config, None, problem=describe(error))
            disagreement = relative_error(output, expected)
            if not disagreement <= MAX_DISAGREEMENT:
                return Candidate(key[1], config, None, problem=f"disagrees with the present one by {disagreement:.1e}")
        relative = exp(mean(log(seconds[name] / baseline[name][1]) for name in cases))
        candidate = Candidate(key[1], config, relative, {name: value * 1e6 for name, value in seconds.items()})
        print(f"heads of {key[1]}: {config}: {relative:.3f}", file=sys.stderr, flush=True)
        return candidate

    def _run(self, key: Key, config: TileConfig, case: Case) -> tuple[Tensor, float]:
        """Output of the first layer, and seconds per layer."""
        with only(key, config):
            attend = titan_attention(case)
            return attend(0), self._bench.time_layer(case, attend)


def _ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that ran, the fastest first."""
    return sorted((each for each in candidates if each.relative is not None), key=lambda each: each.relative or 0.0)


def present_config(key: Key, block_m: int) -> TileConfig:
    """What the table now gives to tiles of that many rows."""
    configs = tuning.TABLE.get(key, tuning.SAFE_CONFIGS)
    return next((config for config in configs if config.block_m >= block_m), configs[-1])


@contextmanager
def only(key: Key, config: TileConfig) -> Iterator[None]:
    """Let plans that are made within the context take this configuration for every number of rows."""
    table: dict[Key, Any] = dict(tuning.TABLE)
    table[key] = (config,)
    original, tuning.TABLE = tuning.TABLE, table
    try:
        yield
    finally:
        tuning.TABLE = original


def tuning_shapes(head_dim: int, block_m: int, is_tiny: bool) -> list[Shape]:
    """Batches whose tiles have that many rows, of a model with four query heads per KV head."""
    geometry = AttentionGeometry(32, 8, head_dim, 16, torch.bfloat16)
    num_nodes = {16: 0, 32: 6, 64: 15, 128: 63}[block_m]
    parents = tuple((node - 1) // 2 if node else -1 for node in range(num_nodes))
    if is_tiny:
        geometry = replace(geometry, num_heads=4, num_kv_heads=1)
        return [Shape("1 x 20", geometry, (20,), parents)]
    sizes = [(1, 8192), (1, 32768), (8, 8192), (32, 2048), (128, 1024)]
    shapes = [Shape(f"{batch} x {context}", geometry, (context,) * batch, parents) for batch, context in sizes]
    if block_m == max(BLOCK_MS):
        shapes.append(Shape("4 chunks of 512 behind 2048", geometry, (2048,) * 4, (), num_tokens=512))
    return shapes


def with_entry(source: str, key: Key, configs: Sequence[TileConfig], note: str) -> str:
    """The text of kernels/triton/tuning.py with another entry in its table.

    Args:
        source: the text.
        key: of the entry; one that is there is replaced.
        configs: of the entry.
        note: what it was timed on.

    Raises:
        ValueError: the text has no table.
    """
    table = re.search(r"^TABLE[^=\n]* = \{\n(?P<entries>.*?)^\}\n", source, re.MULTILINE | re.DOTALL)
    if table is None:
        raise ValueError("the text has no table: it must be that of kernels/triton/tuning.py")
    capability = "SM90" if key[0] == tuning.SM90 else str(key[0])
    head = f"    ({capability}, {key[1]}, {key[2]}): ("
    lines = [f"        TileConfig({', '.join(map(str, astuple(config)))}),\n" for config in configs]
    entry = f"{head}  # {note}\n{''.join(lines)}    ),\n"
    found = re.search(rf"^{re.escape(head)}.*?^    \),\n", table["entries"], re.MULTILINE | re.DOTALL)
    entries = table["entries"]
    entries = entries + entry if found is None else entries[: found.start()] + entry + entries[found.end() :]
    return source[: table.start("entries")] + entries + source[table.end("entries") :]


def candidate_table(candidates: Sequence[Candidate]) -> Table:
    """The fastest of each kind, and how many could not run."""
    cells = []
    for kind in dict.fromkeys((each.head_dim, each.config.block_m) for each in candidates):
        mine = [each for each in candidates if (each.head_dim, each.config.block_m) == kind]
        num_failed = sum(each.problem is not None for each in mine)
        cells += [
            [
                *map(str, (each.head_dim, *astuple(each.config))),
                format_figure(each.relative, 3),
                "; ".join(f"{name}: {value:.1f}" for name, value in each.microseconds.items()),
            ]
            for each in _ranked(mine)[:NUM_SHOWN]
        ]
        cells.append([*map(str, kind), "", "", "", "", "", f"{len(mine)} tried, {num_failed} of them could not run"])
    header = ["head_dim", "block_m", "block_n", "warps", "stages", "programs", "x present", "us per layer"]
    return Table("Candidates", header, cells, num_text_columns=0)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        ValueError: there is no device to tune for, ``--tiny`` has no ``--output``, or the output is no copy of the table.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    if args.tiny and args.output is None:
        raise ValueError("--tiny needs --output, a copy of kernels/triton/tuning.py: what it times must not get into the table")
    output: Path = args.output or Path(tuning.__file__)
    with_entry(output.read_text(encoding="utf-8"), (0, 0, 0), [], "")  # refuses another file before the work
    device = choose_check_device(args.tiny)
    use_threads(args)
    provenance = collect_provenance("tune", argv, seed=args.seed)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the interpreter"
    note = f"{name}, Triton {version('triton')}"
    space = Space(block_ns=(16, 32), num_warps=(4,), num_stages=(3,), programs=(1, 2)) if args.tiny else Space()
    tuner = Tuner(Setting(device, args.tiny, args.seed, args.threads), space)
    is_complete = True
    try:
        for head_dim in args.head_dims:
            key = tuner.key(head_dim)
            configs = {config.block_m: config for config in tuning.TABLE.get(key, tuning.SAFE_CONFIGS)}
            for block_m in args.block_m:
                best = tuner.tune(head_dim, block_m)
                configs[best.block_m] = best
                in_order = [configs[rows] for rows in sorted(configs)]
                source = output.read_text(encoding="utf-8")
                output.write_text(with_entry(source, key, in_order, note), encoding="utf-8")
    except KeyboardInterrupt:
        is_complete = False
    ran = _ranked(tuner.candidates)
    gain = f"; the fastest takes {ran[0].relative:.3f} x the time of the present one" if ran else ""
    report = Report(
        "Tiles of tree attention",
        f"{len(ran)} of {count(len(tuner.candidates), 'candidate')} could run{gain}.",
        provenance,
        vars(args),
        {"candidates": tuner.candidates},
        [candidate_table(tuner.candidates)],
        notes=[f"Timed on {note}; written to {output}.", "x present: time over that of the configuration that was in the table."],
        is_complete=is_complete,
    )
    publish(report, args)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="titan bench tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-dims", nargs="+", type=int, choices=(64, 128, 256), default=list(HEAD_DIMS))
    parser.add_argument("--block-m", nargs="+", type=int, choices=BLOCK_MS, default=list(BLOCK_MS), help="rows (default: all)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: kernels/triton/tuning.py itself")
    parser.add_argument("--tiny", action="store_true", help="one tiny batch; times mean nothing then")
    add_report_options(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

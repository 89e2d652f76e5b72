"""Shapes of draft trees on the same prompts: tokens per step, speed, and what the host does for them.

    titan bench trees --quick                                          a first look
    titan bench trees                                                  the demo pair
    titan bench trees --model DIR/target --draft-model DIR/draft

The shapes take turns, with no draft among them, in rounds of new prompts that are the same for all. The end of sequence is
ignored, and request i has the same random numbers in all. Nothing else should run on the machine. Ctrl-C ends the measurement and
reports what there is.
"""

from __future__ import annotations

from collections.abc import Sequence

from titan.bench.draft_bench import QUICK, DraftBench, Setting, draft_parser, take_workloads
from titan.bench.draft_recipes import DraftRecipe
from titan.bench.options import parse, positive
from titan.bench.report import measure_and_publish
from titan.draft.draft_model import DraftModelDrafter
from titan.models.loader import DEMO


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        ValueError: an option is not allowed, or the models cannot be used.
    """
    parser = draft_parser("trees", __doc__)
    parser.set_defaults(concurrency=8, waves=2, temperature=[0.0, 0.7, 1.0])
    parser.add_argument("--draft-model", default=DEMO, help="folder or hub id of the draft (default: %(default)s)")
    parser.add_argument("--nodes", nargs="+", type=positive, default=[6, 16, 32], help="of dynamic and auto trees, at most")
    args = parse(parser, argv, QUICK)
    workloads = take_workloads(args, "auto")
    settings = [Setting({"temperature": t}, workloads, tree_recipes(args.draft_model, t, args.nodes)) for t in args.temperature]
    bench = DraftBench(args, "Draft trees", "tree", settings)
    if not any(isinstance(drafter, DraftModelDrafter) for drafter in bench.drafters.values()):
        raise ValueError(f"--draft-model {args.draft_model} is not a draft model: only those have shapes to compare")
    measure_and_publish(args, bench.run, lambda: bench.report(f"draft: {args.draft_model}."))


def tree_recipes(model: str, temperature: float, num_nodes: Sequence[int]) -> list[DraftRecipe]:
    """The shapes of a temperature, chains of 6 tokens among them; at 0 a sampled proposal is a greedy one."""
    samplings = ["greedy", "sampled"] if temperature > 0 else ["greedy"]
    shapes = [("chain", sampling, 6, f"chain, {sampling}") for sampling in samplings]
    shapes += [(tree, "auto", count, tree) for count in num_nodes for tree in ("dynamic", "auto")]
    return [DraftRecipe(f"{name}, {count}", model, None, tree, count, sampling) for tree, sampling, count, name in shapes]

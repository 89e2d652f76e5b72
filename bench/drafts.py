"""Which draft suits a target: any number of them in one process, swapped between runs on the same prompts.

    titan bench drafts --quick                                               a first look, in less than a minute
    titan bench drafts                                                       five drafts of the demo target
    titan bench drafts --draft demo --draft ngram --draft truncated:1 --draft demo,tree=dynamic,tokens=8
    titan bench drafts --model DIR/target --draft DIR/draft --draft truncated:2 --workload synthetic

A draft is a name and options: demo, a folder, a hub id, ngram, or truncated:N (the target's first N layers as a draft, with their
weights as they are), then tree=chain|dynamic|auto or the parent of each node (tree=-1,-1,0), tokens=MOST PER STEP, and
sampling=greedy|sampled|auto.

The drafts take turns, with no draft among them, in rounds of new prompts that are the same for all. The end of sequence is
ignored, and request i has the same random numbers in all. Ctrl-C ends the measurement and reports what there is.
"""

from __future__ import annotations

from collections.abc import Sequence

from titan.bench.draft_bench import QUICK, DraftBench, Setting, draft_parser, take_workloads
from titan.bench.draft_recipes import DraftRecipe
from titan.bench.options import parse, positive
from titan.bench.prompts import SOURCES, SYNTHETIC
from titan.bench.report import measure_and_publish
from titan.models.files import ModelFiles
from titan.models.loader import DEMO, load_tokenizer, resolve_model

DEMO_DRAFTS = ("demo", "demo,tokens=2", "demo,tree=dynamic,tokens=8", "truncated:1", "ngram")
OTHER_DRAFTS = ("truncated:1", "truncated:2", "ngram")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        ValueError: an option is not allowed, or nothing is left to measure.
    """
    parser = draft_parser("drafts", __doc__)
    parser.add_argument(
        "--draft",
        action="append",
        metavar="NAME[,OPTION=VALUE...]",
        help=f"may be given again (default: {' '.join(DEMO_DRAFTS)}; with another target {' '.join(OTHER_DRAFTS)})",
    )
    parser.add_argument("--max-draft-tokens", type=positive, default=4, help="of drafts that do not say it (default: %(default)s)")
    parser.add_argument(
        "--workload",
        nargs="+",
        help=f"{', '.join(SOURCES)}, {SYNTHETIC} (default: all but this; synthetic without a tokenizer)",
    )
    args = parse(parser, argv, QUICK)
    drafts = args.draft or (DEMO_DRAFTS if args.model == DEMO else OTHER_DRAFTS)
    recipes = [DraftRecipe.parse(text, args.max_draft_tokens) for text in drafts]
    files = ModelFiles(resolve_model(args.model, "target"))
    has_text = load_tokenizer(files, trust_remote_code=args.trust_remote_code) is not None
    settings, problems = [], []
    for source in args.workload or (SOURCES if has_text else [SYNTHETIC]):
        try:
            workloads = take_workloads(args, source)
        except ValueError as error:
            problems.append(f"left out: workload {source}: {error}")
        else:
            settings += [Setting({"workload": source, "temperature": t}, workloads, recipes) for t in args.temperature]
    if not settings:
        raise ValueError("; ".join(problems))
    bench = DraftBench(args, "Drafts", "draft", settings)
    bench.problems += problems
    models = {f"draft {recipe.model}": recipe.model for recipe in recipes}
    measure_and_publish(args, bench.run, bench.report, {"target": args.model, **models})

"""Write a table of the families of causal language models that transformers knows, and of how Titan runs each.

    python tests/models/family_table.py docs/families.md

makes a tiny checkpoint of each family, compares what Titan generates with what transformers does, as tests/models/test_families.py,
and says what it found. The first errors of families that fail go to standard error, and the exit status is then 1.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from checkpoints import Checkpoint, Checkpoints
from families import FAMILIES, NOT_TRIED, Family
from parity import check_parity
from prompt_logits import HALF_DTYPES, check_half_precision
from tqdm import tqdm
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from titan import LLM

HEAD = """# Families of models

This page says which families of causal language models run, and how. `make families` made it, with transformers {version}.

For each family, a tiny random checkpoint must generate, greedily in float32 on a CPU, the tokens of transformers' `generate`: with
prompts of 1 to 48 tokens, alone and together, in chunks, without a draft, with n-grams, with trees of a draft model, and where
requests are preempted ([parity.py](../tests/models/parity.py)). In bfloat16 and float16, log-probabilities of a prompt are about
as close to those in float32 as transformers' are in the same dtype ([prompt_logits.py](../tests/models/prompt_logits.py)).

{summary}

- *native*: Titan's own decoder;
- *transformers*: transformers' layers on Titan's paged attention;
- *gathered*: transformers' layers and attention, on keys and values that are gathered for each layer.

Of models that take images as well, the language model runs. Reasons to refuse a family that several have in common:

{notes}

| model type | class | runs | has |
|---|---|---|---|
"""

QUOTED = re.compile(r"'[^']*'")


@dataclass(frozen=True, slots=True)
class Finding:
    """How a family runs, or "refused" or "fails"; and, of the latter, why."""

    family: Family
    runs: str
    reason: str = ""

    @property
    def common_reason(self) -> str:
        """The reason, with X in place of what is quoted in it first."""
        return QUOTED.sub("X", self.reason, count=1)

    def row(self, notes: Mapping[str, int]) -> str:
        """Return the family's row of the table, with the number of its reason if it is one of the notes."""
        model_type, _, variant = self.family.name.partition(":")
        classes: dict[str, str] = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
        name = f"`{model_type}`" + (f" ({variant.replace('_', ' ')})" if variant else "")
        quoted, reason = QUOTED.search(self.reason), self.reason
        if self.common_reason in notes:
            reason = f"({notes[self.common_reason]})" + (f", X={quoted[0]}" if quoted else "")
        return f"| {name} | {classes[model_type]} | {self.runs} | {'; '.join(filter(None, (self.family.notes, reason)))} |"


def try_family(checkpoint: Checkpoint) -> Finding:
    """Compare a family with transformers, or see that it is refused as expected."""
    family = checkpoint.family
    try:
        if family.runs != "refused":
            check_parity(checkpoint)
            for dtype in HALF_DTYPES:
                check_half_precision(checkpoint, dtype)
            return Finding(family, family.runs)
        LLM(checkpoint.path, device="cpu", warm_up=False)
    except ValueError as error:
        expected = family.runs == "refused" and re.search(family.refusal, str(error))
        return Finding(family, "refused" if expected else "fails", _first_line(error).rpartition(" that cannot be used: ")[2])
    except Exception as error:  # noqa: BLE001 - whatever it is, the table says so
        return Finding(family, "fails", _first_line(error))
    return Finding(family, "fails", "is not refused")


def table(findings: list[Finding]) -> str:
    """Return the page."""
    counts = Counter(finding.runs for finding in findings)
    summary = f"Of {len(findings)}: " + ", ".join(f"{count} {runs}" for runs, count in counts.most_common()) + "."
    reasons = Counter(finding.common_reason for finding in findings if finding.reason)
    notes = {reason: number for number, reason in enumerate([reason for reason, count in reasons.items() if count > 1], start=1)}
    rows = [finding.row(notes) for finding in findings]
    listed = "\n".join(f"- ({number}) {reason}" for reason, number in notes.items())
    return HEAD.format(version=transformers.__version__, summary=summary, notes=listed) + "\n".join((*rows, "", *_not_tried(), ""))


def _not_tried() -> Iterator[str]:
    yield "Not tried:\n"
    known = {family.model_type for family in FAMILIES.values()}
    for reason, names in NOT_TRIED.items():
        known |= set(names.split())
        yield f"- {reason}: {', '.join(f'`{name}`' for name in names.split())}"
    if unknown := [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in known]:
        yield f"- newer than this list: {', '.join(f'`{name}`' for name in unknown)}"


def _first_line(error: Exception) -> str:
    line = next(iter(str(error).splitlines()), "")
    return line.replace("|", "\\|") if isinstance(error, ValueError | AssertionError) else f"{type(error).__name__}: {line}"


def main() -> int:
    """Try all families and write the page to the path given."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder))
        findings = [try_family(checkpoints[name]) for name in tqdm(FAMILIES)]
    Path(sys.argv[1]).write_text(table(findings), encoding="utf-8")
    failures = [finding for finding in findings if finding.runs == "fails"]
    for finding in failures:
        print(f"{finding.family.name}: {finding.reason}", file=sys.stderr)
    return min(len(failures), 1)


if __name__ == "__main__":
    sys.exit(main())

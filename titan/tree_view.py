"""Draft trees as text: the tokens a step proposed, those that verification accepted, and the final token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import DraftTree

LEGEND = "+ accepted, - rejected, > final token (recovered or bonus)"

_GREEN, _DIM, _BOLD, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedTree:
    """A draft tree after its verification.

    ``path`` holds the accepted nodes from the root down. ``final_token_id`` is ``None`` if the root's logits could not be used;
    where those after an accepted node could not, the path ends before that node, whose token is the final one. A stop within the
    path ends the output there: the tokens after it were accepted but are not emitted.
    """

    request: Request  # whose tokens grow after the step
    root_token_id: int
    tree: DraftTree  # without draft_probs
    path: list[int]
    final_token_id: int | None


def verified_trees(plan: StepPlan, acceptance: Acceptance) -> list[VerifiedTree]:
    """Return the trees of the rows that reached their roots, empty ones included; call before the requests' tokens grow.

    Args:
        plan: the step.
        acceptance: the result of its verification.
    """
    return [
        VerifiedTree(
            request,
            request.token_ids[-1],
            acceptance.trees[i],
            acceptance.paths[i],
            acceptance.token_ids[i][-1] if acceptance.errors[i] is None else None,
        )
        for i, request in enumerate(plan.requests)
        if plan.reaches_root(i)
    ]


def token_text(tokenizer: Any, token_id: int) -> str:
    """Return the text of one token, special tokens and leading spaces included.

    Args:
        tokenizer: a transformers tokenizer.
        token_id: an id in its vocabulary.
    """

    def decode(token_ids: list[int]) -> str:
        text: str = tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        return text

    return decode([token_id, token_id])[len(decode([token_id])) :]  # some tokenizers drop a text's leading space


def render_tree(verified: VerifiedTree, decode: Callable[[int], str], *, color: bool = False) -> str:
    """Render a tree as indented text, a line per token: the root, marked nodes below their parents, the final token after the path.

    Args:
        verified: the tree.
        decode: returns the text of a token, shown as a Python literal so that spaces and line ends are visible.
        color: use ANSI codes: accepted nodes green, rejected ones dim, the final token bold.
    """
    tree, path = verified.tree, verified.path
    end = path[-1] if path else -1
    lines = [repr(decode(verified.root_token_id))]

    def add(mark: str, token_id: int, depth: int, code: str) -> None:
        line = f"{mark} {decode(token_id)!r}"
        lines.append("  " * depth + (f"{code}{line}{_RESET}" if color else line))

    def add_children(parent: int, depth: int) -> None:
        for node in (tree.parents == parent).nonzero()[0].tolist():
            is_accepted = node in path
            add("+" if is_accepted else "-", int(tree.token_ids[node]), depth, _GREEN if is_accepted else _DIM)
            add_children(node, depth + 1)
        if parent == end and verified.final_token_id is not None:
            add(">", verified.final_token_id, depth, _BOLD)

    add_children(-1, 1)
    return "\n".join(lines)

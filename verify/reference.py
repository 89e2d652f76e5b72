"""Slow twins of verification: one obvious walk per request, the oracle of the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from titan.tree import DraftTree


def reference_walk(tree: DraftTree, draw: Callable[[Sequence[int]], int]) -> list[int]:
    """Emit the tokens of one verification step by sample-and-match.

    Args:
        tree: the draft tokens.
        draw: the target's token after the given tokens behind the root.

    Returns:
        Accepted tokens and the final token.
    """
    emitted: list[int] = []
    node = -1
    while True:
        token = draw(emitted)
        emitted.append(token)
        children = [
            child for child, parent in enumerate(tree.parents.tolist()) if parent == node and int(tree.token_ids[child]) == token
        ]
        if not children:
            return emitted
        node = children[0]

"""The plan and the result of one engine step: `StepPlan` and `Acceptance`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from titan.core.arrays import Ints
from titan.core.batch import pad_block_tables
from titan.core.growth import Worth
from titan.core.outputs import Logprob
from titan.core.request import Request
from titan.core.trees import DraftTrees

Shortage = Literal["requests", "tokens", "blocks"]
"""The resource that a step lacked: places of running requests, prompt tokens, blocks of the KV cache."""


@dataclass(slots=True)
class StepPlan:
    """The requests of a step, as parallel lists. Blocks for all of it are reserved.

    The target processes ``num_tokens[i]`` committed tokens of ``requests[i]``, from its ``num_computed_tokens`` on. If
    they reach the root, up to ``draft_budgets[i]`` draft nodes follow; otherwise the budget is 0. ``num_slots[i]`` slots after the
    root are reserved, at least as many as the budget: a beam writes the draft's KV of more nodes than it keeps. The tree of a row
    in ``worths`` ends where, by the draft's own confidence, more nodes do not pay. For the rows in ``reviews``, which draft
    nothing, the drafter is asked what it would have proposed in the last steps.
    """

    requests: list[Request]
    num_tokens: list[int]
    draft_budgets: list[int]
    num_slots: list[int]
    worths: dict[int, Worth] = field(default_factory=dict)  # by row
    reviews: list[int] = field(default_factory=list)
    drafts_prompts: bool = True  # whether a draft model should be fed prompts while the target is
    shortage: Shortage | None = None  # kept waiting requests from starting, or made running ones give way
    _block_table: Ints | None = field(default=None, init=False, repr=False, compare=False)
    _num_context_tokens: int | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def block_table(self) -> Ints:
        """The padded block tables of all rows, int64 [R, longest table]: one array for all passes of the step, built once."""
        if self._block_table is None:
            self._block_table = pad_block_tables([request.block_ids for request in self.requests])
        return self._block_table

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens before those of the step, of all requests; counted at the first use, which must precede the commit."""
        if self._num_context_tokens is None:
            self._num_context_tokens = sum([request.num_computed_tokens for request in self.requests])
        return self._num_context_tokens

    def add(self, request: Request, num_tokens: int) -> None:
        """Add a row, which drafts nothing yet."""
        self.requests.append(request)
        self.num_tokens.append(num_tokens)
        self.draft_budgets.append(0)

    def split(self) -> list[StepPlan]:
        """Return smaller plans for the same requests, without reviews; none if this one has a single token of a single request.

        Several rows are divided between two plans. A single row loses its drafts, or else half its tokens.
        """
        if len(self.requests) > 1:
            half = len(self.requests) // 2
            return [self._rows(range(half)), self._rows(range(half, len(self.requests)))]
        part = self.without_drafts([0])
        if self.draft_budgets == [0]:
            part.num_tokens[0] //= 2
        return [part] if part.num_tokens[0] else []

    def without_drafts(self, rows: Sequence[int]) -> StepPlan:
        """Return a plan of some of the rows, without their drafts and reviews."""
        return replace(self._rows(rows), draft_budgets=[0] * len(rows), num_slots=[0] * len(rows), worths={})

    def _rows(self, rows: Sequence[int]) -> StepPlan:
        """Return a plan of some of the rows, without their reviews."""
        return replace(
            self,
            requests=[self.requests[i] for i in rows],
            num_tokens=[self.num_tokens[i] for i in rows],
            draft_budgets=[self.draft_budgets[i] for i in rows],
            num_slots=[self.num_slots[i] for i in rows],
            worths={k: self.worths[i] for k, i in enumerate(rows) if i in self.worths},
            reviews=[],
        )

    def remove(self, request: Request) -> None:
        """Remove a request's row, if it has one."""
        if request in self.requests:
            i = self.requests.index(request)
            for column in (self.requests, self.num_tokens, self.draft_budgets):
                del column[i]

    def emitting_rows(self) -> list[int]:
        """Return the rows that reach their request's root."""
        return [*filter(self.reaches_root, range(len(self.requests)))]

    @property
    def has_results(self) -> bool:
        """Whether the host looks at what the passes compute: at tokens, or at the logprobs of prompts."""
        return bool(self.emitting_rows()) or any(map(Request.prompt_logits, self.requests, self.num_tokens))

    def reaches_root(self, i: int) -> bool:
        """Whether row ``i`` feeds the request's last committed token, so that it emits tokens."""
        request = self.requests[i]
        return request.num_computed_tokens + self.num_tokens[i] == len(request.token_ids)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The result of verification, per row of the plan.

    ``trees`` are the verified trees with the report of their growth, on the host, without q (``draft_probs``); ``paths[i]`` has the
    accepted nodes from the root down; ``token_ids[i]`` their tokens and the final token, which is recovered or bonus. All are
    empty for a row that did not reach its root, or whose root's logits could not be used: ``errors[i]`` then says why, and the
    request fails. Where those after accepted nodes could not be used, the token of the last one is the final token. ``logprobs[i]``
    has, if the request asks for them, an entry per token, and ``prompt_logprobs[i]`` the next entries of its prompt.
    """

    trees: DraftTrees
    paths: list[list[int]]
    token_ids: list[list[int]]
    errors: list[str | None]
    logprobs: dict[int, list[dict[int, Logprob]]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[dict[int, Logprob]]] = field(default_factory=dict)

    def replace_failed(self, rows: Sequence[int], again: Acceptance) -> None:
        """Replace the results of rows that failed by those of the same rows in another pass."""
        for i, row in enumerate(rows):
            self.token_ids[row], self.errors[row] = again.token_ids[i], again.errors[i]
        self.logprobs.update({rows[i]: entries for i, entries in again.logprobs.items()})
        self.prompt_logprobs.update({rows[i]: entries for i, entries in again.prompt_logprobs.items()})

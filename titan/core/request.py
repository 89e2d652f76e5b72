"""One generation request: its tokens and the counters carried from one step to the next."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Protocol

import numpy as np

from titan.core.arrays import Ints
from titan.core.draft_history import DraftHistory
from titan.core.outputs import Logprob, RequestMetrics
from titan.core.sampling_params import SamplingParams
from titan.core.terms import RequestTerms


class FinishReason(StrEnum):
    """Reasons for the end of a request; the names follow vLLM."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"  # by the caller or its time-out
    ERROR = "error"  # of this request alone, or of a step, which ends all in flight


class Detokenizer(Protocol):
    """Converts a request's output to text as its tokens arrive; set by the front end. A stop string truncates its ``text``."""

    text: str  # complete characters

    def append(self, token_id: int) -> None:
        """Add one token."""

    def finish(self) -> None:
        """Complete the text after the last token."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """A request inside the engine: one completion of one prompt. If a user asks for several, they are **siblings**.

    There are no phases: ``num_computed_tokens`` catches up with ``num_tokens``. A prefill chunk is many tokens, a decode is
    one (the root), a verification is the root and the draft tree after it. The block table and the counters of its KV
    change only through the methods.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int  # the params' limit, lowered to what the model's length leaves
    stop_token_ids: frozenset[int]  # the params' and, unless ignored, the model's end-of-sequence tokens
    metrics: RequestMetrics
    detokenizer: Detokenizer | None  # None unless text is needed while the request runs
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # tokens of the words that must not be generated
    index: int = 0  # among its siblings
    siblings: tuple[Request, ...] = ()  # all completions of the prompt, itself included; empty if it is the only one
    holders: dict[Request, None] = field(default_factory=dict)  # siblings that have blocks; one dict for all siblings
    terms: RequestTerms = field(default_factory=RequestTerms)

    has_transforms: bool = field(init=False)  # cached `params.has_transforms`, which is slow
    token_ids: list[int] = field(init=False)  # prompt and output
    block_ids: array[int] = field(default_factory=partial(array, "q"))  # block table, for the target's and the draft's cache
    swapped_block_ids: array[int] = field(default_factory=partial(array, "q"))  # in place of block_ids, while it is swapped out
    hash_chain: list[bytes] = field(default_factory=list)  # hashes of its first full blocks, as far as they were computed
    num_cached_blocks: int = 0  # leading full blocks that the prefix cache knows, shared ones included; 0 without that cache
    num_computed_tokens: int = 0  # tokens whose committed KV is valid in the target's cache
    num_drafted_context: int = 0  # the same for the draft's cache
    num_draft_marked_blocks: int = 0  # leading blocks marked in the prefix cache as covered by the current draft
    draft_history: DraftHistory = field(default_factory=DraftHistory)  # with the current draft
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or string that ended the request
    error: str | None = None  # why the request was aborted or failed
    logprobs: list[dict[int, Logprob]] | None = field(init=False)  # of each output token, if requested
    prompt_logprobs: list[dict[int, Logprob] | None] | None = field(init=False)  # of each prompt token, at the first sibling
    cumulative_logprob: float = field(default=0.0, init=False)  # sum over the output tokens, if requested
    num_decoded_logprobs: int = field(default=0, init=False)  # entries whose tokens have their text, those of the prompt first
    _token_array: Ints = field(default_factory=lambda: np.empty(0, np.int64), init=False)  # with room for more tokens
    _num_converted: int = field(default=0, init=False)  # tokens in it
    _distinct_prompt_ids: Ints | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.has_transforms = self.params.has_transforms
        self.token_ids = list(self.prompt_token_ids)
        self.logprobs = None if self.params.logprobs is None else []
        self.prompt_logprobs = None if self.params.prompt_logprobs is None or self.index else [None]

    @property
    def family(self) -> tuple[Request, ...]:
        """The completions of the prompt, in order."""
        return self.siblings or (self,)

    @property
    def num_common_tokens(self) -> int:
        """Number of tokens of the prompt, the root excluded, whose KV all siblings have in common."""
        return min(self.num_prompt_tokens, self.num_tokens - 1)

    @property
    def leading_sibling(self) -> Request:
        """The sibling with the most KV of the common tokens in the target's cache, and among equals in the draft's.

        Siblings without blocks, such as swapped ones, do not count; if none has blocks, it is the request itself.
        """
        most = self.num_common_tokens
        return max(self.holders, key=lambda each: (min(each.num_computed_tokens, most), each.num_drafted_context), default=self)

    @property
    def awaits_sibling(self) -> bool:
        """Whether a sibling is computing the prompt, so that this request, without KV, waits to share it."""
        if self.block_ids or self.is_swapped or self.prompt_logits(self.num_prompt_tokens):
            return False
        sibling = self.leading_sibling
        return sibling is not self and sibling.num_computed_tokens < self.num_common_tokens

    @property
    def token_array(self) -> Ints:
        """``token_ids`` as int64 [num_tokens], read-only; each of them is converted once."""
        num_converted, num_tokens = self._num_converted, len(self.token_ids)
        if num_tokens > len(self._token_array):
            self._token_array = np.append(self._token_array, np.empty(num_tokens, np.int64))
        self._token_array[num_converted:num_tokens] = self.token_ids[num_converted:]
        self._num_converted = num_tokens
        view = self._token_array[:num_tokens]
        view.flags.writeable = False  # drafters see what penalties count
        return view

    @property
    def distinct_prompt_ids(self) -> Ints:
        """The different tokens of the prompt, int64, ascending; found once."""
        if self._distinct_prompt_ids is None:
            self._distinct_prompt_ids = np.unique(self.token_array[: self.num_prompt_tokens])
        return self._distinct_prompt_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens; the last token is the root, whose KV is not yet written."""
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of tokens without KV in the target's cache, the root included: 1 of a request that decodes."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def expiry(self) -> float | None:
        """Time at which it is aborted, on the clock of ``metrics.arrival_time``; ``None`` = never."""
        return None if self.terms.timeout_s is None else self.metrics.arrival_time + self.terms.timeout_s

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def text_token_ids(self) -> list[int]:
        """Output tokens that are shown as text: without the stop token that ended it, unless ``include_stop_str_in_output``.

        `titan.schedule.stopping` does the same for text that grows with each token.
        """
        is_cut = self.finish_reason is FinishReason.STOP and self.token_ids[-1] in self.stop_token_ids
        return self.output_token_ids[: -1 if is_cut and not self.params.include_stop_str_in_output else None]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_remaining_tokens(self) -> int:
        """Number of tokens that the request may still emit."""
        return self.max_tokens + len(self.prompt_token_ids) - len(self.token_ids)

    def most_drafts(self, most: int, max_len: int) -> int:
        """Return how many nodes it may draft: at most ``most``, and one fewer than the tokens that it may still emit.

        With its own tokens they are at most ``max_len``, the longest context that the drafter takes.
        """
        params = self.params
        if not params.may_draft:
            return 0
        if params.max_draft_tokens is not None:
            most = min(most, params.max_draft_tokens)
        return max(0, min(most, self.num_remaining_tokens - 1, max_len - len(self.token_ids)))

    def prompt_logits(self, num_tokens: int) -> range:
        """Return those of the next ``num_tokens`` positions that still need logits, for logprobs of the next prompt tokens."""
        if self.prompt_logprobs is None:
            return range(0)
        start = self.num_computed_tokens
        return range(max(start, len(self.prompt_logprobs) - 1), min(start + num_tokens, self.num_prompt_tokens - 1))

    def add_logprobs(self, entries: list[dict[int, Logprob]]) -> None:
        """Add the logprobs of the last output tokens, an entry each."""
        assert self.logprobs is not None, "called if they are requested"
        token_ids = self.token_ids[self.num_prompt_tokens + len(self.logprobs) :]
        for token_id, entry in zip(token_ids, entries, strict=True):
            self.cumulative_logprob += entry[token_id].logprob
        self.logprobs += entries

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def extend_blocks(self, block_ids: Iterable[int]) -> None:
        self.block_ids.extend(block_ids)
        if self.siblings and self.block_ids:
            self.holders[self] = None

    def commit(self, num_tokens: int) -> None:
        """Commit this many more tokens, whose KV is now valid.

        The root's KV never is, and tokens cut off by a stop count in neither cache.
        """
        num_computed = self.num_computed_tokens = min(self.num_computed_tokens + num_tokens, len(self.token_ids) - 1)
        if self.num_drafted_context > num_computed:
            self.num_drafted_context = num_computed

    def cover_draft(self, num_tokens: int) -> None:
        """Count this many more tokens as valid in the draft's cache."""
        self.num_drafted_context += num_tokens

    @property
    def block_hashes(self) -> list[bytes]:
        """Hashes of the blocks that the prefix cache knows."""
        return self.hash_chain[: self.num_cached_blocks]

    def mark_cached(self, num_blocks: int, num_drafted_blocks: int) -> None:
        """Record how many leading blocks the prefix cache knows, and how many of them as covered by the draft."""
        self.num_cached_blocks = num_blocks
        self.num_draft_marked_blocks = num_drafted_blocks

    def forget_draft(self) -> None:
        """Reset the draft's coverage and history, since a new draft has seen nothing of the request."""
        self.num_drafted_context = self.num_draft_marked_blocks = 0
        self.draft_history = DraftHistory()

    def renumber_blocks(self, new_ids: Mapping[int, int]) -> None:
        """Replace the ids of all blocks of the table, old id -> new id."""
        self.block_ids = array("q", map(new_ids.__getitem__, self.block_ids))

    @property
    def is_swapped(self) -> bool:
        """Whether its KV is in the swap space."""
        return bool(self.swapped_block_ids)

    def swap_out(self, swapped_block_ids: Iterable[int]) -> array[int]:
        """Exchange the block table for blocks of the swap space; return its blocks, the last one first."""
        self.swapped_block_ids.extend(swapped_block_ids)
        return self.roll_back(0)

    def leave_swap(self) -> array[int]:
        """Give up the blocks of the swap space; return them, the last one first."""
        block_ids, self.swapped_block_ids = self.swapped_block_ids[::-1], array("q")
        return block_ids

    def roll_back(self, num_blocks: int) -> array[int]:
        """Keep the first ``num_blocks`` blocks of the table; return the others, the last one first."""
        surplus = self.block_ids[num_blocks:]
        del self.block_ids[num_blocks:]
        if not self.block_ids:
            self.holders.pop(self, None)
        return surplus[::-1]

    def release(self) -> array[int]:
        """Give up all blocks and reset the counters of their KV; return the blocks, the last one first."""
        self.num_computed_tokens = self.num_drafted_context = 0
        self.num_cached_blocks = self.num_draft_marked_blocks = 0
        return self.roll_back(0)


def make_siblings(*requests: Request) -> None:
    """Make requests the completions of one prompt, in this order."""
    holders = dict.fromkeys(request for request in requests if request.block_ids)
    for request in requests:
        request.siblings, request.holders = requests, holders

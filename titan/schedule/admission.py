"""Admission checks: whether a request can run at all, before any work is done for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from titan.core.checks import shown
from titan.core.request import Request
from titan.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of an engine on its requests."""

    vocab_size: int
    max_model_len: int  # tokens of a request, prompt and output
    num_kv_blocks: int
    block_size: int


def check_request(prompt: str | None, prompt_token_ids: Sequence[int], params: SamplingParams, limits: RequestLimits) -> int:
    """Check a prompt and its options against an engine's limits.

    Returns:
        The maximum number of tokens that the request may emit: the params' limit, lowered to what ``max_model_len`` leaves;
        without a limit, to what the KV cache leaves as well.

    Raises:
        ValueError: the prompt is empty, too long, leaves no room for ``min_tokens``, or could never fit the KV cache; or it or the
            options have tokens outside the vocabulary.
    """
    num_tokens = len(prompt_token_ids)
    if num_tokens == 0:
        raise ValueError(f"prompt={prompt_token_ids if prompt is None else prompt!r} has no tokens: it must have at least one")
    check_token_ids("prompt", prompt_token_ids, limits.vocab_size)
    check_token_ids("stop_token_ids", params.stop_token_ids or (), limits.vocab_size)
    check_token_ids("logit_bias", params.logit_bias or (), limits.vocab_size)
    check_token_ids("allowed_token_ids", params.allowed_token_ids or (), limits.vocab_size)
    if num_tokens >= limits.max_model_len:
        raise ValueError(
            f"prompt has {num_tokens} tokens, which leaves no room to generate: at most {limits.max_model_len - 1} are "
            f"allowed (max_model_len={limits.max_model_len})"
        )
    num_kv_tokens = limits.num_kv_blocks * limits.block_size
    num_left = num_kv_tokens - num_tokens
    if num_left <= 0:
        raise ValueError(
            f"prompt has {num_tokens} tokens, which leaves no room to generate: at most {num_kv_tokens - 1} are allowed, as the KV "
            f"cache holds {num_kv_tokens} tokens (num_kv_blocks={limits.num_kv_blocks})"
        )
    wanted = num_left if params.max_tokens is None else params.max_tokens
    max_tokens = min(wanted, limits.max_model_len - num_tokens)
    if max_tokens > num_left:
        raise ValueError(
            f"max_tokens={params.max_tokens} could never fit: behind the prompt of {num_tokens} tokens at most {num_left} are "
            f"allowed, or None for as many as fit, as the KV cache holds {num_kv_tokens} tokens "
            f"(num_kv_blocks={limits.num_kv_blocks})"
        )
    if params.min_tokens > max_tokens:
        raise ValueError(
            f"min_tokens={params.min_tokens} is out of reach: the prompt of {num_tokens} tokens leaves room for {max_tokens} "
            f"(max_model_len={limits.max_model_len}, num_kv_blocks={limits.num_kv_blocks})"
        )
    return max_tokens


def max_num_blocks(request: Request, block_size: int) -> int:
    """Return how many blocks a request takes if it emits all tokens that it may."""
    return -(-(request.num_prompt_tokens + request.max_tokens) // block_size)


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Check that token ids are in the vocabulary.

    Raises:
        ValueError: one is not; the message calls them ``name``.
    """
    outside = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
    if outside is not None:
        raise ValueError(
            f"{name} has token id {shown(outside)}, which is outside the vocabulary: allowed are 0 to {vocab_size - 1}"
        )

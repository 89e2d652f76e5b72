"""What an engine's metrics say of its last steps: what limits them, what is wrong, and what to change.

The rules of `bottlenecks`, over at most the last 1,024 steps since the current draft came:

- idle: less than half of the time was spent in steps.
- queue: in at least half of the steps requests waited, for room among the running ones or for prompt tokens of the step.
- KV memory: in at least a tenth of the steps requests waited, or gave way, for want of blocks.
- draft: drafting takes at least a fifth of the time, and a larger share than the accepted tokens are of all tokens: without drafts
  there would be more tokens per second.
- host: what is not passes (scheduling, verifying, the rest) takes at least a third of the time.
- Otherwise the target's passes: **compute** if a pass with twice the rows is expected to take at least half as long again, for then
  each row costs; **bandwidth** if not, for then the time goes into reading weights and KV, whatever the rows; **target** if the
  costs of passes were not measured.

The first three may go along with any one of the others.
"""

from __future__ import annotations

from titan.core.metrics import EngineMetrics, RecentMetrics

IDLE, QUEUED, STARVED, DRAFTING, HOST, ROW_COST = 1 / 2, 1 / 2, 1 / 10, 1 / 5, 1 / 3, 1 / 2
"""Shares from which, or below which for the first, the rules hold."""

MANY_DRAFTS, FEW_TOKENS = 100, 1.3
"""Draft tokens from which on acceptance is known, and the tokens per step of a request that has drafts below which it is low."""


def bottlenecks(metrics: EngineMetrics) -> list[str]:
    """Return what limits the last steps and what to change, a sentence each that begins with the limit's name and a colon."""
    recent = metrics.recent
    if not recent.num_steps:
        return []
    return [*_idle(recent), *_queue(metrics), *_kv_memory(metrics), _time(metrics)]


def faults(metrics: EngineMetrics) -> list[str]:
    """Return what is wrong or has been switched off, a sentence each."""
    findings = []
    always_drafts = metrics.draft != "none" and metrics.speculation is None  # "adaptive" lowers the number itself
    drafted = metrics.current_draft
    is_known = drafted.num_proposed_tokens >= MANY_DRAFTS
    if always_drafts and is_known and drafted.mean_drafted_length < FEW_TOKENS:
        share = metrics.draft_vocabulary
        vocabulary = "" if share is None or share == 1 else f", whose vocabulary has {share:.1%} of the target's tokens,"
        findings.append(
            f"with the draft {metrics.draft!r}{vocabulary} a step emits {drafted.mean_drafted_length:.2f} tokens per request: "
            f"lower max_draft_tokens or use another draft"
        )
    if num_failures := metrics.num_draft_failures:
        findings.append(f"the draft {metrics.draft!r} failed {num_failures} times, which cost drafts: see the warnings")
    if (speculation := metrics.speculation) is not None and speculation.choice != "on" and speculation.off_rate:
        with_it = f"at best {speculation.on_rate:.0f}" if speculation.on_rate else "and less"  # no draft token is worth a look
        findings.append(
            f"speculation is off: {speculation.off_rate:.0f} tokens/s are expected without it, {with_it} with the draft "
            f"{metrics.draft!r}, whose first tokens are accepted with probability {speculation.acceptance:.2f}"
        )
    covers = metrics.speculation is None or metrics.speculation.choice == "on"  # else the draft's cache is let go
    if covers and metrics.draft_coverage is not None and metrics.draft_coverage < 0.5:
        findings.append(f"the draft's cache covers {metrics.draft_coverage:.0%} of the running requests: it is catching up")
    return findings


def _idle(recent: RecentMetrics) -> list[str]:
    if recent.busy_share >= IDLE:
        return []
    return [f"idle: {recent.busy_share:.0%} of the time was spent in steps: send more requests at once"]


def _queue(metrics: EngineMetrics) -> list[str]:
    shortages, queue_s = metrics.recent.shortages, metrics.queue_s
    if shortages.requests + shortages.tokens < QUEUED:
        return []
    waited = "" if queue_s is None else f", a tenth of them for {queue_s.p90:.3g} s or longer"
    if shortages.requests >= shortages.tokens:
        return [
            f"queue: in {shortages.requests:.0%} of the steps requests waited for one of the running ones to end{waited}: raise "
            f"max_batch_size, or send less"
        ]
    return [
        f"queue: in {shortages.tokens:.0%} of the steps requests waited because prompts took all tokens of the step{waited}: raise "
        f"max_num_batched_tokens, max_prefill_tokens or max_inter_token_s, or send shorter prompts"
    ]


def _kv_memory(metrics: EngineMetrics) -> list[str]:
    if metrics.recent.shortages.blocks < STARVED:
        return []
    return [
        f"KV memory: in {metrics.recent.shortages.blocks:.0%} of the steps requests lacked blocks, with {metrics.num_preemptions} "
        f"preemptions since the start: give the KV cache more memory, use kv_cache_dtype='int8' unless it is that, or lower "
        f"max_batch_size"
    ]


def _time(metrics: EngineMetrics) -> str:
    """Return what the time of a step goes into."""
    recent, split = metrics.recent, metrics.recent.split
    accepted = 1 - 1 / max(1.0, recent.mean_acceptance_length)  # share of all tokens
    if split.draft >= DRAFTING and split.draft > accepted:
        others = "'adaptive' or 'off'" if metrics.speculation is None else "'off'"
        return (
            f"draft: drafting takes {split.draft:.0%} of a step and brings {accepted:.0%} of the tokens: use a smaller draft or "
            f"one that is accepted more often, or speculation={others}"
        )
    if (host := split.schedule + split.verify + split.rest) >= HOST:
        more = "raise max_batch_size" if recent.shortages.requests else "send more requests at once"
        return (
            f"host: {host:.0%} of a step is neither the target's nor the draft's passes (scheduling {split.schedule:.0%}, "
            f"verifying {split.verify:.0%}): {more}, which shares it out, or use fewer options of sampling"
        )
    if recent.row_cost is None:
        return (
            f"target: its passes take {split.target:.0%} of a step; their costs were not measured, which tell compute from "
            f"bandwidth: speculation='adaptive' with a draft, or max_inter_token_s, has them measured"
        )
    grows = f"a pass of {recent.mean_rows:.3g} tokens would take {recent.row_cost:.0%} longer with twice as many"
    if recent.row_cost >= ROW_COST:
        return f"compute: {grows}: more requests or drafts at once bring little; use more or faster cores, or a smaller model"
    return (
        f"bandwidth: {grows}: more requests or better drafts at once cost little; use a smaller dtype, kv_cache_dtype='int8' for "
        f"long contexts unless it is that, or faster memory"
    )

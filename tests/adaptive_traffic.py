"""Requests that come and go, for the simulated engine of the controller: at light and at heavy load, with texts of all kinds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from adaptive_simulator import Fixed, Fleet, Machine, Policy, Text

from titan.core.draft_history import AcceptanceCounts

PROMPT_LENS, OUTPUT_LENS = (16, 128), (16, 64)


class Served(NamedTuple):
    """What became of some requests."""

    rate: float  # tokens per second in which anything ran
    latency: float  # median, seconds from arrival to end


@dataclass
class Traffic(Fleet):
    """Requests that wait until they have arrived and there is room, run, and end."""

    texts: list[Text] = field(default_factory=list)
    at_once: int = 8

    def serve(self, policy: Policy, texts: Sequence[Text], arrivals: Sequence[float]) -> Served:
        """Run these requests.

        Args:
            policy: of all steps.
            texts: with their number of tokens, in order of arrival.
            arrivals: seconds.
        """
        waiting = deque(zip(arrivals, texts, strict=True))
        now, num_tokens, idle = 0.0, 0, 0.0
        since, latencies = dict[int, float](), list[float]()
        while waiting or self.texts:
            if not self.texts and waiting[0][0] > now:
                idle, now = idle + waiting[0][0] - now, waiting[0][0]
            while waiting and waiting[0][0] <= now and len(self.texts) < self.at_once:
                arrival, text = waiting.popleft()
                since[id(text)] = arrival
                self.texts.append(text)
            emitted, seconds, _ = self.step(policy)
            now, num_tokens = now + seconds, num_tokens + emitted
            latencies += [now - since[id(text)] for text in self.texts if text.num_left == 0]
            self.texts = [text for text in self.texts if text.num_left != 0]
        return Served(num_tokens / (now - idle), float(np.median(latencies)))


def against_off(
    machine: Machine,
    draw: Callable[[np.random.Generator], float],
    make: Callable[[], Policy],
    at_once: int = 8,
    share: float = 0.0,
    num_requests: int = 100,
    seeds: int = 3,
) -> Served:
    """Rates and latencies as multiples of those without drafts: medians over seeds.

    Args:
        machine: that runs them.
        draw: returns the acceptance of a request.
        make: the policy.
        at_once: most requests that run.
        share: rate of arrivals, as a share of what runs without drafts if all have arrived at the beginning; 0: they have.
        num_requests: in all.
        seeds: of requests.
    """
    found = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        texts = [_arriving(draw(rng), rng) for _ in range(num_requests)]

        def serve(policy: Policy, arrivals: Sequence[float], texts: Sequence[Text] = texts, seed: int = seed) -> Served:
            fresh = [replace(text, counts=AcceptanceCounts()) for text in texts]
            return Traffic(machine, at_once=at_once, seed=seed).serve(policy, fresh, arrivals)

        arrivals = [0.0] * num_requests
        if share:
            per_request = np.mean([text.num_left for text in texts if text.num_left]) / serve(Fixed(0), arrivals).rate
            arrivals = np.cumsum(rng.exponential(per_request / share, num_requests)).tolist()
        found.append(tuple(mine / plain for mine, plain in zip(serve(make(), arrivals), serve(Fixed(0), arrivals), strict=True)))
    rate, latency = np.median(found, axis=0)
    return Served(float(rate), float(latency))


def _arriving(acceptance: float, rng: np.random.Generator) -> Text:
    """A request whose prompt runs in its first step."""
    prompt_len, output_len = int(rng.integers(*PROMPT_LENS)), int(rng.integers(*OUTPUT_LENS))
    return Text(acceptance, context=prompt_len, num_missing=prompt_len, num_prefill=prompt_len - 1, num_left=output_len)

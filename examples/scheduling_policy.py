"""A scheduling policy of your own: the request with the least work left starts first.

python examples/scheduling_policy.py
"""

from collections.abc import Sequence

from titan import LLM, SamplingParams
from titan.core.policy import SchedulingPolicy
from titan.core.request import Request
from titan.schedule.heap import Heap


class ShortestFirst(SchedulingPolicy):
    """Orders requests by the tokens that they may still emit; long ones may wait for ever."""

    name = "shortest first"

    def __init__(self) -> None:
        self.waiting = Heap[Request]()

    def add(self, request: Request) -> None:
        """Take note of a request that waits, a new one or one that was preempted."""
        self.waiting.push(request, request.num_remaining_tokens)

    def remove(self, request: Request) -> None:
        """Take note of a request that waits no more."""
        self.waiting.discard(request)

    def first(self, now: float) -> Request:  # noqa: ARG002
        """Return the one that starts next."""
        request, _ = self.waiting.top()
        return request

    def victim(self, running: Sequence[Request], now: float) -> Request:  # noqa: ARG002
        """Return the one that is preempted where KV blocks are scarce."""
        return max(running, key=lambda request: request.num_remaining_tokens)


llm = LLM("demo", scheduling_policy=ShortestFirst(), max_batch_size=1)
params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (96, 32, 64)]
outputs = llm.generate(["import os", "def f(", "class A:"], params, use_tqdm=False)
for output in sorted(outputs, key=lambda output: output.metrics.finished_time or 0.0):
    print(f"{len(output.outputs[0].token_ids)} tokens after {output.prompt!r}")

"""A custom drafter, which proposes what has most often followed the last token so far.

python examples/custom_drafter.py
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from titan import LLM, SamplingParams
from titan.core.step import StepPlan
from titan.core.trees import DraftTree
from titan.draft.base import CachelessDrafter


def most_frequent_followers(token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Return the chain in which each token is the one that has followed the last most often; it ends where none has."""
    counts, chain = Counter(pairwise(token_ids)), [token_ids[-1]]
    while len(chain) <= num_tokens and (after := [pair for pair in counts if pair[0] == chain[-1]]):
        chain.append(max(after, key=counts.__getitem__)[1])
    return chain[1:]


class FollowerDrafter(CachelessDrafter):
    """A drafter that keeps nothing: it inherits an empty ``commit`` and ``kv = None``."""

    name = "follower"
    max_draft_tokens = 2

    def propose(self, plan: StepPlan) -> list[DraftTree]:
        rows = zip(plan.requests, plan.draft_budgets, strict=True)
        return [DraftTree.chain(most_frequent_followers(request.token_ids, budget)) for request, budget in rows]


llm = LLM("demo", draft_model=FollowerDrafter(), speculation="fixed")
output = llm.generate("def quicksort(", SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)[0]
print(output.outputs[0].text)
print(f"accepted per depth: {output.metrics.accepted_per_depth} of {output.metrics.proposed_per_depth}")

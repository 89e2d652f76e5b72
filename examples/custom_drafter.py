"""A custom drafter, which proposes the last token again, twice.

python examples/custom_drafter.py
"""

from titan import LLM, SamplingParams
from titan.core.step import StepPlan
from titan.core.trees import DraftTree
from titan.draft.base import NoDrafter


class EchoDrafter(NoDrafter):
    """A drafter that keeps nothing: it inherits an empty ``commit`` and ``kv = None``."""

    name = "echo"
    max_draft_tokens = 2

    def propose(self, plan: StepPlan) -> list[DraftTree]:
        return [
            DraftTree.chain([request.token_ids[-1]] * budget)
            for request, budget in zip(plan.requests, plan.draft_budgets, strict=True)
        ]


llm = LLM("demo", draft_model=EchoDrafter(), speculation="fixed")
output = llm.generate("def quicksort(", SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)[0]
print(output.outputs[0].text)
print(f"accepted per depth: {output.metrics.accepted_per_depth} of {output.metrics.proposed_per_depth}")

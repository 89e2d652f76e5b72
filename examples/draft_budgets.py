"""How much is drafted by a rule of your own: the more requests run at once, the fewer tokens are drafted for each.

python examples/draft_budgets.py
"""

from titan import LLM, SamplingParams
from titan.adaptive.policy import BudgetPolicy
from titan.core.step import StepPlan

PROMPTS = ["def read_lines(path", "class Stack:\n    def __init__(self", "for name in sorted("]


class RowsPerStep(BudgetPolicy):
    """Drafts until a pass of the target has as many rows as it takes in hardly more time than one."""

    def __init__(self, num_rows: int, max_draft_tokens: int) -> None:
        self.num_rows = num_rows
        self.num_reserved = max_draft_tokens

    def decide(self, plan: StepPlan) -> None:
        """Share the rows that tokens and prompts leave among the requests that may draft."""
        num_drafting = sum(budget > 0 for budget in plan.draft_budgets)
        most = max(0, self.num_rows - sum(plan.num_tokens)) // max(1, num_drafting)
        plan.draft_budgets = [min(budget, most) for budget in plan.draft_budgets]


llm = LLM("demo", draft_model="demo", speculation="fixed", max_draft_tokens=6)
llm.engine.adaptive = RowsPerStep(num_rows=8, max_draft_tokens=6)  # swap_draft() sets the engine's own again
for prompts in (PROMPTS[:1], PROMPTS):
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=128, ignore_eos=True), use_tqdm=False)
    num_steps = sum(output.metrics.num_sequence_steps for output in outputs)
    num_drafted = sum(output.metrics.num_draft_tokens for output in outputs)
    print(f"{len(prompts)} at once: {num_drafted / num_steps:.1f} draft tokens per request and step")

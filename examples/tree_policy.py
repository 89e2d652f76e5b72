"""A shape of draft trees of your own: two chains, which begin with the draft's two most likely tokens.

python examples/tree_policy.py
"""

from titan import LLM, SamplingParams
from titan.core.growth import GrowthSpec, ShapeSpec, Worth, main_path_order, shape_plan
from titan.core.request import Request
from titan.draft.policy import DraftPolicy

PROMPTS = ["def read_lines(path", "class Stack:\n    def __init__(self", "for name in sorted("]


class TwoChains(DraftPolicy):
    """Even nodes form one chain, odd nodes the other."""

    def spec(
        self,
        request: Request,
        budget: int,
        num_slots: int,  # noqa: ARG002 - a shape needs no more slots than it has nodes
        worth: Worth | None = None,  # noqa: ARG002 - None with speculation="fixed"
    ) -> GrowthSpec:
        """Return how the tree of a request grows, of at most ``budget`` nodes."""
        parents = [max(node - 2, -1) for node in range(budget)]  # -1 is the root
        plan = shape_plan(main_path_order(parents).parents)
        return ShapeSpec(plan, request.params, request.seed) if self.is_sampled(request) else ShapeSpec(plan)


llm = LLM("demo", draft_model="demo", speculation="fixed", max_draft_tokens=6)
llm.engine.drafter.policy = TwoChains("chain", "auto", 6)
outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=128), use_tqdm=False)
print(outputs[0].outputs[0].text)
metrics = llm.metrics()
print(f"{metrics.mean_acceptance_length:.2f} tokens per request and step, proposed per depth: {metrics.proposed_per_depth}")

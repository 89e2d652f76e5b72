"""A lossless rule that accepts more of sampled chains, by looking at all of a chain: block verification.

python examples/block_verification.py
"""

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from titan import LLM, SamplingParams
from titan.core.growth import GrowthSpec, chain_spec
from titan.core.random import Purpose, philox_uniform
from titan.core.request import Request
from titan.draft.policy import DraftPolicy
from titan.kernels.torch.trees import Outcome, RuledTrees, TreeToVerify

PROMPTS = ["def read_lines(path", "class Stack:\n    def __init__(self", "for name in sorted("]


def block_verification(tree: TreeToVerify) -> Outcome:
    """Verify a sampled chain: Sun et al., "Block verification accelerates speculative decoding", 2025; with coins of the step."""
    num_nodes, length, weights = len(tree.token_ids), 0, [1.0]
    for node, token_id in enumerate(tree.token_ids):
        weights.append(min(1.0, weights[-1] * float(tree.p(node - 1)[token_id] / tree.q(node - 1)[token_id])))  # type: ignore[index]

    def rest(depth: int) -> Tensor:
        return (weights[depth] * tree.p(depth - 1) - tree.q(depth - 1)).clamp(min=0)

    for depth in range(1, num_nodes + 1):
        mass, lost = (float(rest(depth).sum()), 1 - weights[depth]) if depth < num_nodes else (weights[-1], 1 - weights[-1])
        if float(philox_uniform(tree.seed, tree.position, Purpose.ACCEPT, sibling=depth)) * (mass + lost) <= mass:
            length = depth
    if length == num_nodes:
        return Outcome([*range(length)], tree.sample(tree.p(length - 1), length, Purpose.SAMPLE))
    left = rest(length)
    return Outcome([*range(length)], tree.sample(left if left.any() else tree.p(length - 1), length, Purpose.RESIDUAL))


class OwnNumbers(DraftPolicy):
    """Chains that are sampled by other random numbers in each step, for rules that look at tokens which they do not emit."""

    def spec(self, request: Request, budget: int, *_: Any) -> GrowthSpec:
        [seed] = np.random.SeedSequence([request.seed, request.num_tokens]).generate_state(1, np.uint64)
        return replace(chain_spec(budget), params=request.params, seed=int(seed))


if __name__ == "__main__":
    llm = LLM("demo", draft_model="demo", speculation="fixed", draft_tree="chain", draft_sampling="sampled")
    llm.engine.drafter.policy = OwnNumbers("chain", "sampled", 6)  # type: ignore[attr-defined]
    params, lossless_trees = SamplingParams(temperature=1.0, max_tokens=256, ignore_eos=True), llm.engine.backend.trees
    for trees in (lossless_trees, RuledTrees(llm.engine.backend, block_verification)):
        llm.engine.backend.trees = trees
        outputs = llm.generate(PROMPTS * 8, params, use_tqdm=False)
        num_steps = sum(output.metrics.num_sequence_steps for output in outputs)
        num_tokens = sum(output.metrics.num_emitted_tokens for output in outputs)
        name = "token by token" if trees is lossless_trees else "by blocks"
        print(f"{name:14} {num_tokens / num_steps:.2f} tokens per request and step")

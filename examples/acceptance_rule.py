"""An acceptance rule of your own: typical acceptance, which accepts more than the lossless rules do, and is not lossless.

python examples/acceptance_rule.py
"""

from math import exp

import torch

from titan import LLM, SamplingParams
from titan.core.random import Purpose
from titan.kernels.torch.trees import Outcome, RuledTrees, TreeToVerify

PROMPTS = ["def read_lines(path", "class Stack:\n    def __init__(self", "for name in sorted("]


def typical(tree: TreeToVerify) -> Outcome:
    """Accept what the target finds likely enough, by its own entropy: Cai et al., "Medusa", 2024.

    Tokens are then no longer distributed as the target's own. At temperature 0, where all of p is on one token, they are the same.
    """
    path: list[int] = []
    while True:
        node = path[-1] if path else -1
        p = tree.p(node)
        least = min(0.09, 0.3 * exp(-float(torch.special.entr(p).sum())))
        likely = {child: float(p[tree.token_ids[child]]) for child in tree.children(node)}
        if not max(likely.values(), default=0.0) > least:  # nor if p is not finite
            return Outcome(path, tree.sample(p, len(path), Purpose.SAMPLE))
        path.append(max(likely, key=likely.__getitem__))


llm = LLM("demo", draft_model="demo", speculation="fixed", draft_sampling="greedy")  # proposals are not sampled, as Medusa's
params = SamplingParams(temperature=1.0, max_tokens=128, ignore_eos=True)
lossless = llm.generate(PROMPTS, params, use_tqdm=False)
llm.engine.backend.trees = RuledTrees(llm.engine.backend, typical)
lossy = llm.generate(PROMPTS, params, use_tqdm=False)
for name, outputs in (("lossless", lossless), ("typical", lossy)):
    num_steps = sum(output.metrics.num_sequence_steps for output in outputs)
    num_tokens = sum(output.metrics.num_emitted_tokens for output in outputs)
    print(f"{name:8} {num_tokens / num_steps:.2f} tokens per request and step")
print(lossy[0].outputs[0].text)

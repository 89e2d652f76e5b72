"""Shapes of draft trees on the demo pair: tokens per step, and what was accepted at each depth.

python examples/trees.py
"""

from titan import LLM, SamplingParams

PROMPTS = ["def read_lines(path", "class Stack:\n    def __init__(self", "for name in sorted("]
SHAPES = ["chain", "dynamic", "auto", [-1, 0, 1, -1, 0, -1]]

for shape in SHAPES:
    llm = LLM("demo", draft_model="demo", draft_tree=shape, speculation="fixed")
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=128), use_tqdm=False)
    metrics = llm.metrics()
    print(f"{shape!s:22} {metrics.mean_acceptance_length:.2f} tokens per request and step", end=", ")
    print(f"accepted per depth: {metrics.accepted_per_depth}")

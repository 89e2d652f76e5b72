"""Try several drafts with one target, without loading it again.

python examples/swap_draft.py
"""

import time

from titan import LLM, SamplingParams

PROMPTS = ["def read_lines(path", "class Stack:\n    def __init__(self", "for name in sorted("]

llm = LLM("demo", speculation="fixed", max_draft_tokens=4, enable_prefix_caching=False)
params = SamplingParams(temperature=0, max_tokens=128)
for draft in (None, "ngram", "demo"):
    llm.swap_draft(draft)
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)  # warm-up
    start = time.perf_counter()
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    num_steps = sum(output.metrics.num_sequence_steps for output in outputs)
    print(f"{draft!s:6} {num_tokens / seconds:7.1f} tokens/s, {num_tokens / num_steps:.2f} tokens per request and step")

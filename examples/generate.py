"""Generate with the demo pair and print the tokens per target step.

python examples/generate.py
"""

from titan import LLM, SamplingParams

llm = LLM("demo", draft_model="demo", speculation="fixed")  # the default would first learn what pays
params = SamplingParams(temperature=0, max_tokens=64)
for output in llm.generate(["def quicksort(", "class LRUCache:\n", "import os\n"], params):
    metrics = output.metrics
    print(f"--- {metrics.mean_acceptance_length:.2f} tokens per target step")
    print(f"{output.prompt}{output.outputs[0].text}")

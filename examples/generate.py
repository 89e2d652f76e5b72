"""Generate with the demo pair and print the tokens per target step; then end a request while its caller waits.

python examples/generate.py
"""

import asyncio

from titan import LLM, SamplingParams

llm = LLM("demo", draft_model="demo", speculation="fixed")  # the default would first learn what pays
params = SamplingParams(temperature=0, max_tokens=64)
for output in llm.generate(["def quicksort(", "class LRUCache:\n", "import os\n"], params):
    metrics = output.metrics
    print(f"--- {metrics.mean_acceptance_length:.2f} tokens per target step")
    print(f"{output.prompt}{output.outputs[0].text}")


async def generate_for(seconds: float, prompt: str, request_id: str) -> str:
    """Return what a model says in some time; any number of such calls, each in a thread of its own, join one batch."""
    params = SamplingParams(ignore_eos=True, max_tokens=None)  # without an end
    call = asyncio.create_task(asyncio.to_thread(llm.generate, prompt, params, use_tqdm=False, request_id=request_id))
    await asyncio.wait([call], timeout=seconds)
    llm.abort(request_id)  # by the id that it was given, whether it waits or runs
    [output] = await call
    return output.outputs[0].text


print(f"--- in a tenth of a second\nwhile{asyncio.run(generate_for(0.1, 'while', 'mine'))}")

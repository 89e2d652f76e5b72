"""An observer, which sees each step's trees and what was accepted of them: where the draft is wrong most often.

python examples/observer.py
"""

from collections import Counter

from titan import LLM, SamplingParams
from titan.core.step import Acceptance, StepPlan
from titan.tree_view import verified_trees

mistakes, totals = Counter[tuple[int, int]](), Counter[str]()


def count_mistakes(plan: StepPlan, acceptance: Acceptance) -> None:
    """Count the pairs of tokens that the draft proposed first and the target had in their place."""
    for each in verified_trees(plan, acceptance):
        totals["steps with drafts"] += each.tree.num_nodes > 0
        if each.tree.num_nodes and not each.path and each.final_token_id is not None:
            mistakes[int(each.tree.token_ids[0]), each.final_token_id] += 1


llm = LLM("demo", draft_model="demo", speculation="fixed", draft_tree="chain")
llm.engine.observers.append(count_mistakes)
llm.generate(["def read_lines(path", "import os\n"], SamplingParams(temperature=0, max_tokens=256), use_tqdm=False)
print(f"the first draft token was wrong in {mistakes.total()} of {totals['steps with drafts']} steps with drafts")
decode = llm.get_tokenizer().decode
for (proposed, emitted), count in mistakes.most_common(5):
    print(f"{count} times {decode([proposed])!r} in place of {decode([emitted])!r}")

"""Options that change logits, with speculation: each holds at every node, with the drafts before it taken for committed.

At temperature 0 the output is that of a loop that asks transformers for one token after the other and applies the options itself;
`test_distribution` has the sequences that are sampled under options.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from slow_logits import slow_transform
from stepping import make_engine, run_all
from tiny_models import reference_logits
from torch import Tensor
from zoo import EOS_TOKEN_IDS, Zoo, random_prompts

from titan.core.sampling_params import SamplingParams
from titan.draft.registry import DraftSpec
from titan.draft.replay import ReplayDrafter
from titan.verify import options


def by_last_token(token_ids: list[int], logits: Tensor) -> Tensor:
    """Likes the tokens that have the parity of the last one."""
    return logits + 1.5 * (torch.arange(len(logits)) % 2 == token_ids[-1] % 2)


GREEDY: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.4},
    "encouraged": {"presence_penalty": -2.0, "frequency_penalty": -0.3, "repetition_penalty": 1.05},
    "logit_bias": {"logit_bias": {7: 4.0, 20: 5, 33: -100.0}},
    "processor": {"logits_processors": [by_last_token]},
    "min_tokens": {"min_tokens": 18, "logit_bias": dict.fromkeys(EOS_TOKEN_IDS, 6.0)},
    "all": {
        "logit_bias": {11: 2.0, **dict.fromkeys(EOS_TOKEN_IDS, 6.0)},
        "logits_processors": [by_last_token],
        "min_tokens": 12,
        "repetition_penalty": 1.1,
        "presence_penalty": -1.0,
        "frequency_penalty": 0.3,
    },
}
MAX_TOKENS = 24
PROMPTS = random_prompts(5, seed=21, max_len=25)


class SlowLoop:
    """Greedy decoding, one pass of transformers per token."""

    def __init__(self, zoo: Zoo) -> None:
        self.zoo = zoo
        self.outputs = cache(self._outputs)

    def _outputs(self, name: str) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, **GREEDY[name])
        return [self._output(params, prompt) for prompt in PROMPTS]

    def _output(self, params: SamplingParams, prompt: list[int]) -> list[int]:
        output: list[int] = []
        while len(output) < MAX_TOKENS and not (output and output[-1] in EOS_TOKEN_IDS):
            logits = reference_logits(self.zoo.model("llama"), prompt + output)[-1]
            scores = slow_transform(logits, params, prompt, output, EOS_TOKEN_IDS)
            best = scores.topk(2).values
            assert best[0] - best[1] > 1e-4, "a near-tie: rounding could decide"
            output.append(int(scores.argmax()))
        return output


@pytest.fixture(scope="module")
def slow_loop(zoo: Zoo) -> SlowLoop:
    return SlowLoop(zoo)


def run_greedy(zoo: Zoo, name: str, draft: DraftSpec) -> tuple[list[list[int]], float]:
    engine = make_engine(zoo.path("llama"), draft, num_kv_blocks=64, max_batch_size=4)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, **GREEDY[name])
    return run_all(engine, PROMPTS, [params] * len(PROMPTS)), engine.metrics().mean_acceptance_length


def replay(outputs: list[list[int]], acceptance: float) -> ReplayDrafter:
    recordings = {tuple(prompt): output for prompt, output in zip(PROMPTS, outputs, strict=True)}
    return ReplayDrafter(recordings, acceptance=acceptance, vocab_size=131, max_draft_tokens=6)


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_output_is_that_of_a_loop_over_transformers(zoo: Zoo, slow_loop: SlowLoop, name: str) -> None:
    expected = slow_loop.outputs(name)
    assert expected != slow_loop.outputs("logit_bias" if name != "logit_bias" else "processor")
    assert run_greedy(zoo, name, None)[0] == expected
    for draft, low in ((replay(expected, 1.0), 4.0), (replay(expected, 0.8), 2.0), (zoo.path("llama~"), 1.0)):
        outputs, acceptance_length = run_greedy(zoo, name, draft)
        assert outputs == expected
        assert acceptance_length >= low


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency", "encouraged", "processor", "all"])
def test_the_loop_notices_options_that_overlook_the_drafted_path(
    zoo: Zoo, slow_loop: SlowLoop, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: drafted tokens repeat within one path, and if they did not count, the output would differ."""
    expected = slow_loop.outputs(name)
    monkeypatch.setattr(options, "_paths", lambda tree, first: {first + row: [] for row in range(tree.num_nodes + 1)})
    assert run_greedy(zoo, name, replay(expected, 1.0))[0] != expected

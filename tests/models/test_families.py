"""Families of models, each by a tiny checkpoint: greedy output is that of transformers' `generate`, or the family is refused.

One family for each mechanism is in every run of the tests; the others are in `make test-models`.
"""

from __future__ import annotations

import pytest
import torch
from checkpoints import Checkpoints, make_prompts
from families import FAMILIES
from parity import check_parity
from prompt_logits import HALF_DTYPES, check_half_precision, logits_of

from titan import LLM

ALWAYS = {
    "gemma3_text",
    "deepseek_v3",
    "llama4_text",
    "phi3:longrope",
    "falcon",
    "bloom",
    "kosmos-2.5",
    "mamba",
}


NATIVE, REFUSED = {"native"}, {"refused"}
ALL_BUT_REFUSED = {family.runs for family in FAMILIES.values()} - REFUSED


def names(runs: set[str]) -> list[object]:
    chosen = [name for name, family in FAMILIES.items() if family.runs in runs]
    return [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.models) for name in chosen]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("name", names(ALL_BUT_REFUSED))
def test_greedy_output_is_that_of_transformers(checkpoints: Checkpoints, name: str) -> None:
    check_parity(checkpoints[name])


@torch.no_grad()
@pytest.mark.parametrize("name", ["gemma2", "mimo_v2_flash"])
def test_logits_with_soft_caps_and_with_sinks_and_narrow_values_are_those_of_transformers(
    checkpoints: Checkpoints, name: str
) -> None:
    prompt = max(make_prompts(), key=len)
    expected = checkpoints[name].model(torch.tensor([prompt]), use_cache=False).logits[0]
    assert (logits_of(checkpoints[name], prompt, torch.float32) - expected).abs().max() < 1e-4


@pytest.mark.models
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.runs != "refused"])
def test_half_precision_is_as_close_to_float32_as_that_of_transformers(
    checkpoints: Checkpoints, name: str, dtype: torch.dtype
) -> None:
    check_half_precision(checkpoints[name], dtype)


@pytest.mark.long_where("phi3")
@pytest.mark.parametrize("name", names(NATIVE))
def test_families_with_a_decoder_run_on_transformers_as_well(checkpoints: Checkpoints, name: str) -> None:
    check_parity(checkpoints[name], "transformers")


@pytest.mark.parametrize("name", names(REFUSED))
def test_what_cannot_run_is_refused_by_name(checkpoints: Checkpoints, name: str) -> None:
    with pytest.raises(ValueError, match=FAMILIES[name].refusal):
        LLM(checkpoints[name].path, device="cpu", warm_up=False)

"""Titan: an inference engine for causal language models, built around speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from titan.core.metrics import EngineMetrics
from titan.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from titan.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from titan.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineMetrics",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import `LLM` on first use, so that importing the package stays light."""
    if name == "LLM":
        from titan.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

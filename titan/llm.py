"""`LLM`: the public interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike, fspath
from typing import Any, Unpack

from titan.core.metrics import EngineMetrics
from titan.core.options import EngineConfig, EngineOptions
from titan.core.outputs import RequestOutput
from titan.core.sampling_params import SamplingParams
from titan.draft.registry import DraftSpec
from titan.engine import Engine
from titan.frontend import FrontEnd, Prompt, choose_tokenizer
from titan.models.loader import load_config, resolve_model

Prompts = Prompt | Sequence[str] | Sequence[Sequence[int]]


class LLM:
    """A target model, optionally with a drafter, that generates text.

    All methods may be called from several threads at once: their requests run in one batch. One of the waiting threads steps for
    all, so that logits processors and drafters may run in any of them. Calls from inside a step, and in a process forked from
    one that has made an `LLM`, raise a `RuntimeError`. If a step fails, all calls in flight do: the one that made the step with
    the error itself, the others with a `RuntimeError` that names it.

    Args:
        model: "demo" (ships with the package), a folder in Hugging Face format, or a hub id.
        draft_model: "demo", a folder or hub id of a model with the target's vocabulary, "ngram" (prompt lookup), a
            `titan.draft.base.Drafter`, or ``None`` for no speculation.
        tokenizer: folder or hub id of the tokenizer; ``None`` = the model's.
        options: ``device``, ``max_draft_tokens``, ``max_batch_size`` and the other fields of `ModelOptions`,
            `SpeculationOptions`, `ScheduleOptions` and `MemoryOptions`, documented in `titan.core.options`.

    Raises:
        ValueError: an argument is not allowed or a model cannot be loaded; the message names the argument, the value and
            what is allowed.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        draft_model: DraftSpec | PathLike[str] = None,
        *,
        tokenizer: str | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        config = EngineConfig.of(**options)
        if not isinstance(model, str | PathLike):
            raise ValueError(f"model={model!r} is not allowed: it must be 'demo', a folder or a Hugging Face hub id")
        target = fspath(model)
        place = config.model.revision, config.model.download_dir
        load_config(resolve_model(target, "target"), *place)  # before more is downloaded
        target_tokenizer = choose_tokenizer(target, tokenizer, *place)
        self.engine = Engine(config, target, _as_draft(draft_model), target_tokenizer)
        self.frontend = FrontEnd(self.engine, target_tokenizer)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; outputs are in the order of the prompts.

        A prompt is text or a list of token ids; its output has ``SamplingParams.n`` completions. If some prompts of a call are
        not allowed, the others run, and the bad ones are returned with finish_reason "abort" and ``error`` set, with a warning
        each; if none is allowed, the error is raised.

        Args:
            prompts: one prompt or a sequence of them.
            sampling_params: one for all prompts, or one per prompt; ``None`` = `SamplingParams()`.
            use_tqdm: show a progress bar with tokens/s and mean acceptance length.

        Raises:
            ValueError: no prompt is allowed, or ``sampling_params`` does not match ``prompts``.
        """
        prompt_list = _as_prompt_list(prompts)
        params_list = _as_params_list(sampling_params, len(prompt_list))
        return self.frontend.generate(prompt_list, params_list, use_tqdm)

    def chat(
        self,
        messages: Sequence[dict[str, str]] | Sequence[Sequence[dict[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation or many, using the tokenizer's chat template.

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``, or a sequence of such conversations.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.

        Raises:
            ValueError: the tokenizer has no chat template, or as in `generate`.
        """
        tokenizer = self.frontend.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise ValueError("chat() needs a tokenizer with a chat template, and the model has none: use generate()")
        if not isinstance(messages, Sequence) or not messages:
            raise ValueError(f"messages={messages!r} is not allowed: give at least one message")
        conversations: Sequence[Any] = [messages] if isinstance(messages[0], dict) else messages
        for conversation in conversations:
            _check_conversation(conversation)
        prompts = [
            tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=True, return_dict=False)
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Generate for one prompt and yield its output when a completion grows: text and tokens so far, complete characters only.

        Other requests in flight continue. Generation starts when the first output is requested; leaving the loop early aborts it.

        Raises:
            ValueError: the prompt is not allowed.
        """
        [params] = _as_params_list(sampling_params, 1)
        return self.frontend.stream(prompt, params)

    def swap_draft(self, draft_model: DraftSpec | PathLike[str]) -> None:
        """Replace the drafter between steps; requests in flight continue.

        Args:
            draft_model: as in the constructor.

        Raises:
            ValueError: the draft cannot be used; the current one then stays.
        """
        draft = _as_draft(draft_model)
        self.frontend.loop.between_steps(lambda: self.engine.swap_draft(draft))

    def metrics(self) -> EngineMetrics:
        """Return totals since the engine started, and its current state."""
        return self.frontend.loop.between_steps(self.engine.metrics)

    def diagnose(self) -> list[str]:
        """Check the engine and return what is wrong or slow, one sentence each; an empty list means nothing was found.

        Raises:
            AssertionError: the block pool's invariants are broken, which is a bug in Titan.
        """
        return self.frontend.loop.between_steps(lambda: _diagnose(self.engine))


def _as_draft(draft_model: DraftSpec | PathLike[str]) -> DraftSpec:
    return fspath(draft_model) if isinstance(draft_model, PathLike) else draft_model


def _as_prompt_list(prompts: Prompts) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise ValueError(f"prompts={prompts!r} is not allowed: give a str, a list of str, a list of int or a list of such lists")
    if len(prompts) == 0:
        raise ValueError("prompts=[] is empty: give at least one prompt")
    if all(isinstance(prompt, int) for prompt in prompts):
        return [prompts]  # type: ignore[list-item]
    for prompt in prompts:
        if not isinstance(prompt, Sequence):
            raise ValueError(f"prompts has {prompt!r}, which is not a prompt: allowed are str and list of int")
    return list(prompts)  # type: ignore[arg-type]


def _as_params_list(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * num_prompts
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise ValueError(f"sampling_params={params!r} is not allowed: it must be a SamplingParams, a list of them, or None")
    if len(params) != num_prompts:
        raise ValueError(f"sampling_params has {len(params)} entries for {num_prompts} prompts: give one, or one per prompt")
    return list(params)


def _check_conversation(conversation: object) -> None:
    is_list = isinstance(conversation, list | tuple) and len(conversation) > 0
    if not is_list or not all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in conversation):  # type: ignore[attr-defined]
        raise ValueError(
            f"messages has {conversation!r}, which is not a conversation: it must be a list of messages, "
            f'{{"role": "...", "content": "..."}} each'
        )


def _diagnose(engine: Engine) -> list[str]:
    engine.kv.pool.check([request.block_ids for request in engine.scheduler.running])
    metrics = engine.metrics()
    findings = []
    if metrics.num_preemptions:
        findings.append(
            f"{metrics.num_preemptions} preemptions for lack of KV blocks: raise kv_cache_memory or lower max_batch_size"
        )
    if sum(metrics.proposed_per_depth) >= 100 and metrics.mean_acceptance_length < 1.3:
        findings.append(
            f"with the draft {metrics.draft!r} a step emits {metrics.mean_acceptance_length:.2f} tokens per request: "
            f"lower max_draft_tokens or use another draft"
        )
    if metrics.draft_coverage is not None and metrics.draft != "none" and metrics.draft_coverage < 0.5:
        findings.append(f"the draft's cache covers {metrics.draft_coverage:.0%} of the running requests: it is catching up")
    return findings

"""`LLM`: the public interface."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from copy import deepcopy
from os import PathLike, fspath
from typing import Any, NoReturn, Unpack

from titan.core.checks import check_bool, check_path, shown
from titan.core.metrics import EngineMetrics
from titan.core.outputs import RequestOutput
from titan.core.sampling_params import SamplingParams
from titan.core.terms import TermOptions, as_terms
from titan.diagnosis import bottlenecks, faults
from titan.draft.registry import DraftSpec
from titan.engine import Engine
from titan.frontend.chat import ChatTemplate, Conversation, as_conversations
from titan.frontend.front_end import FrontEnd
from titan.frontend.prompts import Prompt, Refusal, as_prompts
from titan.models.files import ModelFiles, resolve_model
from titan.models.loader import load_sampling_defaults, open_model
from titan.models.tokenizer import choose_tokenizer
from titan.vllm_names import LLMOptions, translate

Prompts = Prompt | Sequence[Prompt]


class LLM:
    """A target model, optionally with a drafter, that generates text.

    All methods may be called from several threads at once: their requests run in one batch. One of the waiting threads steps for
    all, so that logits processors and drafters may run in any of them. Calls from inside a step, and in a process forked from
    one that has made an `LLM`, raise a `RuntimeError`. If a step fails or is interrupted, all calls with requests that run or
    wait in the queue fail: the one that made the step with the error itself, the others with a `RuntimeError` that names it. The
    next calls are served.

    Args:
        model: "demo" (ships with the package), a folder in Hugging Face format, or a hub id; here and below, ``ID@REVISION`` is a
            branch, tag or commit on the hub.
        draft_model: "demo", a folder or hub id of a model whose vocabulary is the target's or has enough of its tokens, "ngram"
            (prompt lookup), a `titan.draft.base.Drafter`, or ``None``, the default, for no speculation.
        tokenizer: folder or hub id of the tokenizer; ``None`` = the model's.
        options: ``device``, ``max_draft_tokens``, ``max_batch_size`` and the other fields of `ModelOptions`,
            `SpeculationOptions`, `ScheduleOptions` and `MemoryOptions`, documented in `titan.core.options` and listed in
            docs/options.md; some may be given under vLLM's names, which `titan.vllm_names` lists.

    Raises:
        TypeError: there is no option of a name.
        ValueError: an argument is not allowed or a model cannot be loaded; the message names the argument, the value and
            what is allowed.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        draft_model: DraftSpec | PathLike[str] = None,
        *,
        tokenizer: str | PathLike[str] | None = None,
        **options: Unpack[LLMOptions],
    ) -> None:
        config, draft_model = translate(options, _as_draft(draft_model))
        if not isinstance(model, str | PathLike):
            raise ValueError(f"model={shown(model)} is not allowed: it must be 'demo', a folder or a Hugging Face hub id")
        files = ModelFiles(resolve_model(fspath(model), "target"), config.model.revision, config.model.download_dir)
        trust = config.model.trust_remote_code
        checkpoint = open_model(files, config.model.model_impl, trust_remote_code=trust)  # before more is downloaded
        has_defaults = config.model.generation_config == "auto"
        self._default_params = load_sampling_defaults(files) if has_defaults else SamplingParams()
        target_tokenizer = choose_tokenizer(files, check_path("tokenizer", tokenizer), trust_remote_code=trust)
        self.engine = Engine(config, checkpoint, draft_model, target_tokenizer)
        self.frontend = FrontEnd(self.engine, target_tokenizer)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied."""
        raise TypeError(
            "an LLM cannot be pickled or copied, since its memory and threads are those of one process: make an LLM in each process"
        )

    def get_tokenizer(self) -> Any:
        """Return a copy of the model's transformers tokenizer: the original keeps state between calls.

        Raises:
            ValueError: the model has none.
        """
        if self.frontend.tokenizer is None:
            raise ValueError("the model has no tokenizer: give tokenizer=... to LLM")
        return deepcopy(self.frontend.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling params of calls that give none: those of the model's generation_config.json.

        With ``generation_config="vllm"``, they are `SamplingParams()`.
        """
        return self._default_params

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **terms: Unpack[TermOptions],
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; outputs are in the order of the prompts.

        A prompt is text, token ids, or a dict of one of them (see `titan.frontend.prompts`); its output has ``SamplingParams.n``
        completions. If some prompts of a call are not allowed, the others run, and the bad ones are returned with finish_reason
        "error" and ``error`` set, with a warning each; if none is allowed, the error is raised. Requests that fail while they run,
        by a logits processor or the tokenizer, end like this, too; a line of the logger `titan.frontend` says how many did.

        Args:
            prompts: one prompt or a sequence of them, which may be empty.
            sampling_params: one for all prompts, or one per prompt; ``None`` = `get_default_sampling_params`.
            use_tqdm: show a progress bar with tokens/s and mean acceptance length.
            terms: ``request_id``, ``priority``, ``deadline_s``, ``timeout_s``, ``user`` and ``cache_salt``, which
                `titan.core.terms.RequestTerms` documents: one value for all prompts, or a list of one per prompt.

        Raises:
            TypeError: there is no term of a name.
            ValueError: no prompt is allowed, a term is not, a request in flight has the same id, or ``sampling_params`` or a term
                does not match ``prompts``.
        """
        return self._generate(self.generate, as_prompts(prompts), sampling_params, use_tqdm, terms)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any] | Callable[..., Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **terms: Unpack[TermOptions],
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation or many, using the tokenizer's chat template.

        Conversations that are not allowed are refused as prompts are in `generate`. To stream a message, see `chat_prompt`.

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``, or a sequence of such conversations. Content is text, or a list
                of parts ``{"type": "text", "text": "..."}``, which become lines if the template does not take them as they are; a
                message with ``tool_calls`` may have none.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            chat_template: used in place of the tokenizer's.
            add_generation_prompt: end the prompt with the beginning of an assistant's message.
            continue_final_message: leave the last message open, to be continued; needs ``add_generation_prompt=False``.
            tools: descriptions of functions in JSON schema, for the template, or functions, which transformers describes.
            chat_template_kwargs: arguments of the template other than these.
            terms: as in `generate`.

        Raises:
            ValueError: there is no chat template, an argument is not allowed, or as in `generate`.
        """
        template = ChatTemplate(
            self.frontend.tokenizer,
            chat_template_kwargs,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
        )
        prompts: list[Prompt | Refusal] = []
        for conversation in as_conversations(messages):
            try:
                prompts.append(template.render(conversation))
            except ValueError as error:
                prompts.append(Refusal(str(error)))
        return self._generate(self.chat, prompts, sampling_params, use_tqdm, terms)

    def chat_prompt(
        self,
        messages: Conversation,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any] | Callable[..., Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the prompt of one conversation, its text and token ids, as `generate` and `stream` take it.

        ``stream(chat_prompt(messages))`` streams the next message. The arguments are as in `chat`.

        Raises:
            ValueError: there is no chat template, a message or an argument is not allowed.
        """
        template = ChatTemplate(
            self.frontend.tokenizer,
            chat_template_kwargs,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
        )
        return template.render(messages)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **terms: Unpack[TermOptions]
    ) -> Generator[RequestOutput]:
        """Generate for one prompt and yield its output when a completion grows: text and tokens so far, complete characters only.

        Other requests in flight continue. The request arrives when its first output is asked for, and starts then: no time counts
        before, and `abort` does not know it yet. Closing the generator aborts it, and so does leaving the loop if nothing else
        holds the generator. The terms are as in `generate`.

        Raises:
            TypeError: there is no term of a name.
            ValueError: the prompt or a term is not allowed; or, with the first output, a request in flight has the same id.
        """
        [params] = _as_params_list(self._default_params if sampling_params is None else sampling_params, 1)
        return self.frontend.stream(prompt, params, *as_terms(1, self.stream, **terms))

    def abort(self, request_id: str | Collection[str]) -> int:
        """End requests in flight, all their completions: their callers get the output so far, with finish_reason "abort".

        To be called in another thread than those that wait for the requests, or between the outputs of `stream`.

        Args:
            request_id: as given to `generate`, `chat` or `stream`, or that of a `RequestOutput`; or several of these.

        Returns:
            How many such requests were unfinished.

        Raises:
            ValueError: an id is no text.
        """
        request_ids = [request_id] if isinstance(request_id, str) else request_id
        if not isinstance(request_ids, Collection) or not all(isinstance(each, str) for each in request_ids):
            raise ValueError(
                f"request_id={shown(request_id)} is not allowed: it must be a str, that of a request, or a list of such"
            )
        return self.frontend.loop.abort(request_ids)

    def abort_all(self) -> int:
        """End all requests in flight as `abort` does, and return how many there were; later requests are not affected."""
        return self.frontend.loop.abort()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; requests in flight keep their blocks. Return True, as vLLM does where it succeeds."""
        self.frontend.loop.between_steps(self.engine.kv.forget_cached)
        return True

    def swap_draft(self, draft_model: DraftSpec | PathLike[str]) -> None:
        """Replace the drafter between steps; requests in flight continue.

        The KV cache keeps its number of blocks, so that a larger draft takes more memory than ``kv_cache_memory`` said. The swap
        space keeps its bytes and starts empty: what it held is computed again. Where the host has no memory for it any more, a
        warning says that there is none. Requests in flight go on while the draft is looked for and downloaded. They wait while its
        weights are read and, with ``speculation="adaptive"``, models whose passes were not measured before are measured, in about
        two seconds; an interrupt then ends all requests.

        Args:
            draft_model: as in the constructor.

        Raises:
            ValueError: the draft cannot be used, there is too little memory for its KV, or the engine never drafts
                (``speculation="off"``); the current one then stays.
        """
        self.frontend.loop.check_caller()
        load = self.engine.open_draft(_as_draft(draft_model))
        self.frontend.loop.between_steps(lambda: self.engine.replace_drafter(load))

    def compact_kv_cache(self) -> int:
        """Move all KV blocks with content to the front of the cache, between steps; return how many moved.

        Blocks of one request then lie side by side, which a CPU reads faster, and the end of the cache is free. No tokens change.
        An interrupt ends all requests.
        """
        return self.frontend.loop.between_steps(self.engine.compact_kv_cache)

    def resize_kv_cache(self, num_blocks: int) -> None:
        """Shrink or grow the KV cache between steps; requests in flight continue, with the same tokens.

        A smaller cache gives its memory back; the cached prefixes that were used longest ago are dropped where they do not fit.
        Requests that were admitted, but not yet queued, end with an error if they no longer fit.

        If a resize fails and the draft does not take its cache back, nothing drafts any more, and a warning says so. An interrupt
        ends all requests.

        Args:
            num_blocks: of target and draft each.

        Raises:
            ValueError: requests in flight hold or may need more blocks, there is too little memory for as many, or the device is
                not a CPU; nothing has changed then.
        """
        self.frontend.loop.between_steps(lambda: self.engine.resize_kv_cache(num_blocks))

    def metrics(self) -> EngineMetrics:
        """Return totals since the engine started, those of former drafts included, and its current state and draft."""
        return self.frontend.loop.metrics()

    def _generate(
        self,
        method: Callable[..., object],
        prompts: Sequence[Prompt | Refusal],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        terms: TermOptions,
    ) -> list[RequestOutput]:
        params = _as_params_list(self._default_params if sampling_params is None else sampling_params, len(prompts))
        each = as_terms(len(prompts), method, **terms)
        return self.frontend.generate(prompts, params, check_bool("use_tqdm", use_tqdm), each)

    def diagnose(self) -> list[str]:
        """Check the engine and return, in a sentence each, what limits the last steps and what to change, and what is wrong.

        A sentence about a limit begins with its name: "idle", "queue", "KV memory", "draft", "host", "compute", "bandwidth" or
        "target"; `titan.diagnosis` states the rules. Before the first step there is nothing to say.

        Raises:
            AssertionError: the block pool's invariants are broken, which is a bug in Titan.
        """
        return self.frontend.loop.between_steps(lambda: _diagnose(self.engine))


def _as_draft(draft_model: DraftSpec | PathLike[str]) -> DraftSpec:
    return fspath(draft_model) if isinstance(draft_model, PathLike) else draft_model


def _as_params_list(params: SamplingParams | Sequence[SamplingParams], num_prompts: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise ValueError(f"sampling_params={shown(params)} is not allowed: it must be a SamplingParams, a list of them, or None")
    if len(params) != num_prompts:
        raise ValueError(f"sampling_params has {len(params)} entries for {num_prompts} prompts: give one, or one per prompt")
    return list(params)


def _diagnose(engine: Engine) -> list[str]:
    engine.kv.check(engine.scheduler.in_flight)
    metrics = engine.metrics()
    return [*bottlenecks(metrics), *faults(metrics)]

"""Conversations: messages to prompts by a tokenizer's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from titan.core.checks import check_bool, check_characters, check_text, shown

Message = Mapping[str, Any]
Conversation = Sequence[Message]

TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that are text; each has it under "text"."""

PROBE = "titan-probe"
"""Content that shows whether a template takes text, or parts."""

OWN_OPTIONS = (
    *("conversation", "tokenize", "tokenizer_kwargs", "sanitize_control_tokens", "padding", "truncation", "max_length"),
    *("return_dict", "return_tensors", "return_assistant_tokens_mask"),
)
"""Arguments of ``apply_chat_template`` that a call may not set.

Some would cut its prompts, and those of other threads; with others, its tokens would not be those of its text.
"""


class ChatTemplate:
    """A chat template with the arguments of a call.

    Some templates take a message's content as text, others as a list of parts; given the other form, most render something wrong
    without an error. So a probe is rendered in both forms, to see which ones the template takes. If it takes parts, they are left
    as they are; else they become lines of text, as in vLLM.

    Args:
        tokenizer: a transformers tokenizer; ``None``: the model has none.
        kwargs: the ``chat_template_kwargs`` of `titan.LLM.chat`; the others are its arguments of these names.

    Raises:
        ValueError: an argument is not allowed, ``kwargs`` has one of the others, or there is no chat template.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        kwargs: object = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Any = None,
    ) -> None:
        own = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }
        self._options = _read_options(own, kwargs)
        if tokenizer is None or not (chat_template or tokenizer.chat_template):
            missing = "tokenizer" if tokenizer is None else "chat template"
            raise ValueError(f"messages need a {missing}, and the model has none: without one, a prompt is allowed")
        from transformers import PreTrainedTokenizerBase

        self._tokenizer = tokenizer
        # code of a checkpoint, as ChatGLM's, may make other tokens than those of the text
        self._has_own_tokens = type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
        by_text, by_parts = self._try(PROBE), self._try(_as_parts([PROBE]))
        self._takes_text = PROBE in by_text or PROBE not in by_parts  # if neither form shows: it may refuse such a conversation
        self._takes_parts = PROBE in by_parts and (by_parts == by_text or not self._takes_text)

    def render(self, messages: object) -> dict[str, Any]:
        """Return the prompt of a conversation, as text and token ids.

        Raises:
            ValueError: a message cannot be used, or the template refuses the conversation.
        """
        if not isinstance(messages, list | tuple) or not messages:
            raise ValueError(
                f"messages has {shown(messages)}, which is not a conversation: it must be a non-empty list of messages"
            )
        read = [_read_message(i, message) for i, message in enumerate(messages)]
        for message in read:
            message["content"] = self._as_taken(message["content"], message["role"])
        try:
            text = self._apply(read, tokenize=False)
        except Exception as error:  # a template can raise anything
            raise _not_rendered(messages, error) from error
        check_characters("messages", text)
        try:
            return {"prompt": text, "prompt_token_ids": self._encode(text, read)}
        except Exception as error:
            raise _not_rendered(messages, error) from error

    def _as_taken(self, content: str | list[str], role: str) -> str | list[dict[str, str]]:
        if isinstance(content, str):
            return content if self._takes_text else _as_parts([content])
        keeps_parts = self._takes_parts and (role == "user" or not self._takes_text)  # other roles may be rendered in another way
        return _as_parts(content) if keeps_parts else "\n".join(content)

    def _try(self, content: object) -> str:
        try:
            text: str = self._apply([{"role": "user", "content": content}], tokenize=False)
        except Exception:  # noqa: BLE001 - a template can raise anything, which says that it does not take such a message
            return ""
        return text

    def _encode(self, text: str, messages: list[dict[str, Any]]) -> Any:
        """Return the tokens of a conversation and its text, as ``apply_chat_template`` makes them, without rendering it again."""
        if self._has_own_tokens:
            return self._apply(messages, tokenize=True)
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _apply(self, messages: list[dict[str, Any]], *, tokenize: bool) -> Any:
        return self._tokenizer.apply_chat_template(messages, tokenize=tokenize, return_dict=False, **self._options)


def _not_rendered(messages: object, error: Exception) -> ValueError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return ValueError(f"messages={shown(messages)} cannot be rendered by the chat template: {reason}")


def as_conversations(messages: Any) -> list[Any]:
    """Return the conversations of a call, one or a sequence of them, as a list; `ChatTemplate.render` checks each of them later.

    Raises:
        ValueError: it is neither a conversation nor a sequence.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise ValueError(
            f"messages={shown(messages)} is not allowed: it must be a non-empty list of messages "
            f'{{"role": "...", "content": "..."}}, or a list of such lists'
        )
    return [messages] if isinstance(messages[0], Mapping) else list(messages)


def _read_options(own: Mapping[str, Any], kwargs: object) -> dict[str, Any]:
    """Check the arguments of a call, and return those of ``apply_chat_template``."""
    check_text("chat_template", own["chat_template"])
    for name in ("add_generation_prompt", "continue_final_message"):
        check_bool(name, own[name])
    if own["continue_final_message"] and own["add_generation_prompt"]:
        raise ValueError("continue_final_message=True contradicts add_generation_prompt=True: allowed with it is False")
    tools = own["tools"]
    if not isinstance(tools, list | tuple | None) or not all(isinstance(tool, Mapping) or callable(tool) for tool in tools or ()):
        raise ValueError(
            f"tools={shown(tools)} is not allowed: it must be a list of functions, or of dicts that describe them, or None"
        )
    if not isinstance(kwargs, Mapping | None) or not all(isinstance(key, str) for key in kwargs or ()):
        raise ValueError(f"chat_template_kwargs={shown(kwargs)} is not allowed: it must be a dict with names as keys, or None")
    kwargs = kwargs or {}
    if taken := [name for name in (*OWN_OPTIONS, *own) if name in kwargs]:
        raise ValueError(
            f"chat_template_kwargs has {', '.join(taken)}, which Titan or an argument of chat() sets: allowed is what the template "
            f"takes besides"
        )
    return {**own, **kwargs}


def _read_message(index: int, message: object) -> dict[str, Any]:
    """Return a message with its content as text, or texts of parts, and its tool calls' arguments as the dicts templates expect."""
    name = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f'{name}={shown(message)} is not allowed: it must be {{"role": "...", "content": "..."}}')
    read = dict(message)
    calls = read.pop("tool_calls", None)
    content = read.get("content")
    if content is None and not calls:
        raise ValueError(f"{name}={shown(message)} has no content: only an assistant's message with tool_calls may have none")
    read["content"] = _read_content(name, content)
    if calls:
        read["tool_calls"] = [_read_call(name, call) for call in (calls if isinstance(calls, list | tuple) else [calls])]
    return read


def _read_content(name: str, content: object) -> str | list[str]:
    if content is None or isinstance(content, str):
        return content or ""  # as in vLLM: many templates join it with text, which what is missing cannot be
    if not isinstance(content, list | tuple):
        raise ValueError(f"{name} has content {shown(content)}: it must be a str or a list of text parts")
    return [_read_part(name, part) for part in content]


def _as_parts(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _read_part(name: str, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) and kind in TEXT_PARTS else None
    if not isinstance(text, str):
        allowed = '{"type": "text", "text": "..."}'
        raise ValueError(
            f"{name} has a content part of type {shown(kind)}, which is not supported; allowed: {allowed}: {shown(part)}"
        )
    return text


def _read_call(name: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        _refuse_call(name, call)
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, Mapping):
        _refuse_call(name, call)
    return {**call, "function": {**function, "arguments": arguments}}


def _refuse_call(name: str, call: object) -> NoReturn:
    raise ValueError(
        f'{name} has the tool call {shown(call)}: it must be {{"type": "function", "function": {{"name": "...", "arguments": a '
        f"dict or JSON of one}}}}"
    )

"""The request side of the translation: a Chat Completions body becomes a Messages body.

Pure, and in one pass: the client's objects (tool schemas, breakpoints) are embedded as they are and never changed.
Effort, thinking, sampling and automatic breakpoints are left to the plugins behind, so that each can be left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plugins.chat_completions.content import is_blank
from plugins.chat_completions.fields import ignored
from plugins.chat_completions.messages import Conversation, translate_messages
from plugins.chat_completions.paths import client_path
from plugins.chat_completions.tools import choice_to_choice, tools_to_tools
from plugins.chat_completions.values import boolean, limit, wrong
from proxy.errors import refused
from proxy.models import Capabilities, Model

DEFAULT_MAX_TOKENS = 32_000
LONGEST_CACHE_KEY = 256


@dataclass(slots=True)
class Translation:
    """A translated request."""

    body: dict[str, Any]
    """The Messages body, without the model's name."""
    ignored: set[str]
    """The client's fields that have no effect, those included that only a later plugin sends on."""
    adjusted: dict[str, str]
    """The client's fields sent otherwise than asked, with what is sent."""
    session: str | None
    """The client's name for the conversation."""
    client_body: Mapping[str, Any]
    conversation: Conversation

    def path_of(self, path: str) -> str | None:
        """The client's path for one in ``body``: ``messages.2.content.1`` is perhaps ``messages[3].content[1]``."""
        return client_path(path, self.client_body, self.body, self.conversation)


def translate(body: Mapping[str, Any], model: Model) -> Translation:
    """The Messages request for a Chat Completions request.

    Raises GatewayError, a 400 that names the field at fault by its path in ``body``.
    """
    without_effect = ignored(body)
    adjusted: dict[str, str] = {}
    conversation = translate_messages(body.get("messages"), model.capabilities)
    stream = _stream(body)
    sent: dict[str, Any] = {"max_tokens": _max_tokens(body, model, adjusted, without_effect)}
    if stop := _stop_sequences(body.get("stop")):
        sent["stop_sequences"] = stop
    _add_tools(body, model.capabilities, sent, without_effect)
    if answer_format := _answer_format(body.get("response_format"), model.capabilities):
        sent["output_config"] = {"format": answer_format}
    if stream:
        sent["stream"] = True
    if conversation.system:
        sent["system"] = conversation.system
    sent["messages"] = conversation.messages
    session = _session(body.get("prompt_cache_key"))
    return Translation(sent, without_effect, adjusted, session, body, conversation)


def _stream(body: Mapping[str, Any]) -> bool:
    stream = boolean(body.get("stream"), "stream")
    options = body.get("stream_options")
    if options is not None:
        if not isinstance(options, dict):
            raise wrong("stream_options", options, "an object")
        boolean(options.get("include_usage"), "stream_options.include_usage")
    return stream is True


def _max_tokens(body: Mapping[str, Any], model: Model, adjusted: dict[str, str], without_effect: set[str]) -> int:
    newer = limit(body.get("max_completion_tokens"), "max_completion_tokens")
    older = limit(body.get("max_tokens"), "max_tokens")
    if newer is not None and older not in (None, newer):
        without_effect.add("max_tokens")
    asked = older if newer is None else newer
    if asked is None:
        return min(DEFAULT_MAX_TOKENS, model.max_output_tokens)
    if asked > model.max_output_tokens:
        name = "max_tokens" if newer is None else "max_completion_tokens"
        adjusted[name] = str(model.max_output_tokens)
    return min(asked, model.max_output_tokens)


def _stop_sequences(stop: Any) -> list[str]:
    if stop is None:
        return []
    if isinstance(stop, str):
        if stop and is_blank(stop):
            raise refused("stop", "must contain a character other than white space")
        return [stop] if stop else []
    if not isinstance(stop, list):
        raise wrong("stop", stop, "a string or a list of strings")
    for index, text in enumerate(stop):
        if not isinstance(text, str):
            raise refused(f"stop[{index}]", "must be a string")
        if text and is_blank(text):
            raise refused(f"stop[{index}]", "must contain a character other than white space")
    return [text for text in stop if text]


def _add_tools(
    body: Mapping[str, Any], capabilities: Capabilities, sent: dict[str, Any], without_effect: set[str]
) -> None:
    tools, choice = tools_to_tools(body.get("tools")), body.get("tool_choice")
    if not tools:
        if choice not in (None, "auto", "none"):  # a call was asked for, and there is none to make
            without_effect.add("tool_choice")
        if body.get("parallel_tool_calls") is False:
            without_effect.add("parallel_tool_calls")
        return
    sent["tools"] = tools
    parallel = boolean(body.get("parallel_tool_calls"), "parallel_tool_calls")
    chosen = choice_to_choice(choice, parallel, capabilities)
    if chosen is not None:
        sent["tool_choice"] = chosen


def _answer_format(answer: Any, capabilities: Capabilities) -> dict[str, Any] | None:
    if answer is None:
        return None
    if not isinstance(answer, dict):
        raise wrong("response_format", answer, "an object")
    kind = answer.get("type")
    if kind in ("text", "json_object"):  # json_object gets here only without field_refusal, and is ignored then
        return None
    if kind != "json_schema":
        raise wrong("response_format.type", kind, '"text" or "json_schema"')
    if not capabilities.structured_outputs:
        raise refused("response_format", "this model has no structured outputs")
    envelope = answer.get("json_schema")
    if not isinstance(envelope, dict):
        raise wrong("response_format.json_schema", envelope, "an object")
    schema = envelope.get("schema")
    if not isinstance(schema, dict):
        raise wrong("response_format.json_schema.schema", schema, "an object")
    return {"type": "json_schema", "schema": schema}


def _session(key: Any) -> str | None:
    if key is None:
        return None
    if not isinstance(key, str):
        raise wrong("prompt_cache_key", key, "a string")
    if len(key) > LONGEST_CACHE_KEY:
        raise refused("prompt_cache_key", f"must not be longer than {LONGEST_CACHE_KEY} characters")
    return key or None

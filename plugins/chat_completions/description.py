"""The request as OpenAPI says it: the table of fields, with the type of each one that is honoured.

Every field carries its class (``x-ezat-class``) and its refusal (``x-ezat-refusal``). A refused one has the values that
are let through as its type, since they ask for nothing; an ignored one has none, since nobody reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plugins.chat_completions.fields import FIELDS
from plugins.chat_completions.request import LONGEST_CACHE_KEY
from plugins.chat_completions.response import FINISH_REASONS
from plugins.chat_completions.tables import EFFORTS, PARTS, TOOLS, Entry
from proxy.openapi.messages import MODEL_NAME
from proxy.openapi.schemas import (
    BOOLEAN,
    INTEGER,
    NULL,
    OBJECT,
    STRING,
    Schema,
    any_of,
    choice,
    fixed,
    list_of,
    map_of,
    nullable,
    record,
    ref,
    said,
)

_AT_LEAST_ONE: Schema = {**INTEGER, "minimum": 1}
_OPTIONAL = {"cache_control": nullable(OBJECT)}

_TYPES: Mapping[str, Schema] = {
    "model": MODEL_NAME,
    "messages": list_of(ref("ChatMessage"), minItems=1),
    "stream": BOOLEAN,
    "stream_options": record({}, {"include_usage": nullable(BOOLEAN)}),
    "max_completion_tokens": _AT_LEAST_ONE,
    "max_tokens": _AT_LEAST_ONE,
    "stop": any_of(STRING, list_of(STRING)),
    "tool_choice": any_of(
        choice("auto", "none", "required"),
        record({"type": fixed("function"), "function": record({"name": STRING})}),
    ),
    "parallel_tool_calls": BOOLEAN,
    "prompt_cache_key": {**STRING, "maxLength": LONGEST_CACHE_KEY},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1},
    "response_format": any_of(
        record({"type": fixed("text")}),
        record({"type": fixed("json_schema"), "json_schema": record({"schema": OBJECT})}),
    ),
    "tools": list_of(ref("ChatTool.function")),
    "reasoning_effort": choice(*EFFORTS),
    # Refused, but for what asks for nothing.
    "n": {"const": 1},
    "logprobs": {"const": False},
    "top_logprobs": {"const": 0},
    "logit_bias": {"const": {}},
    "modalities": {"const": ["text"]},
    **dict.fromkeys(("audio", "web_search_options", "functions", "function_call"), NULL),
}
_REQUIRED = ("model", "messages")

_PARTS: Mapping[str, Schema] = {
    "text": record({"type": fixed("text"), "text": STRING}, _OPTIONAL),
    "image_url": record({"type": fixed("image_url"), "image_url": record({"url": STRING})}, _OPTIONAL),
    "file": record({"type": fixed("file"), "file": record({"file_data": STRING}, {"file_id": NULL})}, _OPTIONAL),
}
_TEXT = ("text",)
_MEDIA = ("text", "image_url", "file")
_ANSWERED = ("text", "refusal")

_CALL = record(
    {"id": STRING, "function": record({"name": STRING}, {"arguments": nullable(STRING)})},
    {"type": nullable(fixed("function"))},
)


def description() -> dict[str, Any]:
    """The translator's part of the document: the request's schema, and ``GET /api/compat``."""
    request = {"requestBody": {"content": {"application/json": {"schema": ref("ChatCompletionRequest")}}}}
    compat = {"summary": "What becomes of each field, part and tool of a Chat Completions request."}
    answered = {"responses": {"200": {"content": {"application/json": {"schema": ref("Compat")}}}}}
    return {
        "paths": {
            "/openai/v1/chat/completions": {"post": request},
            "/api/compat": {"get": {**compat, **answered}, "head": compat},
        },
        "components": {"schemas": _schemas()},
    }


def _schemas() -> dict[str, Schema]:
    return {
        "ChatCompletionRequest": record(
            {name: _field(name) for name in _REQUIRED},
            {name: _field(name) for name in FIELDS if name not in _REQUIRED},
            description="Null is as if a field were absent. Fields that are not described are ignored and named in "
            "`x-ezat-ignored`.",
            additionalProperties=True,
        ),
        "ChatMessage": any_of(
            _message(("system", "developer"), _TEXT),
            _message(("user",), (*_MEDIA, "refusal")),
            _message(("assistant",), _ANSWERED, {"tool_calls": nullable(list_of(_CALL))}),
            _message(("tool",), (*_MEDIA, "refusal"), required={"tool_call_id": STRING}),
        ),
        **{f"ChatPart.{name}": _entry(_PARTS.get(name, _typed(name)), entry) for name, entry in PARTS.items()},
        **{f"ChatTool.{name}": _entry(_tool(name), entry) for name, entry in TOOLS.items()},
        "ChatFinishReason": choice(*sorted(set(FINISH_REASONS.values()))),
        "Compat": record(dict.fromkeys(("fields", "parts", "tools"), map_of(ref("CompatEntry")))),
        "CompatEntry": record(
            {"class": choice("honoured", "refused", "ignored")},
            {
                "message": said(STRING, "The refusal, also of a single value of an honoured field."),
                "note": said(STRING, "The reason, or what to use instead."),
            },
        ),
    }


def _field(name: str) -> Schema:
    schema = _TYPES.get(name, {})
    return _entry(schema if name in _REQUIRED else nullable(schema), FIELDS[name].entry)


def _entry(schema: Schema, entry: Entry) -> Schema:
    described = {**schema, "x-ezat-class": entry.kind}
    if entry.note is not None:
        described["description"] = entry.note
    if entry.message is not None:
        described["x-ezat-refusal"] = entry.message
    return described


def _message(
    roles: tuple[str, ...],
    parts: tuple[str, ...],
    optional: Mapping[str, Schema] | None = None,
    required: Mapping[str, Schema] | None = None,
) -> Schema:
    content = any_of(STRING, list_of(any_of(*(ref(f"ChatPart.{name}") for name in parts))), NULL)
    return record({"role": choice(*roles), **(required or {})}, {"content": content, **(optional or {})})


def _tool(name: str) -> Schema:
    if name != "function":
        return _typed(name)
    function = record(
        {"name": STRING},
        {
            "description": nullable(STRING),
            "parameters": nullable(said(OBJECT, "A JSON schema of an object.")),
            "strict": nullable(BOOLEAN),
            **_OPTIONAL,
        },
    )
    return record({"function": function}, {"type": nullable(fixed("function")), **_OPTIONAL})


def _typed(name: str) -> Schema:
    return record({"type": fixed(name)})

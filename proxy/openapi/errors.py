"""The errors of both formats, from the tables that word them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from proxy.dialects import Wording, messages, openai
from proxy.errors import Kind
from proxy.openapi.headers import error_headers_of
from proxy.openapi.schemas import STRING, Schema, any_of, choice, fixed, nullable, record, ref, said
from proxy.plugin import Format
from proxy.reading import MOST_BYTES

WORDINGS: Mapping[Format, Mapping[Kind, Wording]] = {"openai": openai.WORDINGS, "messages": messages.WORDINGS}

MEANINGS: Mapping[Kind, str] = {
    Kind.INVALID_REQUEST: "The request is malformed or asks for what can't be had; the message begins with the path "
    "of the field at fault.",
    Kind.AUTHENTICATION: "The key is missing, unknown, revoked or expired.",
    Kind.BILLING: "The organization's prepaid balance is used up, or the key has reached its spend limit.",
    Kind.PERMISSION: "The key may not use this model, or its organization is suspended.",
    Kind.MODEL_NOT_FOUND: "There is no such model, or the key may not see it.",
    Kind.PATH_NOT_FOUND: "There is no such path; the message says what to use instead.",
    Kind.METHOD_NOT_ALLOWED: "The path takes other methods.",
    Kind.TOO_LARGE: f"The request is larger than {MOST_BYTES // 2**20} MB.",
    Kind.RATE_LIMIT: "Too many requests, of this key or to the provider.",
    Kind.INTERNAL: "The gateway or the provider failed.",
    Kind.UNAVAILABLE: "The gateway can't serve now.",
    Kind.OVERLOADED: "The provider has no capacity.",
    Kind.TIMEOUT: "The answer took too long; a stream has more time.",
}
_NAMES: Mapping[Format, str] = {"openai": "OpenAI", "messages": "Messages"}


def errors_of(format: Format, kinds: Iterable[Kind]) -> dict[str, Any]:
    """Status to response, for an operation that may fail in these ways."""
    statuses = sorted({WORDINGS[format][kind].status for kind in kinds})
    return {str(status): {"$ref": f"#/components/responses/{_NAMES[format]}{status}"} for status in statuses}


def responses() -> dict[str, Any]:
    """One response for each format and status, under names such as ``OpenAI404``."""
    return {
        f"{_NAMES[format]}{status}": _response(format, {kind: own[kind] for kind in own if own[kind].status == status})
        for format, own in WORDINGS.items()
        for status in sorted({wording.status for wording in own.values()})
    }


def schemas() -> dict[str, Schema]:
    """The two envelopes."""
    of_messages = sorted({wording.type for wording in messages.WORDINGS.values()})
    of_openai = sorted({wording.type for wording in openai.WORDINGS.values()})
    codes = sorted({wording.code for wording in openai.WORDINGS.values() if wording.code is not None})
    return {
        "MessagesError": record(
            {
                "type": fixed("error"),
                "error": record(
                    {"type": choice(*of_messages), "message": STRING},
                    description="A provider's own error comes whole, with its further members.",
                ),
                "request_id": said(STRING, "The value of the header x-request-id."),
            }
        ),
        "OpenAIError": record(
            {
                "error": record(
                    {
                        "message": STRING,
                        "type": choice(*of_openai),
                        "param": said(nullable(STRING), "The path of the field at fault, as the message names it."),
                        "code": nullable(choice(*codes)),
                    }
                )
            }
        ),
    }


def _response(format: Format, kinds: Mapping[Kind, Wording]) -> dict[str, Any]:
    schema = ref(f"{_NAMES[format]}Error")
    if format == "openai":  # a provider's own type is kept in the other one
        schema = {"allOf": [schema, {"properties": {"error": any_of(*map(_worded, kinds.values()))}}]}
    return {
        "description": " Or: ".join(MEANINGS[kind] for kind in kinds),
        "headers": error_headers_of(kinds),
        "content": {"application/json": {"schema": schema}},
        "x-ezat-kinds": {
            kind.value: {"type": wording.type, "code": wording.code} if wording.code else {"type": wording.type}
            for kind, wording in kinds.items()
        },
    }


def _worded(wording: Wording) -> Schema:
    code = {"const": wording.code} if wording.code is not None else {"type": "null"}
    return {"properties": {"type": {"const": wording.type}, "code": code}}

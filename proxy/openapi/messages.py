"""The Messages format. What the gateway passes unchanged is left open: the provider describes it."""

from __future__ import annotations

from proxy.openapi.schemas import (
    BOOLEAN,
    COUNT,
    INTEGER,
    OBJECT,
    STRING,
    Schema,
    fixed,
    list_of,
    nullable,
    record,
    ref,
    said,
)
from proxy.reading import DECISIVE, LONGEST_MODEL_NAME

MODEL_NAME = said(
    {**STRING, "minLength": 1, "maxLength": LONGEST_MODEL_NAME},
    "An id or alias of the model list, in any letter case. It comes back exactly as it was sent.",
)
_MESSAGES = said(list_of(OBJECT, minItems=1), "Not checked any further: the provider judges them.")
_UNCHANGED = (
    "Passed on byte for byte but for the model's name, unknown fields included. For models without prompt caching "
    "`cache_control` is removed."
)


def schemas() -> dict[str, Schema]:
    """Requests, answers and events."""
    return {
        "MessagesRequest": record(
            {
                "model": MODEL_NAME,
                "max_tokens": said({**INTEGER, "minimum": 1}, "Tokens of the answer at most."),
                "messages": _MESSAGES,
            },
            {"stream": BOOLEAN},
            description=f"{_UNCHANGED} None of {', '.join(DECISIVE)} may stand twice.",
            additionalProperties=True,
        ),
        "CountTokensRequest": record(
            {"model": MODEL_NAME, "messages": _MESSAGES},
            description=_UNCHANGED,
            additionalProperties=True,
        ),
        "TokenCount": record({"input_tokens": COUNT}, additionalProperties=True),
        "Message": record(
            {
                "id": STRING,
                "type": fixed("message"),
                "role": fixed("assistant"),
                "model": said(STRING, "The name that was sent."),
                "content": list_of(record({"type": STRING}, additionalProperties=True)),
                "stop_reason": nullable(STRING),
                "usage": record({"input_tokens": COUNT, "output_tokens": COUNT}, additionalProperties=True),
            },
            {"stop_sequence": nullable(STRING)},
            description="The provider's message, unchanged but for the model's name.",
            additionalProperties=True,
        ),
        "MessageEvent": record(
            {"type": STRING},
            {"message": ref("Message")},
            description="The data of one event, unchanged but for the model's name in `message_start`. Each event has "
            "its `event:` line; after a time of silence comes `ping`, after a failure `error`, and nothing behind it.",
            additionalProperties=True,
        ),
    }

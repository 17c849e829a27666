"""What the model endpoints answer, as ``proxy.catalogue`` makes it."""

from __future__ import annotations

from proxy.models import EFFORT_LEVELS
from proxy.openapi.schemas import (
    BOOLEAN,
    COUNT,
    INTEGER,
    STRING,
    Schema,
    choice,
    fixed,
    list_of,
    nullable,
    record,
    ref,
    said,
)

_DECIMAL = {**STRING, "pattern": r"^\d+(\.\d+)?$"}


def schemas() -> dict[str, Schema]:
    """Models in the three shapes: OpenAI's, the Messages API's and our own."""
    return {
        "OpenAIModel": record(
            {"id": STRING, "object": fixed("model"), "created": said(INTEGER, "Unix time."), "owned_by": STRING}
        ),
        "OpenAIModelList": record({"object": fixed("list"), "data": list_of(ref("OpenAIModel"))}),
        "MessagesModel": record(
            {
                "type": fixed("model"),
                "id": STRING,
                "display_name": STRING,
                "created_at": {**STRING, "format": "date-time"},
            }
        ),
        "MessagesModelList": record(
            {
                "data": list_of(ref("MessagesModel")),
                "has_more": BOOLEAN,
                "first_id": nullable(STRING),
                "last_id": nullable(STRING),
            }
        ),
        "CatalogueModel": record(
            {
                "id": STRING,
                "aliases": list_of(STRING),
                "displayName": STRING,
                "maxOutputTokens": {**COUNT, "minimum": 1},
                "contextWindow": nullable(INTEGER),
                "capabilities": record(
                    {
                        "sampling": BOOLEAN,
                        "samplingExclusive": said(BOOLEAN, "It takes only one of temperature and top_p."),
                        "promptCaching": BOOLEAN,
                        "effort": list_of(choice(*EFFORT_LEVELS)),
                        "forcedToolChoice": BOOLEAN,
                        "images": BOOLEAN,
                        "pdfs": BOOLEAN,
                        "structuredOutputs": BOOLEAN,
                    }
                ),
                "pricing": record(
                    dict.fromkeys(("input", "output", "cacheWrite5m", "cacheWrite1h", "cacheRead"), _DECIMAL),
                    description="USD per million tokens, as exact decimals.",
                ),
            }
        ),
        "Catalogue": record({"data": list_of(ref("CatalogueModel"))}),
    }

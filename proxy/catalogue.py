"""What the model endpoints answer, as plain dicts in three shapes: OpenAI's, the Messages API's and our own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from proxy.models import Model, name_key

DEFAULT_LIMIT = 20
LARGEST_LIMIT = 1000


def openai_model(model: Model) -> dict[str, Any]:
    """``{id, object: "model", created, owned_by}``."""
    return {"id": model.id, "object": "model", "created": model.created, "owned_by": model.owned_by}


def openai_list(models: Iterable[Model]) -> dict[str, Any]:
    """``{object: "list", data: [...]}``."""
    return {"object": "list", "data": [openai_model(model) for model in models]}


def messages_model(model: Model) -> dict[str, Any]:
    """``{type: "model", id, display_name, created_at}``, the time in RFC 3339 with a Z."""
    created_at = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": model.id, "display_name": model.display_name, "created_at": created_at}


def messages_page(
    models: Sequence[Model],
    limit: str | int | None = None,
    after_id: str | None = None,
    before_id: str | None = None,
) -> dict[str, Any]:
    """``{data, has_more, first_id, last_id}``: the first ``limit`` models behind ``after_id``, or the last ones
    ahead of ``before_id``; with both, the first ones between them. The parameters may be texts from a query.

    Raises ValueError that names the parameter: an id that is not in ``models``, a limit outside 1 to 1000.
    """
    size = _limit(limit)
    start = 0 if after_id is None else _index(models, after_id, "after_id") + 1
    end = len(models) if before_id is None else _index(models, before_id, "before_id")
    between = models[start:end]
    from_the_end = before_id is not None and after_id is None
    page = between[-size:] if from_the_end else between[:size]
    return {
        "data": [messages_model(model) for model in page],
        "has_more": len(between) > len(page),
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
    }


def catalogue(models: Iterable[Model]) -> dict[str, Any]:
    """``GET /api/models``: ``{data: [...]}`` with capabilities, and prices in USD per million tokens as decimals."""
    return {"data": [_entry(model) for model in models]}


def _entry(model: Model) -> dict[str, Any]:
    can, price = model.capabilities, model.price
    return {
        "id": model.id,
        "aliases": list(model.aliases),
        "displayName": model.display_name,
        "maxOutputTokens": model.max_output_tokens,
        "contextWindow": model.context_window,
        "capabilities": {
            "sampling": can.sampling,
            "samplingExclusive": can.sampling_exclusive,
            "promptCaching": can.prompt_caching,
            "effort": list(can.effort),
            "forcedToolChoice": can.forced_tool_choice,
            "images": can.images,
            "pdfs": can.pdfs,
            "structuredOutputs": can.structured_outputs,
        },
        "pricing": {
            "input": _decimal(price.input),
            "output": _decimal(price.output),
            "cacheWrite5m": _decimal(price.effective_cache_write_5m),
            "cacheWrite1h": _decimal(price.effective_cache_write_1h),
            "cacheRead": _decimal(price.effective_cache_read),
        },
    }


def _decimal(value: Decimal) -> str:
    """``0.30`` stays ``0.30``; never an exponent."""
    return format(value.copy_abs(), "f")


def _limit(value: str | int | None) -> int:
    if value is None:
        return DEFAULT_LIMIT
    text = str(value)
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= LARGEST_LIMIT):
        raise ValueError(f"limit: must be a whole number from 1 to {LARGEST_LIMIT}")
    return int(text)


def _index(models: Sequence[Model], id: str, parameter: str) -> int:
    wanted = name_key(id)
    for index, model in enumerate(models):
        if name_key(model.id) == wanted:
            return index
    raise ValueError(f"{parameter}: there is no model with this id in the list")

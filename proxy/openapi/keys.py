"""What a key may know of itself, as ``proxy.own_view`` makes it."""

from __future__ import annotations

from proxy.openapi.schemas import COUNT, STRING, Schema, choice, list_of, nullable, record, ref, said
from proxy.store import Exactness

_USD = said({**STRING, "pattern": r"^\d+(\.\d+)?$"}, "USD, as an exact decimal.")
_TIME = {**STRING, "format": "date-time"}
_TOKENS = ("input", "cache_read", "cache_write_5m", "cache_write_1h", "output", "thinking")


def schemas() -> dict[str, Schema]:
    """A key's own view, and the cost of one of its requests."""
    return {
        "Key": record(
            {
                "name": STRING,
                "organization": nullable(STRING),
                "models": said(list_of(STRING), "The ids that it may use."),
                "budgets": list_of(ref("KeyBudget")),
                "limits": record({"key": ref("KeyLimits"), "organization": ref("KeyLimits")}),
            }
        ),
        "KeyBudget": record(
            {
                "of": said(STRING, "Whose budget it is: the key's, or its organization's."),
                "period": nullable(STRING),
                "limit_usd": said(nullable(_USD), "Null where there is none."),
                "spent_usd": _USD,
                "reserved_usd": said(_USD, "Held for requests that are running."),
                "left_usd": nullable(_USD),
                "resets_at": nullable(_TIME),
            }
        ),
        "KeyLimits": record(
            {
                "requests_per_minute": nullable(ref("Window")),
                "input_tokens_per_minute": nullable(ref("Window")),
                "parallel_requests": nullable(COUNT),
            }
        ),
        "Window": record({"limit": COUNT, "remaining": COUNT, "reset_seconds": COUNT}),
        "RequestCost": record(
            {
                "request_id": {**STRING, "format": "uuid"},
                "at": _TIME,
                "model": STRING,
                "tokens": record(dict.fromkeys(_TOKENS, COUNT)),
                "cost_usd": _USD,
                "exactness": choice(*(each.value for each in Exactness)),
                "reason": nullable(STRING),
            }
        ),
    }

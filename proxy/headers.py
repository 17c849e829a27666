"""The headers of every answer."""

from __future__ import annotations

import re

from proxy.errors import GatewayError, Kind
from proxy.exchange import Exchange
from proxy.upstream.faults import USUAL_RETRY_AFTER

MOST_NAMES = 32
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
WAITING = (Kind.RATE_LIMIT, Kind.UNAVAILABLE, Kind.OVERLOADED)
"""The errors that say how long to wait."""


def answer_headers(exchange: Exchange) -> dict[str, str]:
    """Both id headers, what was ignored and adjusted, and what plugins added."""
    headers = {"request-id": exchange.id, "x-request-id": exchange.request_id}
    if exchange.ignored:
        names = sorted(name for name in exchange.ignored if _NAME.fullmatch(name))
        more = [f"+{len(names) - MOST_NAMES}"] if len(names) > MOST_NAMES else []
        if names:
            headers["x-ezat-ignored"] = ",".join(names[:MOST_NAMES] + more)
    if exchange.adjusted:
        headers["x-ezat-adjusted"] = ", ".join(f"{name}={value}" for name, value in exchange.adjusted.items())
    for name, value in exchange.answer_headers.items():
        if _TOKEN.fullmatch(name):
            text = str(value)
            headers[name] = text if text.isprintable() else "".join(" " if not c.isprintable() else c for c in text)
    return headers


def error_headers(error: GatewayError) -> dict[str, str]:
    """What an error adds: its type, and how long to wait."""
    headers = {"content-type": "application/json", "x-content-type-options": "nosniff", **error.headers}
    if error.kind in WAITING:
        headers["retry-after"] = str(error.retry_after or USUAL_RETRY_AFTER)
    return headers

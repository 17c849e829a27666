"""What an upstream's failure means for the client: one table for statuses, one for the types of error events.

A 400, 413 or 422 is about the client's request and is passed on word for word (clients repair themselves by reading
it). What is about the gateway's own key, account or configuration is a 500: shown as it is, clients would take it
for their own. No text that is passed on may hold the upstream's key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from time import time
from typing import Any

from proxy.errors import GatewayError, Kind
from proxy.jsontext import JsonError, decode

LONGEST_RETRY_AFTER = 60
USUAL_RETRY_AFTER = 2
LONGEST_MESSAGE = 65536

KIND_OF_STATUS = {
    400: Kind.INVALID_REQUEST,
    408: Kind.TIMEOUT,
    413: Kind.TOO_LARGE,
    422: Kind.INVALID_REQUEST,
    429: Kind.RATE_LIMIT,
    503: Kind.OVERLOADED,
    504: Kind.TIMEOUT,
    529: Kind.OVERLOADED,
}
KIND_OF_TYPE = {
    "invalid_request_error": Kind.INVALID_REQUEST,
    "request_too_large": Kind.TOO_LARGE,
    "rate_limit_error": Kind.RATE_LIMIT,
    "overloaded_error": Kind.OVERLOADED,
    "timeout_error": Kind.TIMEOUT,
}
OPERATORS_FAULTS = frozenset({401, 402, 403, 404})
_OPERATORS_TYPES = frozenset({"authentication_error", "billing_error", "permission_error", "not_found_error"})
_ACCOUNT = re.compile(r"credit balance|(spend|spending|usage|billing) limit", re.IGNORECASE)

_PATH = re.compile(r"([a-z_]+(?:\.[A-Za-z0-9_]+)*):")

MESSAGES = {
    Kind.RATE_LIMIT: "the provider is receiving too many requests",
    Kind.OVERLOADED: "the provider is overloaded",
    Kind.TIMEOUT: "the provider took too long to answer",
    Kind.TOO_LARGE: "the provider says that the request is too large",
    Kind.INVALID_REQUEST: "the provider refused the request without saying why",
    Kind.INTERNAL: "the provider failed to answer this request",
}


class UpstreamFault(GatewayError):
    """An upstream failed. ``cause`` is for the log; ``alarm`` says that the operator must act."""

    def __init__(self, kind: Kind, cause: str, *, alarm: bool = False, **details: Any) -> None:
        super().__init__(kind, details.pop("message", None) or MESSAGES[kind], **details)
        self.cause = cause
        self.alarm = alarm

    @property
    def is_final(self) -> bool:
        """Whether it is about the request itself, so that no other deployment would answer it."""
        return self.kind in (Kind.INVALID_REQUEST, Kind.TOO_LARGE)


def fault_of_status(status: int, body: bytes, headers: Mapping[str, str], secret: str | None) -> UpstreamFault:
    """The fault that a status other than 200 stands for."""
    said = _error_object(body, secret)
    kind = KIND_OF_STATUS.get(status, Kind.INTERNAL)
    alarm = status in OPERATORS_FAULTS
    if kind is Kind.INVALID_REQUEST and _ACCOUNT.search(str(said.get("message", ""))):
        kind, alarm = Kind.INTERNAL, True
    asked = headers.get("retry-after") if kind in (Kind.RATE_LIMIT, Kind.OVERLOADED) else None
    wait = None if asked is None else retry_after(asked)
    return _fault(kind, f"status {status}", said, alarm=alarm, retry_after=wait)


def fault_of_event(raw: bytes, secret: str | None) -> UpstreamFault:
    """The fault that an ``error`` event stands for."""
    said = _error_object(raw, secret)
    type_ = str(said.get("type"))
    kind = KIND_OF_TYPE.get(type_, Kind.INTERNAL)
    alarm = type_ in _OPERATORS_TYPES
    if kind is Kind.INVALID_REQUEST and _ACCOUNT.search(str(said.get("message", ""))):
        kind, alarm = Kind.INTERNAL, True
    fault = _fault(kind, f"error event {type_[:64]}", said, alarm=alarm, retry_after=None)
    if not alarm and said:
        fault.provider = said
    return fault


def _fault(kind: Kind, cause: str, said: dict[str, Any], *, alarm: bool, retry_after: int | None) -> UpstreamFault:
    message = said.get("message")
    shown = kind is not Kind.INTERNAL and isinstance(message, str) and bool(message)
    return UpstreamFault(
        kind,
        cause,
        alarm=alarm,
        retry_after=retry_after,
        message=message if shown else None,
        provider=said if shown else None,
    )


def unreachable(cause: str) -> UpstreamFault:
    """No connection, or one that broke: a 500, since no overload is known."""
    return UpstreamFault(Kind.INTERNAL, cause)


def timed_out(cause: str, message: str | None = None) -> UpstreamFault:
    """The upstream took longer than it may."""
    return UpstreamFault(Kind.TIMEOUT, cause, message=message)


def no_messages_answer(cause: str) -> UpstreamFault:
    """It answered 200, but not with a message."""
    return UpstreamFault(Kind.INTERNAL, cause, message="the provider's answer can't be read")


def cut_off(cause: str) -> UpstreamFault:
    """The answer ended before its end."""
    return UpstreamFault(Kind.INTERNAL, cause, message="the provider's answer broke off")


def retry_after(value: str) -> int:
    """Whole seconds to wait, from an upstream's header (a number or a date), at most a minute."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time()
        except (ValueError, TypeError, OverflowError):
            return USUAL_RETRY_AFTER
    if not math.isfinite(seconds):
        return LONGEST_RETRY_AFTER if seconds > 0 else USUAL_RETRY_AFTER
    return max(1, min(LONGEST_RETRY_AFTER, math.ceil(seconds)))


def client_path(message: str, path_of: Callable[[str], str | None]) -> str | None:
    """The field of the client's request that a provider's message is about, if it begins with a path."""
    found = _PATH.match(message)
    try:
        return path_of(found.group(1)) if found else None
    except Exception:  # the translated body may have been changed since, so that nothing stands there any more
        return None


def _error_object(body: bytes, secret: str | None) -> dict[str, Any]:
    """The provider's error object; empty where the body is none. Servers other than Anthropic's use other envelopes."""
    try:
        said = decode(body)
        if secret:
            said = _without(secret, said)
    except (JsonError, RecursionError):
        return {}
    error = said.get("error") if isinstance(said, dict) else None
    if isinstance(error, str):
        error = {"message": error}
    if not isinstance(error, dict):
        return {}
    message = error.get("message")
    if isinstance(message, str) and len(message) > LONGEST_MESSAGE:
        error["message"] = message[:LONGEST_MESSAGE] + "…"
    return error


def _without(secret: str, value: Any) -> Any:
    """The value with the secret cut out of every text, however it was written in the JSON."""
    if isinstance(value, str):
        return value.replace(secret, "[redacted]")
    if isinstance(value, dict):
        return {_without(secret, key): _without(secret, item) for key, item in value.items()}
    return [_without(secret, item) for item in value] if isinstance(value, list) else value

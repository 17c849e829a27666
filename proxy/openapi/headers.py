"""The headers of requests and answers, as OpenAPI says them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.dialects import Wording
from proxy.errors import Kind
from proxy.headers import MOST_NAMES, WAITING
from proxy.openapi.schemas import INTEGER, STRING, Schema
from proxy.plugin import Route

_REQUEST_ID = "The client's own id of the request, which comes back in the header of the same name."
_SESSION = "Names the conversation: its turns go to the same deployment. The first 256 characters count."
_CACHE = "`off`, in any letter case: no breakpoints are set for the provider's prompt cache."
_BETA = "Passed on to the provider as it is."
_VERSION = "Accepted and not used: the gateway sends the version that its upstream is configured with."

_ALL = frozenset(Route)
_EXCHANGES = _ALL - {Route.MODELS}
_MESSAGES = frozenset({Route.MESSAGES, Route.COUNT_TOKENS})

REQUEST: Mapping[str, tuple[str, frozenset[Route], Schema]] = {
    "x-request-id": (_REQUEST_ID, _ALL, {**STRING, "pattern": "^[A-Za-z0-9._:-]{1,128}$"}),
    "x-ezat-session": (_SESSION, _EXCHANGES, STRING),
    "x-ezat-cache": (_CACHE, frozenset({Route.CHAT_COMPLETIONS}), STRING),
    "anthropic-beta": (_BETA, _MESSAGES, STRING),
    "anthropic-version": (_VERSION, _MESSAGES, STRING),
}
"""What a client may send, and with which routes; keys are a matter of the security schemes."""

ANSWER: Mapping[str, tuple[str, Schema]] = {
    "request-id": ("The gateway's own id of the request, a UUIDv7.", {**STRING, "format": "uuid"}),
    "x-request-id": ("The client's own id where it sent a proper one, else the gateway's.", STRING),
    "x-ezat-ignored": (
        "The top-level fields of the request that had no effect, sorted and joined by commas; behind "
        f"{MOST_NAMES} of them how many there are more, as `+N`. Absent where there is none.",
        STRING,
    ),
    "x-ezat-adjusted": (
        "The fields sent otherwise than asked, under the client's names, with what was sent: "
        "`max_tokens=8192, temperature=1`. Absent where there is none.",
        STRING,
    ),
    "retry-after": ("Seconds to wait before the next attempt.", {**INTEGER, "minimum": 1}),
    "allow": ("The methods that the path takes.", STRING),
    "x-content-type-options": ("On every error.", {**STRING, "const": "nosniff"}),
}

_IDS = ("request-id", "x-request-id")
_NAMED_FIELDS = ("x-ezat-ignored", "x-ezat-adjusted")


def parameters_of(route: Route | None) -> list[dict[str, Any]]:
    """References to the request headers of a route; ``None`` is a path without a key."""
    of = Route.MODELS if route is None else route
    return [{"$ref": f"#/components/parameters/{name}"} for name, (_, routes, _) in REQUEST.items() if of in routes]


def answer_headers_of(route: Route | None) -> dict[str, Any]:
    """References to the headers of a route's answers."""
    return _references(*_IDS, *(_NAMED_FIELDS if route in _EXCHANGES else ()))


def error_headers_of(kinds: Mapping[Kind, Wording]) -> dict[str, Any]:
    """References to the headers of an error of these kinds."""
    names = [*_IDS, *_NAMED_FIELDS, "x-content-type-options"]
    if not set(WAITING).isdisjoint(kinds):
        names.append("retry-after")
    if Kind.METHOD_NOT_ALLOWED in kinds:
        names.append("allow")
    return _references(*names)


def components() -> dict[str, Any]:
    """All of them, to be referred to."""
    return {
        "parameters": {
            name: {"name": name, "in": "header", "description": description, "schema": schema}
            for name, (description, _, schema) in REQUEST.items()
        },
        "headers": {
            name: {"description": description, "schema": schema} for name, (description, schema) in ANSWER.items()
        },
    }


def _references(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}

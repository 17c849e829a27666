"""The one error that a client is told: ``GatewayError``.

It says what went wrong (``kind``), in words for the client (``message``) and about which field (``param``).
It knows neither status nor envelope: the dialect of the route words it, in one place. Whatever else is raised
while a request runs is a bug, and the client sees a bare 500.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any


class Kind(Enum):
    """What went wrong, in no client's format."""

    INVALID_REQUEST = "invalid_request"
    AUTHENTICATION = "authentication"
    BILLING = "billing"
    PERMISSION = "permission"
    MODEL_NOT_FOUND = "model_not_found"
    PATH_NOT_FOUND = "path_not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    TOO_LARGE = "too_large"
    RATE_LIMIT = "rate_limit"
    INTERNAL = "internal"
    """The gateway or the provider failed."""
    UNAVAILABLE = "unavailable"
    """The gateway can't serve now: its store is down, or it is about to stop."""
    OVERLOADED = "overloaded"
    """The provider has no capacity."""
    TIMEOUT = "timeout"


class GatewayError(Exception):
    """Ends a request with an error that the client is told.

    ``param`` is the path of the field at fault, in the client's own request. ``retry_after`` is in whole seconds.
    ``provider`` is the error object of the provider, which clients of the Messages format get whole.
    ``headers`` are added to the answer.
    """

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
        provider: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.provider = provider
        self.headers = headers or {}


class CannotStart(Exception):
    """The gateway can't start; the sentence says why and what to do."""


def refused(path: str, text: str) -> GatewayError:
    """The refusal of a field: a 400 whose message begins with the field's path in the client's request."""
    return GatewayError(Kind.INVALID_REQUEST, f"{path}: {text}", param=path)


def internal(message: str = "the gateway failed to answer this request") -> GatewayError:
    """A bare 500: what happened stands in the log alone."""
    return GatewayError(Kind.INTERNAL, message)


class PluginFault(GatewayError):
    """A plugin broke: the client sees a bare 500, the log names plugin and hook."""

    def __init__(self, plugin: str, hook: str, cause: BaseException) -> None:
        super().__init__(Kind.INTERNAL, internal().message)
        self.plugin = plugin
        self.hook = hook
        self.__cause__ = cause

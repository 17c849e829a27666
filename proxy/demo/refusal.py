"""A refusal of the demo upstream, and the error envelope that it is told in."""

from typing import Any

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
RETRY_AFTER = {429: "2", 529: "2"}  # seconds


class Refusal(Exception):
    """The request ends in `status` with `message`; raised anywhere before the answer has begun."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


def error_envelope(status: int, message: str, request_id: str) -> dict[str, Any]:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`, the type told from the status."""
    error = {"type": ERROR_TYPES.get(status, "api_error"), "message": message}
    return {"type": "error", "error": error, "request_id": request_id}


def need(condition: bool, message: str) -> None:
    """Refuse the request with 400 and `message` unless `condition` holds."""
    if not condition:
        raise Refusal(message)

"""The rims of the routes, one for each client format. Pure: values in, bytes out.

Errors and framing must work though no plugin ran, so they are no plugins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from proxy.document import Event
from proxy.errors import GatewayError, Kind
from proxy.exchange import Exchange
from proxy.plugin import Format


class Wording(NamedTuple):
    """How a format says what went wrong. ``code`` is OpenAI's alone."""

    status: int
    type: str
    code: str | None = None


class Dialect(Protocol):
    """What a client's format asks of the rim."""

    format: Format
    tail: bytes
    """What follows the last event."""
    ping: bytes
    """What goes out after a silence."""

    def wording(self, kind: Kind) -> Wording:
        """Status and words for a kind of error."""

    def error_body(self, error: GatewayError, request_id: str) -> bytes:
        """The JSON of an error before the answer has begun."""

    def error_frames(self, error: GatewayError, request_id: str) -> bytes:
        """An error after the answer has begun, and the end."""

    def frame(self, event: Event, exchange: Exchange) -> bytes:
        """One event as it goes over the wire."""

    def answer_of_text(self, words: str, exchange: Exchange) -> dict[str, Any]:
        """A whole answer of nothing but text."""

    def events_of(self, answer: dict[str, Any], exchange: Exchange) -> list[Event]:
        """A whole answer as the events of a stream."""

    def answer_of(self, events: Sequence[Event], exchange: Exchange) -> dict[str, Any]:
        """The events of a stream as a whole answer."""

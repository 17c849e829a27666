"""How far an answer has come: its usage so far, whether its tail has begun, whether it is whole.

Only the final events prove that an answer is whole; an upstream that closes early looks like the end.
"""

from __future__ import annotations

from proxy.document import Event
from proxy.jsontext import JsonError, decode
from proxy.usage import Usage

_TAIL_OF_CHUNKS = ("finish", "usage")


_FIELDS = (b'"text"', b'"partial_json"', b'"thinking"')


def bytes_of_delta(raw: bytes) -> int:
    """The bytes of the text that a delta adds, 0 for one that adds none."""
    for field in _FIELDS:
        at = raw.rfind(field)
        if at > 0:
            literal = raw[raw.find(b'"', at + len(field)) : raw.rfind(b'"') + 1]
            return len(literal) - 2 if b"\\" not in literal else _bytes_of_text(literal)
    return 0


def _bytes_of_text(literal: bytes) -> int:
    try:
        return len(str(decode(literal)).encode("utf-8", "replace"))
    except JsonError:
        return len(literal)


class Progress:
    """Watches the events of one answer, in either format, before any plugin sees them."""

    __slots__ = ("_usage", "in_tail", "stopped", "tail_event")

    def __init__(self, usage: Usage) -> None:
        self._usage = usage
        self.tail_event: Event | None = None
        """The event with which the tail begins."""
        self.in_tail = False
        """A stop_reason has come: what follows goes out only when the answer is recorded."""
        self.stopped = False
        """The last event has come."""

    def observe(self, event: Event) -> None:
        """Take note of one event."""
        kind = event.kind
        if kind == "content_block_delta":
            self._usage.delta_bytes += bytes_of_delta(event.unchanged or b"")
        elif kind == "message_delta":
            data = event.data
            self._usage.take(data.get("usage"))
            delta = data.get("delta")
            if isinstance(delta, dict) and delta.get("stop_reason") is not None:
                self._begin_tail(event)
                self._usage.final = True
        elif kind == "message_start":
            message = event.data.get("message")
            if isinstance(message, dict):
                self._usage.take(message.get("usage"))
        elif kind == "message_stop":
            self._begin_tail(event)
            self.stopped = True
        elif kind in _TAIL_OF_CHUNKS:
            self._begin_tail(event)

    def _begin_tail(self, event: Event) -> None:
        if not self.in_tail:
            self.in_tail, self.tail_event = True, event

"""What goes back to the client: the provider's answer, or one that a plugin gives itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from proxy.document import _UNREAD, Document, Event


class Answer(Document):
    """An answer: whole (``data``), or as the events of a stream.

    A plugin that returns one answers the request itself: the outputs opened so far see it as if it had come from
    the provider, in the format that the plugin sees, plain or streamed as the client asked. ``Answer.text("…")``
    says something in either format. ``billed=False`` marks an answer that cost nothing.
    """

    __slots__ = ("billed", "events", "words")

    def __init__(
        self,
        data: Any = _UNREAD,
        *,
        raw: bytes | None = None,
        events: Iterable[Event] | None = None,
        billed: bool = True,
    ) -> None:
        super().__init__(data, raw=raw)
        self.events = None if events is None else list(events)
        self.billed = billed
        self.words: str | None = None

    @classmethod
    def text(cls, words: str, *, billed: bool = False) -> Answer:
        """An answer of nothing but text, in whatever format is spoken at the plugin's place."""
        answer = cls(None, billed=billed)
        answer.words = words
        return answer

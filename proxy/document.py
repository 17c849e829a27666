"""A JSON value that came as bytes: parsed when somebody looks, encoded when somebody changed it.

This is where the engine's speed and fidelity come from. ``data`` is for reading; ``change()`` gives the same value
for writing and marks it; ``replace()`` puts another in its place. What nobody marked goes on as the bytes that came.
"""

from __future__ import annotations

from typing import Any

from proxy.jsonbytes import Member
from proxy.jsontext import decode, encode

_UNREAD: Any = object()


class Document:
    """A JSON value and the bytes that it came as."""

    __slots__ = ("_data", "_raw")

    def __init__(self, data: Any = _UNREAD, *, raw: bytes | None = None) -> None:
        self._data = data
        self._raw = raw

    @property
    def data(self) -> Any:
        """The value, for reading only."""
        if self._data is _UNREAD:
            self._data = decode(self._raw or b"null")
        return self._data

    def change(self) -> Any:
        """The value, for writing: what is edited in it goes on."""
        data = self.data
        self._raw = None
        return data

    def replace(self, data: Any) -> None:
        """Put another value in its place."""
        self._data = data
        self._raw = None

    @property
    def unchanged(self) -> bytes | None:
        """The bytes that came, unless somebody changed the value."""
        return self._raw

    def reread(self) -> Document:
        """The same value, as it came, with nothing in common that could be edited."""
        return Document(raw=self.encoded())

    def encoded(self) -> bytes:
        """The bytes to send on: those that came where nothing was changed."""
        return encode(self._data) if self._raw is None else self._raw


class RequestDocument(Document):
    """A client's body: its bytes, and where its top-level members stand in them."""

    __slots__ = ("members",)

    def __init__(self, raw: bytes, members: list[Member]) -> None:
        super().__init__(raw=raw)
        self.members = members

    def reread(self) -> RequestDocument:
        return RequestDocument(self.encoded(), self.members)

    def value(self, name: str) -> Any:
        """The value of one top-level member, None where it is missing; the rest stays unread."""
        for member in self.members:
            if member.key == name:
                return decode((self.unchanged or b"")[member.at : member.end])
        return None


class Event(Document):
    """One event of a streamed answer.

    ``kind`` is a Messages event type (``message_start``, ``content_block_delta`` …), or on OpenAI's side one of
    ``role``, ``text``, ``tool_call``, ``finish`` and ``usage``. ``data`` is the JSON object that the event carries;
    for OpenAI that is a chunk, of which the rim fills in id, object, created and model.
    """

    __slots__ = ("kind",)

    def __init__(self, kind: str, data: Any = _UNREAD, *, raw: bytes | None = None) -> None:
        self._data = data
        self._raw = raw
        self.kind = kind

    def __repr__(self) -> str:
        return f"Event({self.kind!r}, {self.encoded()!r})"

"""An image that arrives in pieces becomes the base64 source of the Messages format.

It is encoded while it arrives: 10 MB at once would hold up everybody else for tens of milliseconds, in a thread too,
since the encoder doesn't let go of the interpreter.
"""

from __future__ import annotations

import binascii

from plugins.chat_completions.data_urls import image_type

_HEAD = 32  # bytes, more than any of the four types is told by
_PIECE = 3 * 2**16


class NotAnImage(Exception):
    """The bytes are none of the four types of images."""


class InlineImage:
    """An image while it arrives. ``size`` is in bytes."""

    def __init__(self) -> None:
        self.size = 0
        self._raw = bytearray()
        self._pieces: list[str] = []
        self._type: str | None = None

    def add(self, data: bytes) -> None:
        """Take the next bytes. Raises NotAnImage as soon as that is known."""
        self.size += len(data)
        self._raw += data
        if self._type is None and len(self._raw) >= _HEAD:
            self._type = self._told_type()
        if len(self._raw) >= _PIECE:
            self._encode(len(self._raw) - len(self._raw) % 3)

    def source(self) -> dict[str, str]:
        """``{"type": "base64", "media_type", "data"}``, when all has arrived. Raises NotAnImage."""
        media_type = self._type or self._told_type()
        self._encode(len(self._raw))
        return {"type": "base64", "media_type": media_type, "data": "".join(self._pieces)}

    def _told_type(self) -> str:
        told = image_type(bytes(self._raw[:_HEAD]))
        if told is None:
            raise NotAnImage
        return told

    def _encode(self, count: int) -> None:
        self._pieces.append(binascii.b2a_base64(self._raw[:count], newline=False).decode("ascii"))
        del self._raw[:count]

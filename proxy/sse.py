"""Server-sent events: bytes to events, as the HTML standard reads them. No I/O.

An own splitter, since reading line by line stops at the reader's limit (a tool call of 2 MB is one line) and costs
as much for each line as for a whole read.
"""

from __future__ import annotations

from typing import NamedTuple

from proxy.errors import GatewayError, Kind

LONGEST_EVENT = 64 * 2**20
_BOM = b"\xef\xbb\xbf"


class Frame(NamedTuple):
    """One event: its ``event:`` line (b"" if it has none) and its data, several data lines joined with newlines."""

    name: bytes
    data: bytes


class Splitter:
    """Cuts a stream of bytes into frames, however the bytes are split.

    What is not yet a whole event waits as a list of pieces, so that a long line in small reads costs no more than
    in one. An event that the stream ends in the middle of is dropped, as the standard says.
    """

    def __init__(self, longest: int = LONGEST_EVENT) -> None:
        self._longest = longest
        self._pieces: list[bytes] = []
        self._waiting = 0
        self._newline = b""  # a line end at the end of the last read, which may be half of a blank line
        self._after_cr = False
        self._at_start = True

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that these bytes complete. Raises GatewayError for an event longer than the limit."""
        if self._after_cr or b"\r" in data:
            data = self._with_newlines(data)
        if self._newline:
            data, self._newline = self._newline + data, b""
        end = data.rfind(b"\n\n")
        if end < 0:
            self._keep(data)
            return []
        block = data[:end]
        if self._pieces:
            self._pieces.append(block)
            block = b"".join(self._pieces)
            self._pieces.clear()
            self._waiting = 0
        if end + 2 < len(data):
            self._keep(data[end + 2 :])
        if self._at_start:
            self._at_start = False
            block = block.removeprefix(_BOM)
        return [frame for text in block.split(b"\n\n") if text and (frame := _frame(text)) is not None]

    def _keep(self, data: bytes) -> None:
        if data.endswith(b"\n"):
            data, self._newline = data[:-1], b"\n"
        if data:
            self._pieces.append(data)
            self._waiting += len(data)
            if self._waiting > self._longest:
                raise GatewayError(Kind.INTERNAL, "the provider sent an event that is too long")

    def _with_newlines(self, data: bytes) -> bytes:
        if self._after_cr and data:
            data, self._after_cr = data.removeprefix(b"\n"), False
        self._after_cr = self._after_cr or data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _frame(text: bytes) -> Frame | None:
    """The frame of an event's lines, or None where there is no data."""
    if text.startswith(b"event: "):
        line_end = text.find(b"\n")
        data_at = line_end + 7
        if line_end > 0 and text.startswith(b"data: ", line_end + 1) and text.find(b"\n", data_at) < 0:
            return Frame(text[7:line_end], text[data_at:])
    name, data = b"", []
    for line in text.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return Frame(name, b"\n".join(data)) if data else None

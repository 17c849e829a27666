"""Reading a compressed answer. Identity is asked for; some upstreams compress all the same.

A truncated stream of gzip passes for whole if nobody looks at its end, so that is checked here.
"""

from __future__ import annotations

import zlib

from proxy.upstream.faults import cut_off, no_messages_answer

_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


class Inflater:
    """Decompresses an answer piece by piece. ``encoding`` is the Content-Encoding header's value."""

    def __init__(self, encoding: str, most: int) -> None:
        bits = _WINDOW_BITS.get(encoding.strip().lower())
        if bits is None:
            raise no_messages_answer("unknown content-encoding")
        self._inflater = zlib.decompressobj(bits)
        self._room = most

    def feed(self, data: bytes) -> bytes:
        """The bytes that these compressed ones stand for."""
        try:
            out = self._inflater.decompress(data, self._room + 1)
        except zlib.error:
            raise cut_off("broken compression") from None
        self._room -= len(out)
        if self._room < 0:
            raise no_messages_answer("the decompressed answer is too large")
        return out

    def end(self) -> None:
        """Raises an error where the compressed stream isn't whole."""
        if not self._inflater.eof:
            raise cut_off("truncated compression")

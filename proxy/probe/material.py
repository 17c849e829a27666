"""What the probe shows to a model: a picture, a PDF and a long text, each made here from scratch.

The picture has a colour and the PDF a word that nobody would guess, so that an answer tells whether the model saw them.
"""

from __future__ import annotations

import struct
import zlib

COLOUR = "orange"
"""Of the picture."""
WORD = "heron"
"""The one word of the PDF."""
_RGB = bytes((255, 128, 0))
_SIDE = 224  # pixels: small, yet no provider finds it too small, and as tokens it stands out from a short question
_PAGE_TEXT = f"BT /F1 48 Tf 60 700 Td ({WORD}) Tj ET".encode()
_LINES = 400  # of 13 tokens and more: above the 4096 from which on the last of the models begin to cache


def picture() -> bytes:
    """A PNG of one colour."""
    row = b"\0" + _RGB * _SIDE
    header = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(row * _SIDE)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def pdf() -> bytes:
    """A PDF of one page with one word on it."""
    objects = (
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%b\nendstream" % (len(_PAGE_TEXT), _PAGE_TEXT),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    )
    file, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(file))
        file += b"%d 0 obj\n%b\nendobj\n" % (number, content)
    entries = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    table = b"xref\n0 %d\n0000000000 65535 f \n%b" % (len(objects) + 1, entries)
    trailer = b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, len(file))
    return file + table + trailer


def long_text(run: str) -> str:
    """5,000 tokens and more that begin with ``run``: no other run finds them in a cache."""
    lines = (f"Shelf {number} of the store {run[:4]} holds {number % 7} boxes of lamps." for number in range(_LINES))
    return f"Inventory {run}. " + " ".join(lines)

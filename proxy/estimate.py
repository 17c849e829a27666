"""How many input tokens a request will have, before anybody has counted them.

Text is taken as four bytes a token, an image as a fixed number, a PDF by its size; the provider's count decides in
the end. It is what budgets reserve and what limits on tokens count.
"""

from __future__ import annotations

from typing import Any

BYTES_PER_TOKEN = 4
TOKENS_PER_IMAGE = 1600
PDF_BASE64_PER_TOKEN = 40
_MEDIA = ("image", "document")
_SOURCES = ("base64", "url", "file")
"""Those of an image or a PDF; a document may be plain text, too."""


def input_tokens(body: Any) -> int:
    """The input tokens of a body in Messages format, or of any part of one."""
    size = tokens = 0
    waiting = [body]  # no recursion: a body may be nested more deeply than that goes
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            size += len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            source = value.get("source")
            if value.get("type") in _MEDIA and isinstance(source, dict) and source.get("type") in _SOURCES:
                tokens += _media_tokens(value["type"], source.get("data"))
            else:
                size += sum(map(len, value))
                waiting += value.values()
        else:
            size += 4
    return tokens + -(-size // BYTES_PER_TOKEN)


def _media_tokens(kind: str, data: Any) -> int:
    if kind == "image" or not isinstance(data, str):
        return TOKENS_PER_IMAGE
    return max(TOKENS_PER_IMAGE, len(data) // PDF_BASE64_PER_TOKEN)

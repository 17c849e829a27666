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


def input_tokens(body: Any) -> int:
    """The input tokens of a body in Messages format, or of any part of one."""
    size, tokens = _measure(body)
    return tokens + -(-size // BYTES_PER_TOKEN)


def _measure(value: Any) -> tuple[int, int]:
    """Bytes of text, and tokens of what is no text."""
    if isinstance(value, str):
        return (len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))), 0
    if isinstance(value, dict):
        source = value.get("source")
        if value.get("type") in _MEDIA and isinstance(source, dict) and "data" in source:
            return 0, _media_tokens(value["type"], source["data"])
        parts = [*value.values()]
        own = sum(map(len, value))
    elif isinstance(value, list):
        parts, own = value, 0
    else:
        return 4, 0
    sizes = [_measure(part) for part in parts]
    return own + sum(size for size, _ in sizes), sum(tokens for _, tokens in sizes)


def _media_tokens(kind: str, data: Any) -> int:
    if kind == "image" or not isinstance(data, str):
        return TOKENS_PER_IMAGE
    return max(TOKENS_PER_IMAGE, len(data) // PDF_BASE64_PER_TOKEN)

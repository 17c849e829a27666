"""What the tests of both SDKs send and ask for."""

from __future__ import annotations

import base64
from typing import Any

from pydantic import BaseModel

PNG = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
        "1f15c4890000000d49444154789c63f8cfc0f01f0005000101ff5e0c0d960000000049454e44ae426082"
    )
).decode()
"""A picture of one pixel, in base64."""
PDF = base64.b64encode(b"%PDF-1.4\n1 0 obj<</Type/Catalog>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF\n").decode()
"""An empty document, in base64."""
LONG_TEXT = "You answer in the voice of a lighthouse keeper who has seen many storms. " * 20
"""Long enough for the demo's prompt cache."""
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
"""The JSON schema of the tools' arguments."""


class City(BaseModel):
    """A structured answer."""

    name: str
    population: int
    rivers: list[str]


def asked(text: str) -> list[dict[str, Any]]:
    """The messages of a conversation that begins with these words."""
    return [{"role": "user", "content": text}]

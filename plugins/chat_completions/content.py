"""The parts of a message to blocks.

An http(s) image becomes a ``url`` source that remembers its place in the client's request (``PlacedUrl``), so that
whoever downloads it can name it. A breakpoint on a part that is dropped moves to the kept block before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from plugins.chat_completions.data_urls import NEEDS_IMAGE, image_source, pdf_source
from plugins.chat_completions.tables import NO_AUDIO, NO_FILE_ID, PARTS
from plugins.chat_completions.values import wrong
from proxy.errors import refused
from proxy.models import Capabilities

Block = dict[str, Any]
Where = Literal["system", "user", "assistant", "tool"]
_MEDIA = ("image_url", "file")
_TAKE_MEDIA = ("user", "tool")


class PlacedUrl(str):
    """An image's URL with the path at which the client wrote it, ``messages[0].content[2].image_url.url``."""

    __slots__ = ("path",)
    path: str

    def __new__(cls, url: str, path: str) -> PlacedUrl:
        self = super().__new__(cls, url)
        self.path = path
        return self


def is_blank(text: str) -> bool:
    """Whether a text block of it would be refused: it is empty or only white space."""
    return not text or text.isspace()


def parts_to_blocks(
    parts: Sequence[Any], message: int, where: Where, capabilities: Capabilities
) -> tuple[list[Block], list[int]]:
    """The blocks of a message's parts, and for each the index of its part. Raises GatewayError."""
    blocks: list[Block] = []
    places: list[int] = []
    for index, part in enumerate(parts):
        if not isinstance(part, dict):
            raise refused(f"messages[{message}].content[{index}]", "must be an object")
        block: Block | None = None
        if part.get("type") != "text":
            block = _media_block(part, f"messages[{message}].content[{index}]", where, capabilities)
        elif not isinstance(text := part.get("text"), str):
            raise wrong(f"messages[{message}].content[{index}].text", text, "a string")
        elif not is_blank(text):
            block = {"type": "text", "text": text}
        mark = part.get("cache_control")
        if mark is not None:
            if not isinstance(mark, dict):
                raise wrong(f"messages[{message}].content[{index}].cache_control", mark, "an object")
            if block is not None:
                block["cache_control"] = mark
            elif blocks:
                blocks[-1].setdefault("cache_control", mark)
        if block is not None:
            blocks.append(block)
            places.append(index)
    return blocks, places


def _media_block(part: dict[str, Any], path: str, where: Where, capabilities: Capabilities) -> Block | None:
    """The block of a part that is no text; None for one that is dropped."""
    kind = part.get("type")
    if kind == "refusal":
        return None
    if kind == "input_audio":
        raise refused(path, NO_AUDIO)
    if kind in _MEDIA and where not in _TAKE_MEDIA:
        raise refused(path, f"only text is supported in {where} messages")
    if kind == "image_url":
        return _image_block(part, path, capabilities)
    if kind == "file":
        return _document_block(part, path, capabilities)
    if not isinstance(kind, str):
        raise wrong(f"{path}.type", kind, "a string")
    raise refused(f"{path}.type", f"use one of {', '.join(PARTS)}")


def _image_block(part: dict[str, Any], path: str, capabilities: Capabilities) -> Block:
    if not capabilities.images:
        raise refused(path, "this model takes no images")
    image = part.get("image_url")
    if not isinstance(image, dict):
        raise wrong(f"{path}.image_url", image, "an object")
    url, path = image.get("url"), f"{path}.image_url.url"
    if not isinstance(url, str):
        raise wrong(path, url, "a string")
    scheme = url[:8].lower()
    if scheme.startswith("data:"):
        return {"type": "image", "source": image_source(url, path)}
    if scheme.startswith(("http://", "https://")):
        return {"type": "image", "source": {"type": "url", "url": PlacedUrl(url, path)}}
    raise refused(path, NEEDS_IMAGE)


def _document_block(part: dict[str, Any], path: str, capabilities: Capabilities) -> Block:
    file, path = part.get("file"), f"{path}.file"
    if not isinstance(file, dict):
        raise wrong(path, file, "an object")
    if file.get("file_id") is not None:
        raise refused(path, NO_FILE_ID)
    if not capabilities.pdfs:
        raise refused(path, "this model takes no PDFs")
    data, path = file.get("file_data"), f"{path}.file_data"
    if not isinstance(data, str):
        raise wrong(path, data, "a string")
    return {"type": "document", "source": pdf_source(data, path)}

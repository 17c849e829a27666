"""Data URLs of images and PDFs to the base64 sources of the Messages format.

The base64 is checked without being decoded: what is left of it without its alphabet may only be white space, which is
removed, and the padding. Of an image the bytes decide, since screenshot tools name the wrong type.
"""

from __future__ import annotations

import binascii

from filetype.types.image import Gif, Jpeg, Png, Webp

from proxy.errors import refused

_MATCHERS = (Png(), Jpeg(), Gif(), Webp())
_IMAGE_TYPES = {"image/jpg": "image/jpeg"} | {matcher.mime: matcher.mime for matcher in _MATCHERS}
_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_WHITE_SPACE = b" \t\r\n\f\v"
_PADDINGS = (b"", b"=", b"==")
_LONGEST_HEADER = 256
_HEAD = 32  # characters of base64, more bytes than any of the four types is told by
NEEDS_IMAGE = "must be an http(s) URL or a base64 data URL of a JPEG, PNG, GIF or WebP image (data:image/png;base64,…)"
NEEDS_PDF = "must be a PDF as a base64 data URL (data:application/pdf;base64,…)"


def image_type(head: bytes) -> str | None:
    """The media type of an image, from its first bytes (at least 14); None if it is none of the four."""
    return next((matcher.mime for matcher in _MATCHERS if matcher.match(head)), None)


def image_source(url: str, path: str) -> dict[str, str]:
    """``{"type": "base64", "media_type", "data"}`` of an image. Raises GatewayError naming ``path``."""
    media_type, data = _split(url, path, NEEDS_IMAGE)
    declared = _IMAGE_TYPES.get(media_type)
    if declared is None:
        raise refused(path, NEEDS_IMAGE)
    data = _checked(data, path)
    return {"type": "base64", "media_type": image_type(binascii.a2b_base64(data[:_HEAD])) or declared, "data": data}


def pdf_source(url: str, path: str) -> dict[str, str]:
    """``{"type": "base64", "media_type", "data"}`` of a PDF. Raises GatewayError naming ``path``."""
    media_type, data = _split(url, path, NEEDS_PDF)
    if media_type != "application/pdf":
        raise refused(path, NEEDS_PDF)
    return {"type": "base64", "media_type": media_type, "data": _checked(data, path)}


def _split(url: str, path: str, needs: str) -> tuple[str, str]:
    comma = url.find(",", 0, _LONGEST_HEADER)
    scheme, _, header = url[: max(comma, 0)].lower().partition(":")
    media_type, *parameters = (each.strip() for each in header.split(";"))
    if scheme != "data" or not parameters or parameters[-1] != "base64":
        raise refused(path, needs)
    return media_type, url[comma + 1 :]


def _checked(data: str, path: str) -> str:
    if not data.isascii():
        raise refused(path, "is not valid base64")
    rest = data.encode().translate(None, _ALPHABET)
    if rest not in _PADDINGS:
        rest = rest.translate(None, _WHITE_SPACE)
        data = "".join(data.split())
    if not data or len(data) % 4 or rest not in _PADDINGS or not data.endswith(rest.decode()):
        raise refused(path, "is not valid base64")
    return data

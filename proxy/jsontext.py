"""JSON text to values and back, so that what was not changed keeps its digits.

msgspec reads (it keeps integers of any size and hands over the text of every other number), orjson writes. A lone
surrogate stops both, so on a failed read each is replaced by U+FFFD, written with as many characters, and the text
is read again. Integers beyond Python's own limit of digits stay text, as a ``Float``.
"""

from __future__ import annotations

import json  # noqa: TID251 - the last resort for integers of more than 4,300 digits
import re
from typing import Any, NoReturn

import msgspec
import orjson

_SURROGATES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\\.", re.DOTALL
)
_MOST_DIGITS = 4300  # of an integer that Python converts
_BEFORE_NUMBER = (b"", *(bytes([letter]) for letter in b" \t\r\n[,:"))
_AFTER_NUMBER = (b"", *(bytes([letter]) for letter in b" \t\r\n],}"))
TOO_DEEP = "is nested too deeply"


class JsonError(ValueError):
    """The text is no JSON."""


class Float(float):
    """A number with a point or an exponent, which remembers how it was written."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Float:
        self = super().__new__(cls, text)
        self.text = text
        return self


_decoder = msgspec.json.Decoder(float_hook=Float)


def decode(raw: bytes) -> Any:
    """The value of a JSON text. Raises JsonError."""
    if b"-0" in raw and _has_negative_zero(raw):
        return _decode_odd_integers(without_lone_surrogates(raw))
    try:
        return _decoder.decode(raw)
    except RecursionError:
        raise JsonError(TOO_DEEP) from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _decode_again(without_lone_surrogates(raw))


def _decode_again(raw: bytes) -> Any:
    try:
        return _decoder.decode(raw)
    except RecursionError:
        raise JsonError(TOO_DEEP) from None
    except msgspec.ValidationError:
        return _decode_odd_integers(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise JsonError(str(error)) from None


def _has_negative_zero(raw: bytes) -> bool:
    """Whether an integer -0 may stand in the text; dates in it hold the same two characters."""
    at = raw.find(b"-0")
    while at >= 0:
        if raw[at - 1 : at] in _BEFORE_NUMBER and raw[at + 2 : at + 3] in _AFTER_NUMBER:
            return True
        at = raw.find(b"-0", at + 2)
    return False


def _decode_odd_integers(raw: bytes) -> Any:
    """What msgspec gives up or changes: integers of thousands of digits, and -0."""

    def integer(text: str) -> int | Float:
        return Float(text) if text == "-0" or len(text) >= _MOST_DIGITS else int(text)

    def constant(text: str) -> NoReturn:
        raise JsonError(f"{text} is no JSON")

    try:
        return json.loads(raw, parse_int=integer, parse_float=Float, parse_constant=constant)
    except RecursionError:
        raise JsonError(TOO_DEEP) from None
    except ValueError as error:
        raise JsonError(str(error)) from None


def without_lone_surrogates(raw: bytes) -> bytes:
    """The same text, of the same length, with each lone ``\\udXXX`` replaced by ``\\ufffd``."""

    def replacement(found: re.Match[bytes]) -> bytes:
        text = found.group()
        return rb"\ufffd" if len(text) == 6 else text

    return _SURROGATES.sub(replacement, raw)


def encode(value: Any) -> bytes:
    """The JSON text of a value, numbers written as they were read."""
    try:
        return orjson.dumps(value, default=_as_written)
    except TypeError:  # integers beyond 64 bits, nesting beyond orjson's 254 levels, lone surrogates
        try:
            return msgspec.json.encode(value, enc_hook=_as_raw)
        except UnicodeEncodeError:
            return msgspec.json.encode(_without_surrogates(value), enc_hook=_as_raw)


def _as_written(value: Any) -> orjson.Fragment:
    if type(value) is Float:
        return orjson.Fragment(value.text)
    raise TypeError(f"a {type(value).__name__} is no JSON value")


def _as_raw(value: Any) -> msgspec.Raw:
    if type(value) is Float:
        return msgspec.Raw(value.text.encode())
    raise TypeError(f"a {type(value).__name__} is no JSON value")


def _without_surrogates(value: Any) -> Any:
    """Lone surrogates of a plugin's own text become U+FFFD: they can't be written as UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    return value


def deeper_than(value: Any, levels: int) -> bool:
    """Whether lists and objects stand in each other more than ``levels`` deep."""
    level = [value] if type(value) is dict or type(value) is list else []
    for _ in range(levels):
        if not level:
            return False
        level = [
            item
            for holder in level
            for item in (holder.values() if type(holder) is dict else holder)
            if type(item) is dict or type(item) is list
        ]
    return bool(level)

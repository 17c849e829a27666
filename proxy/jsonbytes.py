"""Where things stand in a JSON text, and cutting them out of it, with nothing re-encoded.

The text has been read by a parser before, so it is known to be valid: these walkers only find places in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import msgspec
import orjson

from proxy.jsontext import TOO_DEEP, JsonError, without_lone_surrogates

_SPACE = re.compile(rb"[ \t\r\n]*")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_KEY = re.compile(rb'[ \t\r\n]*("(?:[^"\\]|\\.)*")[ \t\r\n]*:[ \t\r\n]*', re.DOTALL)
_NEXT_KEY = re.compile(rb'[ \t\r\n]*,[ \t\r\n]*("(?:[^"\\]|\\.)*")[ \t\r\n]*:[ \t\r\n]*', re.DOTALL)
_SCALAR = re.compile(rb"[^,\]}\s]+")
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_AFTER_VALUE = b",}] \t\r\n"
_AFTER_COMPACT = b",}"

_slices = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Member(NamedTuple):
    """A member of an object by its places: ``raw[at:end]`` is the value, ``raw[key_at:end]`` the whole."""

    key: str
    key_at: int
    at: int
    end: int


def top_level(raw: bytes) -> list[Member]:
    """The members of the object that the text is, in order, doubled ones too. Raises JsonError.

    msgspec checks the whole text and gives the slices of the values; the walk over them finds their places, and
    skips by itself only where a slice isn't what stands there (a doubled key).
    """
    readable = raw
    try:
        slices = _slices.decode(raw)
    except RecursionError:
        raise JsonError(TOO_DEEP) from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        readable = without_lone_surrogates(raw)
        try:
            slices = _slices.decode(readable)
        except RecursionError:
            raise JsonError(TOO_DEEP) from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise JsonError(str(error)) from None
    if not raw.isascii():
        try:
            raw.decode()
        except UnicodeDecodeError:
            raise JsonError("is not valid UTF-8") from None
    return _compact(readable, slices) or list(_members(readable, _space(readable, 0), slices))


def _compact(raw: bytes, slices: dict[str, msgspec.Raw]) -> list[Member]:
    """The members of an object that is written without spaces, escapes in its keys and doubled keys; else nothing."""
    found = []
    key_at = 1
    for key, value in slices.items():
        literal = f'"{key}":'.encode()
        at = key_at + len(literal)
        slice_ = memoryview(value)
        end = at + len(slice_)
        if not (raw.startswith(literal, key_at) and raw.startswith(slice_, at) and raw[end] in _AFTER_COMPACT):
            return []
        found.append(Member(key, key_at, at, end))
        key_at = end + 1
    return found if key_at == len(raw) else []


def members(raw: bytes, at: int) -> Iterator[Member]:
    """The members of the object that begins at ``at``; nothing if no object begins there."""
    if raw.startswith(b"{", at):
        yield from _members(raw, at, {})


def items(raw: bytes, at: int) -> Iterator[tuple[int, int]]:
    """The places of the items of the list that begins at ``at``; nothing if no list begins there."""
    if not raw.startswith(b"[", at):
        return
    at = _space(raw, at + 1)
    while raw[at] != 0x5D:
        end = skip(raw, at)
        yield at, end
        at = _next(raw, end)


def _members(raw: bytes, at: int, slices: dict[str, msgspec.Raw]) -> Iterator[Member]:
    found = _KEY.match(raw, at + 1)
    while found is not None:
        value_at = found.end()
        literal = found.group(1)
        key = _text(literal) if b"\\" in literal else literal[1:-1].decode()
        expected = slices.get(key)
        end = -1
        if expected is not None:
            value = memoryview(expected)
            if raw.startswith(value, value_at) and raw[value_at + len(value)] in _AFTER_VALUE:
                end = value_at + len(value)
        if end < 0:
            end = skip(raw, value_at)
        yield Member(key, found.start(1), value_at, end)
        found = _NEXT_KEY.match(raw, end)


def _next(raw: bytes, end: int) -> int:
    """The place of the next item, or of the closing bracket."""
    at = _space(raw, end)
    return _space(raw, at + 1) if raw[at] == 0x2C else at


def _space(raw: bytes, at: int) -> int:
    found = _SPACE.match(raw, at)
    return found.end() if found else at


def _string(raw: bytes, at: int) -> int:
    found = _STRING.match(raw, at)
    if found is None:
        raise JsonError("is malformed")
    return found.end()


def _text(literal: bytes) -> str:
    text: str = orjson.loads(without_lone_surrogates(literal))
    return text


def skip(raw: bytes, at: int) -> int:
    """The end of the value that begins at ``at``."""
    first = raw[at]
    if first == 0x22:
        return _string(raw, at)
    if first not in b"[{":
        found = _SCALAR.match(raw, at)
        if found is None:
            raise JsonError("is malformed")
        return found.end()
    depth = 0
    for token in _TOKEN.finditer(raw, at):
        letter = raw[token.start()]
        if letter in b"[{":
            depth += 1
        elif letter in b"]}":
            depth -= 1
            if depth == 0:
                return token.end()
    raise JsonError("is malformed")


def replaced(raw: bytes, at: int, end: int, value: bytes) -> bytes:
    """The text with ``value`` in the place of ``raw[at:end]``."""
    return b"".join((raw[:at], value, raw[end:]))


def without(raw: bytes, cuts: list[tuple[int, int]]) -> bytes:
    """The text without the given stretches, which come in order and don't overlap."""
    kept, at = [], 0
    for start, end in cuts:
        kept.append(raw[at:start])
        at = end
    kept.append(raw[at:])
    return b"".join(kept)


def cuts_of(raw: bytes, at: int, key: str) -> list[tuple[int, int]]:
    """The stretches to leave out so that the object at ``at`` lacks ``key``, commas and spaces included."""
    found = list(members(raw, at))
    last_kept = max((number for number, member in enumerate(found) if member.key != key), default=-1)
    cuts = [
        (member.key_at, following.key_at) for member, following in pairwise(found[: last_kept + 1]) if member.key == key
    ]
    if last_kept + 1 < len(found):
        start = found[last_kept].end if last_kept >= 0 else found[0].key_at
        cuts.append((start, found[-1].end))
    return cuts

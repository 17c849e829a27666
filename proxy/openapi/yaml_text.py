"""JSON values as YAML that people read: blocks, one member a line, in the order that they have.

Written by hand, since it is a page of code and the library takes a second for the document, at every start. Texts are
JSON literals, which YAML takes as they are but for a few signs; the test reads them back with a YAML parser.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

_PLAIN = re.compile(r"(?!(?:true|false|null|yes|no|on|off|y|n)$)[a-z][a-z0-9_/.-]*", re.IGNORECASE)
"""Texts that YAML can take for nothing but themselves."""
_ESCAPED = re.compile("[^\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
"""Signs that JSON has as they are, and YAML not: controls, line separators, a byte order mark."""


def as_yaml(value: Mapping[str, Any]) -> bytes:
    """A document of JSON values as YAML."""
    lines = _members(value, "") if value else ("{}",)
    return ("\n".join(lines) + "\n").encode()


def _members(value: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, member in value.items():
        yield from _placed(f"{indent}{_text(name)}:", member, indent + "  ")


def _items(value: Sequence[Any], indent: str) -> Iterator[str]:
    for item in value:
        if isinstance(item, Mapping) and item:
            first, *others = _members(item, indent + "  ")
            yield f"{indent}- {first.lstrip()}"
            yield from others
        else:
            yield from _placed(f"{indent}-", item, indent + "  ")


def _placed(head: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        yield head
        yield from _members(value, indent)
    elif isinstance(value, list | tuple) and value:
        yield head
        yield from _items(value, indent)
    else:
        yield f"{head} {_text(value) if isinstance(value, str) else orjson.dumps(value).decode()}"


def _text(value: str) -> str:
    if _PLAIN.fullmatch(value):
        return value
    return _ESCAPED.sub(lambda sign: f"\\u{ord(sign[0]):04x}", orjson.dumps(value).decode())

"""Setting values in a YAML text and leaving every other character as it is.

ruamel.yaml finds the places; the text is cut there. Loading and dumping the whole file would be shorter, and would
indent its lists and move its comments anew: an operator would not recognise his file, nor see in its diff what changed.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson
from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from proxy.yaml_source import Loc

WIDTH = 120
Value = bool | str | list[str] | Mapping[str, Any]


class NoPlace(Exception):
    """The place is not in the text."""


class _Pair(NamedTuple):
    key: ScalarNode
    value: Node


def with_values(text: str, loc: Loc, values: Mapping[str, Value]) -> str:
    """The text with these values set in the mapping at ``loc``, which is made where its parent has none.

    Raises NoPlace. An own value that stood there is replaced, with the comments within it.
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    for name, value in values.items():
        mapping = _at(text, loc)
        if mapping is None:
            return with_values(text, loc[:-1], {str(loc[-1]): dict(values)})
        text = _with_value(text, mapping, name, value, newline)
    return text


def _at(text: str, loc: Loc) -> MappingNode | None:
    """The mapping at a place; None where only its parent is there, or where it is empty."""
    node = YAML(typ="safe", pure=True).compose(text)
    for depth, part in enumerate(loc):
        inner: Node | None = None
        if isinstance(node, SequenceNode) and isinstance(part, int) and part < len(node.value):
            inner = node.value[part]
        elif isinstance(node, MappingNode):
            inner = next((pair.value for pair in _pairs(node) if pair.key.value == part), None)
        if inner is None and depth < len(loc) - 1:
            raise NoPlace
        node = inner
    return node if isinstance(node, MappingNode) and node.value else None


def _with_value(text: str, mapping: MappingNode, name: str, value: Value, newline: str) -> str:
    pairs = _pairs(mapping)
    quoted = pairs[0].key.style == '"'  # as in JSON, which is YAML, too
    indent = " " * pairs[0].key.start_mark.column
    for key, old in pairs:
        if key.value == name:
            start, end = key.end_mark.index, _end(text, key, old)
            return text[:start] + f": {_flow(value, quoted=quoted)}" + text[end:]
    end = _end(text, *pairs[-1])
    if mapping.flow_style:
        entry = f"{_scalar(name, quoted=quoted)}: {_flow(value, quoted=quoted)}"
        column = end - text.rfind("\n", 0, end) - 1
        if column + len(entry) > WIDTH:
            lines = textwrap.wrap(
                *(entry, WIDTH),
                initial_indent=indent,
                subsequent_indent=indent + "  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            return text[:end] + "," + "".join(newline + line for line in lines) + text[end:]
        return text[:end] + f", {entry}" + text[end:]
    line_end = text.find("\n", end)
    lines = [indent + line for line in _block(name, value)]
    if line_end < 0:
        return text + "".join(newline + line for line in lines) + newline
    return text[: line_end + 1] + "".join(line + newline for line in lines) + text[line_end + 1 :]


def _pairs(mapping: MappingNode) -> list[_Pair]:
    return [_Pair(key, value) for key, value in mapping.value if isinstance(key, ScalarNode)]


def _end(text: str, key: Node, value: Node) -> int:
    """Where a value ends, without the comments and empty lines behind it, which a block counts as its own."""
    if isinstance(value, MappingNode) and not value.flow_style and value.value:
        return _end(text, *value.value[-1])
    if isinstance(value, SequenceNode) and not value.flow_style and value.value:
        return _end(text, value.value[-1], value.value[-1])
    if value.start_mark.index == value.end_mark.index:  # nothing: it is given the place of what comes next
        colon = re.compile(r"\s*:").match(text, key.end_mark.index)
        return colon.end() if colon else int(key.end_mark.index)
    end = int(value.end_mark.index)
    return end - 1 if text[end - 1 : end] == "\n" else end


def _block(name: str, value: Value) -> list[str]:
    if not isinstance(value, Mapping):
        return [f"{name}: {_flow(value, quoted=False)}"]
    return [f"{name}:", *(f"  {line}" for inner, each in value.items() for line in _block(inner, each))]


def _flow(value: Value, *, quoted: bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _scalar(value, quoted=quoted)
    if isinstance(value, Mapping):
        inner = (f"{_scalar(name, quoted=quoted)}: {_flow(each, quoted=quoted)}" for name, each in value.items())
        return "{" + ", ".join(inner) + "}"
    return "[" + ", ".join(_scalar(each, quoted=quoted) for each in value) + "]"


def _scalar(text: str, *, quoted: bool) -> str:
    return orjson.dumps(text).decode() if quoted or not re.fullmatch(r"[a-z][a-z0-9_-]*", text) else text


def as_yaml(values: Mapping[str, Value]) -> str:
    """Values as the lines of a block."""
    return "\n".join(line for name, value in values.items() for line in _block(name, value))

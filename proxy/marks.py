"""Removing every ``cache_control`` where the Messages API allows one, for models that have no prompt cache.

Allowed are the top level, system blocks, tools, the blocks of messages, and the blocks inside a tool_result or a
document. Never touched is what is the user's own data: ``input_schema`` of a tool, ``input`` of a tool_use.
"""

from __future__ import annotations

from typing import Any

from proxy.jsonbytes import cuts_of, items, members, without

MARK = "cache_control"
_DEEPEST = 3  # message content, the content of a tool_result, the content of a document in it


def without_marks(raw: bytes) -> bytes:
    """The Messages request without its marks, nothing else changed."""
    if b"cache_control" not in raw and b"\\u" not in raw:
        return raw
    start = raw.index(b"{")
    cuts = cuts_of(raw, start, MARK)
    for member in members(raw, start):
        if member.key in ("system", "tools"):
            cuts += _cuts_of_blocks(raw, member.at)
        elif member.key == "messages":
            for at, _ in items(raw, member.at):
                for inner in members(raw, at):
                    if inner.key == "content":
                        cuts += _cuts_of_blocks(raw, inner.at)
    return without(raw, sorted(cuts))


def _cuts_of_blocks(raw: bytes, at: int, depth: int = _DEEPEST) -> list[tuple[int, int]]:
    cuts: list[tuple[int, int]] = []
    if depth == 0:
        return cuts
    for block, _ in items(raw, at):
        cuts += cuts_of(raw, block, MARK)
        for member in members(raw, block):
            if member.key == "content":
                cuts += _cuts_of_blocks(raw, member.at, depth - 1)
            elif member.key == "source":
                for inner in members(raw, member.at):
                    if inner.key == "content":
                        cuts += _cuts_of_blocks(raw, inner.at, depth - 1)
    return cuts


def remove_marks(body: dict[str, Any]) -> None:
    """The same for a request that is a dict already; it is changed in place."""
    body.pop(MARK, None)
    for blocks in (body.get("system"), body.get("tools")):
        _remove_from_blocks(blocks)
    for message in _dicts(body.get("messages")):
        _remove_from_blocks(message.get("content"))


def _remove_from_blocks(blocks: Any, depth: int = _DEEPEST) -> None:
    for block in _dicts(blocks) if depth else []:
        block.pop(MARK, None)
        _remove_from_blocks(block.get("content"), depth - 1)
        source = block.get("source")
        if isinstance(source, dict):
            _remove_from_blocks(source.get("content"), depth - 1)


def _dicts(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []

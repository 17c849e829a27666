"""Marks for the provider's prompt cache where the client set none: one behind the part of the prompt that never
changes, one behind the newest message, so that the next turn finds everything before it.

Tools stand before the system prompt in the cached prefix, so a mark on the system prompt covers them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from proxy.exchange import Exchange
from proxy.plugin import Plugin, Route, Sees

_CARRY_NONE = ("thinking", "redacted_thinking")


class CacheBreakpoints(Plugin):
    """Sets two cache breakpoints in requests that have none of their own."""

    name: ClassVar[str] = "cache_breakpoints"
    opens_leaves: ClassVar[bool] = False
    routes: ClassVar[frozenset[Route]] = frozenset({Route.CHAT_COMPLETIONS})
    sees: ClassVar[Sees] = "messages"

    async def on_request(self, exchange: Exchange) -> None:
        """Set them, unless the model has no cache, the client wants none or has set its own."""
        if not exchange.model.capabilities.prompt_caching:
            return
        if exchange.headers.get("x-ezat-cache", "").strip().lower() == "off":
            return
        body = exchange.body
        if any(block.get("cache_control") is not None for block in _all_blocks(body)):
            return
        if _has_dropped_mark(exchange.client_body):
            return
        marked = [block for block in (_end_of_constant(body), _end_of_newest(body)) if block is not None]
        if marked:
            exchange.change()
        for block in marked:
            block["cache_control"] = {"type": "ephemeral"}


def _all_blocks(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from _blocks(body.get("system"))
    yield from _blocks(body.get("tools"))
    for message in body["messages"]:
        for block in _blocks(message["content"]):
            yield block
            yield from _blocks(block.get("content"))


def _has_dropped_mark(client_body: dict[str, Any]) -> bool:
    """Whether the client set a mark that went with what carried it: a blank text. Its plan counts all the same."""
    return any(
        isinstance(part, dict) and part.get("cache_control") is not None
        for message in client_body["messages"]
        if isinstance(content := message.get("content"), list)
        for part in content
    )


def _blocks(content: Any) -> list[dict[str, Any]]:
    """The blocks of a content, which may also be a text."""
    return content if isinstance(content, list) else []


def _end_of_constant(body: dict[str, Any]) -> dict[str, Any] | None:
    blocks = _blocks(body.get("system")) or _blocks(body.get("tools"))
    return blocks[-1] if blocks else None


def _end_of_newest(body: dict[str, Any]) -> dict[str, Any] | None:
    for message in reversed(body["messages"]):
        for block in _blocks(message["content"])[::-1]:
            if block["type"] not in _CARRY_NONE:
                return block
    return None

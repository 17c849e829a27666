"""The messages of a request to the system prompt and the conversation.

Nothing is ever invented: blank text is dropped, then messages left empty, and what then stands side by side is merged.
For each block the place it came from is kept (an ``Origin``), and no more: paths are made when somebody asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plugins.chat_completions.content import Block, Where, is_blank, parts_to_blocks
from plugins.chat_completions.tables import NO_LEGACY_CALL, NO_LEGACY_ROLE
from plugins.chat_completions.tools import call_to_tool_use, safe_id
from plugins.chat_completions.values import wrong
from proxy.errors import refused
from proxy.models import Capabilities

Origin = tuple[int, str, Any]
"""The index of the message, then what of it, and where: ``("content", None)`` its text, ``("part", index)``,
``("call", index)``, ``("result", indexes of the parts | None)``."""

_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(slots=True)
class Conversation:
    """The system blocks and the messages, and beside each block its origin."""

    capabilities: Capabilities
    system: list[Block] = field(default_factory=list)
    system_origins: list[Origin] = field(default_factory=list)
    messages: list[Block] = field(default_factory=list)
    origins: list[list[Origin]] = field(default_factory=list)
    _role: str | None = None
    _late_results: set[int] = field(default_factory=set)
    """Messages in which a tool result stands behind something else."""

    def add_text(self, message: Mapping[str, Any], index: int, role: str, where: Where) -> None:
        """Add the content of a message, text or parts."""
        content = message.get("content")
        if isinstance(content, str):
            if not is_blank(content):
                blocks, origins = self._open(role)
                blocks.append({"type": "text", "text": content})
                origins.append((index, "content", None))
        elif isinstance(content, list):
            added, places = parts_to_blocks(content, index, where, self.capabilities)
            if added:
                blocks, origins = self._open(role)
                blocks += added
                origins += [(index, "part", place) for place in places]
        elif content is not None:
            raise wrong(f"messages[{index}].content", content, "a string or a list of parts")

    def add_assistant(self, message: Mapping[str, Any], index: int) -> None:
        """Add the text of an assistant message, then its calls."""
        if message.get("function_call") is not None:
            raise refused(f"messages[{index}].function_call", NO_LEGACY_CALL)
        self.add_text(message, index, "assistant", "assistant")
        calls = message.get("tool_calls")
        if not calls and (calls is None or isinstance(calls, list)):
            return
        if not isinstance(calls, list):
            raise wrong(f"messages[{index}].tool_calls", calls, "a list")
        blocks, origins = self._open("assistant")
        for number, call in enumerate(calls):
            blocks.append(call_to_tool_use(call, index, number))
            origins.append((index, "call", number))

    def add_result(self, message: Mapping[str, Any], index: int) -> None:
        """Add the result that a tool message holds; one without content is a result without content."""
        id, content = message.get("tool_call_id"), message.get("content")
        if not isinstance(id, str):
            raise wrong(f"messages[{index}].tool_call_id", id, "a string")
        result: Block = {"type": "tool_result", "tool_use_id": safe_id(id)}
        places = None
        if isinstance(content, str):
            if not is_blank(content):
                result["content"] = content
        elif isinstance(content, list):
            added, places = parts_to_blocks(content, index, "tool", self.capabilities)
            if added:
                result["content"] = added
            _lift_mark(content, added, result)
        elif content is not None:
            raise wrong(f"messages[{index}].content", content, "a string or a list of parts")
        blocks, origins = self._open("user")
        if blocks and blocks[-1]["type"] != "tool_result":
            self._late_results.add(len(self.messages) - 1)
        blocks.append(result)
        origins.append((index, "result", places))

    def finish(self) -> None:
        """Put tool results first, and strip the end of a final assistant message."""
        for at in self._late_results:
            blocks, origins = self.messages[at]["content"], self.origins[at]
            order = sorted(range(len(blocks)), key=lambda place: blocks[place]["type"] != "tool_result")
            blocks[:] = [blocks[place] for place in order]
            origins[:] = [origins[place] for place in order]
        if self._role == "assistant":
            last = self.messages[-1]["content"][-1]
            if last["type"] == "text":
                last["text"] = last["text"].rstrip()

    def _open(self, role: str) -> tuple[list[Block], list[Origin]]:
        """The message of this side to add blocks to: the last one, or a new one."""
        if role == "system":
            return self.system, self.system_origins
        if role != self._role:
            self._role = role
            self.messages.append({"role": role, "content": []})
            self.origins.append([])
        return self.messages[-1]["content"], self.origins[-1]


def translate_messages(messages: Any, capabilities: Capabilities) -> Conversation:
    """The conversation of a request's ``messages``. Raises GatewayError."""
    if not isinstance(messages, list):
        raise wrong("messages", messages, "a list")
    conversation = Conversation(capabilities)
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise refused(f"messages[{index}]", "must be an object")
        role = message.get("role")
        if role == "user":
            conversation.add_text(message, index, "user", "user")
        elif role == "assistant":
            conversation.add_assistant(message, index)
        elif role == "tool":
            conversation.add_result(message, index)
        elif role in ("system", "developer"):
            conversation.add_text(message, index, "system", "system")
        elif role == "function":
            raise refused(f"messages[{index}].role", NO_LEGACY_ROLE)
        else:
            raise wrong(f"messages[{index}].role", role, f"one of {', '.join(_ROLES)}")
    if not conversation.messages:
        raise refused("messages", "must contain at least one user message")
    conversation.finish()
    return conversation


def _lift_mark(parts: list[Any], blocks: list[Block], result: Block) -> None:
    """Move the last breakpoint among a tool message's parts to the result: inside of it the provider refuses it."""
    for part in parts:
        mark = part.get("cache_control")
        if mark is not None:
            result["cache_control"] = mark
    if "cache_control" in result:
        for block in blocks:
            block.pop("cache_control", None)

"""A whole message becomes a completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.dialects.openai import completion
from proxy.exchange import Exchange
from proxy.jsontext import encode

FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}


def stop_reason_to_finish_reason(reason: object) -> str:
    """OpenAI's word for why an answer ended; an unknown reason is a ``stop``."""
    return FINISH_REASONS.get(reason, "stop") if isinstance(reason, str) else "stop"


def message_to_completion(message: Mapping[str, Any], exchange: Exchange) -> dict[str, Any]:
    """The completion of a message, with the usage that the engine has counted."""
    texts, calls = [], []
    for block in message.get("content") or ():
        kind = block.get("type")
        if kind == "text":
            texts.append(block.get("text") or "")
        elif kind == "tool_use":
            arguments = encode(block.get("input") or {}).decode()
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
    text = "".join(texts)
    said: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        said["content"] = text or None
        said["tool_calls"] = calls
    return completion(exchange, said, stop_reason_to_finish_reason(message.get("stop_reason")), exchange.usage)

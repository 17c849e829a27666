"""From a path in the translated body (``messages.2.content.1``) to the client's own (``messages[3].content[1]``).

Providers name such paths in their refusals. They also put the kind of a block into them
(``messages.0.content.1.image.source``, ``tools.0.custom.name``), so a block's field is looked for in the rest of the
path instead of at one place in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plugins.chat_completions.messages import Conversation, Origin

_FIXED = {
    "model": "model",
    "stream": "stream",
    "temperature": "temperature",
    "top_p": "top_p",
    "thinking": "reasoning_effort",
    "output_config.effort": "reasoning_effort",
    "output_config.format.schema": "response_format.json_schema.schema",
    "output_config.format": "response_format",
    "output_config": "response_format",
    "tool_choice.name": "tool_choice.function.name",
    "tool_choice.disable_parallel_tool_use": "parallel_tool_calls",
    "tool_choice": "tool_choice",
}
_TOOL = {
    "input_schema": ".function.parameters",
    "name": ".function.name",
    "description": ".function.description",
    "strict": ".function.strict",
    "cache_control": ".cache_control",
}
_TEXT = {"cache_control": ".cache_control", "text": ".text"}
_PARTS = {
    "text": _TEXT,
    "image": {"source": ".image_url.url", "cache_control": ".cache_control"},
    "document": {"source": ".file.file_data", "cache_control": ".cache_control"},
}
_CALL = {"id": ".id", "name": ".function.name", "input": ".function.arguments"}
_KEEP_GOING = (".function.parameters", ".cache_control", "response_format.json_schema.schema")
"""The client's own objects: what the provider names inside of them is at the same place in the client's."""


def client_path(
    path: str, client_body: Mapping[str, Any], sent: Mapping[str, Any], origins: Conversation
) -> str | None:
    """The client's path for one in the body sent, the nearest that there is; None for what it can't place."""
    first, *rest = path.split(".")
    if first == "messages":
        return _message(rest, sent, origins)
    if first == "system":
        return _system(rest, origins.system_origins)
    if first == "tools":
        return _tool(rest, sent)
    if first == "max_tokens":
        return "max_completion_tokens" if client_body.get("max_completion_tokens") is not None else "max_tokens"
    if first == "stop_sequences":
        return _stop(rest, client_body.get("stop"))
    return _fixed(path)


def _message(rest: Sequence[str], sent: Mapping[str, Any], origins: Conversation) -> str | None:
    if not rest:
        return "messages"
    if (at := _index(rest[0], origins.origins)) is None:
        return None
    places = origins.origins[at]
    block_at = _index(rest[2], places) if len(rest) > 2 and rest[1] == "content" else None
    if block_at is None:
        return f"messages[{places[0][0]}]" + (".role" if rest[1:] == ["role"] else "")
    block = sent["messages"][at]["content"][block_at]
    return _block(places[block_at], block, rest[3:])


def _block(origin: Origin, block: Mapping[str, Any], rest: Sequence[str]) -> str:
    message, kind, place = origin
    if kind == "content":
        return f"messages[{message}].content"
    if kind == "part":
        return f"messages[{message}].content[{place}]{_field(rest, _PARTS[block['type']])}"
    if kind == "call":
        return f"messages[{message}].tool_calls[{place}]{_field(rest, _CALL)}"
    return _result(message, place, block, rest)


def _result(message: int, places: Sequence[int] | None, block: Mapping[str, Any], rest: Sequence[str]) -> str:
    if "tool_use_id" in rest:
        return f"messages[{message}].tool_call_id"
    if "content" not in rest:
        return f"messages[{message}]"
    inside = rest[rest.index("content") + 1 :]
    at = _index(inside[0], places) if inside and places else None
    if at is None or places is None:
        return f"messages[{message}].content"
    return _block((message, "part", places[at]), block["content"][at], inside[1:])


def _system(rest: Sequence[str], places: Sequence[Origin]) -> str | None:
    if not places or (rest and (at := _index(rest[0], places)) is None):
        return None
    if not rest:
        return f"messages[{places[0][0]}]"
    return _block(places[at or 0], {"type": "text"}, rest[1:])


def _tool(rest: Sequence[str], sent: Mapping[str, Any]) -> str | None:
    if not rest:
        return "tools"
    at = _index(rest[0], sent.get("tools", ()))
    return None if at is None else f"tools[{at}]{_field(rest[1:], _TOOL)}"


def _stop(rest: Sequence[str], stop: Any) -> str:
    if rest and isinstance(stop, list):
        kept = [place for place, text in enumerate(stop) if text]
        at = _index(rest[0], kept)
        return "stop" if at is None else f"stop[{kept[at]}]"
    return "stop"


def _fixed(path: str) -> str | None:
    known = path
    while known not in _FIXED:
        if "." not in known:
            return None
        known = known.rpartition(".")[0]
    own = _FIXED[known]
    return own + (_dotted(path[len(known) :].split(".")[1:]) if own in _KEEP_GOING else "")


def _field(rest: Sequence[str], fields: Mapping[str, str]) -> str:
    """The client's name for the field that the rest of a path names, if it names one."""
    for at, name in enumerate(rest):
        if name in fields:
            own = fields[name]
            return own + (_dotted(rest[at + 1 :]) if own in _KEEP_GOING else "")
    return ""


def _dotted(names: Sequence[str]) -> str:
    return "".join(f"[{name}]" if name.isdecimal() else f".{name}" for name in names)


def _index(text: str, of: Sequence[Any]) -> int | None:
    """The index that is written there, if there is such an item."""
    at = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1
    return at if 0 <= at < len(of) else None

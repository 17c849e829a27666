"""Tools, the choice among them, and their calls.

A call's id that the Messages API refuses gets a new one, made of nothing but the old one, so that the call, its result
and every later turn agree without a memory. The new ids have a form of their own; an id that has this form already
gets a new one too, and so no new id can meet one that was left alone.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from plugins.chat_completions.content import Block, is_blank
from plugins.chat_completions.tables import ONLY_FUNCTIONS
from plugins.chat_completions.values import wrong
from proxy.errors import refused
from proxy.jsontext import JsonError, decode, deeper_than
from proxy.models import Capabilities

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_MARK = "_ez"
_HASH = 16  # hexadecimal digits
_HEX = frozenset("0123456789abcdef")
_LONGEST_STEM = 64
_DEEPEST_ARGUMENTS = 200
_PLAIN_CHOICES = {"auto": "auto", "none": "none", "required": "any"}
_FUNCTION_TYPES = (None, "function")


def tools_to_tools(tools: Any) -> list[Block]:
    """The tools of a request; empty for null. Schemas are embedded as they are. Raises GatewayError."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise wrong("tools", tools, "a list")
    return [_tool(tool, index) for index, tool in enumerate(tools)]


def _tool(tool: Any, index: int) -> Block:
    if not isinstance(tool, dict):
        raise refused(f"tools[{index}]", "must be an object")
    if tool.get("type") not in _FUNCTION_TYPES:
        raise refused(f"tools[{index}].type", ONLY_FUNCTIONS)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise wrong(f"tools[{index}].function", function, "an object")
    name, description, strict = function.get("name"), function.get("description"), function.get("strict")
    if not isinstance(name, str):
        raise wrong(f"tools[{index}].function.name", name, "a string")
    block: Block = {"name": name}
    if description is not None:
        if not isinstance(description, str):
            raise wrong(f"tools[{index}].function.description", description, "a string")
        block["description"] = description
    block["input_schema"] = _input_schema(function.get("parameters"), index)
    if strict is not None:
        if not isinstance(strict, bool):
            raise wrong(f"tools[{index}].function.strict", strict, "a boolean")
        if strict:
            block["strict"] = True
    for holder, path in ((tool, "cache_control"), (function, "function.cache_control")):
        mark = holder.get("cache_control")
        if mark is not None:
            if not isinstance(mark, dict):
                raise wrong(f"tools[{index}].{path}", mark, "an object")
            block.setdefault("cache_control", mark)
    return block


def _input_schema(parameters: Any, index: int) -> dict[str, Any]:
    if parameters is None or parameters == {}:
        return {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise wrong(f"tools[{index}].function.parameters", parameters, "an object")
    return parameters if parameters.get("type") is not None else {**parameters, "type": "object"}


def choice_to_choice(choice: Any, parallel: bool | None, capabilities: Capabilities) -> dict[str, Any] | None:
    """The tool_choice of a request that has tools; None where nothing is to be sent. Raises GatewayError."""
    if choice is None:
        return {"type": "auto", "disable_parallel_tool_use": True} if parallel is False else None
    chosen = _chosen(choice)
    if chosen is None:
        raise refused("tool_choice", 'use "auto", "none", "required" or a named function')
    if chosen["type"] in ("any", "tool") and not capabilities.forced_tool_choice:
        raise refused("tool_choice", 'this model can\'t be forced to call a tool; use "auto" or "none"')
    if parallel is False and chosen["type"] != "none":
        chosen["disable_parallel_tool_use"] = True
    return chosen


def _chosen(choice: Any) -> dict[str, Any] | None:
    if isinstance(choice, str):
        kind = _PLAIN_CHOICES.get(choice)
        return None if kind is None else {"type": kind}
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            return {"type": "tool", "name": name}
    return None


def call_to_tool_use(call: Any, message: int, index: int) -> Block:
    """The tool_use block of an entry of ``tool_calls``. Raises GatewayError."""
    if not isinstance(call, dict):
        raise refused(f"messages[{message}].tool_calls[{index}]", "must be an object")
    if call.get("type") not in _FUNCTION_TYPES:
        raise refused(f"messages[{message}].tool_calls[{index}].type", ONLY_FUNCTIONS)
    id, function = call.get("id"), call.get("function")
    if not isinstance(id, str):
        raise wrong(f"messages[{message}].tool_calls[{index}].id", id, "a string")
    if not isinstance(function, dict):
        raise wrong(f"messages[{message}].tool_calls[{index}].function", function, "an object")
    name = function.get("name")
    if not isinstance(name, str):
        raise wrong(f"messages[{message}].tool_calls[{index}].function.name", name, "a string")
    arguments = _arguments(function.get("arguments"))
    if isinstance(arguments, str):
        raise refused(f"messages[{message}].tool_calls[{index}].function.arguments", arguments)
    return {"type": "tool_use", "id": safe_id(id), "name": name, "input": arguments}


def _arguments(text: Any) -> dict[str, Any] | str:
    """The arguments of a call, or what is wrong with them."""
    if text is None:
        return {}
    if not isinstance(text, str):
        return "must be a string that holds a JSON object"
    if is_blank(text):
        return {}
    try:
        value = decode(text.encode())
    except (JsonError, UnicodeEncodeError):
        return "must be a string that holds a JSON object, which this is not"
    if not isinstance(value, dict):
        return "must be a string that holds a JSON object"
    if text.count("{") + text.count("[") > _DEEPEST_ARGUMENTS and deeper_than(value, _DEEPEST_ARGUMENTS):
        return "is nested too deeply"
    return value


def safe_id(id: str) -> str:
    """The id of a call as the Messages API takes it: itself, or where it must be, another made from it."""
    if _is_plain(id) and not _is_made(id):
        return id
    stem = "".join(sign if sign in _PLAIN else "_" for sign in id[:_LONGEST_STEM])
    return f"{stem}{_MARK}{blake2b(id.encode('utf-8', 'surrogatepass'), digest_size=_HASH // 2).hexdigest()}"


def _is_plain(id: str) -> bool:
    return id != "" and _PLAIN.issuperset(id)


def _is_made(id: str) -> bool:
    return _MARK in id and id[-_HASH - len(_MARK) : -_HASH] == _MARK and _HEX.issuperset(id[-_HASH:])

"""The rules of the Messages API that ``CheckingUpstream`` adds to the demo upstream's.

The demo checks what every provider checks, and is patient with the rest, since real clients are to be served. Here
stands what the strictest of them refuse: a field or block that the API doesn't know, turns that don't alternate,
thinking together with what it excludes. Rules that only some models have (no prefill, no forced choice) stand nowhere:
they are the configuration's to say.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from proxy.demo.checks import TOOL_NAME
from proxy.demo.prompt import Json, Piece, pieces
from proxy.demo.refusal import Refusal, need

WITHOUT_SAMPLING = "2026-10-21"
"""The API version from which on the sampling fields are refused, whatever their value."""
SAMPLING = ("temperature", "top_p", "top_k")
SMALLEST_BUDGET = 1024
LOWEST_TOP_P_WITH_THINKING = 0.95


def _fields(names: str) -> frozenset[str]:
    return frozenset(names.split())


_COUNTED = _fields("model messages system tools tool_choice thinking output_config cache_control speed")
_REQUEST = _COUNTED | _fields(
    "max_tokens stream stop_sequences metadata service_tier inference_geo container context_management mcp_servers "
    "diagnostics user_profile_id temperature top_p top_k"
)
_IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_MARK = _fields("type ttl")
_CHOICE = {
    "auto": _fields("type disable_parallel_tool_use"),
    "any": _fields("type disable_parallel_tool_use"),
    "tool": _fields("type name disable_parallel_tool_use"),
    "none": _fields("type"),
}
_FORCED = ("any", "tool")
_BLOCKS = {
    "text": _fields("type text cache_control citations"),
    "image": _fields("type source cache_control transformations"),
    "document": _fields("type source cache_control title context citations"),
    "tool_use": _fields("type id name input cache_control caller toolset_name"),
    "tool_result": _fields("type tool_use_id content is_error cache_control"),
    "thinking": _fields("type thinking signature"),
    "redacted_thinking": _fields("type data"),
}
"""The fields of the blocks that a client's own requests are made of; what servers add is the provider's to judge."""
_TOOL = _fields(
    "type name description input_schema strict cache_control input_examples eager_input_streaming defer_loading "
    "allowed_callers"
)
_THINKING = {
    "adaptive": _fields("type display"),
    "enabled": _fields("type budget_tokens display"),
    "disabled": _fields("type"),
    "between_tools": _fields("type"),
}


def check_strictly(request: Json, version: str, *, counting: bool = False) -> None:
    """What is left to check of a request that the demo's checks let pass.

    ``version`` is the header ``anthropic-version``; ``counting`` for count_tokens. Raises Refusal in the API's words.
    """
    need(version != "", "anthropic-version: header is required")
    _known(request, _COUNTED if counting else _REQUEST, "")
    _check_turns(request["messages"])
    for piece in pieces(request):
        _check_piece(piece)
    _check_choice(request.get("tool_choice"))
    _check_output_config(request.get("output_config"))
    _check_sampling(request, version)
    _check_thinking(request)


def _known(value: Mapping[str, Any], fields: Collection[str], at: str) -> None:
    for name in value:
        need(name in fields, f"{at}{name}: Extra inputs are not permitted")


def _check_turns(messages: list[Json]) -> None:
    """Users and assistants take turns; the API itself would merge what stands side by side, others refuse it."""
    before = None
    for number, message in enumerate(messages):
        _known(message, ("role", "content"), f"messages.{number}.")
        role = message["role"]
        need(
            role == "system" or role != before,
            f"messages.{number}.role: roles must alternate between 'user' and 'assistant'",
        )
        before = before if role == "system" else role


def _check_piece(piece: Piece) -> None:
    if piece.role == "tools":
        return _check_tool(piece)
    for at, block in _with_inner(piece):
        kind = block["type"]
        if kind in _BLOCKS:
            _known(block, _BLOCKS[kind], f"{at}.{kind}.")
        _check_mark(block, at)
        if kind == "tool_use":
            need(
                TOOL_NAME.fullmatch(block["name"]) is not None,
                f"{at}.tool_use.name: String should match pattern '^[a-zA-Z0-9_-]{{1,128}}$'",
            )
        elif kind in _SOURCES:
            _SOURCES[kind](block["source"], f"{at}.{kind}.source")


def _with_inner(piece: Piece) -> Iterator[tuple[str, Json]]:
    yield piece.path, piece.block
    inner = piece.block.get("content") if piece.block["type"] == "tool_result" else None
    for number, block in enumerate(inner if isinstance(inner, list) else ()):
        yield f"{piece.path}.tool_result.content.{number}", block


def _check_tool(piece: Piece) -> None:
    tool = piece.block
    if tool.get("type") not in (None, "custom"):
        return
    at = f"{piece.path}.custom."
    _known(tool, _TOOL, at)
    need(isinstance(tool.get("description", ""), str), f"{at}description: Input should be a valid string")
    need(isinstance(tool.get("strict", False), bool), f"{at}strict: Input should be a valid boolean")
    _check_mark(tool, piece.path)


def _check_mark(block: Json, at: str) -> None:
    mark = block.get("cache_control")
    if mark is not None:
        _known(mark, _MARK, f"{at}.cache_control.")


def _check_image(source: Json, at: str) -> None:
    if source.get("type") == "base64":
        expected = ", ".join(f"'{name}'" for name in _IMAGE_TYPES)
        need(source.get("media_type") in _IMAGE_TYPES, f"{at}.base64.media_type: Input should be one of {expected}")
        return _check_base64(source.get("data"), at)
    need(source.get("type") in ("url", "file"), f"{at}.type: Input should be 'base64', 'url' or 'file'")


def _check_document(source: Json, at: str) -> None:
    if source.get("type") == "base64":
        fits = source.get("media_type") == "application/pdf"
        need(fits, f"{at}.base64.media_type: Input should be 'application/pdf'")
        return _check_base64(source.get("data"), at)
    known = source.get("type") in ("text", "url", "file", "content")
    need(known, f"{at}.type: Input should be 'base64', 'text', 'url', 'file' or 'content'")


_SOURCES: dict[str, Callable[[Json, str], None]] = {"image": _check_image, "document": _check_document}


def _check_base64(data: object, at: str) -> None:
    try:
        decoded = base64.b64decode(data, validate=True) if isinstance(data, str) else b""
    except (binascii.Error, ValueError):
        decoded = b""
    need(bool(decoded), f"{at}.base64.data: Input should be valid base64 of at least one byte")


def _check_choice(choice: Json | None) -> None:
    if choice is None:
        return
    _known(choice, _CHOICE[choice["type"]], f"tool_choice.{choice['type']}.")
    disabled = choice.get("disable_parallel_tool_use", False)
    need(isinstance(disabled, bool), "tool_choice.disable_parallel_tool_use: Input should be a valid boolean")


def _check_output_config(output_config: Json | None) -> None:
    if output_config is None:
        return
    _known(output_config, ("effort", "format"), "output_config.")
    if output_config.get("format") is not None:
        _known(output_config["format"], ("type", "schema"), "output_config.format.")


def _check_sampling(request: Json, version: str) -> None:
    for name in SAMPLING:
        value = request.get(name)
        if value is None:
            continue
        need(version < WITHOUT_SAMPLING, f"{name}: Extra inputs are not permitted")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        need(is_number, f"{name}: Input should be a valid number")
        need(value >= 0, f"{name}: Input should be greater than or equal to 0")
        need(name == "top_k" or value <= 1, f"{name}: Input should be less than or equal to 1")


def _check_thinking(request: Json) -> None:
    thinking = request.get("thinking")
    if thinking is None:
        return
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    expected = ", ".join(f"'{name}'" for name in _THINKING)
    if kind not in _THINKING:
        raise Refusal(f"thinking.type: Input should be one of {expected}")
    _known(thinking, _THINKING[kind], f"thinking.{kind}.")
    if kind == "enabled":
        _check_budget(thinking.get("budget_tokens"), request.get("max_tokens"))
    if kind in ("disabled", "between_tools"):
        return
    forced = (request.get("tool_choice") or {}).get("type") in _FORCED
    need(not forced, "Thinking may not be enabled when tool_choice forces tool use.")
    need(request.get("temperature") in (None, 1), "`temperature` may only be set to 1 when thinking is enabled.")
    need(request.get("top_k") is None, "`top_k` must be unset when thinking is enabled.")
    top_p = request.get("top_p")
    roomy = top_p is None or top_p >= LOWEST_TOP_P_WITH_THINKING
    need(roomy, f"`top_p` must be at least {LOWEST_TOP_P_WITH_THINKING} or unset when thinking is enabled.")


def _check_budget(budget: object, max_tokens: int | None) -> None:
    at = "thinking.enabled.budget_tokens"
    if not isinstance(budget, int) or isinstance(budget, bool):
        raise Refusal(f"{at}: Input should be a valid integer")
    need(budget >= SMALLEST_BUDGET, f"{at}: Input should be greater than or equal to {SMALLEST_BUDGET}")
    need(max_tokens is None or budget < max_tokens, "`max_tokens` must be greater than `thinking.budget_tokens`.")

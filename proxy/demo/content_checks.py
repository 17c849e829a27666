"""Checks of messages: roles, content blocks, and that tool results answer the tool calls of the message before."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from proxy.demo.prompt import Json, Piece, content_pieces
from proxy.demo.refusal import Refusal, need

ROLES = ("user", "assistant", "system")
ID = re.compile(r"[a-zA-Z0-9_-]+")
PATTERN = "String should match pattern '^[a-zA-Z0-9_-]+$'"


def check_messages(messages: Any) -> None:
    """Raises Refusal naming the first message or block that is wrong."""
    need(isinstance(messages, list), "messages: Input should be a valid list")
    need(bool(messages), "messages: at least one message is required")
    for number, message in enumerate(messages):
        at = f"messages.{number}"
        need(isinstance(message, dict), f"{at}: Input should be a valid dictionary")
        need(message.get("role") in ROLES, f"{at}.role: Input should be 'user', 'assistant' or 'system'")
        need("content" in message, f"{at}.content: Field required")
        is_prefill = number == len(messages) - 1 and message["role"] == "assistant"
        if message["role"] != "system" and not is_prefill:  # agents send empty system messages that only hold settings
            filled = message["content"] not in ("", [])
            need(
                filled,
                f"{at}: all messages must have non-empty content except for the optional final assistant message",
            )
        check_content(message["content"], f"{at}.content", message["role"])
    _check_final(messages[-1])
    _check_results(messages)


def check_content(content: Any, path: str, role: str) -> None:
    """A string that isn't blank, or a list of blocks that may stand in a message of this role."""
    if isinstance(content, str):
        need(content == "" or content.strip() != "", f"{path}: text content blocks must contain non-whitespace text")
        return
    need(isinstance(content, list), f"{path}: Input should be a valid string or list")
    for number, block in enumerate(content):
        at = f"{path}.{number}"
        need(isinstance(block, dict), f"{at}: Input should be a valid dictionary")
        kind = block.get("type")
        need(isinstance(kind, str), f"{at}.type: Field required")
        _check_place(kind, role, at)
        check = BLOCK_CHECKS.get(kind)
        if check is not None:
            check(block, at)


def _check_place(kind: str, role: str, at: str) -> None:
    if role == "system":
        need(kind == "text", f"{at}.type: Input should be 'text'")
    if kind == "tool_use":
        need(role == "assistant", f"{at}: `tool_use` blocks can only be in `assistant` messages")
    if kind == "tool_result":
        need(role == "user", f"{at}: `tool_result` blocks can only be in `user` messages")


def _check_text(block: Json, at: str) -> None:
    text = block.get("text")
    if not isinstance(text, str):
        raise Refusal(f"{at}.text.text: Field required")
    if text == "" and block.get("cache_control") is not None:
        raise Refusal(f"{at}: cache_control cannot be set for empty text blocks")
    need(text != "", f"{at}: text content blocks must be non-empty")
    need(text.strip() != "", f"{at}: text content blocks must contain non-whitespace text")


def _check_source(block: Json, at: str) -> None:
    need(isinstance(block.get("source"), dict), f"{at}.{block['type']}.source: Field required")


def _check_tool_use(block: Json, at: str) -> None:
    need(_is_id(block.get("id")), f"{at}.tool_use.id: {PATTERN}")
    need(isinstance(block.get("name"), str), f"{at}.tool_use.name: Field required")
    need(isinstance(block.get("input"), dict), f"{at}.tool_use.input: Input should be a valid dictionary")


def _check_tool_result(block: Json, at: str) -> None:
    need(_is_id(block.get("tool_use_id")), f"{at}.tool_result.tool_use_id: {PATTERN}")
    if block.get("content") is not None and not isinstance(block["content"], str):
        check_content(block["content"], f"{at}.tool_result.content", "tool")


BLOCK_CHECKS: dict[str, Callable[[Json, str], None]] = {
    "text": _check_text,
    "image": _check_source,
    "document": _check_source,
    "tool_use": _check_tool_use,
    "tool_result": _check_tool_result,
}


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and ID.fullmatch(value) is not None


def _check_final(message: Json) -> None:
    if message["role"] != "assistant":
        return
    content = content_pieces(message["content"], "", "assistant")
    text = content[-1].block.get("text", "") if content else ""
    need(text == text.rstrip(), "messages: final assistant content cannot end with trailing whitespace")


def _check_results(messages: list[Json]) -> None:
    """Every call is answered once, in the turn right after it, and before anything else in that turn."""
    open_calls: dict[str, str] = {}  # id to path, of the assistant's turn before
    known: set[str] = set()
    for role, blocks in _turns(messages):
        if role == "assistant":
            _refuse_unanswered(open_calls)
            open_calls = _calls(blocks, known)
            continue
        results = _leading_results(blocks)
        for path, block in results:
            call = block["tool_use_id"]
            known_call = call in open_calls
            need(
                known_call,
                f"{path}: unexpected `tool_use_id` in a `tool_result` block: {call}. It answers no open call",
            )
            del open_calls[call]
        _refuse_unanswered(open_calls)
        open_calls = {}
    _refuse_unanswered(open_calls)


def _turns(messages: list[Json]) -> Iterator[tuple[str, list[Piece]]]:
    """Consecutive messages of one role are one turn, as to the API; system messages stand between turns."""
    turn: list[Piece] = []
    for number, message in enumerate(messages):
        if message["role"] == "system":
            continue
        blocks = content_pieces(message["content"], f"messages.{number}.content", message["role"])
        if turn and turn[0].role != message["role"]:
            yield turn[0].role, turn
            turn = []
        turn.extend(blocks)
    if turn:
        yield turn[0].role, turn


def _calls(blocks: list[Piece], known: set[str]) -> dict[str, str]:
    calls = {}
    for piece in blocks:
        if piece.block["type"] != "tool_use":
            continue
        call = piece.block["id"]
        need(call not in known, f"{piece.path}: `tool_use` ids must be unique")
        known.add(call)
        calls[call] = piece.path
    return calls


def _leading_results(blocks: list[Piece]) -> list[tuple[str, Json]]:
    results: list[tuple[str, Json]] = []
    for place, piece in enumerate(blocks):
        if piece.block["type"] != "tool_result":
            continue
        need(place == len(results), f"{piece.path}: `tool_result` blocks must stand before all other content")
        results.append((piece.path, piece.block))
    return results


def _refuse_unanswered(open_calls: dict[str, str]) -> None:
    if open_calls:
        path = next(iter(open_calls.values()))
        ids = ", ".join(open_calls)
        raise Refusal(f"{path}: `tool_use` ids without `tool_result` blocks immediately after: {ids}")

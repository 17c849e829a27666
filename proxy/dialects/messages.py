"""The rim of Anthropic's Messages format, and what a message looks like whole and as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.dialects import Wording
from proxy.document import Event
from proxy.errors import GatewayError, Kind
from proxy.exchange import Exchange
from proxy.jsontext import decode, encode
from proxy.plugin import Format

WORDINGS = {
    Kind.INVALID_REQUEST: Wording(400, "invalid_request_error"),
    Kind.AUTHENTICATION: Wording(401, "authentication_error"),
    Kind.BILLING: Wording(402, "billing_error"),
    Kind.PERMISSION: Wording(403, "permission_error"),
    Kind.MODEL_NOT_FOUND: Wording(404, "not_found_error"),
    Kind.PATH_NOT_FOUND: Wording(404, "not_found_error"),
    Kind.METHOD_NOT_ALLOWED: Wording(405, "invalid_request_error"),
    Kind.TOO_LARGE: Wording(413, "request_too_large"),
    Kind.RATE_LIMIT: Wording(429, "rate_limit_error"),
    Kind.INTERNAL: Wording(500, "api_error"),
    Kind.UNAVAILABLE: Wording(503, "overloaded_error"),
    Kind.TIMEOUT: Wording(504, "timeout_error"),
    Kind.OVERLOADED: Wording(529, "overloaded_error"),
}
_TYPES = {wording.type for wording in WORDINGS.values()}
_DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


class Messages:
    """The dialect of ``/v1``."""

    format: Format = "messages"
    tail = b""
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'

    def wording(self, kind: Kind) -> Wording:
        return WORDINGS[kind]

    def error_body(self, error: GatewayError, request_id: str) -> bytes:
        own = WORDINGS[error.kind].type
        said = dict(error.provider) if error.provider is not None else {}
        kind, message = said.get("type"), said.get("message")
        whole = {
            **said,
            "type": kind if isinstance(kind, str) and kind in _TYPES else own,
            "message": message if isinstance(message, str) and message else error.message,
        }
        return encode({"type": "error", "error": whole, "request_id": request_id})

    def error_frames(self, error: GatewayError, request_id: str) -> bytes:
        return b"event: error\ndata: %b\n\n" % self.error_body(error, request_id)

    def frame(self, event: Event, exchange: Exchange) -> bytes:
        data = event.encoded()
        if b"\n" in data:
            data = data.replace(b"\n", b"\ndata: ")
        return b"event: %b\ndata: %b\n\n" % (event.kind.encode(), data)

    def answer_of_text(self, words: str, exchange: Exchange) -> dict[str, Any]:
        return {
            "id": f"msg_{exchange.id}",
            "type": "message",
            "role": "assistant",
            "model": exchange.asked_model,
            "content": [{"type": "text", "text": words}] if words else [],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }

    def events_of(self, answer: dict[str, Any], exchange: Exchange) -> list[Event]:
        usage = answer.get("usage") or {}
        start = {**answer, "content": [], "stop_reason": None, "stop_sequence": None}
        events = [Event("message_start", {"type": "message_start", "message": start})]
        for index, block in enumerate(answer.get("content") or []):
            opened, deltas = _opened(block)
            events.append(_event("content_block_start", index=index, content_block=opened))
            events += [_event("content_block_delta", index=index, delta=delta) for delta in deltas]
            events.append(_event("content_block_stop", index=index))
        ending = {"stop_reason": answer.get("stop_reason"), "stop_sequence": answer.get("stop_sequence")}
        return [*events, _event("message_delta", delta=ending, usage=usage), _event("message_stop")]

    def answer_of(self, events: Sequence[Event], exchange: Exchange) -> dict[str, Any]:
        answer = self.answer_of_text("", exchange)
        blocks: dict[int, dict[str, Any]] = {}
        arguments: dict[int, str] = {}
        for event in events:
            data = event.data
            if event.kind == "message_start":
                answer.update(data["message"])
            elif event.kind == "content_block_start":
                blocks[data["index"]] = dict(data["content_block"])
            elif event.kind == "content_block_delta":
                _add(blocks[data["index"]], data["index"], data["delta"], arguments)
            elif event.kind == "message_delta":
                answer.update(data["delta"])
                counts = {name: count for name, count in (data.get("usage") or {}).items() if count}
                answer["usage"] = {**answer["usage"], **counts}
        for index, text in arguments.items():
            blocks[index]["input"] = decode(text.encode()) if text else blocks[index].get("input", {})
        answer["content"] = [blocks[index] for index in sorted(blocks)]
        return answer


def _event(kind: str, **data: Any) -> Event:
    return Event(kind, {"type": kind, **data})


def _opened(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it is opened, and the deltas that fill it."""
    kind = block.get("type")
    if kind == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block.get("text", "")}]
    if kind == "tool_use":
        text = encode(block.get("input") or {}).decode()
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]
    if kind == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": block.get("thinking", "")}]
        deltas.append({"type": "signature_delta", "signature": block.get("signature", "")})
        return {**block, "thinking": "", "signature": ""}, deltas
    return block, []


def _add(block: dict[str, Any], index: int, delta: dict[str, Any], arguments: dict[int, str]) -> None:
    kind = delta.get("type", "")
    if kind == "input_json_delta":
        arguments[index] = arguments.get(index, "") + delta.get("partial_json", "")
    elif kind in _DELTAS:
        name = _DELTAS[kind]
        block[name] = block.get(name, "") + delta.get(name, "")

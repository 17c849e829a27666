"""The rim of OpenAI's Chat Completions format, and what a completion looks like whole and as chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.dialects import Wording
from proxy.document import Event
from proxy.errors import GatewayError, Kind
from proxy.exchange import Exchange
from proxy.jsontext import encode
from proxy.plugin import Format
from proxy.usage import Usage

WORDINGS = {
    Kind.INVALID_REQUEST: Wording(400, "invalid_request_error"),
    Kind.AUTHENTICATION: Wording(401, "invalid_request_error", "invalid_api_key"),
    Kind.BILLING: Wording(402, "insufficient_quota", "insufficient_quota"),
    Kind.PERMISSION: Wording(403, "permission_error"),
    Kind.MODEL_NOT_FOUND: Wording(404, "invalid_request_error", "model_not_found"),
    Kind.PATH_NOT_FOUND: Wording(404, "invalid_request_error"),
    Kind.METHOD_NOT_ALLOWED: Wording(405, "invalid_request_error"),
    Kind.TOO_LARGE: Wording(413, "invalid_request_error", "request_too_large"),
    Kind.RATE_LIMIT: Wording(429, "rate_limit_error", "rate_limit_exceeded"),
    Kind.INTERNAL: Wording(500, "server_error"),
    Kind.UNAVAILABLE: Wording(503, "server_error", "overloaded"),
    Kind.OVERLOADED: Wording(503, "server_error", "overloaded"),
    Kind.TIMEOUT: Wording(504, "server_error", "timeout"),
}
DONE = b"data: [DONE]\n\n"


class OpenAI:
    """The dialect of ``/openai/v1``."""

    format: Format = "openai"
    tail = DONE
    ping = b": ping\n\n"

    def wording(self, kind: Kind) -> Wording:
        return WORDINGS[kind]

    def error_body(self, error: GatewayError, request_id: str) -> bytes:
        wording = WORDINGS[error.kind]
        said = {"message": error.message, "type": wording.type, "param": error.param, "code": wording.code}
        return encode({"error": said})

    def error_frames(self, error: GatewayError, request_id: str) -> bytes:
        return b"data: %b\n\n%b" % (self.error_body(error, request_id), DONE)

    def frame(self, event: Event, exchange: Exchange) -> bytes:
        raw = event.unchanged
        if raw is None:  # made or changed by a plugin
            usage = {"usage": None} if wants_usage(exchange) else {}
            raw = encode({**_envelope(exchange, "chat.completion.chunk"), **usage, **event.data})
        return b"data: %b\n\n" % raw

    def answer_of_text(self, words: str, exchange: Exchange) -> dict[str, Any]:
        message = {"role": "assistant", "content": words, "refusal": None}
        return completion(exchange, message, "stop", Usage())

    def events_of(self, answer: dict[str, Any], exchange: Exchange) -> list[Event]:
        chunks = Chunks(exchange)
        choice = answer["choices"][0]
        message = choice["message"]
        events = [chunks.role()]
        if message.get("content"):
            events.append(chunks.text(encode(message["content"])))
        for index, call in enumerate(message.get("tool_calls") or []):
            events.append(chunks.tool_call(index, call["id"], call["function"]["name"]))
            events.append(chunks.arguments(index, encode(call["function"]["arguments"])))
        events.append(chunks.finish(choice.get("finish_reason") or "stop"))
        if chunks.with_usage:
            events.append(chunks.usage(answer.get("usage") or usage_object(Usage())))
        return events

    def answer_of(self, events: Sequence[Event], exchange: Exchange) -> dict[str, Any]:
        text, calls, finish, usage = "", dict[int, dict[str, Any]](), "stop", None
        for event in events:
            usage = event.data.get("usage") or usage
            for choice in event.data.get("choices") or []:
                delta = choice.get("delta") or {}
                text += delta.get("content") or ""
                finish = choice.get("finish_reason") or finish
                for part in delta.get("tool_calls") or []:
                    _add_call(calls, part)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["content"] = text or None
            message["tool_calls"] = [calls[index] for index in sorted(calls)]
        answer = completion(exchange, message, finish, Usage())
        return {**answer, "usage": usage} if usage else answer


class Chunks:
    """Builds the chunks of one streamed completion from prepared halves.

    ``literal`` arguments are JSON string literals, quotes included: what the provider wrote is embedded as it is.
    """

    __slots__ = ("_end", "_head", "_plain_end", "_start", "with_usage")

    def __init__(self, exchange: Exchange) -> None:
        self.with_usage = wants_usage(exchange)
        self._head = encode(_envelope(exchange, "chat.completion.chunk"))[:-1]
        self._start = self._head + b',"choices":[{"index":0,"delta":'
        self._end = b',"usage":null}' if self.with_usage else b"}"
        self._plain_end = b',"logprobs":null,"finish_reason":null}]' + self._end

    def role(self) -> Event:
        """The first chunk."""
        return self._delta("role", b'{"role":"assistant","content":""}')

    def text(self, literal: bytes) -> Event:
        """A piece of text."""
        return self._delta("text", b'{"content":%b}' % literal)

    def tool_call(self, index: int, call_id: str, name: str) -> Event:
        """The beginning of a call; ``index`` counts the calls from 0."""
        function = {"name": name, "arguments": ""}
        call = {"index": index, "id": call_id, "type": "function", "function": function}
        return self._delta("tool_call", encode({"tool_calls": [call]}))

    def arguments(self, index: int, literal: bytes) -> Event:
        """A piece of a call's arguments."""
        return self._delta("tool_call", b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (index, literal))

    def finish(self, reason: str) -> Event:
        """The last chunk with a choice."""
        end = b'{},"logprobs":null,"finish_reason":"%b"}]%b' % (reason.encode(), self._end)
        return Event("finish", raw=self._start + end)

    def usage(self, usage: dict[str, Any]) -> Event:
        """The chunk of the usage, which a client has to ask for."""
        return Event("usage", raw=b'%b,"choices":[],"usage":%b}' % (self._head, encode(usage)))

    def _delta(self, kind: str, delta: bytes) -> Event:
        return Event(kind, raw=b"".join((self._start, delta, self._plain_end)))


def wants_usage(exchange: Exchange) -> bool:
    """Whether the client asked for the usage of its stream."""
    options = exchange.client_body.get("stream_options")
    return isinstance(options, Mapping) and options.get("include_usage") is True


def completion(exchange: Exchange, message: dict[str, Any], finish_reason: str, usage: Usage) -> dict[str, Any]:
    """A whole completion of one choice."""
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
    return {**_envelope(exchange, "chat.completion"), "choices": [choice], "usage": usage_object(usage)}


def usage_object(usage: Usage) -> dict[str, Any]:
    """The counts as OpenAI names them: what was read from the cache and written to it counts as prompt."""
    prompt = usage.input + usage.cache_read + usage.cache_write
    return {
        "prompt_tokens": prompt,
        "completion_tokens": usage.output,
        "total_tokens": prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cache_read, "cache_write_tokens": usage.cache_write},
        "completion_tokens_details": {"reasoning_tokens": usage.thinking},
    }


def _envelope(exchange: Exchange, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{exchange.id}",
        "object": kind,
        "created": exchange.created,
        "model": exchange.asked_model,
    }


def _add_call(calls: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
    new = {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
    call = calls.setdefault(part["index"], new)
    call["id"] = part.get("id", call["id"])
    function = part.get("function") or {}
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""

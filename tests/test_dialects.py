"""The rims of both formats: errors, frames, and answers whole and as events."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects import Dialect
from proxy.dialects.messages import Messages
from proxy.dialects.openai import Chunks, OpenAI, completion, usage_object
from proxy.document import Event
from proxy.errors import GatewayError, Kind, refused
from proxy.exchange import Exchange
from proxy.plugin import Route
from proxy.testing import make_exchange, text_events
from proxy.usage import Usage
from tests import strategies

Json = dict[str, Any]

# kind: status, type and code in OpenAI's format; status and type in the Messages format
WORDINGS: dict[Kind, tuple[tuple[int, str, str | None], tuple[int, str]]] = {
    Kind.INVALID_REQUEST: ((400, "invalid_request_error", None), (400, "invalid_request_error")),
    Kind.AUTHENTICATION: ((401, "invalid_request_error", "invalid_api_key"), (401, "authentication_error")),
    Kind.BILLING: ((402, "insufficient_quota", "insufficient_quota"), (402, "billing_error")),
    Kind.PERMISSION: ((403, "permission_error", None), (403, "permission_error")),
    Kind.MODEL_NOT_FOUND: ((404, "invalid_request_error", "model_not_found"), (404, "not_found_error")),
    Kind.PATH_NOT_FOUND: ((404, "invalid_request_error", None), (404, "not_found_error")),
    Kind.METHOD_NOT_ALLOWED: ((405, "invalid_request_error", None), (405, "invalid_request_error")),
    Kind.TOO_LARGE: ((413, "invalid_request_error", "request_too_large"), (413, "request_too_large")),
    Kind.RATE_LIMIT: ((429, "rate_limit_error", "rate_limit_exceeded"), (429, "rate_limit_error")),
    Kind.INTERNAL: ((500, "server_error", None), (500, "api_error")),
    Kind.UNAVAILABLE: ((503, "server_error", "overloaded"), (503, "overloaded_error")),
    Kind.OVERLOADED: ((503, "server_error", "overloaded"), (529, "overloaded_error")),
    Kind.TIMEOUT: ((504, "server_error", "timeout"), (504, "timeout_error")),
}


def test_every_kind_is_worded() -> None:
    """No kind of error is forgotten."""
    assert set(Kind) == set(WORDINGS)


@pytest.mark.parametrize("kind", WORDINGS, ids=lambda kind: kind.value)
def test_an_error_in_either_format(kind: Kind) -> None:
    """An error has the status, type and code of the contract's tables, in the format's own envelope."""
    error = GatewayError(kind, "what is wrong", param="messages[0]")
    (status, type_, code), (native_status, native_type) = WORDINGS[kind]

    expected: Json = {"error": {"message": "what is wrong", "type": type_, "param": "messages[0]", "code": code}}
    native: Json = {
        "type": "error",
        "error": {"type": native_type, "message": "what is wrong"},
        "request_id": "req",
    }
    assert (status, native_status) == (OpenAI().wording(kind).status, Messages().wording(kind).status)
    assert expected == json.loads(OpenAI().error_body(error, "req"))
    assert native == json.loads(Messages().error_body(error, "req"))


def test_an_error_without_a_path_has_a_null_param() -> None:
    """`param` is there in any case; a refused field is its message's beginning."""
    assert json.loads(OpenAI().error_body(GatewayError(Kind.INTERNAL, "x"), "req"))["error"]["param"] is None
    body = json.loads(OpenAI().error_body(refused("tools[0].type", "no"), "req"))["error"]
    assert ("tools[0].type: no", "tools[0].type") == (body["message"], body["param"])


PROVIDERS: dict[str, tuple[Json, Json]] = {
    "whole": (
        {"type": "invalid_request_error", "message": "theirs", "details": {"a": [1]}},
        {"type": "invalid_request_error", "message": "theirs", "details": {"a": [1]}},
    ),
    "another server's": (
        {"code": 400, "message": "theirs", "type": "BadRequestError"},
        {"code": 400, "message": "theirs", "type": "overloaded_error"},
    ),
    "a type that is no text": ({"type": ["x"], "message": "theirs"}, {"type": "overloaded_error", "message": "theirs"}),
    "no type": ({"message": "theirs"}, {"type": "overloaded_error", "message": "theirs"}),
    "no message": ({"type": "api_error"}, {"type": "api_error", "message": "ours"}),
    "a message of null": ({"type": "api_error", "message": None}, {"type": "api_error", "message": "ours"}),
    "a message that is no text": ({"type": "api_error", "message": {"a": 1}}, {"type": "api_error", "message": "ours"}),
}


@pytest.mark.parametrize(("said", "expected"), PROVIDERS.values(), ids=PROVIDERS)
def test_a_providers_error_object_goes_on_whole(said: Json, expected: Json) -> None:
    """A client of the Messages format gets the provider's object with all its details, under a type and a message
    that its SDK knows; only the request id is the gateway's."""
    error = GatewayError(Kind.OVERLOADED, "ours", provider=said)

    body = json.loads(Messages().error_body(error, "req"))

    assert {"type": "error", "error": expected, "request_id": "req"} == body


def test_an_error_in_a_stream_ends_it() -> None:
    """OpenAI's clients get an error chunk and [DONE], those of the Messages format an error event with its line."""
    error = GatewayError(Kind.INTERNAL, "broke\noff")

    openai, native = OpenAI().error_frames(error, "req"), Messages().error_frames(error, "req")

    body = b'{"error":{"message":"broke\\noff","type":"server_error","param":null,"code":null}}'
    assert b"data: " + body + b"\n\ndata: [DONE]\n\n" == openai
    native_body = b'{"type":"error","error":{"type":"api_error","message":"broke\\noff"},"request_id":"req"}'
    assert b"event: error\ndata: " + native_body + b"\n\n" == native


def test_pings_and_tails() -> None:
    """A ping is a comment for OpenAI's clients and an event for the others; [DONE] is OpenAI's alone."""
    assert (b": ping\n\n", b"data: [DONE]\n\n") == (OpenAI.ping, OpenAI.tail)
    assert (b'event: ping\ndata: {"type": "ping"}\n\n', b"") == (Messages.ping, Messages.tail)


FRAMES = {
    "as it came": (
        Event("ping", raw=b'{ "type" : "ping", "n":1.10 }'),
        b'event: ping\ndata: { "type" : "ping", "n":1.10 }\n\n',
    ),
    "several lines": (Event("x", raw=b'{"a":\n1,\n"b":2}'), b'event: x\ndata: {"a":\ndata: 1,\ndata: "b":2}\n\n'),
    "made here": (Event("x", {"a": "é"}), 'event: x\ndata: {"a":"é"}\n\n'.encode()),
    "a name beyond ASCII": (Event("é", raw=b"{}"), "event: é\ndata: {}\n\n".encode()),
    "no data": (Event("x", raw=b""), b"event: x\ndata: \n\n"),
}


@pytest.mark.parametrize(("event", "expected"), FRAMES.values(), ids=FRAMES)
def test_a_frame_of_the_messages_format(event: Event, expected: bytes) -> None:
    """An event goes out with its line and the bytes that it came as; several data lines stay several."""
    assert expected == Messages().frame(event, make_exchange({}))


def exchange_of(**body: Any) -> Exchange:
    exchange = make_exchange({"model": "Model", "messages": [], **body})
    exchange.id, exchange.created = "0190", 1767225600
    return exchange


HEAD = b'{"id":"chatcmpl-0190","object":"chat.completion.chunk","created":1767225600,"model":"Model",'


@pytest.mark.parametrize("usage", [False, True], ids=["without usage", "with usage"])
def test_chunks(usage: bool) -> None:
    """Chunks are OpenAI's to the byte: one id, one created, and `usage: null` where the usage is asked for."""
    chunks = Chunks(exchange_of(stream_options={"include_usage": usage}))
    made = [
        chunks.role(),
        chunks.text(rb'"a\u00e9"'),
        chunks.tool_call(1, "call_1", "f"),
        chunks.arguments(1, rb'"{\"a\":1.10"'),
        chunks.finish("tool_calls"),
    ]

    end = b',"usage":null}' if usage else b"}"
    deltas = [
        b'{"role":"assistant","content":""}',
        rb'{"content":"a\u00e9"}',
        b'{"tool_calls":[{"index":1,"id":"call_1","type":"function","function":{"name":"f","arguments":""}}]}',
        rb'{"tool_calls":[{"index":1,"function":{"arguments":"{\"a\":1.10"}}]}',
    ]
    expected = [
        b'data: %b"choices":[{"index":0,"delta":%b,"logprobs":null,"finish_reason":null}]%b\n\n' % (HEAD, delta, end)
        for delta in deltas
    ]
    expected.append(
        b'data: %b"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"tool_calls"}]%b\n\n' % (HEAD, end)
    )
    assert expected == [OpenAI().frame(event, exchange_of()) for event in made]
    assert ["role", "text", "tool_call", "tool_call", "finish"] == [event.kind for event in made]


def test_the_chunk_of_the_usage() -> None:
    """The usage has a chunk of its own, without choices."""
    chunk = Chunks(exchange_of()).usage({"total_tokens": 3})

    assert ("usage", HEAD + b'"choices":[],"usage":{"total_tokens":3}}') == (chunk.kind, chunk.encoded())


ASKED = {
    "asked": ({"stream_options": {"include_usage": True}}, True),
    "declined": ({"stream_options": {"include_usage": False}}, False),
    "null": ({"stream_options": {"include_usage": None}}, False),
    "no options": ({"stream_options": None}, False),
    "nothing": ({}, False),
}


@pytest.mark.parametrize(("body", "expected"), ASKED.values(), ids=ASKED)
def test_who_gets_the_usage(body: Json, expected: bool) -> None:
    """A stream has a usage only where it was asked for."""
    assert expected == Chunks(exchange_of(**body)).with_usage


def test_a_chunk_of_a_plugin_gets_its_envelope() -> None:
    """The rim fills in what is the same in every chunk, and leaves what a plugin said."""
    made = OpenAI().frame(Event("text", {"choices": [1], "model": "mine"}), exchange_of())

    assert b"data: " + HEAD.replace(b'"Model"', b'"mine"') + b'"choices":[1]}\n\n' == made


USAGES: dict[str, tuple[Json, tuple[int, int, int, int, int]]] = {
    "nothing": ({}, (0, 0, 0, 0, 0)),
    "plain": ({"input_tokens": 3, "output_tokens": 5}, (3, 0, 0, 5, 0)),
    "cached": (
        {"input_tokens": 3, "cache_read_input_tokens": 10, "cache_creation_input_tokens": 20, "output_tokens": 5},
        (33, 10, 20, 5, 0),
    ),
    "null": ({"input_tokens": 3, "cache_read_input_tokens": None, "output_tokens": None}, (3, 0, 0, 0, 0)),
    "thinking": ({"output_tokens": 5, "output_tokens_details": {"thinking_tokens": 4}}, (0, 0, 0, 5, 4)),
}


@pytest.mark.parametrize(("said", "expected"), USAGES.values(), ids=USAGES)
def test_usage_in_openais_names(said: Json, expected: tuple[int, int, int, int, int]) -> None:
    """What was read from the cache and written to it counts as prompt, and stands beside it."""
    prompt, read, written, output, thinking = expected
    usage = Usage()
    usage.take(said)

    shown = usage_object(usage)

    assert (prompt, output, prompt + output) == (
        shown["prompt_tokens"],
        shown["completion_tokens"],
        shown["total_tokens"],
    )
    assert (read, written) == (
        shown["prompt_tokens_details"]["cached_tokens"],
        shown["prompt_tokens_details"]["cache_write_tokens"],
    )
    assert thinking == shown["completion_tokens_details"]["reasoning_tokens"]


def test_a_whole_completion() -> None:
    """A completion has one choice, the client's name for the model, and null where there is nothing."""
    message = {"role": "assistant", "content": "x", "refusal": None}

    made = completion(exchange_of(), message, "stop", Usage())

    assert {"id", "object", "created", "model", "choices", "usage"} <= made.keys()
    assert ("chatcmpl-0190", "chat.completion", 1767225600, "Model") == tuple(made.values())[:4]
    assert [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}] == made["choices"]


DIALECTS: dict[str, tuple[Dialect, Route]] = {
    "openai": (OpenAI(), Route.CHAT_COMPLETIONS),
    "messages": (Messages(), Route.MESSAGES),
}


def text_in(answer: Json) -> str:
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"])
    return "".join(block["text"] for block in answer["content"])


@pytest.mark.parametrize("words", ["", "Hello.", "a\n\ud7ff😀\u2028"])
@pytest.mark.parametrize(("dialect", "route"), DIALECTS.values(), ids=DIALECTS)
def test_words_as_an_answer(dialect: Dialect, route: Route, words: str) -> None:
    """An answer of nothing but text says it whole and as events."""
    exchange = make_exchange({"messages": []}, route=route)

    answer = dialect.answer_of_text(words, exchange)

    events = dialect.events_of(answer, exchange)
    assert words == text_in(answer)
    assert words == text_in(dialect.answer_of(events, exchange))
    assert "test/model" == answer["model"]
    for event in events:
        orjson.loads(event.encoded())


@given(strategies.messages)
def test_a_message_whole_and_as_events(message: Json) -> None:
    """A message says the same when it is taken apart into events and put together again."""
    exchange = make_exchange({"messages": []}, route=Route.MESSAGES)

    events = Messages().events_of(message, exchange)

    assert message["content"] == Messages().answer_of(events, exchange)["content"]
    assert message["stop_reason"] == Messages().answer_of(events, exchange)["stop_reason"]
    assert ["message_start", "message_delta", "message_stop"] == [events[0].kind, events[-2].kind, events[-1].kind]


@given(strategies.messages, st.data())
def test_any_events_put_together(message: Json, data: st.DataObject) -> None:
    """A message is put together from events as any provider might send them."""
    exchange = make_exchange({"messages": []}, route=Route.MESSAGES)
    events = [Event(event["type"], event) for event in data.draw(strategies.events_of(message))]

    made = Messages().answer_of(events, exchange)

    assert message["content"] == made["content"]
    assert (message["id"], message["stop_reason"]) == (made["id"], made["stop_reason"])


_calls = st.fixed_dictionaries(
    {
        "id": st.text("abc_", min_size=1, max_size=4),
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": st.text("abc", min_size=1, max_size=4), "arguments": st.text()}),
    }
)


@given(st.text(), st.lists(_calls, max_size=3), st.sampled_from(("stop", "length", "tool_calls", "content_filter")))
def test_a_completion_whole_and_as_chunks(text: str, calls: list[Json], finish: str) -> None:
    """A completion says the same when it is taken apart into chunks and put together again."""
    exchange = exchange_of(stream_options={"include_usage": True})
    message: Json = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        message |= {"content": text or None, "tool_calls": calls}
    answer = completion(exchange, message, finish, Usage())

    events = OpenAI().events_of(answer, exchange)

    assert answer == OpenAI().answer_of(events, exchange)


def test_a_stream_that_repeats_a_count_as_0() -> None:
    """Counts put together from events are those of the answer: 0 replaces nothing."""
    events = [Event(event["type"], event) for event in text_events("a")]
    events[-2].data["usage"] = {"input_tokens": 0, "output_tokens": 9}

    made = Messages().answer_of(events, make_exchange({"messages": []}, route=Route.MESSAGES))

    assert {"input_tokens": 12, "output_tokens": 9} == made["usage"]

"""How servers other than Anthropic's answer, and what becomes of it in both formats, plain and streamed.

Played here is what vLLM, Ollama and llama.cpp's server are known to send, over real sockets.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest

from proxy.testing import Reply, ScriptedUpstream, stream_reply
from tests.configured import config_for, configured_gateway
from tests.contract_plugins import BOTH_ROUTES, PLAIN_AND_STREAMED, Seen, ask_for, ending_of, request_of

ROUTES = pytest.mark.parametrize("format", BOTH_ROUTES)


class Call(NamedTuple):
    """A tool call, its arguments as they stand in the completion."""

    name: str
    arguments: str


class Completion(NamedTuple):
    """What matters of an answer in OpenAI's format."""

    content: str | None
    calls: tuple[Call, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Answers(NamedTuple):
    """One answer of a server in both of its forms, and what it is in OpenAI's format."""

    message: dict[str, Any]
    events: Sequence[Mapping[str, Any] | bytes]
    plain: Completion
    streamed: Completion


def message(content: Sequence[Any], stop_reason: str, usage: Mapping[str, int], **more: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-xYz",
        "type": "message",
        "role": "assistant",
        "model": "smollm2",
        "content": [*content],
        "stop_reason": stop_reason,
        **more,
        "usage": usage,
    }


def start(usage: Mapping[str, int]) -> dict[str, Any]:
    return {"type": "message_start", "message": {**message([], "", usage), "stop_reason": None, "stop_sequence": None}}


def opened(index: int, **block: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def said(index: int, text: str) -> dict[str, Any]:
    return delta(index, "text_delta", text=text)


def argued(index: int, text: str) -> dict[str, Any]:
    return delta(index, "input_json_delta", partial_json=text)


def delta(index: int, kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **more}}


def closed(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


def ended(stop_reason: str, usage: Mapping[str, int], **more: Any) -> list[dict[str, Any]]:
    ending = {"type": "message_delta", "delta": {"stop_reason": stop_reason, **more}, "usage": usage}
    return [ending, {"type": "message_stop"}]


def alike(message: dict[str, Any], events: Sequence[Mapping[str, Any] | bytes], expected: Completion) -> Answers:
    return Answers(message, events, expected, expected)


COMMENTS = b":\n\n:\n\n"
TEXT = {"type": "text", "text": "Hello."}
NOW = {"type": "tool_use", "id": "aB3dE5", "name": "now", "input": {}}
WEATHER = {"type": "tool_use", "id": "fG7hI9", "name": "weather", "input": {"city": "Paris"}}
LLAMA_USAGE = {"input_tokens": 16, "output_tokens": 7, "cache_read_input_tokens": 741}
LLAMA_START = {"input_tokens": 16, "output_tokens": 0, "cache_read_input_tokens": 741}
OUTPUT = {"output_tokens": 7}

ANSWERS = {
    "llama.cpp: comments before the first event, output counted only at the end": alike(
        message([TEXT], "end_turn", LLAMA_USAGE, stop_sequence=None),
        [
            COMMENTS,
            start(LLAMA_START),
            opened(0, type="text", text=""),
            COMMENTS,
            said(0, "Hel"),
            said(0, "lo."),
            closed(0),
            *ended("end_turn", OUTPUT, stop_sequence=None),
        ],
        Completion("Hello.", (), "stop", 757, 7, 741),
    ),
    "llama.cpp: two calls that overlap, opened without input": alike(
        message([NOW, WEATHER], "tool_use", LLAMA_USAGE, stop_sequence=None),
        [
            COMMENTS,
            start(LLAMA_START),
            opened(0, type="tool_use", id="aB3dE5", name="now"),
            argued(0, "{}"),
            opened(1, type="tool_use", id="fG7hI9", name="weather"),
            argued(1, '{"city":'),
            argued(1, '"Paris"}'),
            closed(0),
            closed(1),
            *ended("tool_use", OUTPUT),
        ],
        Completion(None, (Call("now", "{}"), Call("weather", '{"city":"Paris"}')), "tool_calls", 757, 7, 741),
    ),
    "llama.cpp: calls whose pieces alternate": alike(
        message([NOW, WEATHER], "tool_use", LLAMA_USAGE),
        [
            start(LLAMA_START),
            opened(0, type="tool_use", id="aB3dE5", name="now"),
            opened(1, type="tool_use", id="fG7hI9", name="weather"),
            argued(1, '{"city":'),
            argued(0, "{}"),
            argued(1, '"Paris"}'),
            closed(1),
            closed(0),
            *ended("tool_use", OUTPUT),
        ],
        Completion(None, (Call("now", "{}"), Call("weather", '{"city":"Paris"}')), "tool_calls", 757, 7, 741),
    ),
    "llama.cpp: a call without input or arguments": alike(
        message([NOW], "tool_use", LLAMA_USAGE),
        [
            start(LLAMA_START),
            opened(0, type="tool_use", id="aB3dE5", name="now"),
            closed(0),
            *ended("tool_use", OUTPUT),
        ],
        Completion(None, (Call("now", "{}"),), "tool_calls", 757, 7, 741),
    ),
    "llama.cpp: thinking and text that overlap, no signature": alike(
        message([{"type": "thinking", "thinking": "Hm.", "signature": ""}, TEXT], "end_turn", LLAMA_USAGE),
        [
            COMMENTS,
            start(LLAMA_START),
            opened(0, type="thinking", thinking=""),
            delta(0, "thinking_delta", thinking="Hm."),
            opened(1, type="text", text=""),
            said(1, "Hello."),
            delta(0, "signature_delta", signature=""),
            closed(0),
            closed(1),
            *ended("end_turn", OUTPUT),
        ],
        Completion("Hello.", (), "stop", 757, 7, 741),
    ),
    "llama.cpp: a stop sequence that is an end_turn": alike(
        message([TEXT], "end_turn", LLAMA_USAGE, stop_sequence="END"),
        [
            start(LLAMA_START),
            opened(0, type="text", text=""),
            said(0, "Hello."),
            closed(0),
            *ended("end_turn", OUTPUT, stop_sequence="END"),
        ],
        Completion("Hello.", (), "stop", 757, 7, 741),
    ),
    "llama.cpp: a call that max_tokens cut off": Answers(
        message([{**WEATHER, "input": {}}], "max_tokens", LLAMA_USAGE),
        [
            start(LLAMA_START),
            opened(0, type="tool_use", id="fG7hI9", name="weather"),
            argued(0, '{"ci'),
            closed(0),
            *ended("max_tokens", OUTPUT),
        ],
        Completion(None, (Call("weather", "{}"),), "length", 757, 7, 741),
        Completion(None, (Call("weather", '{"ci'),), "length", 757, 7, 741),
    ),
    "vLLM: null fields left out, no pings": alike(
        message([TEXT], "end_turn", {"input_tokens": 12, "output_tokens": 7}),
        [
            start({"input_tokens": 12, "output_tokens": 0}),
            opened(0, type="text", text=""),
            said(0, "Hello."),
            closed(0),
            *ended("end_turn", {"input_tokens": 12, "output_tokens": 7}),
        ],
        Completion("Hello.", (), "stop", 12, 7),
    ),
    "vLLM: thinking with a signature of its own": alike(
        message(
            [{"type": "thinking", "thinking": "Hm.", "signature": "a0b1"}, TEXT, WEATHER],
            "tool_use",
            {"input_tokens": 12, "output_tokens": 7, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 0},
        ),
        [
            start({"input_tokens": 12, "output_tokens": 0, "cache_read_input_tokens": 3}),
            opened(0, type="thinking", thinking="", signature=""),
            delta(0, "thinking_delta", thinking="Hm."),
            delta(0, "signature_delta", signature="a0b1"),
            closed(0),
            opened(1, type="text", text=""),
            said(1, "Hello."),
            closed(1),
            opened(2, type="tool_use", id="fG7hI9", name="weather", input={}),
            argued(2, '{"city":"Paris"}'),
            closed(2),
            *ended("tool_use", OUTPUT),
        ],
        Completion("Hello.", (Call("weather", '{"city":"Paris"}'),), "tool_calls", 15, 7, 3),
    ),
    "Ollama: two counts, and input only at the end": alike(
        message([TEXT], "end_turn", {"input_tokens": 12, "output_tokens": 7}),
        [
            start({"input_tokens": 0, "output_tokens": 0}),
            opened(0, type="text", text=""),
            said(0, "Hello."),
            closed(0),
            *ended("end_turn", {"input_tokens": 12, "output_tokens": 7}),
        ],
        Completion("Hello.", (), "stop", 12, 7),
    ),
    "another: no usage at all": alike(
        {name: value for name, value in message([TEXT], "end_turn", {}).items() if name != "usage"},
        [
            {"type": "message_start", "message": {"id": "1", "type": "message", "role": "assistant", "content": []}},
            opened(0, type="text", text=""),
            said(0, "Hello."),
            closed(0),
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
            {"type": "message_stop"},
        ],
        Completion("Hello.", (), "stop", 0, 0),
    ),
    "another: counts given twice, with zeros at the end": alike(
        message([TEXT], "end_turn", LLAMA_USAGE),
        [
            start(LLAMA_START),
            opened(0, type="text", text=""),
            said(0, "Hello."),
            closed(0),
            *ended("end_turn", {"input_tokens": 0, "output_tokens": 7, "cache_read_input_tokens": 0}),
        ],
        Completion("Hello.", (), "stop", 757, 7, 741),
    ),
    "another: text that stands in the block's start": alike(
        message([TEXT], "end_turn", LLAMA_USAGE),
        [start(LLAMA_START), opened(0, type="text", text="Hel"), said(0, "lo."), closed(0), *ended("end_turn", OUTPUT)],
        Completion("Hello.", (), "stop", 757, 7, 741),
    ),
    "another: arguments that stand in the block's start": alike(
        message([WEATHER], "tool_use", LLAMA_USAGE),
        [start(LLAMA_START), opened(0, **WEATHER), closed(0), *ended("tool_use", OUTPUT)],
        Completion(None, (Call("weather", '{"city":"Paris"}'),), "tool_calls", 757, 7, 741),
    ),
    "another: a start of thinking without its field": alike(
        message([{"type": "thinking", "thinking": "Hm."}, TEXT], "end_turn", LLAMA_USAGE),
        [
            start(LLAMA_START),
            opened(0, type="thinking"),
            delta(0, "thinking_delta", thinking="Hm."),
            closed(0),
            opened(1, type="text"),
            said(1, "Hello."),
            closed(1),
            *ended("end_turn", OUTPUT),
        ],
        Completion("Hello.", (), "stop", 757, 7, 741),
    ),
}


def completion_of(answer: Seen) -> Completion:
    """What a client of OpenAI's format puts together, of a plain answer or of a stream."""
    if not answer.streamed:
        [choice], usage = answer.data["choices"], answer.data["usage"]
        message, finish_reason = choice["message"], choice["finish_reason"]
        content = message["content"]
        calls = [
            Call(**{name: call["function"][name] for name in Call._fields}) for call in message.get("tool_calls", ())
        ]
    else:
        chunks = answer.events[:-1]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        texts = [choice["delta"]["content"] for choice in choices if choice["delta"].get("content")]
        parts = [part for choice in choices for part in choice["delta"].get("tool_calls", ())]
        calls = [
            Call(
                "".join(part["function"].get("name", "") for part in parts if part["index"] == index),
                "".join(part["function"].get("arguments", "") for part in parts if part["index"] == index),
            )
            for index in sorted({part["index"] for part in parts})
        ]
        content = "".join(texts) or (None if calls else "")
        [finish_reason] = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        usage = chunks[-1]["usage"]
    counts = usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    return Completion(content, tuple(calls), finish_reason, *counts)


@asynccontextmanager
async def in_front_of(reply: Reply, folder: Path) -> AsyncIterator[str]:
    """A gateway whose upstream answers like this."""
    async with (
        ScriptedUpstream(reply) as upstream,
        configured_gateway(config_for({"own": {"base_url": upstream.url}}), folder) as url,
    ):
        yield url


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS)
async def test_a_plain_answer_in_openai_s_format(tmp_path: Path, answers: Answers) -> None:
    """Whatever a server leaves out or adds, the completion is what it said."""
    async with in_front_of(Reply([orjson.dumps(answers.message)]), tmp_path) as url:
        answer = await ask_for(url, "openai")

    assert answers.plain == completion_of(answer)
    assert "model" == answer.data["model"]


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS)
async def test_a_stream_in_openai_s_format(tmp_path: Path, answers: Answers) -> None:
    """In whichever order a server opens and closes its blocks, the chunks add up to what it said."""
    body = request_of(True, stream_options={"include_usage": True})
    async with in_front_of(stream_reply(answers.events), tmp_path) as url:
        answer = await ask_for(url, "openai", body=body)

    assert "whole" == ending_of(answer, "openai")
    assert answers.streamed == completion_of(answer)
    assert {"model"} == {chunk["model"] for chunk in answer.events[:-1]}


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS)
async def test_a_plain_answer_in_the_messages_format(tmp_path: Path, answers: Answers) -> None:
    """A message comes as the server wrote it, but for the model's name, which is the client's."""
    async with in_front_of(Reply([orjson.dumps(answers.message)]), tmp_path) as url:
        answer = await ask_for(url, "messages")

    assert orjson.dumps({**answers.message, "model": "model"}) == answer.body


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS)
async def test_a_stream_in_the_messages_format(tmp_path: Path, answers: Answers) -> None:
    """Events come as the server sent them and in its order, but for comments and the model's name."""
    async with in_front_of(stream_reply(answers.events), tmp_path) as url:
        answer = await ask_for(url, "messages", True)

    first, *rest = [event for event in answers.events if isinstance(event, Mapping)]
    if "model" in first["message"]:
        first = {**first, "message": {**first["message"], "model": "model"}}
    expected = [b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in (first, *rest)]
    assert b"".join(expected) == answer.body


async def test_a_count_with_more_than_the_count(tmp_path: Path) -> None:
    """vLLM says more about a count of tokens; that comes, too."""
    counted = b'{"input_tokens":19,"context_management":{"original_input_tokens":19}}'
    async with in_front_of(Reply([counted]), tmp_path) as url:
        answer = await ask_for(f"{url}/v1/messages/count_tokens?", "messages")  # the path goes into the query

    assert (200, counted) == (answer.status, answer.body)


# What other servers' errors become: status and message in OpenAI's format, status and type in the Messages format

CONTEXT = "request (5000 tokens) exceeds the available context size (4096 tokens)"
INTERNAL = "the provider failed to answer this request"


class Error(NamedTuple):
    """An error of a server, and what clients are told."""

    reply: Callable[[], Reply]
    openai: int
    messages: int
    type: str
    message: str


def with_status(number: int, body: Any = None, content_type: str = "application/json") -> Callable[[], Reply]:
    pieces = [] if body is None else [body if isinstance(body, bytes) else orjson.dumps(body)]
    return lambda: Reply(pieces, number, content_type)


def llama(number: int, type: str, message: str, **more: Any) -> Callable[[], Reply]:
    return with_status(number, {"error": {"code": number, "message": message, "type": type, **more}})


def vllm(number: int, type: str, message: str) -> Callable[[], Reply]:
    return with_status(number, {"type": "error", "error": {"type": type, "message": message}})


ERRORS = {
    "llama.cpp: a prompt that is too long": Error(
        llama(400, "exceed_context_size_error", CONTEXT, n_prompt_tokens=5000, n_ctx=4096),
        *(400, 400, "invalid_request_error", CONTEXT),
    ),
    "llama.cpp: a bad request": Error(
        llama(400, "invalid_request_error", "it is bad"), 400, 400, "invalid_request_error", "it is bad"
    ),
    "llama.cpp: an image without a vision model": Error(
        llama(500, "server_error", "image input is not supported"), 500, 500, "api_error", INTERNAL
    ),
    "llama.cpp: a wrong key": Error(
        llama(401, "authentication_error", "Invalid API Key"), 500, 500, "api_error", INTERNAL
    ),
    "llama.cpp: a path that isn't there": Error(
        llama(404, "not_found_error", "File Not Found"), 500, 500, "api_error", INTERNAL
    ),
    "llama.cpp: a model that is loading": Error(
        llama(503, "unavailable_error", "Loading model"), 503, 529, "overloaded_error", "Loading model"
    ),
    "llama.cpp: a compressed body": Error(with_status(415), 500, 500, "api_error", INTERNAL),
    "vLLM: a document": Error(
        vllm(400, "BadRequestError", "Input should be 'text'"),
        *(400, 400, "invalid_request_error", "Input should be 'text'"),
    ),
    "vLLM: an unknown model": Error(
        vllm(404, "NotFoundError", "The model does not exist."), 500, 500, "api_error", INTERNAL
    ),
    "vLLM: a failure": Error(vllm(500, "InternalServerError", "boom"), 500, 500, "api_error", INTERNAL),
    "Ollama: a bare 400": Error(
        with_status(400),
        *(400, 400, "invalid_request_error", "the provider refused the request without saying why"),
    ),
    "Ollama: an error that is a text": Error(
        with_status(400, {"error": "does not support tools"}),
        *(400, 400, "invalid_request_error", "does not support tools"),
    ),
    "Ollama: a bare 404": Error(with_status(404), 500, 500, "api_error", INTERNAL),
    "Ollama: a bare 500": Error(with_status(500), 500, 500, "api_error", INTERNAL),
    "Ollama: busy": Error(
        with_status(503, b"server busy", "text/plain"), 503, 529, "overloaded_error", "the provider is overloaded"
    ),
    "a proxy's page": Error(with_status(502, b"<h1>Bad Gateway</h1>", "text/html"), 500, 500, "api_error", INTERNAL),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("stream", PLAIN_AND_STREAMED.values(), ids=PLAIN_AND_STREAMED)
async def test_an_error_comes_in_the_client_s_envelope(tmp_path: Path, error: Error, stream: bool) -> None:
    """Whichever envelope a server has for its errors, the client reads its own, with the server's words where they
    are about the request."""
    told = {}
    for format in BOTH_ROUTES:
        async with in_front_of(error.reply(), tmp_path) as url:
            told[format] = await ask_for(url, format, stream)

    openai, messages = told["openai"], told["messages"]
    assert (error.openai, error.messages) == (openai.status, messages.status)
    assert (error.message, error.message) == (openai.data["error"]["message"], messages.data["error"]["message"])
    assert {"message", "type", "param", "code"} == set(openai.data["error"])
    assert ("error", error.type) == (messages.data["type"], messages.data["error"]["type"])
    assert messages.headers["x-request-id"] == messages.data["request_id"]


async def test_an_error_s_details_come_in_the_messages_format(tmp_path: Path) -> None:
    """What a server says beside its message reaches the client that speaks its format."""
    async with in_front_of(ERRORS["llama.cpp: a prompt that is too long"].reply(), tmp_path) as url:
        answer = await ask_for(url, "messages")

    assert {"n_prompt_tokens": 5000, "n_ctx": 4096}.items() <= answer.data["error"].items()


@ROUTES
async def test_an_error_of_an_unknown_type_within_a_stream(tmp_path: Path, format: str) -> None:
    """vLLM's own word for a failure ends the stream in the client's own word."""
    events = [
        start({"input_tokens": 12, "output_tokens": 0}),
        opened(0, type="text", text=""),
        said(0, "Hel"),
        {"type": "error", "error": {"type": "internal_error", "message": "boom"}},
    ]
    async with in_front_of(stream_reply(events), tmp_path) as url:
        answer = await ask_for(url, format, True)

    assert f"broken: {'server_error' if format == 'openai' else 'api_error'}" == ending_of(answer, format)


@ROUTES
async def test_comments_alone_are_no_answer(tmp_path: Path, format: str) -> None:
    """A server that only ever sent comments has not begun: its failure is an error with a status."""
    async with in_front_of(stream_reply([COMMENTS, COMMENTS]), tmp_path) as url:
        answer = await ask_for(url, format, True)

    assert 500 == answer.status

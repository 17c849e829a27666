"""Upstreams that break, lie and stall (group U), as far as the tables of test_endings and test_process don't have them.

Those hold the usual ways to fail; here are the bytes that no HTTP library sends, and the faults that take a real
connection, several deployments, or much data.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from tests.attacks.conftest import SHORT
from tests.attacks.measuring import MB, taken_by
from tests.attacks.raw_client import (
    BOTH,
    CHAT,
    MESSAGES,
    Answer,
    Seen,
    ask,
    asked,
    connected,
    error_of,
    post,
    raw_asked,
)
from tests.attacks.raw_upstream import (
    BEGUN,
    CHUNKED,
    ENDING,
    EVENTS,
    LAST_CHUNK,
    MESSAGE,
    PLAIN,
    Move,
    RawUpstream,
    Step,
    answer_head,
    chunk,
    frame,
    frames,
    http,
)
from tests.process import GatewayProcess, eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

PLAIN_AND_STREAMED = [pytest.param(False, id="plain"), pytest.param(True, id="streamed")]
WAIT, CLOSE, RESET, IGNORE = Move.WAIT, Move.CLOSE, Move.RESET, Move.IGNORE


def text_of(answer: Answer, path: str) -> str:
    """The text of an answer, plain or streamed, in either format."""
    if "json" in answer.headers["content-type"]:
        message = answer.data
        return str(message["choices"][0]["message"]["content"] if path == CHAT else message["content"][0]["text"])
    told = events_of(answer)
    if path == CHAT:
        return "".join(choice["delta"].get("content") or "" for each in told for choice in each.get("choices", ()))
    return "".join(each["delta"].get("text", "") for each in told if each["type"] == "content_block_delta")


def events_of(answer: Answer) -> list[Any]:
    """The data of a stream's events, without OpenAI's last word and without comments."""
    data = []
    for block in answer.body.decode().split("\n\n"):
        lines = [line.removeprefix("data:").removeprefix(" ") for line in block.split("\n") if line.startswith("data:")]
        data += ["\n".join(lines)] if lines else []
    return [json.loads(text) for text in data if text != "[DONE]"]


def is_whole(answer: Answer, path: str) -> bool:
    """Whether a stream has its ending, once and last."""
    ending = b"data: [DONE]\n\n" if path == CHAT else b'{"type":"message_stop"}\n\n'
    stop = b'"finish_reason":"stop"' if path == CHAT else b'"stop_reason": "end_turn"'
    whole = answer.body.endswith(ending) or answer.body.endswith(ending.replace(b":", b": "))
    return whole and answer.body.count(stop) == 1 and b'"error"' not in answer.body


def is_broken(answer: Answer, path: str) -> bool:
    """Whether a stream ends in one error, with nothing of an ending before it."""
    errors = [each for each in events_of(answer) if "error" in each]
    tail = (b'"finish_reason":"', b'"usage":{', b'"stop_reason": "', b"message_stop")
    ended = path == MESSAGES or answer.body.endswith(b"data: [DONE]\n\n")
    return len(errors) == 1 and ended and not any(each in answer.body for each in tail)


# Not to be reached

UNREACHABLE = ["refused", "no-tls", "no-name"]


@pytest.mark.parametrize("stream", PLAIN_AND_STREAMED)
@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", UNREACHABLE)
async def test_u1_an_upstream_that_cannot_be_reached_is_a_500_that_does_not_say_where(
    gateway: GatewayProcess, upstream: RawUpstream, closed_port: int, name: str, path: str, stream: bool
) -> None:
    """No connection, no TLS, no address: a bare 500, no overload is claimed, and no host stands in it."""
    answer = await ask(gateway, path, asked(model=f"gone/{name}", stream=stream))

    error_of(answer, path, 500)
    assert "retry-after" not in answer.headers
    assert not re.search(rb"127\.0\.0\.1|localhost|aaaa|invalid\b|%d" % closed_port, answer.body)


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", UNREACHABLE)
async def test_u1_the_next_deployment_is_asked_instead(
    gateway: GatewayProcess, upstream: RawUpstream, name: str, path: str
) -> None:
    """Where there is another deployment, the client sees nothing of it."""
    answer = await ask(gateway, path, asked(model=f"gone/{name}-and-good"))

    assert (200, "Hello.") == (answer.status, text_of(answer, path))


# A kept connection that is closed

CLOSED_AS_WE_SEND: dict[str, tuple[Sequence[Step], bool]] = {
    "closed": ([CLOSE], True),
    "reset": ([RESET], True),
    "closed behind a byte": ([b"H", CLOSE], False),
    "reset behind the head": ([answer_head("content-length: 10", type="application/json"), 0.05, RESET], False),
}


@pytest.mark.parametrize("stream", PLAIN_AND_STREAMED)
@pytest.mark.parametrize("name", CLOSED_AS_WE_SEND)
async def test_u3_a_kept_connection_that_was_closed_is_not_the_clients_trouble(
    gateway: GatewayProcess, upstream: RawUpstream, name: str, stream: bool
) -> None:
    """The request is sent once more if no byte of an answer came on a kept connection, and only then."""
    steps, again = CLOSED_AS_WE_SEND[name]
    upstream.hang_up()
    assert 200 == (await ask(gateway, MESSAGES, asked())).status  # leaves a connection to be kept
    upstream.play(*steps)

    answer = await ask(gateway, MESSAGES, asked(stream=stream))

    assert (200 if again else 500, 3 if again else 2) == (answer.status, len(upstream.asked))


@pytest.mark.parametrize("move", [CLOSE, RESET])
async def test_u3_a_new_connection_that_is_closed_is_an_error(
    gateway: GatewayProcess, upstream: RawUpstream, move: Move
) -> None:
    """Nothing is sent twice where it may have been read."""
    upstream.hang_up()
    await ask(gateway, MESSAGES, b"{")  # a turn of the loop, in which the gateway notices
    upstream.play(move)

    answer = await ask(gateway, MESSAGES, asked())

    error_of(answer, MESSAGES, 500)
    assert 1 == len(upstream.asked)


@pytest.mark.parametrize("move", [CLOSE, RESET])
async def test_u3_nothing_is_sent_a_third_time(gateway: GatewayProcess, upstream: RawUpstream, move: Move) -> None:
    """An upstream that always hangs up is an error at the second time."""
    upstream.hang_up()
    assert 200 == (await ask(gateway, MESSAGES, asked())).status
    for _ in range(3):
        upstream.play(move)

    answer = await ask(gateway, MESSAGES, asked())

    error_of(answer, MESSAGES, 500)
    assert len(upstream.asked) <= 3


# Slow, cut, too much

WHOLE_STREAM = BEGUN + ENDING


@pytest.mark.parametrize("path", BOTH)
async def test_u6_a_stream_in_single_bytes_is_whole(gateway: GatewayProcess, upstream: RawUpstream, path: str) -> None:
    """Each byte in a chunk of its own makes the same answer."""
    upstream.play(CHUNKED, *(chunk(WHOLE_STREAM[at : at + 1]) for at in range(len(WHOLE_STREAM))), LAST_CHUNK)

    answer = await ask(gateway, path, asked(stream=True))

    assert (True, "Hello.") == (is_whole(answer, path), text_of(answer, path))


@pytest.mark.parametrize("path", BOTH)
async def test_u6_an_event_that_drips_is_waited_for(hasty: GatewayProcess, upstream: RawUpstream, path: str) -> None:
    """While bytes come nothing has timed out, be it that no event is whole for longer than a silence may last."""
    pieces = [ENDING[at : at + 40] for at in range(0, 400, 40)]
    drip = [step for piece in pieces for step in (SHORT / 4, piece)]
    upstream.play_stream(BEGUN, *drip, ENDING[400:], b"")

    answer = await ask(hasty, path, asked(stream=True))

    assert (True, "Hello.") == (is_whole(answer, path), text_of(answer, path))


LONG = answer_head("content-length: 100000")
CUT_STREAMS: dict[str, tuple[Sequence[Step], Sequence[Step]]] = {
    "chunks, closed": ([CHUNKED, chunk(BEGUN)], [CLOSE]),
    "chunks, reset": ([CHUNKED, chunk(BEGUN)], [RESET]),
    "closed within a chunk": ([CHUNKED, chunk(BEGUN)], [b"ff\r\nevent: ", CLOSE]),
    "a length, closed": ([LONG, BEGUN], [CLOSE]),
    "a length, reset": ([LONG, BEGUN], [RESET]),
    "no length, closed": ([answer_head("connection: close"), BEGUN], [CLOSE]),
    "whole chunks, and no ending": ([CHUNKED, chunk(BEGUN)], [LAST_CHUNK]),
    "garbage for a chunk": ([CHUNKED, chunk(BEGUN)], [b"zz\r\n\r\n", WAIT]),
    "cut in the ending": ([CHUNKED, chunk(BEGUN)], [chunk(ENDING[:60]), CLOSE]),
}
"""What is sent before a client has seen the text, and what then."""


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", CUT_STREAMS)
async def test_u7_a_stream_that_is_cut_never_looks_whole(
    gateway: GatewayProcess, upstream: RawUpstream, name: str, path: str
) -> None:
    """However a connection ends in the middle, the client has what came and then an error, and no ending."""
    before, after = CUT_STREAMS[name]
    arrived = asyncio.Event()
    upstream.play(*before, arrived, *after)

    async with connected(gateway) as client:
        client.send(post(path, asked(stream=True, stream_options={"include_usage": True})))
        answer = await client.answer(10, seen=Seen(b"lo.", arrived))

    assert (200, True, "Hello.") == (answer.status, is_broken(answer, path), text_of(answer, path)), answer.body


CUT_ANSWERS: dict[str, Sequence[Step]] = {
    "closed": [PLAIN[:-9], CLOSE],
    "reset": [PLAIN[:-9], 0.05, RESET],
    "chunks, closed": [answer_head("transfer-encoding: chunked", type="application/json"), chunk(PLAIN[-9:]), CLOSE],
    "closed in the head": [PLAIN[:40], CLOSE],
    "garbage for a chunk": [answer_head("transfer-encoding: chunked", type="application/json"), b"zz\r\n\r\n", WAIT],
    "no length": [answer_head("connection: close", type="application/json"), json.dumps(MESSAGE).encode()[:-9], CLOSE],
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", CUT_ANSWERS)
async def test_u7_a_plain_answer_that_is_cut_is_a_500(
    gateway: GatewayProcess, upstream: RawUpstream, name: str, path: str
) -> None:
    """Half an answer is none."""
    upstream.play(*CUT_ANSWERS[name])

    async with connected(gateway) as client:
        client.send(post(path, asked()))
        answer = await client.answer(10)

    error_of(answer, path, 500)


@pytest.mark.parametrize("path", BOTH)
async def test_u10_nobody_waits_for_a_connection_that_stays_open(
    gateway: GatewayProcess, upstream: RawUpstream, path: str
) -> None:
    """An answer ends at its message_stop, and a connection that stays open behind it is dropped."""
    upstream.play_stream(WHOLE_STREAM, WAIT)

    answer = await ask(gateway, path, asked(stream=True))
    await eventually(lambda: upstream.left == 1)

    assert (True, "Hello.") == (is_whole(answer, path), text_of(answer, path))


AFTER = {
    "more events": frames(EVENTS),
    "an error": b"event: error\ndata: {}\n\n",
    "garbage": b"data: {\n\n",
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", AFTER)
async def test_u10_what_follows_message_stop_is_ignored(
    gateway: GatewayProcess, upstream: RawUpstream, name: str, path: str
) -> None:
    """Behind its message_stop nothing belongs to an answer, in the same read or a later one."""
    upstream.play_stream(WHOLE_STREAM + AFTER[name], 0.05, AFTER[name], b"")

    answer = await ask(gateway, path, asked(stream=True))

    assert (True, "Hello.") == (is_whole(answer, path), text_of(answer, path))


@pytest.mark.parametrize("path", BOTH)
async def test_u10_a_second_start_is_ignored(gateway: GatewayProcess, upstream: RawUpstream, path: str) -> None:
    """One answer has one beginning."""
    upstream.play_stream(BEGUN + frame(EVENTS[0]) + ENDING, b"")

    answer = await ask(gateway, path, asked(stream=True))

    assert (True, "Hello.") == (is_whole(answer, path), text_of(answer, path))
    assert answer.body.count(b"message_start" if path == MESSAGES else b'"role":"assistant"') <= 2


# What is not known, what is written oddly

STRANGE: dict[str, dict[str, Any]] = {
    "an event": {"type": "thought_bubble", "x": [1.10]},
    "a delta": {"type": "content_block_delta", "index": 0, "delta": {"type": "hologram_delta", "hologram": "x"}},
    "a block": {"type": "content_block_start", "index": 7, "content_block": {"type": "hologram", "data": None}},
    "an end of a block that never began": {"type": "content_block_stop", "index": 99},
    "a delta of a block that never began": {
        "type": "content_block_delta",
        "index": 98,
        "delta": {"type": "citations_delta", "citation": {}},
    },
    "a ping with fields": {"type": "ping", "extra": {"a": [None]}},
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", STRANGE)
async def test_u12_what_is_not_known_passes_or_is_left_out(
    gateway: GatewayProcess, upstream: RawUpstream, name: str, path: str
) -> None:
    """In the Messages format it is passed on as it came; for OpenAI's it is left out; the answer is whole."""
    upstream.play_stream(BEGUN + frame(STRANGE[name]) + ENDING, b"")

    answer = await ask(gateway, path, asked(stream=True))

    assert (True, "Hello.") == (is_whole(answer, path), text_of(answer, path)), answer.body
    assert path == CHAT or frame(STRANGE[name]) in answer.body


@pytest.mark.parametrize("stream", PLAIN_AND_STREAMED)
async def test_u12_an_unknown_stop_reason_is_a_stop(
    gateway: GatewayProcess, upstream: RawUpstream, stream: bool
) -> None:
    """OpenAI's clients know four ends; a fifth is the usual one."""
    upstream.play(http(json.dumps({**MESSAGE, "stop_reason": "bored"}).encode()))
    if stream:
        upstream.forget()
        upstream.play_stream(BEGUN + ENDING.replace(b"end_turn", b"bored"), b"")

    answer = await ask(gateway, CHAT, asked(stream=stream))

    assert b'"finish_reason":"stop"' in answer.body


ODDLY_WRITTEN: dict[str, Callable[[bytes], bytes]] = {
    "CR and LF": lambda stream: stream.replace(b"\n", b"\r\n"),
    "CR alone": lambda stream: stream.replace(b"\n", b"\r"),
    "no space behind the colons": lambda stream: stream.replace(b"data: ", b"data:").replace(b"event: ", b"event:"),
    "no names of events": lambda stream: re.sub(rb"event: .*\n", b"", stream),
    "the name behind the data": lambda stream: re.sub(rb"(event: .*\n)(data: .*\n)", rb"\2\1", stream),
    "several lines of data": lambda stream: stream.replace(b'{"type": ', b'{\ndata: "type": '),
    "comments": lambda stream: b": hello\n\n" + stream.replace(b"data: ", b": between\ndata: "),
    "ids and times to retry": lambda stream: stream.replace(b"data: ", b"id: 7\nretry: 10\ndata: "),
    "a BOM": lambda stream: b"\xef\xbb\xbf" + stream,
    "unknown fields": lambda stream: stream.replace(b"data: ", b"colour: red\nnothing\ndata: "),
    "many blank lines": lambda stream: stream.replace(b"\n\n", b"\n" * 50),
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", ODDLY_WRITTEN)
async def test_u15_a_stream_is_read_as_the_standard_says(
    gateway: GatewayProcess, upstream: RawUpstream, name: str, path: str
) -> None:
    """However a stream is written, its events are the same, and a client gets each with its name."""
    upstream.play_stream(ODDLY_WRITTEN[name](WHOLE_STREAM), b"")

    answer = await ask(gateway, path, asked(stream=True))

    assert "Hello." == text_of(answer, path)
    if path == MESSAGES:
        named = re.findall(rb"event: (\w+)\ndata: ", answer.body)
        assert [each["type"] for each in events_of(answer)] == [each.decode() for each in named]


UNFINISHED = {
    "message_stop without its blank line": (WHOLE_STREAM[:-1], True),
    "message_delta without its blank line": (BEGUN + ENDING.partition(b"event: message_stop")[0][:-1], False),
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", UNFINISHED)
async def test_u15_an_unfinished_event_is_none(
    gateway: GatewayProcess, upstream: RawUpstream, name: str, path: str
) -> None:
    """An event that its stream ends in is dropped: an answer is whole if only its message_stop is lost so."""
    stream, whole = UNFINISHED[name]
    upstream.play_stream(stream, b"")

    answer = await ask(gateway, path, asked(stream=True))

    assert "Hello." == text_of(answer, path)
    assert (whole, not whole) == (b"error" not in answer.body, is_broken(answer, path)), answer.body


async def test_u15_data_that_is_no_json_harms_nobody(gateway: GatewayProcess, upstream: RawUpstream) -> None:
    """An event of no known kind is nobody's, whatever is in it, NUL and no JSON included."""
    upstream.play_stream(BEGUN + b"event: x\ndata: \0{\n\n" + ENDING, b"")

    answer = await ask(gateway, CHAT, asked(stream=True))

    assert (True, "Hello.") == (is_whole(answer, CHAT), text_of(answer, CHAT))


# Much data


def tool_call(arguments: bytes) -> bytes:
    """The events of a call with these arguments, in one delta."""
    start = {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "id": "t", "name": "f"}}
    delta = b'{"type":"content_block_delta","index":1,"delta":{"type":"input_json_delta","partial_json":"%b"}}'
    return b"".join(
        (
            frame(start),
            b"event: content_block_delta\ndata: " + delta % arguments + b"\n\n",
            frame({"type": "content_block_stop", "index": 1}),
        )
    )


@pytest.mark.parametrize("path", BOTH)
async def test_u16_a_line_of_a_megabyte_passes(gateway: GatewayProcess, upstream: RawUpstream, path: str) -> None:
    """The arguments of a tool are one line, however long they are."""
    text = b"0123456789" * (MB // 10)
    upstream.play_stream(BEGUN + tool_call(b'{\\"a\\":\\"%b\\"}' % text) + ENDING, b"")

    answer = await ask(gateway, path, asked(stream=True))

    assert text in answer.body
    assert b"error" not in answer.body[-1000:]


@pytest.mark.slow
@pytest.mark.parametrize("path", BOTH)
async def test_u16_a_line_without_end_is_an_error(gateway: GatewayProcess, upstream: RawUpstream, path: str) -> None:
    """Over the limit the stream ends in an error, the upstream is left, and the memory was bounded."""
    upstream.play_stream(BEGUN, b"event: content_block_delta\ndata: ", *[b"x" * MB] * 100, WAIT)

    async with taken_by(gateway) as taken:
        answer = await ask(gateway, path, asked(stream=True))
    await eventually(lambda: upstream.playing == 0)

    assert is_broken(answer, path), answer.body[-300:]
    assert taken.memory < 160 * MB  # the limit is 64 MB


@pytest.mark.slow
async def test_u16_a_million_blank_lines_are_nothing(gateway: GatewayProcess, upstream: RawUpstream) -> None:
    """Lines without anything neither fill the memory nor end the stream."""
    upstream.play_stream(BEGUN, *[b"\n" * 100_000] * 10, ENDING, b"")

    async with taken_by(gateway) as taken:
        answer = await ask(gateway, MESSAGES, asked(stream=True))

    assert is_whole(answer, MESSAGES)
    assert taken.memory < 16 * MB


# Answers that are none

MB_OF_JSON = chunk(b" " * MB)
NO_ANSWERS: dict[str, Sequence[Step]] = {
    "HTML": [http(b"<html>busy</html>", type="text/html")],
    "nothing": [http(b"")],
    "nothing, as a 204": [answer_head(status="204 No Content", type=None)],
    "no JSON": [http(b"Hello.")],
    "cut JSON": [http(json.dumps(MESSAGE).encode()[:-5])],
    "an array": [http(b"[%b]" % json.dumps(MESSAGE).encode())],
    "null": [http(b"null")],
    "deep JSON": [http(b"[" * 100_000 + b"]" * 100_000)],
    "no UTF-8": [http(b'{"type":"message","content":[{"type":"text","text":"\xff"}]}')],
    "an error with 200": [http(b'{"type":"error","error":{"type":"api_error","message":"oops"}}')],
    "a content that is no list": [http(json.dumps({**MESSAGE, "content": "Hello."}).encode())],
}


@pytest.mark.parametrize("stream", PLAIN_AND_STREAMED)
@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", NO_ANSWERS)
async def test_u18_an_answer_that_is_no_message_is_a_500(
    gateway: GatewayProcess, upstream: RawUpstream, name: str, path: str, stream: bool
) -> None:
    """Whatever comes with 200 and is no message is a bare 500, and nothing of it reaches the client."""
    upstream.play(*NO_ANSWERS[name])

    answer = await ask(gateway, path, asked(stream=stream))

    error_of(answer, path, 500)
    assert not re.search(rb"<html|oops|Hello", answer.body)


@pytest.mark.slow
@pytest.mark.parametrize("status", ["200 OK", "400 Bad Request"])
async def test_u18_an_answer_without_end_is_given_up(
    gateway: GatewayProcess, upstream: RawUpstream, status: str
) -> None:
    """A body of 200 MB is not read to its end, good or bad."""
    upstream.play(
        answer_head("transfer-encoding: chunked", status=status, type="application/json"), *[MB_OF_JSON] * 200
    )

    async with taken_by(gateway) as taken:
        answer = await ask(gateway, MESSAGES, asked())

    assert answer.status in (400, 500)
    assert taken.memory < 200 * MB  # the limit is 64 MB


@pytest.mark.parametrize("path", BOTH)
async def test_u19_a_whole_message_in_place_of_a_stream_is_streamed(
    gateway: GatewayProcess, upstream: RawUpstream, path: str
) -> None:
    """Where a stream was asked for and a message came, the client has its stream."""
    upstream.play(PLAIN)

    answer = await ask(gateway, path, asked(stream=True))

    assert "Hello." == text_of(answer, path)
    assert answer.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("path", BOTH)
async def test_u19_a_stream_in_place_of_a_message_is_a_500(
    gateway: GatewayProcess, upstream: RawUpstream, path: str
) -> None:
    """Where a message was asked for and a stream came, it is an error at once, though the stream stays open."""
    upstream.play_stream(WHOLE_STREAM, b"")

    error_of(await ask(gateway, path, asked()), path, 500)


# Statuses

BODIES: Mapping[str, bytes] = {
    "JSON": b'{"type":"error","error":{"type":"some_error","message":"provider-said"}}',
    "HTML": b"<html><h1>provider-said</h1></html>",
    "nothing": b"",
}
STATUSES: dict[int, tuple[int, int]] = {
    204: (500, 500),
    401: (500, 500),
    402: (500, 500),
    403: (500, 500),
    404: (500, 500),
    408: (504, 504),
    413: (413, 413),
    418: (500, 500),
    422: (400, 400),
    429: (429, 429),
    451: (500, 500),
    500: (500, 500),
    502: (500, 500),
    503: (503, 529),
    504: (504, 504),
    520: (500, 500),
    529: (503, 529),
}
"""What an upstream's status is for OpenAI's clients, and for those of the Messages format."""


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("status", STATUSES)
async def test_u21_u22_u24_each_status_has_its_meaning(
    gateway: GatewayProcess, upstream: RawUpstream, status: int, path: str, body: str
) -> None:
    """The provider's troubles are not the client's; each is told in the envelope, whatever its body is, and once."""
    expected = STATUSES[status][path == MESSAGES]
    answers = []
    for stream in (False, True):
        upstream.play(http(BODIES[body] if status != 204 else b"", status=f"{status} Whatever"))
        answers.append(await ask(gateway, path, asked(stream=stream)))

    errors = [error_of(answer, path, expected) for answer in answers]
    shown = body == "JSON" and expected not in (500,)
    assert [shown, shown] == ["provider-said" in error["message"] for error in errors]
    assert b"<h" not in answers[0].body + answers[1].body
    assert [expected in (429, 503, 529)] * 2 == ["retry-after" in answer.headers for answer in answers]
    assert 2 == len(upstream.asked), "asked again"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("path", BOTH)
async def test_u25_a_redirect_is_not_followed(
    gateway: GatewayProcess, upstream: RawUpstream, path: str, status: int
) -> None:
    """The key goes nowhere but where the configuration says."""
    upstream.play(http(b"", f"location: {upstream.url}/elsewhere", status=f"{status} Elsewhere"))

    answer = await ask(gateway, path, asked())

    error_of(answer, path, 500)
    assert 1 == len(upstream.asked)
    assert "location" not in answer.headers


# Compression

MESSAGE_JSON = json.dumps(MESSAGE).encode()
COMPRESSED: dict[str, tuple[str, bytes, bool]] = {
    "gzip": ("gzip", gzip.compress(MESSAGE_JSON), True),
    "broken gzip": ("gzip", b"\x1f\x8b\x08\0" + MESSAGE_JSON, False),
    "no gzip at all": ("gzip", MESSAGE_JSON, False),
    "truncated gzip": ("gzip", gzip.compress(MESSAGE_JSON)[:-9], False),
    "truncated to whole JSON": ("gzip", gzip.compress(MESSAGE_JSON)[:-8], False),
    "unknown": ("x-zip", MESSAGE_JSON, False),
    "a bomb": ("gzip", gzip.compress(b" " * 80 * MB), False),
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", COMPRESSED)
async def test_u27_a_compressed_answer_is_read_or_refused(
    gateway: GatewayProcess, upstream: RawUpstream, name: str, path: str
) -> None:
    """Good gzip is read though nobody asked for it; broken, cut and boundless is an error; clients get no encoding."""
    encoding, body, good = COMPRESSED[name]
    upstream.play(http(body, f"content-encoding: {encoding}"))

    answer = await ask(gateway, path, asked())

    assert "content-encoding" not in answer.headers
    if good:
        assert "Hello." == text_of(answer, path)
    else:
        error_of(answer, path, 500)


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("cut", [0, 30], ids=["whole", "truncated"])
async def test_u27_a_compressed_stream_is_whole_only_to_its_end(
    gateway: GatewayProcess, upstream: RawUpstream, cut: int, path: str
) -> None:
    """A compressed stream is read as well, and a truncated one is no whole answer."""
    data = gzip.compress(WHOLE_STREAM)
    upstream.play(http(data[: len(data) - cut], "content-encoding: gzip", type="text/event-stream"))

    answer = await ask(gateway, path, asked(stream=True))

    assert (cut == 0) == (answer.status == 200 and is_whole(answer, path)), answer.body


# Headers

BAD_HEADS = {
    "a line of 9000 bytes": [f"x: {'a' * 9000}"],
    "a line of 1 MB": [f"x: {'a' * MB}"],
    "1000 lines": [f"x-{number}: a" for number in range(1000)],
    "NUL": ["x: a\0b"],
    "a bare LF": ["x: a\nset-cookie: injected=1"],
    "two lengths": ["content-length: 5"],
    "a length and chunks": ["transfer-encoding: chunked"],
    "a length that is none": ["content-length: abc"],
    "a space before the colon": ["set-cookie : injected=1"],
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", BAD_HEADS)
async def test_u28_headers_out_of_bounds_are_an_error_or_left_out(
    gateway: GatewayProcess, upstream: RawUpstream, name: str, path: str
) -> None:
    """An answer whose head breaks the rules is a 500, or is read without what breaks them; nothing is injected."""
    upstream.play(http(MESSAGE_JSON, *BAD_HEADS[name]), CLOSE)

    answer = await ask(gateway, path, asked())

    assert "set-cookie" not in answer.headers
    if answer.status == 200:
        assert "Hello." == text_of(answer, path)
    else:
        error_of(answer, path, 500)


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    "sent", [b"\0\1\2\3" * 50, b"SSH-2.0-x\r\n", b"HTTP/1.1 99999 x\r\n\r\n", b"HTTP/1.1 200\r\n\r\n", b"\r\n" * 9000]
)
async def test_u28_what_is_no_http_is_an_error(
    gateway: GatewayProcess, upstream: RawUpstream, sent: bytes, path: str
) -> None:
    """A server that speaks something else is a 500."""
    upstream.play(sent, CLOSE)

    error_of(await ask(gateway, path, asked()), path, 500)


# Bodies that are not taken


@pytest.mark.parametrize("stream", PLAIN_AND_STREAMED)
async def test_u30_an_answer_before_the_body_was_read_is_passed_on(
    gateway: GatewayProcess, upstream: RawUpstream, stream: bool
) -> None:
    """An upstream that refuses at once, and then takes no more, has its refusal told."""
    refusal = b'{"type":"error","error":{"type":"request_too_large","message":"more than I take"}}'
    upstream.play(http(refusal, "connection: close", status="413 Too Large"), 0.3, CLOSE, reads_body=False)

    answer = await ask(gateway, MESSAGES, raw_asked(stream=str(stream).lower().encode(), x=b'"%b"' % (b"x" * 30 * MB)))

    assert "more than I take" == error_of(answer, MESSAGES, 413)["message"]


@pytest.mark.parametrize("stream", PLAIN_AND_STREAMED)
@pytest.mark.parametrize("path", BOTH)
async def test_u31_an_upstream_that_takes_no_body_is_given_up(
    hasty: GatewayProcess, upstream: RawUpstream, path: str, stream: bool
) -> None:
    """Where the upstream reads nothing, the request times out."""
    upstream.play(IGNORE, reads_body=False)

    answer = await ask(
        hasty,
        path,
        raw_asked(stream=str(stream).lower().encode(), metadata=b'"%b"' % (b"x" * 8 * MB))
        if path == MESSAGES
        else asked(stream=stream, messages=[{"role": "user", "content": "x" * 8 * MB}]),
    )

    error_of(answer, path, 504)


# Several at once


@pytest.mark.parametrize("path", BOTH)
async def test_u36_a_broken_stream_leaves_the_others_alone(
    gateway: GatewayProcess, upstream: RawUpstream, path: str
) -> None:
    """Of streams that run side by side, each has its own text and its own ending."""
    texts = ["one", "two", "three", "four", "five", "six"]
    broken = texts[::2]
    for text in texts:
        begun = BEGUN.replace(b"Hel", text.encode())
        ending: Sequence[Step] = [CLOSE] if text in broken else [chunk(ENDING), LAST_CHUNK]
        upstream.play(CHUNKED, chunk(begun[:200]), 0.05, chunk(begun[200:]), 0.1, *ending)

    answers = await asyncio.gather(*(ask(gateway, path, asked(stream=True)) for _ in texts))

    told = sorted((text_of(answer, path), is_whole(answer, path), is_broken(answer, path)) for answer in answers)
    assert sorted((f"{text}lo.", text not in broken, text in broken) for text in texts) == told

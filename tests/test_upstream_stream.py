"""A streamed answer of an upstream: bytes in, events out, and whether it is whole.

Most of these tests say themselves what each read brings, which no real connection does; the last ones have a real one.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import zlib
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.document import Event
from proxy.errors import GatewayError, Kind
from proxy.progress import Progress
from proxy.settings import UpstreamSettings
from proxy.sse import LONGEST_EVENT
from proxy.testing import CUT, Reply, ScriptedUpstream, stream_reply, text_events
from proxy.upstream.client import Timeouts, Upstream, UpstreamClient
from proxy.upstream.faults import UpstreamFault
from proxy.upstream.stream import MessageStream
from proxy.usage import Usage
from tests.strategies import events_of, messages, pieces_of

Json = dict[str, Any]
NEVER, SOON = 60.0, 0.02


Piece = bytes | float | BaseException
"""What a read brings: bytes, an exception of the connection, or nothing for so many seconds."""


class Reads:
    """The body of an answer, read piece by piece as aiohttp's reader gives it; behind the last piece is its end."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = deque(pieces)
        self._waiting: asyncio.Future[None] | None = None

    async def readany(self) -> bytes:
        while self._pieces:
            piece = self._pieces.popleft()
            if isinstance(piece, BaseException):
                raise piece
            if isinstance(piece, bytes):
                return piece
            self._waiting = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._waiting], timeout=piece)
            if self._waiting.done():
                self._waiting.result()
        return b""

    def set_exception(self, error: BaseException) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)


def stream_of(
    *pieces: Piece, first: float = NEVER, idle: float = NEVER, encoding: str = "identity", usage: Usage | None = None
) -> MessageStream:
    """The stream of an answer whose reads bring these pieces."""
    response: Any = SimpleNamespace(content=Reads(pieces), headers={"content-encoding": encoding}, close=lambda: None)
    return MessageStream(response, Progress(usage or Usage()), "Model", "upstream-secret", first, idle)


async def rest_of(stream: MessageStream) -> tuple[list[Event], UpstreamFault | None]:
    """All further events, and the fault with which they end."""
    events: list[Event] = []
    try:
        while read := await stream.read():
            events += read
    except UpstreamFault as fault:
        return events, fault
    finally:
        stream.close()
    return events, None


async def played(*pieces: Piece, **of_stream: Any) -> tuple[list[Event], UpstreamFault | None]:
    """All events of these reads, and the fault with which they end."""
    return await rest_of(stream_of(*pieces, **of_stream))


def frame(raw: str, name: str | None = None) -> bytes:
    """An event on the wire, by default under the name of its type."""
    return f"event: {name or json.loads(raw)['type']}\ndata: {raw}\n\n".encode()


def frames(events: Iterable[Json]) -> bytes:
    return b"".join(frame(json.dumps(event)) for event in events)


WHOLE = text_events("a", "b")
START, OPENED, A, B, CLOSED, ENDING, STOP = (frame(json.dumps(event)) for event in WHOLE)
PING = frame('{"type": "ping"}')
BEGINNING = START + OPENED + A
ADDED = Event("message_stop", raw=b'{"type":"message_stop"}')


def kinds(events: Iterable[Event]) -> list[str]:
    return [event.kind for event in events]


async def test_events_come_as_they_are() -> None:
    """Every event keeps its bytes, its order and its kind; the model alone has the client's name."""
    raw = '{ "type" : "message_start", "message": {"id": "msg_1", "model" :  "theirs" , "x": [1.10, "\\u00e9"] } }'
    delta = '{"type":"content_block_delta", "index":0,"delta":{"text":"a","type":"text_delta"} }'

    events, fault = await played(frame(raw) + frame(delta) + ENDING + STOP)

    assert fault is None
    assert ["message_start", "content_block_delta", "message_delta", "message_stop"] == kinds(events)
    assert raw.replace('"theirs"', '"Model"').encode() == events[0].unchanged
    assert delta.encode() == events[1].unchanged


MODELS = {
    "no model": '{"type":"message_start","message":{"id":"m"}}',
    "a model deeper": '{"type":"message_start","message":{"x":{"model":"theirs"}}}',
    "a model beside the message": '{"type":"message_start","model":"theirs","message":{}}',
}


@pytest.mark.parametrize("raw", MODELS.values(), ids=MODELS)
async def test_no_other_model_is_renamed(raw: str) -> None:
    """Only `message.model` is the model of the answer."""
    events, _ = await played(frame(raw) + ENDING + STOP)

    assert raw.encode() == events[0].unchanged


@pytest.mark.parametrize("key", ['"model"', '"mod\\u0065l"'])
async def test_a_model_is_found_however_it_is_spelt(key: str) -> None:
    """The key may be escaped, the value null."""
    events, _ = await played(frame(f'{{"type":"message_start","message":{{{key}:null}}}}') + ENDING + STOP)

    assert "Model" == events[0].data["message"]["model"]


async def test_all_events_of_a_read_come_together() -> None:
    """What one read brought is given at once, and nothing is held back."""
    stream = stream_of(START + OPENED + A[:20], A[20:] + B)

    reads = [kinds(await stream.read()), kinds(await stream.read())]
    stream.close()

    assert [["message_start", "content_block_start"], ["content_block_delta"] * 2] == reads


async def test_the_first_events_can_be_waited_for() -> None:
    """Waiting for the first event takes nothing away: the next read gives what was waited for, once."""
    stream = stream_of(PING + BEGINNING, B + CLOSED + ENDING + STOP)

    await stream.wait_for_first_event()
    reads = [kinds(await stream.read()) for _ in range(3)]
    stream.close()

    assert [event["type"] for event in WHOLE[:3]] == reads[0]
    assert [event["type"] for event in WHOLE[3:]] == reads[1]
    assert [] == reads[2]


PINGS: dict[str, tuple[list[bytes], list[str]]] = {
    "before the first event": ([PING, PING + START, ENDING + STOP], ["message_start", "message_delta", "message_stop"]),
    "in the same read, before it": ([PING + START + ENDING + STOP], ["message_start", "message_delta", "message_stop"]),
    "in the same read, behind it": (
        [START + PING, ENDING + STOP],
        ["message_start", "ping", "message_delta", "message_stop"],
    ),
    "in a later read": ([START, PING, ENDING + STOP], ["message_start", "ping", "message_delta", "message_stop"]),
    "in the tail": ([START, ENDING + PING + STOP], ["message_start", "message_delta", "ping", "message_stop"]),
}


@pytest.mark.parametrize(("reads", "expected"), PINGS.values(), ids=PINGS)
async def test_pings(reads: list[bytes], expected: list[str]) -> None:
    """An upstream's pings are withheld before its first event and pass unchanged behind it."""
    events, _ = await played(*reads)

    assert expected == kinds(events)
    assert all(event.unchanged == b'{"type": "ping"}' for event in events if event.kind == "ping")


NAMED = {
    "an unknown type": (frame('{"type":"of_tomorrow","x":1}'), "of_tomorrow"),
    "no name": (b'data: {"type":"content_block_stop","index":0}\n\n', "content_block_stop"),
    "an empty name": (b'event:\ndata: {"type":"content_block_stop","index":0}\n\n', "content_block_stop"),
    "no type": (b'event: of_tomorrow\ndata: {"x":1}\n\n', "of_tomorrow"),
    "an unknown name, a known type": (frame('{"type":"content_block_stop","index":0}', "x"), "content_block_stop"),
    "data that is no JSON": (b"event: of_tomorrow\ndata: hello\n\n", "of_tomorrow"),
    "a type that is no text": (b'event: of_tomorrow\ndata: {"type":[1]}\n\n', "of_tomorrow"),
    "a type behind a lone surrogate": (b'data: {"x":"\\ud800","type":"of_tomorrow"}\n\n', "of_tomorrow"),
}


@pytest.mark.parametrize(("sent", "expected"), NAMED.values(), ids=NAMED)
async def test_the_kind_of_an_event(sent: bytes, expected: str) -> None:
    """An event is of its type where its name isn't known, so that a client gets an `event:` line in any case."""
    events, fault = await played(START + sent + ENDING + STOP)

    assert fault is None
    assert ["message_start", expected, "message_delta", "message_stop"] == kinds(events)


async def test_a_second_start_and_what_follows_the_end_are_dropped() -> None:
    """One message has one start and one end."""
    events, fault = await played(START + START + A + ENDING, STOP + A + START + frame('{"type":"error"}') + STOP)

    assert fault is None
    assert ["message_start", "content_block_delta", "message_delta", "message_stop"] == kinds(events)


# Endings

RESET, HALF = aiohttp.ClientConnectionResetError("reset"), aiohttp.ClientPayloadError("half")
NO_REASON = frame('{"type":"message_delta","delta":{"stop_reason":null},"usage":{"output_tokens":7}}')
OVERLOADED = frame('{"type":"error","error":{"type":"overloaded_error","message":"no room"}}')
UNREADABLE = "the provider's answer can't be read"
BROKEN_OFF = "the provider's answer broke off"

COMPLETE: dict[str, list[Piece]] = {
    "message_stop": [BEGINNING, ENDING + STOP],
    "message_stop, the connection left open": [BEGINNING, ENDING + STOP, NEVER],
    "no message_stop": [BEGINNING, ENDING],
    "half a message_stop": [BEGINNING, ENDING + STOP[:-1]],
    "reset before message_stop": [BEGINNING, ENDING, RESET],
    "cut short before message_stop": [BEGINNING, ENDING, HALF],
    "a time-out of the connection before message_stop": [BEGINNING, ENDING, TimeoutError()],
    "a stop_reason, then another count": [BEGINNING, ENDING, NO_REASON],
}


@pytest.mark.parametrize("pieces", COMPLETE.values(), ids=COMPLETE)
async def test_a_stream_with_a_stop_reason_is_whole(pieces: list[Piece]) -> None:
    """A stream that had its stop_reason is complete though it lost its message_stop, which is added."""
    events, fault = await played(*pieces)

    assert fault is None
    assert "message_stop" == events[-1].kind
    assert ["message_stop"] == [kind for kind in kinds(events) if kind == "message_stop"]
    assert {"type": "message_stop"} == events[-1].data


async def test_silence_behind_a_stop_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message_stop that doesn't come is not waited for as long as any other event."""
    monkeypatch.setattr("proxy.upstream.stream.TAIL_TIMEOUT", SOON)

    events, fault = await played(BEGINNING, ENDING, NEVER)

    assert fault is None
    assert ADDED.data == events[-1].data


# how it ends: its kind, its words, and how many events came before
BROKEN: dict[str, tuple[list[Piece], Kind, str, int]] = {
    "nothing at all": ([b""], Kind.INTERNAL, BROKEN_OFF, 0),
    "only a ping": ([PING], Kind.INTERNAL, BROKEN_OFF, 0),
    "only a comment": ([b": hello\n\n"], Kind.INTERNAL, BROKEN_OFF, 0),
    "end of file": ([BEGINNING], Kind.INTERNAL, BROKEN_OFF, 3),
    "end of file within an event": ([BEGINNING, B[:-1]], Kind.INTERNAL, BROKEN_OFF, 3),
    "a message_delta without a reason": ([BEGINNING, NO_REASON], Kind.INTERNAL, BROKEN_OFF, 4),
    "reset": ([BEGINNING, RESET], Kind.INTERNAL, BROKEN_OFF, 3),
    "reset before the first event": ([RESET], Kind.INTERNAL, BROKEN_OFF, 0),
    "cut short": ([BEGINNING, HALF], Kind.INTERNAL, BROKEN_OFF, 3),
    "an error first": ([OVERLOADED], Kind.OVERLOADED, "no room", 0),
    "an error behind a ping": ([PING, OVERLOADED], Kind.OVERLOADED, "no room", 0),
    "an error in the same read": ([BEGINNING + OVERLOADED + B], Kind.OVERLOADED, "no room", 3),
    "an error in a later read": ([BEGINNING, OVERLOADED], Kind.OVERLOADED, "no room", 3),
    "an error behind the stop_reason": ([BEGINNING, ENDING + OVERLOADED], Kind.OVERLOADED, "no room", 4),
    "an error by its type alone": (
        [b'data: {"type":"error","error":"no"}\n\n'],
        Kind.INTERNAL,
        "the provider failed to answer this request",
        0,
    ),
    "an error that says nothing": (
        [b"event: error\ndata: x\n\n"],
        Kind.INTERNAL,
        "the provider failed to answer this request",
        0,
    ),
    "an event without a type": ([BEGINNING, b"data: {}\n\n"], Kind.INTERNAL, UNREADABLE, 3),
    "HTML": ([b"data: <html>\n\n"], Kind.INTERNAL, UNREADABLE, 0),
    "a start that is no JSON": ([b"event: message_start\ndata: {\n\n"], Kind.INTERNAL, UNREADABLE, 0),
    "a start without a message": ([frame('{"type":"message_start"}')], Kind.INTERNAL, UNREADABLE, 0),
    "a start whose message is none": ([frame('{"type":"message_start","message":[]}')], Kind.INTERNAL, UNREADABLE, 0),
    "a start that is a list": ([b"event: message_start\ndata: []\n\n"], Kind.INTERNAL, UNREADABLE, 0),
    "a block that is no JSON": ([START, b"event: content_block_start\ndata: {\n\n"], Kind.INTERNAL, UNREADABLE, 1),
    "an ending that is a list": ([START, b"event: message_delta\ndata: []\n\n"], Kind.INTERNAL, UNREADABLE, 1),
    "a kind that no line can hold": ([b'data: {"type":"a\\nb"}\n\n'], Kind.INTERNAL, UNREADABLE, 0),
}


@pytest.mark.parametrize(("pieces", "kind", "message", "before"), BROKEN.values(), ids=BROKEN)
async def test_a_stream_that_breaks(pieces: list[Piece], kind: Kind, message: str, before: int) -> None:
    """A stream without its ending is an error, and what came before the failure was given first."""
    events, fault = await played(*pieces)

    assert fault is not None
    assert (kind, message, before) == (fault.kind, fault.message, len(events))


async def test_no_first_event_in_time() -> None:
    """Pings and comments keep nobody waiting for the first event."""
    events, fault = await played(PING, b": hello\n\n", NEVER, first=SOON)

    assert fault is not None
    assert ([], Kind.TIMEOUT) == (events, fault.kind)


async def test_silence_in_a_stream() -> None:
    """An upstream that falls silent has timed out."""
    events, fault = await played(BEGINNING, NEVER, idle=SOON)

    assert fault is not None
    assert (3, Kind.TIMEOUT) == (len(events), fault.kind)


async def test_a_slow_stream_lives() -> None:
    """Each read moves the time-out on: a stream may take longer than any of them."""
    drops: list[Piece] = [piece for at in range(0, len(BEGINNING), 40) for piece in (BEGINNING[at : at + 40], 0.01)]

    drops_of_text: list[Piece] = [A, 0.01] * 10

    events, fault = await played(START, *drops, *drops_of_text, ENDING + STOP, first=0.15, idle=0.15)

    assert fault is None
    assert 10 <= kinds(events).count("content_block_delta")


async def test_an_endless_event_is_an_error() -> None:
    """An event that never ends is an error, and ends before it fills the memory."""
    piece = b"x" * 2**20

    events, fault = await played(BEGINNING, b"data: ", *itertools.repeat(piece, LONGEST_EVENT // len(piece) + 1))

    assert fault is not None
    assert (3, UNREADABLE) == (len(events), fault.message)


# Compressed, though identity was asked for

WIRE = frames(WHOLE)
SHORTENED = frames(WHOLE[:-1])
COMPRESSED = {
    "gzip": ("gzip", gzip.compress(WIRE)),
    "x-gzip": ("X-GZIP", gzip.compress(WIRE)),
    "deflate": ("deflate", zlib.compress(WIRE)),
    "identity": ("identity", WIRE),
    "gzip without the message_stop": ("gzip", gzip.compress(SHORTENED)),
    "gzip cut off behind the stop_reason": ("gzip", gzip.compress(SHORTENED, 0)[:-8]),
}


@pytest.mark.parametrize(("encoding", "wire"), COMPRESSED.values(), ids=COMPRESSED)
async def test_a_compressed_stream(encoding: str, wire: bytes) -> None:
    """A compressed stream is read as if it weren't, in one read and byte by byte."""
    whole, fault = await played(wire, encoding=encoding)
    bytewise, other = await played(*(wire[at : at + 1] for at in range(len(wire))), encoding=encoding)

    assert (None, None) == (fault, other)
    assert [event["type"] for event in WHOLE] == kinds(whole) == kinds(bytewise)


BADLY_COMPRESSED = {
    "truncated": ("gzip", gzip.compress(frames(WHOLE[:3]))[:-8]),
    "whole, but the stream is not": ("gzip", gzip.compress(frames(WHOLE[:3]))),
    "no gzip": ("gzip", WIRE),
    "broken": ("gzip", gzip.compress(WIRE)[:30] + b"\xff" * 20),
}


@pytest.mark.parametrize(("encoding", "wire"), BADLY_COMPRESSED.values(), ids=BADLY_COMPRESSED)
async def test_a_badly_compressed_stream(encoding: str, wire: bytes) -> None:
    """A truncated or broken compressed stream never passes for a whole one."""
    _, fault = await played(wire, encoding=encoding)

    assert fault is not None
    assert Kind.INTERNAL is fault.kind


async def test_an_unknown_compression_is_an_error() -> None:
    """What can't be decompressed can't be read."""
    with pytest.raises(GatewayError) as raised:
        stream_of(encoding="br")

    assert UNREADABLE == raised.value.message


# Any stream, in any reads


@given(messages.flatmap(events_of), st.data())
def test_the_same_events_in_any_reads(events: list[Json], data: st.DataObject) -> None:
    """However the reads cut a stream, its events, their bytes and the counts are the same."""
    wire = frames(events)
    pieces = [piece for piece in data.draw(pieces_of(wire)) if piece]

    async def both() -> None:
        usage, other_usage = Usage(), Usage()
        whole, fault = await played(wire, usage=usage)
        cut, other_fault = await played(*pieces, usage=other_usage)

        assert (None, None) == (fault, other_fault)
        assert [event["type"] for event in events] == kinds(whole)
        assert [event.encoded() for event in whole] == [event.encoded() for event in cut]
        assert (usage.raw, usage.output, usage.delta_bytes) == (
            other_usage.raw,
            other_usage.output,
            other_usage.delta_bytes,
        )

    asyncio.run(both())


# Over a real connection


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[tuple[UpstreamClient, Upstream]]:
    client = UpstreamClient(Timeouts(connect=1, first_event=NEVER, idle=NEVER))
    settings = UpstreamSettings.model_validate({"base_url": url, "api_key": "upstream-secret"})
    try:
        yield client, Upstream("test", settings, url)
    finally:
        await client.close()


@asynccontextmanager
async def opened(*replies: Reply) -> AsyncIterator[tuple[UpstreamClient, Upstream, ScriptedUpstream]]:
    async with ScriptedUpstream(*replies) as scripted, client_of(scripted.url) as (client, upstream):
        yield client, upstream, scripted


async def ask(client: UpstreamClient, upstream: Upstream) -> tuple[list[str], UpstreamFault | None]:
    try:
        stream = await client.stream(upstream, "/v1/messages", b"{}", None, Progress(Usage()), "Model")
    except UpstreamFault as fault:
        return [], fault
    assert isinstance(stream, MessageStream)
    events: list[str] = []
    try:
        while read := await stream.read():
            events += kinds(read)
    except UpstreamFault as fault:
        return events, fault
    finally:
        await stream.drain()
    return events, None


async def test_a_drained_connection_is_used_again() -> None:
    """A stream that was read to its message_stop leaves its connection to the next one."""
    connections: list[int] = []
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        with suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n{}"):
                connections[-1] += 1
                writer.write(head + b"%x\r\n%b\r\n" % (len(WIRE), WIRE))
                await asyncio.sleep(0.01)  # the end of the body comes a moment after the last event
                writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, client_of(url) as (client, upstream):
        answers = [await ask(client, upstream) for _ in range(3)]

    assert [([event["type"] for event in WHOLE], None)] * 3 == answers
    assert [3] == connections


async def test_a_reset_in_a_stream() -> None:
    """A connection that is reset in the middle is an error behind the events that came."""
    async with opened(stream_reply([*WHOLE[:3], 0.01, CUT])) as (client, upstream, _):
        events, fault = await ask(client, upstream)

    assert fault is not None
    assert (3, Kind.INTERNAL, BROKEN_OFF) == (len(events), fault.kind, fault.message)


async def test_a_reset_behind_the_stop_reason() -> None:
    """A connection that is reset behind the stop_reason leaves a whole answer."""
    async with opened(stream_reply([*WHOLE[:-1], 0.01, CUT])) as (client, upstream, _):
        assert ([event["type"] for event in WHOLE], None) == await ask(client, upstream)


async def test_leaving_a_stream() -> None:
    """Who closes a stream leaves the upstream at once."""
    async with opened(stream_reply([*WHOLE[:3], NEVER])) as (client, upstream, scripted):
        stream = await client.stream(upstream, "/v1/messages", b"{}", None, Progress(Usage()), "Model")
        assert isinstance(stream, MessageStream)
        assert await stream.read()

        stream.close()

        await asyncio.wait_for(scripted.left.wait(), 5)


async def test_a_redirect_is_not_followed() -> None:
    """The upstream's key goes nowhere else."""
    reply = Reply([b""], status=307, headers={"location": "/elsewhere"})
    async with opened(reply) as (client, upstream, scripted):
        _, fault = await ask(client, upstream)

        assert fault is not None
        assert Kind.INTERNAL is fault.kind
        assert ["/v1/messages"] == [received.path for received in scripted.received]

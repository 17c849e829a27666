"""Clients that leave, stall and misbehave (group E), as far as test_endings and test_process don't have them.

Those hold the places at which a client may leave, and the times for heads, bodies and idle connections; here are
stalling, crowding, and what else a client may do to a connection. Leaving at random is in test_more_client_faults.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress

import pytest

from tests.attacks.measuring import MB, taken_by
from tests.attacks.raw_client import (
    BOTH,
    CHAT,
    MESSAGES,
    PATIENCE,
    Cut,
    ask,
    asked,
    connected,
    post,
)
from tests.attacks.raw_upstream import BEGUN, CHUNKED, ENDING, LAST_CHUNK, PLAIN, Move, RawUpstream, Step, chunk, frame
from tests.process import GatewayProcess, eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")


BIG_EVENT = frame(
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x" * (256 * 1024)}}
)
MEGABYTES = 256


@pytest.mark.slow
@pytest.mark.parametrize("path", BOTH)
async def test_e4_a_client_that_stops_reading_holds_its_upstream_back(
    gateway: GatewayProcess, upstream: RawUpstream, path: str
) -> None:
    """Of 256 MB that the upstream has, a stalled client costs the gateway next to nothing: the rest stays there."""
    upstream.play(CHUNKED, chunk(BEGUN), *[chunk(BIG_EVENT)] * (4 * MEGABYTES), chunk(ENDING), LAST_CHUNK)
    async with connected(gateway, receive_buffer=4096) as client, taken_by(gateway) as taken:
        client.stop_reading()
        client.send(post(path, asked(stream=True)))
        await eventually(lambda: upstream.sent > 0)
        await _until_nothing_moves(upstream)
        assert 1 == upstream.playing, "all of it was taken"

    assert upstream.sent < 32 * MB
    assert taken.memory < 8 * MB


async def _until_nothing_moves(upstream: RawUpstream) -> None:
    """Wait until the upstream has sent nothing for half a second."""
    async with asyncio.timeout(PATIENCE):
        before = -1
        while before != upstream.sent:
            before = upstream.sent
            await asyncio.sleep(0.5)


@pytest.mark.slow
async def test_e6_many_stalled_clients_starve_nobody(gateway: GatewayProcess, upstream: RawUpstream) -> None:
    """Sixty clients that read nothing cost little memory each, and others are served."""
    stalled = 60
    async with AsyncExitStack() as stack, taken_by(gateway) as taken:
        for _ in range(stalled):
            upstream.play(CHUNKED, chunk(BEGUN), *[chunk(BIG_EVENT)] * 40, chunk(ENDING), LAST_CHUNK)
            client = await stack.enter_async_context(connected(gateway, receive_buffer=4096))
            client.stop_reading()
            client.send(post(MESSAGES, asked(stream=True)))
        await eventually(lambda: upstream.playing == stalled, PATIENCE)
        await _until_nothing_moves(upstream)
        others = [await ask(gateway, path, asked()) for path in (CHAT, MESSAGES)]
        held = upstream.playing

    assert [200, 200] == [answer.status for answer in others]
    assert stalled == held
    assert taken.memory < stalled * 2 * MB


HELD: dict[str, tuple[bool, Sequence[Step]]] = {
    "before the upstream answers": (False, [Move.WAIT]),
    "in a stream": (True, [CHUNKED, chunk(BEGUN), Move.WAIT]),
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("where", HELD)
async def test_e7_a_client_that_closes_its_half_has_left(
    gateway: GatewayProcess, upstream: RawUpstream, where: str, path: str
) -> None:
    """Who says that nothing more comes is taken for gone: the upstream is left, and the request abandoned."""
    stream, steps = HELD[where]
    own_id = f"e7-{where}-{path.strip('/')}".replace("/", "-").replace(" ", "-")
    upstream.play(*steps)
    async with connected(gateway) as client:
        client.send(post(path, asked(stream=stream), f"x-request-id: {own_id}"))
        await eventually(lambda: upstream.playing == 1)

        client.half_close()
        await eventually(lambda: upstream.left == 1)
        [line] = await eventually(lambda: gateway.requests(client_request_id=own_id))

    assert "abandoned" == line["outcome"]


@pytest.mark.slow
async def test_e10_many_idle_connections_keep_nobody_out(gateway: GatewayProcess, upstream: RawUpstream) -> None:
    """Five hundred connections of one client that send nothing, or half a head, keep no other from being served."""
    async with AsyncExitStack() as stack, taken_by(gateway) as taken:
        for number in range(500):
            client = await stack.enter_async_context(connected(gateway))
            client.send(b"POST /v1/messages HTTP/1.1\r\nx-" if number % 2 else b"")
        answers = [await ask(gateway, path, asked()) for path in (CHAT, MESSAGES)]

    assert [200, 200] == [answer.status for answer in answers]
    assert taken.memory < 64 * MB


GARBAGE = {
    "noise": b"\0\1\2\xff" * 100,
    "text": b"and so on and so forth\r\n\r\n",
    "half a request": b"POST /v1/mess",
    "blank lines": b"\r\n\r\n\r\n",
    "a broken request": b"GET / HTTP/1.1\r\nhost: a\r\nx : y\r\n\r\n",
}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", GARBAGE)
async def test_e12_garbage_behind_a_request_does_not_disturb_its_answer(
    gateway: GatewayProcess, upstream: RawUpstream, name: str, path: str, stream: bool
) -> None:
    """The answer comes whole; behind it is at most a 400, and nothing of it reaches an upstream."""
    arrived = asyncio.Event()
    upstream.play(arrived, *([CHUNKED, chunk(BEGUN), chunk(ENDING), LAST_CHUNK] if stream else [PLAIN]))
    async with connected(gateway) as client:
        client.send(post(path, asked(stream=stream)))
        await eventually(lambda: upstream.playing == 1)
        await client.send_all(GARBAGE[name])
        await ask(gateway, MESSAGES, b"{")  # by now the gateway has seen the garbage
        arrived.set()
        answer = await client.answer()
        with suppress(Cut, TimeoutError):
            assert 400 == (await client.answer(0.1)).status

    assert 200 == answer.status
    assert (b"message_stop" in answer.body or b"[DONE]" in answer.body) == stream
    assert 1 == len(upstream.asked)


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", GARBAGE)
async def test_e12_garbage_in_one_piece_with_its_request_is_refused_or_ignored(
    gateway: GatewayProcess, upstream: RawUpstream, name: str, path: str
) -> None:
    """Where both come at once, the request is answered or refused as a whole; it is not done behind a 400."""
    async with connected(gateway) as client:
        client.send(post(path, asked()) + GARBAGE[name])
        answer = await client.answer()

    assert (answer.status, len(upstream.asked)) in ((200, 1), (400, 0))


@pytest.mark.parametrize("path", BOTH)
async def test_e13_an_id_of_the_clients_may_be_used_twice(
    gateway: GatewayProcess, upstream: RawUpstream, path: str
) -> None:
    """Two requests of the same id at the same time both run, under different ids of the gateway's own."""
    own_id = f"e13-{path.strip('/').replace('/', '-')}"
    for _ in range(2):
        upstream.play(0.1, CHUNKED, chunk(BEGUN), chunk(ENDING), LAST_CHUNK)

    answers = await asyncio.gather(
        *(ask(gateway, path, asked(stream=True), f"x-request-id: {own_id}") for _ in range(2))
    )
    lines = await eventually(lambda: (found := gateway.requests(client_request_id=own_id))[1:] and found)

    assert [(200, own_id)] * 2 == [(answer.status, answer.headers["x-request-id"]) for answer in answers]
    assert 2 == len({answer.headers["request-id"] for answer in answers})
    assert {answer.headers["request-id"] for answer in answers} == {line["request_id"] for line in lines}
    assert [(12, 7)] * 2 == [(line["input"], line["output"]) for line in lines]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("path", BOTH)
async def test_e15_a_connection_that_is_to_be_closed_is_closed(
    gateway: GatewayProcess, upstream: RawUpstream, path: str, stream: bool
) -> None:
    """With `Connection: close` the whole answer comes, says so, and the connection ends."""
    async with connected(gateway) as client:
        client.send(post(path, asked(stream=stream), "connection: close"))
        answer = await client.answer()

        assert b"" == await client.rest()
    assert (200, "close") == (answer.status, answer.headers["connection"].lower())


@pytest.mark.parametrize("keep", [False, True], ids=["closing", "keep-alive"])
@pytest.mark.parametrize("path", BOTH)
async def test_e15_a_client_of_http_1_0_gets_its_stream_without_chunks(
    gateway: GatewayProcess, upstream: RawUpstream, path: str, keep: bool
) -> None:
    """A stream for HTTP/1.0 lasts until the connection is closed."""
    fields = ("connection: keep-alive",) if keep else ()
    async with connected(gateway) as client:
        client.send(post(path, asked(stream=True), *fields, version="1.0"))
        answer = await client.answer()  # fails where it is chunked, or says that the connection is kept

    assert (200, "1.0") == (answer.status, answer.line[5:8])
    assert answer.body.endswith(b"data: [DONE]\n\n" if path == CHAT else b'"type": "message_stop"}\n\n')

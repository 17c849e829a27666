"""The gateway as a process: how it stops, whom it leaves when somebody leaves it, how long it waits, what it writes.

All of it is judged from outside, over sockets and by its log, since a test server inside the test's own process
behaves differently (it always notices a client that leaves, for one). The upstreams run in the test's loop.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import pytest_asyncio

from proxy.testing import CUT, Reply, ScriptedUpstream, message_reply, stream_reply, text_events
from tests.process import GatewayProcess, eventually, run, started_gateway, written_config

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CLIENT_KEY = "ezat_sk_canary-of-the-client"
WRONG_KEY = "ezat_sk_canary-of-a-stranger"
UPSTREAM_KEY = "canary-of-the/upstream"
PROMPT = "canary of the prompt"
CANARIES = (CLIENT_KEY, WRONG_KEY, UPSTREAM_KEY, PROMPT)

CHAT = "/openai/v1/chat/completions"
MESSAGES = "/v1/messages"
ENDINGS = {CHAT: "data: [DONE]\n\n", MESSAGES: '{"type":"message_stop"}\n\n'}
"""The last bytes of a whole stream."""
ROUTES = [pytest.param(CHAT, id="chat"), pytest.param(MESSAGES, id="messages")]

FOREVER = 60.0
"""Seconds that an upstream is silent: longer than any test waits."""
SHORT = 0.5
"""Seconds of a time-out under test."""
GRACE = 1.5
"""Seconds that running requests have when the gateway is to stop."""
NOTICED = 1.0
"""Seconds in which a client that leaves must be noticed."""


def config_for(upstream: ScriptedUpstream, **server: Any) -> dict[str, Any]:
    """A gateway that asks this upstream, with these settings of the server."""
    return {
        "server": {"shutdown_timeout": 1, **server},
        "upstreams": {"test": {"base_url": upstream.url, "api_key": UPSTREAM_KEY}},
        "models": [model("test/model", "test")],
        "plugins": [
            {"auth": {"keys": [{"name": "canary", "key": CLIENT_KEY}]}},
            *("rate_limit", "usage", "field_refusal", "chat_completions"),
            *("image_fetcher", "cache_breakpoints", "reasoning", "sampling"),
        ],
    }


def model(name: str, upstream: str) -> dict[str, Any]:
    deployment = {"upstream": upstream, "model": "model-at-upstream"}
    return {"id": name, "max_output_tokens": 8192, "price": "free", "deployments": [deployment]}


def asked(**more: Any) -> dict[str, Any]:
    """A body that is right in both formats."""
    return {"model": "test/model", "max_tokens": 64, "messages": [{"role": "user", "content": PROMPT}], **more}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_upstream() -> AsyncIterator[ScriptedUpstream]:
    async with ScriptedUpstream() as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def upstream(shared_upstream: ScriptedUpstream) -> ScriptedUpstream:
    """The upstream of the shared gateways, as if it were new."""
    await eventually(lambda: shared_upstream.open == 0)
    shared_upstream.replies.clear()
    shared_upstream.received.clear()
    shared_upstream.left.clear()
    return shared_upstream


@pytest.fixture(scope="module")
def gateway(
    shared_upstream: ScriptedUpstream, full_listener: str | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway with the usual times, but for connecting."""
    config = config_for(shared_upstream, connect_timeout=SHORT)
    config["upstreams"]["full"] = {"base_url": full_listener or shared_upstream.url}
    config["models"].append(model("full/model", "full"))
    with started_gateway(config, tmp_path_factory.mktemp("gateway")) as running:
        yield running


@pytest.fixture(scope="module")
def hasty(shared_upstream: ScriptedUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway whose times are short, but for the pings."""
    names = ("first_event", "idle", "request", "body", "keepalive")
    config = config_for(shared_upstream, **{f"{name}_timeout": SHORT for name in names})
    with started_gateway(config, tmp_path_factory.mktemp("hasty")) as running:
        yield running


@pytest.fixture(scope="module")
def pinging(shared_upstream: ScriptedUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway that pings before it gives up waiting for the first event."""
    config = config_for(shared_upstream, ping_interval=SHORT / 4, first_event_timeout=SHORT)
    with started_gateway(config, tmp_path_factory.mktemp("pinging")) as running:
        yield running


@pytest.fixture(scope="module")
def full_listener() -> Iterator[str | None]:
    """The URL of a listener whose backlog is full, so that connecting to it hangs; None where none can be made."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(8):
            client = stack.enter_context(socket.socket())
            client.settimeout(0.2)
            try:
                client.connect(listener.getsockname())
            except TimeoutError:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
                return
        yield None


class Wire:
    """A client that sends bytes, and leaves when it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def until(self, text: bytes, seconds: float = 5.0) -> bytes:
        """What came, up to and with the text."""
        async with asyncio.timeout(seconds):
            return await self._reader.readuntil(text)

    async def rest(self, seconds: float = 5.0) -> bytes:
        """What comes until the gateway closes the connection; a reset is an end, too."""
        pieces = []
        try:
            async with asyncio.timeout(seconds):
                while piece := await self._reader.read(2**16):
                    pieces.append(piece)
        except ConnectionResetError:
            pass
        return b"".join(pieces)

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        """Leave without a good-bye."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._writer.transport.abort()


@asynccontextmanager
async def wired(gateway: GatewayProcess) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection(gateway.host, gateway.port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


def head_of(path: str, length: int, key: str = CLIENT_KEY, **headers: str) -> bytes:
    """The head of a POST; underscores in the names of headers stand for hyphens."""
    lines = [f"POST {path} HTTP/1.1", "host: gateway", f"authorization: Bearer {key}", f"content-length: {length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def post_of(path: str, body: dict[str, Any], **headers: str) -> bytes:
    data = json.dumps(body).encode()
    return head_of(path, len(data), **headers) + data


class Got(NamedTuple):
    """An answer."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def error(self) -> dict[str, Any]:
        """The error object of either envelope."""
        error: dict[str, Any] = json.loads(self.text)["error"]
        return error


async def post(gateway: GatewayProcess, path: str, body: Any, key: str = CLIENT_KEY, **headers: str) -> Got:
    sent = {"authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in headers.items()}}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session,
        session.post(gateway.url + path, data=data, headers=sent) as answer,
    ):
        return Got(answer.status, {name.lower(): value for name, value in answer.headers.items()}, await answer.text())


def together(events: Sequence[Any], *then: float | bytes) -> Reply:
    """A stream whose events go out in one write, and what follows them."""
    frames = stream_reply(events)
    pieces = [piece for piece in frames.pieces if isinstance(piece, bytes)]
    return Reply([b"".join(pieces), *then], content_type=frames.content_type)


# A client that leaves


class Phase(NamedTuple):
    """Where a request is when its client leaves: the upstream's reply, and what the client has seen by then."""

    stream: bool
    reply: Reply
    seen: bytes | None = None


PHASES = {
    "plain, before the upstream's headers": Phase(False, Reply([FOREVER])),
    "plain, in the middle of the upstream's answer": Phase(False, Reply([b'{"type": "mess', FOREVER])),
    "stream, before the upstream's headers": Phase(True, Reply([FOREVER], content_type="text/event-stream")),
    "stream, before the first event": Phase(True, Reply([b": wait\n\n", FOREVER], content_type="text/event-stream")),
    "stream, while the upstream is silent": Phase(
        True, together(text_events("Hello", stop_reason=None), FOREVER), b"Hello"
    ),
    "stream, in the tail": Phase(True, together(text_events("Hello")[:-1], FOREVER), b"Hello"),
}


@pytest.mark.parametrize("way", ["close", "reset"])
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("phase", PHASES)
async def test_a_client_that_leaves_takes_the_upstream_with_it(
    gateway: GatewayProcess, upstream: ScriptedUpstream, phase: str, path: str, way: str
) -> None:
    """Wherever a request is when its client leaves, the upstream is left within a second, and the log says so."""
    stream, reply, seen = PHASES[phase]
    upstream.replies.append(reply)
    own_id = f"{phase} {path} {way}".replace(" ", "-").replace("/", "-").replace(",", "").replace("'", "")
    async with wired(gateway) as client:
        client.send(post_of(path, asked(stream=stream), x_request_id=own_id))
        await eventually(lambda: upstream.received)
        if seen is not None:
            await client.until(seen)

        getattr(client, way)()

        await asyncio.wait_for(upstream.left.wait(), NOTICED)
        [line] = await eventually(lambda: gateway.requests(client_request_id=own_id), NOTICED)
    assert "abandoned" == line["outcome"]
    assert upstream.open == 0


@pytest.mark.parametrize("way", ["close", "reset"])
@pytest.mark.parametrize("path", ROUTES)
async def test_a_client_that_leaves_while_it_sends_reaches_no_upstream(
    gateway: GatewayProcess, upstream: ScriptedUpstream, path: str, way: str
) -> None:
    """Half a body is no request: it is noticed within a second, and no upstream hears of it."""
    own_id = f"half-a-body-{path.strip('/').replace('/', '-')}-{way}"
    async with wired(gateway) as client:
        client.send(head_of(path, 1000, x_request_id=own_id) + b'{"model": "test/model"')

        getattr(client, way)()
        [line] = await eventually(lambda: gateway.requests(client_request_id=own_id), NOTICED)

    assert "abandoned" == line["outcome"]
    assert [] == upstream.received


# Time-outs


@pytest.mark.parametrize("stream", [pytest.param(False, id="plain"), pytest.param(True, id="stream")])
async def test_an_upstream_that_takes_no_connection_is_a_504(
    gateway: GatewayProcess, full_listener: str | None, stream: bool
) -> None:
    """Connecting is given up in time, though the request as a whole has more."""
    if full_listener is None:
        pytest.skip("this system takes connections beyond a full backlog, so none can be made to hang")

    got = await asyncio.wait_for(post(gateway, MESSAGES, asked(model="full/model", stream=stream)), 10 * SHORT)

    assert (504, "timeout_error") == (got.status, got.error["type"])


SILENCES = {
    "no headers": Reply([FOREVER]),
    "headers and no event": Reply([b": wait\n\n", FOREVER], content_type="text/event-stream"),
    "nothing but pings": stream_reply([{"type": "ping"}, SHORT / 8] * 40),
}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("silence", SILENCES)
async def test_a_first_event_that_does_not_come_is_a_504(
    hasty: GatewayProcess, upstream: ScriptedUpstream, silence: str, path: str
) -> None:
    """A stream without a first event in time is a JSON error, and the upstream is left."""
    upstream.replies.append(SILENCES[silence])

    got = await asyncio.wait_for(post(hasty, path, asked(stream=True)), 10 * SHORT)

    assert 504 == got.status
    assert {CHAT: "server_error", MESSAGES: "timeout_error"}[path] == got.error["type"]
    await asyncio.wait_for(upstream.left.wait(), NOTICED)


@pytest.mark.parametrize(
    ("path", "ping", "error"),
    [
        pytest.param(CHAT, ": ping\n\n", '"type":"server_error","param":null,"code":"timeout"', id="chat"),
        pytest.param(MESSAGES, 'event: ping\ndata: {"type": "ping"}\n\n', '"type":"timeout_error"', id="messages"),
    ],
)
@pytest.mark.parametrize("silence", SILENCES)
async def test_once_pings_went_out_the_time_out_is_told_in_the_stream(
    pinging: GatewayProcess, upstream: ScriptedUpstream, silence: str, path: str, ping: str, error: str
) -> None:
    """Pings keep the client while it waits; the time-out then is an error in the stream, and all that stands there."""
    upstream.replies.append(SILENCES[silence])

    got = await asyncio.wait_for(post(pinging, path, asked(stream=True)), 10 * SHORT)

    assert 200 == got.status
    assert got.text.startswith(ping)
    told = got.text.replace(ping, "")
    assert error in told
    assert {CHAT: 2, MESSAGES: 1}[path] == told.count("data: ")
    assert told.endswith("data: [DONE]\n\n") is (path == CHAT)
    await asyncio.wait_for(upstream.left.wait(), NOTICED)


@pytest.mark.parametrize("path", ROUTES)
async def test_an_upstream_that_falls_silent_ends_the_stream_in_an_error(
    hasty: GatewayProcess, upstream: ScriptedUpstream, path: str
) -> None:
    """Silence in the middle of a stream is given up: what came stays, an error follows, and no ending."""
    upstream.replies.append(together(text_events("Hello", stop_reason=None), FOREVER))

    got = await asyncio.wait_for(post(hasty, path, asked(stream=True)), 10 * SHORT)

    assert 200 == got.status
    assert "Hello" in got.text
    assert {CHAT: '"code":"timeout"', MESSAGES: '"timeout_error"'}[path] in got.text
    assert '"finish_reason":"stop"' not in got.text
    assert "message_stop" not in got.text
    await asyncio.wait_for(upstream.left.wait(), NOTICED)


@pytest.mark.parametrize("path", ROUTES)
async def test_a_stream_that_goes_on_is_not_cut(hasty: GatewayProcess, upstream: ScriptedUpstream, path: str) -> None:
    """No time-out counts the length of a stream: slow and steady, it arrives whole."""
    words = [f"word{number} " for number in range(9)]
    events = text_events(*words)
    upstream.replies.append(stream_reply([piece for event in events for piece in (event, SHORT / 4)]))

    got = await post(hasty, path, asked(stream=True))

    assert [] == [word for word in words if word not in got.text]
    assert got.text.endswith(ENDINGS[path])


@pytest.mark.parametrize("path", ROUTES)
async def test_a_whole_request_that_takes_too_long_is_advised_to_stream(
    hasty: GatewayProcess, upstream: ScriptedUpstream, path: str
) -> None:
    """A plain request has its time; beyond it the error says what helps."""
    upstream.replies.append(Reply([FOREVER]))

    got = await asyncio.wait_for(post(hasty, path, asked()), 10 * SHORT)

    assert 504 == got.status
    assert "stream" in got.error["message"]
    await asyncio.wait_for(upstream.left.wait(), NOTICED)


@pytest.mark.parametrize("path", ROUTES)
async def test_a_body_that_does_not_arrive_is_refused(
    hasty: GatewayProcess, upstream: ScriptedUpstream, path: str
) -> None:
    """A client that stops in the middle of its body is told so, and reaches no upstream."""
    async with wired(hasty) as client:
        client.send(head_of(path, 1000) + b'{"model"')

        head = await client.until(b"\r\n\r\n", 10 * SHORT)
        body = await client.until(b"}}" if path == CHAT else b'"}', 10 * SHORT)

    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"did not arrive" in body
    assert [] == upstream.received


@pytest.mark.parametrize(
    "begun",
    [
        pytest.param(b"", id="nothing sent"),
        pytest.param(b"POST /v1/messages HTTP/1.1\r\nhost: gateway\r\nx-", id="half a head"),
    ],
)
async def test_a_head_that_does_not_arrive_is_not_waited_for(hasty: GatewayProcess, begun: bytes) -> None:
    """A connection that brings no whole head is closed in time."""
    async with wired(hasty) as client:
        client.send(begun)

        await client.rest(10 * SHORT)  # raises TimeoutError where it is not closed


async def test_a_head_that_drips_is_not_waited_for(hasty: GatewayProcess) -> None:
    """A byte now and then does not keep a connection open."""
    async with wired(hasty) as client:

        async def drip() -> None:
            for letter in head_of(MESSAGES, 2, x_padding="x" * 1000):
                client.send(bytes([letter]))
                await asyncio.sleep(SHORT / 10)

        dripping = asyncio.create_task(drip())
        try:
            await client.rest(10 * SHORT)  # raises TimeoutError where it is not closed
        finally:
            dripping.cancel()


async def test_an_idle_connection_is_closed(hasty: GatewayProcess) -> None:
    """After a request its connection is kept for a while, and no longer."""
    async with wired(hasty) as client:
        client.send(b"GET /healthz HTTP/1.1\r\nhost: gateway\r\n\r\n")

        answered = await client.rest(10 * SHORT)

    assert answered.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" not in answered.lower()


# The log


class Logged(NamedTuple):
    """A request, and what its line in the log says."""

    outcome: str
    status: int
    body: dict[str, Any] | bytes = b""
    reply: Reply | None = None
    key: str = CLIENT_KEY


LOGGED = {
    "plain": Logged("completed", 200, asked()),
    "stream": Logged("completed", 200, asked(stream=True), stream_reply(text_events("Hello"))),
    "unknown key": Logged("failed", 401, asked(), key=WRONG_KEY),
    "no JSON": Logged("failed", 400, f"{{{PROMPT}".encode()),
    "unknown model": Logged("failed", 404, asked(model="gpt-9")),
    "upstream down": Logged("failed", 500, asked(), Reply([b"Bad gateway"], status=502)),
    "upstream overloaded": Logged("failed", 429, asked(), Reply([b"{}"], status=429)),
    "broken stream": Logged(
        "failed", 500, asked(stream=True), together(text_events("Hello", stop_reason=None), 0.05, CUT)
    ),
}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("name", LOGGED)
async def test_a_request_has_one_line_in_the_log(
    gateway: GatewayProcess, upstream: ScriptedUpstream, name: str, path: str
) -> None:
    """Each request has exactly one line, with its ids, its route, how it ended and what it used."""
    outcome, status, body, reply, key = LOGGED[name]
    if reply is not None:
        upstream.replies.append(reply)
    own_id = f"logged-{name}-{path.strip('/')}".replace(" ", "-").replace("/", "-")

    got = await post(gateway, path, body, key, x_request_id=own_id)
    await eventually(lambda: gateway.requests(client_request_id=own_id))
    await get(gateway, "/healthz")  # whatever a second line would be, it has been written by now
    [line] = gateway.requests(client_request_id=own_id)

    assert (got.headers["request-id"], outcome, status) == (line["request_id"], line["outcome"], line["status"])
    assert {CHAT: "chat_completions", MESSAGES: "messages"}[path] == line["route"]
    assert ("canary" if key == CLIENT_KEY else None) == line["key"]
    if status == 200:
        assert (12, 7) == (line["input"], line["output"])


async def get(gateway: GatewayProcess, path: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(gateway.url + path) as answer:
        return answer.status


def error_json(text: str) -> bytes:
    return json.dumps({"type": "error", "error": {"type": "invalid_request_error", "message": text}}).encode()


QUOTED = f"the key {UPSTREAM_KEY} was refused: {PROMPT}"
ESCAPED = error_json(QUOTED).replace(b"/", b"\\/")
"""As PHP and others write it: a slash needs no escape in JSON, and may have one."""
ERROR_EVENT = b"event: error\ndata: %b\n\n"

QUOTING = {
    "400": Reply([error_json(QUOTED)], status=400),
    "400, escaped": Reply([ESCAPED], status=400),
    "401": Reply([error_json(QUOTED)], status=401),
    "429": Reply([error_json(QUOTED)], status=429),
    "500": Reply([error_json(QUOTED)], status=500),
    "500 in plain text": Reply([QUOTED.encode()], status=500, content_type="text/html"),
    "a redirect": Reply([b""], status=307, headers={"location": f"http://127.0.0.1:9/{UPSTREAM_KEY}"}),
    "200 and no message": Reply([QUOTED.encode()]),
    "an error event at the beginning": Reply([ERROR_EVENT % error_json(QUOTED)], content_type="text/event-stream"),
    "an error event, escaped": Reply([ERROR_EVENT % ESCAPED], content_type="text/event-stream"),
    "an error event in the middle": Reply(
        [*together(text_events("Hello", stop_reason=None)).pieces, ERROR_EVENT % error_json(QUOTED)],
        content_type="text/event-stream",
    ),
    "an event that is no JSON": Reply([f"event: message_start\ndata: {QUOTED}\n\n".encode()]),
}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("name", QUOTING)
async def test_an_upstream_that_quotes_its_key_is_not_passed_on(
    gateway: GatewayProcess, upstream: ScriptedUpstream, name: str, path: str
) -> None:
    """The upstream's key reaches no client, in whatever the upstream puts it."""
    upstream.replies.append(QUOTING[name])

    got = await post(gateway, path, asked(stream=True))

    assert 1 == len(upstream.received)
    assert UPSTREAM_KEY == upstream.received[0].headers["x-api-key"]
    told = got.text + json.dumps(got.headers)
    assert [] == hits(told.replace("\\/", "/"), [UPSTREAM_KEY, CLIENT_KEY])


def hits(text: str, canaries: Sequence[str] = CANARIES) -> list[str]:
    """Which canaries the text holds, as they are or in base64."""
    spellings = [(canary, [canary, base64.b64encode(canary.encode()).decode().rstrip("=")]) for canary in canaries]
    return [canary for canary, forms in spellings if any(form in text for form in forms)]


MALFORMED = {
    "a key before a space and a colon": f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nx-api-key : {CLIENT_KEY}\r\n\r\n",
    "a key in a header without a colon": f"POST {CHAT} HTTP/1.1\r\nhost: a\r\n{CLIENT_KEY}\r\n\r\n",
    "a key with a NUL": f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {CLIENT_KEY}\0\r\n\r\n",
    "a key in a header of 9000 bytes": f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nx-api-key: {CLIENT_KEY * 320}\r\n\r\n",
    "a key in a folded header": f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nx-api-key:\r\n {CLIENT_KEY}\r\n\r\n",
    "a key as the method": f"{CLIENT_KEY}@ {CHAT} HTTP/1.1\r\nhost: a\r\n\r\n",
    "a key in a target of 9000 bytes": f"GET /{CLIENT_KEY * 320} HTTP/1.1\r\nhost: a\r\n\r\n",
    "a key as the version": f"GET / HTTP/{CLIENT_KEY}\r\nhost: a\r\n\r\n",
    "a key as a chunk's size": f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {CLIENT_KEY}\r\n"
    f"transfer-encoding: chunked\r\n\r\n{CLIENT_KEY}\r\n",
    "a prompt behind two lengths": f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {CLIENT_KEY}\r\n"
    f"content-length: 1\r\ncontent-length: 2\r\n\r\n{PROMPT}",
    "a prompt as the request line": f"{PROMPT}\r\n\r\n",
    "a request smuggled behind length and chunks": f"POST {CHAT} HTTP/1.1\r\nhost: a\r\n"
    f"authorization: Bearer {CLIENT_KEY}\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    + post_of(MESSAGES, asked()).decode(),
    "another protocol": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + "\x80" * 64,
    "noise": "\x00\x01\x02\xfe\xff" * 50 + "\r\n\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_http_is_refused_and_not_written_down(
    gateway: GatewayProcess, upstream: ScriptedUpstream, name: str
) -> None:
    """What is no HTTP is refused, the connection closed, the next one served; nothing of it stands in the log."""
    async with wired(gateway) as client:
        client.send(MALFORMED[name].encode("latin-1"))
        answered = await client.rest()

    assert re.match(rb"HTTP/1\.[01] 400 |$", answered)
    assert len(re.findall(rb"^HTTP/1\.", answered, re.MULTILINE)) <= 1
    assert 200 == await get(gateway, "/healthz")
    assert [] == upstream.received
    assert [] == hits(gateway.written)


async def test_malformed_http_is_answered_as_everything_else_is(gateway: GatewayProcess) -> None:
    """The 400 for what is no HTTP has both ids and the envelope, too, and does not say the key again."""
    async with wired(gateway) as client:
        client.send(MALFORMED["a key before a space and a colon"].encode())
        answered = (await client.rest()).decode()

    head, _, body = answered.partition("\r\n\r\n")
    names = {line.partition(":")[0].lower() for line in head.splitlines()}
    assert {"request-id", "x-request-id"} <= names
    assert "invalid_request_error" == json.loads(body)["error"]["type"]
    assert [] == hits(answered)


KEY_ELSEWHERE: dict[str, tuple[str, dict[str, str]]] = {
    "in the query": (f"{CHAT}?api_key={CLIENT_KEY}", {}),
    "in an unknown path": (f"/v1/{CLIENT_KEY}", {}),
    "in a cookie": (CHAT, {"cookie": f"key={CLIENT_KEY}"}),
    "in a basic login": (CHAT, {"authorization": f"Basic {base64.b64encode(CLIENT_KEY.encode()).decode()}"}),
    "behind a comma": (MESSAGES, {"authorization": f"Bearer {CLIENT_KEY},"}),
    "in a header with underscores": (MESSAGES, {"x_api_key": CLIENT_KEY}),
}


@pytest.mark.parametrize("name", KEY_ELSEWHERE)
async def test_a_key_in_the_wrong_place_is_neither_taken_nor_written_down(
    gateway: GatewayProcess, upstream: ScriptedUpstream, name: str
) -> None:
    """A key counts in its two headers alone, and wherever else it stands it does not reach the log."""
    path, headers = KEY_ELSEWHERE[name]

    async with (
        aiohttp.ClientSession() as session,
        session.post(gateway.url + path, json=asked(), headers=headers) as answer,
    ):
        status = answer.status

    assert (404 if "path" in name else 401) == status
    assert [] == upstream.received
    assert [] == hits(gateway.written)


async def test_neither_log_nor_store_holds_a_secret(
    gateway: GatewayProcess, hasty: GatewayProcess, pinging: GatewayProcess
) -> None:
    """Whatever the tests above did: no key and no prompt was kept, the log is nothing but JSON, and nothing broke."""
    gateways = (gateway, hasty, pinging)
    lines = [line for each in gateways for line in each.log_lines]

    assert [] == [canary for each in gateways for canary in hits(each.written + each.stored)]
    assert all("event" in line and "level" in line for line in lines)
    assert [] == [line for line in lines if "exception" in line]


# Expect: 100-continue


@pytest.mark.parametrize(
    ("length", "key", "status"),
    [
        pytest.param(64, WRONG_KEY, 401, id="an unknown key"),
        pytest.param(33 * 2**20, CLIENT_KEY, 413, id="more than 32 MB"),
    ],
)
@pytest.mark.parametrize("path", ROUTES)
async def test_a_refused_client_is_not_told_to_go_on(
    gateway: GatewayProcess, path: str, length: int, key: str, status: int
) -> None:
    """A client that asks first is refused before it sends its body, with no 100 Continue."""
    async with wired(gateway) as client:
        client.send(head_of(path, length, key, expect="100-continue"))

        head = await client.until(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize("path", ROUTES)
async def test_a_client_that_may_come_in_is_told_to_go_on(
    gateway: GatewayProcess, upstream: ScriptedUpstream, path: str
) -> None:
    """With a good key the 100 Continue comes, and after the body the answer."""
    data = json.dumps(asked()).encode()
    async with wired(gateway) as client:
        client.send(head_of(path, len(data), expect="100-continue"))
        interim = await client.until(b"\r\n\r\n")
        client.send(data)
        head = await client.until(b"\r\n\r\n")

    assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert head.startswith(b"HTTP/1.1 200 ")


# Stopping


@pytest.mark.parametrize("path", ROUTES)
async def test_sigterm_lets_running_requests_end(tmp_path: Path, path: str) -> None:
    """On SIGTERM nobody new comes in, what runs ends whole, and the process exits with 0."""
    head, tail = text_events("Hello")[:3], text_events("Hello")[3:]
    slow_stream = stream_reply([*head, 1.0, *tail])
    slow_plain = Reply([1.0, *message_reply().pieces])
    async with ScriptedUpstream(slow_stream, slow_plain) as upstream, aiohttp.ClientSession() as session:
        with started_gateway(config_for(upstream, shutdown_timeout=20), tmp_path) as gateway:
            headers = {"authorization": f"Bearer {CLIENT_KEY}"}
            async with session.post(gateway.url + path, json=asked(stream=True), headers=headers) as stream:
                text = await until(stream, "Hello")
                plain = asyncio.create_task(post(gateway, path, asked()))
                await eventually(lambda: len(upstream.received) == 2)

                gateway.terminate()
                await refused(gateway)
                still_running = not plain.done()
                text += (await stream.read()).decode()
                got = await plain
            code = await eventually_ended(gateway)

    assert still_running
    assert text.endswith(ENDINGS[path])
    assert (200, True) == (got.status, "Hello." in got.text)
    assert 0 == code
    assert ["completed"] * 2 == [line["outcome"] for line in gateway.requests()]


@pytest.mark.parametrize("path", ROUTES)
async def test_what_still_runs_after_the_time_to_stop_is_ended(tmp_path: Path, path: str) -> None:
    """A request that does not end by itself is cut when the time is up, and never ended as if it were whole."""
    silent_stream = together(text_events("Hello", stop_reason=None), FOREVER)
    async with ScriptedUpstream(silent_stream, Reply([FOREVER])) as upstream:
        with started_gateway(config_for(upstream, shutdown_timeout=GRACE), tmp_path) as gateway:
            async with wired(gateway) as stream, wired(gateway) as plain:
                stream.send(post_of(path, asked(stream=True)))
                await stream.until(b"Hello")
                plain.send(post_of(path, asked()))
                await eventually(lambda: len(upstream.received) == 2)

                gateway.terminate()
                asked_to_stop = time.monotonic()
                streamed, answered = await stream.rest(10), await plain.rest(10)
                taken = time.monotonic() - asked_to_stop
                code = await eventually_ended(gateway)
                await eventually(lambda: upstream.open == 0)

    assert GRACE <= taken < 1.7 * GRACE
    assert b"message_stop" not in streamed
    assert b'"finish_reason":"stop"' not in streamed
    assert not answered.startswith(b"HTTP/1.1 200")
    assert 0 == code
    assert 2 == len(gateway.requests())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_idle_connection_does_not_delay_the_stop(tmp_path: Path, number: signal.Signals) -> None:
    """With nothing to end, the gateway ends at once, and a kept connection is closed."""
    async with ScriptedUpstream() as upstream:
        with started_gateway(config_for(upstream, shutdown_timeout=60), tmp_path) as gateway:
            async with wired(gateway) as client:
                client.send(post_of(MESSAGES, asked()))
                await client.until(b'"output_tokens":7}}')

                gateway.terminate(number)
                code = await eventually_ended(gateway)

    assert 0 == code
    assert "Traceback" not in gateway.written


async def until(stream: aiohttp.ClientResponse, text: str) -> str:
    got = ""
    async with asyncio.timeout(5):
        while text not in got:
            got += (await stream.content.readany()).decode()
    return got


async def refused(gateway: GatewayProcess) -> None:
    """Wait until the gateway takes no connection any more."""
    async with asyncio.timeout(5):
        while True:
            try:
                async with wired(gateway):
                    await asyncio.sleep(0.01)
            except (ConnectionRefusedError, ConnectionResetError):  # reset: it stood in the backlog as that was closed
                return


async def eventually_ended(gateway: GatewayProcess) -> int | None:
    await eventually(lambda: gateway.exit_code is not None, 10)
    return gateway.exit_code


# The command line


async def test_check_passes_what_can_be_used() -> None:
    """`run.py check` says that the shipped demo is fine, and exits with 0."""
    checked = await run("check", "--config", "config/demo.yaml")

    assert (0, "") == (checked.code, checked.errors)
    assert "no problems" in checked.output


async def test_plugins_prints_both_chains() -> None:
    """`run.py plugins` shows each plugin with its purpose, and each route's way in and the way back."""
    printed = await run("plugins", "--config", "config/demo.yaml")

    lines = printed.output.splitlines()
    assert (0, "") == (printed.code, printed.errors)
    assert any(re.match(r" *auth +\S+", line) for line in lines)
    for route, first, last in (("chat_completions", "auth", "sampling"), ("messages", "auth", "usage")):
        [place] = [place for place, line in enumerate(lines) if line.startswith(f"{route} ") and "client" in line]
        way_in, way_back = lines[place], lines[place + 1]
        assert re.search(rf"client ─► {first} ─► .*{last} ─► upstream$", way_in)
        assert re.search(rf"client ◄─ {first} ◄─ .*{last} ◄─ upstream$", way_back)


WRONG = {
    "no YAML": ("server: [", "gateway.yaml", ":1"),
    "empty": ("", "gateway.yaml", "empty"),
    "an unknown setting": ("server: {prot: 1}\n", ":1", "prot"),
    "a setting twice": ("limiter: memory\nlimiter: memory\n", ":2", "limiter"),
    "an unset variable": ("store: ${EZAT_TEST_UNSET}\n", ":1", "EZAT_TEST_UNSET"),
    "a key with spaces": (f"upstreams:\n  a:\n    base_url: demo\n    api_key: {UPSTREAM_KEY} x\n", ":4", "api_key"),
    "a client's key that is none": (f"plugins:\n- auth: {{keys: [{{name: a, key: '{PROMPT}'}}]}}\n", "gateway.yaml"),
    "an unknown plugin": ("plugins: [auht]\n", ":1", "did you mean `auth`"),
}


@pytest.mark.parametrize(
    ("name", "command"), [*((name, "check") for name in WRONG), ("empty", "plugins"), ("empty", "serve")]
)
async def test_a_configuration_that_cannot_be_used_is_explained(tmp_path: Path, name: str, command: str) -> None:
    """A wrong configuration is an exit code of 1 and words that name the place, without a traceback or a secret."""
    text, *words = WRONG[name]
    path = tmp_path / "gateway.yaml"
    path.write_text(text)

    ended = await run(command, "--config", str(path))

    assert (1, "") == (ended.code, ended.output)
    assert [] == [word for word in words if word not in ended.errors]
    assert "Traceback" not in ended.errors
    assert [] == hits(ended.errors)


async def test_a_configuration_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A missing file is named, in words."""
    ended = await run("check", "--config", str(tmp_path / "gone.yaml"))

    assert (1, "") == (ended.code, ended.output)
    assert "gone.yaml" in ended.errors
    assert "Traceback" not in ended.errors


async def test_a_taken_port_is_one_clear_sentence(tmp_path: Path) -> None:
    """Where the port is taken the gateway says so in one line and exits with 1."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        async with ScriptedUpstream() as upstream:
            config = written_config(config_for(upstream, port=port), tmp_path)

            ended = await run("--config", str(config))

    [line] = ended.errors.splitlines()
    assert (1, "") == (ended.code, ended.output)
    assert line.startswith("the gateway can't start: ")
    assert str(port) in line
    assert "in use" in line

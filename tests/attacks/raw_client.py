"""A client that sends any bytes at any pace, leaves as it likes, and reads answers strictly.

An HTTP library would mend or refuse what these tests send, and hide how an answer is framed; so the bytes are written
by hand and the answer is read here, and anything about its framing that a client could misread fails.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Protocol

import pytest
from multidict import CIMultiDict

CLIENT_KEY = "ezat_sk_canary-Client/4711+of?a=key"
UPSTREAM_KEY = "canary-Upstream/4712+of?a=key"
PATIENCE = 20.0
"""Seconds that a client waits for what must come at once, on a machine that does much else."""

CHAT = "/openai/v1/chat/completions"
MESSAGES = "/v1/messages"
BOTH = [pytest.param(CHAT, id="chat"), pytest.param(MESSAGES, id="messages")]

TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("invalid_request_error", "authentication_error"),
    404: ("invalid_request_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("server_error", "api_error"),
    504: ("server_error", "timeout_error"),
    529: ("server_error", "overloaded_error"),
}
"""What a status is called in OpenAI's envelope, and in that of the Messages format."""


class Answer(NamedTuple):
    """One answer as it came."""

    status: int
    headers: CIMultiDict[str]
    body: bytes
    line: str
    """Its status line."""

    @property
    def data(self) -> Any:
        return json.loads(self.body)


class Seen(NamedTuple):
    """Sets the event as soon as the text has come, in an answer in chunks."""

    text: bytes
    event: asyncio.Event


class Cut(Exception):
    """The connection ended within an answer, or before one."""


class Listener(Protocol):
    """Where a gateway listens: a GatewayProcess, or an Address."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...


class Address(NamedTuple):
    """Where a gateway in the test's own process listens."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Address:
        host, _, port = url.removeprefix("http://").rpartition(":")
        return cls(host, int(port))


class RawClient:
    """One connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        """Send without waiting until it is gone."""
        self._writer.write(data)

    async def send_all(self, data: bytes) -> None:
        """Send, and wait until the kernel has nearly all of it."""
        self._writer.write(data)
        async with asyncio.timeout(PATIENCE):
            await self._writer.drain()

    async def answer(self, seconds: float = PATIENCE, *, seen: Seen | None = None) -> Answer:
        """The next answer, whole. Raises Cut, TimeoutError, AssertionError for framing that is ambiguous."""
        try:
            async with asyncio.timeout(seconds):
                head = await self._reader.readuntil(b"\r\n\r\n")
                line, headers = _parsed(head)
                return Answer(int(line.split()[1]), headers, await self._body(line, headers, seen), line)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Cut(type(error).__name__) from error

    async def _body(self, line: str, headers: CIMultiDict[str], seen: Seen | None) -> bytes:
        lengths, codings = headers.getall("content-length", []), headers.getall("transfer-encoding", [])
        assert len(lengths) + len(codings) <= 1, "an answer of two lengths"
        if re.match(r"HTTP/1\.[01] (1..|204|304) ", line):
            return b""
        if lengths:
            return await self._reader.readexactly(int(lengths[0]))
        if codings:
            assert (["chunked"], "HTTP/1.1") == (codings, line[:8])
            return await self._chunks(seen)
        assert "keep-alive" != headers.get("connection"), "an answer without an end"
        return await self._reader.read()

    async def _chunks(self, seen: Seen | None) -> bytes:
        pieces: list[bytes] = []
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            pieces.append(await self._reader.readexactly(size))
            assert b"\r\n" == await self._reader.readexactly(2)
            if seen is not None and seen.text in b"".join(pieces):
                seen.event.set()
        assert b"\r\n" == await self._reader.readuntil(b"\r\n")
        return b"".join(pieces)

    async def until(self, text: bytes, seconds: float = PATIENCE) -> bytes:
        """The bytes that come, up to and with the text."""
        async with asyncio.timeout(seconds):
            return await self._reader.readuntil(text)

    async def rest(self, seconds: float = PATIENCE) -> bytes:
        """The bytes that come until the gateway closes; a reset is an end, too. Raises TimeoutError."""
        pieces = []
        try:
            async with asyncio.timeout(seconds):
                while piece := await self._reader.read(2**18):
                    pieces.append(piece)
        except ConnectionError:
            pass
        return b"".join(pieces)

    def stop_reading(self) -> None:
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    def half_close(self) -> None:
        """Say that nothing more comes, and go on reading."""
        self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        """Leave without a good-bye."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._writer.transport.abort()


def _parsed(head: bytes) -> tuple[str, CIMultiDict[str]]:
    line, *fields = head[:-4].decode("latin-1").split("\r\n")
    assert re.fullmatch(r"HTTP/1\.[01] \d{3} [ -~]*", line), line
    headers: CIMultiDict[str] = CIMultiDict()
    for field in fields:
        found = re.fullmatch(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ?([\t -~\x80-\xff]*)", field)
        assert found, field
        headers.add(found[1], found[2])
    return line, headers


@asynccontextmanager
async def connected(gateway: Listener, *, receive_buffer: int | None = None) -> AsyncIterator[RawClient]:
    """A connection, reset in the end. ``receive_buffer`` is what a client that stalls takes, in bytes."""
    sock = socket.socket()
    sock.setblocking(False)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    async with asyncio.timeout(PATIENCE):
        await asyncio.get_running_loop().sock_connect(sock, (gateway.host, gateway.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=2**18 if receive_buffer is None else 1024)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()


def head(path: str, *fields: str, method: str = "POST", version: str = "1.1", key: str | None = CLIENT_KEY) -> bytes:
    """The head of a request with these further header lines; they are sent as Latin-1."""
    lines = [f"{method} {path} HTTP/{version}", "host: gateway"]
    if key is not None:
        lines.append(f"authorization: Bearer {key}")
    return "\r\n".join([*lines, *fields, "", ""]).encode("latin-1")


def post(path: str, body: bytes | Mapping[str, Any], *fields: str, version: str = "1.1") -> bytes:
    """A whole request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(path, f"content-length: {len(data)}", *fields, version=version) + data


GET_HEALTH = b"GET /healthz HTTP/1.1\r\nhost: gateway\r\n\r\n"
PROMPT = "canary of the prompt: 100% <Zürich> 4713"


def asked(**more: Any) -> dict[str, Any]:
    """A body that is right in both formats."""
    return {"model": "model", "max_tokens": 64, "messages": [{"role": "user", "content": PROMPT}], **more}


def raw_asked(**members: bytes) -> bytes:
    """Such a body with these members as they are, laid over it."""
    usual = {
        "model": b'"model"',
        "max_tokens": b"64",
        "messages": b'[{"role":"user","content":"Hi"}]',
    }
    return b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), raw) for name, raw in {**usual, **members}.items())


async def ask(gateway: Listener, path: str, body: bytes | Mapping[str, Any], *fields: str) -> Answer:
    """One request on a connection of its own, and its answer."""
    async with connected(gateway) as client:
        client.send(post(path, body, *fields))
        return await client.answer()


def error_of(answer: Answer, path: str, status: int) -> dict[str, Any]:
    """The error object; fails where the answer isn't an error of this status in the path's envelope, ids and all."""
    told = answer.data
    openai = path.startswith("/openai")
    assert (status, "application/json") == (answer.status, answer.headers["content-type"].partition(";")[0]), told
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert {"request-id", "x-request-id"} <= {name.lower() for name in answer.headers}
    assert ({"error"} if openai else {"type", "error", "request_id"}) == set(told)
    error: dict[str, Any] = told["error"]
    assert TYPES[status][0 if openai else 1] == error["type"]
    assert not openai or {"message", "type", "param", "code"} == set(error)
    assert openai or ("error", answer.headers["x-request-id"]) == (told["type"], told["request_id"])
    return error

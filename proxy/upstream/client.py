"""Requests to upstreams: one session for all, headers built from a short list, every failure a fault.

Nothing of a client's request decides where it goes: address, key and version are the upstream's own. Upstream and
client may both go away at any moment, so whoever opens an answer closes it.
"""

from __future__ import annotations

import asyncio
import io
import socket
import ssl
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from weakref import WeakSet

import aiohttp
from aiohttp.connector import AddrInfoType, Connection
from aiohttp.http_parser import RawResponseMessage

from proxy.progress import Progress
from proxy.settings import UpstreamSettings
from proxy.upstream.faults import (
    UpstreamFault,
    cut_off,
    fault_of_status,
    no_messages_answer,
    timed_out,
    unreachable,
)
from proxy.upstream.inflate import Inflater
from proxy.upstream.stream import MessageStream

MOST_BYTES = 64 * 2**20
"""Of a plain answer, decompressed."""
ERROR_BODY_TIMEOUT = 5.0
"""Seconds for the body of an error, whose status says enough."""
STALE_WITHIN = 0.2
"""Seconds within which a kept connection shows that the other side had closed it; later, the request was read."""
MOST_UNREAD = 512 * 1024
"""Bytes that the kernel holds of an answer that is not read yet."""
KEEPALIVE = 15.0
"""Seconds that an idle connection is kept; shorter than most servers keep theirs."""


def _version() -> str:
    try:
        return version("ezat-router")
    except PackageNotFoundError:
        return "0"


VERSION = _version()


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds for connecting, until a stream's first event, and for a stream's silences."""

    connect: float
    first_event: float
    idle: float


class Upstream:
    """One server that speaks Messages."""

    def __init__(self, name: str, settings: UpstreamSettings, base_url: str) -> None:
        self.name = name
        self.base_url = base_url
        self.secret = settings.api_key.get_secret_value() if settings.api_key else None
        self.identity = (name, base_url, settings.auth, self.secret or "")
        """What a change of makes it another: what one has learned of its health counts no more."""
        self.proxy = settings.proxy
        self.ssl: ssl.SSLContext | bool = True
        if settings.ca_file is not None:
            self.ssl = ssl.create_default_context(cafile=settings.ca_file)
        self.headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            "user-agent": f"ezat-router/{VERSION}",
            "anthropic-version": settings.version,
            **settings.headers,
        }
        if self.secret is not None:
            bearer = settings.auth == "bearer"
            self.headers["authorization" if bearer else "x-api-key"] = (
                f"Bearer {self.secret}" if bearer else self.secret
            )


def _bounded_socket(address: AddrInfoType) -> socket.socket:
    """A socket for which the kernel holds no more than a stream needs, whose client may take nothing of it."""
    family, kind, protocol, _, _ = address
    bounded = socket.socket(family, kind, protocol)
    bounded.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MOST_UNREAD)
    return bounded


_is_reused: ContextVar[bool] = ContextVar("is_reused", default=False)
"""Whether the connection that this task was given last had been used before."""


class _Connector(aiohttp.TCPConnector):
    """Notes which connections are kept ones. aiohttp's tracing tells it, too, at a multiple of the cost."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._used: WeakSet[Any] = WeakSet()

    async def connect(self, *request: Any, **further: Any) -> Connection:
        connection = await super().connect(*request, **further)
        _is_reused.set(connection.protocol in self._used)
        self._used.add(connection.protocol)
        return connection


class UpstreamClient:
    """The session that all upstreams share."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._session = aiohttp.ClientSession(
            connector=_Connector(limit=0, keepalive_timeout=KEEPALIVE, socket_factory=_bounded_socket),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def whole(self, upstream: Upstream, path: str, body: bytes, beta: str | None) -> bytes:
        """The body of a plain answer of status 200. Raises UpstreamFault."""
        response = await self._post(upstream, path, body, beta)
        try:
            if response.status != 200:
                raise await self._fault(response, upstream)
            return await _read(response)
        finally:
            response.close()

    async def stream(
        self, upstream: Upstream, path: str, body: bytes, beta: str | None, progress: Progress, model: str
    ) -> MessageStream | bytes:
        """A streamed answer, or the body of the whole one that came though a stream was asked for.

        ``model`` is what the answer calls its model. Raises UpstreamFault.
        """
        try:
            async with asyncio.timeout(self._timeouts.first_event):
                return await self._stream(upstream, path, body, beta, progress, model)
        except TimeoutError:
            raise timed_out("no answer in time") from None

    async def _stream(
        self, upstream: Upstream, path: str, body: bytes, beta: str | None, progress: Progress, model: str
    ) -> MessageStream | bytes:
        response = await self._post(upstream, path, body, beta)
        streamed = False
        try:
            if response.status != 200:
                raise await self._fault(response, upstream)
            streamed = response.content_type == "text/event-stream"
            if streamed:
                timeouts = self._timeouts
                return MessageStream(response, progress, model, upstream.secret, timeouts.first_event, timeouts.idle)
            return await _read(response)
        finally:
            if not streamed:
                response.close()

    async def _post(self, upstream: Upstream, path: str, body: bytes, beta: str | None) -> aiohttp.ClientResponse:
        """Send a request. Once more where a kept connection turned out to be closed before a byte of an answer."""
        headers = upstream.headers if beta is None else {**upstream.headers, "anthropic-beta": beta}
        attempts = 0
        while True:
            attempts += 1
            _is_reused.set(False)
            began = asyncio.get_running_loop().time()
            try:
                response = await self._session.post(
                    upstream.base_url + path,
                    data=io.BytesIO(body) if len(body) > 2**20 else body,
                    headers=headers,
                    allow_redirects=False,
                    proxy=upstream.proxy,
                    ssl=upstream.ssl,
                )
                _end_with_connection(response)
                return response
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                begun = isinstance(getattr(error, "message", None), RawResponseMessage)
                late = asyncio.get_running_loop().time() - began > STALE_WITHIN
                if begun or late or attempts > 1 or not _is_reused.get():
                    raise unreachable(type(error).__name__) from error
            except (aiohttp.ServerTimeoutError, TimeoutError) as error:
                raise timed_out(type(error).__name__) from error
            except (aiohttp.ClientError, OSError, ValueError) as error:
                raise unreachable(type(error).__name__) from error

    async def _fault(self, response: aiohttp.ClientResponse, upstream: Upstream) -> UpstreamFault:
        """The fault of a status; its words where they come in time."""
        try:
            async with asyncio.timeout(min(ERROR_BODY_TIMEOUT, self._timeouts.first_event / 2)):
                body = await _read(response)
        except (UpstreamFault, TimeoutError):
            body = b""
        return fault_of_status(response.status, body, response.headers, upstream.secret)


def _end_with_connection(response: aiohttp.ClientResponse) -> None:
    """aiohttp closes a connection at a malformed chunk and tells the reader of the body nothing: so it is told here."""
    content, connection = response.content, response.connection
    closed = connection.protocol.closed if connection is not None and connection.protocol is not None else None
    if closed is None:
        return
    closed.remove_done_callback(_retrieve)  # a kept connection has been here before
    closed.add_done_callback(_retrieve)
    if content.is_eof():
        return

    def lost(_: asyncio.Future[None]) -> None:
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError("the connection ended within the body"))

    def whole() -> None:
        closed.remove_done_callback(lost)

    closed.add_done_callback(lost)
    content.on_eof(whole)


def _retrieve(closed: asyncio.Future[None]) -> None:
    """How a connection ended is told by the body."""
    if not closed.cancelled():
        closed.exception()


async def _read(response: aiohttp.ClientResponse) -> bytes:
    encoding = response.headers.get("content-encoding", "identity")
    inflater = None if encoding == "identity" else Inflater(encoding, MOST_BYTES)
    pieces, size = [], 0
    try:
        while data := await response.content.readany():
            size += len(data)
            if size > MOST_BYTES:
                raise no_messages_answer("the answer is too large")
            pieces.append(data if inflater is None else inflater.feed(data))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise cut_off(type(error).__name__) from error
    if inflater is not None:
        inflater.end()
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)

"""aiohttp's low-level server, set up for a gateway.

No Application: its router, its match of each path and its own answers to unknown ones are not used. What is no HTTP
is answered in an envelope, too, and never quoted: neither to the client nor in the log, since it may hold a key.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import uuid_utils
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader

from proxy import streaming
from proxy.files import most_connections
from proxy.jsontext import encode

MOST_UNSENT = 256 * 1024
"""Bytes that the kernel holds for a client beyond those under way; by itself it takes megabytes for one that stalls."""
Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class _WithoutArguments(logging.Filter):
    """aiohttp's own messages quote what clients sent: only what kind of error it was is logged."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else "none"
        record.msg, record.args, record.exc_info = f"aiohttp reports an error of kind {kind}", (), None
        return True


_quiet = logging.getLogger("ezat.http")
_quiet.addFilter(_WithoutArguments())


class _Protocol(web.RequestHandler):
    """One connection of a client."""

    __slots__ = ("_server",)

    def __init__(self, server: HttpServer, **options: Any) -> None:
        super().__init__(server, **options)
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Bound how long a client may take nothing of what it is sent, and keep room for others."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(streaming.STALLED_READER * 1000))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MOST_UNSENT)
        self._server.opened(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.closed(self)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is no HTTP, or where nothing else could be answered. The connection is closed."""
        if status >= 500:
            self.log_exception("the connection failed", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        request_id = str(uuid_utils.uuid7())
        kind, words = ("invalid_request_error", "this is no valid HTTP") if status < 500 else ("api_error", "it failed")
        body = encode(
            {"type": "error", "error": {"type": kind, "message": words, "code": None}, "request_id": request_id}
        )
        headers = {"request-id": request_id, "x-request-id": request_id, "content-type": "application/json"}
        response = web.Response(status=status, body=body, headers=headers)
        response.force_close()
        return response


class HttpServer(web.Server):
    """Answers every request with one function.

    Where there are more connections than the process may have files for, the oldest of those that are idle are closed:
    whoever opens many and sends nothing keeps nobody else out.

    ``most_bytes`` is the largest body. ``keepalive``, the seconds for which an idle connection of a client is kept, may
    be changed: connections that are made from then on follow it.
    """

    def __init__(self, answer: Answer, *, most_bytes: int, keepalive: float) -> None:
        super().__init__(
            self._answer,
            request_factory=self._request,
            handler_cancellation=True,
            access_log=None,
            logger=_quiet,
            auto_decompress=False,
        )
        self._answered_by = answer
        self._most_bytes = most_bytes
        self._most = most_connections()
        self._open: dict[web.RequestHandler, None] = {}
        """The connections, the oldest first."""
        self._busy: set[web.RequestHandler] = set()
        self.keepalive = keepalive

    def __call__(self) -> web.RequestHandler:
        return _Protocol(self, loop=self._loop, keepalive_timeout=self.keepalive, **self._kwargs)

    def opened(self, connection: web.RequestHandler) -> None:
        """A client has come: where there are too many now, the oldest idle connections are closed."""
        self._open[connection] = None
        too_many = len(self._open) - self._most
        if too_many > 0:
            idle = [each for each in self._open if each not in self._busy]
            for oldest in idle[:too_many]:
                self.closed(oldest)
                oldest.force_close()

    def closed(self, connection: web.RequestHandler) -> None:
        """A connection is over."""
        self._open.pop(connection, None)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer, and send all of it: until then the connection is not idle, and the request is under way."""
        protocol = request.protocol
        self._busy.add(protocol)
        try:
            return await self._answered_by(request)
        finally:
            self._busy.discard(protocol)

    def _request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[Any],
    ) -> web.BaseRequest:
        return web.BaseRequest(message, payload, protocol, writer, task, self._loop, client_max_size=self._most_bytes)

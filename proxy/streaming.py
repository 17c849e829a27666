"""The rim of a streamed answer: it starts late, keeps quiet connections alive, and ends once.

It starts with the first bytes to send, so that what goes wrong before is still a JSON error; or with a ping, once
there has been nothing to send for a while. Two tasks may want to start it, the handler and the ping: one prepares,
the other waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from aiohttp import HttpVersion11, web
from aiohttp_sse import EventSourceResponse

from proxy.background import Background

STALLED_READER = 120.0
"""Seconds that the kernel waits for a client that takes nothing any more."""
_NO_PING_OF_ITS_OWN = 10.0**9


class AnswerStream:
    """One streamed answer on its way to the client."""

    def __init__(
        self,
        request: web.BaseRequest,
        headers: Callable[[], Mapping[str, str]],
        ping: bytes,
        ping_interval: float,
        background: Background,
    ) -> None:
        self._request = request
        self._headers = headers
        self._ping = ping
        self._interval = ping_interval
        self._background = background
        self._loop = asyncio.get_running_loop()
        self._response: EventSourceResponse | None = None
        self._started: asyncio.Future[None] | None = None
        self._ended = False
        self._last = self._loop.time()
        self._timer = self._loop.call_later(ping_interval, self._tick)

    @property
    def begun(self) -> bool:
        """Whether something has gone out, so that an error has to be told within the stream."""
        return self._started is not None

    @property
    def response(self) -> web.StreamResponse:
        """The response, once begun."""
        if self._response is None:
            raise RuntimeError("the answer has not begun")
        return self._response

    async def write(self, data: bytes) -> None:
        """Send whole frames. Raises ConnectionResetError where the client has left."""
        self._last = self._loop.time()
        response = self._response
        if response is None or not response.prepared:
            response = await self._start()
        await response.write(data)

    async def end(self, data: bytes) -> None:
        """Send the last frames; nothing follows."""
        self._ended = True
        self._timer.cancel()
        response = await self._start()
        await response.write(data)
        await response.write_eof()
        await until_sent(self._request)

    def close(self) -> None:
        """Free what the stream holds, on every path."""
        self._ended = True
        self._timer.cancel()
        if self._response is not None and self._response.is_connected():
            self._response.stop_streaming()

    async def _start(self) -> EventSourceResponse:
        if self._response is None or self._started is None:
            self._started = self._loop.create_future()
            self._response = EventSourceResponse(
                headers=self._headers(),
                sep="\n",
                allow_all_methods=True,
                send_timeout=STALLED_READER,
                ping_interval=_NO_PING_OF_ITS_OWN,
            )
            self._response.headers.popall("connection", None)  # says keep-alive, whatever the client asked for
            if self._request.version < HttpVersion11:
                self._response.force_close()  # without chunks only that ends the answer
            try:
                await self._response.prepare(self._request)
            finally:
                self._started.set_result(None)
        elif not self._started.done():
            await asyncio.shield(self._started)
        return self._response

    def _tick(self) -> None:
        quiet = self._loop.time() - self._last
        if quiet >= self._interval - 0.001:
            self._last = self._loop.time()
            quiet = 0.0
            self._background.spawn(self._send_ping())
        self._timer = self._loop.call_later(self._interval - quiet, self._tick)

    async def _send_ping(self) -> None:
        if self._ended:
            return
        try:
            response = await self._start()
            if not self._ended:
                await response.write(self._ping)
        except (ConnectionResetError, asyncio.CancelledError):
            pass


async def until_sent(request: web.BaseRequest) -> None:
    """Wait until the kernel has every byte of an answer: so a stop waits for whoever reads slowly.

    Raises ConnectionResetError.
    """
    transport = request.transport
    if transport is not None and transport.get_write_buffer_size():
        transport.set_write_buffer_limits(0)
        await request.writer.drain()
        transport.set_write_buffer_limits()

"""An upstream of many conversations that keeps whom it met, and can die in the midst of it all and come back.

It keeps its port while it is gone, by a second socket that is bound and never listens: nobody else can take it, and
whoever connects is refused.
"""

from __future__ import annotations

import asyncio
import re
import socket
from typing import Any

from aiohttp import web

from proxy.testing import message_reply, stream_reply, text_events

PAUSE = 0.02
"""Seconds that it thinks before an answer and within a stream, so that much is under way at any time."""
OUTPUT_TOKENS = 7
_NUMBER = re.compile(rb"request (\d+)\.")
_STREAM = re.compile(rb'"stream": ?true')


def question(number: int) -> str:
    """What a client asks, so that the upstream knows the request by its number."""
    return f"This is request {number}."


def answer_of(name: str, number: int) -> str:
    """What the upstream of this name answers."""
    return f"{name} answers {number}"


class CuttableUpstream:
    """Answers each numbered request by its own name and the number, and counts the number as its input tokens."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.hangs = False
        """Whether it gets no further: with half of the requests before it answers, with the rest within the stream."""
        self.met: list[int] = []
        """The requests that reached it, in order."""
        self.waiting: set[int] = set()
        """Those of which nothing is answered yet."""
        self.streaming: set[int] = set()
        """Those whose streams have begun and aren't over."""
        self.url = ""

    async def __aenter__(self) -> CuttableUpstream:
        app = web.Application()
        app.router.add_post("/v1/messages", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        self._kept = _bound(0)
        self._port = self._kept.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        await self.come_back()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        await self._runner.cleanup()
        self._kept.close()

    async def come_back(self) -> None:
        """Listen, again or for the first time."""
        self.hangs = False
        assert self._runner.server is not None
        self._listener = await asyncio.get_running_loop().create_server(self._runner.server, sock=_bound(self._port))
        self._is_there = True

    def cut_off(self) -> None:
        """Stop listening and close every connection, at once."""
        assert self._runner.server is not None
        self._is_there = False
        self._listener.close()
        for connection in self._runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        sent = await request.read()
        if not self._is_there:  # over a connection that was just being taken when all were closed
            raise ConnectionResetError
        number = int(_NUMBER.findall(sent)[-1])
        self.met.append(number)
        self.waiting.add(number)
        try:
            await self._think(hangs=number % 4 < 2)
        finally:
            self.waiting.discard(number)
        usage = {"input_tokens": number, "output_tokens": OUTPUT_TOKENS}
        text = answer_of(self.name, number)
        if not _STREAM.search(sent):
            [body] = message_reply(content=[{"type": "text", "text": text}], usage=usage).pieces
            return web.Response(body=body, content_type="application/json")
        self.streaming.add(number)
        try:
            return await self._stream(request, text, usage)
        finally:
            self.streaming.discard(number)

    async def _stream(self, request: web.Request, text: str, usage: dict[str, int]) -> web.StreamResponse:
        events: list[Any] = text_events(*text.partition(" "))
        events[0]["message"]["usage"] = usage
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(_encoded(events[:3]))
        await self._think(hangs=True)
        await response.write(_encoded(events[3:]))
        await response.write_eof()
        return response

    async def _think(self, *, hangs: bool) -> None:
        await asyncio.sleep(PAUSE)
        if hangs and self.hangs:
            await asyncio.Event().wait()  # until its connection ends


def _encoded(events: list[Any]) -> bytes:
    return b"".join(piece for piece in stream_reply(events).pieces if isinstance(piece, bytes))


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind(("127.0.0.1", port))
    return bound

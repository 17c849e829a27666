"""An upstream that plays bytes, pauses and good-byes, one script for each request, and keeps what it was sent.

It is no HTTP server: it reads a request as far as its script says and then plays, so that it can break every rule
of HTTP and of server-sent events.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from multidict import CIMultiDict

from proxy.testing import text_events


class Move(Enum):
    """What an upstream does besides sending bytes."""

    RESET = auto()
    CLOSE = auto()
    WAIT = auto()
    """Until the gateway leaves."""
    IGNORE = auto()
    """Until the test is over, without reading a byte: whether the gateway leaves is not seen."""


Step = bytes | float | asyncio.Event | Move
"""Bytes to send, seconds or an event to wait for, or a move."""


@dataclass(slots=True)
class Script:
    """How to answer one request. The connection is kept when the steps are over."""

    steps: Sequence[Step]
    reads_body: bool = True


@dataclass(slots=True)
class Asked:
    """A request that came."""

    line: str
    headers: CIMultiDict[str]
    body: bytes = b""


def http(body: bytes, *fields: str, status: str = "200 OK", type: str = "application/json") -> bytes:
    """A whole answer, with these further header lines."""
    return answer_head(*fields, f"content-length: {len(body)}", status=status, type=type) + body


def answer_head(*fields: str, status: str = "200 OK", type: str | None = "text/event-stream") -> bytes:
    """The head of an answer; without a length it lasts until the connection is closed."""
    lines = [f"HTTP/1.1 {status}", *([f"content-type: {type}"] if type else []), *fields, "", ""]
    return "\r\n".join(lines).encode("latin-1")


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked answer."""
    return b"%x\r\n%b\r\n" % (len(data), data)


TLS = b"\x16"
"""The first byte of a handshake: a server that speaks plain HTTP takes it for no HTTP."""
LAST_CHUNK = b"0\r\n\r\n"
CHUNKED = answer_head("transfer-encoding: chunked")


def frame(event: Mapping[str, Any]) -> bytes:
    """An event on the wire."""
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


def frames(events: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(frame(event) for event in events)


def stream_of(*steps: Step) -> Script:
    """A chunked stream of server-sent events: each piece of bytes is a chunk."""
    return Script([CHUNKED, *(chunk(step) if isinstance(step, bytes) else step for step in steps)])


MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "model-at-upstream",
    "content": [{"type": "text", "text": "Hello."}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 12, "output_tokens": 7},
}
PLAIN = http(json.dumps(MESSAGE).encode())
EVENTS = text_events("Hel", "lo.")
BEGUN, ENDING = frames(EVENTS[:4]), frames(EVENTS[4:])
STREAMED = CHUNKED + chunk(BEGUN) + chunk(ENDING) + LAST_CHUNK


@dataclass
class RawUpstream:
    """Plays the scripts in order, and without one a good answer, streamed where that was asked for."""

    scripts: deque[Script] = field(default_factory=deque)
    asked: list[Asked] = field(default_factory=list)
    wire: list[bytes] = field(default_factory=list)
    """Every byte that came, in pieces."""
    connections: int = 0
    playing: int = 0
    """Answers that are being given."""
    most_at_once: int = 0
    sent: int = 0
    """Bytes of answers that were sent."""
    left: int = 0
    """How often the gateway left before a script was over."""
    url: str = ""

    async def __aenter__(self) -> RawUpstream:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        self._over = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._server = await asyncio.start_server(self._serve, sock=listener)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._idle.wait()

    def play(self, *steps: Step, reads_body: bool = True) -> None:
        """Answer the next request so."""
        self.scripts.append(Script(steps, reads_body))

    def play_stream(self, *steps: Step) -> None:
        """Answer the next request with a chunked stream of these pieces."""
        self.scripts.append(stream_of(*steps))

    def forget(self) -> None:
        """As if it were new."""
        self._over.set()
        self._over = asyncio.Event()
        self.scripts.clear()
        self.asked.clear()
        self.wire.clear()
        self.connections = self.left = self.most_at_once = self.sent = 0

    def hang_up(self) -> None:
        """Close every connection, idle ones too."""
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self._idle.clear()
        self.connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()
            self._writers.discard(writer)
            if not self._writers:
                self._idle.set()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the connection is kept."""
        head = await reader.readexactly(1)
        if head == TLS:
            writer.write(http(b"", status="400 Bad Request"))
            return False
        head += await reader.readuntil(b"\r\n\r\n")
        self.wire.append(head)
        line, *fields = head[:-4].decode("latin-1").split("\r\n")
        headers = CIMultiDict((name, value) for name, _, value in (text.partition(": ") for text in fields))
        asked = Asked(line, headers)
        self.asked.append(asked)
        self.playing += 1
        self.most_at_once = max(self.most_at_once, self.playing)
        try:
            script = self.scripts.popleft() if self.scripts else None
            if script is None or script.reads_body:
                asked.body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.wire.append(asked.body)
            if script is None:
                return await self._play(_usual(asked.body), reader, writer)
            return await self._play(script.steps, reader if script.reads_body else None, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.left += 1
            raise
        finally:
            self.playing -= 1

    async def _play(
        self, steps: Sequence[Step], reader: asyncio.StreamReader | None, writer: asyncio.StreamWriter
    ) -> bool:
        """Go through the steps; whether the connection is kept. Without a reader the request is not read any more."""
        for step in steps:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
                self.sent += len(step)
            elif step is Move.RESET:
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                return False
            elif step is Move.CLOSE:
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()
                return False
            elif isinstance(step, asyncio.Event):
                await step.wait()
            elif step is Move.IGNORE:
                await self._over.wait()
                return False
            else:
                await _wait(reader, None if step is Move.WAIT else step)
        return True


async def _wait(reader: asyncio.StreamReader | None, seconds: Any) -> None:
    """Wait so long, or until the gateway leaves: then raises IncompleteReadError."""
    if reader is None:
        await asyncio.sleep(seconds)
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await reader.readexactly(1)
            raise AssertionError("the gateway sends a request into an answer")


def _usual(body: bytes) -> Sequence[Step]:
    return [STREAMED if re.search(rb'"stream": ?true', body) else PLAIN]

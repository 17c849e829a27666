"""A real upstream that answers as it is told, and the replies to tell it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from proxy.jsontext import encode


@dataclass(slots=True)
class Received:
    """A request that reached the ScriptedUpstream."""

    path: str
    headers: Mapping[str, str]
    """By their names in lower case."""
    body: bytes


@dataclass(slots=True)
class Reply:
    """How the ScriptedUpstream answers: ``pieces`` one after the other, each bytes, or seconds to wait, or ``CUT``."""

    pieces: Sequence[bytes | float]
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


CUT = b"\0cut"
"""A piece that resets the connection."""


def message_reply(**fields: Any) -> Reply:
    """A whole message as a reply; ``fields`` are laid over it."""
    return Reply([encode({**_MESSAGE, **fields})])


def stream_reply(events: Iterable[Mapping[str, Any] | float | bytes]) -> Reply:
    """A stream of events; numbers are seconds to wait, bytes are sent as they are."""
    pieces: list[bytes | float] = []
    for event in events:
        if isinstance(event, Mapping):
            pieces.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event)))
        else:
            pieces.append(event)
    return Reply(pieces, content_type="text/event-stream")


def text_events(*texts: str, stop_reason: str | None = "end_turn") -> list[dict[str, Any]]:
    """The events of a message of one block of text, in these pieces; without its end where ``stop_reason`` is None."""
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**_MESSAGE, "content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    ]
    for text in texts:
        events.append({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}})
    if stop_reason is None:
        return events
    events.append({"type": "content_block_stop", "index": 0})
    delta = {"stop_reason": stop_reason, "stop_sequence": None}
    events.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 7}})
    events.append({"type": "message_stop"})
    return events


_MESSAGE = {
    "id": "msg_test",
    "type": "message",
    "role": "assistant",
    "model": "model-at-upstream",
    "content": [{"type": "text", "text": "Hello."}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 12, "output_tokens": 7},
}


class ScriptedUpstream:
    """An upstream that plays replies in order, then a plain message for ever. Keeps what it received."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = deque(replies)
        self.received: list[Received] = []
        self.left = asyncio.Event()
        """Set when somebody left before the end of an answer."""
        self.open = 0
        """Answers that are being given."""
        self.url = ""

    async def __aenter__(self) -> ScriptedUpstream:
        app = web.Application(client_max_size=256 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.received.append(Received(request.path_qs, headers, await request.read()))
        reply = self.replies.popleft() if self.replies else message_reply()
        self.open += 1
        try:
            return await self._play(request, reply)
        except (asyncio.CancelledError, ConnectionResetError):
            self.left.set()
            raise
        finally:
            self.open -= 1

    async def _play(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        response = web.StreamResponse(
            status=reply.status, headers={"content-type": reply.content_type, **reply.headers}
        )
        for piece in reply.pieces:
            if isinstance(piece, int | float):
                await asyncio.sleep(piece)
                continue
            if piece == CUT:
                if request.transport is not None:
                    request.transport.abort()
                return response
            if not response.prepared:
                await response.prepare(request)
            await response.write(piece)
        if not response.prepared:
            await response.prepare(request)
        await response.write_eof()
        return response

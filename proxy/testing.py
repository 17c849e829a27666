"""What a stranger needs to test a plugin. Public and kept stable.

The hooks of a plugin are called by ``ask`` and ``pass_answer``, ``pass_events``, which fail where it edits what it
may only read. ``running_gateway`` starts a real gateway with the plugin in its list, and ``ScriptedUpstream`` is a
real upstream that answers as it is told.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from proxy.answer import Answer
from proxy.config import Config, load
from proxy.document import Document, Event
from proxy.exchange import Exchange, Key
from proxy.jsontext import encode
from proxy.loading import build
from proxy.models import Capabilities, Deployment, Model, ModelTable, Price
from proxy.plugin import OutputPlugin, Plugin, Route
from proxy.reading import parse
from proxy.server import Gateway

MODEL = Model(
    id="test/model",
    aliases=("model",),
    display_name="Model",
    owned_by="test",
    created=1767225600,
    max_output_tokens=8192,
    context_window=None,
    capabilities=Capabilities(),
    price=Price(Decimal(1), Decimal(5)),
    deployments=(Deployment("test", "model-at-upstream"),),
)
"""The model of ``make_exchange``: it can do everything."""

PluginInList = type[Plugin] | tuple[type[Plugin], Mapping[str, Any]]
"""A plugin for the list of ``running_gateway``: its class, or that with its settings."""


def make_exchange(
    body: Mapping[str, Any],
    *,
    route: Route = Route.CHAT_COMPLETIONS,
    model: Model = MODEL,
    headers: Mapping[str, str] | None = None,
    key: Key | None = None,
) -> Exchange:
    """An exchange whose client sent this body. ``model`` may be left out of the body."""
    exchange = Exchange(route, CIMultiDictProxy(CIMultiDict(headers or {})), ModelTable([model]))
    sent = {"model": model.id, **body}
    exchange.read(parse(encode(sent), route))
    exchange.asked_model = str(sent["model"])
    exchange.model_or_none = model
    exchange.stream = sent.get("stream") is True
    exchange.key = key
    return exchange


async def ask(plugin: Plugin, exchange: Exchange) -> OutputPlugin | Answer | None:
    """``on_request`` of a plugin. Fails where it edits the body without ``exchange.change()``."""
    document = exchange.document
    before = _snapshot(document)
    result = await plugin.on_request(exchange)
    _fail_if_edited(document, before, "the body", "exchange.change()")
    return result


async def pass_answer(output: OutputPlugin, data: dict[str, Any]) -> dict[str, Any]:
    """What a whole answer becomes when it passes an output. Fails where it is edited without ``change()``."""
    answer = Answer(raw=encode(data))
    before = _snapshot(answer)
    await output.on_answer(answer)
    _fail_if_edited(answer, before, "the answer", "answer.change()")
    passed: dict[str, Any] = answer.data
    return passed


def pass_events(output: OutputPlugin, events: Iterable[Event]) -> list[Event]:
    """What the events of a stream become when they pass an output; kinds that it doesn't want pass by it."""
    passed: list[Event] = []
    for event in events:
        if output.events is not None and event.kind not in output.events:
            passed.append(event)
            continue
        event = Event(event.kind, raw=event.encoded())
        before = _snapshot(event)
        passed += output.on_event(event)
        _fail_if_edited(event, before, f"the event {event.kind}", "event.change()")
    return passed


def _snapshot(document: Document) -> bytes:
    return encode(document.data)


def _fail_if_edited(document: Document, before: bytes, what: str, by: str) -> None:
    if document.unchanged is not None and _snapshot(document) != before:
        raise AssertionError(f"{what} was edited without {by}: the edit would be lost")


@asynccontextmanager
async def running_gateway(
    plugins: Sequence[PluginInList],
    *,
    upstream: str = "demo",
    server: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
) -> AsyncIterator[str]:
    """A gateway with these plugins in its list, on a free port; its URL.

    It serves the model ``model`` of the upstream, by default the embedded demo upstream, and asks for no key unless
    a plugin does. ``server`` and ``model`` are laid over its settings.
    """
    listed = [each if isinstance(each, tuple) else (each, {}) for each in plugins]
    config = {
        "server": {"port": 0, "open": True, "admin": {"port": 0}, **(server or {})},
        "upstreams": {"test": {"base_url": upstream, "api_key": "upstream-secret"}},
        "models": [
            {
                "id": "test/model",
                "aliases": ["model"],
                "max_output_tokens": 8192,
                "price": {"input": 1, "output": 5},
                "deployments": [{"upstream": "test", "model": "model-at-upstream"}],
                **(model or {}),
            }
        ],
        "plugins": [{cls.name: dict(settings)} for cls, settings in listed],
    }
    loaded = _loaded(config)
    models = ModelTable.from_settings(loaded.models)
    gateway = Gateway(loaded, models, build(loaded, models, {cls.name: cls for cls, _ in listed}))
    try:
        await gateway.start()
        yield f"http://127.0.0.1:{gateway.port}"
    finally:
        await gateway.stop()


def _loaded(config: Mapping[str, Any]) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "gateway.yaml")
        path.write_bytes(orjson.dumps(config))  # JSON is YAML
        return load(path, {})


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

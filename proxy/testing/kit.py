"""The hooks of a plugin, called one by one; and a real gateway with the plugin in its list."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson
from multidict import CIMultiDict, CIMultiDictProxy

from proxy.answer import Answer
from proxy.config import load
from proxy.document import Document, Event
from proxy.exchange import Exchange, Key
from proxy.jsontext import encode
from proxy.loading import build
from proxy.models import Capabilities, Deployment, Model, ModelTable, Price
from proxy.plugin import OutputPlugin, Plugin, Route
from proxy.reading import parse
from proxy.server import Gateway
from proxy.settings import Config

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
    given: list[tuple[Event, bytes]] = []
    for event in events:
        if output.events is not None and event.kind not in output.events:
            passed.append(event)
            continue
        event = Event(event.kind, raw=event.encoded())
        given.append((event, _snapshot(event)))
        passed += output.on_event(event)
        for each, before in given:  # an event that was held back may be edited later
            _fail_if_edited(each, before, f"the event {each.kind}", "event.change()")
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
        "store": "sqlite:///:memory:",
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

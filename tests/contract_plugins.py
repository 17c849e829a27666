"""Plugins made of nothing but the hooks that a test needs, and what a client sees of a gateway that runs them.

A plugin is a class that the gateway makes itself, so what it does is noted in a ``Record`` that it is bound to; the
record outlives the gateway, so that what happens twice or too late is found as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import orjson

from plugins.chat_completions import ChatCompletions
from proxy.answer import Answer
from proxy.document import Event
from proxy.exchange import Exchange
from proxy.plugin import Outcome, OutputPlugin, Plugin
from proxy.testing import Reply, ScriptedUpstream, running_gateway, stream_reply

PATHS = {"openai": "/openai/v1/chat/completions", "messages": "/v1/messages"}
BOTH_ROUTES = tuple(PATHS)
PLAIN_AND_STREAMED = {"plain": False, "streamed": True}
PLACES = ("before the translator", "behind the translator")
BUG_TEXT = "canary-4711 of a bug"
FOREVER = 60.0
"""Seconds that an upstream goes on for; only its release ends a test in time."""
PATIENCE = 10.0
"""Seconds that a test waits for what must happen."""

OUTPUT_HOOKS = ("on_answer", "on_event", "on_complete", "on_close")
Hook = Callable[..., Any]


def plugin_of(name: str = "test", kinds: frozenset[str] | None = None, /, **hooks: Hook) -> type[Plugin]:
    """A plugin of these hooks. Those of its output get the exchange as their first argument, too."""
    of_output = {hook: _bound(call) for hook, call in hooks.items() if hook in OUTPUT_HOOKS}
    of_plugin: dict[str, Any] = {hook: staticmethod(call) for hook, call in hooks.items() if hook not in OUTPUT_HOOKS}
    if of_output:
        output = type("Output", (_OfExchange,), {**of_output, "events": kinds})

        async def on_request(exchange: Exchange) -> OutputPlugin | Answer | None:
            own: OutputPlugin | Answer | None = await hooks["on_request"](exchange) if "on_request" in hooks else None
            return own if own is not None else output(exchange)

        of_plugin["on_request"] = staticmethod(on_request)
    said = {"name": name, "completes": "on_complete" in hooks}
    return type(f"Plugin_{name}", (Plugin,), {**said, **of_plugin})


class _OfExchange(OutputPlugin):
    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange


def _bound(call: Hook) -> Hook:
    def method(self: _OfExchange, *arguments: Any) -> Any:
        return call(self.exchange, *arguments)

    return method


@dataclass
class Record:
    """What the plugins of one gateway did, in order."""

    calls: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    given_back: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an exchange is over: its deferred calls run last."""


def watcher(record: Record, name: str = "watcher") -> type[Plugin]:
    """Stands first in the list, defers at once, and notes how exchanges end."""

    def give_back() -> None:
        record.given_back += 1
        record.closed.set()

    async def on_headers(exchange: Exchange) -> None:
        exchange.defer(give_back)

    return plugin_of(name, on_headers=on_headers, on_close=lambda exchange, outcome: record.outcomes.append(outcome))


def noting(record: Record, name: str) -> type[Plugin]:
    """Notes every call of every hook under its name, and defers in each of them."""

    def note(hook: str, exchange: Exchange) -> None:
        record.calls.append(f"{name}.{hook}")
        exchange.defer(lambda: record.calls.append(f"{name}.{hook} given back"))

    async def on_headers(exchange: Exchange) -> None:
        note("on_headers", exchange)

    async def on_request(exchange: Exchange) -> None:
        note("on_request", exchange)

    async def on_send(exchange: Exchange) -> None:
        note("on_send", exchange)

    async def on_answer(exchange: Exchange, answer: Answer) -> None:
        note("on_answer", exchange)

    def on_event(exchange: Exchange, event: Event) -> Sequence[Event]:
        if event.kind in ("message_start", "role"):
            note("on_event", exchange)
        return (event,)

    async def on_complete(exchange: Exchange) -> None:
        note("on_complete", exchange)

    def on_close(exchange: Exchange, outcome: Outcome) -> None:
        note("on_close", exchange)

    return plugin_of(
        name,
        on_headers=on_headers,
        on_request=on_request,
        on_send=on_send,
        on_answer=on_answer,
        on_event=on_event,
        on_complete=on_complete,
        on_close=on_close,
    )


def in_order(plugin: type[Plugin], place: str) -> list[type[Plugin]]:
    """The plugin and the translator, in the order of the place."""
    return [plugin, ChatCompletions] if place == "before the translator" else [ChatCompletions, plugin]


def request_of(stream: bool, **fields: Any) -> dict[str, Any]:
    """A request that both formats take."""
    streamed = {"stream": True} if stream else {}
    return {"model": "model", "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}], **streamed, **fields}


class Seen(NamedTuple):
    """An answer as the client got it."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def data(self) -> Any:
        """Of a plain answer or an error."""
        return orjson.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Of a stream, keep-alives left out: dicts, and ``[DONE]`` as text."""
        frames = [frame for frame in self.body.decode().split("\n\n") if frame and not frame.startswith(":")]
        data = [line.removeprefix("data: ") for frame in frames for line in frame.split("\n") if "data: " in line[:6]]
        events: list[Any] = [text if text == "[DONE]" else orjson.loads(text) for text in data]
        return [event for event in events if event == "[DONE]" or event.get("type") != "ping"]

    @property
    def streamed(self) -> bool:
        return self.headers["content-type"].startswith("text/event-stream")


@asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """A client that gives up when a gateway doesn't answer."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE)) as session:
        yield session


async def ask_for(
    url: str,
    format: str,
    stream: bool = False,
    *,
    body: bytes | Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Seen:
    """One request on a route and its whole answer."""
    sent = body if isinstance(body, bytes) else orjson.dumps(body if body is not None else request_of(stream))
    async with client() as session, session.post(url + PATHS[format], data=sent, headers=headers) as response:
        names = {name.lower(): value for name, value in response.headers.items()}
        return Seen(response.status, names, await response.read())


def text_of(seen: Seen, format: str) -> str:
    """The text of an answer, plain or streamed."""
    if not seen.streamed:
        if format == "openai":
            return str(seen.data["choices"][0]["message"]["content"])
        return "".join(block.get("text", "") for block in seen.data["content"])
    events = [event for event in seen.events if event != "[DONE]"]
    if format == "openai":
        choices = [choice for event in events for choice in event.get("choices", ())]
        return "".join(choice["delta"].get("content") or "" for choice in choices)
    return "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")


def ending_of(seen: Seen, format: str) -> str:
    """How an answer ends, in words that are the same for both formats; fails where it doesn't end exactly once.

    ``whole``; ``429 rate_limit_error`` for an error before the answer began; ``broken: api_error`` for one in it.
    """
    if not seen.streamed:
        if seen.status == 200:
            return "whole"
        error = seen.data["error"]
        assert ("error" if format == "messages" else None) == seen.data.get("type"), "the envelope of the other format"
        return f"{seen.status} {error['type']}"
    assert 200 == seen.status
    return _ending_of_chunks(seen.events) if format == "openai" else _ending_of_events(seen.events)


def _ending_of_chunks(chunks: Sequence[Any]) -> str:
    assert [len(chunks) - 1] == [at for at, chunk in enumerate(chunks) if chunk == "[DONE]"], "[DONE], once and last"
    errors = [at for at, chunk in enumerate(chunks[:-1]) if "error" in chunk]
    finishes = [
        at for at, chunk in enumerate(chunks[:-1]) for each in chunk.get("choices", ()) if each["finish_reason"]
    ]
    usages = [at for at, chunk in enumerate(chunks[:-1]) if chunk.get("usage")]
    if errors:
        assert ([len(chunks) - 2], [], []) == (errors, finishes, usages), "an error, once and last, and no tail"
        return f"broken: {chunks[-2]['error']['type']}"
    assert 1 == len(finishes), "a finish_reason, once"
    assert len(chunks) - 2 == (usages or finishes)[-1], "the tail last"
    return "whole"


def _ending_of_events(events: Sequence[Any]) -> str:
    last = len(events) - 1
    kinds = [event["type"] for event in events]
    errors = [at for at, kind in enumerate(kinds) if kind == "error"]
    stops = [at for at, kind in enumerate(kinds) if kind == "message_stop"]
    reasons = [event for event in events if event["type"] == "message_delta" and event["delta"].get("stop_reason")]
    if errors:
        assert ([last], [], []) == (errors, stops, reasons), "an error, once and last, and no tail"
        return f"broken: {events[-1]['error']['type']}"
    assert ([last], 1) == (stops, len(reasons)), "one stop_reason, and a message_stop, once and last"
    return "whole"


def in_one_read(events: Iterable[Mapping[str, Any]], *more: bytes | float) -> Reply:
    """A stream whose events arrive together, and what follows them."""
    together = b"".join(piece for piece in stream_reply(events).pieces if isinstance(piece, bytes))
    return Reply([together, *more], content_type="text/event-stream")


async def until(holds: Callable[[], bool]) -> None:
    """Waits for what nobody tells of, such as how many answers an upstream is giving."""
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.002)


async def released(upstream: ScriptedUpstream) -> bool:
    """Waits until the upstream gives no answer any more."""
    await until(lambda: upstream.open == 0)
    return True


@asynccontextmanager
async def gateway_and_upstream(
    plugins: Sequence[type[Plugin]], *replies: Reply, **server: Any
) -> AsyncIterator[tuple[str, ScriptedUpstream]]:
    """A gateway with these plugins and settings of its server, in front of an upstream that plays these replies."""
    async with (
        ScriptedUpstream(*replies) as upstream,
        running_gateway(plugins, upstream=upstream.url, server=server) as url,
    ):
        yield url, upstream

"""The kit for authors of plugins: it calls hooks as the engine does, and fails a plugin whose edits would be lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.answer import Answer
from proxy.document import Event
from proxy.exchange import Exchange, Key
from proxy.plugin import OutputPlugin, Plugin, Route
from proxy.testing import (
    CUT,
    MODEL,
    Reply,
    ScriptedUpstream,
    ask,
    make_exchange,
    message_reply,
    pass_answer,
    pass_events,
    running_gateway,
    stream_reply,
    text_events,
)
from tests.contract_plugins import client, plugin_of, request_of, until

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "metadata": {"tags": ["a"]}}
DELTA: dict[str, Any] = {
    "type": "content_block_delta",
    "index": 0,
    "delta": {"type": "text_delta", "text": "Hello."},
}


def made(call: Callable[[Exchange], Any]) -> Plugin:
    """A plugin whose on_request does that and returns its result."""

    async def on_request(exchange: Exchange) -> Any:
        return call(exchange)

    cls = plugin_of(on_request=on_request)
    return cls(cls.Settings())


LOST_EDITS: dict[str, Callable[[Exchange], Any]] = {
    "a field added": lambda exchange: exchange.body.update(x=1),
    "a field removed": lambda exchange: exchange.body.pop("metadata") and None,
    "deep in it": lambda exchange: exchange.body["messages"][0].update(content="Ho"),
    "in a list": lambda exchange: exchange.body["metadata"]["tags"].append("b"),
    "the client's body": lambda exchange: exchange.client_body.update(x=1),
    "the client's body, beside a proper change": lambda exchange: (
        exchange.change().update(y=1) or exchange.client_body.update(x=1)
    ),
}


@pytest.mark.parametrize("edit", LOST_EDITS.values(), ids=LOST_EDITS)
async def test_a_body_edited_without_change_fails(edit: Callable[[Exchange], Any]) -> None:
    """ask fails where a plugin edits what it may only read."""
    with pytest.raises(AssertionError, match=r"the body was edited without exchange\.change\(\)"):
        await ask(made(edit), make_exchange(BODY))


KEPT_EDITS: dict[str, tuple[Callable[[Exchange], Any], dict[str, Any]]] = {
    "change": (lambda exchange: exchange.change().update(x=1), {"model": MODEL.id, **BODY, "x": 1}),
    "replace": (lambda exchange: exchange.replace({"x": 1}), {"x": 1}),
    "nothing": (lambda exchange: None, {"model": MODEL.id, **BODY}),
    "change, and nothing edited": (lambda exchange: exchange.change() and None, {"model": MODEL.id, **BODY}),
}


@pytest.mark.parametrize(("edit", "expected"), KEPT_EDITS.values(), ids=KEPT_EDITS)
async def test_a_body_edited_by_change_passes(edit: Callable[[Exchange], Any], expected: dict[str, Any]) -> None:
    """ask lets proper edits be; the client's body stays as it was sent."""
    exchange = make_exchange(BODY)

    await ask(made(edit), exchange)

    assert (expected, {"model": MODEL.id, **BODY}) == (exchange.body, exchange.client_body)


async def test_what_on_request_returns_comes_back() -> None:
    """ask gives the output, the answer or None that the plugin returned."""
    output, answer = OutputPlugin(), Answer.text("Hi.")

    assert output is await ask(made(lambda exchange: output), make_exchange(BODY))
    assert answer is await ask(made(lambda exchange: answer), make_exchange(BODY))
    assert None is await ask(made(lambda exchange: None), make_exchange(BODY))


async def test_what_on_request_raises_comes_through() -> None:
    """A refusal reaches the test as it was raised."""
    with pytest.raises(ZeroDivisionError):
        await ask(made(lambda exchange: 1 / 0), make_exchange(BODY))


class EditsAnswer(OutputPlugin):
    """Edits an answer in the way that it is told."""

    def __init__(self, edit: Callable[[Answer], Any]) -> None:
        self._edit = edit

    async def on_answer(self, answer: Answer) -> None:
        self._edit(answer)


@pytest.mark.parametrize(
    "edit",
    [lambda answer: answer.data.update(x=1), lambda answer: answer.data["content"][0].update(text="x")],
    ids=["at the top", "deep in it"],
)
async def test_an_answer_edited_without_change_fails(edit: Callable[[Answer], Any]) -> None:
    """pass_answer fails where an output edits what it may only read."""
    with pytest.raises(AssertionError, match=r"the answer was edited without answer\.change\(\)"):
        await pass_answer(EditsAnswer(edit), {"content": [{"type": "text", "text": "Hi"}]})


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda answer: answer.change().update(x=1), {"a": 1, "x": 1}),
        (lambda answer: answer.replace({"x": 1}), {"x": 1}),
        (lambda answer: answer.data["a"], {"a": 1}),
    ],
    ids=["change", "replace", "reading"],
)
async def test_an_answer_edited_by_change_passes(edit: Callable[[Answer], Any], expected: dict[str, Any]) -> None:
    """pass_answer gives what the answer became; the test's own dict stays as it is."""
    given = {"a": 1}

    assert (expected, {"a": 1}) == (await pass_answer(EditsAnswer(edit), given), given)


class EditsEvents(OutputPlugin):
    """Edits events in the way that it is told."""

    def __init__(self, edit: Callable[[Event], Any]) -> None:
        self._edit = edit

    def on_event(self, event: Event) -> Sequence[Event]:
        self._edit(event)
        return (event,)


@pytest.mark.parametrize(
    "edit",
    [lambda event: event.data.update(x=1), lambda event: event.data["delta"].update(text="x")],
    ids=["at the top", "deep in it"],
)
def test_an_event_edited_without_change_fails(edit: Callable[[Event], Any]) -> None:
    """pass_events fails where an output edits what it may only read, and names the kind."""
    with pytest.raises(AssertionError, match=r"the event content_block_delta was edited without event\.change\(\)"):
        pass_events(EditsEvents(edit), [Event(DELTA["type"], DELTA)])


class EditsLater(OutputPlugin):
    """Holds a delta back and edits it, without change(), when the next event comes."""

    def __init__(self) -> None:
        self._held: list[Event] = []

    def on_event(self, event: Event) -> Sequence[Event]:
        if event.kind == "content_block_delta":
            self._held.append(event)
            return ()
        for held in self._held:
            held.data["delta"]["text"] = "x"
        return (*self._held, event)


def test_an_event_held_back_and_edited_without_change_fails_too() -> None:
    """The edit is lost all the same, though it is made while another event passes."""
    with pytest.raises(AssertionError, match=r"the event content_block_delta was edited without event\.change\(\)"):
        pass_events(EditsLater(), [Event(DELTA["type"], DELTA), Event("message_stop", {"type": "message_stop"})])


def test_events_edited_by_change_pass() -> None:
    """pass_events gives what the events became, in their order; the test's own events stay as they are."""
    given = [Event("a", {"n": 1}), Event("b", {"n": 2})]

    passed = pass_events(EditsEvents(lambda event: event.change().update(x=1)), given)

    assert [("a", {"n": 1, "x": 1}), ("b", {"n": 2, "x": 1})] == [(event.kind, event.data) for event in passed]
    assert [{"n": 1}, {"n": 2}] == [event.data for event in given]


class Doubles(OutputPlugin):
    """Drops what it wants and puts two in its place."""

    events = frozenset({"b"})

    def on_event(self, event: Event) -> Sequence[Event]:
        return (Event("b1", {}), Event("b2", {}))


def test_kinds_that_an_output_does_not_want_pass_by_it() -> None:
    """As in the engine: the output is asked about the kinds that it names, the rest keeps its place."""
    passed = pass_events(Doubles(), [Event("a", {}), Event("b", {}), Event("c", {})])

    assert ["a", "b1", "b2", "c"] == [event.kind for event in passed]


def test_an_exchange_is_made_of_what_is_given() -> None:
    """make_exchange gives what a plugin would see of that request."""
    key = Key("id", "name")
    headers = {"X-Test": "1", "authorization": "Bearer ezat_sk_1", "x-ezat-session": "s"}

    exchange = make_exchange({**BODY, "stream": True}, route=Route.MESSAGES, headers=headers, key=key)

    assert (Route.MESSAGES, True, key, MODEL, MODEL.id, "s", "1") == (
        exchange.route,
        exchange.stream,
        exchange.key,
        exchange.model,
        exchange.asked_model,
        exchange.session,
        exchange.headers.get("x-test"),
    )
    assert ("ezat_sk_1", None) == (exchange.credential(), exchange.headers.get("authorization"))


def test_an_exchange_keeps_the_name_of_the_model_that_was_sent() -> None:
    """A name in the body is what the client asked for, whatever the model's id."""
    exchange = make_exchange({**BODY, "model": "Model"})

    assert ("Model", MODEL) == (exchange.asked_model, exchange.model)


# ---- the real sockets


async def test_a_gateway_runs_with_the_demo_upstream_unless_told_otherwise() -> None:
    """A stranger needs no upstream of his own to see his plugin at work."""

    async def on_request(exchange: Exchange) -> None:
        exchange.answer_headers["x-seen"] = "yes"

    async with (
        running_gateway([plugin_of(on_request=on_request)]) as url,
        client() as session,
        session.post(f"{url}/v1/messages", json=request_of(False)) as response,
    ):
        assert (200, "yes", "message") == (
            response.status,
            response.headers.get("x-seen"),
            (await response.json())["type"],
        )


async def test_the_upstream_plays_its_replies_in_order_and_keeps_what_it_received() -> None:
    """Scripted replies come one after the other, then whole messages for ever."""
    replies = (Reply([b"{}"], status=418, headers={"x-a": "b"}), stream_reply(text_events("Hi")))
    seen = []
    async with ScriptedUpstream(*replies) as upstream, client() as session:
        for number in range(4):
            async with session.post(f"{upstream.url}/p?n={number}", data=b"%d" % number, headers={"X-N": "n"}) as got:
                seen.append((got.status, got.content_type, await got.read()))

    events = b"".join(b"event: %b\ndata: %b\n\n" % (e["type"].encode(), orjson.dumps(e)) for e in text_events("Hi"))
    message = b"".join(piece for piece in message_reply().pieces if isinstance(piece, bytes))
    whole = (200, "application/json", message)
    assert [(418, "application/json", b"{}"), (200, "text/event-stream", events), whole, whole] == seen
    assert [(f"/p?n={number}", b"%d" % number, "n") for number in range(4)] == [
        (received.path, received.body, received.headers["x-n"]) for received in upstream.received
    ]
    assert (False, 0) == (upstream.left.is_set(), upstream.open)


async def test_the_upstream_knows_who_left_before_the_end() -> None:
    """``left`` is set and ``open`` falls when somebody goes away within an answer."""
    async with ScriptedUpstream(Reply([b"a", 60.0])) as upstream:
        async with client() as session, session.post(upstream.url) as response:
            await response.content.readany()
            assert (1, False) == (upstream.open, upstream.left.is_set())
            response.close()
        await until(lambda: upstream.open == 0)

        assert upstream.left.is_set()


async def test_the_upstream_cuts_a_connection() -> None:
    """``CUT`` ends an answer in its middle."""
    async with ScriptedUpstream(Reply([b"a", CUT])) as upstream, client() as session:
        with pytest.raises(aiohttp.ClientPayloadError):
            async with session.post(upstream.url) as response:
                await response.read()

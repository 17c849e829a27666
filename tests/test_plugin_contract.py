"""The contract of plugins, proven over real sockets: what the page ``proxy/plugin.py`` promises to their authors.

Four kinds of plugins carry it: one that answers by itself, one that adds a header and an event, one that redacts a
word split over deltas, and one that breaks in any of its hooks. One file, since it mirrors one page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import orjson
import pytest
from structlog.testing import capture_logs

from plugins.chat_completions import ChatCompletions
from proxy import pipeline
from proxy.answer import Answer
from proxy.config import load
from proxy.document import Event
from proxy.errors import CannotStart
from proxy.exchange import Exchange, Key
from proxy.loading import build
from proxy.models import ModelTable
from proxy.plugin import Outcome, OutputPlugin, Plugin, Services, Settings
from proxy.server import Gateway
from proxy.testing import Reply, ScriptedUpstream, message_reply, running_gateway, stream_reply, text_events
from tests.contract_plugins import (
    BOTH_ROUTES,
    BUG_TEXT,
    FOREVER,
    PATHS,
    PATIENCE,
    PLACES,
    PLAIN_AND_STREAMED,
    Hook,
    Record,
    ask_for,
    client,
    ending_of,
    gateway_and_upstream,
    in_one_read,
    in_order,
    noting,
    plugin_of,
    released,
    request_of,
    text_of,
    until,
    watcher,
)

both_routes = pytest.mark.parametrize("format", BOTH_ROUTES)
plain_and_streamed = pytest.mark.parametrize("stream", PLAIN_AND_STREAMED.values(), ids=PLAIN_AND_STREAMED)
every_place = pytest.mark.parametrize("place", PLACES)


def reply_of(stream: bool, *texts: str) -> Reply:
    """An upstream's message of these texts; streamed, each is a delta of its own."""
    if stream:
        return in_one_read(text_events(*texts))
    return message_reply(content=[{"type": "text", "text": "".join(texts)}])


# ---- a plugin that answers by itself

COMPLETION = {
    "id": "chatcmpl-own",
    "object": "chat.completion",
    "created": 1,
    "model": "model",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "By myself.", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
}
MESSAGE = {
    "id": "msg_own",
    "type": "message",
    "role": "assistant",
    "model": "model",
    "content": [{"type": "text", "text": "By myself."}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 1, "output_tokens": 2},
}


def chunk(kind: str, delta: Mapping[str, Any], finish_reason: str | None = None) -> Event:
    return Event(kind, {"choices": [{"index": 0, "delta": dict(delta), "finish_reason": finish_reason}]})


def own_chunks() -> list[Event]:
    return [
        chunk("role", {"role": "assistant", "content": ""}),
        chunk("text", {"content": "By "}),
        chunk("text", {"content": "myself."}),
        chunk("finish", {}, "stop"),
    ]


def own_events() -> list[Event]:
    return [Event(str(data["type"]), data) for data in text_events("By ", "myself.")]


OWN_ANSWERS: dict[str, Callable[[str], Answer]] = {
    "a text": lambda spoken: Answer.text("By myself."),
    "data": lambda spoken: Answer(dict(COMPLETION if spoken == "openai" else MESSAGE)),
    "events": lambda spoken: Answer(events=own_chunks() if spoken == "openai" else own_events()),
}


@both_routes
@plain_and_streamed
@every_place
@pytest.mark.parametrize("answer_in", OWN_ANSWERS.values(), ids=OWN_ANSWERS)
async def test_a_plugin_answers_by_itself(
    format: str, stream: bool, place: str, answer_in: Callable[[str], Answer]
) -> None:
    """It speaks the format of its place; the client gets that plain or streamed, in its own format, as it asked."""
    spoken = "openai" if (format, place) == ("openai", PLACES[0]) else "messages"

    async def on_request(exchange: Exchange) -> Answer:
        return answer_in(spoken)

    async with gateway_and_upstream(in_order(plugin_of(on_request=on_request), place)) as (url, upstream):
        seen = await ask_for(url, format, stream)

    assert (stream, "By myself.", "whole", 0) == (
        seen.streamed,
        text_of(seen, format),
        ending_of(seen, format),
        len(upstream.received),
    )


@both_routes
@plain_and_streamed
async def test_an_own_answer_passes_the_outputs_opened_so_far_alone(format: str, stream: bool) -> None:
    """Plugins before the one that answers see the answer, those behind it aren't asked, and nobody sends."""
    record = Record()

    async def on_request(exchange: Exchange) -> Answer:
        return Answer.text("By myself.")

    plugins = [noting(record, "a"), plugin_of(on_request=on_request), noting(record, "b"), ChatCompletions]
    async with gateway_and_upstream(plugins) as (url, _):
        await ask_for(url, format, stream)

    passed = "a.on_event" if stream else "a.on_answer"
    way_in = ["a.on_headers", "b.on_headers", "a.on_request"]
    assert [*way_in, passed, "a.on_complete", "a.on_close"] == without_given_back(record)


BILLED: dict[str, tuple[Callable[[], Answer], bool]] = {
    "a text": (lambda: Answer.text("x"), False),
    "a text that cost something": (lambda: Answer.text("x", billed=True), True),
    "data": (lambda: Answer(dict(MESSAGE)), True),
    "data that cost nothing": (lambda: Answer(dict(MESSAGE), billed=False), False),
    "events that cost nothing": (lambda: Answer(events=own_events(), billed=False), False),
}


@plain_and_streamed
@pytest.mark.parametrize(("answer", "expected"), BILLED.values(), ids=BILLED)
async def test_an_own_answer_says_whether_it_is_billed(
    stream: bool, answer: Callable[[], Answer], expected: bool
) -> None:
    """Who records the answer finds on the exchange whether it cost something; a bare text is free."""
    billed: list[bool] = []

    async def on_complete(exchange: Exchange) -> None:
        billed.append(exchange.billed)

    async def on_request(exchange: Exchange) -> Answer:
        return answer()

    plugins = [plugin_of("usage", on_complete=on_complete), plugin_of(on_request=on_request)]
    async with gateway_and_upstream(plugins) as (url, _):
        await ask_for(url, "messages", stream)

    assert [expected] == billed


# ---- a plugin that sets a header and adds an event before the end


class Footer(Plugin):
    """Adds a header, and words before the end of an answer, in either format."""

    name: ClassVar[str] = "footer"
    sees: ClassVar = "either"

    async def on_request(self, exchange: Exchange) -> OutputPlugin:
        exchange.answer_headers["x-footer"] = "yes"
        return FooterOutput()


class FooterOutput(OutputPlugin):
    events = frozenset({"finish", "message_delta"})

    async def on_answer(self, answer: Answer) -> None:
        if "choices" in answer.data:
            answer.change()["choices"][0]["message"]["content"] += " Bye."
        else:
            answer.change()["content"].append({"type": "text", "text": " Bye."})

    def on_event(self, event: Event) -> Sequence[Event]:
        if event.kind == "finish":
            return [chunk("text", {"content": " Bye."}), event]
        block = {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}}
        delta = {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": " Bye."}}
        stop = {"type": "content_block_stop", "index": 1}
        return [*(Event(str(data["type"]), data) for data in (block, delta, stop)), event]


@both_routes
@plain_and_streamed
@every_place
async def test_a_plugin_adds_a_header_and_an_event(format: str, stream: bool, place: str) -> None:
    """What a plugin adds before the end arrives before the end, and its header with it."""
    async with gateway_and_upstream(in_order(Footer, place), reply_of(stream, "Hel", "lo.")) as (url, _):
        seen = await ask_for(url, format, stream)

    expected = ("yes", "Hello. Bye.", "whole")
    assert expected == (seen.headers.get("x-footer"), text_of(seen, format), ending_of(seen, format))


async def test_a_chunk_of_a_plugin_is_like_any_other() -> None:
    """The rim fills in what every chunk has: id, object, created and model."""
    async with gateway_and_upstream([Footer, ChatCompletions], reply_of(True, "Hello.")) as (url, _):
        seen = await ask_for(url, "openai", True)

    envelopes = {tuple((name, event[name]) for name in ("id", "object", "created", "model")) for event in chunks(seen)}
    assert 1 == len(envelopes)


def chunks(seen: Any) -> list[dict[str, Any]]:
    return [event for event in seen.events if event != "[DONE]"]


MODEL_LISTS = {"openai": "/openai/v1/models", "messages": "/v1/models"}


@both_routes
async def test_a_header_of_on_headers_goes_out_on_the_model_lists(format: str) -> None:
    """The route of the model lists runs on_headers alone; a header set there is on its answer, too."""

    async def on_headers(exchange: Exchange) -> None:
        exchange.answer_headers["x-seen"] = exchange.route.value

    async with (
        running_gateway([plugin_of(on_headers=on_headers)]) as url,
        client() as session,
        session.get(url + MODEL_LISTS[format]) as response,
    ):
        assert (200, "models") == (response.status, response.headers.get("x-seen"))


# ---- a plugin that redacts a word, wherever deltas split it


class RedactionSettings(Settings):
    word: str
    """The word that nobody may see."""


class Redaction(Plugin):
    """Replaces a word by dots, in either format."""

    name: ClassVar[str] = "redaction"
    sees: ClassVar = "either"
    Settings = RedactionSettings
    settings: RedactionSettings

    async def on_request(self, exchange: Exchange) -> OutputPlugin:
        return RedactionOutput(self.settings.word)


class RedactionOutput(OutputPlugin):
    """Holds back what may be the beginning of the word, and lets it go before anything that isn't text."""

    def __init__(self, word: str) -> None:
        self._word = word
        self._held = ""
        self._like: Event | None = None

    async def on_answer(self, answer: Answer) -> None:
        data = answer.change()
        texts = data["content"] if "content" in data else [choice["message"] for choice in data["choices"]]
        for text in texts:
            name = "text" if "text" in text else "content"
            text[name] = text[name].replace(self._word, "…")

    def on_event(self, event: Event) -> Sequence[Event]:
        text = _text_of_delta(event)
        if text is None:
            flushed = [_with_text(self._like, self._held)] if self._held and self._like is not None else []
            self._held = ""
            return [*flushed, event]
        whole = (self._held + text).replace(self._word, "…")
        longest = next((n for n in range(len(self._word) - 1, 0, -1) if whole.endswith(self._word[:n])), 0)
        self._held = whole[len(whole) - longest :]
        self._like = Event(event.kind, raw=event.encoded())
        said = whole[: len(whole) - longest]
        return [_with_text(event, said)] if said else []


def _text_of_delta(event: Event) -> str | None:
    if event.kind == "text":
        return str(event.data["choices"][0]["delta"]["content"])
    if event.kind == "content_block_delta" and event.data["delta"]["type"] == "text_delta":
        return str(event.data["delta"]["text"])
    return None


def _with_text(event: Event, text: str) -> Event:
    if event.kind == "text":
        event.change()["choices"][0]["delta"]["content"] = text
    else:
        event.change()["delta"]["text"] = text
    return event


REDACTED = {
    "in one delta": (["a secret b"], "a … b"),
    "split in two": (["a sec", "ret b"], "a … b"),
    "split in every letter": (list("a secret b"), "a … b"),
    "twice": (["secr", "etsec", "ret"], "……"),
    "begun and not gone on": (["a sec", "ond se"], "a second se"),
    "begun at the very end": (["a secre"], "a secre"),
    "begun twice": (["sese", "cret"], "se…"),
    "nothing": (["a", "b"], "ab"),
}


@both_routes
@plain_and_streamed
@every_place
@pytest.mark.parametrize(("texts", "expected"), REDACTED.values(), ids=REDACTED)
async def test_a_plugin_redacts_what_deltas_split(
    format: str, stream: bool, place: str, texts: Sequence[str], expected: str
) -> None:
    """A plugin may hold text back over any number of events, and let it go before the end."""
    order: list[Any] = [
        (Redaction, {"word": "secret"}) if each is Redaction else each for each in in_order(Redaction, place)
    ]
    async with (
        ScriptedUpstream(reply_of(stream, *texts)) as upstream,
        running_gateway(order, upstream=upstream.url) as url,
    ):
        seen = await ask_for(url, format, stream)

    assert (expected, "whole") == (text_of(seen, format), ending_of(seen, format))


# ---- a plugin that breaks


async def bug(*_: object) -> None:
    raise RuntimeError(BUG_TEXT)


async def cancelled(*_: object) -> None:
    """As where it awaits a task of its own that was cancelled; the client is still there."""
    raise asyncio.CancelledError(BUG_TEXT)


async def hang(*_: object) -> None:
    await asyncio.sleep(FOREVER)


async def wrong(*_: object) -> str:
    return BUG_TEXT


def bug_where(is_there: Callable[[int, Event], bool], error: type[BaseException] = RuntimeError) -> Hook:
    """Breaks at the event of which that is true; events are counted from 1."""
    seen: list[Event] = []

    def on_event(exchange: Exchange, event: Event) -> Sequence[Event]:
        seen.append(event)
        if is_there(len(seen), event):
            raise error(BUG_TEXT)
        return (event,)

    return on_event


def bug_at(number: int, error: type[BaseException] = RuntimeError) -> Hook:
    return bug_where(lambda count, event: count == number, error)


def bug_at_last() -> Hook:
    return bug_where(lambda count, event: event.kind in ("finish", "message_stop"))


def no_list(exchange: Exchange, event: Event) -> Any:
    return None


def bare_event(exchange: Exchange, event: Event) -> Any:
    return event


def where_marked(hook: str, call: Hook) -> Hook:
    """The hook for requests with the header ``x-break`` alone."""
    if hook == "on_event":
        return lambda exchange, event: call(exchange, event) if "x-break" in exchange.headers else (event,)

    async def marked(exchange: Exchange, *arguments: Any) -> Any:
        return await call(exchange, *arguments) if "x-break" in exchange.headers else None

    return marked


# The hook, how it breaks, and how a stream ends then: before it began, or in it. None: not in streams; all but on_event
# break plain answers, too.
BEFORE, WITHIN = "before", "within"
BROKEN: dict[str, tuple[str, Callable[[], Hook], str | None]] = {
    "on_headers raises": ("on_headers", lambda: bug, BEFORE),
    "on_headers hangs": ("on_headers", lambda: hang, BEFORE),
    "on_request raises": ("on_request", lambda: bug, BEFORE),
    "on_request hangs": ("on_request", lambda: hang, BEFORE),
    "on_request returns a text": ("on_request", lambda: wrong, BEFORE),
    "on_send raises": ("on_send", lambda: bug, BEFORE),
    "on_answer raises": ("on_answer", lambda: bug, None),
    "on_answer hangs": ("on_answer", lambda: hang, None),
    "on_event raises at the first": ("on_event", lambda: bug_at(1), BEFORE),
    "on_event raises at the fifth": ("on_event", lambda: bug_at(5), WITHIN),
    "on_event raises at the last": ("on_event", bug_at_last, WITHIN),
    "on_event returns None": ("on_event", lambda: no_list, BEFORE),
    "on_event returns an event in no list": ("on_event", lambda: bare_event, BEFORE),
    "on_complete raises": ("on_complete", lambda: bug, WITHIN),
    "on_complete hangs": ("on_complete", lambda: hang, WITHIN),
}
BROKEN_CASES = [
    pytest.param(hook, call, format, stream, place, how, id=f"{name}-{format}-{mode}-{place}")
    for (name, (hook, call, how)), format, (mode, stream), place in product(
        BROKEN.items(), BOTH_ROUTES, PLAIN_AND_STREAMED.items(), PLACES
    )
    if (how is not None if stream else hook != "on_event")
]
FAILED_WORDS = {
    "openai": {BEFORE: "500 server_error", WITHIN: "broken: server_error"},
    "messages": {BEFORE: "500 api_error", WITHIN: "broken: api_error"},
}


@pytest.mark.parametrize(("hook", "call", "format", "stream", "place", "how"), BROKEN_CASES)
async def test_a_plugin_that_breaks_ends_its_own_request_alone(
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
    call: Callable[[], Hook],
    format: str,
    stream: bool,
    place: str,
    how: str | None,
) -> None:
    """Its request is a 500 that the log explains, without a word of it to the client; requests beside it are whole."""
    monkeypatch.setattr(pipeline, "COMPLETE_TIMEOUT", 0.1)
    record = Record()
    broken = plugin_of("broken", **{hook: where_marked(hook, call())})
    plugins = [watcher(record), *in_order(broken, place)]
    replies = [slow_reply(stream), slow_reply(stream), slow_reply(stream)]

    with capture_logs() as logs:
        async with gateway_and_upstream(plugins, *replies, plugin_timeout=0.1) as (url, upstream):
            beside, seen, beside_too = await asyncio.gather(
                ask_for(url, format, stream),
                ask_for(url, format, stream, headers={"x-break": "yes"}),
                ask_for(url, format, stream),
            )
            let_go = await released(upstream)

    assert FAILED_WORDS[format][how if stream and how else BEFORE] == ending_of(seen, format)
    assert ["whole", "abcd"] * 2 == [
        said for other in (beside, beside_too) for said in (ending_of(other, format), text_of(other, format))
    ]
    assert [("broken", hook)] == blamed(logs)
    assert BUG_TEXT not in f"{seen.headers} {seen.body!r}"
    told = [] if hook == "on_headers" else [Outcome.FAILED]
    assert ([*told, Outcome.COMPLETED, Outcome.COMPLETED], 3, True) == (
        sorted(record.outcomes, key=lambda outcome: outcome is Outcome.COMPLETED),
        record.given_back,
        let_go,
    )


def slow_reply(stream: bool) -> Reply:
    """``abcd``, with a short rest in the middle, so that requests run side by side."""
    if not stream:
        return Reply([0.02, *reply_of(False, "abcd").pieces])
    events = text_events("a", "b", "c", "d")
    return stream_reply([*events[:6], 0.02, *events[6:]])


def blamed(logs: Iterable[Mapping[str, Any]]) -> list[tuple[str | None, str]]:
    """Plugin and hook, as often as the log names them."""
    return [(entry.get("plugin"), entry["hook"]) for entry in logs if "hook" in entry]


CANCELLED = {
    "on_headers": (cancelled, BEFORE),
    "on_request": (cancelled, BEFORE),
    "on_send": (cancelled, BEFORE),
    "on_answer": (cancelled, None),
    "on_event": (bug_at(5, asyncio.CancelledError), WITHIN),
    "on_complete": (cancelled, WITHIN),
}
CANCELLED_CASES = [
    pytest.param(hook, call, stream, how, id=f"{hook}-{mode}")
    for (hook, (call, how)), (mode, stream) in product(CANCELLED.items(), PLAIN_AND_STREAMED.items())
    if (how is not None if stream else hook != "on_event")
]


@pytest.mark.parametrize(("hook", "call", "stream", "how"), CANCELLED_CASES)
async def test_a_cancelled_task_of_a_plugin_is_a_bug_like_any_other(
    hook: str, call: Hook, stream: bool, how: str | None
) -> None:
    """A CancelledError means that the client left only where it did: this client is there, and gets its 500."""
    record = Record()
    plugins = [watcher(record), plugin_of("broken", **{hook: call})]

    with capture_logs() as logs:
        async with gateway_and_upstream(plugins, slow_reply(stream)) as (url, _):
            seen = await ask_for(url, "messages", stream)

    told = [] if hook == "on_headers" else [Outcome.FAILED]
    assert (FAILED_WORDS["messages"][how if stream and how else BEFORE], [("broken", hook)], told, 1) == (
        ending_of(seen, "messages"),
        blamed(logs),
        record.outcomes,
        record.given_back,
    )


@both_routes
async def test_a_bug_of_on_headers_is_named_on_the_model_lists_too(format: str) -> None:
    """The model lists have no body, but the same promise: a 500, explained in the log."""
    with capture_logs() as logs:
        async with (
            running_gateway([plugin_of("broken", on_headers=bug)]) as url,
            client() as session,
            session.get(url + MODEL_LISTS[format]) as response,
        ):
            body = await response.text()

    assert (500, False, [("broken", "on_headers")]) == (response.status, BUG_TEXT in body, blamed(logs))


async def test_a_plugin_whose_start_breaks_stops_the_start() -> None:
    """The gateway doesn't come up, the log says by whose fault, and what was started is stopped in reverse order."""
    stopped: list[str] = []

    def stopping(name: str, **hooks: Hook) -> type[Plugin]:
        async def stop() -> None:
            stopped.append(name)

        return plugin_of(name, stop=stop, **hooks)

    why = rf"plugins\[1\]\.broken: can't start: RuntimeError: {BUG_TEXT}"
    with capture_logs() as logs, pytest.raises(CannotStart, match=why):
        async with running_gateway([stopping("first"), stopping("broken", start=bug), stopping("never")]):
            pytest.fail("it came up")

    assert (["broken", "first"], [("broken", "start")]) == (stopped, blamed(logs))


async def test_a_plugin_whose_stop_breaks_keeps_no_other_from_stopping() -> None:
    """Each plugin is stopped, whatever another one does, and the log says which one broke."""
    stopped: list[str] = []

    async def stop() -> None:
        stopped.append("first")

    with capture_logs() as logs:
        async with running_gateway([plugin_of("first", stop=stop), plugin_of("broken", stop=bug)]):
            pass

    assert (["first"], [("broken", "stop")]) == (stopped, blamed(logs))


async def test_on_send_takes_as_long_as_it_needs() -> None:
    """The time of the waiting hooks is not that of on_send, which may download."""

    async def on_send(exchange: Exchange) -> None:
        await asyncio.sleep(0.15)

    async with gateway_and_upstream([plugin_of(on_send=on_send)], plugin_timeout=0.05) as (url, _):
        seen = await ask_for(url, "messages")

    assert "whole" == ending_of(seen, "messages")


def edit_body(exchange: Exchange) -> None:
    exchange.body["messages"] = []


def edit_event(exchange: Exchange, event: Event) -> Sequence[Event]:
    event.data.clear()
    return (event,)


async def edit_body_later(exchange: Exchange) -> None:
    edit_body(exchange)


async def edit_answer(exchange: Exchange, answer: Answer) -> None:
    answer.data["content"] = []


EDITS: dict[str, tuple[Hook, bool]] = {
    "on_request": (edit_body_later, False),
    "on_send": (edit_body_later, False),
    "on_answer": (edit_answer, False),
    "on_event": (edit_event, True),
    "on_complete": (edit_body_later, False),
    "on_close": (lambda exchange, outcome: edit_body(exchange), False),
}


@pytest.mark.parametrize(("hook", "edit"), EDITS.items(), ids=EDITS)
async def test_an_edit_without_change_is_lost(hook: str, edit: tuple[Hook, bool]) -> None:
    """What nobody marked as changed goes on as the bytes that came."""
    call, stream = edit
    body = orjson.dumps(request_of(stream))

    async with gateway_and_upstream([plugin_of(**{hook: call})], reply_of(stream, "Hello.")) as (url, upstream):
        seen = await ask_for(url, "messages", body=body)

    assert (at_upstream(body), "Hello.", "whole") == (
        upstream.received[0].body,
        text_of(seen, "messages"),
        ending_of(seen, "messages"),
    )


def at_upstream(body: bytes) -> bytes:
    return body.replace(b'"model":"model"', b'"model":"model-at-upstream"')


# ---- order, closing, giving back


def without_given_back(record: Record) -> list[str]:
    return [call for call in record.calls if not call.endswith(" given back")]


ORDER = [(hook, "abc") for hook in ("on_headers", "on_request", "on_send")]
ORDER_BACK = [(hook, "cba") for hook in ("on_complete", "on_close")]


@both_routes
@plain_and_streamed
async def test_outputs_run_in_the_reverse_order_of_inputs(format: str, stream: bool) -> None:
    """On the way in the first plugin of the list comes first, on the way back last."""
    record = Record()
    plugins = [noting(record, "a"), ChatCompletions, noting(record, "b"), noting(record, "c")]

    async with gateway_and_upstream(plugins, reply_of(stream, "Hello.")) as (url, _):
        await ask_for(url, format, stream)

    order = [*ORDER, ("on_event" if stream else "on_answer", "cba"), *ORDER_BACK]
    assert [f"{name}.{hook}" for hook, names in order for name in names] == without_given_back(record)


@plain_and_streamed
async def test_only_those_whose_input_returned_take_part(stream: bool) -> None:
    """The plugin that refuses and those behind it have nothing to close; one that wants no output has none."""
    record = Record()

    async def no_output(exchange: Exchange) -> None:
        record.calls.append("quiet.on_request")

    plugins = [
        noting(record, "a"),
        plugin_of("quiet", on_request=no_output),
        noting(record, "b"),
        plugin_of("broken", on_request=bug),
        noting(record, "c"),
    ]
    async with gateway_and_upstream(plugins) as (url, _):
        await ask_for(url, "messages", stream)

    inputs = ["a.on_headers", "b.on_headers", "c.on_headers", "a.on_request", "quiet.on_request", "b.on_request"]
    assert [*inputs, "b.on_close", "a.on_close"] == without_given_back(record)


@both_routes
@plain_and_streamed
async def test_each_output_is_closed_once_though_another_breaks_at_that(format: str, stream: bool) -> None:
    """An on_close that raises is named in the log and changes nothing else."""
    record = Record()

    def broken(exchange: Exchange, outcome: Outcome) -> None:
        record.calls.append("broken.on_close")
        raise RuntimeError(BUG_TEXT)

    plugins = [watcher(record, "a"), plugin_of("broken", on_close=broken), ChatCompletions, watcher(record, "c")]
    with capture_logs() as logs:
        async with gateway_and_upstream(plugins, reply_of(stream, "Hello.")) as (url, _):
            seen = await ask_for(url, format, stream)

    assert ("whole", [("broken", "on_close")]) == (ending_of(seen, format), blamed(logs))
    assert ([Outcome.COMPLETED] * 2, ["broken.on_close"], 2) == (record.outcomes, record.calls, record.given_back)


# What stands behind two noting plugins, and what the upstream does.
PATHS_TO_AN_END: dict[str, tuple[dict[str, Hook], Callable[[bool], Reply]]] = {
    "completed": ({}, lambda stream: reply_of(stream, "Hello.")),
    "broken in on_headers": ({"on_headers": bug}, lambda stream: reply_of(stream)),
    "broken in on_request": ({"on_request": bug}, lambda stream: reply_of(stream)),
    "broken in on_send": ({"on_send": bug}, lambda stream: reply_of(stream)),
    "broken on the way back": ({"on_answer": bug, "on_event": bug_at_last()}, lambda stream: reply_of(stream, "x")),
    "broken in on_complete": ({"on_complete": bug}, lambda stream: reply_of(stream, "x")),
    "refused by the upstream": ({}, lambda stream: Reply([b"{}"], status=500)),
}


@both_routes
@plain_and_streamed
@pytest.mark.parametrize(("hooks", "reply"), PATHS_TO_AN_END.values(), ids=PATHS_TO_AN_END)
async def test_what_was_deferred_is_done_once_and_last(
    format: str, stream: bool, hooks: dict[str, Hook], reply: Callable[[bool], Reply]
) -> None:
    """From any hook and on every path: once each, the last first, after every on_close."""
    record = Record()
    plugins = [noting(record, "a"), ChatCompletions, noting(record, "b"), plugin_of("last", **hooks)]

    async with gateway_and_upstream(plugins, reply(stream)) as (url, _):
        await ask_for(url, format, stream)

    hooks_called = without_given_back(record)
    assert [*hooks_called, *(f"{call} given back" for call in reversed(hooks_called))] == record.calls


async def test_what_was_deferred_is_done_though_another_breaks_at_that() -> None:
    """Of several deferred calls one that raises keeps no other from being done, and the log tells of it."""
    given_back: list[str] = []

    def broken() -> None:
        raise RuntimeError(BUG_TEXT)

    async def on_request(exchange: Exchange) -> None:
        exchange.defer(lambda: given_back.append("first"))
        exchange.defer(broken)
        exchange.defer(lambda: given_back.append("last"))

    with capture_logs() as logs:
        async with gateway_and_upstream([plugin_of(on_request=on_request)]) as (url, _):
            seen = await ask_for(url, "messages")

    assert ("whole", ["last", "first"], ["defer"]) == (
        ending_of(seen, "messages"),
        given_back,
        [hook for _, hook in blamed(logs)],
    )


REQUEST_HOOKS = {Plugin: ("on_headers", "on_request", "on_send"), OutputPlugin: ("on_answer", "on_event")}
ENDING_HOOKS = {OutputPlugin: ("on_complete", "on_close")}


@both_routes
@plain_and_streamed
async def test_a_method_that_a_class_does_not_define_is_never_called(
    monkeypatch: pytest.MonkeyPatch, format: str, stream: bool
) -> None:
    """A plugin costs only what it does: the empty methods that it inherits are not run."""
    called: list[str] = []

    def inherited(hook: str) -> Hook:
        async def wait(*_: object) -> None:
            called.append(hook)

        def at_once(_: object, passed: Any) -> Sequence[Any]:
            called.append(hook)
            return (passed,)

        return at_once if hook in ("on_event", "on_close") else wait

    for hooks in (REQUEST_HOOKS, ENDING_HOOKS):
        for base, names in hooks.items():
            for name in names:
                monkeypatch.setattr(base, name, inherited(name))

    async def on_request(exchange: Exchange) -> OutputPlugin:
        return OutputPlugin()

    async def on_complete(exchange: Exchange) -> None:
        """So that there is something to complete."""

    plugins = [
        plugin_of("empty"),
        plugin_of("output", on_request=on_request),
        plugin_of("completing", on_complete=on_complete),
        ChatCompletions,
    ]
    async with gateway_and_upstream(plugins, reply_of(stream, "Hello.")) as (url, _):
        seen = await ask_for(url, format, stream)

    assert ("whole", []) == (ending_of(seen, format), called)


# ---- events


@both_routes
@every_place
async def test_after_a_failure_no_event_passes_any_more(format: str, place: str) -> None:
    """Neither the plugin that broke nor one nearer to the client sees an event behind the one that broke."""
    record = Record()

    def at_c(exchange: Exchange, event: Event) -> Sequence[Event]:
        record.calls.append("broken")
        if b'"c"' in event.encoded():
            raise RuntimeError(BUG_TEXT)
        return (event,)

    def after(exchange: Exchange, event: Event) -> Sequence[Event]:
        record.calls.append("c" if b'"c"' in event.encoded() else "nearer")
        return (event,)

    reply = in_one_read(text_events("a", "b", "c", "d"), *stream_reply(text_events("e")).pieces)
    plugins = [plugin_of("nearer", on_event=after), *in_order(plugin_of("broken", on_event=at_c), place)]
    async with gateway_and_upstream(plugins, reply) as (url, _):
        seen = await ask_for(url, format, True)

    assert (FAILED_WORDS[format][WITHIN], "broken", False) == (
        ending_of(seen, format),
        record.calls[-1],
        "c" in record.calls,
    )


@both_routes
@every_place
async def test_what_stood_before_a_failing_event_goes_out_first(format: str, place: str) -> None:
    """An event that breaks a plugin ends its read, but takes nothing away that came with it."""
    broken = plugin_of("broken", on_event=bug_where(lambda count, event: b'"c"' in event.encoded()))

    reply = in_one_read(text_events("a", "b", "c", "d"), FOREVER)
    async with gateway_and_upstream(in_order(broken, place), reply) as (url, upstream):
        seen = await ask_for(url, format, True)
        let_go = await released(upstream)

    assert ("ab", FAILED_WORDS[format][WITHIN], True) == (text_of(seen, format), ending_of(seen, format), let_go)


AFTER_THE_END = {
    "more of it": text_events("more"),
    "an error": [{"type": "error", "error": {"type": "api_error", "message": "late"}}],
    "a ping": [{"type": "ping"}],
}


@both_routes
@pytest.mark.parametrize("later", AFTER_THE_END.values(), ids=AFTER_THE_END)
@pytest.mark.parametrize("rest", [0, 0.02], ids=["in the same read", "in a later read"])
async def test_nothing_follows_the_ending(format: str, later: list[dict[str, Any]], rest: float) -> None:
    """Whatever an upstream sends behind the end of its answer, the client sees one ending and nothing behind it."""
    ends = text_events("Hello.")
    both = in_one_read([*ends, *later]) if not rest else in_one_read(ends, rest, *stream_reply(later).pieces)
    kinds: list[str] = []

    def on_event(exchange: Exchange, event: Event) -> Sequence[Event]:
        kinds.append(event.kind)
        return (event,)

    async with gateway_and_upstream([ChatCompletions, plugin_of(on_event=on_event)], both) as (url, upstream):
        seen = await ask_for(url, format, True)
        await released(upstream)

    assert ("whole", "Hello.", [event["type"] for event in ends]) == (
        ending_of(seen, format),
        text_of(seen, format),
        kinds,
    )


RELEASING: dict[str, dict[str, Hook]] = {
    "on_event at the first": {"on_event": bug_where(lambda count, event: event.kind == "message_start")},
    "on_event later": {"on_event": bug_where(lambda count, event: event.kind == "content_block_delta")},
    "on_complete": {"on_complete": bug},
    "nothing breaks": {},
}


@both_routes
@pytest.mark.parametrize("hooks", RELEASING.values(), ids=RELEASING)
async def test_the_upstream_is_released(monkeypatch: pytest.MonkeyPatch, format: str, hooks: dict[str, Hook]) -> None:
    """An upstream that would go on for ever is left when the answer has ended, whatever way."""
    monkeypatch.setattr("proxy.upstream.stream.DRAIN_TIMEOUT", 0.05)
    reply = in_one_read(text_events("Hello."), FOREVER)
    async with gateway_and_upstream([ChatCompletions, plugin_of("broken", **hooks)], reply) as (url, upstream):
        await ask_for(url, format, True)
        let_go = await released(upstream)

    assert (True, True) == (let_go, upstream.left.is_set())


FEWEST_PINGS = {"openai": 1, "messages": 3}
"""Our own, and on the route of their format those of the upstream, but for the one before its first event."""


@both_routes
async def test_pings_pass_no_plugin(format: str) -> None:
    """Neither the pings of an upstream nor our own are events to a plugin."""
    kinds: list[str] = []

    def on_event(exchange: Exchange, event: Event) -> Sequence[Event]:
        kinds.append(event.kind)
        return (event,)

    ping = {"type": "ping"}
    events = text_events("Hello.")
    reply = stream_reply([ping, *events[:3], ping, 0.1, *events[3:-1], ping, events[-1]])
    plugins = [plugin_of("nearer", on_event=on_event), ChatCompletions, plugin_of("test", on_event=on_event)]
    async with gateway_and_upstream(plugins, reply, ping_interval=0.03) as (url, _):
        seen = await ask_for(url, format, True)

    pings = seen.body.count(b": ping\n" if format == "openai" else b"event: ping\n")
    assert ("whole", 0) == (ending_of(seen, format), kinds.count("ping"))
    assert pings >= FEWEST_PINGS[format]


async def test_an_event_that_the_engine_adds_passes_the_plugins() -> None:
    """A lost message_stop is made up for before the plugins, so that they see a whole answer."""
    kinds: list[str] = []

    def on_event(exchange: Exchange, event: Event) -> Sequence[Event]:
        kinds.append(event.kind)
        return (event,)

    events = text_events("Hello.")[:-1]
    async with gateway_and_upstream([plugin_of(on_event=on_event)], stream_reply(events)) as (url, _):
        await ask_for(url, "messages", True)

    assert [*(event["type"] for event in events), "message_stop"] == kinds


WANTED = {"openai": {"text", "finish"}, "messages": {"content_block_delta", "message_stop"}}


@both_routes
async def test_an_output_gets_the_kinds_that_it_wants_alone(format: str) -> None:
    """The other kinds pass by it, and stay in their order."""
    kinds: list[str] = []

    def on_event(exchange: Exchange, event: Event) -> Sequence[Event]:
        kinds.append(event.kind)
        return (event,)

    wanting = plugin_of("wanting", frozenset(WANTED[format]), on_event=on_event)
    async with gateway_and_upstream([wanting, ChatCompletions], reply_of(True, "a", "b")) as (url, _):
        seen = await ask_for(url, format, True)

    assert ("whole", "ab", WANTED[format], 3) == (
        ending_of(seen, format),
        text_of(seen, format),
        set(kinds),
        len(kinds),
    )


@both_routes
async def test_headers_of_the_first_read_go_out_and_later_ones_have_no_effect(format: str) -> None:
    """The answer begins when the events of the first read have passed the plugins."""

    def on_event(exchange: Exchange, event: Event) -> Sequence[Event]:
        if b'"early"' in event.encoded():
            exchange.answer_headers["x-early"] = "yes"
        if b'"late"' in event.encoded():
            exchange.answer_headers["x-late"] = "yes"
        return (event,)

    events = text_events("early", "late")
    reply = in_one_read(events[:3], 0.03, *stream_reply(events[3:]).pieces)
    async with gateway_and_upstream([ChatCompletions, plugin_of(on_event=on_event)], reply) as (url, _):
        seen = await ask_for(url, format, True)

    assert ("whole", "yes", None) == (ending_of(seen, format), seen.headers.get("x-early"), seen.headers.get("x-late"))


# ---- formats, reading and changing

BODY_FORMATS = {
    ("openai", PLACES[0]): "openai",
    ("openai", PLACES[1]): "messages",
    ("messages", PLACES[0]): "messages",
    ("messages", PLACES[1]): "messages",
}
KINDS = {
    "openai": {"role", "text", "finish"},
    "messages": {
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    },
}


@both_routes
@plain_and_streamed
@every_place
async def test_a_plugin_sees_the_same_format_both_ways(format: str, stream: bool, place: str) -> None:
    """A plugin sees on the way back the format that it saw on the way in."""
    bodies: list[str] = []
    answers: list[str] = []
    kinds: set[str] = set()

    async def on_request(exchange: Exchange) -> None:
        bodies.append("openai" if exchange.body["messages"][0]["role"] == "system" else "messages")

    async def on_answer(exchange: Exchange, answer: Answer) -> None:
        answers.append("openai" if "choices" in answer.data else "messages")

    def on_event(exchange: Exchange, event: Event) -> Sequence[Event]:
        kinds.add(event.kind)
        return (event,)

    said: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "system": "Be brief."}
    if format == "openai":
        said = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
    seeing = plugin_of(on_request=on_request, on_answer=on_answer, on_event=on_event)
    async with gateway_and_upstream(in_order(seeing, place), reply_of(stream, "Hello.")) as (url, _):
        await ask_for(url, format, body=request_of(stream, **said))

    spoken = BODY_FORMATS[format, place]
    assert ([spoken], [] if stream else [spoken], KINDS[spoken] if stream else set()) == (bodies, answers, kinds)


def reading_everything() -> type[Plugin]:
    """Looks at all that there is to see, and changes nothing."""

    async def look(exchange: Exchange, *_: object) -> None:
        seen = (exchange.body, exchange.client_body, exchange.headers, exchange.session, exchange.usage, exchange.key)
        assert seen

    async def on_answer(exchange: Exchange, answer: Answer) -> None:
        assert answer.data

    def on_event(exchange: Exchange, event: Event) -> Sequence[Event]:
        assert event.data
        return (event,)

    return plugin_of(on_request=look, on_send=look, on_answer=on_answer, on_event=on_event, on_complete=look)


ODD_BODY = (
    b'{ "messages" :[{"content":"caf\\u00e9 \\ud83d \\/","role":"user"}],\n "model" : "model","max_tokens":1.0e2,'
    b'"top_p":0.10,"x_large":123456789012345678901234567890123,"stream":%b,"x_more":{"a":[],"a":1E400}}'
)
ODD_EVENTS = (
    b'event: message_start\ndata: {"type": "message_start", "message":{"model":"model-at-upstream", "x":1.50}}\n\n'
    b'event: content_block_delta\ndata: {"index":0,"type":"content_block_delta",'
    b'"delta":{"text":"\\u00e9\\ud83d\\/","type":"text_delta"}}\n\n'
    b'event: of_tomorrow\ndata: {"type":"of_tomorrow","n":12345678901234567890123}\n\n'
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason" : "end_turn"},"usage":{}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"   }\n\n'
)
ODD_MESSAGE = (
    b'{"content":[ {"type":"text","text":"caf\\u00e9 \\ud83d"}], "type":"message","model":"model-at-upstream","x":1.50}'
)


@plain_and_streamed
async def test_reading_is_not_changing(stream: bool) -> None:
    """Though a plugin reads everything, all bytes but the model's name stay as they came, up and down."""
    body = ODD_BODY % (b"true" if stream else b"false")
    reply = Reply([ODD_EVENTS], content_type="text/event-stream") if stream else Reply([ODD_MESSAGE])

    async with gateway_and_upstream([reading_everything()], reply) as (url, upstream):
        seen = await ask_for(url, "messages", body=body)

    sent = ODD_EVENTS if stream else ODD_MESSAGE
    assert body.replace(b'"model" : "model"', b'"model" : "model-at-upstream"') == upstream.received[0].body
    assert sent.replace(b'"model-at-upstream"', b'"model"') == seen.body


def mark_everywhere(value: Any) -> None:
    """An edit in each object, however deep."""
    if isinstance(value, dict):
        for item in list(value.values()):
            mark_everywhere(item)
        value["changed"] = True
    elif isinstance(value, list):
        for item in value:
            mark_everywhere(item)


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "openai": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
    "messages": [{"name": "weather", "input_schema": SCHEMA}],
}


@both_routes
@every_place
async def test_what_is_changed_goes_up_and_the_body_of_the_client_stays(format: str, place: str) -> None:
    """change() gives the request for writing, all of it; what the client sent can still be read as it was."""
    kept: list[dict[str, Any]] = []

    async def on_request(exchange: Exchange) -> None:
        mark_everywhere(exchange.change())

    async def on_send(exchange: Exchange) -> None:
        kept.append(exchange.client_body)

    body = request_of(False, tools=TOOLS[format])
    changing = plugin_of(on_request=on_request, on_send=on_send)
    async with gateway_and_upstream(in_order(changing, place)) as (url, upstream):
        await ask_for(url, format, body=body)

    schema = orjson.loads(upstream.received[0].body)["tools"][0]["input_schema"]
    assert (True, True) == (schema.get("changed"), schema["properties"]["city"].get("changed"))
    assert [request_of(False, tools=TOOLS[format])] == kept


@plain_and_streamed
async def test_a_changed_answer_goes_out_changed(stream: bool) -> None:
    """change() on an answer or an event gives it for writing; the events beside it stay the bytes that came."""

    async def on_answer(exchange: Exchange, answer: Answer) -> None:
        answer.change()["x"] = "changed"

    def on_event(exchange: Exchange, event: Event) -> Sequence[Event]:
        if event.kind == "content_block_delta":
            event.change()["x"] = "changed"
        return (event,)

    reply = Reply([ODD_EVENTS], content_type="text/event-stream") if stream else Reply([ODD_MESSAGE])
    async with gateway_and_upstream([plugin_of(on_answer=on_answer, on_event=on_event)], reply) as (url, _):
        seen = await ask_for(url, "messages", stream)

    if stream:
        frames, came = seen.body.split(b"\n\n"), ODD_EVENTS.split(b"\n\n")
        assert ("changed", came[2:]) == (seen.events[1]["x"], frames[2:])
    else:
        assert "changed" == seen.data["x"]


# ---- on_complete


@both_routes
@plain_and_streamed
async def test_a_client_that_leaves_while_the_answer_is_recorded_changes_nothing(format: str, stream: bool) -> None:
    """on_complete runs in a task of its own to its end, and the exchange is COMPLETED."""
    record, begun, go_on = Record(), asyncio.Event(), asyncio.Event()

    async def on_complete(exchange: Exchange) -> None:
        begun.set()
        await go_on.wait()
        record.calls.append("recorded")

    plugins = [watcher(record), plugin_of(on_complete=on_complete), ChatCompletions]
    with capture_logs() as logs:
        async with gateway_and_upstream(plugins, reply_of(stream, "Hello.")) as (url, _), asyncio.timeout(PATIENCE):
            await leave_when(begun, url, format, stream)
            await until(lambda: any(entry["event"] == "request" for entry in logs))
            assert [] == record.outcomes
            go_on.set()
            await record.closed.wait()

    assert (["recorded"], [Outcome.COMPLETED], 1) == (record.calls, record.outcomes, record.given_back)


async def leave_when(reached: asyncio.Event, url: str, format: str, stream: bool) -> None:
    """A client that leaves as soon as something is reached."""
    async with client() as session:
        request = asyncio.create_task(read_all(session, url + PATHS[format], stream))
        await reached.wait()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)


async def read_all(session: aiohttp.ClientSession, url: str, stream: bool) -> None:
    async with session.post(url, json=request_of(stream)) as response:
        await response.read()


@both_routes
@plain_and_streamed
async def test_a_recording_that_fails_when_the_client_has_left_is_explained_too(format: str, stream: bool) -> None:
    """Nobody can be told any more, so the log must: an answer that was not recorded is the operator's business."""
    record, begun, go_on = Record(), asyncio.Event(), asyncio.Event()

    async def on_complete(exchange: Exchange) -> None:
        begun.set()
        await go_on.wait()
        raise RuntimeError(BUG_TEXT)

    plugins = [watcher(record), plugin_of("usage", on_complete=on_complete), ChatCompletions]
    with capture_logs() as logs:
        async with gateway_and_upstream(plugins, reply_of(stream, "Hello.")) as (url, _), asyncio.timeout(PATIENCE):
            await leave_when(begun, url, format, stream)
            await until(lambda: any(entry["event"] == "request" for entry in logs))
            go_on.set()
            await record.closed.wait()

    assert ([Outcome.FAILED], [("usage", "on_complete")]) == (record.outcomes, blamed(logs))


def test_recording_has_ten_seconds() -> None:
    """All on_complete of an exchange together have 10 s."""
    assert 10 == pipeline.COMPLETE_TIMEOUT


@both_routes
@plain_and_streamed
@pytest.mark.parametrize("on_complete", [bug, hang], ids=["raises", "takes too long"])
async def test_no_tail_goes_out_when_the_answer_can_not_be_recorded(
    monkeypatch: pytest.MonkeyPatch, format: str, stream: bool, on_complete: Hook
) -> None:
    """The ending is an error: no finish chunk, no usage chunk, no stop_reason goes out before it."""
    monkeypatch.setattr(pipeline, "COMPLETE_TIMEOUT", 0.1)
    wish = {"stream_options": {"include_usage": True}} if format == "openai" else {}
    plugins = [plugin_of("usage", on_complete=on_complete), ChatCompletions]

    with capture_logs() as logs:
        async with gateway_and_upstream(plugins, reply_of(stream, "Hel", "lo.")) as (url, _):
            seen = await ask_for(url, format, body=request_of(stream, **wish))

    how = WITHIN if stream else BEFORE
    assert (FAILED_WORDS[format][how], [("usage", "on_complete")]) == (ending_of(seen, format), blamed(logs))
    for word in (b"end_turn", b'"finish_reason":"stop"', b"prompt_tokens", b"message_stop"):
        assert word not in seen.body


@both_routes
@plain_and_streamed
async def test_a_client_that_leaves_earlier_has_abandoned_the_answer(format: str, stream: bool) -> None:
    """Before the answer is whole, nothing is completed: on_complete doesn't run."""
    record, begun = Record(), asyncio.Event()

    async def on_send(exchange: Exchange) -> None:
        begun.set()

    async def on_complete(exchange: Exchange) -> None:
        record.calls.append("completed")

    reply = stream_reply([*text_events("Hel", stop_reason=None), FOREVER]) if stream else Reply([FOREVER])
    plugins = [watcher(record), plugin_of(on_send=on_send, on_complete=on_complete), ChatCompletions]
    async with gateway_and_upstream(plugins, reply) as (url, upstream), asyncio.timeout(PATIENCE):
        await leave_when(begun, url, format, stream)
        await record.closed.wait()
        let_go = await released(upstream)

    assert ([], [Outcome.ABANDONED], 1, True) == (record.calls, record.outcomes, record.given_back, let_go)


# ---- another model

TWO_MODELS = {
    "server": {"port": 0, "open": True, "admin": {"port": 0}},
    "store": "sqlite:///:memory:",
    "models": [
        {
            "id": f"test/{name}",
            "max_output_tokens": 100,
            "price": "free",
            "deployments": [{"upstream": "test", "model": f"{name}-at-upstream"}],
        }
        for name in ("large", "small")
    ],
    "plugins": ["chat_completions", "changing"],
}
OTHER_MODELS = {
    "all allowed": (None, "test/small", 200),
    "both allowed": ({"test/large", "test/small"}, "test/small", 200),
    "another spelling": ({"test/large", "test/small"}, " TEST/Small ", 200),
    "the other not allowed": ({"test/large"}, "test/small", 403),
    "an unknown one": (None, "test/none", 404),
}


@both_routes
@plain_and_streamed
@pytest.mark.parametrize(("allowed", "name", "status"), OTHER_MODELS.values(), ids=OTHER_MODELS)
async def test_a_plugin_sends_a_request_to_another_model(
    tmp_path: Path, format: str, stream: bool, allowed: set[str] | None, name: str, status: int
) -> None:
    """use_model changes where the request goes, judges the key's models again, and hides it from the client."""

    async def on_headers(exchange: Exchange) -> None:
        exchange.key = Key("key", "key", models=None if allowed is None else frozenset(allowed))

    async def on_request(exchange: Exchange) -> None:
        exchange.use_model(name)

    changing = plugin_of("changing", on_headers=on_headers, on_request=on_request)
    async with ScriptedUpstream(reply_of(stream, "Hello.")) as upstream:
        config = {**TWO_MODELS, "upstreams": {"test": {"base_url": upstream.url}}}
        gateway = two_models(tmp_path, config, changing)
        try:
            await gateway.start()
            url = f"http://127.0.0.1:{gateway.port}"
            seen = await ask_for(url, format, body=request_of(stream, model="test/large"))
        finally:
            await gateway.stop()

    asked = [orjson.loads(received.body)["model"] for received in upstream.received]
    assert (status, ["small-at-upstream"] if status == 200 else []) == (seen.status, asked)
    if status == 200:
        assert (True, False) == (b'"model":"test/large"' in seen.body, b"small" in seen.body)


def two_models(folder: Path, config: Mapping[str, Any], plugin: type[Plugin]) -> Gateway:
    (folder / "gateway.yaml").write_bytes(orjson.dumps(config))
    loaded = load(folder / "gateway.yaml", {})
    models = ModelTable.from_settings(loaded.models)
    known: dict[str, type[Plugin]] = {"chat_completions": ChatCompletions, plugin.name: plugin}
    return Gateway(loaded, models, build(loaded, models, known))


# ---- what the server lends


async def test_a_plugin_is_started_once_with_what_the_server_lends() -> None:
    """start gets the models and a session, among others, before the first request; stop comes after the last."""
    calls: list[str] = []

    async def start(services: Services) -> None:
        assert (["test/model"], False) == ([model.id for model in services.models], services.session.closed)
        calls.append("start")

    async def stop() -> None:
        calls.append("stop")

    async def on_headers(exchange: Exchange) -> None:
        calls.append("request")

    async with gateway_and_upstream([plugin_of(start=start, stop=stop, on_headers=on_headers)]) as (url, _):
        await ask_for(url, "messages")
        await ask_for(url, "messages", True)

    assert ["start", "request", "request", "stop"] == calls

"""Every way in which an exchange ends, on both routes, plain and streamed: what the client sees, what plugins are told.

One table. A row says how the upstream and a plugin behave; the promises are the same for all rows: one ending in the
client's own envelope, one ``on_close``, what was deferred done once, the upstream released.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import pytest

from plugins.chat_completions import ChatCompletions
from proxy.answer import Answer
from proxy.document import Event
from proxy.errors import GatewayError, Kind
from proxy.exchange import Exchange
from proxy.plugin import Outcome, Plugin
from proxy.testing import CUT, Reply, message_reply, stream_reply, text_events
from tests.contract_plugins import (
    BOTH_ROUTES,
    BUG_TEXT,
    FOREVER,
    PATHS,
    PATIENCE,
    PLAIN_AND_STREAMED,
    Record,
    ask_for,
    client,
    ending_of,
    gateway_and_upstream,
    plugin_of,
    released,
    request_of,
    until,
    watcher,
)

# What a kind of error is called: before the answer began, and in it.
WORDS = {
    "openai": {
        "invalid": ("400 invalid_request_error", "broken: invalid_request_error"),
        "forbidden": ("403 permission_error", "broken: permission_error"),
        "too many": ("429 rate_limit_error", "broken: rate_limit_error"),
        "failed": ("500 server_error", "broken: server_error"),
        "overloaded": ("503 server_error", "broken: server_error"),
        "timed out": ("504 server_error", "broken: server_error"),
    },
    "messages": {
        "invalid": ("400 invalid_request_error", "broken: invalid_request_error"),
        "forbidden": ("403 permission_error", "broken: permission_error"),
        "too many": ("429 rate_limit_error", "broken: rate_limit_error"),
        "failed": ("500 api_error", "broken: api_error"),
        "overloaded": ("529 overloaded_error", "broken: overloaded_error"),
        "timed out": ("504 timeout_error", "broken: timeout_error"),
    },
}
WHOLE = "whole"


def before(kind: str) -> tuple[str, int]:
    return kind, 0


def within(kind: str) -> tuple[str, int]:
    return kind, 1


class Replies(NamedTuple):
    """How the upstream answers; made anew for each exchange."""

    plain: Callable[[], Reply] = message_reply
    streamed: Callable[[], Reply] = lambda: stream_reply(text_events("Hel", "lo."))


@dataclass(frozen=True)
class Row:
    """One way to end. ``plain`` and ``streamed`` are the ending that the client sees; None: there is no such way."""

    plain: tuple[str, int] | str | None
    streamed: tuple[str, int] | str | None
    outcomes: Sequence[Outcome]
    plugins: Sequence[type[Plugin]] = ()
    replies: Replies = field(default_factory=lambda: Replies())
    server: Mapping[str, Any] = field(default_factory=dict)
    asks_upstream: bool = True


COMPLETED, FAILED, ABANDONED = (Outcome.COMPLETED,), (Outcome.FAILED,), (Outcome.ABANDONED,)


async def refuse(exchange: Exchange) -> None:
    raise GatewayError(Kind.PERMISSION, "not you")


async def answer_text(exchange: Exchange) -> Answer:
    return Answer.text("By myself.")


async def bug(*_: object) -> NoReturn:
    raise RuntimeError(BUG_TEXT)


def bug_at_once(*_: object) -> NoReturn:
    raise RuntimeError(BUG_TEXT)


def bug_at(number: int) -> type[Plugin]:
    """Its ``on_event`` breaks at this event of an answer, counted from 1."""
    seen: Counter[str] = Counter()

    def on_event(exchange: Exchange, event: Event) -> Sequence[Event]:
        seen[exchange.id] += 1
        if seen[exchange.id] >= number:
            raise RuntimeError(BUG_TEXT)
        return (event,)

    return plugin_of("faulty", on_event=on_event)


def status(status: int, message: str, type_: str) -> Replies:
    body = b'{"type":"error","error":{"type":"%b","message":"%b"}}' % (type_.encode(), message.encode())
    return both(lambda: Reply([body], status=status))


def both(reply: Callable[[], Reply]) -> Replies:
    return Replies(reply, reply)


def streamed(*events: Mapping[str, Any] | bytes | float, plain: Callable[[], Reply] = message_reply) -> Replies:
    return Replies(plain, lambda: stream_reply(events))


OVERLOADED = {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}
BEGUN = text_events("Hel", "lo", ".", stop_reason=None)
ALL_BUT_STOP = text_events("Hel", "lo.")[:-1]
GOES_ON = streamed(*BEGUN, FOREVER)
LAST_OF_SIX = 6  # of the events of text_events("Hello.")

ROWS = {
    "completed": Row(WHOLE, WHOLE, COMPLETED),
    "refused in on_headers": Row(
        before("forbidden"), before("forbidden"), (), [plugin_of(on_headers=refuse)], asks_upstream=False
    ),
    "refused in on_request": Row(
        before("forbidden"), before("forbidden"), FAILED, [plugin_of(on_request=refuse)], asks_upstream=False
    ),
    "refused in on_send": Row(
        before("forbidden"), before("forbidden"), FAILED, [plugin_of(on_send=refuse)], asks_upstream=False
    ),
    "a bug in on_headers": Row(
        before("failed"), before("failed"), (), [plugin_of(on_headers=bug)], asks_upstream=False
    ),
    "a bug in on_request": Row(
        before("failed"), before("failed"), FAILED, [plugin_of(on_request=bug)], asks_upstream=False
    ),
    "a bug in on_send": Row(before("failed"), before("failed"), FAILED, [plugin_of(on_send=bug)], asks_upstream=False),
    "a bug in on_answer": Row(before("failed"), None, FAILED, [plugin_of(on_answer=bug)]),
    "a bug in on_event at the first": Row(None, before("failed"), FAILED, [bug_at(1)], replies=GOES_ON),
    "a bug in on_event at the fifth": Row(None, within("failed"), FAILED, [bug_at(5)], replies=GOES_ON),
    "a bug in on_event at the last": Row(
        None, within("failed"), FAILED, [bug_at(LAST_OF_SIX)], replies=streamed(*text_events("Hello."), FOREVER)
    ),
    "a bug in on_complete": Row(before("failed"), within("failed"), FAILED, [plugin_of(on_complete=bug)]),
    "a bug in on_close": Row(WHOLE, WHOLE, COMPLETED, [plugin_of(on_close=bug_at_once)]),
    "a plugin answers": Row(WHOLE, WHOLE, COMPLETED, [plugin_of(on_request=answer_text)], asks_upstream=False),
    "the upstream refuses the request": Row(
        before("invalid"), before("invalid"), FAILED, replies=status(400, "bad", "invalid_request_error")
    ),
    "the upstream refuses the key": Row(
        before("failed"), before("failed"), FAILED, replies=status(401, "key", "authentication_error")
    ),
    "the upstream has too many requests": Row(
        before("too many"), before("too many"), FAILED, replies=status(429, "slower", "rate_limit_error")
    ),
    "the upstream fails": Row(before("failed"), before("failed"), FAILED, replies=status(500, "oops", "api_error")),
    "the upstream is overloaded": Row(
        before("overloaded"), before("overloaded"), FAILED, replies=status(529, "busy", "overloaded_error")
    ),
    "the upstream fails with HTML": Row(
        before("failed"),
        before("failed"),
        FAILED,
        replies=both(lambda: Reply([b"<html>bad gateway</html>"], status=502, content_type="text/html")),
    ),
    "the upstream answers HTML": Row(
        before("failed"),
        before("failed"),
        FAILED,
        replies=both(lambda: Reply([b"<html>hi</html>"], content_type="text/html")),
    ),
    "the upstream answers no message": Row(
        before("failed"), before("failed"), FAILED, replies=both(lambda: Reply([b'{"type":"list","data":[]}']))
    ),
    "the upstream breaks before its answer": Row(
        before("failed"), before("failed"), FAILED, replies=both(lambda: Reply([CUT]))
    ),
    "the upstream ends before the first event": Row(None, before("failed"), FAILED, replies=streamed()),
    "the upstream breaks within its answer": Row(
        before("failed"),
        within("failed"),
        FAILED,
        replies=streamed(*BEGUN, CUT, plain=lambda: Reply([b'{"type":"message","con', CUT])),
    ),
    "an error event first": Row(None, before("overloaded"), FAILED, replies=streamed(OVERLOADED, FOREVER)),
    "an error event later": Row(None, within("overloaded"), FAILED, replies=streamed(*BEGUN, OVERLOADED, FOREVER)),
    "an error event behind the stop_reason": Row(
        None, within("overloaded"), FAILED, replies=streamed(*ALL_BUT_STOP, OVERLOADED, FOREVER)
    ),
    "an end without a stop_reason": Row(None, within("failed"), FAILED, replies=streamed(*BEGUN)),
    "message_stop lost at the end": Row(None, WHOLE, COMPLETED, replies=streamed(*ALL_BUT_STOP)),
    "message_stop lost by a reset": Row(None, WHOLE, COMPLETED, replies=streamed(*ALL_BUT_STOP, CUT)),
    "message_stop lost in silence": Row(None, WHOLE, COMPLETED, replies=streamed(*ALL_BUT_STOP, FOREVER)),
    "silence before the answer": Row(
        before("timed out"),
        before("timed out"),
        FAILED,
        replies=both(lambda: Reply([FOREVER])),
        server={"request_timeout": 0.1, "first_event_timeout": 0.1},
    ),
    "silence before the first event": Row(
        None,
        before("timed out"),
        FAILED,
        replies=streamed(b": hello\n\n", FOREVER),
        server={"first_event_timeout": 0.1},
    ),
    "silence within the answer": Row(
        before("timed out"),
        within("timed out"),
        FAILED,
        replies=streamed(*BEGUN, FOREVER, plain=lambda: Reply([b'{"type":"message","con', FOREVER])),
        server={"request_timeout": 0.1, "idle_timeout": 0.1},
    ),
    "silence after a ping to the client": Row(
        None,
        within("timed out"),
        FAILED,
        replies=streamed(b": hello\n\n", FOREVER),
        server={"ping_interval": 0.02, "first_event_timeout": 0.2},
    ),
}
CASES = [
    pytest.param(row, format, stream, id=f"{name}-{format}-{mode}")
    for name, row in ROWS.items()
    for format in BOTH_ROUTES
    for mode, stream in PLAIN_AND_STREAMED.items()
    if (row.streamed if stream else row.plain) is not None
]


@pytest.fixture(autouse=True)
def _short_wait_for_a_lost_message_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.upstream.stream.TAIL_TIMEOUT", 0.1)


@pytest.mark.parametrize(("row", "format", "stream"), CASES)
async def test_an_exchange_ends_once_and_everybody_is_told_the_same(row: Row, format: str, stream: bool) -> None:
    """One ending in the client's envelope, one on_close, what was deferred done once, the upstream released."""
    record = Record()
    reply = (row.replies.streamed if stream else row.replies.plain)()
    plugins = [watcher(record), ChatCompletions, *row.plugins]

    async with gateway_and_upstream(plugins, reply, **row.server) as (url, upstream):
        seen = await ask_for(url, format, stream)
        let_go = await released(upstream)
        asked = len(upstream.received)

    how = row.streamed if stream else row.plain
    expected = how if how is None or isinstance(how, str) else WORDS[format][how[0]][how[1]]
    assert (expected, list(row.outcomes), 1, True, row.asks_upstream) == (
        ending_of(seen, format),
        record.outcomes,
        record.given_back,
        let_go,
        asked == 1,
    )
    assert BUG_TEXT not in f"{seen.body!r} {seen.headers}"


# Where the client is left waiting: the hook of a plugin that never ends, or the upstream.
LEAVING = {
    "in on_headers": ("on_headers", ()),
    "in on_request": ("on_request", ABANDONED),
    "in on_send": ("on_send", ABANDONED),
    "before the upstream answers": ("upstream", ABANDONED),
    "in on_answer": ("on_answer", ABANDONED),
    "within the upstream's answer": ("events", ABANDONED),
}
LEAVING_CASES = [
    pytest.param(where, outcomes, format, stream, id=f"{name}-{format}-{mode}")
    for name, (where, outcomes) in LEAVING.items()
    for format in BOTH_ROUTES
    for mode, stream in PLAIN_AND_STREAMED.items()
    if not (where == "on_answer" and stream)
]


@pytest.mark.parametrize(("where", "outcomes", "format", "stream"), LEAVING_CASES)
async def test_a_client_that_leaves_takes_everything_with_it(
    where: str, outcomes: Sequence[Outcome], format: str, stream: bool
) -> None:
    """A client that leaves is an ABANDONED for plugins, and its upstream request ends at once."""
    record, reached = Record(), asyncio.Event()

    async def hang(*_: object) -> None:
        reached.set()
        await asyncio.sleep(FOREVER)

    def on_event(exchange: Exchange, event: Event) -> Sequence[Event]:
        reached.set()
        return (event,)

    waiting = plugin_of("waiting", **({where: hang} if where.startswith("on_") else {"on_event": on_event}))
    goes_on = stream_reply([*BEGUN, FOREVER]) if stream else Reply([b'{"type":"message","con', FOREVER])
    reply = {"upstream": Reply([FOREVER]), "events": goes_on}.get(where, message_reply())

    async with (
        gateway_and_upstream([watcher(record), ChatCompletions, waiting], reply) as (url, upstream),
        client() as session,
        asyncio.timeout(PATIENCE),
    ):
        request = asyncio.create_task(_read_all(session, url + PATHS[format], stream))
        if where == "upstream" or (where == "events" and not stream):
            await until(lambda: upstream.open == 1)
        else:
            await reached.wait()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await record.closed.wait()
        let_go = await released(upstream)

    assert (list(outcomes), 1, True) == (record.outcomes, record.given_back, let_go)
    assert (where in ("upstream", "events")) == upstream.left.is_set()


async def _read_all(session: Any, url: str, stream: bool) -> None:
    async with session.post(url, json=request_of(stream)) as response:
        await response.read()

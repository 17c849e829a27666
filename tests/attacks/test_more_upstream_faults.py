"""Upstreams that break (group U), where that takes a ledger, the operator's figures, other times or two deployments.

test_upstream_faults judges what the client is told; here is what is billed for it, what the operator sees, how a
deployment is left alone and tried again, and what only shows when times are scaled down.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from tests.admin_listener import admin_of, total
from tests.attacks.conftest import model, unharmed
from tests.attacks.fault_points import CONSTANTS, HASTY_CLIENT
from tests.attacks.raw_client import (
    BOTH,
    CHAT,
    MESSAGES,
    UPSTREAM_KEY,
    Answer,
    RawClient,
    ask,
    asked,
    connected,
    error_of,
    post,
)
from tests.attacks.raw_upstream import (
    BEGUN,
    CHUNKED,
    ENDING,
    EVENTS,
    LAST_CHUNK,
    PLAIN,
    Move,
    RawUpstream,
    Step,
    chunk,
    frame,
    frames,
    http,
)
from tests.attacks.starting import PRICE, gate, prepaid_config, started
from tests.process import GatewayProcess, eventually
from tests.store.gateways import ledger, reserved_units
from tests.store.processes import KillableGateway

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

COOLING = 0.4
KEPT = 0.3
PINGED = 0.1
WHOLE_ANSWER = 0.6
"""Seconds that aiohttp's own limit for a whole answer has here."""
SCALED = {
    "proxy.upstream.health:SHORTEST_COOLING": COOLING,
    "proxy.upstream.client:KEEPALIVE": KEPT,
    "proxy.upstream.stream:TAIL_TIMEOUT": 0.3,
    "proxy.upstream.stream:DRAIN_TIMEOUT": 0.5,
}
WAIT, CLOSE, RESET = Move.WAIT, Move.CLOSE, Move.RESET


class Billing(NamedTuple):
    """A gateway whose client pays, and whose times are short; and what its ledger holds."""

    gateway: KillableGateway
    folder: Path

    @property
    def store(self) -> str:
        return f"sqlite:///{self.folder}/ezat.db"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def second() -> AsyncIterator[RawUpstream]:
    """The upstream that is asked where the other fails."""
    async with RawUpstream() as started:
        yield started


@pytest.fixture(scope="module")
def running(
    shared_upstream: RawUpstream, second: RawUpstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Billing]:
    folder = tmp_path_factory.mktemp("billing")
    config = prepaid_config(
        shared_upstream,
        folder,
        {CONSTANTS: {"values": SCALED}},
        {HASTY_CLIENT: {"seconds": WHOLE_ANSWER}},
        ping_interval=PINGED,
    )
    config["upstreams"]["second"] = {"base_url": second.url, "api_key": UPSTREAM_KEY}
    config["models"].append({**model("raw/two", "raw", "second", aliases=["two"]), "price": PRICE})
    with started(config, folder) as gateway:
        yield Billing(gateway, folder)


@pytest_asyncio.fixture(loop_scope="session")
async def billing(running: Billing) -> AsyncIterator[Billing]:
    """That gateway, unharmed by the test, and with nothing reserved."""
    async with unharmed(running.gateway):
        yield running
    await eventually(lambda: reserved_units(running.store) == (0, 0))


def is_whole(answer: Answer, path: str) -> bool:
    ending = b"data: [DONE]\n\n" if path == CHAT else b'"type": "message_stop"}\n\n'
    return answer.body.replace(b'":"', b'": "').endswith(ending) and b'"error"' not in answer.body


# U7, U13, U16: what ends in an error is not billed

OVERLOADED = frame({"type": "error", "error": {"type": "overloaded_error", "message": "provider-is-busy"}})
TOO_LARGE = frame({"type": "error", "error": {"type": "request_too_large", "message": "provider-takes-less"}})
UNBILLED: dict[str, tuple[Sequence[Step], bool]] = {
    "closed in the middle": ([CHUNKED, chunk(BEGUN), CLOSE], True),
    "reset in the middle": ([CHUNKED, chunk(BEGUN), 0.05, RESET], True),
    "ended without a stop_reason": ([CHUNKED, chunk(BEGUN), LAST_CHUNK], True),
    "an error event in the middle": ([CHUNKED, chunk(BEGUN), chunk(OVERLOADED), WAIT], True),
    "an error event behind the stop_reason": (
        [CHUNKED, chunk(BEGUN + frames(EVENTS[4:-1])), chunk(OVERLOADED), WAIT],
        True,
    ),
    "an error event in one read with what came before": ([CHUNKED, chunk(BEGUN + OVERLOADED), WAIT], True),
    "no JSON in the middle": ([CHUNKED, chunk(BEGUN + b"event: message_delta\ndata: {\n\n"), WAIT], True),
    "an error event first": ([CHUNKED, chunk(OVERLOADED), WAIT], False),
    "nothing": ([CHUNKED, LAST_CHUNK], False),
    "closed before": ([CHUNKED, CLOSE], False),
}
"""What the upstream sends, and whether the answer had begun."""


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", UNBILLED)
async def test_u7_u13_what_ends_in_an_error_is_not_billed(
    billing: Billing, upstream: RawUpstream, name: str, path: str
) -> None:
    """Before the first event it is an error of its status, later one in the stream with no ending; there is no row."""
    steps, begun = UNBILLED[name]
    before = len(ledger(billing.store))
    upstream.play(*steps)

    answer = await ask(billing.gateway, path, asked(stream=True, stream_options={"include_usage": True}))

    if begun:
        assert (200, 1) == (answer.status, len(re.findall(rb'"error": ?\{', answer.body)))
        assert not re.search(rb'"finish_reason": ?"|"stop_reason": ?"|message_stop|"usage": ?\{"prompt', answer.body)
        assert path == MESSAGES or answer.body.endswith(b"data: [DONE]\n\n")
    else:
        overloaded = 503 if path == CHAT else 529
        error_of(answer, path, overloaded if "error event" in name else 500)
    assert before == len(ledger(billing.store))


ERROR_EVENTS = {
    "overloaded": (OVERLOADED, (503, 529)),
    "too large": (TOO_LARGE, (413, 413)),
    "a bad request": (
        frame({"type": "error", "error": {"type": "invalid_request_error", "message": "provider-wants-more"}}),
        (400, 400),
    ),
    "no such type": (frame({"type": "error", "error": {"type": "moon_error", "message": "x"}}), (500, 500)),
    "no error in it": (b"event: error\ndata: {}\n\n", (500, 500)),
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", ERROR_EVENTS)
async def test_u13_an_error_event_first_is_an_error_of_its_status(
    billing: Billing, upstream: RawUpstream, name: str, path: str
) -> None:
    """No 200 is sent where the first event is an error, be there comments and pings before it."""
    event, statuses = ERROR_EVENTS[name]
    upstream.play_stream(b": hello\n\n", frame({"type": "ping"}) + event, WAIT)

    answer = await ask(billing.gateway, path, asked(stream=True))

    error_of(answer, path, statuses[path == MESSAGES])
    assert b"moon" not in answer.body


# U9, U10: the end of an answer

LOST_STOP: dict[str, Sequence[Step]] = {
    "closed": [CLOSE],
    "closed in time": [LAST_CHUNK],
    "reset": [0.05, RESET],
    "silence": [WAIT],
    "half of it": [chunk(b'event: message_stop\ndata: {"type"'), CLOSE],
    "garbage for a chunk": [0.05, b"zz\r\n\r\n", WAIT],
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", LOST_STOP)
async def test_u9_a_lost_message_stop_makes_no_error_of_a_whole_answer(
    billing: Billing, upstream: RawUpstream, name: str, path: str
) -> None:
    """Where only that is lost the answer is whole, the gateway adds it, and there is one exact row."""
    before = len(ledger(billing.store))
    upstream.play(CHUNKED, chunk(BEGUN + frames(EVENTS[4:-1])), *LOST_STOP[name])

    answer = await ask(billing.gateway, path, asked(stream=True))

    assert is_whole(answer, path), answer.body
    assert path == CHAT or 1 == answer.body.count(b"event: message_stop")
    rows = ledger(billing.store)[before:]
    assert [("exact", 12, 7)] == [(row["exactness"], row["input"], row["output"]) for row in rows]


@pytest.mark.parametrize("path", BOTH)
async def test_u10_an_answer_ends_at_its_message_stop_within_a_second(
    billing: Billing, upstream: RawUpstream, path: str
) -> None:
    """A connection that stays open behind it is dropped and not used again."""
    upstream.hang_up()
    upstream.play_stream(BEGUN + ENDING, WAIT)
    began = time.monotonic()

    answer = await ask(billing.gateway, path, asked(stream=True))
    taken = time.monotonic() - began
    again = await ask(billing.gateway, path, asked(stream=True))
    await eventually(lambda: upstream.left == 1)

    assert [True, True] == [is_whole(each, path) for each in (answer, again)]
    assert taken < 1
    assert 2 == upstream.connections


# U3: kept connections


async def test_u3_an_idle_connection_is_given_up_before_the_other_side_does(
    billing: Billing, upstream: RawUpstream
) -> None:
    """A connection is used again at once, but not when it has been idle for longer than the gateway keeps it."""
    upstream.hang_up()
    await ask(billing.gateway, MESSAGES, b"{")  # a turn of the loop, in which the gateway notices
    for _ in range(2):
        await ask(billing.gateway, MESSAGES, asked())
    at_once = upstream.connections
    await asyncio.sleep(KEPT + 0.1)

    await ask(billing.gateway, MESSAGES, asked())

    assert (1, 2) == (at_once, upstream.connections)


# U6, U33: slow and long


@pytest.mark.parametrize("path", BOTH)
async def test_u6_u33_a_long_slow_stream_is_pinged_and_not_cut(
    billing: Billing, upstream: RawUpstream, path: str
) -> None:
    """A stream may take longer than aiohttp lets answers take by default, in single bytes if need be; between its
    events the client is pinged."""
    event = ENDING[:150]
    pause = 2.5 * WHOLE_ANSWER / len(event)
    drip = [step for at in range(len(event)) for step in (pause, event[at : at + 1])]
    upstream.play_stream(BEGUN, *drip, ENDING[150:], b"")
    began = time.monotonic()

    answer = await ask(billing.gateway, path, asked(stream=True))

    assert is_whole(answer, path), answer.body
    assert time.monotonic() - began > 2 * WHOLE_ANSWER
    assert 3 <= answer.body.count(b": ping\n" if path == CHAT else b"event: ping\n") <= 3 * WHOLE_ANSWER / PINGED


async def test_u33_a_whole_answer_may_take_longer_as_well(billing: Billing, upstream: RawUpstream) -> None:
    """So may one that does not stream: its time is the gateway's own setting."""
    upstream.play(1.5 * WHOLE_ANSWER, PLAIN)

    assert 200 == (await ask(billing.gateway, MESSAGES, asked())).status


# U18, U30: bodies


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_u30_an_upstream_that_does_not_read_is_believed(
    gateway: GatewayProcess, upstream: RawUpstream, stream: bool
) -> None:
    """What it answers before it has read a large body is told in OpenAI's format, too."""
    refusal = b'{"type":"error","error":{"type":"request_too_large","message":"more than I take"}}'
    upstream.play(http(refusal, "connection: close", status="413 Too Large"), 0.3, CLOSE, reads_body=False)
    large = [{"role": "user", "content": "x" * 20 * 2**20}]

    answer = await ask(gateway, CHAT, asked(stream=stream, messages=large))

    assert "more than I take" == error_of(answer, CHAT, 413)["message"]


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("type", ["text/html", "text/plain; charset=utf-8", "application/octet-stream", "x"])
async def test_u18_only_what_is_a_message_is_one(billing: Billing, upstream: RawUpstream, path: str, type: str) -> None:
    """Whatever its type says, what is no message is a 500, and nothing of it is seen."""
    upstream.play(http(b"<html>Hello</html>", type=type))

    answer = await ask(billing.gateway, path, asked())

    error_of(answer, path, 500)
    assert b"Hello" not in answer.body


# U21: the operator's fault


@pytest.mark.parametrize("path", BOTH)
async def test_u21_a_refused_key_of_the_gateway_is_the_operators_alarm(
    billing: Billing, upstream: RawUpstream, path: str
) -> None:
    """The client is not told that a key is bad, nor which; the figures and the log tell the operator."""
    admin = admin_of(billing.gateway)
    quoted = json.dumps({"type": "error", "error": {"type": "authentication_error", "message": f"bad {UPSTREAM_KEY}"}})
    alarms = [total(await admin.figures(), "ezat_upstream_failures_total", upstream="raw", alarm="yes")]
    known = len(billing.gateway.written)
    for status in ("401 Unauthorized", "403 Forbidden"):
        upstream.play(http(quoted.encode(), status=status))

    answers = [await ask(billing.gateway, path, asked()) for _ in range(2)]
    await admin.once(lambda found: total(found, "ezat_upstream_failures_total", alarm="yes") >= alarms[0] + 2)

    for answer in answers:
        assert "key" not in error_of(answer, path, 500)["message"]
    told = billing.gateway.written[known:]
    assert 2 == told.count('"event":"the upstream refuses the gateway itself"')
    assert UPSTREAM_KEY not in told + "".join(answer.body.decode() for answer in answers)


# U34: left alone, and tried again


async def cool_down(billing: Billing, upstream: RawUpstream) -> None:
    """Ten failures of the first upstream at once."""
    with gate() as fail:
        for _ in range(10):
            upstream.play(fail, http(b"{}", status="529 Busy"))
        asking = [asyncio.create_task(ask(billing.gateway, MESSAGES, asked(model="two"))) for _ in range(10)]
        await eventually(lambda: len(upstream.asked) == 10)
    assert [200] * 10 == [answer.status for answer in await asyncio.gather(*asking)]


class Crowd(NamedTuple):
    """Clients that have asked at once, and those of them that have their answers."""

    clients: list[RawClient]
    answered: list[RawClient]

    @property
    def waiting(self) -> list[RawClient]:
        return [client for client in self.clients if client not in self.answered]


async def crowd_of(stack: AsyncExitStack, billing: Billing, number: int, answers: int) -> Crowd:
    """So many clients, once so many of them are answered."""
    clients = [await stack.enter_async_context(connected(billing.gateway)) for _ in range(number)]
    answered: list[RawClient] = []

    async def read(client: RawClient) -> None:
        assert 200 == (await client.answer()).status
        answered.append(client)

    for client in clients:
        client.send(post(CHAT, asked(model="two")))
    reading = [asyncio.create_task(read(client)) for client in clients]
    await eventually(lambda: len(answered) >= answers)
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    return Crowd(clients, answered)


async def test_u34_of_twenty_requests_one_finds_out(
    billing: Billing, upstream: RawUpstream, second: RawUpstream
) -> None:
    """After ten failures the deployment is left alone; then of twenty requests at once exactly one goes there, and the
    others don't wait for it. Where its client leaves, exactly one of the next twenty does; and when that one is
    answered, all do again."""
    await cool_down(billing, upstream)
    second.asked.clear()
    await ask(billing.gateway, CHAT, asked(model="two"))
    left_alone = (len(upstream.asked), len(second.asked))
    await asyncio.sleep(COOLING + 0.05)

    async with AsyncExitStack() as stack:
        with gate() as end:
            upstream.asked.clear()
            upstream.play(end, PLAIN)
            first = await crowd_of(stack, billing, 20, 19)
            probes = [len(upstream.asked)]
            [probe] = first.waiting
            probe.reset()
            await eventually(lambda: len(billing.gateway.requests(outcome="abandoned")) == 1)
        with gate() as end:
            upstream.asked.clear()
            upstream.play(end, PLAIN)
            then = await crowd_of(stack, billing, 20, 19)
            probes.append(len(upstream.asked))
        [probe] = then.waiting
        assert 200 == (await probe.answer()).status

    second.asked.clear()
    answers = await asyncio.gather(*(ask(billing.gateway, MESSAGES, asked(model="two")) for _ in range(10)))

    assert (10, 1) == left_alone
    assert [1, 1] == probes
    assert ([200] * 10, 0) == ([answer.status for answer in answers], len(second.asked))


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_u34_clients_that_leave_say_nothing_about_a_deployment(
    billing: Billing, upstream: RawUpstream, second: RawUpstream, stream: bool
) -> None:
    """Twenty clients that leave while they wait are no failures: the next request goes to the same place."""
    second.asked.clear()
    async with AsyncExitStack() as stack:
        for number in range(1, 21):
            upstream.play(WAIT)
            client = await stack.enter_async_context(connected(billing.gateway))
            client.send(post(MESSAGES, asked(model="two", stream=stream)))
            await eventually(lambda number=number: len(upstream.asked) == number)  # type: ignore[misc]
    await eventually(lambda: upstream.left == 20)

    answer = await ask(billing.gateway, CHAT, asked(model="two"))

    assert (200, 21, 0) == (answer.status, len(upstream.asked), len(second.asked))

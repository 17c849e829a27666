"""Which deployment answers, and what the client is told when none does: over real sockets, with two or three upstreams.

A deployment's priority is its place in the list unless a test says otherwise, so that it is known which one is asked
first.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from structlog.testing import capture_logs

from proxy.jsontext import encode
from proxy.testing import (
    CUT,
    Reply,
    ScriptedUpstream,
    message_reply,
    stream_reply,
    text_events,
)
from tests.configured import NAMES, World, config_for, configured_gateway, world
from tests.contract_plugins import (
    BOTH_ROUTES,
    FOREVER,
    PATHS,
    PATIENCE,
    PLAIN_AND_STREAMED,
    ask_for,
    client,
    ending_of,
    released,
    request_of,
    until,
)

ROUTES = pytest.mark.parametrize("format", BOTH_ROUTES)
MODES = pytest.mark.parametrize("stream", PLAIN_AND_STREAMED.values(), ids=PLAIN_AND_STREAMED)


def status(number: int, message: str = "their words", type: str = "some_error", **headers: str) -> Reply:
    body = encode({"type": "error", "error": {"type": type, "message": message}})
    return Reply([body], number, headers={name.replace("_", "-"): value for name, value in headers.items()})


def error_event(type: str, message: str = "their words") -> Reply:
    return stream_reply([{"type": "error", "error": {"type": type, "message": message}}])


def html() -> Reply:
    return Reply([b"<html>It works!</html>"], content_type="text/html")


def plain(body: bytes) -> Reply:
    return Reply([body])


def good(stream: bool) -> Reply:
    return stream_reply(text_events("Hel", "lo.")) if stream else message_reply()


BEGUN = text_events("Hel", stop_reason=None)
CREDIT = "Your credit balance is too low to access the API."
SPENT = "You have reached your specified API usage limits: the spend limit of this workspace."

# What an upstream does, plain and streamed alike, before it has given anything
FAULTS: dict[str, Callable[[], Reply]] = {
    "a reset connection": lambda: Reply([CUT]),
    **{f"{number}": lambda number=number: status(number) for number in (401, 402, 403, 404, 408, 429)},  # type: ignore[misc]
    **{f"{number}": lambda number=number: status(number) for number in (500, 502, 503, 504, 520, 529)},  # type: ignore[misc]
    "429 with retry-after": lambda: status(429, retry_after="30"),
    "503 in HTML": lambda: Reply([b"<html>503</html>"], 503, "text/html"),
    "500 without a body": lambda: Reply([], 500),
    "400 for its credit": lambda: status(400, CREDIT, "invalid_request_error"),
    "400 for its spend limit": lambda: status(400, SPENT, "invalid_request_error"),
    "HTML": html,
    "nothing": lambda: plain(b""),
    "no JSON": lambda: plain(b"{"),
    "an error with status 200": lambda: plain(b'{"type":"error","error":{"type":"api_error","message":"x"}}'),
    "an OpenAI completion": lambda: plain(b'{"id":"chatcmpl-1","object":"chat.completion","choices":[]}'),
    "a message without content": lambda: plain(b'{"type":"message","role":"assistant"}'),
}
# What only a whole answer can do
PLAIN_FAULTS: dict[str, Callable[[], Reply]] = {
    "a plain answer that breaks off": lambda: Reply([b'{"type":"message","con', CUT]),
}
# What only a stream can do
STREAM_FAULTS: dict[str, Callable[[], Reply]] = {
    "no answer in time": lambda: Reply([FOREVER]),
    "no event in time": lambda: stream_reply([b": comment\n\n", {"type": "ping"}, FOREVER]),
    "a stream that ends at once": lambda: stream_reply([]),
    "a stream that breaks off before its first event": lambda: stream_reply([{"type": "ping"}, CUT]),
    "a stream of something else": lambda: Reply([b'data: {"id":1}\n\n'], content_type="text/event-stream"),
    **{
        f"an event of {type} first": lambda type=type: error_event(type)  # type: ignore[misc]
        for type in (
            "overloaded_error",
            "api_error",
            "rate_limit_error",
            "timeout_error",
            "authentication_error",
            "billing_error",
            "permission_error",
            "not_found_error",
            "internal_error",
        )
    },
    "an error event about its credit first": lambda: error_event("invalid_request_error", CREDIT),
    "a ping and an error event": lambda: stream_reply(
        [{"type": "ping"}, {"type": "error", "error": {"type": "overloaded_error", "message": "x"}}]
    ),
}
MOVED_ON = [
    pytest.param(fault, stream, id=f"{name}, {mode}")
    for faults, modes in ((FAULTS, ("plain", "streamed")), (PLAIN_FAULTS, ("plain",)), (STREAM_FAULTS, ("streamed",)))
    for name, fault in faults.items()
    for mode, stream in PLAIN_AND_STREAMED.items()
    if mode in modes
]


# Failover


@pytest.mark.parametrize(("fault", "stream"), MOVED_ON)
@ROUTES
async def test_a_fault_before_the_first_event_moves_on(
    tmp_path: Path, format: str, fault: Callable[[], Reply], stream: bool
) -> None:
    """The client gets a whole answer of the next deployment and hears nothing of the fault, and the next turn goes
    there at once."""
    reply = fault()
    limits: dict[str, Any] = {"first_event_timeout": 0.5} if FOREVER in reply.pieces else {}
    async with world(tmp_path, [reply], [good(stream), good(stream)], **limits) as running:
        answers = [await ask_for(running.url, format, stream) for _ in range(2)]

        assert ["whole", "whole"] == [ending_of(answer, format) for answer in answers]
        assert [1, 2] == running.asked
        assert b"their words" not in answers[0].body
        assert [True, True] == [await released(upstream) for upstream in running.upstreams]


@MODES
@ROUTES
async def test_a_refused_connection_moves_on(tmp_path: Path, format: str, stream: bool) -> None:
    """Where nobody listens, the next deployment answers."""
    async with ScriptedUpstream(good(stream)) as second:
        config = config_for({"first": {"base_url": unused_url()}, "second": {"base_url": second.url}})
        async with configured_gateway(config, tmp_path) as url:
            answer = await ask_for(url, format, stream)

    assert "whole" == ending_of(answer, format)


def unused_url() -> str:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


@MODES
async def test_an_error_whose_body_never_ends_moves_on(tmp_path: Path, stream: bool) -> None:
    """A fault is known by its status: its body is not waited for longer than for an event."""
    stalled = Reply([b'{"type":', FOREVER], 503)
    async with world(tmp_path, [stalled], [good(stream)], first_event_timeout=0.5) as running:
        answer = await ask_for(running.url, "messages", stream)

    assert "whole" == ending_of(answer, "messages")


async def test_each_deployment_gets_its_own_name_for_the_model(tmp_path: Path) -> None:
    """The body that moves on is the same, under the next deployment's name for the model."""
    sent = b'{"max_tokens": 9, "model": "model", "x": 1.10, "messages": [{"role": "user", "content": "Hi"}]}'
    async with world(tmp_path, [status(500)], []) as running:
        await ask_for(running.url, "messages", body=sent)

        bodies = [upstream.received[0].body for upstream in running.upstreams]
    assert [
        sent.replace(b'"model": "model"', b'"model": "model-at-upstream-%b"' % name) for name in (b"first", b"second")
    ] == bodies


# About the request itself: no other deployment would answer it
FINAL = {
    "400": (400, "messages.0.content: is too odd", "invalid_request_error"),
    "413": (413, "the request exceeds the maximum size", "request_too_large"),
    "422": (422, "messages.0.role: unprocessable", "invalid_request_error"),
}


@pytest.mark.parametrize(("number", "message", "type"), FINAL.values(), ids=FINAL)
@MODES
@ROUTES
async def test_a_refusal_of_the_request_is_final(
    tmp_path: Path, format: str, stream: bool, number: int, message: str, type: str
) -> None:
    """What is wrong with the request itself is told at once, word for word; no other deployment is asked, and the one
    that refused stays the first."""
    async with world(tmp_path, [status(number, message, type)], []) as running:
        refused = await ask_for(running.url, format, stream)
        await ask_for(running.url, format)

        assert (400 if number == 422 else number, message) == (refused.status, refused.data["error"]["message"])
        assert [2, 0] == running.asked


@ROUTES
async def test_an_error_event_about_the_request_is_final(tmp_path: Path, format: str) -> None:
    """An error event counts as the status of its type, and that of a bad request moves nowhere."""
    async with world(tmp_path, [error_event("invalid_request_error")], []) as running:
        refused = await ask_for(running.url, format, True)

        assert (400, "their words") == (refused.status, refused.data["error"]["message"])
        assert [1, 0] == running.asked


LATER = {
    "a reset connection": CUT,
    "an error event": {"type": "error", "error": {"type": "overloaded_error", "message": "their words"}},
    "the end": None,
}


@pytest.mark.parametrize("fault", LATER.values(), ids=LATER)
@ROUTES
async def test_nothing_is_asked_again_after_the_first_event(tmp_path: Path, format: str, fault: Any) -> None:
    """What fails when the client has seen something ends in an error, and no other deployment repeats it."""
    events = [*BEGUN] if fault is None else [*BEGUN, 0.05, fault]
    async with world(tmp_path, [stream_reply(events)], []) as running:
        answer = await ask_for(running.url, format, True)

        assert ending_of(answer, format).startswith("broken: ")
        assert [1, 0] == running.asked


@ROUTES
async def test_our_ping_does_not_stand_in_the_way(tmp_path: Path, format: str) -> None:
    """Where the wait for the first event has already started the stream with a ping, failover goes on as before."""
    slow = Reply([0.2, *status(529).pieces], 529)
    async with world(tmp_path, [slow], [good(True)], ping_interval=0.05) as running:
        answer = await ask_for(running.url, format, True)

    assert answer.body.startswith((b": ping\n\n", b"event: ping\n"))
    assert "whole" == ending_of(answer, format)


@ROUTES
async def test_our_ping_makes_the_last_fault_an_error_in_the_stream(tmp_path: Path, format: str) -> None:
    """Where nothing is left after a ping, the error comes within the stream."""
    slow = Reply([0.2, *status(529).pieces], 529)
    async with world(tmp_path, [slow], [status(529)], ping_interval=0.05) as running:
        answer = await ask_for(running.url, format, True)

    assert ending_of(answer, format).startswith("broken: ")


async def test_the_third_is_asked_where_two_fail(tmp_path: Path) -> None:
    """All deployments are asked before the client hears of a fault."""
    async with world(tmp_path, [status(500)], [Reply([CUT])], []) as running:
        answer = await ask_for(running.url, "openai")

        assert 200 == answer.status
        assert [1, 1, 1] == running.asked


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (lambda: status(401, "invalid x-api-key"), "status 401"),
        (lambda: status(402), "status 402"),
        (lambda: status(403), "status 403"),
        (lambda: status(404), "status 404"),
        (lambda: status(400, CREDIT), "status 400"),
    ],
    ids=["a revoked key", "a bill", "a permission", "a wrong name", "no credit"],
)
async def test_what_the_operator_must_mend_is_an_alarm(tmp_path: Path, fault: Callable[[], Reply], cause: str) -> None:
    """A revoked key moves on like any fault, and the log says, as an error, where and what it was."""
    with capture_logs() as lines:
        async with world(tmp_path, [fault()], []) as running:
            answer = await ask_for(running.url, "messages")

    assert 200 == answer.status
    [alarm] = [line for line in lines if line["log_level"] == "error"]
    assert ("the upstream refuses the gateway itself", "first", "model-at-upstream-first", cause) == (
        alarm["event"],
        alarm["upstream"],
        alarm["deployment"],
        alarm["cause"],
    )
    assert ["second"] == [line["upstream"] for line in lines if line["event"] == "request"]


async def test_another_fault_is_a_warning(tmp_path: Path) -> None:
    """An overload is logged, and wakes nobody."""
    with capture_logs() as lines:
        async with world(tmp_path, [status(529)], []) as running:
            await ask_for(running.url, "messages")

    assert ["warning"] == [line["log_level"] for line in lines if line["event"] == "an upstream failed"]
    assert [] == [line for line in lines if line["log_level"] == "error"]


# What the client is told when nothing is left


class Told(NamedTuple):
    """The faults of both deployments, the status in OpenAI's format, that in the Messages format, and retry-after."""

    faults: tuple[Callable[[], Reply], ...]
    openai: int
    messages: int
    retry_after: str | None


TOLD = {
    "all are rate limits": Told((lambda: status(429), lambda: status(429)), 429, 429, "2"),
    "the shortest wait of all": Told(
        (lambda: status(429, retry_after="40"), lambda: status(429, retry_after="7")), 429, 429, "7"
    ),
    "at most a minute": Told(
        (lambda: status(429, retry_after="500"), lambda: status(429, retry_after="90")), 429, 429, "60"
    ),
    "whole seconds": Told((lambda: status(429, retry_after="1.2"), lambda: status(429)), 429, 429, "2"),
    "an overload": Told((lambda: status(500), lambda: status(529)), 503, 529, "2"),
    "an overload first": Told((lambda: status(529, retry_after="9"), lambda: status(500)), 503, 529, "9"),
    "503 is one": Told((lambda: status(503), lambda: Reply([CUT])), 503, 529, "2"),
    "an overload among rate limits": Told(
        (lambda: status(429, retry_after="3"), lambda: status(529, retry_after="9")), 503, 529, "9"
    ),
    "an overload before a time-out": Told((lambda: status(504), lambda: status(529)), 503, 529, "2"),
    "a time-out": Told((lambda: status(500), lambda: status(504)), 504, 504, None),
    "408 is one": Told((lambda: status(408), lambda: status(429)), 504, 504, None),
    "a rate limit and a failure": Told((lambda: status(429, retry_after="9"), lambda: status(500)), 500, 500, None),
    "a revoked key and a rate limit": Told((lambda: status(401), lambda: status(429)), 500, 500, None),
    "failures": Told((lambda: status(500), html), 500, 500, None),
    "revoked keys": Told((lambda: status(401), lambda: status(403)), 500, 500, None),
    "a single rate limit": Told((lambda: status(429, retry_after="7"),), 429, 429, "7"),
    "a single overload": Told((lambda: status(529, retry_after="500"),), 503, 529, "60"),
    "a single failure": Told((lambda: status(500),), 500, 500, None),
    "a single time-out": Told((lambda: status(408),), 504, 504, None),
    "a single reset": Told((lambda: Reply([CUT]),), 500, 500, None),
}


@pytest.mark.parametrize("told", TOLD.values(), ids=TOLD)
@MODES
async def test_what_a_client_is_told_when_nothing_is_left(tmp_path: Path, told: Told, stream: bool) -> None:
    """One status speaks for all faults, in each format's own words, with a wait that SDKs keep to."""
    for format, expected in (("openai", told.openai), ("messages", told.messages)):
        async with world(tmp_path, *([fault()] for fault in told.faults)) as running:
            answer = await ask_for(running.url, format, stream)

            assert (expected, told.retry_after) == (answer.status, answer.headers.get("retry-after"))
            assert [1] * len(told.faults) == running.asked


@ROUTES
async def test_time_outs_of_all_are_a_time_out(tmp_path: Path, format: str) -> None:
    """Where no deployment begins in time, the client is told so."""
    async with world(tmp_path, [Reply([FOREVER])], [Reply([FOREVER])], first_event_timeout=0.2) as running:
        answer = await ask_for(running.url, format, True)

        assert 504 == answer.status
        assert [1, 1] == running.asked


async def test_a_single_deployment_is_asked_every_time(tmp_path: Path) -> None:
    """With no other to go to, nothing cools down: each request is tried, and its fault told at once."""
    faults = [status(429, retry_after="60") for _ in range(3)]
    async with world(tmp_path, faults) as running:
        async with asyncio.timeout(PATIENCE):
            statuses = [(await ask_for(running.url, "messages")).status for _ in range(4)]

        assert [429, 429, 429, 200] == statuses
        assert [4] == running.asked


# Cooling down


async def test_a_deployment_that_failed_is_not_asked_for_a_while(tmp_path: Path) -> None:
    """After a rate limit the conversation stays with the other deployment, and asks the first one not even once."""
    async with world(tmp_path, [status(429, retry_after="30")], []) as running:
        for _ in range(5):
            assert 200 == (await ask_for(running.url, "messages")).status

        assert [1, 5] == running.asked


async def test_cooling_ones_are_tried_where_no_healthy_one_is_left(tmp_path: Path) -> None:
    """When all have failed, the next request doesn't wait for any of them to cool down."""
    async with world(tmp_path, [status(500)], [status(429, retry_after="60")]) as running:
        statuses = [(await ask_for(running.url, "messages")).status for _ in range(2)]

        assert [500, 200] == statuses
        assert [2, 1] == running.asked


async def test_one_probe_of_twenty_parallel_requests(tmp_path: Path) -> None:
    """When a deployment has cooled down, one request finds out whether it answers; the others don't wait for it."""
    async with world(tmp_path, [status(500), Reply([2.0, *message_reply().pieces])], []) as running:
        await ask_for(running.url, "messages")
        await asyncio.sleep(1.05)  # a second of cooling, by the gateway's own clock

        answers = await asyncio.gather(*(ask_for(running.url, "messages") for _ in range(20)))
        parallel = running.asked
        await ask_for(running.url, "messages")

        assert [200] * 20 == [answer.status for answer in answers]
        assert [2, 20] == parallel
        assert [3, 20] == running.asked, "and it is the first one again"


async def test_failures_at_the_same_time_cost_one_second(tmp_path: Path) -> None:
    """A burst of failures is one failure: the deployment is tried again after a second."""
    burst = [Reply([1.0, *status(500).pieces], 500) for _ in range(8)]
    async with world(tmp_path, burst, []) as running:
        await asyncio.gather(*(ask_for(running.url, "messages") for _ in range(8)))
        await asyncio.sleep(1.05)  # a second of cooling, by the gateway's own clock
        await ask_for(running.url, "messages")

        assert [9, 8] == running.asked


@MODES
async def test_a_client_that_leaves_tells_nothing_about_a_deployment(tmp_path: Path, stream: bool) -> None:
    """However many clients leave while they wait, the deployment stays the first, and its requests are ended."""
    async with world(tmp_path, [Reply([FOREVER]) for _ in range(3)], []) as running:
        for number in range(3):
            async with leaving(running.url, stream):
                await until(lambda number=number: running.asked[0] == number + 1)  # type: ignore[misc]
            await released(running.upstreams[0])

        assert 200 == (await ask_for(running.url, "messages")).status
        assert [4, 0] == running.asked


async def test_a_probe_that_its_client_left_is_followed_by_another(tmp_path: Path) -> None:
    """A client that leaves the probe tells nothing: the next request finds out whether the deployment answers."""
    async with world(tmp_path, [status(500), Reply([FOREVER])], []) as running:
        await ask_for(running.url, "messages")
        await asyncio.sleep(1.05)  # a second of cooling, by the gateway's own clock
        async with leaving(running.url, False):
            await until(lambda: running.asked == [2, 1])
        await released(running.upstreams[0])

        assert 200 == (await ask_for(running.url, "messages")).status
        assert [3, 1] == running.asked


@asynccontextmanager
async def leaving(url: str, stream: bool) -> AsyncIterator[None]:
    """A client that waits for an answer, and leaves at the end of the block."""

    async def wait(session: aiohttp.ClientSession) -> None:
        async with session.post(url + PATHS["messages"], json=request_of(stream)) as answer:
            await answer.read()

    async with client() as session:
        waiting = asyncio.create_task(wait(session))
        try:
            yield
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


@MODES
async def test_a_full_deployment_is_passed_over(tmp_path: Path, stream: bool) -> None:
    """A full deployment is passed over without harm, and asked again when there is room."""
    held = stream_reply([*BEGUN, FOREVER]) if stream else Reply([FOREVER])
    async with world(tmp_path, [held], [], options={"first": {"max_parallel": 1}}) as running:
        async with leaving(running.url, stream):
            await until(lambda: running.asked[0] == 1)
            while_full = (await ask_for(running.url, "messages")).status
            asked_while_full = running.asked
        await released(running.upstreams[0])
        await until_free(running)

        assert (200, [1, 1]) == (while_full, asked_while_full)


async def until_free(running: World) -> None:
    """Wait until the first deployment is asked again."""
    async with asyncio.timeout(PATIENCE):
        before = running.asked[0]
        while running.asked[0] == before:
            await ask_for(running.url, "messages")


@ROUTES
async def test_where_all_are_full_the_client_is_told_to_wait(tmp_path: Path, format: str) -> None:
    """With no room anywhere, that is an overload, with the time after which to try again."""
    full = {name: {"max_parallel": 1} for name in NAMES}
    async with world(tmp_path, [Reply([FOREVER])], [Reply([FOREVER])], options=full) as running:
        async with leaving(running.url, False), leaving(running.url, False):
            await until(lambda: running.asked == [1, 1])
            answer = await ask_for(running.url, format)

        assert (503 if format == "openai" else 529, "1") == (answer.status, answer.headers["retry-after"])

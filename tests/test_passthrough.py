"""A native request reaches the upstream as the client sent it, but for the model's name.

Through real gateways, one without plugins and one whose plugin reads everything, and one upstream behind both.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any, ClassVar, NamedTuple

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from structlog.testing import capture_logs

from proxy.exchange import Exchange
from proxy.plugin import Plugin, Route, Sees
from proxy.testing import Received, ScriptedUpstream, running_gateway
from tests.strategies import Body, bodies

AT_UPSTREAM = b'"model-at-upstream"'


class Reader(Plugin):
    """Reads every value of a request, and what it is made of."""

    name: ClassVar[str] = "reader"
    sees: ClassVar[Sees] = "messages"
    routes: ClassVar[frozenset[Route]] = frozenset({Route.MESSAGES, Route.COUNT_TOKENS})

    async def on_request(self, exchange: Exchange) -> None:
        assert _read(exchange.body) == _read(exchange.client_body)


def _read(value: Any) -> int:
    """How many values there are, each of which has been looked at."""
    waiting, count = [value], 0
    while waiting:
        each = waiting.pop()
        count += 1
        if isinstance(each, dict):
            waiting += [*each, *each.values()]
        elif isinstance(each, list):
            waiting += each
        else:
            hash(each)
    return count


class World(NamedTuple):
    """The gateways by what reads in them, their upstream and a client."""

    runner: asyncio.Runner
    urls: dict[str, str]
    upstream: ScriptedUpstream
    session: aiohttp.ClientSession

    def send(self, gateway: str, body: bytes, path: str = "/v1/messages", **headers: str) -> tuple[int, list[Received]]:
        """The status of the answer, and what reached the upstream."""
        return self.runner.run(self._send(self.urls[gateway] + path, body, headers))

    async def _send(self, url: str, body: bytes, headers: dict[str, str]) -> tuple[int, list[Received]]:
        self.upstream.received.clear()
        async with self.session.post(url, data=body, headers=headers) as answer:
            await answer.read()
            return answer.status, list(self.upstream.received)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One world for all examples: hypothesis calls a plain function, so the loop is run around each request."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        stack = AsyncExitStack()

        async def started() -> World:
            upstream = await stack.enter_async_context(ScriptedUpstream())
            two = [{"upstream": "test", "model": "model-at-upstream", "weight": weight} for weight in (1, 2)]
            urls = {
                "plain": await stack.enter_async_context(running_gateway([], upstream=upstream.url)),
                "read": await stack.enter_async_context(running_gateway([Reader], upstream=upstream.url)),
                "with a choice": await stack.enter_async_context(
                    running_gateway([], upstream=upstream.url, model={"deployments": two})
                ),
            }
            session = await stack.enter_async_context(aiohttp.ClientSession())
            return World(runner, urls, upstream, session)

        with capture_logs():  # the default log would print every value of what failed, thousands of levels deep
            yield runner.run(started())
            runner.run(stack.aclose())


class Writer:
    """Writes native requests at random: a thousand of them are drawn in a second, which hypothesis doesn't do."""

    _KEYS = ('"a"', r'"\u0061"', '"b"', '"type"', '"é"', r'"\ud800"', '""', '"cache_control"', '"Model"')
    _LITERALS = ("true", "false", "null", "[]", "{ }", '""')
    _NUMBERS = (
        "1.10",
        "1E5",
        "-0",
        "-0.0",
        "0e0",
        "1e400",
        "1e-07",
        "1" + "0" * 30,
        "-" + "7" * 4400,
        "18446744073709551616",
    )
    _LETTERS = (
        "a",
        "Z",
        "é",
        "\u2028",
        "😀",
        "\x7f",
        "/",
        r"\/",
        r"\"",
        r"\\",
        r"\n",
        r"\u0000",
        r"\u00E9",
        r"\ud83d\uDE00",
        r"\ud800",
        r"\udc00",
        r"\\ud800",
    )
    _SPACES = ("", "", "", " ", "\n", "\t", "\r\n  ")
    _NAMES = ('"test/model"', '"MODEL"', '" model "', r'"test\/model"', r'"\u006dodel"')

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def body(self) -> Body:
        pick = self._random.choice
        members = [f"{pick(self._KEYS)}{self._space()}:{self._space()}{self._value(3)}" for _ in range(pick(range(6)))]
        members.append(f'"max_tokens":{pick(("1", "64.0", "1E3", "4096"))}')
        messages = pick(('"messages"', r'"mess\u0061ges"'))
        members.append(f"{messages}:[{self._space()}{self._value(4)}]")
        self._random.shuffle(members)
        place = self._random.randrange(len(members) + 1)
        before = "".join(f"{member}{self._space()},{self._space()}" for member in members[:place])
        behind = "".join(f"{self._space()},{self._space()}{member}" for member in members[place:])
        key = pick(('"model"', r'"mod\u0065l"'))
        head = f"{self._space()}{{{self._space()}{before}{key}{self._space()}:{self._space()}"
        tail = f"{self._space()}{behind}{self._space()}}}{self._space()}"
        return Body(head.encode(), pick(self._NAMES).encode(), tail.encode())

    def _space(self) -> str:
        return self._random.choice(self._SPACES)

    def _value(self, levels: int) -> str:
        pick = self._random.choice
        kind = self._random.randrange(5 if levels else 3)
        if kind == 0:
            return pick(self._LITERALS)
        if kind == 1:
            return pick((*self._NUMBERS, str(self._random.getrandbits(80)), repr(self._random.gauss(0, 1e9))))
        if kind == 2:
            return '"' + "".join(pick(self._LETTERS) for _ in range(pick(range(12)))) + '"'
        items = [self._space() + self._value(levels - 1) + self._space() for _ in range(pick(range(1, 4)))]
        if kind == 3:
            return f"[{','.join(items)}]"
        return "{" + ",".join(f"{self._space()}{pick(self._KEYS)}{self._space()}:{item}" for item in items) + "}"


@pytest.mark.parametrize("gateway", ["plain", "read"])
def test_a_thousand_native_requests_arrive_as_they_were_sent(world: World, gateway: str) -> None:
    """Numbers, escapes, surrogates, doubled unknown fields, white space and order arrive to the byte, whoever reads
    them on the way."""
    for seed in range(1000):
        body = Writer(seed).body()

        status, received = world.send(gateway, body.sent)

        assert 200 == status, f"seed {seed}: {body}"
        assert [body.with_name(AT_UPSTREAM)] == [each.body for each in received], f"seed {seed}: {body}"


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(bodies())
@pytest.mark.parametrize("gateway", ["plain", "read", "with a choice"])
def test_any_native_request_arrives_as_it_was_sent(world: World, gateway: str, body: Body) -> None:
    """The same holds where tokens are counted and where a deployment is to be chosen, and hypothesis finds the
    smallest request for which it doesn't."""
    for path in ("/v1/messages/count_tokens", "/v1/messages"):
        _, received = world.send(gateway, body.sent, path)

        assert [(path, body.with_name(AT_UPSTREAM))] == [(each.path, each.body) for each in received][:1]


def nested(levels: int) -> bytes:
    """A request whose first message and a tool's schema are so deep."""
    deep = b'{"a":[' * (levels // 2) + b"1.10" + b"]}" * (levels // 2)
    return b'{"model":%b,"max_tokens":1,"messages":[{"role":"user","content":%b}],"tools":[{"input_schema":%b}]}' % (
        b"%b",
        deep,
        deep,
    )


@pytest.mark.parametrize("levels", [190, 260, 400, 600, 800, 2000, 100_000])
@pytest.mark.parametrize("gateway", ["plain", "read", "with a choice"])
def test_a_deep_request_arrives_or_is_refused(world: World, gateway: str, levels: int) -> None:
    """However deep a request is, it arrives as it was sent or is a 400, never a failure of the gateway; 190 levels
    arrive in any case."""
    status, received = world.send(gateway, nested(levels) % b'"model"')

    assert status in ((200,) if levels <= 190 else (200, 400))
    assert ([nested(levels) % AT_UPSTREAM] if status == 200 else []) == [each.body for each in received]


def test_headers_are_the_gateways_own(world: World) -> None:
    """Of the client's headers only anthropic-beta goes on; address, version and key are the gateway's."""
    sent = {
        "anthropic-beta": "a-2026,b-2026",
        "anthropic-version": "2026-10-21",
        "authorization": "Bearer sk-ant-mine",
        "x-api-key": "sk-ant-mine",
        "cookie": "a=b",
        "user-agent": "mine",
        "referer": "mine",
        "origin": "mine",
        "x-forwarded-for": "mine",
        "forwarded": "for=mine",
        "via": "mine",
        "traceparent": "mine",
        "x-request-id": "mine",
        "anthropic-dangerous-direct-browser-access": "true",
        "x-amz-date": "mine",
    }
    body = Body(b'{"model":', b'"model"', b',"max_tokens":1,"messages":[{"role":"user","content":"Hi"}]}')

    _, [received] = world.send("plain", body.sent, "/v1/messages?beta=true", **sent)

    headers = dict(received.headers)
    assert headers.pop("host") in world.upstream.url
    assert headers.pop("user-agent").startswith("ezat-router/")
    assert str(len(received.body)) == headers.pop("content-length")
    assert {"accept": "*/*"} | headers == {
        "accept": "*/*",
        "accept-encoding": "identity",
        "anthropic-beta": "a-2026,b-2026",
        "anthropic-version": "2023-06-01",
        "content-type": "application/json",
        "x-api-key": "upstream-secret",
    }
    assert "/v1/messages" == received.path

"""A native request reaches the upstream as the client sent it, but for the model's name.

Through real gateways, one without plugins and one whose plugin reads everything, and one upstream behind both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any, ClassVar, NamedTuple

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings

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

        yield runner.run(started())
        runner.run(stack.aclose())


@settings(max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
@given(bodies())
def test_a_native_request_arrives_as_it_was_sent(world: World, body: Body) -> None:
    """Numbers, escapes, surrogates, doubled unknown fields, white space and order arrive to the byte, whoever reads
    them on the way."""
    for gateway in ("plain", "read"):
        status, received = world.send(gateway, body.sent)

        assert 200 == status
        assert [body.with_name(AT_UPSTREAM)] == [each.body for each in received]


@settings(max_examples=50)
@given(bodies())
@pytest.mark.parametrize("gateway", ["plain", "with a choice"])
def test_a_request_that_is_counted_or_sent_to_one_of_several_arrives_alike(
    world: World, gateway: str, body: Body
) -> None:
    """Counting tokens and choosing a deployment read no more than they must, and change nothing."""
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

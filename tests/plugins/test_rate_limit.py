"""How often a key and its organization may ask, how much, and how much at once."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from plugins.auth import Auth
from plugins.chat_completions import ChatCompletions
from plugins.rate_limit import RateLimit
from proxy.errors import GatewayError, Kind
from proxy.estimate import input_tokens
from proxy.exchange import Exchange, Key, Limits
from proxy.limits import open_limiter
from proxy.models import ModelTable
from proxy.plugin import Route, Services
from proxy.store.store import Store
from proxy.testing import MODEL, PluginInList, Reply, ScriptedUpstream, make_exchange, message_reply, running_gateway

Json = dict[str, Any]
MODELS = ModelTable([MODEL])
NONE = Limits()


async def plugin_of(url: str = "memory") -> RateLimit:
    """The plugin with a limiter of its own; nothing else is lent to it."""
    plugin = RateLimit(RateLimit.Settings())
    nothing: Any = None
    await plugin.start(Services(MODELS, open_limiter(url), Store("sqlite:///:memory:"), nothing))
    return plugin


@pytest.fixture
async def plugin() -> RateLimit:
    return await plugin_of()


def key_of(id: str = "k", organization: str | None = None, of_all: Limits = NONE, **limits: int) -> Key:
    return Key(id, id, organization, limits=Limits(**limits), organization_limits=of_all)


def exchange_of(key: Key | None, route: Route = Route.MESSAGES) -> Exchange:
    exchange = Exchange(route, CIMultiDictProxy(CIMultiDict()), MODELS)
    exchange.key = key
    return exchange


async def refusal_of(plugin: RateLimit, exchange: Exchange) -> GatewayError | None:
    try:
        await plugin.on_headers(exchange)
    except GatewayError as error:
        return error
    return None


async def passed(plugin: RateLimit, *keys: Key | None, route: Route = Route.MESSAGES) -> list[bool]:
    """Which of these requests come in, one after the other."""
    return [await refusal_of(plugin, exchange_of(key, route)) is None for key in keys]


async def test_a_limit_is_exact_in_parallel(plugin: RateLimit) -> None:
    """Of 200 requests at once exactly as many come in as are allowed, and the others are told how long to wait."""
    key = key_of(requests_per_minute=10)

    refusals = await asyncio.gather(*(refusal_of(plugin, exchange_of(key)) for _ in range(200)))

    refused = [refusal for refusal in refusals if refusal is not None]
    assert 190 == len(refused)
    assert {Kind.RATE_LIMIT} == {refusal.kind for refusal in refused}
    assert all(type(refusal.retry_after) is int and 1 <= refusal.retry_after <= 60 for refusal in refused)
    [words] = {re.sub(r"in \d+ s$", "in … s", refusal.message) for refusal in refused}
    assert "at most 10 requests a minute are allowed here; try again in … s" == words


async def test_keys_count_for_themselves(plugin: RateLimit) -> None:
    """One key's requests are none of another's, and who has no limit has none."""
    a, b = key_of("a", requests_per_minute=1), key_of("b", requests_per_minute=2)

    assert [True, True, True, False, False] == await passed(plugin, a, b, b, b, a)
    assert [True] * 100 == await passed(plugin, *[key_of("free")] * 50, *[None] * 50)


async def test_an_organizations_limit_is_for_all_its_keys(plugin: RateLimit) -> None:
    """Keys of one organization share its limit, whatever their own is; another of its name is another."""
    of_all = Limits(requests_per_minute=3)
    a, b = (key_of(id, "acme", of_all, requests_per_minute=2) for id in "ab")

    assert [True, True, False, True, False] == await passed(plugin, a, a, a, b, b)
    assert [True] == await passed(plugin, key_of("acme", requests_per_minute=1))


ROUTES = {
    "messages, chat and the model lists": ([Route.MESSAGES, Route.CHAT_COMPLETIONS, Route.MODELS], [True, True, False]),
    "counting tokens": ([Route.COUNT_TOKENS] * 3, [True, True, False]),
    "counting tokens beside them": (
        [Route.COUNT_TOKENS, Route.MESSAGES, Route.COUNT_TOKENS, Route.MESSAGES, Route.MESSAGES, Route.COUNT_TOKENS],
        [True, True, True, True, False, False],
    ),
}


@pytest.mark.parametrize(("routes", "expected"), ROUTES.values(), ids=ROUTES)
async def test_what_counts_as_a_request(plugin: RateLimit, routes: list[Route], expected: list[bool]) -> None:
    """Every route counts; counting tokens has a window of its own."""
    key = key_of(requests_per_minute=2)

    assert expected == [(await passed(plugin, key, route=route))[0] for route in routes]


async def test_what_is_left_stands_in_the_headers(plugin: RateLimit) -> None:
    """Both formats' headers say what is left, of the key's and the organization's window the smaller one."""
    key = key_of("a", "acme", Limits(requests_per_minute=100), requests_per_minute=3)
    exchange = exchange_of(key)

    await plugin.on_headers(exchange)

    headers = exchange.answer_headers
    assert re.fullmatch(r"\d{1,2}s", headers.pop("x-ratelimit-reset-requests"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", headers.pop("anthropic-ratelimit-requests-reset"))
    assert {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "2",
        "anthropic-ratelimit-requests-limit": "3",
        "anthropic-ratelimit-requests-remaining": "2",
    } == headers


async def test_a_refusal_says_what_is_left_as_well(plugin: RateLimit) -> None:
    """Who is refused reads that nothing is left; who has no limits reads nothing."""
    key = key_of(requests_per_minute=1)
    await passed(plugin, key)
    refused, free = exchange_of(key), exchange_of(key_of("free"))

    await refusal_of(plugin, refused)
    await plugin.on_headers(free)

    assert "0" == refused.answer_headers["x-ratelimit-remaining-requests"]
    assert {} == free.answer_headers


# Tokens


def asking(key: Key, size: int, route: Route = Route.MESSAGES) -> Exchange:
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "x" * size}]}
    return make_exchange(body, route=route, key=key)


async def token_refusal_of(plugin: RateLimit, exchange: Exchange) -> GatewayError | None:
    try:
        await plugin.on_send(exchange)
    except GatewayError as error:
        return error
    return None


async def test_tokens_are_counted_by_estimate(plugin: RateLimit) -> None:
    """Requests come in while their estimated tokens are within the limit; then they are told how long to wait."""
    estimate = input_tokens(asking(key_of(), 4000).body)
    key = key_of(input_tokens_per_minute=2 * estimate + 10)

    refusals = [await token_refusal_of(plugin, asking(key, 4000)) for _ in range(3)]

    assert [None, None] == refusals[:2]
    assert refusals[2] is not None
    assert Kind.RATE_LIMIT is refusals[2].kind
    assert 1 <= (refusals[2].retry_after or 0) <= 120  # what this minute counted weighs on the next one, too
    assert await token_refusal_of(plugin, asking(key, 1, Route.COUNT_TOKENS)) is None


async def test_a_request_above_the_whole_limit_may_come_first(plugin: RateLimit) -> None:
    """A request of more tokens than a minute has takes the whole minute, so that it isn't refused for ever."""
    key = key_of(input_tokens_per_minute=10)

    assert await token_refusal_of(plugin, asking(key, 4000)) is None
    assert await token_refusal_of(plugin, asking(key, 1)) is not None


async def test_what_is_left_of_the_tokens_stands_in_the_headers(plugin: RateLimit) -> None:
    """Both formats have names for input tokens, too."""
    exchange = asking(key_of(input_tokens_per_minute=1_000_000), 4000)

    await plugin.on_send(exchange)

    left = str(1_000_000 - input_tokens(exchange.body))
    assert left == exchange.answer_headers["x-ratelimit-remaining-tokens"]
    assert left == exchange.answer_headers["anthropic-ratelimit-input-tokens-remaining"]


# Parallel requests


def end(exchange: Exchange) -> None:
    for undo in exchange.take_defers():
        undo()


async def test_places_are_taken_and_given_back(plugin: RateLimit) -> None:
    """As many requests run at once as may; a place is free again when its request is over, and only once."""
    key = key_of(parallel_requests=2)
    first, second, third = (exchange_of(key) for _ in range(3))

    assert [True, True] == [await refusal_of(plugin, each) is None for each in (first, second)]
    refusal = await refusal_of(plugin, third)
    end(third)
    assert refusal is not None
    assert (Kind.RATE_LIMIT, 1) == (refusal.kind, refusal.retry_after)

    end(first)
    end(first)
    assert [True, False] == await passed(plugin, key, key)


async def test_a_refusal_for_the_organization_gives_the_keys_place_back(plugin: RateLimit) -> None:
    """Who is refused for one limit holds nothing of another."""
    of_all = Limits(parallel_requests=1)
    running, refused = (
        exchange_of(key_of("a", "acme", of_all)),
        exchange_of(key_of("b", "acme", of_all, parallel_requests=1)),
    )
    assert await refusal_of(plugin, running) is None
    assert await refusal_of(plugin, refused) is not None

    end(refused)
    end(running)

    assert [True] == await passed(plugin, key_of("b", "acme", of_all, parallel_requests=1))


async def test_places_are_exact_in_parallel(plugin: RateLimit) -> None:
    """Of 50 requests at once five run, and all places come back."""
    key = key_of(parallel_requests=5)
    exchanges = [exchange_of(key) for _ in range(50)]

    refusals = await asyncio.gather(*(refusal_of(plugin, exchange) for exchange in exchanges))
    for exchange in exchanges:
        end(exchange)

    assert 5 == refusals.count(None)
    assert [True] * 5 + [False] == await passed(plugin, *[key] * 6)


# A limiter that is down


@pytest.fixture
async def without_redis() -> AsyncIterator[RateLimit]:
    with socket.socket() as closed:  # bound, but nobody listens
        closed.bind(("127.0.0.1", 0))
        plugin = await plugin_of(f"redis://127.0.0.1:{closed.getsockname()[1]}")
        yield plugin
        await plugin._limiter.close()


LIMITED: dict[str, tuple[Key, Callable[[RateLimit, Exchange], Any]]] = {
    "requests": (key_of(requests_per_minute=1), refusal_of),
    "parallel requests": (key_of(parallel_requests=1), refusal_of),
    "tokens": (key_of(input_tokens_per_minute=1), token_refusal_of),
}


@pytest.mark.parametrize(("key", "ask"), LIMITED.values(), ids=LIMITED)
async def test_a_limiter_that_is_down(without_redis: RateLimit, key: Key, ask: Callable[..., Any]) -> None:
    """What can't be counted is refused with a 503; who has no limits is served."""
    refusal = await ask(without_redis, asking(key, 1))

    assert refusal is not None
    assert (Kind.UNAVAILABLE, 5) == (refusal.kind, refusal.retry_after)
    assert await ask(without_redis, asking(key_of(), 1)) is None


# Through the gateway

GOOD = {"model": "model", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}


def plugins_for(**limits: int) -> list[PluginInList]:
    keys = [{"name": "alice", "key": "ezat_sk_alice", **limits}, {"name": "bob", "key": "ezat_sk_bob"}]
    return [(Auth, {"keys": keys}), RateLimit, ChatCompletions]


REQUESTS: dict[str, tuple[str, str, Any, bool]] = {
    "answered": ("POST", "/v1/messages", GOOD, True),
    "refused for its body": ("POST", "/openai/v1/chat/completions", {"model": "model"}, True),
    "refused for its model": ("POST", "/v1/messages", {"model": "gpt-9"}, True),
    "a list of models": ("GET", "/v1/models", None, True),
    "a model": ("GET", "/openai/v1/models/model", None, True),
    "an unknown path": ("POST", "/v1/nothing", GOOD, False),
    "another method": ("GET", "/v1/messages", None, False),
    "a page without a key": ("GET", "/api/models", None, False),
}


@pytest.mark.parametrize(("method", "path", "body", "counts"), REQUESTS.values(), ids=REQUESTS)
async def test_what_counts_for_the_limit(method: str, path: str, body: Any, counts: bool) -> None:
    """A request counts as soon as its key is known, whatever comes of it; the next one is a 429 with the seconds to
    wait."""
    headers = {"x-api-key": "ezat_sk_alice"}
    async with (
        running_gateway(plugins_for(requests_per_minute=1)) as url,
        aiohttp.ClientSession(headers=headers) as session,
    ):
        async with session.request(method, url + path, json=body) as first:
            assert 429 != first.status
        async with session.post(f"{url}/v1/messages", json=GOOD) as second:
            status, wait = second.status, second.headers.get("retry-after")

    assert (429 if counts else 200) == status
    if counts:
        assert re.fullmatch(r"[1-9]|[1-5]\d|60", wait or "")


async def test_who_is_not_let_in_counts_for_nobody() -> None:
    """Requests without a key, or with a wrong one, take nothing from anybody's limit."""
    async with running_gateway(plugins_for(requests_per_minute=1)) as url, aiohttp.ClientSession() as session:
        for key in ("ezat_sk_wrong", "", "ezat_sk_bob"):
            async with session.post(f"{url}/v1/messages", json=GOOD, headers={"x-api-key": key}) as answer:
                assert (200 if key == "ezat_sk_bob" else 401) == answer.status
        async with session.post(f"{url}/v1/messages", json=GOOD, headers={"x-api-key": "ezat_sk_alice"}) as answer:
            assert 200 == answer.status


ENDINGS: dict[str, Callable[[], Reply]] = {
    "answered": message_reply,
    "failed": lambda: Reply([b"{}"], status=500),
    "refused by the provider": lambda: Reply([b"{}"], status=400),
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
async def test_a_place_comes_back_on_every_path(ending: Callable[[], Reply]) -> None:
    """However a request ends, its place is free for the next one."""
    async with (
        ScriptedUpstream(ending(), ending()) as upstream,
        running_gateway(plugins_for(parallel_requests=1), upstream=upstream.url) as url,
        aiohttp.ClientSession(headers={"x-api-key": "ezat_sk_alice"}) as session,
    ):
        for _ in range(3):
            async with session.post(f"{url}/v1/messages", json=GOOD) as answer:
                assert 429 != answer.status


async def test_a_client_that_leaves_gives_its_place_back() -> None:
    """A place isn't kept for somebody who has gone."""
    async with (
        ScriptedUpstream(Reply([60.0])) as upstream,
        running_gateway(plugins_for(parallel_requests=1), upstream=upstream.url) as url,
        aiohttp.ClientSession(headers={"x-api-key": "ezat_sk_alice"}) as session,
    ):
        leaving = asyncio.create_task(session.post(f"{url}/v1/messages", json=GOOD))
        while not upstream.received:  # noqa: ASYNC110 - the upstream has no event for an arrival
            await asyncio.sleep(0.005)
        leaving.cancel()
        await asyncio.wait_for(upstream.left.wait(), 5)

        async with session.post(f"{url}/v1/messages", json=GOOD) as answer:
            assert 200 == answer.status

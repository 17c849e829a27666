"""What may stand between the gateway and its clients: browsers of other origins, reverse proxies, a path of theirs."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson
import pytest
from structlog.testing import capture_logs

from plugins.auth import Auth
from plugins.chat_completions import ChatCompletions
from proxy.testing import PluginInList, running_gateway
from tests.contract_plugins import (
    BOTH_ROUTES,
    PATIENCE,
    PLAIN_AND_STREAMED,
    ask_for,
    ending_of,
    request_of,
)

REPOSITORY = Path(__file__).parents[1]
KEY = "ezat_sk_edge"
BEARER = {"authorization": f"Bearer {KEY}"}
WITH_KEY: list[PluginInList] = [(Auth, {"keys": [{"name": "edge", "key": KEY}]}), ChatCompletions]
ROUTES = pytest.mark.parametrize("format", BOTH_ROUTES)
MODES = pytest.mark.parametrize("stream", PLAIN_AND_STREAMED.values(), ids=PLAIN_AND_STREAMED)
EVERY_PATH = (
    *("/", "/healthz", "/readyz", "/api/models", "/api/compat", "/openapi.yaml"),
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/models", "/v1/models/test/model"),
    *("/openai/v1/chat/completions", "/openai/v1/models", "/openai/v1/models/test/model"),
)


@asynccontextmanager
async def gateway(*plugins: PluginInList, upstream: str = "demo", **server: Any) -> AsyncIterator[str]:
    async with running_gateway(plugins or [ChatCompletions], upstream=upstream, server=server) as url:
        yield url


class Answered(NamedTuple):
    """An answer that has been read; its headers go by their names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


async def send(
    method: str, url: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
) -> Answered:
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.request(method, url, json=body, headers=headers) as answer,
    ):
        got = {name.lower(): value for name, value in answer.headers.items()}
        return Answered(answer.status, got, await answer.read())


# Browsers of other origins

HOME = "https://chat.example.org"
FROM_HOME = {"origin": HOME}
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


def of_cors(answer: Answered) -> set[str]:
    return {name for name in answer.headers if name.startswith("access-control-")}


@pytest.mark.parametrize("path", EVERY_PATH)
async def test_cors_is_off_unless_an_origin_is_named(path: str) -> None:
    """Without the setting a browser is told nothing, and OPTIONS is a method like any other."""
    async with gateway() as url:
        asked = await send("OPTIONS", url + path, headers={**FROM_HOME, **ASKS})
        got = await send("GET", url + path, headers=FROM_HOME)

    assert (405, set(), set()) == (asked.status, of_cors(asked), of_cors(got))


# the setting, the origin that asks, the origin that is allowed
ORIGINS: dict[str, tuple[Sequence[str], str, str | None]] = {
    "one that is named": ([HOME], HOME, HOME),
    "the second of two": (["https://a.example", HOME], HOME, HOME),
    "any": (["*"], HOME, "*"),
    "a page of no origin, where any may": (["*"], "null", "*"),
    "another": ([HOME], "https://evil.example", None),
    "another port": ([HOME], f"{HOME}:8443", None),
    "another scheme": ([HOME], "http://chat.example.org", None),
    "a longer name": ([HOME], f"{HOME}.evil.example", None),
    "a part of the name": ([HOME], "https://example.org", None),
    "a page of no origin": ([HOME], "null", None),
}


@pytest.mark.parametrize(("origins", "origin", "allowed"), ORIGINS.values(), ids=ORIGINS)
async def test_an_origin_is_allowed_or_not(origins: Sequence[str], origin: str, allowed: str | None) -> None:
    """Only a named origin may read an answer or send a request; another's preflight names nobody."""
    async with gateway(cors_origins=origins) as url:
        asked = await send("OPTIONS", f"{url}/v1/messages", headers={"origin": origin, **ASKS})
        got = await send("GET", f"{url}/api/models", headers={"origin": origin})

    assert (204, 200) == (asked.status, got.status)
    for answer in (asked, got):
        assert allowed == answer.headers.get("access-control-allow-origin")
        assert "origin" == answer.headers["vary"].lower()


@pytest.mark.parametrize("path", EVERY_PATH)
async def test_a_preflight_is_answered_on_every_path(path: str) -> None:
    """Before the key is judged, a browser is told what it may send: everything that an SDK in it sends."""
    async with gateway(*WITH_KEY, cors_origins=[HOME]) as url:
        asked = await send("OPTIONS", url + path, headers={**FROM_HOME, **ASKS})

    assert (204, b"") == (asked.status, asked.body)
    assert {"GET", "HEAD", "POST"} <= set(asked.headers["access-control-allow-methods"].split(", "))
    assert "authorization,content-type" == asked.headers["access-control-allow-headers"]
    assert int(asked.headers["access-control-max-age"]) > 0


async def test_a_preflight_has_its_ids() -> None:
    """Both id headers are on every answer, on this one too."""
    async with gateway(cors_origins=[HOME]) as url:
        asked = await send("OPTIONS", f"{url}/v1/messages", headers={**FROM_HOME, **ASKS, "x-request-id": "mine"})

    assert "mine" == asked.headers["x-request-id"]
    assert asked.headers["request-id"]


async def test_options_without_a_browser_s_question_is_a_method_like_any_other() -> None:
    """Only a preflight is answered as one."""
    async with gateway(cors_origins=["*"]) as url:
        asked = await send("OPTIONS", f"{url}/v1/messages", headers=FROM_HOME)

    assert (405, "POST") == (asked.status, asked.headers["allow"])


async def test_a_request_without_an_origin_is_told_nothing() -> None:
    """Whoever is no browser gets the headers that it always got."""
    async with gateway(cors_origins=["*"]) as url:
        got = await send("GET", f"{url}/api/models")

    assert set() == of_cors(got)


# an answer of each kind
ANSWERS: dict[str, Callable[[str], Awaitable[Answered]]] = {
    "a plain answer": lambda url: ask(url, request_of(False)),
    "a stream": lambda url: ask(url, request_of(True)),
    "a stream that fails": lambda url: ask(
        url, request_of(True, messages=[{"role": "user", "content": "fault error"}])
    ),
    "a fault of the upstream": lambda url: ask(
        url, request_of(False, messages=[{"role": "user", "content": "fault 529"}])
    ),
    "a refused field": lambda url: ask(url, {"model": "model"}),
    "no JSON": lambda url: send("POST", f"{url}/v1/messages", headers={**FROM_HOME, **BEARER}),
    "a wrong key": lambda url: send("POST", f"{url}/v1/messages", {}, {**FROM_HOME, "authorization": "Bearer x"}),
    "an unknown model": lambda url: ask(url, {"model": "gpt-9"}),
    "an unknown path": lambda url: send("POST", f"{url}/v2/messages", {}, FROM_HOME),
    "another method": lambda url: send("PUT", f"{url}/v1/messages", {}, FROM_HOME),
    "a list of models": lambda url: send("GET", f"{url}/v1/models", headers={**FROM_HOME, "x-api-key": KEY}),
    "a list without a key": lambda url: send("GET", f"{url}/openai/v1/models", headers=FROM_HOME),
    "a page": lambda url: send("GET", f"{url}/api/compat", headers=FROM_HOME),
    "the description": lambda url: send("GET", f"{url}/openapi.yaml", headers=FROM_HOME),
}


async def ask(url: str, body: Mapping[str, Any]) -> Answered:
    return await send("POST", f"{url}/openai/v1/chat/completions", body, {**FROM_HOME, **BEARER})


@pytest.mark.parametrize("answer_of", ANSWERS.values(), ids=ANSWERS)
async def test_every_answer_may_be_read_with_its_headers(answer_of: Callable[[str], Awaitable[Answered]]) -> None:
    """Streams and errors as well: a page in a browser sees status, body, ids and the time to wait."""
    async with gateway(*WITH_KEY, cors_origins=[HOME]) as url:
        answer = await answer_of(url)

    exposed = answer.headers["access-control-expose-headers"]
    assert HOME == answer.headers["access-control-allow-origin"]
    assert exposed == "*" or {"request-id", "x-request-id", "retry-after", "x-ezat-ignored", "x-ezat-adjusted"} <= set(
        exposed.split(", ")
    )
    assert "access-control-allow-credentials" not in answer.headers, "keys are sent by scripts, never by browsers"


# The client's address behind reverse proxies

PEER = "127.0.0.1"
ONE, TWO, INNER = "203.0.113.7", "198.51.100.9", "10.1.2.3"

# whom the gateway trusts, the x-forwarded-for headers that come, and the address in the log
FORWARDED: dict[str, tuple[Sequence[str], Sequence[str], str]] = {
    "nobody is trusted": ([], [ONE], PEER),
    "the peer is not trusted": (["10.0.0.0/8"], [ONE], PEER),
    "the peer is trusted": (["127.0.0.1/32"], [ONE], ONE),
    "no header": (["127.0.0.0/8"], [], PEER),
    "an empty header": (["127.0.0.0/8"], [""], PEER),
    "what the client made up stands further ahead": (["127.0.0.0/8"], [f"1.2.3.4, {ONE}"], ONE),
    "two trusted hops": (["127.0.0.0/8", "10.0.0.0/8"], [f"1.2.3.4, {ONE}, {INNER}"], ONE),
    "two headers": (["127.0.0.0/8", "10.0.0.0/8"], [f"1.2.3.4, {ONE}", INNER], ONE),
    "all hops are trusted": (["127.0.0.0/8", "10.0.0.0/8"], ["10.9.9.9, 10.8.8.8"], "10.9.9.9"),
    "an inner hop that is not trusted": (["127.0.0.0/8"], [f"{ONE}, {INNER}"], INNER),
    "without spaces": (["127.0.0.0/8", "10.0.0.0/8"], [f"{ONE},{INNER}"], ONE),
    "an IPv6 address": (["127.0.0.0/8"], ["2001:DB8::7"], "2001:db8::7"),
    "a trusted IPv6 hop": (["127.0.0.0/8", "2001:db8::/32"], [f"{ONE}, 2001:db8::7"], ONE),
    "IPv4 within IPv6": (["127.0.0.0/8", "10.0.0.0/8"], [f"{ONE}, ::ffff:{INNER}"], ONE),
    "garbage": (["127.0.0.0/8"], ["unknown"], PEER),
    "garbage before a hop": (["127.0.0.0/8", "10.0.0.0/8"], [f"<script>, {INNER}"], INNER),
    "an address with a port": (["127.0.0.0/8"], [f"{ONE}:4711"], PEER),
    "an empty hop": (["127.0.0.0/8"], [f"{ONE},"], PEER),
    "a zone that is no zone": (["127.0.0.0/8"], ["fe80::1%<script>"], "fe80::1"),
    "a very long header": (["127.0.0.0/8"], [",".join(["1.1.1.1"] * 500 + [ONE])], ONE),
}


@pytest.mark.parametrize(("trusted", "headers", "expected"), FORWARDED.values(), ids=FORWARDED)
async def test_whose_address_is_in_the_log(trusted: Sequence[str], headers: Sequence[str], expected: str) -> None:
    """Behind trusted proxies it is the last address that none of them vouches for, never what a client made up."""
    sent = [("x-forwarded-for", value) for value in headers]
    with capture_logs() as lines:
        async with (
            gateway(trusted_proxies=trusted) as url,
            aiohttp.ClientSession(headers=sent) as session,
            session.post(f"{url}/v1/messages", json=request_of(False)) as answer,
        ):
            await answer.read()

    assert [expected] == [line["client"] for line in lines if line["event"] == "request"]


@pytest.mark.parametrize("name", ["forwarded", "x-real-ip", "x-client-ip", "cf-connecting-ip", "true-client-ip"])
async def test_no_other_header_is_believed(name: str) -> None:
    """A header that the proxy may pass on as the client sent it changes nothing."""
    with capture_logs() as lines:
        async with gateway(trusted_proxies=["127.0.0.0/8"]) as url:
            await ask_for(url, "messages", headers={name: f"for={ONE}" if name == "forwarded" else ONE})

    assert [PEER] == [line["client"] for line in lines if line["event"] == "request"]


# A path in front of every other

BASE = "/llm"


@ROUTES
@MODES
async def test_requests_are_answered_below_the_base_path(format: str, stream: bool) -> None:
    """Clients have the path in their base URL, and all else is as without it."""
    async with gateway(base_path=BASE) as url:
        answer = await ask_for(url + BASE, format, stream)

    assert "whole" == ending_of(answer, format)


@pytest.mark.parametrize("path", EVERY_PATH)
async def test_every_endpoint_is_below_the_base_path(path: str) -> None:
    """Each endpoint answers there as it does without a base path, and outside it there is none."""
    async with gateway() as plain, gateway(base_path=BASE) as url:
        expected = await send("GET", plain + path)
        below, outside = await send("GET", url + BASE + path), await send("GET", url + path)

    assert (expected.status, 404) == (below.status, outside.status)
    if path != "/openapi.yaml":
        assert without_ids(expected.body) == without_ids(below.body)


def without_ids(body: bytes) -> bytes:
    return re.sub(rb'"request_id":"[^"]+"', b"", body)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", [BASE, f"{BASE}/"])
async def test_the_base_url_itself_is_answered(path: str, method: str) -> None:
    """Clients that look whether somebody is there ask for their base URL, with a slash or without."""
    async with gateway(base_path=BASE) as url:
        answer = await send(method, url + path)

    assert 200 == answer.status


UNKNOWN = (
    *("/llm/v2", "/llm/nonsense", "/llm/v1/nonsense", "/llm//v1/messages", "/llm/llm/v1/messages"),
    *("/llmv1/messages", "/ll", "/LLM/v1/messages", "/other/llm/v1/messages", "/"),
)


@pytest.mark.parametrize("path", UNKNOWN)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_what_is_no_endpoint_is_unknown(path: str, method: str) -> None:
    """A base path makes no path below it an endpoint, and none outside it."""
    async with gateway(base_path=BASE) as url:
        answer = await send(method, url + path)

    assert 404 == answer.status
    assert "not_found_error" == orjson.loads(answer.body)["error"]["type"]


# path below the base path: the words of the error without a base path
HINTS = ("/v1/v1/messages", "/v1/chat/completions", "/openai/v1/v1/models", "/messages", "/openai/v1/responses")


@pytest.mark.parametrize("path", HINTS)
async def test_errors_below_the_base_path_give_the_same_hints(path: str) -> None:
    """Whoever mixes base URLs up is told the way out in the right envelope, below a base path, too."""
    async with gateway() as plain, gateway(base_path=BASE) as url:
        expected, below = await send("POST", plain + path), await send("POST", url + BASE + path)

    assert (404, without_ids(expected.body)) == (below.status, without_ids(below.body))


@pytest.mark.parametrize("path", ["/openai/v1/models", "/v1/models"])
async def test_an_error_outside_has_the_envelope_of_its_path(path: str) -> None:
    """A client that lacks the base path reads its own kind of error."""
    async with gateway(base_path=BASE) as url:
        answer = await send("GET", url + path)

    assert ({"error"} if path.startswith("/openai") else {"type", "error", "request_id"}) == set(
        orjson.loads(answer.body)
    )


async def test_a_preflight_is_answered_below_the_base_path() -> None:
    """Browsers find the endpoint there, and nothing outside."""
    async with gateway(base_path=BASE, cors_origins=[HOME]) as url:
        below = await send("OPTIONS", f"{url}{BASE}/v1/messages", headers={**FROM_HOME, **ASKS})
        outside = await send("OPTIONS", f"{url}/v1/messages", headers={**FROM_HOME, **ASKS})

    assert (204, 404) == (below.status, outside.status)

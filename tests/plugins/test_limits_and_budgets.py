"""The plugins rate_limit and usage in a real gateway: who is refused and how, what is recorded, what is given back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import aiohttp
import pytest

from proxy.answer import Answer
from proxy.config import load
from proxy.document import Event
from proxy.exchange import Exchange
from proxy.plugin import OutputPlugin, Plugin, Settings
from proxy.testing import CUT, Reply, ScriptedUpstream, message_reply, stream_reply, text_events
from tests.process import eventually
from tests.store import servers
from tests.store.gateways import (
    INPUT_UNITS,
    KEY,
    OUTPUT_UNITS,
    PATHS,
    Told,
    ask,
    body,
    configured,
    gated_message,
    gated_stream,
    ledger,
    look,
    prepaid,
    reserved_units,
    serving,
    spent_units,
)

COST = 12 * INPUT_UNITS + 7 * OUTPUT_UNITS
OTHER = "ezat_sk_other"
BOTH = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/ezat.db"
        return
    with servers.postgres().lent_database() as url:
        yield url


@pytest.fixture
def postgres_url() -> Iterator[str]:
    """For what PostgreSQL is stricter with."""
    with servers.postgres().lent_database() as url:
        yield url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ezat.db"


@pytest.fixture(params=["memory", "redis"])
def limiter(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return "memory"
    servers.redis_server().empty()
    return servers.redis_server().url


class World(NamedTuple):
    session: aiohttp.ClientSession
    url: str
    upstream: ScriptedUpstream
    store: str

    async def ask(self, **fields: Any) -> Told:
        return await ask(self.session, self.url, **fields)

    async def stream_until(self, text: bytes, path: str = PATHS["messages"]) -> aiohttp.ClientResponse:
        """A stream that has been read as far as this text."""
        answer = await self.session.post(self.url + path, json=body(stream=True), headers={"x-api-key": KEY})
        read = b""
        while text not in read:
            read += await answer.content.readany()
        return answer

    async def row(self) -> dict[str, Any]:
        """The only row, as soon as it is there."""
        await eventually(lambda: ledger(self.store))
        [row] = ledger(self.store)
        return row

    async def nothing_reserved(self) -> None:
        await eventually(lambda: reserved_units(self.store) == (0, 0))


@asynccontextmanager
async def world(
    store: str, *replies: Reply, plugins: Mapping[str, type[Plugin]] | None = None, **config: Any
) -> AsyncIterator[World]:
    async with (
        aiohttp.ClientSession() as session,
        ScriptedUpstream(*replies) as upstream,
        serving(configured(store, upstream.url, **config), **(plugins or {})) as url,
    ):
        yield World(session, url, upstream, store)


def keys(**limits: Any) -> dict[str, Any]:
    """The settings of auth: a key with these limits, and another without any."""
    return {"keys": [{"name": "one", "key": KEY, **limits}, {"name": "other", "key": OTHER}]}


def of_acme(**limits: Any) -> dict[str, Any]:
    """The settings of auth: two keys of an organization with these limits."""
    named = (("one", KEY), ("other", OTHER))
    return {
        "organizations": [{"name": "acme", **limits}],
        "keys": [{"name": name, "key": key, "organization": "acme"} for name, key in named],
    }


# Requests per minute


@BOTH
async def test_a_limit_of_requests(sqlite_url: str, limiter: str, path: str) -> None:
    """L1: of 30 at once exactly 5 pass; the others get a 429 with whole seconds to wait, and reach no upstream."""
    async with world(sqlite_url, auth=keys(requests_per_minute=5), limiter=limiter) as gateway:
        answers = await asyncio.gather(*(gateway.ask(path=path) for _ in range(30)))
        other = await gateway.ask(path=path, key=OTHER)

    refused = [answer for answer in answers if answer.status != 200]
    assert [429] * 25 == [answer.status for answer in refused]
    assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in refused)
    assert {"rate_limit_error"} == {answer.json["error"]["type"] for answer in refused}
    assert 200 == other.status
    assert 6 == len(gateway.upstream.received) == len(ledger(sqlite_url))


async def test_an_organizations_keys_share_its_limit(sqlite_url: str, limiter: str) -> None:
    """What one key of an organization asks, another has less."""
    async with world(sqlite_url, auth=of_acme(requests_per_minute=2), limiter=limiter) as gateway:
        statuses = [(await gateway.ask(key=key)).status for key in (KEY, OTHER, KEY, OTHER)]

    assert [200, 200, 429, 429] == statuses


@BOTH
async def test_limits_are_told_in_headers(sqlite_url: str, limiter: str, path: str) -> None:
    """The headers of both formats stand on answers, plain and streamed, and on the refusal; of the key's and the
    organization's limit that one counts of which less is left."""
    auth = of_acme(requests_per_minute=3, input_tokens_per_minute=1000)
    auth["keys"][0]["requests_per_minute"] = 100
    async with world(sqlite_url, auth=auth, limiter=limiter) as gateway:
        gateway.upstream.replies += [message_reply(), stream_reply(text_events("Hello."))]
        answers = [await gateway.ask(path=path), await gateway.ask(path=path, stream=True)]
        answers += [await gateway.ask(path=path) for _ in range(2)]

    assert [200, 200, 200, 429] == [answer.status for answer in answers]
    assert ["2", "1", "0", "0"] == [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
    for answer in answers:
        headers = answer.headers
        assert "3" == headers["x-ratelimit-limit-requests"] == headers["anthropic-ratelimit-requests-limit"]
        assert headers["x-ratelimit-remaining-requests"] == headers["anthropic-ratelimit-requests-remaining"]
        assert 1 <= int(headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
        assert headers["anthropic-ratelimit-requests-reset"].endswith("Z")
    for answer in answers[:3]:
        headers = answer.headers
        assert "1000" == headers["x-ratelimit-limit-tokens"] == headers["anthropic-ratelimit-input-tokens-limit"]
        assert 900 < int(headers["x-ratelimit-remaining-tokens"]) < 1000


async def test_without_limits_no_header_speaks_of_them(sqlite_url: str) -> None:
    """A key without limits is told of none."""
    async with world(sqlite_url) as gateway:
        answer = await gateway.ask()

    assert [] == [name for name in answer.headers if "ratelimit" in name.lower()]


async def test_counting_tokens_has_a_window_of_its_own(sqlite_url: str) -> None:
    """count_tokens is limited as requests are, but takes none of theirs; it is neither billed nor recorded."""
    count = "/v1/messages/count_tokens"
    async with world(sqlite_url, auth=keys(requests_per_minute=2, input_tokens_per_minute=1)) as gateway:
        gateway.upstream.replies += [Reply([b'{"input_tokens":5}'])] * 2
        counted = [(await gateway.ask(path=count)).status for _ in range(3)]
        asked = (await gateway.ask()).status

    assert ([200, 200, 429], 200) == (counted, asked)
    assert 1 == len(ledger(sqlite_url))


async def test_a_refused_request_counts(sqlite_url: str) -> None:
    """A request that is refused later has been counted: the model lists count, too, and so does a key's own view."""
    async with world(sqlite_url, auth=keys(requests_per_minute=4)) as gateway:
        statuses = [
            (await gateway.ask(model="unknown")).status,
            (await gateway.ask(messages=[])).status,
            (await look(gateway.session, gateway.url, "/v1/models")).status,
            (await look(gateway.session, gateway.url, "/api/key")).status,
            (await gateway.ask()).status,
            (await look(gateway.session, gateway.url, "/openai/v1/models")).status,
        ]

    assert [404, 400, 200, 200, 429, 429] == statuses


async def test_an_unknown_key_is_not_counted(sqlite_url: str) -> None:
    """Nobody uses up another's limit by guessing."""
    async with world(sqlite_url, auth=keys(requests_per_minute=1)) as gateway:
        wrong = [(await gateway.ask(key="ezat_sk_wrong")).status for _ in range(3)]

        assert ([401] * 3, 200) == (wrong, (await gateway.ask()).status)


# Tokens per minute


@BOTH
async def test_a_limit_of_input_tokens(sqlite_url: str, limiter: str, path: str) -> None:
    """A request that would take more tokens than are left is refused, before it is sent; a small one still passes."""
    large = [{"role": "user", "content": "x" * 2000}]
    async with world(sqlite_url, auth=keys(input_tokens_per_minute=800), limiter=limiter) as gateway:
        answers = [await gateway.ask(path=path, messages=large), await gateway.ask(path=path, messages=large)]
        small = await gateway.ask(path=path)

    assert [200, 429, 200] == [answer.status for answer in (*answers, small)]
    assert 1 <= int(answers[1].headers["retry-after"]) <= 121
    assert "input tokens a minute" in answers[1].json["error"]["message"]
    assert 2 == len(gateway.upstream.received)


# Parallel requests


class Breaks(Plugin):
    """Fails while it judges a request that says so."""

    name: ClassVar[str] = "breaks"

    async def on_request(self, exchange: Exchange) -> None:
        if exchange.client_value("top_k") == 666:
            raise ValueError


async def test_no_more_run_at_once_than_may(sqlite_url: str, limiter: str) -> None:
    """L3: of 50 at once five run, whatever becomes of others: clients leave, upstreams and plugins fail. Then all five
    places are free again."""
    gate = asyncio.Event()
    async with world(
        sqlite_url, auth=keys(parallel_requests=5), limiter=limiter, plugins={"breaks": Breaks}, first=["breaks"]
    ) as gateway:
        for _ in range(5):  # five that leave, five that fail at the upstream, five in a plugin
            gateway.upstream.replies.append(gated_stream(gate))
            (await gateway.stream_until(b"Hello.")).close()
            await eventually(lambda: gateway.upstream.open == 0)
            gateway.upstream.replies.append(Reply([CUT]))
            await ask_until_let_in(gateway, 500)
            await ask_until_let_in(gateway, 500, top_k=666)

        gateway.upstream.replies += [gated_message(gate)] * 5
        running = [asyncio.create_task(gateway.ask()) for _ in range(50)]
        await eventually(lambda: finished(running) == 45 and gateway.upstream.open == 5)
        done = [task for task in running if task.done()]
        gate.set()
        answers = await asyncio.gather(*running)
        again = await ask_until_let_in(gateway, 200)

    assert {429} == {task.result().status for task in done}
    assert {"1"} == {task.result().headers["retry-after"] for task in done}
    assert [200] * 5 == [answer.status for answer in answers if answer.status != 429]
    assert again.is_whole


def finished(tasks: Sequence[asyncio.Task[Told]]) -> int:
    return sum(task.done() for task in tasks)


async def ask_until_let_in(gateway: World, expected: int, **fields: Any) -> Told:
    """The answer as soon as it isn't a 429: places come back a moment after an ending."""
    for _ in range(200):
        answer = await gateway.ask(**fields)
        if answer.status != 429:
            assert expected == answer.status
            return answer
    raise AssertionError("there is never a place")


# Budgets


@BOTH
async def test_a_used_up_balance_is_a_402(store_url: str, path: str) -> None:
    """Whoever has anything left is served; then nobody is, in the words of the format, and nothing goes upstream."""
    async with world(store_url, auth=prepaid(COST + 1)) as gateway:
        answers = [await gateway.ask(path=path) for _ in range(3)]
        models = await look(gateway.session, gateway.url, "/v1/models")

    assert [200, 200, 402] == [answer.status for answer in answers]
    told = {"openai": ("insufficient_quota", "insufficient_quota"), "messages": ("billing_error", None)}
    error = answers[2].json["error"]
    assert told["openai" if path == PATHS["openai"] else "messages"] == (error["type"], error.get("code"))
    assert "balance of this organization is used up" in error["message"]
    assert 200 == models.status, "402 is not judged for the model lists"
    assert 2 == len(gateway.upstream.received) == len(ledger(store_url))
    assert 2 * COST == spent_units(store_url, "acme")


@BOTH
async def test_refusals_come_in_their_order(sqlite_url: str, path: str) -> None:
    """Before the body is read: too many requests, then nothing left; only then what is wrong with the body."""
    auth = prepaid(1)
    auth["keys"][0]["requests_per_minute"] = 3
    async with world(sqlite_url, auth=auth) as gateway:
        statuses = []
        for sent in (json.dumps(body()), "no JSON", "no JSON", "no JSON"):
            headers = {"x-api-key": KEY, "content-encoding": "identity" if sent.startswith("{") else "gzip"}
            async with gateway.session.post(gateway.url + path, data=sent.encode(), headers=headers) as answer:
                statuses.append(answer.status)

    assert [200, 402, 402, 429] == statuses


SPEND_LIMITS = {"for all time": {}, "of a day": {"spend_period": "day"}, "of a month": {"spend_period": "month"}}


@pytest.mark.parametrize("period", SPEND_LIMITS.values(), ids=SPEND_LIMITS)
async def test_a_spend_limit_is_a_402(store_url: str, period: dict[str, str]) -> None:
    """A key that has reached its limit is refused, another key isn't."""
    async with world(store_url, auth=keys(spend_limit_usd="0.00004", **period)) as gateway:
        answers = [await gateway.ask(), await gateway.ask(), await gateway.ask(key=OTHER)]

    assert [200, 402, 200] == [answer.status for answer in answers]
    assert "this key has reached its spend limit" in answers[1].json["error"]["message"]


async def test_a_limit_of_zero_lets_nobody_in(store_url: str) -> None:
    """Zero is a limit."""
    async with world(store_url, auth=prepaid(0)) as gateway:
        assert 402 == (await gateway.ask()).status
    assert [] == gateway.upstream.received


@BOTH
async def test_what_others_have_reserved_is_a_429(store_url: str, path: str) -> None:
    """Where something is left but all of it reserved, one is told to come back in a second; and then it goes."""
    gate = asyncio.Event()
    async with world(store_url, gated_message(gate), auth=prepaid(2 * COST)) as gateway:
        running = asyncio.create_task(gateway.ask(path=path, max_tokens=4000))
        await eventually(lambda: gateway.upstream.open == 1)
        refused = await gateway.ask(path=path)
        gate.set()
        first, later = await running, await gateway.ask(path=path)

    assert [429, 200, 200] == [refused.status, first.status, later.status]
    assert "1" == refused.headers["retry-after"]


RESERVATIONS = {
    "what may be answered at the most": ({"max_tokens": 100}, {}, 100),
    "no more output than the setting says": ({"max_tokens": 8000}, {}, 2000),
    "another setting": ({"max_tokens": 8000}, {"reserve_output_tokens": 50}, 50),
}


@pytest.mark.parametrize(("fields", "settings", "output"), RESERVATIONS.values(), ids=RESERVATIONS)
async def test_what_is_reserved(sqlite_url: str, fields: dict[str, int], settings: dict[str, int], output: int) -> None:
    """The estimated input, as dear as it may be, and the output that may come, up to the setting."""
    gate = asyncio.Event()
    text = [{"role": "user", "content": "x" * 4000}]
    async with world(sqlite_url, gated_message(gate), auth=prepaid(10**12), usage=settings) as gateway:
        running = asyncio.create_task(gateway.ask(messages=text, **fields))
        await eventually(lambda: gateway.upstream.open == 1)
        reserved, count = reserved_units(sqlite_url)
        gate.set()
        await running

    assert 1 == count
    input = reserved - output * OUTPUT_UNITS
    assert 1000 * INPUT_UNITS * 1.25 <= input <= 1030 * INPUT_UNITS * 1.25, "1000 tokens of text, and what surrounds it"


# What is given back, on every path (L6)


async def refused_upstream(gateway: World, path: str) -> None:
    answer = await gateway.ask(path=path)
    assert answer.status in (400, 500)


async def left(gateway: World, path: str) -> None:
    (await gateway.stream_until(b"Hello.", path)).close()


async def broken_stream(gateway: World, path: str) -> None:
    answer = await gateway.ask(path=path, stream=True)
    assert '"error"' in answer.text


async def left_while_waiting(gateway: World, path: str) -> None:
    asking = asyncio.create_task(gateway.ask(path=path))
    await eventually(lambda: gateway.upstream.open == 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


WAYS: dict[str, tuple[Reply, Any]] = {
    "U1 the connection is reset": (Reply([CUT]), refused_upstream),
    "U7 a stream is cut": (stream_reply([*text_events("Hello.", stop_reason=None), CUT]), broken_stream),
    "U8 a stream ends early": (stream_reply(text_events("Hello.", stop_reason=None)), broken_stream),
    "U18 an answer that is none": (Reply([b"<html>"]), refused_upstream),
    "U22 the provider refuses": (
        Reply([b'{"type":"error","error":{"type":"invalid_request_error","message":"no"}}'], status=400),
        refused_upstream,
    ),
    "U24 the provider fails": (Reply([b"oops"], status=500), refused_upstream),
    "E1 the client leaves in a stream": (stream_reply([*text_events("Hello.", stop_reason=None), 60.0]), left),
    "E1 the client leaves before the answer": (Reply([60.0]), left_while_waiting),
}


@BOTH
@pytest.mark.parametrize(("reply", "act"), WAYS.values(), ids=WAYS)
async def test_what_was_reserved_is_given_back(sqlite_url: str, path: str, reply: Reply, act: Any) -> None:
    """L6: however a request ends, its reservation and its place end with it, and failures are not billed."""
    auth = prepaid(10**12)
    auth["keys"][0]["parallel_requests"] = 1
    async with world(sqlite_url, reply, auth=auth) as gateway:
        await act(gateway, path)
        await gateway.nothing_reserved()
        after = await ask_until_let_in(gateway, 200, path=path)

    billed = [row for row in ledger(sqlite_url) if row["request_id"] != after.id]
    assert (1 if act is left else 0) == len(billed)


class Raises(Plugin):
    """Fails where it is told to."""

    class Settings(Settings):
        where: str

    settings: Any
    name: ClassVar[str] = "raises"
    completes: ClassVar[bool] = True

    async def on_request(self, exchange: Exchange) -> OutputPlugin | None:
        self._raise("on_request")
        return RaisingOutput(self._raise)

    async def on_send(self, exchange: Exchange) -> None:
        self._raise("on_send")

    def _raise(self, where: str) -> None:
        if where == self.settings.where:
            raise ValueError


class RaisingOutput(OutputPlugin):
    def __init__(self, fail: Any) -> None:
        self._fail = fail

    async def on_answer(self, answer: Answer) -> None:
        self._fail("on_answer")

    def on_event(self, event: Event) -> Sequence[Event]:
        self._fail("on_event")
        return (event,)

    async def on_complete(self) -> None:
        self._fail("on_complete")


@pytest.mark.parametrize("where", ["on_request", "on_send", "on_answer", "on_event", "on_complete"])
async def test_what_was_reserved_is_given_back_where_a_plugin_breaks(sqlite_url: str, where: str) -> None:
    """L6, G1 to G4: a plugin behind usage that fails anywhere leaves nothing reserved and nothing billed."""
    plugins = {"raises": Raises}
    async with world(
        sqlite_url, auth=prepaid(10**12), plugins=plugins, first=[{"raises": {"where": where}}]
    ) as gateway:
        answer = await gateway.ask(stream=where == "on_event")
        await gateway.nothing_reserved()

    assert not answer.is_whole
    assert [] == ledger(sqlite_url)


# Rows


END_USERS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "user": ("openai", {"user": "ann"}, "ann"),
    "safety_identifier": ("openai", {"safety_identifier": "ann"}, "ann"),
    "user first": ("openai", {"user": "ann", "safety_identifier": "bob"}, "ann"),
    "metadata.user_id": ("messages", {"metadata": {"user_id": "ann"}}, "ann"),
    "nobody": ("openai", {"user": None}, None),
    "nobody in metadata": ("messages", {"metadata": {"other": "ann"}}, None),
    "a long name": ("openai", {"user": "é" * 600}, "é" * 512),
    "a NUL": ("openai", {"user": "a\0b"}, "a\ufffdb"),
    "a lone surrogate": ("messages", {"metadata": {"user_id": "a\ud800b"}}, "a\ufffdb"),
    "no name": ("messages", {"metadata": {"user_id": 7}}, None),
    "an empty name": ("messages", {"metadata": {"user_id": ""}}, None),
}


@pytest.mark.parametrize(("format", "fields", "expected"), END_USERS.values(), ids=END_USERS)
async def test_an_end_user_is_recorded(
    postgres_url: str, format: str, fields: dict[str, Any], expected: str | None
) -> None:
    """Whom a client says that it asks for; from OpenAI's format it is not sent on. Whatever was sent, the answer can be
    recorded: else it would be free."""
    async with world(postgres_url) as gateway:
        answer = await gateway.ask(path=PATHS[format], **fields)

    assert 200 == answer.status
    [row] = ledger(postgres_url)
    assert expected == row["end_user"]
    if format == "openai":
        assert b"ann" not in gateway.upstream.received[0].body


@BOTH
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_answer_has_a_row(store_url: str, path: str, stream: bool) -> None:
    """Whose request it was, by what name the model was asked for, where it went, what it used and cost, exactly."""
    counts = {
        "input_tokens": 10,
        "output_tokens": 4,
        "cache_read_input_tokens": 3,
        "cache_creation_input_tokens": 7,
        "cache_creation": {"ephemeral_5m_input_tokens": 2, "ephemeral_1h_input_tokens": 5},
        "output_tokens_details": {"thinking_tokens": 1},
        "service_tier": "standard",
        "something_new": {"a": [1, None]},
    }
    events = text_events("Hello.")
    events[0]["message"]["usage"] = {**counts, "output_tokens": 1}
    events[-2]["usage"] = {"output_tokens": 4}
    reply = stream_reply(events) if stream else message_reply(usage=counts)
    async with world(store_url, reply, auth=of_acme()) as gateway:
        answer = await gateway.ask(path=path, model=" MODEL ", stream=stream)

    [row] = ledger(store_url)
    expected = {
        "request_id": answer.id,
        "key_id": "yaml:one",
        "organization": "acme",
        "model": "test/model",
        "asked_model": " MODEL ",
        "deployment": "up/model-at-upstream",
        "stream": stream,
        "input": 10,
        "cache_read": 3,
        "cache_write_5m": 2,
        "cache_write_1h": 5,
        "output": 4,
        "thinking": 1,
        "cost": 42_800_000,
        "prices": {
            "input": 1_000_000,
            "output": 5_000_000,
            "cache_write_5m": 1_250_000,
            "cache_write_1h": 2_000_000,
            "cache_read": 100_000,
        },
        "exactness": "exact",
        "reason": None,
    }
    assert expected == {name: row[name] for name in expected}
    assert {**counts, "output_tokens": 4} == row["raw"]
    assert 42_800_000 == spent_units(store_url, "acme") == spent_units(store_url, "yaml:one")


EXACTNESS: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "the standard tier": ({"service_tier": "standard"}, "exact", None),
    "no tier": ({"service_tier": None}, "exact", None),
    "another tier": ({"service_tier": "priority"}, "inexact", "no price is known for service_tier=priority"),
    "speed": ({"speed": "fast"}, "inexact", "no price is known for speed=fast"),
    "a server tool": (
        {"server_tool_use": {"web_search_requests": 2}},
        "inexact",
        "no price is known for web_search_requests",
    ),
    "a server tool that was not used": ({"server_tool_use": {"web_search_requests": 0}}, "exact", None),
}


@pytest.mark.parametrize(("fields", "exactness", "reason"), EXACTNESS.values(), ids=EXACTNESS)
async def test_a_row_says_how_exact_it_is(
    sqlite_url: str, fields: dict[str, Any], exactness: str, reason: str | None
) -> None:
    """What was used beside tokens has no price here: the row says so, and is billed for the tokens."""
    reply = message_reply(usage={"input_tokens": 12, "output_tokens": 7, **fields})
    async with world(sqlite_url, reply) as gateway:
        await gateway.ask()

    [row] = ledger(sqlite_url)
    assert (exactness, reason, COST) == (row["exactness"], row["reason"], row["cost"])


async def test_an_answer_without_counts_is_not_called_exact(sqlite_url: str) -> None:
    """A provider that gives no count leaves nothing to bill, and the row says so."""
    events = text_events("Hello.")
    del events[0]["message"]
    events[0]["message"] = {"type": "message", "role": "assistant", "content": []}
    del events[-2]["usage"]
    async with world(sqlite_url, stream_reply(events)) as gateway:
        answer = await gateway.ask(stream=True)

    [row] = ledger(sqlite_url)
    assert answer.is_whole
    assert ("unknown", "the provider gave no count", 0) == (row["exactness"], row["reason"], row["cost"])


@BOTH
async def test_a_stream_that_is_left_is_billed_as_far_as_it_came(store_url: str, path: str) -> None:
    """The input exactly, the output by four bytes of deltas a token, and the row says so."""
    text = "x" * 400
    events = text_events(text, stop_reason=None)
    events[0]["message"]["usage"] = {"input_tokens": 30, "output_tokens": 1}
    async with world(store_url, stream_reply([*events, 60.0]), auth=prepaid(10**12)) as gateway:
        answer = await gateway.stream_until(b"xxx", path)
        first_text = time.time()
        answer.close()
        row = await gateway.row()
        await gateway.nothing_reserved()

    assert ("estimated", 30) == (row["exactness"], row["input"])
    assert row["at"] < first_text, "it belongs to the moment at which it began"
    assert "4 bytes of deltas a token" in row["reason"]
    assert 100 <= row["output"] <= 115
    assert 30 * INPUT_UNITS + row["output"] * OUTPUT_UNITS == row["cost"] == spent_units(store_url, "acme")


async def test_a_stream_that_is_left_before_any_count_is_not_billed(sqlite_url: str) -> None:
    """Nothing is known then, and the row says so."""
    silent = stream_reply([{"type": "ping"}, 60.0])
    async with world(sqlite_url, silent, server={"ping_interval": 0.05}) as gateway:
        answer = await gateway.stream_until(b"ping")
        answer.close()
        row = await gateway.row()

    assert ("unknown", 0, "left before the provider gave any count") == (row["exactness"], row["cost"], row["reason"])


@BOTH
async def test_a_stream_that_fails_is_not_billed(sqlite_url: str, path: str) -> None:
    """A failure after the first text, whoever fails, is an error to the client and no row."""
    async with world(
        sqlite_url, stream_reply([*text_events("Hello.", stop_reason=None), CUT]), auth=prepaid(10**12)
    ) as gateway:
        answer = await gateway.ask(path=path, stream=True)
        await gateway.nothing_reserved()

    assert not answer.is_whole
    assert [] == ledger(sqlite_url)


class Answers(Plugin):
    """Answers by itself."""

    name: ClassVar[str] = "answers"

    async def on_request(self, exchange: Exchange) -> Answer:
        if exchange.client_value("top_k") == 1:
            message = {"type": "message", "role": "assistant", "content": [], "stop_reason": "end_turn"}
            return Answer({**message, "usage": {"input_tokens": 12, "output_tokens": 7}})
        return Answer.text("From memory.")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("top_k", "exactness", "cost"), [(0, "free", 0), (1, "exact", COST)], ids=["that costs nothing", "that is billed"]
)
async def test_an_answer_of_a_plugin_is_a_row(
    sqlite_url: str, stream: bool, top_k: int, exactness: str, cost: int
) -> None:
    """It has gone to no upstream; it costs what the plugin says, by default nothing; and it has reserved nothing."""
    async with world(sqlite_url, auth=prepaid(10**12), plugins={"answers": Answers}, first=["answers"]) as gateway:
        answer = await gateway.ask(stream=stream, top_k=top_k)

    [row] = ledger(sqlite_url)
    assert answer.is_whole
    assert (answer.id, None, exactness, cost) == (row["request_id"], row["deployment"], row["exactness"], row["cost"])
    assert [] == gateway.upstream.received


async def test_a_free_model_is_a_row(sqlite_url: str) -> None:
    """What it used is recorded, at no cost."""
    async with world(sqlite_url, model={"price": "free"}) as gateway:
        await gateway.ask()

    [row] = ledger(sqlite_url)
    assert ("free", "the model costs nothing", 0, 12, 7) == (
        row["exactness"],
        row["reason"],
        row["cost"],
        row["input"],
        row["output"],
    )


async def test_the_same_client_request_id_twice_is_two_rows(sqlite_url: str) -> None:
    """E13: what a client calls its request makes no two of them one."""
    async with world(sqlite_url) as gateway:
        headers = {"x-api-key": KEY, "x-request-id": "same"}

        async def one() -> int:
            async with gateway.session.post(gateway.url + "/v1/messages", json=body(), headers=headers) as answer:
                await answer.read()
                return answer.status

        assert [200] * 5 == await asyncio.gather(*(one() for _ in range(5)))

    assert 5 == len({row["request_id"] for row in ledger(sqlite_url)})


async def test_missing_cache_prices_are_shown(sqlite_url: str) -> None:
    """GET /api/models shows the prices that are billed, derived ones too."""
    async with world(sqlite_url) as gateway, gateway.session.get(gateway.url + "/api/models") as answer:
        [model] = (await answer.json())["data"]

    assert ["1", "5", "1.25", "2", "0.1"] == [*model["pricing"].values()]


async def test_a_model_without_a_price_is_refused_at_start(tmp_path: Path) -> None:
    """Nobody serves a model for nothing by mistake."""
    config = configured("sqlite:///:memory:", "http://127.0.0.1:1")
    del config["models"][0]["price"]
    path = tmp_path / "gateway.yaml"
    path.write_text(json.dumps(config))

    with pytest.raises(Exception, match="price: is required; say `price: free`"):
        load(path, {})

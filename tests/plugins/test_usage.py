"""What was used and what it cost, and budgets, which it is taken from."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

from plugins.usage import Usage as UsagePlugin
from plugins.usage import UsageSettings, row_of
from proxy.errors import GatewayError, Kind
from proxy.exchange import Exchange, Key
from proxy.limits import open_limiter
from proxy.models import Deployment, ModelTable, Price
from proxy.plugin import Outcome, OutputPlugin, Route, Services
from proxy.store import Budget
from proxy.store.ledger import spent
from proxy.store.money import UNITS_PER_USD, UnitPrices, cost, unit_prices, units, usd
from proxy.store.schema import usage as table
from proxy.store.store import Store
from proxy.testing import MODEL, make_exchange
from proxy.usage import Usage

Json = dict[str, Any]

# Money

_prices = st.decimals(0, 10**4, places=4)  # so that a tenth and a quarter of one have at most six decimals, too
_cache_prices = st.none() | st.decimals(0, 10**4, places=6)


@st.composite
def prices(draw: st.DrawFn) -> Price:
    return Price(draw(_prices), draw(_prices), draw(_cache_prices), draw(_cache_prices), draw(_cache_prices))


@st.composite
def counts(draw: st.DrawFn) -> Usage:
    usage = Usage()
    for name in UnitPrices._fields:
        setattr(usage, name, draw(st.integers(0, 10**12)))
    return usage


def usd_of(usage: Usage, price: Price) -> Fraction:
    """What an answer costs, by fractions: tokens times USD per million; cache prices left out follow the input's."""
    input = Fraction(price.input)
    per_million = {
        "input": input,
        "output": Fraction(price.output),
        "cache_write_5m": input * 5 / 4 if price.cache_write_5m is None else Fraction(price.cache_write_5m),
        "cache_write_1h": input * 2 if price.cache_write_1h is None else Fraction(price.cache_write_1h),
        "cache_read": input / 10 if price.cache_read is None else Fraction(price.cache_read),
    }
    return sum((getattr(usage, name) * each for name, each in per_million.items()), Fraction(0)) / 10**6


@given(counts(), prices())
def test_a_cost_is_exact(usage: Usage, price: Price) -> None:
    """An answer's cost is exact to the last digit, in units and in dollars."""
    found = cost(usage, unit_prices(price))

    assert usd_of(usage, price) == Fraction(found, UNITS_PER_USD) == Fraction(usd(found))


@given(st.lists(st.tuples(counts(), prices()), max_size=20))
def test_a_sum_of_costs_is_exact(answers: list[tuple[Usage, Price]]) -> None:
    """However many costs are added, and however small, the sum is exact."""
    total = sum(cost(usage, unit_prices(price)) for usage, price in answers)

    assert sum((usd_of(usage, price) for usage, price in answers), Fraction(0)) == Fraction(usd(total))


@given(st.decimals(0, 10**6, places=12))
def test_dollars_and_units(dollars: Decimal) -> None:
    """Dollars become units and dollars again without loss."""
    assert dollars == usd(units(dollars))


TOO_FINE = {
    "input": Price(Decimal("0.0000001"), Decimal(1)),
    "output": Price(Decimal(1), Decimal("0.0000001")),
    "a cache price": Price(Decimal(1), Decimal(1), cache_read=Decimal("0.0000001")),
    "a cache price that follows": Price(Decimal("0.000001"), Decimal(1)),
}


@pytest.mark.parametrize("price", TOO_FINE.values(), ids=TOO_FINE)
def test_a_price_that_can_not_be_exact(price: Price) -> None:
    """A price that is no whole number of units is refused rather than rounded."""
    with pytest.raises(ValueError, match="at most six decimals"):
        unit_prices(price)


# The ledger


@asynccontextmanager
async def plugin_of(**settings: Any) -> AsyncIterator[tuple[UsagePlugin, Store]]:
    store = Store("sqlite:///:memory:")
    await store.start()
    plugin = UsagePlugin(UsageSettings(**settings))
    nothing: Any = None
    await plugin.start(Services(ModelTable([MODEL]), open_limiter("memory"), store, nothing))
    try:
        yield plugin, store
    finally:
        await store.stop(5)


async def rows_of(store: Store) -> list[Json]:
    """The rows of the ledger, the oldest first."""
    query = select(table).order_by(table.c.at, table.c.request_id)
    return await store.read(lambda connection: [dict(row._mapping) for row in connection.execute(query)])


ALICE = Key("k_alice", "alice", "acme")
SENT = {"max_tokens": 10, "messages": [{"role": "user", "content": "Hi"}]}
COUNTED = {
    "input_tokens": 1_000,
    "output_tokens": 200,
    "cache_read_input_tokens": 30,
    "cache_creation_input_tokens": 42,
    "cache_creation": {"ephemeral_5m_input_tokens": 40, "ephemeral_1h_input_tokens": 2},
    "output_tokens_details": {"thinking_tokens": 9},
}
# 1 USD per million of input, 5 of output; 1.25, 2 and 0.1 for the cache
COST = (1_000 * 1_000_000) + (200 * 5_000_000) + (30 * 100_000) + (40 * 1_250_000) + (2 * 2_000_000)


def exchange_of(usage: Json | None = None, *, key: Key | None = ALICE, stream: bool = False, **fields: Any) -> Exchange:
    """An exchange that was sent to a deployment; `usage` is what the provider counted."""
    exchange = make_exchange({**SENT, "stream": stream, **fields}, route=Route.MESSAGES, key=key)
    exchange.deployment = Deployment("main", "model-at-main")
    exchange.usage.take(usage)
    return exchange


async def ended(plugin: UsagePlugin, exchange: Exchange, outcome: Outcome) -> None:
    """Let an exchange run through the plugin's output to this end."""
    output = await plugin.on_request(exchange)
    assert isinstance(output, OutputPlugin)
    if outcome is Outcome.COMPLETED:
        await output.on_complete()
    output.on_close(outcome)


async def test_a_row_says_everything() -> None:
    """An answered request is one row: who asked, what for, where it went, what was counted, what it cost and at which
    prices."""
    exchange = exchange_of(COUNTED, stream=True, metadata={"user_id": "u1"})
    async with plugin_of() as (plugin, store):
        await ended(plugin, exchange, Outcome.COMPLETED)
        [row] = await rows_of(store)

    expected = {
        "request_id": exchange.id,
        "key_id": "k_alice",
        "organization": "acme",
        "end_user": "u1",
        "model": "test/model",
        "asked_model": "test/model",
        "deployment": "main/model-at-main",
        "stream": True,
        "input": 1_000,
        "output": 200,
        "cache_read": 30,
        "cache_write_5m": 40,
        "cache_write_1h": 2,
        "thinking": 9,
        "cost": COST,
        "exactness": "exact",
        "reason": None,
        "raw": COUNTED,
    }
    assert expected == {name: row[name] for name in expected}
    assert {"input": 1_000_000, "output": 5_000_000} == {name: row["prices"][name] for name in ("input", "output")}
    assert abs(row["at"] - exchange.began) < 60


ESTIMATED_COST = 1_000 * 1_000_000 + 25 * 5_000_000
STARTED = {"input_tokens": 1_000, "output_tokens": 1}
# the counts, the bytes of deltas, streamed or not, the outcome; then exactness and cost of the row, None for no row
ENDINGS: dict[str, tuple[Json | None, int, bool, Outcome, tuple[str, int] | None]] = {
    "whole": (COUNTED, 0, False, Outcome.COMPLETED, ("exact", COST)),
    "streamed": (COUNTED, 900, True, Outcome.COMPLETED, ("exact", COST)),
    "failed": (None, 0, False, Outcome.FAILED, None),
    "failed in the stream": (STARTED, 900, True, Outcome.FAILED, None),
    "left before the start": (None, 0, True, Outcome.ABANDONED, ("unknown", 0)),
    "left at the start": (STARTED, 0, True, Outcome.ABANDONED, ("estimated", 1_000 * 1_000_000 + 5_000_000)),
    "left early": (STARTED, 100, True, Outcome.ABANDONED, ("estimated", ESTIMATED_COST)),
    "left early, within a token": (STARTED, 97, True, Outcome.ABANDONED, ("estimated", ESTIMATED_COST)),
    "left when more was counted": (
        {"input_tokens": 1_000, "output_tokens": 25},
        8,
        True,
        Outcome.ABANDONED,
        ("estimated", ESTIMATED_COST),
    ),
    "left a plain answer": (None, 0, False, Outcome.ABANDONED, None),
    "server tools": (
        {**STARTED, "server_tool_use": {"web_search_requests": 1}},
        0,
        False,
        Outcome.COMPLETED,
        ("inexact", 1_000 * 1_000_000 + 5_000_000),
    ),
    "no server tools": (
        {**STARTED, "server_tool_use": {"web_search_requests": 0}, "service_tier": "standard"},
        0,
        False,
        Outcome.COMPLETED,
        ("exact", 1_000 * 1_000_000 + 5_000_000),
    ),
    "another tier": (
        {**STARTED, "service_tier": "priority"},
        0,
        False,
        Outcome.COMPLETED,
        ("inexact", 1_000 * 1_000_000 + 5_000_000),
    ),
}


@pytest.mark.parametrize(("usage", "deltas", "stream", "outcome", "expected"), ENDINGS.values(), ids=ENDINGS)
async def test_what_is_billed(
    usage: Json | None, deltas: int, stream: bool, outcome: Outcome, expected: tuple[str, int] | None
) -> None:
    """A whole answer is billed by its counts, a stream left early for its input and the output so far, marked as an
    estimate; a failure not at all."""
    exchange = exchange_of(usage, stream=stream)
    exchange.usage.delta_bytes = deltas
    async with plugin_of() as (plugin, store):
        await ended(plugin, exchange, outcome)
        rows = await rows_of(store)

    assert [expected] * (expected is not None) == [(row["exactness"], row["cost"]) for row in rows]
    assert all((row["exactness"] == "exact") == (row["reason"] is None) for row in rows)


async def test_who_left_before_anything_was_sent_is_not_in_the_ledger() -> None:
    """Where no deployment was chosen nothing was used."""
    exchange = exchange_of(stream=True)
    exchange.deployment = None
    async with plugin_of() as (plugin, store):
        await ended(plugin, exchange, Outcome.ABANDONED)

        assert [] == await rows_of(store)


FREE = {
    "a plugin's own answer": (False, MODEL.price),
    "a model that costs nothing": (True, Price(Decimal(0), Decimal(0))),
}


@pytest.mark.parametrize(("billed", "price"), FREE.values(), ids=FREE)
async def test_what_is_free(billed: bool, price: Price) -> None:
    """What cost nothing has a row as well, which says so."""
    exchange = exchange_of(COUNTED)
    exchange.billed, exchange.model_or_none = billed, replace(MODEL, price=price)
    async with plugin_of() as (plugin, store):
        await ended(plugin, exchange, Outcome.COMPLETED)
        [row] = await rows_of(store)

    assert ("free", 0, 1_000) == (row["exactness"], row["cost"], row["input"])


async def test_nobody_is_asked_for_a_key() -> None:
    """In an open gateway rows are of nobody in particular."""
    async with plugin_of() as (plugin, store):
        await ended(plugin, exchange_of(COUNTED, key=None), Outcome.COMPLETED)
        [row] = await rows_of(store)

    assert ("open", None, COST) == (row["key_id"], row["organization"], row["cost"])


END_USERS: dict[str, tuple[Route, Json, str | None]] = {
    "Messages": (Route.MESSAGES, {"metadata": {"user_id": "u1"}}, "u1"),
    "Messages, none": (Route.MESSAGES, {"metadata": {}}, None),
    "Messages, another field": (Route.MESSAGES, {"user": "u1"}, None),
    "Messages, no object": (Route.MESSAGES, {"metadata": ["u1"]}, None),
    "chat, user": (Route.CHAT_COMPLETIONS, {"user": "u1", "safety_identifier": "u2"}, "u1"),
    "chat, safety_identifier": (Route.CHAT_COMPLETIONS, {"user": "", "safety_identifier": "u2"}, "u2"),
    "chat, a number": (Route.CHAT_COMPLETIONS, {"user": 7}, None),
    "chat, too long": (Route.CHAT_COMPLETIONS, {"user": "x" * 9999}, "x" * 512),
    "chat, a lone surrogate": (Route.CHAT_COMPLETIONS, {"user": "\ud800"}, "\ufffd"),
    "chat, a NUL": (Route.CHAT_COMPLETIONS, {"user": "a\0b"}, "a\ufffdb"),
}


@pytest.mark.parametrize(("route", "fields", "expected"), END_USERS.values(), ids=END_USERS)
async def test_the_end_user(route: Route, fields: Json, expected: str | None) -> None:
    """Whom the client asks for is kept, in either format's field."""
    exchange = make_exchange({**SENT, **fields}, route=route, key=ALICE)
    exchange.usage.take(COUNTED)
    async with plugin_of() as (plugin, store):
        await ended(plugin, exchange, Outcome.COMPLETED)
        [row] = await rows_of(store)

    assert expected == row["end_user"]


async def total_of(store: Store, scope: str, name: str) -> int:
    return await store.read(lambda connection: spent(connection, Budget(scope, name))[0])


async def test_sums_are_exact_over_many_rows() -> None:
    """What a key and an organization have spent is the exact sum of their rows, recorded in parallel."""
    numbers = random.Random(7)
    keys = [Key("a", "a", "acme"), Key("b", "b", "acme"), Key("c", "c")]
    price = Price(Decimal("0.1234"), Decimal("7.7777"), cache_read=Decimal("0.000001"))
    exchanges = []
    for _ in range(2_000):
        counted = {
            name: numbers.randrange(10**6) for name in ("input_tokens", "output_tokens", "cache_read_input_tokens")
        }
        exchange = exchange_of(counted, key=numbers.choice(keys))
        exchange.model_or_none = replace(MODEL, price=price)
        exchanges.append(exchange)

    async with plugin_of() as (plugin, store):
        await asyncio.gather(*(ended(plugin, exchange, Outcome.COMPLETED) for exchange in exchanges))
        found = [await total_of(store, "key", name) for name in "abc"]
        of_all = await total_of(store, "organization", "acme")

    expected = [sum((usd_of(each.usage, price) for each in exchanges if each.key is key), Fraction(0)) for key in keys]
    assert expected == [Fraction(usd(each)) for each in found]
    assert expected[0] + expected[1] == Fraction(usd(of_all))


async def test_a_request_is_recorded_once() -> None:
    """A second row of the same request changes neither ledger nor sums."""
    exchange = exchange_of(COUNTED)
    async with plugin_of() as (plugin, store):
        await ended(plugin, exchange, Outcome.COMPLETED)
        await ended(plugin, exchange, Outcome.COMPLETED)

        assert 1 == len(await rows_of(store))
        assert COST == await total_of(store, "key", "k_alice")


async def test_an_absurd_count_spoils_nobody_elses_row() -> None:
    """A provider may count more than any database can: others' rows are written all the same."""
    absurd = exchange_of({"input_tokens": 10**30, "output_tokens": 10**30})
    async with plugin_of() as (plugin, store):
        endings = [
            ended(plugin, each, Outcome.COMPLETED) for each in (exchange_of(COUNTED), absurd, exchange_of(COUNTED))
        ]
        first, _, third = await asyncio.gather(*endings, return_exceptions=True)
        await ended(plugin, exchange_of(COUNTED), Outcome.COMPLETED)

        assert (None, None) == (first, third)
        assert 3 == [row["cost"] for row in await rows_of(store)].count(COST)
        assert store.is_ready


# Budgets


async def refusal_of(plugin: UsagePlugin, exchange: Exchange) -> GatewayError | None:
    """Why a request doesn't come in, by its key alone."""
    try:
        await plugin.on_headers(exchange)
    except GatewayError as error:
        return error
    return None


async def reservation_of(plugin: UsagePlugin, exchange: Exchange) -> GatewayError | None:
    """Why a request isn't sent."""
    try:
        await plugin.on_send(exchange)
    except GatewayError as error:
        return error
    return None


def end(exchange: Exchange) -> None:
    for undo in exchange.take_defers():
        undo()


SPENT_LIMIT = "this key has reached its spend limit"
SPENT_BALANCE = "the prepaid balance of this organization is used up"
BUDGETS: dict[str, tuple[Key, str | None]] = {
    "no budget": (ALICE, None),
    "a limit of more": (replace(ALICE, spend_limit=COST + 1), None),
    "a limit reached": (replace(ALICE, spend_limit=COST), SPENT_LIMIT),
    "a limit passed": (replace(ALICE, spend_limit=COST - 1), SPENT_LIMIT),
    "a limit of nothing": (replace(ALICE, spend_limit=0), SPENT_LIMIT),
    "a limit for a day": (replace(ALICE, spend_limit=COST, spend_period="day"), SPENT_LIMIT),
    "a balance of more": (replace(ALICE, credit=COST + 1), None),
    "a balance used up": (replace(ALICE, credit=COST), SPENT_BALANCE),
    "a balance used up by another key": (Key("k_bob", "bob", "acme", credit=COST), SPENT_BALANCE),
    "another organization's balance": (Key("k_bob", "bob", "other", credit=1), None),
    "a balance of nothing": (Key("k_bob", "bob", "other", credit=0), SPENT_BALANCE),
    "another key's limit": (Key("k_bob", "bob", "acme", spend_limit=1), None),
}


@pytest.mark.parametrize(("key", "expected"), BUDGETS.values(), ids=BUDGETS)
async def test_a_budget_that_is_used_up(key: Key, expected: str | None) -> None:
    """A request comes in while anything is left: of the key's limit, and of what its organization has paid in."""
    async with plugin_of() as (plugin, _):
        await ended(plugin, exchange_of(COUNTED), Outcome.COMPLETED)

        refusal = await refusal_of(plugin, exchange_of(key=key))

    assert expected == (refusal and refusal.message)
    assert refusal is None or Kind.BILLING is refusal.kind


async def test_a_budget_of_a_period_is_full_again_in_the_next() -> None:
    """What was spent yesterday isn't spent today, and a request belongs to the day on which it began."""
    key = replace(ALICE, spend_limit=COST, spend_period="day")
    async with plugin_of() as (plugin, _):
        yesterday = exchange_of(COUNTED, key=key)
        yesterday.began -= 86_400
        await ended(plugin, yesterday, Outcome.COMPLETED)
        again = exchange_of(key=key)
        again.began -= 86_400

        assert await refusal_of(plugin, exchange_of(key=key)) is None
        assert await refusal_of(plugin, again) is not None


async def test_parallel_requests_can_not_pass_a_budget_together() -> None:
    """Of 40 requests at once on a budget for three at least three are sent; the others are told to wait, and when
    all is given back the next one is sent."""
    async with plugin_of() as (plugin, store):
        one = await _reserved_by(plugin, store, replace(ALICE, spend_limit=UNITS_PER_USD))
        key = Key("k_bob", "bob", spend_limit=3 * one)
        exchanges = [exchange_of(key=key) for _ in range(40)]

        refusals = await asyncio.gather(*(reservation_of(plugin, exchange) for exchange in exchanges))

        refused = [refusal for refusal in refusals if refusal is not None]
        assert 3 == refusals.count(None)
        assert {(Kind.RATE_LIMIT, 1)} == {(refusal.kind, refusal.retry_after) for refusal in refused}
        assert await refusal_of(plugin, exchange_of(key=key)) is None, "nothing is spent yet"
        for exchange in exchanges:
            end(exchange)
        assert await reservation_of(plugin, exchange_of(key=key)) is None


async def _reserved_by(plugin: UsagePlugin, store: Store, key: Key) -> int:
    """What one request of this key reserves; it is given back."""
    exchange = exchange_of(key=key)
    assert await reservation_of(plugin, exchange) is None
    reserved = await store.read(lambda connection: spent(connection, Budget("key", key.id))[1])
    end(exchange)
    return reserved


RESERVED = {
    "the request's own limit": ({"max_tokens": 10}, 10),
    "a limit with a point": ({"max_tokens": 10.0}, 10),
    "at most the setting": ({"max_tokens": 10**9}, 100),
    "no limit": ({"max_tokens": None}, 100),
}


@pytest.mark.parametrize(("fields", "output"), RESERVED.values(), ids=RESERVED)
async def test_what_is_reserved(fields: Json, output: int) -> None:
    """A request reserves its estimated input at the dearest price of input, and its output up to the setting."""
    key = replace(ALICE, spend_limit=UNITS_PER_USD)
    async with plugin_of(reserve_output_tokens=100) as (plugin, store):
        exchange = exchange_of(key=key, **fields)
        assert await reservation_of(plugin, exchange) is None
        reserved = await store.read(lambda connection: spent(connection, Budget("key", key.id))[1])

    input = reserved - output * 5_000_000
    assert 0 < input <= 100 * 1_250_000
    assert 0 == input % 1_250_000


async def test_a_reservation_never_takes_more_than_is_left() -> None:
    """A request that may cost more than is left is sent all the same, and holds what is left."""
    key = replace(ALICE, spend_limit=7)
    async with plugin_of() as (plugin, store):
        assert await reservation_of(plugin, exchange_of(key=key, max_tokens=32_000)) is None

        assert (0, 7) == await store.read(lambda connection: spent(connection, Budget("key", key.id)))


async def test_recording_gives_back_what_was_reserved() -> None:
    """When an answer is recorded its cost is spent and nothing is reserved any more."""
    key = replace(ALICE, spend_limit=UNITS_PER_USD)
    async with plugin_of() as (plugin, store):
        exchange = exchange_of(COUNTED, key=key)
        assert await reservation_of(plugin, exchange) is None
        await ended(plugin, exchange, Outcome.COMPLETED)
        end(exchange)

        assert (COST, 0) == await store.read(lambda connection: spent(connection, Budget("key", key.id)))


async def test_nobody_without_a_budget_reserves() -> None:
    """Where nothing is limited, nothing waits for the store."""
    exchange = exchange_of()
    async with plugin_of() as (plugin, _):
        assert await reservation_of(plugin, exchange) is None

    assert [] == exchange.take_defers()


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


async def test_a_very_deep_request_is_estimated() -> None:
    """What the parser can take can be estimated, too."""
    exchange = exchange_of(key=replace(ALICE, spend_limit=UNITS_PER_USD))
    exchange.replace({**SENT, "metadata": deep(5_000)})
    async with plugin_of() as (plugin, _):
        assert await reservation_of(plugin, exchange) is None


def test_a_row_of_an_answer_without_any_count() -> None:
    """An answer whose provider gave no count is not taken for a free one."""
    row = row_of(exchange_of(None))

    assert ("unknown", 0) == (row.exactness, row.cost)
    assert row.reason

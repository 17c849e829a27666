"""Budgets: what is left is reserved before it is spent, so that parallel requests can't pass a limit together."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sqlalchemy import Connection, func, select

from plugins import BUNDLED
from proxy.config import load
from proxy.exchange import Key
from proxy.loading import load_all
from proxy.store import Budget, BudgetReserved, BudgetSpent
from proxy.store.administration import change_key, create_key
from proxy.store.charges import charged_budgets
from proxy.store.ledger import Record, alive, gone, release_all, reserve, spent
from proxy.store.periods import span_of
from proxy.store.schema import budgets, reservations
from proxy.store.store import DEAD, Store
from proxy.store.writer import StoreDown
from proxy.testing import ScriptedUpstream, message_reply
from tests.process import REPOSITORY
from tests.store import servers
from tests.store.gateways import (
    INPUT_UNITS,
    OUTPUT_UNITS,
    Told,
    ask,
    configured,
    from_store,
    in_store,
    ledger,
    prepaid,
    reserved_units,
    serving,
    spent_units,
)
from tests.store.processes import two_gateways
from tests.store.rows import ACME, KEY_BUDGET, NOVEMBER, limited, new_id, row
from tests.store.watcher import HEADER, WATCHER

LIMIT = limited(100)


async def settled(store: Store) -> None:
    """Return when everything that was asked for before is written."""
    await store.write(lambda connection: None)


# What a reservation takes


ROOMS = {
    "all that is wanted": (30, 0, 0, 30),
    "no more than is left": (300, 0, 0, 100),
    "no more than others have left over": (300, 0, 70, 30),
    "no more than is not spent": (300, 60, 0, 40),
    "the last unit": (300, 60, 39, 1),
    "nothing for what costs nothing": (0, 99, 0, 0),
}


@pytest.mark.parametrize(("wanted", "used", "others", "expected"), ROOMS.values(), ids=ROOMS)
async def test_a_reservation_takes_what_is_left(
    store: Store, store_url: str, wanted: int, used: int, others: int, expected: int
) -> None:
    """What a request may cost is reserved, but never more than is neither spent nor reserved."""
    await store.record(row(cost=used), [ACME])
    if others:
        await store.reserve(new_id(), others, [LIMIT])

    amount = await store.reserve(new_id(), wanted, [LIMIT])

    assert expected == amount
    assert (expected + others, 2 if others else 1) == reserved_units(store_url)


REFUSALS: dict[str, tuple[int, int, type[Exception]]] = {
    "all is spent": (100, 0, BudgetSpent),
    "more than all is spent": (101, 0, BudgetSpent),
    "all is reserved": (0, 100, BudgetReserved),
    "the rest is reserved": (99, 1, BudgetReserved),
}


@pytest.mark.parametrize(("used", "others", "expected"), REFUSALS.values(), ids=REFUSALS)
async def test_a_reservation_is_refused_where_nothing_is_left(
    store: Store, store_url: str, used: int, others: int, expected: type[Exception]
) -> None:
    """Nothing left is one refusal, only others' reservations in the way another; and neither reserves anything."""
    await store.record(row(cost=used), [ACME])
    if others:
        await store.reserve(new_id(), others, [LIMIT])
    before = reserved_units(store_url)

    with pytest.raises(expected):
        await store.reserve(new_id(), 1, [KEY_BUDGET, LIMIT])

    assert before == reserved_units(store_url)


async def test_the_tightest_of_several_budgets_decides(store: Store, store_url: str) -> None:
    """A key's and its organization's budget are reserved from together: what fits into both, from both."""
    charged = [Budget("key", "key-1", limit=50), LIMIT]

    assert 50 == await store.reserve(new_id(), 80, charged)

    assert (100, 2) == reserved_units(store_url)


async def test_a_refusal_by_one_budget_takes_nothing_from_another(store: Store, store_url: str) -> None:
    """Where the second budget has nothing left, the first keeps all it had."""
    await store.record(row(cost=100), [ACME])

    with pytest.raises(BudgetSpent):
        await store.reserve(new_id(), 10, [Budget("key", "key-1", limit=500), LIMIT])

    assert (0, 0) == reserved_units(store_url)


async def test_only_limited_budgets_are_reserved_from(store: Store, store_url: str) -> None:
    """A budget without a limit only counts."""
    assert 10 == await store.reserve(new_id(), 10, [KEY_BUDGET, ACME])

    assert (0, 0) == reserved_units(store_url)


# How a reservation ends


async def test_a_record_settles_the_reservation(store: Store, store_url: str) -> None:
    """Recording a request charges what it really cost and gives back what it had reserved."""
    given = row(cost=70)
    await store.reserve(given.request_id, 30, [LIMIT])

    await store.record(given, [LIMIT])

    assert (0, 0) == reserved_units(store_url)
    assert 70 == spent_units(store_url, "acme")


async def test_what_was_reserved_is_given_back(store: Store, store_url: str) -> None:
    """A request that fails gives back its own reservation, once, and nobody else's."""
    mine, other = new_id(), new_id()
    await store.reserve(mine, 30, [LIMIT])
    await store.reserve(other, 20, [LIMIT])

    store.release_later(mine)
    store.release_later(mine)
    await settled(store)

    assert (20, 1) == reserved_units(store_url)


async def test_a_request_that_was_given_up_keeps_nothing(store: Store, store_url: str) -> None:
    """P9: a client that leaves in the middle of reserving, a thousand times, leaves nothing reserved."""
    chance = random.Random(1)

    async def one() -> None:
        request_id = new_id()
        reserving = asyncio.create_task(store.reserve(request_id, 1, [limited(10**9)]))
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        if chance.random() < 0.5:
            await asyncio.sleep(chance.random() / 100)
        reserving.cancel()
        store.release_later(request_id)  # as the exchange's defer does
        await asyncio.gather(reserving, return_exceptions=True)

    for _ in range(10):
        await asyncio.gather(*(one() for _ in range(100)))
    await settled(store)

    assert (0, 0) == reserved_units(store_url)
    assert 7 == await store.reserve(new_id(), 7, [LIMIT])


async def test_what_an_abandoned_request_cost_is_charged_before_its_reservation_is_free(store: Store) -> None:
    """In one commit: its cost, its reservation back, and another's reservation. The other finds only what is left."""
    left = row(cost=90)
    await store.reserve(left.request_id, 100, [LIMIT])

    store.record_later(left, [LIMIT])
    store.release_later(left.request_id)

    assert 10 == await store.reserve(new_id(), 100, [LIMIT])


# A gateway that dies


async def test_what_a_dead_gateway_had_reserved_is_given_back(store: Store, store_url: str) -> None:
    """A gateway that says nothing for long is dead: its reservations are given back, those of the living stay."""
    at = NOVEMBER
    await store.write(alive("dead", at, DEAD))
    await store.write(alive("living", at, DEAD))
    await store.write(reserve(new_id(), 30, [LIMIT], "dead"))
    await store.write(reserve(new_id(), 20, [LIMIT], "living"))

    await store.write(alive("living", at + DEAD, DEAD))
    assert (50, 2) == reserved_units(store_url), "not yet"
    await store.write(alive("living", at + DEAD + 1, DEAD))

    assert (20, 1) == reserved_units(store_url)


async def test_a_gateway_that_stops_gives_back_what_it_had_reserved(store_url: str) -> None:
    """A stopped gateway leaves no reservation, and no trace of itself."""
    store = Store(store_url)
    await store.start()
    await store.reserve(new_id(), 30, [LIMIT])

    await store.stop(5)

    assert (0, 0) == reserved_units(store_url)


async def test_a_gateway_on_its_own_file_begins_without_reservations(sqlite_url: str) -> None:
    """Whoever had reserved in a file that nobody serves from any more is gone: at once, not after a while."""
    store = Store(sqlite_url)
    await store.start()
    await store.write(reserve(new_id(), 30, [LIMIT], "killed"))
    await store.write(alive("killed", NOVEMBER * 2, DEAD))
    await store.stop(5)

    again = Store(sqlite_url)
    await again.start()
    await again.stop(5)

    assert (0, 0) == reserved_units(sqlite_url)


async def test_a_gateway_that_is_gone_takes_only_its_own(store: Store, store_url: str) -> None:
    """The end of one gateway leaves what others have reserved."""
    await store.write(reserve(new_id(), 30, [LIMIT], "one"))
    await store.write(reserve(new_id(), 20, [LIMIT], "other"))

    await store.write(gone("one"))

    assert (20, 1) == reserved_units(store_url)


# Any order of events


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_happens_the_sums_are_right(store: Store, seed: int) -> None:
    """Whatever is reserved, recorded, given back, replayed or lost with its gateway, in any order: what is reserved is
    the sum of the reservations, what is spent the sum of the rows, and no more is promised than there is."""
    chance = random.Random(seed)
    limit = Budget("organization", "acme", limit=1000)
    promised: dict[str, tuple[int, str]] = {}
    cost: dict[str, int] = {}
    at = NOVEMBER

    for _ in range(100):
        at += 1
        act = chance.choice(["reserve"] * 4 + ["record", "record", "release", "replay", "die"])
        if act == "reserve":
            request_id, gateway = new_id(), chance.choice("ab")
            outcome = await store.write(reserve(request_id, chance.randrange(1, 200), [limit], gateway))
            left = 1000 - sum(cost.values()) - sum(amount for amount, _ in promised.values())
            if isinstance(outcome, int):
                assert 0 < outcome <= left
                promised[request_id] = (outcome, gateway)
            else:
                assert isinstance(outcome, BudgetSpent) == (sum(cost.values()) >= 1000)
                assert left <= 0
        elif act == "record" and promised:
            request_id = chance.choice(list(promised))
            amount, _ = promised.pop(request_id)
            cost[request_id] = chance.randrange(0, amount + 20)
            await store.record(row(request_id=request_id, cost=cost[request_id]), [limit])
        elif act == "replay" and cost:
            await store.record(row(request_id=chance.choice(list(cost)), cost=10**6), [limit])
        elif act == "release" and promised:
            request_id = chance.choice(list(promised))
            del promised[request_id]
            await store.write(partial(release_all, request_ids=[request_id]))
        elif act == "die":
            dead, living = chance.sample("ab", 2)
            await store.write(gone(dead))
            await store.write(alive(living, at, DEAD))
            promised = {name: kept for name, kept in promised.items() if kept[1] != dead}
        total = sum(amount for amount, _ in promised.values())
        assert (sum(cost.values()), total) == await store.read(lambda connection: spent(connection, limit))
        assert len(promised) == await store.read(how_many_reservations)


def how_many_reservations(connection: Connection) -> int:
    return int(connection.execute(select(func.count()).select_from(reservations)).scalar_one())


# Periods


SPANS: dict[str, tuple[Any, str, str, str, str]] = {
    "a day": ("day", "2026-11-29T23:59:59.999", "2026-11-29", "2026-11-29", "2026-11-30"),
    "a leap day": ("day", "2028-02-29T12:00", "2028-02-29", "2028-02-29", "2028-03-01"),
    "a week begins on Monday": ("week", "2026-11-29T23:59", "2026-W48", "2026-11-23", "2026-11-30"),
    "a week over new year": ("week", "2027-01-01T00:00", "2026-W53", "2026-12-28", "2027-01-04"),
    "a month": ("month", "2026-11-01T00:00", "2026-11", "2026-11-01", "2026-12-01"),
    "the end of a year": ("month", "2026-12-31T23:59:59", "2026-12", "2026-12-01", "2027-01-01"),
}


def moment(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(("period", "at", "name", "begins", "ends"), SPANS.values(), ids=SPANS)
def test_a_period_has_a_name_a_beginning_and_an_end(period: Any, at: str, name: str, begins: str, ends: str) -> None:
    """Days, weeks and months, in UTC."""
    assert (name, moment(begins), moment(ends)) == span_of(period, moment(at))


async def test_a_new_month_begins_with_nothing_spent(store: Store) -> None:
    """L7: what was spent in November leaves December whole; a request belongs to the month in which it began."""
    key = Key("key-1", "one", spend_limit=100, spend_period="month")
    november, december = moment("2026-11-30T23:59:59"), moment("2026-12-01T00:00:01")
    early, late = row(cost=90, at=november), row(cost=40, at=november)
    await store.record(early, charged_budgets(key, november))

    assert 10 == await store.reserve(late.request_id, 100, charged_budgets(key, november))
    assert 100 == await store.reserve(new_id(), 1000, charged_budgets(key, december))
    await store.record(late, charged_budgets(key, november))

    def both(connection: Connection) -> list[tuple[int, int]]:
        return [spent(connection, charged_budgets(key, at)[1]) for at in (november, december)]

    assert [(130, 0), (0, 100)] == await store.read(both)


async def test_a_request_over_midnight_is_counted_once(store: Store) -> None:
    """L7: a request that began in November and was recorded in December is not counted in December, though December's
    budget is first added up after it."""
    key = Key("key-1", "one", spend_limit=100, spend_period="month")
    november, december = moment("2026-11-30T23:59:59"), moment("2026-12-01T00:00:09")

    await store.record(row(cost=90, at=november), charged_budgets(key, november))

    assert 100 == await store.reserve(new_id(), 1000, charged_budgets(key, december))


async def test_two_gateways_may_begin_a_period_at_once() -> None:
    """L7: two gateways that open the new month in the same moment count each request once."""
    url = servers.postgres().database()
    stores = [Store(url), Store(url)]
    key = Key("key-1", "one", spend_limit=10**9, spend_period="day")
    for each in stores:
        await each.start()
    try:
        for day in range(5):
            at = NOVEMBER + day * 86400
            charged = charged_budgets(key, at)
            await asyncio.gather(*(each.record(row(cost=1, at=at), charged) for each in stores for _ in range(10)))
    finally:
        for each in stores:
            await each.stop(5)

    query = select(budgets.c.period, budgets.c.spent).where(budgets.c.name == "key-1").order_by(budgets.c.period)
    sums = [tuple(each) for each in from_store(url, lambda connection: connection.execute(query).all())]
    assert [100, 20, 20, 20, 20, 20] == [total for _, total in sums]


async def test_a_limit_that_is_set_later_counts_what_was_spent(store: Store, store_url: str) -> None:
    """A limit for the month, set on a key that has been in use, knows what the month has cost so far; and one that was
    taken away and set again doesn't take up an old sum."""
    new = in_store(store_url, lambda connection: create_key(connection, "one", spend_period="month", spend_limit=100))
    at = NOVEMBER
    monthly = charged_budgets(Key(new.id, "one", spend_limit=100, spend_period="month"), at)
    daily = charged_budgets(Key(new.id, "one", spend_limit=100, spend_period="day"), at)
    await store.record(row(key_id=new.id, cost=30, at=at), monthly)
    in_store(store_url, lambda connection: change_key(connection, "one", {"spend_period": "day"}))
    await store.record(row(key_id=new.id, cost=30, at=at), daily)
    in_store(store_url, lambda connection: change_key(connection, "one", {"spend_period": "month"}))

    assert 40 == await store.reserve(new_id(), 100, monthly)


# Through the gateway: a budget for three requests, forty at once


COST = 12 * INPUT_UNITS + 7 * OUTPUT_UNITS
"""What the scripted upstream's answer costs."""
BALANCE = 3 * COST


def judged(answers: Sequence[Told], url: str, upstream: ScriptedUpstream) -> None:
    """What must hold after many parallel requests against a budget worth three."""
    statuses = [answer.status for answer in answers]
    reserved = [int(answer.headers[HEADER]) for answer in answers if answer.status == 200]
    assert len(reserved) >= 3
    assert {200, 402, 429} >= set(statuses)
    assert all(answer.headers["retry-after"] == "1" for answer in answers if answer.status == 429)
    assert len(reserved) == len(upstream.received) == len(ledger(url))
    assert len(reserved) * COST == spent_units(url, "acme")
    assert len(reserved) * COST <= BALANCE + sum(max(0, COST - amount) for amount in reserved)
    assert (0, 0) == reserved_units(url)


SLOW = 0.05
"""Seconds that the upstream takes, so that requests stand beside each other."""


def slow_upstream() -> ScriptedUpstream:
    whole = message_reply()
    whole.pieces = [SLOW, *whole.pieces]
    return ScriptedUpstream(*([whole] * 40))


@pytest.mark.parametrize("max_tokens", [7, 1], ids=["reserved as it costs", "reserved too little"])
async def test_forty_at_once_against_a_budget_for_three(
    session: aiohttp.ClientSession, store_url: str, max_tokens: int
) -> None:
    """L4: at least three are served, the rest is told to come back (429) or that nothing is left (402); and more is
    spent than there was only by as much as requests cost more than they had reserved."""
    async with (
        slow_upstream() as upstream,
        serving(configured(store_url, upstream.url, auth=prepaid(BALANCE), first=[WATCHER])) as url,
    ):
        answers = await asyncio.gather(*(ask(session, url, max_tokens=max_tokens) for _ in range(40)))
        late = await ask(session, url)

    assert late.status in (200, 402)
    judged([*answers, late], store_url, upstream)


@pytest.mark.slow
async def test_forty_at_once_at_two_gateways(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """L4: the same holds where two gateways share the budget, on PostgreSQL and Redis."""
    store_url = servers.postgres().database()
    async with slow_upstream() as upstream:
        limiter = servers.redis_server().url
        config = configured(store_url, upstream.url, auth=prepaid(BALANCE), first=[WATCHER], limiter=limiter)
        with two_gateways(config, tmp_path) as urls:
            answers = await asyncio.gather(*(ask(session, urls[number % 2], max_tokens=7) for number in range(40)))

    judged(answers, store_url, upstream)


def test_the_shipped_cluster_is_several_gateways() -> None:
    """config/cluster.yaml loads, and shares the store and the limiter that it is told."""
    key = {"ANTHROPIC_API_KEY": "k"}
    told = {**key, "EZAT_STORE": "postgresql://a/b", "EZAT_LIMITER": "redis://c", "EZAT_PORT": "1"}
    path = REPOSITORY / "config" / "cluster.yaml"

    config, _, pipeline = load_all(path, BUNDLED, told)
    default = load(path, key)

    assert ("postgresql://a/b", "redis://c", 1) == (config.store, config.limiter, config.server.port)
    assert list(BUNDLED) == [plugin.name for plugin in pipeline.plugins]
    assert ("postgresql", "redis") == (default.store.partition(":")[0], default.limiter.partition(":")[0])


async def test_a_running_answer_is_never_cut_off(session: aiohttp.ClientSession, store_url: str) -> None:
    """L9: whoever has anything left is let in, whatever it may cost, and hears the answer out; the next isn't."""
    async with ScriptedUpstream() as upstream, serving(configured(store_url, upstream.url, auth=prepaid(1))) as url:
        first = await ask(session, url, max_tokens=8000)
        second = await ask(session, url)

    assert [True, 402] == [first.is_whole, second.status]
    assert COST == spent_units(store_url, "acme")
    assert (0, 0) == reserved_units(store_url)


async def test_a_store_that_is_down_reserves_nothing(sqlite_url: str) -> None:
    """Where nothing can be written, nothing is promised."""
    store = Store(sqlite_url)
    await store.start()
    await store.stop(5)

    with pytest.raises(StoreDown):
        await store.reserve(new_id(), 1, [LIMIT])


def test_a_record_names_its_budgets() -> None:
    """The writer is given a row with all that it is charged to."""
    charged = charged_budgets(Key("k", "k", "acme", spend_limit=5, spend_period="day", credit=9), NOVEMBER)

    assert [None, 5, 9] == [budget.limit for budget in Record(row(), charged).charged]

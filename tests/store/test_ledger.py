"""The ledger: a row per answered request, once, and sums that follow it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import asdict, replace
from typing import Any

import pytest
from sqlalchemy import select

from proxy.store import Budget, Exactness
from proxy.store.database import open_engine
from proxy.store.ledger import DAY, Record, record_all, spent
from proxy.store.schema import budgets
from proxy.store.store import Store
from tests.store.gateways import from_store, ledger
from tests.store.rows import ACME, CHARGED, KEY_BUDGET, NOVEMBER, limited, row
from tests.store.servers import postgres


def sums(url: str) -> dict[tuple[str, str], int]:
    """What each budget has spent for all time."""
    query = select(budgets.c.scope, budgets.c.name, budgets.c.spent).where(budgets.c.period == "")
    found = from_store(url, lambda connection: connection.execute(query).all())
    return {(each.scope, each.name): each.spent for each in found}


ROWS = {
    "plain": {},
    "streamed, with caches": {
        "stream": True,
        "cache_read": 7,
        "cache_write_5m": 5,
        "cache_write_1h": 3,
        "thinking": 1,
    },
    "the largest cost": {"cost": 2**63 - 1, "input": 2**62},
    "not exact": {"exactness": Exactness.ESTIMATED.value, "reason": "left early"},
    "of no organization": {"organization": None},
    "without a deployment": {"deployment": None, "exactness": Exactness.FREE.value, "cost": 0},
    "with an end user": {"end_user": "Zoë 🦀 'x'; DROP TABLE usage; --"},
    "with a long end user": {"end_user": "é" * 512},
    "with the provider's own object": {
        "raw": {
            "input_tokens": 2**60,
            "cache_creation": {"ephemeral_5m_input_tokens": 1},
            "new": [None, True, "ü\\u0000"],
        }
    },
}


@pytest.mark.parametrize("fields", ROWS.values(), ids=ROWS)
async def test_a_row_is_kept_as_it_was_given(store: Store, store_url: str, fields: dict[str, Any]) -> None:
    """All that a row says comes back, in either database."""
    given = row(**fields)
    charged = CHARGED if given.organization is not None else [KEY_BUDGET]

    await store.record(given, charged)

    assert [{**asdict(given), "day": int(NOVEMBER // DAY)}] == ledger(store_url)


async def test_a_replay_changes_nothing(store: Store, store_url: str) -> None:
    """The same request recorded again, even with another cost, is neither a second row nor charged twice."""
    given = row(cost=20)
    await store.record(given, CHARGED)

    await store.record(given, CHARGED)
    await store.record(replace(given, cost=999), CHARGED)

    assert [20] == [each["cost"] for each in ledger(store_url)]
    assert {("key", "key-1"): 20, ("organization", "acme"): 20} == sums(store_url)


async def test_a_replay_in_the_same_commit_changes_nothing(store: Store, store_url: str) -> None:
    """A request that stands twice in one batch is one row, charged once."""
    given = row(cost=20)

    new = await store.write(lambda connection: record_all(connection, [Record(given, CHARGED)] * 3))

    assert [True, False, False] == new
    assert {("key", "key-1"): 20, ("organization", "acme"): 20} == sums(store_url)


async def test_many_at_once_are_all_there(store: Store, store_url: str) -> None:
    """Requests that are recorded at the same time each have their row, and the sums are those of the rows."""
    given = [row(cost=number, key_id=f"key-{number % 7}", organization=f"org-{number % 3}") for number in range(500)]

    await asyncio.gather(
        *(
            store.record(each, [Budget("key", each.key_id), Budget("organization", str(each.organization))])
            for each in given
        )
    )

    assert {each.request_id: each.cost for each in given} == {
        each["request_id"]: each["cost"] for each in ledger(store_url)
    }
    expected = {("key", f"key-{key}"): sum(range(key, 500, 7)) for key in range(7)}
    expected |= {("organization", f"org-{rest}"): sum(range(rest, 500, 3)) for rest in range(3)}
    assert expected == sums(store_url)


async def test_a_budget_that_is_new_knows_what_was_spent_before(store: Store, store_url: str) -> None:
    """A budget's sum begins with the rows that are there already, so that a limit set later counts them."""
    await store.record(row(cost=30), [KEY_BUDGET])

    await store.record(row(cost=4), CHARGED)

    assert {("key", "key-1"): 34, ("organization", "acme"): 34} == sums(store_url)


async def test_a_limit_that_changes_within_a_commit_changes_no_sum(store: Store, store_url: str) -> None:
    """Two requests of one batch that knew different limits are charged to the same budget."""
    records = [Record(row(cost=5), [limited(100)]), Record(row(cost=6), [limited(200)])]

    await store.write(lambda connection: record_all(connection, records))
    await store.write(lambda connection: record_all(connection, [Record(row(cost=7), [limited(300)])]))

    assert {("organization", "acme"): 18} == sums(store_url)


async def test_what_is_spent_is_counted_where_no_sum_is_kept(store: Store) -> None:
    """A budget without a row of its own is added up from the ledger, from where its period begins."""
    await store.record(row(cost=30, at=NOVEMBER), [])
    await store.record(row(cost=4, at=NOVEMBER + DAY), [])
    budget = Budget("key", "key-1", "later", begins=NOVEMBER + 1)

    assert (4, 0) == await store.read(lambda connection: spent(connection, budget))


def test_a_budget_that_another_gateway_opens_meanwhile_is_added_to() -> None:
    """Two gateways that open a budget in the same moment lose neither's cost."""
    url = postgres().database()
    first, second = open_engine(url), open_engine(url)

    def late() -> None:
        with second.begin() as connection:
            record_all(connection, [Record(row(cost=2), [ACME])])

    other = threading.Thread(target=late)
    with first.begin() as connection:
        record_all(connection, [Record(row(cost=1), [ACME])])
        other.start()  # it finds no sum, wants to make one, and has to wait for this one
        postgres().wait_for_a_lock()
    other.join()
    for engine in (first, second):
        engine.dispose()

    assert {("organization", "acme"): 3} == sums(url)


async def test_gateways_that_write_the_same_budgets_never_lock_each_other_out() -> None:
    """Under load from two gateways on one PostgreSQL no request fails, and no cost is lost."""
    url = postgres().database()
    stores = [Store(url), Store(url)]
    for each in stores:
        await each.start()

    async def one(number: int) -> None:
        budgets_ = [Budget("key", f"z{number % 5}", limit=10**9), limited(10**9, f"a{number % 3}")]
        given = row(cost=number)
        await stores[number % 2].reserve(given.request_id, 100, budgets_)
        await stores[number % 2].record(given, budgets_)

    try:
        await asyncio.gather(*(one(number) for number in range(300)))
    finally:
        for each in stores:
            await each.stop(5)

    assert 2 * sum(range(300)) == sum(sums(url).values())


async def test_what_cannot_be_counted_is_refused_and_stops_nobody_else(store: Store, store_url: str) -> None:
    """A row that the database refuses fails alone; those that came with it are written."""
    good, bad = row(cost=1), row(cost=2**70)

    outcomes = await asyncio.gather(
        *(store.record(each, [KEY_BUDGET]) for each in (good, bad, row(cost=2))), return_exceptions=True
    )

    assert [True, False, True] == [outcome is None for outcome in outcomes]
    assert [1, 2] == sorted(each["cost"] for each in ledger(store_url))
    assert store.is_ready

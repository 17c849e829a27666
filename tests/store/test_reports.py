"""What the ledger says: sums, and differences from a provider's own export."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from proxy.store.administration import create_key
from proxy.store.database import MEMORY, open_engine
from proxy.store.reports import By, Difference, NoExport, as_csv, differences, sums
from proxy.store.store import Store
from tests.store.rows import row


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


ROWS: list[dict[str, Any]] = [
    {"at": at("2026-11-01T00:00"), "cost": 10**15, "input": 100, "output": 10, "end_user": "ann"},
    {
        "at": at("2026-11-01T23:59:59.9"),
        "cost": 1,
        "input": 7,
        "cache_read": 5,
        "end_user": "bob",
        "organization": None,
    },
    {
        "at": at("2026-11-02T00:00"),
        "cost": 3 * 10**15,
        "model": "other/model",
        "deployment": "up/other/at-upstream",
        "cache_write_5m": 30,
        "cache_write_1h": 4,
        "exactness": "estimated",
        "end_user": "ann",
    },
    {"at": at("2026-11-02T12:00"), "cost": 0, "deployment": None, "exactness": "free", "input": 0, "output": 0},
    {"at": at("2026-11-03T12:00"), "cost": 5, "deployment": "second/model-at-upstream", "exactness": "inexact"},
]


@pytest.fixture
async def filled(store: Store) -> Store:
    """A store with a few days of usage."""
    new = await store.write(lambda connection: create_key(connection, "one"))
    for number, fields in enumerate(ROWS):
        await store.record(row(key_id=new.id if number % 2 else "yaml:static", **fields), [])
    return store


TABLES: dict[str, tuple[By, list[tuple[Any, int, int, int]]]] = {
    "key": ("key", [("yaml:static", 3, 4 * 10**15 + 5, 2), ("one", 2, 1, 0)]),
    "organization": ("organization", [("acme", 4, 4 * 10**15 + 5, 2), (None, 1, 1, 0)]),
    "end user": ("end_user", [("ann", 2, 4 * 10**15, 1), (None, 2, 5, 1), ("bob", 1, 1, 0)]),
    "model": ("model", [("other/model", 1, 3 * 10**15, 1), ("test/model", 4, 10**15 + 6, 1)]),
    "day": (
        "day",
        [("2026-11-01", 2, 10**15 + 1, 0), ("2026-11-02", 2, 3 * 10**15, 1), ("2026-11-03", 1, 5, 1)],
    ),
}


@pytest.mark.parametrize(("by", "expected"), TABLES.values(), ids=TABLES)
async def test_usage_is_summed_up_by(filled: Store, by: By, expected: list[tuple[Any, int, int, int]]) -> None:
    """Requests, cost to the last unit, and how many rows are not exact, per group; the dearest first, days in order."""
    found = await filled.read(lambda connection: sums(connection, by))

    assert expected == [(each[by], each["requests"], each["cost"], each["not_exact"]) for each in found]
    assert all(type(each["cost"]) is int for each in found)


async def test_tokens_are_summed_up(filled: Store) -> None:
    """Each kind of tokens has its sum."""
    found = await filled.read(lambda connection: sums(connection, "day"))

    kinds = ("input", "cache_read", "cache_write_5m", "cache_write_1h", "output")
    assert [(107, 5, 0, 0, 12), (10, 0, 30, 4, 2), (10, 0, 0, 0, 2)] == [
        tuple(each[kind] for kind in kinds) for each in found
    ]


SPANS: dict[str, tuple[float | None, float | None, list[str]]] = {
    "from a moment on": (at("2026-11-02T00:00"), None, ["2026-11-02", "2026-11-03"]),
    "before a moment": (None, at("2026-11-02T00:00"), ["2026-11-01"]),
    "between": (at("2026-11-01T12:00"), at("2026-11-02T12:00"), ["2026-11-01", "2026-11-02"]),
    "nothing there": (at("2027-01-01T00:00"), None, []),
}


@pytest.mark.parametrize(("since", "until", "expected"), SPANS.values(), ids=SPANS)
async def test_usage_of_a_span_of_time(
    filled: Store, since: float | None, until: float | None, expected: list[str]
) -> None:
    """``since`` counts from that moment on, ``until`` up to it."""
    found = await filled.read(lambda connection: sums(connection, "day", since, until))

    assert expected == [each["day"] for each in found]


NAMES = ("usage_date_utc", "model_version", "usage_input_tokens_no_cache", "usage_output_tokens")
RIGHT = [
    ("2026-11-01", "model-at-upstream", 107, 12),
    ("2026-11-02", "other/at-upstream", 10, 2),
    ("2026-11-03", "model-at-upstream", 10, 2),
]


def export(rows: list[tuple[Any, ...]], names: tuple[str, ...] = NAMES) -> str:
    return "\n".join(",".join(map(str, line)) for line in [names, *rows]) + "\n"


EXPORTS: dict[str, tuple[str, list[Difference]]] = {
    "all agree": (export(RIGHT), []),
    "several lines of a day and model": (
        export([("2026-11-01", "model-at-upstream", 100, 10), ("2026-11-01", "model-at-upstream", 7, 2)]),
        [],
    ),
    "the provider counts more": (
        export([("2026-11-01", "model-at-upstream", 108, 12)]),
        [Difference("2026-11-01", "model-at-upstream", "input", 108, 107)],
    ),
    "the ledger counts more": (
        export([("2026-11-01", "model-at-upstream", 107, 0)]),
        [Difference("2026-11-01", "model-at-upstream", "output", 0, 12)],
    ),
    "a day that the ledger doesn't know": (
        export([("2026-12-24", "model-at-upstream", 3, 0)]),
        [Difference("2026-12-24", "model-at-upstream", "input", 3, 0)],
    ),
    "a model that the ledger doesn't know": (
        export([("2026-11-01", "unheard-of", 0, 9)]),
        [Difference("2026-11-01", "unheard-of", "output", 9, 0)],
    ),
    "other names, a time, an empty count": (
        export(
            [("2026-11-01T05:00:00Z", "model-at-upstream", "", 12)],
            ("Starting_At", "Model", "cache_read_input_tokens", "output_tokens"),
        ),
        [Difference("2026-11-01", "model-at-upstream", "cache_read", 0, 5)],
    ),
    "cache writes of both lifetimes": (
        export(
            [("2026-11-02", "other/at-upstream", 30, 5, 2)],
            ("date", "model", "usage_input_tokens_cache_write_5m", "usage_input_tokens_cache_write_1h", "output"),
        ),
        [Difference("2026-11-02", "other/at-upstream", "cache_write_1h", 5, 4)],
    ),
    "an empty export": (export([]), []),
}


@pytest.mark.parametrize(("text", "expected"), EXPORTS.values(), ids=EXPORTS)
async def test_a_providers_export_is_compared(filled: Store, text: str, expected: list[Difference]) -> None:
    """By day, model at the provider and kind of tokens; only what stands in the export is compared."""
    assert expected == await filled.read(lambda connection: differences(connection, text))


UNREADABLE: Mapping[str, tuple[str, str]] = {
    "no column for the day": (export([], ("model", "output_tokens")), "no column for day; known are usage_date_utc"),
    "no column for the model": (export([], ("date", "output_tokens")), "no column for model"),
    "no column for the output": (export([], ("date", "model")), "no column for output"),
    "nothing at all": ("", "no column for day"),
    "a day that is none": (export([("yesterday", "m", 1, 1)]), "line 2 can't be read"),
    "a count that is none": (export([*RIGHT, ("2026-11-01", "m", "1.5", 1)]), "line 5 can't be read"),
    "a line that is too short": (export([("2026-11-01",)]), "line 2 can't be read"),
}


@pytest.mark.parametrize(("text", "expected"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_is_no_export_is_refused(text: str, expected: str) -> None:
    """The complaint says which column or which line, before the ledger is asked."""
    with open_engine(MEMORY).connect() as connection, pytest.raises(NoExport, match=expected):
        differences(connection, text)


async def test_rows_as_csv() -> None:
    """A CSV reader gives back what was written, quotes and commas too."""
    rows: list[dict[str, Any]] = [{"key": 'a "b", c', "cost": "1.5"}, {"key": None, "cost": "0"}]

    assert [{"key": 'a "b", c', "cost": "1.5"}, {"key": "", "cost": "0"}] == list(
        csv.DictReader(io.StringIO(as_csv(rows)))
    )

"""What an answer used, merged over the events of a stream."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.usage import Usage

Json = dict[str, Any]


def taken(*usages: object) -> Usage:
    usage = Usage()
    for each in usages:
        usage.take(each)
    return usage


def counts(usage: Usage) -> dict[str, int]:
    """The counts that are not 0."""
    names = ("input", "output", "cache_read", "cache_write", "cache_write_5m", "cache_write_1h", "thinking")
    return {name: count for name in names if (count := getattr(usage, name))}


SPLIT = {"ephemeral_5m_input_tokens": 30, "ephemeral_1h_input_tokens": 12}
TAKEN: dict[str, tuple[list[object], dict[str, int]]] = {
    "nothing": ([], {}),
    "both counts": ([{"input_tokens": 3, "output_tokens": 5}], {"input": 3, "output": 5}),
    "read from the cache": ([{"cache_read_input_tokens": 7}], {"cache_read": 7}),
    "written": ([{"cache_creation_input_tokens": 7}], {"cache_write": 7, "cache_write_5m": 7}),
    "written, by lifetime": (
        [{"cache_creation_input_tokens": 42, "cache_creation": SPLIT}],
        {"cache_write": 42, "cache_write_5m": 30, "cache_write_1h": 12},
    ),
    "written, only by lifetime": (
        [{"cache_creation": SPLIT}],
        {"cache_write": 42, "cache_write_5m": 30, "cache_write_1h": 12},
    ),
    "written, only for an hour": (
        [{"cache_creation_input_tokens": 12, "cache_creation": {"ephemeral_1h_input_tokens": 12}}],
        {"cache_write": 12, "cache_write_1h": 12},
    ),
    "a sum that is null beside lifetimes": (
        [{"cache_creation_input_tokens": None, "cache_creation": SPLIT}],
        {"cache_write": 42, "cache_write_5m": 30, "cache_write_1h": 12},
    ),
    "more for an hour than in all": (
        [{"cache_creation_input_tokens": 5, "cache_creation": SPLIT}],
        {"cache_write": 5, "cache_write_1h": 5},
    ),
    "thinking": ([{"output_tokens": 9, "output_tokens_details": {"thinking_tokens": 4}}], {"output": 9, "thinking": 4}),
    "the latest wins": ([{"output_tokens": 1}, {"output_tokens": 8}, {"output_tokens": 5}], {"output": 5}),
    "0 replaces nothing": ([{"input_tokens": 3, "output_tokens": 1}, {"input_tokens": 0}], {"input": 3, "output": 1}),
    "null replaces nothing": ([{"input_tokens": 3}, {"input_tokens": None}], {"input": 3}),
    "a missing count replaces nothing": ([{"input_tokens": 3}, {"output_tokens": 4}], {"input": 3, "output": 4}),
    "counts only at the end": (
        [{"input_tokens": 0}, {"input_tokens": 9, "output_tokens": 2}],
        {"input": 9, "output": 2},
    ),
    "0 replaces nothing that was written": (
        [{"cache_creation_input_tokens": 7}, {"cache_creation_input_tokens": 0, "cache_creation": {}}],
        {"cache_write": 7, "cache_write_5m": 7},
    ),
    "the sum repeated without lifetimes": (
        [{"cache_creation_input_tokens": 42, "cache_creation": SPLIT}, {"cache_creation_input_tokens": 42}],
        {"cache_write": 42, "cache_write_5m": 30, "cache_write_1h": 12},
    ),
    "0 replaces no thinking": (
        [{"output_tokens_details": {"thinking_tokens": 4}}, {"output_tokens_details": {"thinking_tokens": 0}}],
        {"thinking": 4},
    ),
    "null details": ([{"output_tokens_details": None, "cache_creation": None, "output_tokens": 1}], {"output": 1}),
    "details of another type": ([{"output_tokens_details": [1], "cache_creation": "x"}], {}),
    "counts of another type": ([{"input_tokens": "3", "output_tokens": 1.5, "cache_read_input_tokens": True}], {}),
    "negative counts": ([{"input_tokens": -3, "cache_creation_input_tokens": -1}], {}),
    "a usage of another type": ([None, [1], "x", 7], {}),
}


@pytest.mark.parametrize(("usages", "expected"), TAKEN.values(), ids=TAKEN)
def test_counts(usages: list[object], expected: dict[str, int]) -> None:
    """The latest count wins, but nothing, null or 0 never replaces one that was given."""
    assert expected == counts(taken(*usages))


REPORTED: dict[str, tuple[list[object], bool]] = {
    "nothing": ([], False),
    "no object": ([None, []], False),
    "an empty object": ([{}], True),
    "counts of 0": ([{"output_tokens": 0}], True),
}


@pytest.mark.parametrize(("usages", "expected"), REPORTED.values(), ids=REPORTED)
def test_reported(usages: list[object], expected: bool) -> None:
    """A usage counts as reported as soon as the provider gave an object, whatever stands in it."""
    assert expected == taken(*usages).reported


def test_the_providers_own_object_is_merged_likewise() -> None:
    """The raw object keeps every field, and 0 or null replaces nothing in it."""
    usage = taken(
        {"input_tokens": 3, "service_tier": "standard", "output_tokens": 1, "new": None},
        {"input_tokens": 0, "service_tier": None, "output_tokens": 8, "server_tool_use": {"web_search_requests": 1}},
    )

    expected = {
        "input_tokens": 3,
        "service_tier": "standard",
        "output_tokens": 8,
        "new": None,
        "server_tool_use": {"web_search_requests": 1},
    }
    assert expected == usage.raw


_count = st.none() | st.integers(0, 1000)


@given(st.lists(st.fixed_dictionaries({}, optional={"input_tokens": _count, "output_tokens": _count}), max_size=6))
def test_the_last_count_that_says_something(usages: list[Json]) -> None:
    """Over any stream each count is the last one that is not 0 or null."""
    said = {name: [u[name] for u in usages if u.get(name)] for name in ("input_tokens", "output_tokens")}

    usage = taken(*usages)

    assert [said["input_tokens"][-1:] or [0], said["output_tokens"][-1:] or [0]] == [[usage.input], [usage.output]]

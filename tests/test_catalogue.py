"""What the model endpoints say."""

import re
from decimal import Decimal
from typing import Any

import pytest

from proxy.catalogue import catalogue, messages_model, messages_page, openai_list, openai_model
from proxy.models import Capabilities, Deployment, Model, Price


def model(id: str, **more: Any) -> Model:
    values: dict[str, Any] = {
        "id": id,
        "aliases": (),
        "display_name": id.upper(),
        "owned_by": "owner",
        "created": 1767225600,
        "max_output_tokens": 8192,
        "context_window": None,
        "capabilities": Capabilities(),
        "price": Price(Decimal(0), Decimal(0)),
        "deployments": (Deployment("secret-upstream", "secret-model"),),
    }
    return Model(**values | more)


MODELS = [model(id) for id in ("a/1", "a/2", "b/3", "b/4", "c/5")]


def test_openai_list() -> None:
    """The OpenAI list holds each model in OpenAI's shape."""
    expected = {
        "object": "list",
        "data": [{"id": "a/1", "object": "model", "created": 1767225600, "owned_by": "owner"}],
    }
    assert expected == openai_list(MODELS[:1])
    assert expected["data"][0] == openai_model(MODELS[0])


def test_messages_model() -> None:
    """A model in the Messages API's shape tells its time in UTC with a Z."""
    expected = {"type": "model", "id": "a/1", "display_name": "A/1", "created_at": "2026-01-01T00:00:00Z"}
    assert expected == messages_model(MODELS[0])


PAGES: dict[str, tuple[dict[str, Any], list[str], bool]] = {
    "all": ({}, ["a/1", "a/2", "b/3", "b/4", "c/5"], False),
    "the first": ({"limit": "2"}, ["a/1", "a/2"], True),
    "exactly all": ({"limit": 5}, ["a/1", "a/2", "b/3", "b/4", "c/5"], False),
    "behind one": ({"limit": "2", "after_id": "a/2"}, ["b/3", "b/4"], True),
    "the rest": ({"limit": "3", "after_id": "b/3"}, ["b/4", "c/5"], False),
    "behind the last": ({"after_id": "c/5"}, [], False),
    "ahead of one": ({"limit": "2", "before_id": "b/4"}, ["a/2", "b/3"], True),
    "ahead of the first": ({"before_id": "a/1"}, [], False),
    "between": ({"limit": "1", "after_id": "a/1", "before_id": "b/4"}, ["a/2"], True),
    "between, the wrong way round": ({"after_id": "b/4", "before_id": "a/2"}, [], False),
    "in another letter case": ({"after_id": "B/4"}, ["c/5"], False),
    "the largest limit": ({"limit": "1000"}, ["a/1", "a/2", "b/3", "b/4", "c/5"], False),
}


@pytest.mark.parametrize(("query", "ids", "has_more"), PAGES.values(), ids=PAGES)
def test_a_page(query: dict[str, Any], ids: list[str], has_more: bool) -> None:
    """A page holds what was asked for, says whether more follows in its direction, and names its ends."""
    page = messages_page(MODELS, **query)

    expected = {"ids": ids, "has_more": has_more, "first_id": [*ids, None][0], "last_id": ids[-1] if ids else None}
    data = page.pop("data")
    assert expected == {"ids": [entry["id"] for entry in data]} | page


def test_twenty_models_are_a_page() -> None:
    """Without a limit a page holds twenty."""
    page = messages_page([model(f"m/{number}") for number in range(21)])

    assert (20, True) == (len(page["data"]), page["has_more"])


BAD_LIMIT = "limit: must be a whole number from 1 to 1000"
BAD_LIMITS = ("0", "1001", "-1", "x", "", "1.0", "9" * 9999, "²", True)
BAD_QUERIES = {
    **{f"limit {limit!r:.9}": ({"limit": limit}, BAD_LIMIT) for limit in BAD_LIMITS},
    "after_id": ({"after_id": "z"}, "after_id: there is no model with this id in the list"),
    "before_id": ({"before_id": ""}, "before_id: there is no model with this id in the list"),
}


@pytest.mark.parametrize(("query", "expected"), BAD_QUERIES.values(), ids=BAD_QUERIES)
def test_a_bad_query_names_its_parameter(query: dict[str, Any], expected: str) -> None:
    """A limit or an id that can't be is refused, naming the parameter."""
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        messages_page(MODELS, **query)


def test_the_catalogue() -> None:
    """The catalogue shows what a model can do and costs, and nothing of where it runs."""
    shown = model(
        "a/1",
        aliases=("one",),
        context_window=200_000,
        capabilities=Capabilities(sampling=False, sampling_exclusive=True, effort=("low", "max")),
        price=Price(Decimal(3), Decimal("15.0"), cache_read=Decimal("0.30")),
    )

    expected = {
        "id": "a/1",
        "aliases": ["one"],
        "displayName": "A/1",
        "maxOutputTokens": 8192,
        "contextWindow": 200_000,
        "capabilities": {
            "sampling": False,
            "samplingExclusive": True,
            "promptCaching": True,
            "effort": ["low", "max"],
            "forcedToolChoice": True,
            "images": True,
            "pdfs": True,
            "structuredOutputs": True,
        },
        "pricing": {
            "input": "3",
            "output": "15.0",
            "cacheWrite5m": "3.75",
            "cacheWrite1h": "6",
            "cacheRead": "0.30",
        },
    }
    assert {"data": [expected]} == catalogue([shown])


PRICES = {
    "free": ("0", "0", "0"),
    "round": ("10", "10", "1"),
    "hundreds": ("400", "400", "40"),
    "as written": ("0.10", "0.10", "0.01"),
    "small": ("0.0000001", "0.0000001", "0.00000001"),
    "with an exponent": ("1E+2", "100", "10"),
    "negative zero": ("-0.0", "0.0", "0"),
}


@pytest.mark.parametrize(("written", "input", "cache_read"), PRICES.values(), ids=PRICES)
def test_prices_are_plain_decimals(written: str, input: str, cache_read: str) -> None:
    """A price is shown as it was written, a derived one in its shortest form, and none with an exponent."""
    shown = catalogue([model("m", price=Price(Decimal(written), Decimal(1)))])["data"][0]["pricing"]

    assert (input, cache_read) == (shown["input"], shown["cacheRead"])

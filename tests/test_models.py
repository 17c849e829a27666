"""The table of models: finding one, and what it costs."""

from dataclasses import FrozenInstanceError
from decimal import Decimal
from typing import Any

import pytest

from proxy.models import (
    Capabilities,
    Deployment,
    Model,
    ModelTable,
    Price,
    display_name_from_id,
    owner_from_id,
)
from proxy.settings import ModelSettings


def settings(id: str, **more: Any) -> ModelSettings:
    values = {"id": id, "max_output_tokens": 10, "price": "free", "deployments": [{"upstream": "u", "model": "m"}]}
    return ModelSettings.model_validate(values | more)


TABLE = ModelTable.from_settings(
    [settings("Owner/Big-One", aliases=["big", "Größe"]), settings("tiny"), settings("owner/last")]
)

NAMES: dict[str, tuple[Any, str | None]] = {
    "the id": ("Owner/Big-One", "Owner/Big-One"),
    "in another letter case": ("oWNER/bIG-oNE", "Owner/Big-One"),
    "with spaces around it": ("  tiny\n", "tiny"),
    "an alias": ("BIG", "Owner/Big-One"),
    "an alias with umlauts": ("GRÖSSE", "Owner/Big-One"),
    "a part of an id": ("Big-One", None),
    "nothing": ("", None),
    "spaces": ("   ", None),
    "a space inside": ("ti ny", None),
    "very long": ("x" * 100_000, None),
    "a lone surrogate": ("\ud800", None),
    "a NUL": ("tiny\0", None),
    "no text": (None, None),
    "a list": ([], None),
}


@pytest.mark.parametrize(("name", "expected"), NAMES.values(), ids=NAMES)
def test_a_model_is_found_by_its_names(name: Any, expected: str | None) -> None:
    """A model is found by id and alias in any letter case, and odd names find nothing."""
    found = TABLE.find(name)

    assert expected == (found and found.id)


VISIBLE = {
    "all": (None, ["Owner/Big-One", "tiny", "owner/last"]),
    "some, in the table's order": (frozenset({"owner/last", "Owner/Big-One", "gone"}), ["Owner/Big-One", "owner/last"]),
    "none": (frozenset[str](), []),
}


@pytest.mark.parametrize(("allowed", "expected"), VISIBLE.values(), ids=VISIBLE)
def test_a_key_sees_its_models_in_the_order_of_the_yaml(allowed: frozenset[str] | None, expected: list[str]) -> None:
    """Only the allowed models are visible; None allows all."""
    assert expected == [model.id for model in TABLE.visible(allowed)]


def test_the_table_is_walked_in_the_order_of_the_yaml() -> None:
    """The order of the file is the order of the lists."""
    assert (3, ["Owner/Big-One", "tiny", "owner/last"]) == (len(TABLE), [model.id for model in TABLE])


def test_settings_become_a_model_as_written() -> None:
    """Every setting arrives, and what was left out is filled in."""
    capabilities = {"sampling": False, "effort": ["max", "low"], "sampling_exclusive": True, "pdfs": False}
    price = {"input": Decimal("0.30"), "output": 2, "cache_read": 0}
    deployment = {"upstream": "u", "model": "m", "priority": 2, "weight": Decimal("0.5"), "max_parallel": 3}
    written = settings(
        "a/b-1", aliases=["x"], capabilities=capabilities, price=price, deployments=[deployment], context_window=7
    )

    [model] = ModelTable.from_settings([written])

    expected = Model(
        id="a/b-1",
        aliases=("x",),
        display_name="B 1",
        owned_by="a",
        created=1767225600,
        max_output_tokens=10,
        context_window=7,
        capabilities=Capabilities(sampling=False, sampling_exclusive=True, effort=("low", "max"), pdfs=False),
        price=Price(Decimal("0.30"), Decimal(2), cache_read=Decimal(0)),
        deployments=(Deployment("u", "m", 2, 0.5, 3),),
    )
    assert expected == model


def test_written_names_win_over_derived_ones() -> None:
    """A display name and an owner that were written stay."""
    [model] = ModelTable.from_settings([settings("a/b", display_name="Bee", owned_by="me")])

    assert ("Bee", "me") == (model.display_name, model.owned_by)


def test_a_model_can_not_be_changed() -> None:
    """All requests share the models, so nobody may write to one."""
    [model, *_] = TABLE

    with pytest.raises(FrozenInstanceError):
        setattr(model, "id", "other")  # noqa: B010


DISPLAY_NAMES = {
    "anthropic/claude-sonnet-5-5": "Claude Sonnet 5.5",
    "anthropic/claude-sonnet-5": "Claude Sonnet 5",
    "claude-haiku-4-5-20251001": "Claude Haiku 4.5 20251001",
    "local/tiny": "Tiny",
    "a/b/llama_3-70b": "Llama 3 70b",
    "x/qwen2.5-7b": "Qwen2.5 7b",
    "x/-": "x/-",
    "x/GPT": "GPT",
}


@pytest.mark.parametrize(("id", "expected"), DISPLAY_NAMES.items())
def test_a_display_name_is_made_from_the_id(id: str, expected: str) -> None:
    """People read words and a version where the id has dashes."""
    assert expected == display_name_from_id(id)


@pytest.mark.parametrize(("id", "expected"), {"a/b": "a", "a/b/c": "a", "b": "local", "/b": "local"}.items())
def test_an_owner_is_made_from_the_id(id: str, expected: str) -> None:
    """What stands before the slash owns the model; without one it is local."""
    assert expected == owner_from_id(id)


CACHE_PRICES = {
    "derived": (Price(Decimal(3), Decimal(15)), ("3.75", "6", "0.3")),
    "derived from a fraction": (Price(Decimal("0.07"), Decimal(1)), ("0.0875", "0.14", "0.007")),
    "written": (Price(Decimal(3), Decimal(15), Decimal("3.80"), Decimal(7), Decimal(0)), ("3.80", "7", "0")),
    "free": (Price(Decimal(0), Decimal(0)), ("0", "0", "0")),
    "more digits than a context has": (
        Price(Decimal("0.1234567890123456789012345678901234567"), Decimal(1)),
        (
            "0.154320986265432098626543209862654320875",
            "0.2469135780246913578024691357802469134",
            "0.01234567890123456789012345678901234567",
        ),
    ),
}


@pytest.mark.parametrize(("price", "expected"), CACHE_PRICES.values(), ids=CACHE_PRICES)
def test_cache_prices_follow_the_input_price_exactly(price: Price, expected: tuple[str, ...]) -> None:
    """A cache price that was left out is 1.25, 2 or 0.1 times the input price, to the last digit."""
    found = (price.effective_cache_write_5m, price.effective_cache_write_1h, price.effective_cache_read)

    assert expected == tuple(str(each) for each in found)

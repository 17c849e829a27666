"""Money: whole units, so that no sum is ever rounded."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.models import Price
from proxy.store.money import UnitPrices, cost, unit_prices, units, usd
from proxy.usage import Usage

PRICES = {
    "cache prices follow the input price": (
        Price(Decimal(3), Decimal(15)),
        UnitPrices(3_000_000, 15_000_000, 3_750_000, 6_000_000, 300_000),
    ),
    "cache prices of one's own": (
        Price(Decimal(3), Decimal(15), Decimal("3.75"), Decimal(7), Decimal("0.31")),
        UnitPrices(3_000_000, 15_000_000, 3_750_000, 7_000_000, 310_000),
    ),
    "a cache price of zero is no missing one": (
        Price(Decimal(1), Decimal(5), cache_read=Decimal(0)),
        UnitPrices(1_000_000, 5_000_000, 1_250_000, 2_000_000, 0),
    ),
    "six decimals": (
        Price(Decimal("0.00002"), Decimal("0.000001")),
        UnitPrices(input=20, output=1, cache_write_5m=25, cache_write_1h=40, cache_read=2),
    ),
    "free": (Price(Decimal(0), Decimal(0)), UnitPrices(0, 0, 0, 0, 0)),
}


@pytest.mark.parametrize(("price", "expected"), PRICES.values(), ids=PRICES)
def test_a_token_costs_a_whole_number_of_units(price: Price, expected: UnitPrices) -> None:
    """A price in USD per million tokens is a whole number of units per token; a missing cache price is derived."""
    assert expected == unit_prices(price)


INEXACT = {
    "seven decimals": Price(Decimal("0.0000001"), Decimal(1)),
    "seven decimals of a derived price": Price(Decimal("0.000001"), Decimal(1)),
    "seven decimals of a cache price": Price(Decimal(1), Decimal(1), cache_read=Decimal("0.0000005")),
}


@pytest.mark.parametrize("price", INEXACT.values(), ids=INEXACT)
def test_a_price_that_is_no_whole_number_of_units_is_refused(price: Price) -> None:
    """Nothing is rounded: a price that can't be kept exactly is refused."""
    with pytest.raises(ValueError, match="at most six decimals"):
        unit_prices(price)


prices = st.builds(
    Price,
    *[st.integers(0, 10**9).map(lambda millionths: Decimal(millionths * 20).scaleb(-6))] * 2,
)
counts = st.tuples(*[st.integers(0, 10**7)] * 5)


@given(st.lists(st.tuples(prices, counts), min_size=1, max_size=30), st.integers(1, 10**6))
def test_the_sum_of_many_costs_is_exact(rows: list[tuple[Price, tuple[int, ...]]], times: int) -> None:
    """L10: the sum over a million requests is what paper and pencil give, to the last unit."""
    total, expected = 0, Fraction(0)
    for price, (input, output, write_5m, write_1h, read) in rows:
        usage = Usage()
        usage.input, usage.output, usage.cache_read = input, output, read
        usage.cache_write_5m, usage.cache_write_1h = write_5m, write_1h
        total += cost(usage, unit_prices(price)) * times
        expected += times * (
            Fraction(price.input) * (input + Fraction(5, 4) * write_5m + 2 * write_1h + Fraction(1, 10) * read)
            + Fraction(price.output) * output
        )
    assert expected / 10**6 == Fraction(usd(total))


@given(st.integers(-(10**19), 10**19))
def test_units_come_back_from_dollars(amount: int) -> None:
    """Dollars are shown with all their digits: read again, they are the same units."""
    assert amount == units(usd(amount))


DOLLARS = {0: "0", 1: "0.000000000001", 10**12: "1", 2_500_000_000_000: "2.5", 123 * 10**13: "1230"}


@pytest.mark.parametrize(("amount", "expected"), DOLLARS.items(), ids=DOLLARS.values())
def test_dollars_are_written_plainly(amount: int, expected: str) -> None:
    """No exponent and no trailing zeros."""
    assert expected == f"{usd(amount):f}"

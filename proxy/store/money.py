"""Money as whole numbers: the unit is a millionth of a millionth of a dollar (a pico-dollar).

A price is given in USD per million tokens, with at most six decimals; so a token costs a whole number of units, and
every sum is exact in every database.
"""

from __future__ import annotations

from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple

from proxy.models import EXACT, Price
from proxy.usage import Usage

UNITS_PER_USD = 10**12
MOST_UNITS = 9 * 10**18
"""What a sum may come to: 9 million dollars. The databases count as far as 2^63."""
_PRICE_UNITS = Decimal(10**6)
"""From USD per million tokens to units per token."""


class UnitPrices(NamedTuple):
    """What one token costs, in units."""

    input: int
    output: int
    cache_write_5m: int
    cache_write_1h: int
    cache_read: int


@lru_cache(maxsize=4096)
def unit_prices(price: Price) -> UnitPrices:
    """The prices of a model in units. Raises ValueError where one has more than six decimals."""
    return UnitPrices(
        *(
            _whole(each)
            for each in (
                price.input,
                price.output,
                price.effective_cache_write_5m,
                price.effective_cache_write_1h,
                price.effective_cache_read,
            )
        )
    )


def _whole(usd_per_million: Decimal) -> int:
    units = EXACT.multiply(usd_per_million, _PRICE_UNITS)
    if units != units.to_integral_value():
        raise ValueError("prices, those of the cache too, have at most six decimals")
    return int(units)


def cost(usage: Usage, prices: UnitPrices) -> int:
    """What an answer cost, in units."""
    return (
        usage.input * prices.input
        + usage.output * prices.output
        + usage.cache_write_5m * prices.cache_write_5m
        + usage.cache_write_1h * prices.cache_write_1h
        + usage.cache_read * prices.cache_read
    )


def units(usd: Decimal) -> int:
    """Dollars in units; what is below a unit is cut off."""
    return int(EXACT.multiply(usd, Decimal(UNITS_PER_USD)))


def usd(amount: int) -> Decimal:
    """Units in dollars, exactly."""
    return EXACT.normalize(EXACT.divide(Decimal(amount), Decimal(UNITS_PER_USD))) if amount else Decimal(0)

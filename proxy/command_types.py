"""The values that the command line takes: amounts, limits, moments."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

import click

from proxy.store.money import MOST_UNITS, units, usd

NONE = "none"
"""What takes a limit away."""


class Usd(click.ParamType[Any]):
    name = "usd"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int | None:
        if value == NONE and isinstance(param, click.Option):  # an argument takes nothing away
            return None
        try:
            amount = Decimal(value)
        except InvalidOperation:
            self.fail("must be an amount in USD", param, context)
        if not (amount.is_finite() and 0 <= amount <= usd(MOST_UNITS)):
            self.fail(f"must be an amount from 0 to {usd(MOST_UNITS):f}", param, context)
        return units(amount)


class LimitNumber(click.ParamType[Any]):
    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int | None:
        if value == NONE:
            return None
        if not str(value).isdecimal() or int(value) < 1:
            self.fail(f"must be a whole number of at least 1, or {NONE}", param, context)
        return int(value)


class Moment(click.ParamType[Any]):
    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> float | None:
        if value == NONE:
            return None
        try:
            found = datetime.fromisoformat(value)
        except ValueError:
            self.fail("must be a time such as 2027-01-31 or 2027-01-31T12:00:00Z", param, context)
        return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()

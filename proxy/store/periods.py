"""The periods of spend limits: days, weeks and months, in UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple

Period = Literal["day", "week", "month"]


class Span(NamedTuple):
    """One period: its name in the database, where it begins and where the next one does, in seconds since 1970."""

    name: str
    begins: float
    ends: float


def span_of(period: Period, at: float) -> Span:
    """The period that a moment lies in. Weeks begin on Monday."""
    day = datetime.fromtimestamp(at, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "day":
        return Span(f"{day:%Y-%m-%d}", day.timestamp(), (day + timedelta(days=1)).timestamp())
    if period == "week":
        monday = day - timedelta(days=day.weekday())
        return Span(f"{monday:%G-W%V}", monday.timestamp(), (monday + timedelta(days=7)).timestamp())
    first = day.replace(day=1)
    following = (first + timedelta(days=32)).replace(day=1)
    return Span(f"{first:%Y-%m}", first.timestamp(), following.timestamp())

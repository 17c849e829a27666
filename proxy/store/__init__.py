"""What has been used and what it cost: the interface of the ledger, and its rows."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Any, Protocol


class Exactness(Enum):
    """How far a row's cost can be relied on."""

    EXACT = "exact"
    ESTIMATED = "estimated"
    """The client left a stream early: its input is exact, its output estimated from the bytes of the deltas."""
    UNKNOWN = "unknown"
    """Left before the provider gave a count: nothing is known, nothing billed."""
    FREE = "free"
    """A plugin answered, or the model costs nothing."""


@dataclass(frozen=True, slots=True)
class UsageRow:
    """One answered request. Tokens are counts; ``cost_usd`` is exact."""

    request_id: str
    key_id: str
    organization: str | None
    model: str
    asked_model: str
    deployment: str | None
    input: int
    cache_read: int
    cache_write_5m: int
    cache_write_1h: int
    output: int
    thinking: int
    cost_usd: Decimal
    exactness: Exactness
    raw: dict[str, Any]
    """The provider's own usage object."""


class Ledger(Protocol):
    """Keeps a row for each answered request, and the sums of what was spent."""

    async def record(self, row: UsageRow) -> None:
        """Keep a row. It is kept when this returns; a second one of the same request changes nothing."""

    def record_later(self, row: UsageRow) -> None:
        """Keep a row of a request whose client has left; nobody waits for it."""

    async def spent_by_key(self, key_id: str) -> Decimal:
        """USD that a key has spent."""

    async def spent_by_organization(self, organization: str) -> Decimal:
        """USD that an organization has spent."""

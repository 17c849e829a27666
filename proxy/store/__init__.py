"""Keys, organizations, budgets and the ledger: what is kept, and the words for it.

``proxy.store.store`` opens it; everything that writes goes through one thread (``proxy.store.writer``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Exactness(Enum):
    """How far a row's cost can be relied on."""

    EXACT = "exact"
    ESTIMATED = "estimated"
    """The client left a stream early: its input is exact, its output estimated from the bytes of the deltas."""
    INEXACT = "inexact"
    """Something was used that has no price here: server tools, another service tier, speed."""
    UNKNOWN = "unknown"
    """Left before the provider gave a count: nothing is known, nothing billed."""
    FREE = "free"
    """A plugin answered, or the model costs nothing."""


@dataclass(frozen=True, slots=True)
class UsageRow:
    """One answered request. Tokens are counts, ``cost`` is in units of money, ``at`` in seconds since 1970."""

    request_id: str
    at: float
    key_id: str
    organization: str | None
    end_user: str | None
    model: str
    asked_model: str
    deployment: str | None
    stream: bool
    input: int
    cache_read: int
    cache_write_5m: int
    cache_write_1h: int
    output: int
    thinking: int
    cost: int
    prices: dict[str, int]
    """What a token cost, in units."""
    exactness: str
    reason: str | None
    """Why the cost isn't exact."""
    raw: dict[str, Any]
    """The provider's own usage object."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a key or an organization may spend in a period, in units; a limit of None only counts."""

    scope: str
    """``key`` or ``organization``."""
    name: str
    """A key's id, an organization's name."""
    period: str = ""
    """Such as ``2026-11``; empty for all time."""
    begins: float = 0.0
    """Where the period begins, in seconds since 1970."""
    limit: int | None = None


class BudgetSpent(Exception):
    """Nothing of a budget is left."""

    def __init__(self, budget: Budget) -> None:
        super().__init__(f"the budget of the {budget.scope} is used up")
        self.budget = budget


class BudgetReserved(Exception):
    """What is left of a budget is reserved for requests that are being answered."""

    def __init__(self, budget: Budget) -> None:
        super().__init__(f"the budget of the {budget.scope} is reserved")
        self.budget = budget

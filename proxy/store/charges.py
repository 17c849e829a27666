"""Which budgets a request is charged to."""

from __future__ import annotations

from proxy.exchange import Key
from proxy.store import Budget
from proxy.store.periods import span_of

OPEN = Key("open", "open")
"""Who asks where nobody is asked for a key."""


def charged_budgets(key: Key | None, at: float) -> list[Budget]:
    """The key's budget for all time, its one for the period, its organization's; those without a limit only count.

    ``at`` is when the request began: it belongs to the period of that moment.
    """
    key = key or OPEN
    limit = key.spend_limit if key.spend_period is None else None
    budgets = [Budget("key", key.id, limit=limit)]
    if key.spend_period is not None:
        span = span_of(key.spend_period, at)
        budgets.append(Budget("key", key.id, span.name, span.begins, key.spend_limit))
    if key.organization is not None:
        budgets.append(Budget("organization", key.organization, limit=key.credit))
    return budgets


def is_limited(budgets: list[Budget]) -> bool:
    """Whether any of them has a limit."""
    return any(budget.limit is not None for budget in budgets)

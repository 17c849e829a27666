"""What a key may know of itself: what is left of its budgets and limits, its models, the cost of its own requests."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import Connection, select

from proxy.errors import GatewayError, Kind
from proxy.exchange import NO_LIMITS, Exchange, Key, Limits
from proxy.limits import Limiter, LimiterDown, Window, owners, requests_window, tokens_window
from proxy.models import Model
from proxy.plugin import Services
from proxy.store import Budget
from proxy.store.charges import OPEN, charged_budgets
from proxy.store.ledger import spent
from proxy.store.money import usd
from proxy.store.periods import span_of
from proxy.store.schema import usage


async def key_view(exchange: Exchange, services: Services, models: list[Model]) -> dict[str, Any]:
    """The answer of ``GET /api/key``. Raises StoreDown, GatewayError."""
    key = exchange.key or OPEN
    budgets = charged_budgets(exchange.key, exchange.began)

    def job(connection: Connection) -> list[tuple[Budget, int, int]]:
        return [(budget, *spent(connection, budget)) for budget in budgets]

    sums = await services.store.read(job)
    limits = {owner.partition(":")[0]: await _limits(services.limiter, owner, each) for owner, each in owners(key)}
    none = await _limits(services.limiter, "", NO_LIMITS)
    return {
        "name": key.name,
        "organization": key.organization,
        "models": [model.id for model in models],
        "budgets": [_budget(budget, used, reserved, exchange.began, key) for budget, used, reserved in sums],
        "limits": {"key": none, "organization": none, **limits},
    }


def _budget(budget: Budget, used: int, reserved: int, at: float, key: Key) -> dict[str, Any]:
    left = None if budget.limit is None else max(0, budget.limit - used - reserved)
    resets = None
    if budget.period and key.spend_period is not None:
        resets = datetime.fromtimestamp(span_of(key.spend_period, at).ends, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "of": budget.scope,
        "period": budget.period or None,
        "limit_usd": None if budget.limit is None else dollars(usd(budget.limit)),
        "spent_usd": dollars(usd(used)),
        "reserved_usd": dollars(usd(reserved)),
        "left_usd": None if left is None else dollars(usd(left)),
        "resets_at": resets,
    }


async def _limits(limiter: Limiter, owner: str, limits: Limits) -> dict[str, Any]:
    try:
        requests = await _look(limiter, requests_window(owner), limits.requests_per_minute, tokens=False)
        tokens = await _look(limiter, tokens_window(owner), limits.input_tokens_per_minute, tokens=True)
    except LimiterDown:
        raise GatewayError(Kind.UNAVAILABLE, "limits can't be read now; try again", retry_after=5) from None
    return {
        "requests_per_minute": requests,
        "input_tokens_per_minute": tokens,
        "parallel_requests": limits.parallel_requests,
    }


async def _look(limiter: Limiter, name: str, limit: int | None, *, tokens: bool) -> dict[str, int] | None:
    if limit is None:
        return None
    window: Window = await limiter.look(name, limit, tokens=tokens)
    return {"limit": window.limit, "remaining": window.remaining, "reset_seconds": window.reset}


async def cost_of_request(exchange: Exchange, services: Services, request_id: str) -> dict[str, Any]:
    """What one of the key's own requests used and cost. Raises StoreDown, GatewayError: 404."""
    key = exchange.key or OPEN
    mine = select(usage).where(usage.c.request_id == request_id, usage.c.key_id == key.id)
    row = None
    if request_id.isascii() and request_id.isprintable():  # PostgreSQL takes no NUL
        row = await services.store.read(lambda connection: connection.execute(mine).mappings().first())
    if row is None:
        raise GatewayError(Kind.PATH_NOT_FOUND, "no request of this key has this id")
    tokens = ("input", "cache_read", "cache_write_5m", "cache_write_1h", "output", "thinking")
    return {
        "request_id": row["request_id"],
        "at": datetime.fromtimestamp(row["at"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "model": row["model"],
        "tokens": {name: row[name] for name in tokens},
        "cost_usd": dollars(usd(row["cost"])),
        "exactness": row["exactness"],
        "reason": row["reason"],
    }


def dollars(amount: Decimal) -> str:
    """Dollars as decimal text, without an exponent."""
    return f"{amount:f}"

"""What was used and what it cost, recorded before an answer's end goes out; and budgets, which it is taken from.

If it can't be recorded, the answer ends in an error: nobody gets a whole answer that the ledger doesn't know. What a
request may cost is reserved before it is sent, so that parallel requests can't pass a budget together; a request is
admitted while anything is left, and a running answer is never cut off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from proxy.errors import GatewayError, Kind
from proxy.estimate import BYTES_PER_TOKEN
from proxy.exchange import Exchange
from proxy.plugin import Outcome, OutputPlugin, Plugin, Route, Services, Settings
from proxy.store import Budget, BudgetReserved, BudgetSpent, Exactness, UsageRow
from proxy.store.charges import OPEN, charged_budgets, is_limited
from proxy.store.money import cost, unit_prices
from proxy.store.store import Store
from proxy.store.writer import StoreDown

RETRY_AFTER_STORE = 5
_UNPRICED = ("service_tier", "speed")


class UsageSettings(Settings):
    """How budgets are kept."""

    reserve_output_tokens: Annotated[int, Field(ge=1)] = 2000
    """How many output tokens are reserved for a request at the most, however high its own limit is."""


class Usage(Plugin):
    """Keeps budgets, and a row in the ledger for each answered request."""

    name: ClassVar[str] = "usage"
    opens_leaves: ClassVar[bool] = False
    routes: ClassVar[frozenset[Route]] = frozenset({Route.CHAT_COMPLETIONS, Route.MESSAGES})
    completes: ClassVar[bool] = True
    completes_last: ClassVar[bool] = True
    Settings = UsageSettings
    settings: UsageSettings
    _store: Store

    async def start(self, services: Services) -> None:
        self._store = services.store

    async def on_headers(self, exchange: Exchange) -> None:
        """Refuse where nothing is left. Raises GatewayError: 402; 503 where that can't be known."""
        if not self._store.is_ready:
            raise store_down()
        budgets = charged_budgets(exchange.key, exchange.began)
        if is_limited(budgets):
            try:
                await self._store.check(budgets)
            except BudgetSpent as spent:
                raise used_up(spent.budget) from None
            except StoreDown:
                raise store_down() from None

    async def on_request(self, exchange: Exchange) -> OutputPlugin:
        return UsageOutput(exchange, self._store, charged_budgets(exchange.key, exchange.began))

    async def on_send(self, exchange: Exchange) -> None:
        """Reserve what the request may cost. Raises GatewayError: 402, 429 or 503."""
        budgets = charged_budgets(exchange.key, exchange.began)
        if not is_limited(budgets):
            return
        exchange.defer(lambda: self._store.release_later(exchange.id))
        try:
            await self._store.reserve(exchange.id, self._may_cost(exchange), budgets)
        except BudgetSpent as spent:
            raise used_up(spent.budget) from None
        except BudgetReserved:
            message = "what is left is reserved for requests that are being answered; try again"
            raise GatewayError(Kind.RATE_LIMIT, message, retry_after=1) from None
        except StoreDown:
            raise store_down() from None

    def _may_cost(self, exchange: Exchange) -> int:
        prices = unit_prices(exchange.model.price)
        asked = exchange.body.get("max_tokens")
        limit = self.settings.reserve_output_tokens
        output = min(int(asked), limit) if isinstance(asked, int | float) and asked >= 1 else limit
        return exchange.estimated_input() * max(prices.input, prices.cache_write_5m) + output * prices.output


class UsageOutput(OutputPlugin):
    """Records one answer."""

    def __init__(self, exchange: Exchange, store: Store, charged: Sequence[Budget]) -> None:
        self._exchange = exchange
        self._store = store
        self._charged = charged

    async def on_complete(self) -> None:
        try:
            await self._store.record(row_of(self._exchange), self._charged)
        except StoreDown:
            raise store_down() from None

    def on_close(self, outcome: Outcome) -> None:
        """A stream that the client left is billed for its input, and for its output as far as it came."""
        if outcome is not Outcome.ABANDONED or self._exchange.deployment is None or not self._exchange.stream:
            return
        counts = self._exchange.usage
        if not counts.reported:
            row = row_of(self._exchange, Exactness.UNKNOWN, "left before the provider gave any count")
        elif counts.final:
            row = row_of(self._exchange)
        else:
            counts.output = max(counts.output, math.ceil(counts.delta_bytes / BYTES_PER_TOKEN))
            reason = f"left early; output estimated as {BYTES_PER_TOKEN} bytes of deltas a token"
            row = row_of(self._exchange, Exactness.ESTIMATED, reason)
        self._store.record_later(row, self._charged)


def used_up(budget: Budget) -> GatewayError:
    """The refusal where nothing is left."""
    if budget.scope == "organization":
        return GatewayError(Kind.BILLING, "the prepaid balance of this organization is used up")
    return GatewayError(Kind.BILLING, "this key has reached its spend limit")


def store_down() -> GatewayError:
    """The refusal where the ledger can't be written."""
    message = "the gateway can't record usage now; try again"
    return GatewayError(Kind.UNAVAILABLE, message, retry_after=RETRY_AFTER_STORE)


def row_of(exchange: Exchange, exactness: Exactness | None = None, reason: str | None = None) -> UsageRow:
    """The ledger's row of an answer."""
    counts, model = exchange.usage, exchange.model
    prices = unit_prices(model.price)
    if exactness is None:
        exactness, reason = _judged(exchange)
    billed = exactness in (Exactness.EXACT, Exactness.ESTIMATED, Exactness.INEXACT)
    deployment = exchange.deployment
    key = exchange.key or OPEN
    return UsageRow(
        request_id=exchange.id,
        at=exchange.began,  # as its budgets: a request belongs to the period in which it began
        key_id=key.id,
        organization=key.organization,
        end_user=end_user(exchange),
        model=model.id,
        asked_model=exchange.asked_model,
        deployment=None if deployment is None else f"{deployment.upstream}/{deployment.model}",
        stream=exchange.stream,
        input=counts.input,
        cache_read=counts.cache_read,
        cache_write_5m=counts.cache_write_5m,
        cache_write_1h=counts.cache_write_1h,
        output=counts.output,
        thinking=counts.thinking,
        cost=cost(counts, prices) if billed else 0,
        prices=prices._asdict(),
        exactness=exactness.value,
        reason=reason,
        raw=counts.raw,
    )


def _judged(exchange: Exchange) -> tuple[Exactness, str | None]:
    if not exchange.billed:
        return Exactness.FREE, "a plugin answered"
    if not any(unit_prices(exchange.model.price)):
        return Exactness.FREE, "the model costs nothing"
    if exchange.deployment is not None and not exchange.usage.reported:
        return Exactness.UNKNOWN, "the provider gave no count"
    raw = exchange.usage.raw
    unpriced = [f"{name}={raw[name]}" for name in _UNPRICED if raw.get(name) not in (None, "standard")]
    tools = raw.get("server_tool_use")
    if isinstance(tools, dict):
        unpriced += [name for name, count in tools.items() if count]
    unread = sorted(exchange.usage.unreadable)
    if unread:
        return Exactness.INEXACT, f"the provider's {', '.join(unread)} can't be read"
    if unpriced:
        return Exactness.INEXACT, f"no price is known for {', '.join(unpriced)}"[:500]
    return Exactness.EXACT, None


def end_user(exchange: Exchange) -> str | None:
    """Whom the client says that it asks for: kept here, and from OpenAI's format not sent on."""
    if exchange.route is Route.CHAT_COMPLETIONS:
        names: list[Any] = [exchange.client_body.get("user"), exchange.client_body.get("safety_identifier")]
    else:
        metadata = exchange.client_value("metadata")
        names = [metadata.get("user_id") if isinstance(metadata, dict) else None]
    found = next((name for name in names if isinstance(name, str) and name), None)
    return None if found is None else found[:512].replace("\0", "\ufffd")  # PostgreSQL takes no NUL

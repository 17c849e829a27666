"""What was used and what it cost, recorded before an answer's end goes out.

If it can't be recorded, the answer ends in an error: nobody gets a whole answer that the ledger doesn't know.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import ClassVar

from proxy.errors import GatewayError, Kind
from proxy.exchange import Exchange, Key
from proxy.models import EXACT, Price
from proxy.plugin import Outcome, OutputPlugin, Plugin, Route, Services
from proxy.store import Exactness, Ledger, UsageRow
from proxy.usage import Usage as Counts

BYTES_PER_TOKEN = 4
"""From the bytes of the deltas of a stream that was left to its output tokens."""
_MILLION = Decimal(1_000_000)


class Usage(Plugin):
    """Keeps budgets, and a row in the ledger for each answered request."""

    name: ClassVar[str] = "usage"
    routes: ClassVar[frozenset[Route]] = frozenset({Route.CHAT_COMPLETIONS, Route.MESSAGES})
    completes: ClassVar[bool] = True
    completes_last: ClassVar[bool] = True
    _ledger: Ledger

    async def start(self, services: Services) -> None:
        self._ledger = services.ledger

    async def on_headers(self, exchange: Exchange) -> None:
        key = exchange.key
        if key is None:
            return
        if key.balance_usd is not None and key.organization is not None:
            spent = await self._ledger.spent_by_organization(key.organization)
            if spent >= key.balance_usd:
                raise GatewayError(Kind.BILLING, "the prepaid balance of this organization is used up")
        if key.spend_limit_usd is not None and await self._ledger.spent_by_key(key.id) >= key.spend_limit_usd:
            raise GatewayError(Kind.BILLING, "this key has reached its spend limit")

    async def on_request(self, exchange: Exchange) -> OutputPlugin:
        return UsageOutput(exchange, self._ledger)


class UsageOutput(OutputPlugin):
    """Records one answer."""

    def __init__(self, exchange: Exchange, ledger: Ledger) -> None:
        self._exchange = exchange
        self._ledger = ledger

    async def on_complete(self) -> None:
        exactness = Exactness.EXACT if self._exchange.billed else Exactness.FREE
        await self._ledger.record(row_of(self._exchange, exactness))

    def on_close(self, outcome: Outcome) -> None:
        """A stream that the client left is billed for its input, and for its output as far as it came."""
        if outcome is not Outcome.ABANDONED or self._exchange.deployment is None or not self._exchange.stream:
            return
        counts = self._exchange.usage
        if not counts.reported:
            self._ledger.record_later(row_of(self._exchange, Exactness.UNKNOWN))
            return
        counts.output = max(counts.output, math.ceil(counts.delta_bytes / BYTES_PER_TOKEN))
        self._ledger.record_later(row_of(self._exchange, Exactness.ESTIMATED))


def row_of(exchange: Exchange, exactness: Exactness) -> UsageRow:
    """The ledger's row of an answer."""
    key = exchange.key or Key("open", "open")
    counts, model = exchange.usage, exchange.model
    billed = exactness in (Exactness.EXACT, Exactness.ESTIMATED)
    return UsageRow(
        request_id=exchange.id,
        key_id=key.id,
        organization=key.organization,
        model=model.id,
        asked_model=exchange.asked_model,
        deployment=exchange.deployment.upstream if exchange.deployment is not None else None,
        input=counts.input,
        cache_read=counts.cache_read,
        cache_write_5m=counts.cache_write_5m,
        cache_write_1h=counts.cache_write_1h,
        output=counts.output,
        thinking=counts.thinking,
        cost_usd=cost_usd(counts, model.price) if billed else Decimal(0),
        exactness=exactness,
        raw=counts.raw,
    )


def cost_usd(counts: Counts, price: Price) -> Decimal:
    """What an answer cost, exactly; prices are in USD per million tokens."""
    parts = (
        (counts.input, price.input),
        (counts.output, price.output),
        (counts.cache_write_5m, price.effective_cache_write_5m),
        (counts.cache_write_1h, price.effective_cache_write_1h),
        (counts.cache_read, price.effective_cache_read),
    )
    total = Decimal(0)
    for tokens, each in parts:
        if tokens:
            total = EXACT.add(total, EXACT.multiply(Decimal(tokens), each))
    return EXACT.divide(total, _MILLION)

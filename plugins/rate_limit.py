"""How often a key may ask. A request is counted before its body is read, whatever comes of it."""

from __future__ import annotations

from typing import ClassVar

from proxy.errors import GatewayError, Kind
from proxy.exchange import Exchange
from proxy.limits import Limiter
from proxy.plugin import Plugin, Services


class RateLimit(Plugin):
    """Counts requests per minute and key."""

    name: ClassVar[str] = "rate_limit"
    _limiter: Limiter

    async def start(self, services: Services) -> None:
        self._limiter = services.limiter

    async def on_headers(self, exchange: Exchange) -> None:
        key = exchange.key
        if key is None or key.requests_per_minute is None:
            return
        wait = await self._limiter.hit(f"requests:{key.id}", key.requests_per_minute)
        if wait is not None:
            message = f"this key may send {key.requests_per_minute} requests a minute; try again in {wait} s"
            raise GatewayError(Kind.RATE_LIMIT, message, retry_after=wait)

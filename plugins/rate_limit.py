"""How often a key and its organization may ask, how much, and how much at once.

A request is counted before its body is read, whatever comes of it; its input tokens are counted by an estimate right
before it is sent. Counting tokens has a window of its own.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import ClassVar

from proxy.errors import GatewayError, Kind
from proxy.exchange import Exchange
from proxy.limits import Limiter, LimiterDown, Window, owners, requests_window, tokens_window
from proxy.plugin import Plugin, Route, Services

RETRY_AFTER_LIMITER = 5


class RateLimit(Plugin):
    """Limits requests and input tokens per minute, and parallel requests, per key and organization."""

    name: ClassVar[str] = "rate_limit"
    opens_leaves: ClassVar[bool] = False
    _limiter: Limiter

    async def start(self, services: Services) -> None:
        self._limiter = services.limiter

    async def on_headers(self, exchange: Exchange) -> None:
        """Count the request and take a place. Raises GatewayError: 429, or 503 where that can't be done."""
        for owner, limits in owners(exchange.key):
            try:
                if limits.requests_per_minute is not None:
                    name = requests_window(owner, counting=exchange.route is Route.COUNT_TOKENS)
                    window = await self._limiter.hit(name, limits.requests_per_minute)
                    _tell(exchange, window, "requests")
                    if window.wait is not None:
                        raise _too_many(f"{limits.requests_per_minute} requests a minute", window.wait)
                if limits.parallel_requests is not None:
                    await self._take_place(exchange, f"parallel:{owner}", limits.parallel_requests)
            except LimiterDown:
                raise limiter_down() from None

    async def on_send(self, exchange: Exchange) -> None:
        """Count the input tokens. Raises GatewayError: 429 or 503."""
        if exchange.route is Route.COUNT_TOKENS:
            return
        for owner, limits in owners(exchange.key):
            if limits.input_tokens_per_minute is None:
                continue
            tokens = exchange.estimated_input()
            try:
                window = await self._limiter.spend(tokens_window(owner), limits.input_tokens_per_minute, tokens)
            except LimiterDown:
                raise limiter_down() from None
            _tell(exchange, window, "tokens")
            if window.wait is not None:
                raise _too_many(f"{limits.input_tokens_per_minute} input tokens a minute", window.wait)

    async def _take_place(self, exchange: Exchange, name: str, most: int) -> None:
        if not await self._limiter.take_place(name, most, exchange.id):
            raise _too_many(f"{most} requests at the same time", 1)
        exchange.defer(lambda: self._limiter.give_place_back(name, exchange.id))


def _too_many(limit: str, wait: int) -> GatewayError:
    return GatewayError(Kind.RATE_LIMIT, f"at most {limit} are allowed here; try again in {wait} s", retry_after=wait)


def limiter_down() -> GatewayError:
    """The refusal where limits can't be counted."""
    message = "the gateway can't count requests now; try again"
    return GatewayError(Kind.UNAVAILABLE, message, retry_after=RETRY_AFTER_LIMITER)


def _tell(exchange: Exchange, window: Window, what: str) -> None:
    """The headers of both formats; of the key's and the organization's window the one with less left."""
    headers = exchange.answer_headers
    known = headers.get(f"x-ratelimit-remaining-{what}")
    if known is not None and int(known) <= window.remaining:
        return
    reset = datetime.now(UTC) + timedelta(seconds=window.reset)
    anthropic = "anthropic-ratelimit-" + ("input-tokens" if what == "tokens" else what)
    headers |= {
        f"x-ratelimit-limit-{what}": str(window.limit),
        f"x-ratelimit-remaining-{what}": str(window.remaining),
        f"x-ratelimit-reset-{what}": f"{window.reset}s",
        f"{anthropic}-limit": str(window.limit),
        f"{anthropic}-remaining": str(window.remaining),
        f"{anthropic}-reset": f"{reset:%Y-%m-%dT%H:%M:%SZ}",
    }

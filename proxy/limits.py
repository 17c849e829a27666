"""Rate limits, by the library ``limits``: exact under parallel requests, in memory."""

from __future__ import annotations

import math
import time
from typing import Protocol

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import MovingWindowRateLimiter


class Limiter(Protocol):
    """Counts hits in windows of a minute that move along."""

    async def hit(self, name: str, limit: int) -> int | None:
        """Count one hit; None if it is within ``limit`` a minute, else the whole seconds to wait (at least 1)."""


class MemoryLimiter:
    """A Limiter for one process."""

    def __init__(self) -> None:
        self._windows = MovingWindowRateLimiter(MemoryStorage())

    async def hit(self, name: str, limit: int) -> int | None:
        item = RateLimitItemPerMinute(limit)
        if await self._windows.hit(item, name):
            return None
        reset = (await self._windows.get_window_stats(item, name)).reset_time
        return min(60, max(1, math.ceil(reset - time.time())))

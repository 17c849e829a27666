"""Limits per minute and on parallel requests, in memory or in a Redis that several gateways share.

Windows come from the library ``limits``: requests in a window that moves along (exact), tokens in one that is
weighted (a moving window would keep an entry for each token). A place for a parallel request is a lease that runs
out, so that a gateway that dies gives its places back. What is kept in memory is swept here, once in a while: the
library does so at every request, with a thread for each key.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage, RedisStorage, SlidingWindowCounterSupport, Storage
from limits.aio.strategies import MovingWindowRateLimiter, RateLimiter, SlidingWindowCounterRateLimiter

from proxy.background import kept_up
from proxy.exchange import Key, Limits

MINUTE = 60
SWEEP = 60.0
STEP_BACK = 1.0
"""Seconds by which the clock may be put back before what is counted in memory, by that clock, is forgotten."""
T = TypeVar("T")


def owners(key: Key | None) -> Iterator[tuple[str, Limits]]:
    """Whose limits count for a key: its own, and its organization's. The names are those of the windows."""
    if key is not None:
        yield f"key:{key.id}", key.limits
        if key.organization is not None:
            yield f"organization:{key.organization}", key.organization_limits


def requests_window(owner: str, *, counting: bool = False) -> str:
    """The window of an owner's requests; counting tokens has one of its own."""
    return f"{'count_tokens' if counting else 'requests'}:{owner}"


def tokens_window(owner: str) -> str:
    """The window of an owner's input tokens."""
    return f"tokens:{owner}"


class LimiterDown(Exception):
    """The limiter can't be asked now."""


@dataclass(frozen=True, slots=True)
class Window:
    """What is left of a limit; ``wait`` is how long to wait where nothing is, else None. Times in whole seconds."""

    limit: int
    remaining: int
    reset: int
    wait: int | None


class Places(Protocol):
    """Counts what runs at the same time."""

    async def take(self, name: str, most: int, request_id: str) -> bool:
        """Take a place; False where there is none."""

    def give_back(self, name: str, request_id: str) -> None:
        """Give a place back."""

    async def close(self) -> None:
        """End."""


class Limiter:
    """Windows and places."""

    def __init__(
        self, storage: Storage, places: Places, failures: tuple[type[Exception], ...] = (OSError, TimeoutError)
    ) -> None:
        """``failures`` is what storage and places raise where they can't be asked."""
        self._failures = failures
        self._requests = MovingWindowRateLimiter(storage)
        self._tokens = SlidingWindowCounterRateLimiter(storage)
        self._storage = storage
        self._places = places
        self._memory = storage if isinstance(storage, MemoryStorage) else None
        self._latest = 0.0

    async def hit(self, name: str, limit: int) -> Window:
        """Count one request. Raises LimiterDown."""
        return await self._hit(self._requests, name, limit, 1)

    async def spend(self, name: str, limit: int, tokens: int) -> Window:
        """Count tokens; more than the whole limit counts as the whole. Raises LimiterDown."""
        counted = min(tokens, limit)
        window = await self._hit(self._tokens, name, limit, counted)
        return window if window.wait is None else replace(window, wait=await self._wait(name, limit, counted))

    async def look(self, name: str, limit: int, *, tokens: bool) -> Window:
        """What is left, with nothing counted. Raises LimiterDown."""
        return await self._window(self._tokens if tokens else self._requests, name, limit, passed=True)

    async def take_place(self, name: str, most: int, request_id: str) -> bool:
        """Take a place for a running request; False where there is none. Raises LimiterDown."""
        try:
            return await self._places.take(name, most, request_id)
        except self._failures as error:
            raise LimiterDown(type(error).__name__) from error

    def give_place_back(self, name: str, request_id: str) -> None:
        """Give a place back."""
        self._places.give_back(name, request_id)

    async def close(self) -> None:
        """End."""
        if self._memory is not None and self._memory.timer is not None:
            self._memory.timer.cancel()
        await self._places.close()

    async def _wait(self, name: str, limit: int, tokens: int) -> int:
        """Seconds after which as many tokens are left."""
        windows = cast(SlidingWindowCounterSupport, self._storage)
        key = RateLimitItemPerMinute(limit).key_for(name)
        try:
            counts = await self._whole(windows.get_sliding_window(key, MINUTE))
        except self._failures as error:
            raise LimiterDown(type(error).__name__) from error
        return max(1, math.floor(seconds_until(tokens, limit, *counts)) + 1)

    async def _hit(self, windows: RateLimiter, name: str, limit: int, cost: int) -> Window:
        if self._memory is not None:
            await self._look_after(self._memory)
        try:
            passed = await self._whole(windows.hit(RateLimitItemPerMinute(limit), name, cost=cost))
        except self._failures as error:
            raise LimiterDown(type(error).__name__) from error
        return await self._window(windows, name, limit, passed=passed)

    async def _window(self, windows: RateLimiter, name: str, limit: int, *, passed: bool) -> Window:
        try:
            stats = await self._whole(windows.get_window_stats(RateLimitItemPerMinute(limit), name))
        except self._failures as error:
            raise LimiterDown(type(error).__name__) from error
        reset = min(60, max(1, math.ceil(stats.reset_time - time.time())))
        return Window(limit, max(0, stats.remaining), reset, None if passed else reset)

    async def _whole(self, command: Coroutine[Any, Any, T]) -> T:
        """The result of a command that is not cut short: cancelled, it would leave its connection one reply behind."""
        return await (asyncio.shield(asyncio.ensure_future(command)) if self._memory is None else command)

    async def _look_after(self, memory: MemoryStorage) -> None:
        if memory.timer is None:  # while this one runs, the library begins no sweep of its own
            memory.timer = asyncio.get_running_loop().create_task(
                kept_up("the sweep of the limits", lambda: _sweep(memory))
            )
        moment = time.time()
        if moment < self._latest - STEP_BACK:
            await memory.reset()
        self._latest = moment


def seconds_until(
    tokens: int, limit: int, previous: int, previous_left: float, current: int, current_left: float
) -> float:
    """When a weighted window has room for so many tokens, at most the limit.

    The minute before the current one counts ``previous`` tokens, by the share of it that is still within the last 60
    seconds (``previous_left`` of them); the current one ends in ``current_left`` seconds less a minute.
    """
    room = limit + 1 - tokens  # the library rounds what is counted down
    if current < room:
        return previous_left - MINUTE * (room - current) / previous if previous else 0.0
    rest = max(0.0, current_left - MINUTE)
    return rest + MINUTE * (1 - room / current)


async def _sweep(memory: MemoryStorage) -> None:
    """Forget what has run out, once in a while: else whoever asked once would be kept for ever."""
    while True:
        await asyncio.sleep(SWEEP)
        moment = time.time()
        for key in [key for key, events in memory.events.items() if not events or events[0].expiry <= moment]:
            await memory.clear(key)
        for key in [key for key, ends in memory.expirations.items() if ends <= moment]:
            await memory.clear(key)


class MemoryPlaces:
    """Places of one process."""

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()

    async def take(self, name: str, most: int, request_id: str) -> bool:
        if self._taken[name] >= most:
            return False
        self._taken[name] += 1
        return True

    def give_back(self, name: str, request_id: str) -> None:
        self._taken[name] -= 1
        if self._taken[name] <= 0:
            del self._taken[name]

    async def close(self) -> None:
        return


def open_limiter(url: str) -> Limiter:
    """The limiter of a setting: ``memory``, or a Redis URL."""
    if url == "memory":
        return Limiter(MemoryStorage(), MemoryPlaces())
    from proxy.redis_places import DOWN, PREFIX, RedisPlaces  # a library that nobody else needs stays unread

    places = RedisPlaces(url)
    options: dict[str, Any] = {"connection_pool": places.pool}
    storage = RedisStorage(f"async+{url}", implementation="redispy", key_prefix=PREFIX, **options)
    return Limiter(storage, places, DOWN)

"""Places for parallel requests in a Redis that several gateways share.

A place is a lease that runs out, so that a gateway that dies gives its places back.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import redis.asyncio
from redis.exceptions import RedisError

from proxy.background import kept_up

REDIS_TIMEOUT = 2.0
MOST_CONNECTIONS = 32
LEASE = 120
"""Seconds for which a place is kept without a renewal."""
RENEWAL = 30
PREFIX = "ezat"
DOWN = (RedisError, OSError, TimeoutError)
"""What is raised where Redis can't be asked."""

_TAKE_PLACE = """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[1])
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
redis.call('ZADD', KEYS[1], ARGV[3], ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[5])
return 1
"""


class RedisPlaces:
    """Places that several gateways share: leases in a sorted set, by the time at which they run out."""

    def __init__(self, url: str) -> None:
        self.pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=MOST_CONNECTIONS,
            timeout=REDIS_TIMEOUT,
            socket_timeout=REDIS_TIMEOUT,
            socket_connect_timeout=REDIS_TIMEOUT,
            protocol=2,
        )
        """For what else asks this Redis; closed with the places. Where all are taken, one waits for its turn."""
        self._redis = redis.asyncio.Redis(connection_pool=self.pool)
        self._take = self._redis.register_script(_TAKE_PLACE)
        self._held: set[tuple[str, str]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._renewing: asyncio.Task[None] | None = None

    async def take(self, name: str, most: int, request_id: str) -> bool:
        if self._renewing is None:
            self._renewing = asyncio.get_running_loop().create_task(kept_up("the renewal of places", self._renew))
        now = time.time()
        key = f"{PREFIX}:places:{name}"
        taking = asyncio.ensure_future(self._take(keys=[key], args=[now, most, now + LEASE, request_id, LEASE]))
        try:
            taken = bool(await asyncio.shield(taking))
        except asyncio.CancelledError:
            taking.add_done_callback(lambda _: self.give_back(name, request_id))
            raise
        if taken:
            self._held.add((name, request_id))
        return taken

    def give_back(self, name: str, request_id: str) -> None:
        self._held.discard((name, request_id))
        task = asyncio.get_running_loop().create_task(self._remove(name, request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=REDIS_TIMEOUT)
        await self._redis.aclose()
        await self.pool.aclose()

    async def _remove(self, name: str, request_id: str) -> None:
        with contextlib.suppress(*DOWN):  # then the lease runs out
            await self._redis.zrem(f"{PREFIX}:places:{name}", request_id)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEWAL)
            for name, request_id in list(self._held):
                try:
                    await self._redis.zadd(f"{PREFIX}:places:{name}", {request_id: time.time() + LEASE}, xx=True)
                    await self._redis.expire(f"{PREFIX}:places:{name}", LEASE)
                except DOWN:
                    break

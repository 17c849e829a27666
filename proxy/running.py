"""What is running: the exchanges under way, the bytes of their bodies, and how all of it comes to an end.

A stop refuses new work at once, lets what runs go on for a while, and then ends it with a proper error.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from proxy.errors import GatewayError, Kind

ENDING = 3.0
"""Seconds for what is ended to tell its client."""
UNKNOWN_LENGTH = 4 * 2**20
"""What a body without an announced length is taken for until it is there."""


class Endable(Protocol):
    """An exchange that can be ended from outside."""

    def end_now(self) -> None:
        """End it with an error that says that the gateway stops."""


class Running:
    """The exchanges under way."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._exchanges: set[Endable] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.bytes = 0
        """Of all bodies that are being read or answered."""
        self.leaving = False
        """Whether a stop was asked for: it is not ready for more, though it may still take it."""
        self.draining = False
        """Whether new work is refused."""

    def __len__(self) -> int:
        return len(self._exchanges)

    def add(self, exchange: Endable) -> None:
        """An exchange begins. Raises GatewayError while draining."""
        if self.draining:
            raise stopping()
        self._exchanges.add(exchange)
        self._idle.clear()

    def remove(self, exchange: Endable) -> None:
        """An exchange is over."""
        self._exchanges.discard(exchange)
        if not self._exchanges:
            self._idle.set()

    def take(self, size: int) -> None:
        """Make room for a body. Raises GatewayError where all bodies together would be too large."""
        if self.bytes + size > self.most_bytes:
            message = "the gateway holds as many large requests as it can; try again"
            raise GatewayError(Kind.UNAVAILABLE, message, retry_after=1)
        self.bytes += size

    def give_back(self, size: int) -> None:
        """A body is gone."""
        self.bytes -= size

    async def drain(self, seconds: float, at_once: asyncio.Event) -> None:
        """Refuse new work, wait for what runs, then end what is left; ``at_once`` cuts the waiting short."""
        self.leaving = self.draining = True
        if not self._exchanges:
            return
        waiting = {asyncio.ensure_future(self._idle.wait()), asyncio.ensure_future(at_once.wait())}
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        for exchange in tuple(self._exchanges):
            exchange.end_now()
        if self._exchanges:
            try:
                async with asyncio.timeout(ENDING):
                    await self._idle.wait()
            except TimeoutError:
                return


def stopping() -> GatewayError:
    """The refusal of new work, and the end of what ran too long."""
    return GatewayError(Kind.UNAVAILABLE, "the gateway is stopping; try again", retry_after=2)

"""Which deployments may be asked now: cooling down after a failure, one probe at a time, a cap on parallel requests.

A client that leaves says nothing about a deployment: neither a success nor a failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SHORTEST_COOLING = 1.0
LONGEST_COOLING = 60.0


class Health:
    """The state of one deployment."""

    __slots__ = ("_clock", "_cooling", "_max_parallel", "_probing", "_until", "active")

    def __init__(self, max_parallel: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_parallel = max_parallel
        self._clock = clock
        self._until = 0.0
        self._cooling = 0.0
        self._probing = False
        self.active = 0
        """Requests that are being answered."""

    @property
    def is_cooling(self) -> bool:
        """Whether it failed lately and hasn't answered since. When its time is over, one probe may pass at a time."""
        return self._cooling > 0 and (self._probing or self._clock() < self._until)

    @property
    def is_full(self) -> bool:
        """Whether it answers as many requests as it may."""
        return self._max_parallel is not None and self.active >= self._max_parallel

    def begin(self) -> bool:
        """Take a place; True where this request is the probe of a deployment that was cooling down."""
        self.active += 1
        probe = self._cooling > 0 and not self._probing and self._clock() >= self._until
        self._probing = self._probing or probe
        return probe

    def end(self) -> None:
        """Give the place back."""
        self.active -= 1

    def leave_probe(self) -> None:
        """The probe ended with neither success nor failure: the next request is one."""
        self._probing = False

    def succeeded(self) -> None:
        """It answered."""
        self._until = self._cooling = 0.0
        self._probing = False

    def failed(self, retry_after: float | None) -> None:
        """It failed: no requests for what it asks for, else for a time that grows from 1 s to 60 s."""
        self._probing = False
        self._cooling = min(LONGEST_COOLING, max(SHORTEST_COOLING, self._cooling * 2))
        wait = self._cooling if retry_after is None else min(LONGEST_COOLING, max(SHORTEST_COOLING, retry_after))
        self._until = max(self._until, self._clock() + wait)

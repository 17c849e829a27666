"""Which deployments may be asked now: cooling down after a failure, one probe at a time, a cap on parallel requests.

A client that leaves says nothing about a deployment: neither a success nor a failure. What began before the last
failure says little of the time after it: twenty requests that fail together make one failure, and an answer that was
under way ends no cooling.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

SHORTEST_COOLING = 1.0
LONGEST_COOLING = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """One request to a deployment."""

    failures: int
    """How often the deployment had failed when it began."""


class Health:
    """The state of one deployment."""

    __slots__ = ("_clock", "_cooling", "_failures", "_probe", "_until", "active")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = 0.0
        self._cooling = 0.0
        self._failures = 0
        self._probe: Attempt | None = None
        self.active = 0
        """Requests that are being answered."""

    @property
    def is_cooling(self) -> bool:
        """Whether it failed lately and hasn't answered since. When its time is over, one probe may pass at a time."""
        return self._cooling > 0 and (self._probe is not None or self._clock() < self._until)

    def is_full(self, most: int | None) -> bool:
        """Whether it answers as many requests as it may."""
        return most is not None and self.active >= most

    def begin(self) -> Attempt:
        """Take a place. What the attempt comes to is told by one of ``succeeded``, ``failed`` and ``left``."""
        self.active += 1
        attempt = Attempt(self._failures)
        if self._cooling > 0 and not self.is_cooling:
            self._probe = attempt
        return attempt

    def end(self) -> None:
        """Give the place back."""
        self.active -= 1

    def left(self, attempt: Attempt) -> None:
        """It ended with neither success nor failure; where it was the probe, the next request is one."""
        if self._probe is attempt:
            self._probe = None

    def succeeded(self, attempt: Attempt) -> None:
        """It answered."""
        self.left(attempt)
        if attempt.failures == self._failures:
            self._until = self._cooling = 0.0
            self._probe = None

    def failed(self, attempt: Attempt, retry_after: float | None) -> None:
        """It failed: no requests for what it asks for, else for a time that grows from 1 s to 60 s."""
        self.left(attempt)
        if attempt.failures == self._failures:
            self._failures += 1
            self._cooling *= 2
        elif retry_after is None:
            return
        self._cooling = _within_bounds(self._cooling)
        wait = self._cooling if retry_after is None else _within_bounds(retry_after)
        self._until = max(self._until, self._clock() + wait)


def _within_bounds(seconds: float) -> float:
    return min(LONGEST_COOLING, max(SHORTEST_COOLING, seconds))

"""A time limit that costs nothing where nothing waits.

Nearly every hook of a plugin ends without waiting, and a timer around each would cost more than the hook. So the
coroutine is run up to its first wait, and only the rest is put under a timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


async def bounded(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """The result of ``work``. Raises TimeoutError where it takes longer than ``seconds``."""
    try:
        waiting = work.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    async with asyncio.timeout(seconds):
        late: T = await _Rest(work, waiting)
        return late


class _Rest:
    """A coroutine that has been run up to its first wait."""

    __slots__ = ("_waiting", "_work")

    def __init__(self, work: Coroutine[Any, Any, Any], waiting: Any) -> None:
        self._work = work
        self._waiting = waiting

    def __await__(self) -> Generator[Any, Any, Any]:
        waiting = self._waiting
        while True:
            try:
                try:
                    sent = yield waiting
                except BaseException as error:
                    waiting = self._work.throw(error)
                else:
                    waiting = self._work.send(sent)
            except StopIteration as ended:
                return ended.value

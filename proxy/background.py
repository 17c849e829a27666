"""Tasks that outlive the handler that began them: recording an answer, draining a connection, a ping.

Each is kept until it ends (the event loop holds tasks weakly), and a failure that nobody awaits is logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

import structlog

T = TypeVar("T")
PAUSE = 1.0
"""Seconds before a task that failed begins anew."""
LETTING_GO = 2.0
"""Seconds for a cancelled task to end."""

_log = structlog.get_logger("ezat.background")


async def kept_up(task: str, work: Callable[[], Awaitable[None]]) -> None:
    """Do work that must go on for as long as the gateway; what it raises is logged, and it begins anew."""
    while True:
        try:
            await work()
            return
        except Exception:
            _log.exception("a background task failed, it begins anew", task=task)
        await asyncio.sleep(PAUSE)


class Background:
    """The running tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` as a task of its own."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def drain(self, seconds: float) -> None:
        """Wait for the running tasks, then cancel what is left."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=seconds)
            await cancelled(late)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("background task failed", error=type(error).__name__)


async def cancelled(tasks: Iterable[asyncio.Task[Any] | asyncio.Future[Any] | None]) -> bool:
    """Cancel tasks, and wait a little for their ends; whether any of them doesn't end."""
    running = {task for task in tasks if task is not None and not task.done()}
    for task in running:
        task.cancel()
    _, stuck = await asyncio.wait(running, timeout=LETTING_GO) if running else (set(), set())
    if stuck:
        _log.error("tasks don't let themselves be cancelled", tasks=len(stuck))
    return bool(stuck)

"""One thread owns the connection that writes; many requests share a commit.

A job is a function of a connection. The jobs that wait together run in one transaction; where that fails, each runs
in one of its own, so that one bad job spoils nobody else's. No request touches a connection: a task that is
cancelled inside a database call leaves it one reply behind. And a thread that runs a whole batch costs one hop,
where an asynchronous driver costs one for each statement.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError

from proxy.store.ledger import Record, record_all

T = TypeVar("T")
Job = Callable[[Connection], Any]

MOST_PER_COMMIT = 256
MOST_WAITING = 20_000
PAUSE = 0.5
"""Seconds before what can wait is tried again."""

_log = structlog.get_logger("ezat.store")


class StoreDown(Exception):
    """The store can't be written now."""


@dataclass(slots=True)
class _Waiting:
    work: Job | Record
    result: asyncio.Future[Any] | None
    """None for a job that nobody waits for: it is tried until it succeeds."""
    failures: int = field(default=0)


class Writer:
    """Runs jobs one batch after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "ezat-store")
        self._queue: deque[_Waiting] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self.healthy = True
        """Whether the last batch was written."""

    def start(self) -> None:
        """Begin to write."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def submit(self, job: Callable[[Connection], T]) -> T:
        """Run a job; it is committed when this returns. Raises StoreDown."""
        result: T = await self._submit(job)
        return result

    async def record(self, record: Record) -> bool:
        """Write a row of the ledger, together with all that wait; whether it was new. Raises StoreDown."""
        return bool(await self._submit(record))

    async def _submit(self, work: Job | Record) -> Any:
        if len(self._queue) >= MOST_WAITING or self._stopping:
            raise StoreDown("too much is waiting to be written")
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.append(_Waiting(work, result))
        self._wake.set()
        return await result

    def later(self, work: Job | Record) -> None:
        """Do it whenever it can be done; nobody waits for it."""
        if len(self._queue) >= MOST_WAITING:
            _log.error("a record is lost: too much is waiting to be written")
            return
        self._queue.append(_Waiting(work, None))
        self._wake.set()

    async def stop(self, seconds: float) -> None:
        """Write what waits, then end."""
        self._stopping = True
        self._wake.set()
        if self._task is not None:
            _, late = await asyncio.wait({self._task}, timeout=seconds)
            for task in late:
                task.cancel()
        if self._queue:
            _log.error("the store could not be written before the end", records=len(self._queue))
        self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        while True:
            if not self._queue:
                if self._stopping:
                    return
                self._wake.clear()
                await self._wake.wait()
                continue
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), MOST_PER_COMMIT))]
            work = asyncio.get_running_loop().run_in_executor(self._thread, self._write, batch)
            for waiting, outcome in zip(batch, await asyncio.shield(work), strict=True):
                self._settle(waiting, outcome)
            if not self.healthy:
                if self._stopping:
                    return
                await asyncio.sleep(PAUSE)

    def _settle(self, waiting: _Waiting, outcome: Any) -> None:
        failed = isinstance(outcome, _Failure)
        if waiting.result is None:
            if failed:
                waiting.failures += 1
                if outcome.is_down or waiting.failures < 3:
                    self._queue.append(waiting)
                else:
                    _log.error("a record could not be written", error=type(outcome.error).__name__)
            return
        if waiting.result.done():
            return
        if not failed:
            waiting.result.set_result(outcome)
        elif isinstance(outcome.error, SQLAlchemyError):
            waiting.result.set_exception(StoreDown(type(outcome.error).__name__))
        else:
            waiting.result.set_exception(outcome.error)

    def _write(self, batch: list[_Waiting]) -> list[Any]:
        """In the thread: the result or the _Failure of each job."""
        for attempt in (1, 2):
            try:
                with self._engine.begin() as connection:
                    results = _done(connection, batch)
                self.healthy = True
                return results
            except (OperationalError, InterfaceError) as error:  # a deadlock, a lost connection: once more
                if attempt == 2:
                    self.healthy = False
                    _log.error("the store can't be written", error=type(error.orig).__name__)
                    return [_Failure(error, is_down=True)] * len(batch)
            except Exception as error:
                if len(batch) == 1:
                    return [_Failure(error, is_down=False)]
                break
        return [self._write([waiting])[0] for waiting in batch]


def _done(connection: Connection, batch: list[_Waiting]) -> list[Any]:
    """The results of a batch in its order; its records are written together, behind the other jobs."""
    results: list[Any] = [None if isinstance(waiting.work, Record) else waiting.work(connection) for waiting in batch]
    places = [place for place, waiting in enumerate(batch) if isinstance(waiting.work, Record)]
    records = [waiting.work for waiting in batch if isinstance(waiting.work, Record)]
    for place, new in zip(places, record_all(connection, records) if records else (), strict=True):
        results[place] = new
    return results


@dataclass(frozen=True, slots=True)
class _Failure:
    error: Exception
    is_down: bool

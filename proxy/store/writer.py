"""One thread owns the connection that writes; many requests share a commit.

A job is a function of a connection. The jobs that wait together run in one transaction; where that fails, each runs
in one of its own, so that one bad job spoils nobody else's. No request touches a connection: a task that is
cancelled inside a database call leaves it one reply behind. And a thread that runs a whole batch costs one hop,
where an asynchronous driver costs one for each statement. Gateways that share a PostgreSQL write one after the other,
as SQLite's do: batches that touch the same budgets in another order would lock each other out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeVar

import structlog
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DatabaseError, InterfaceError, InternalError, OperationalError, SQLAlchemyError

from proxy.background import kept_up
from proxy.store import Budget, UsageRow
from proxy.store.database import take_turns
from proxy.store.ledger import NotAsUsual, Record, probe, record_all, record_usual

T = TypeVar("T")
Job = Callable[[Connection], Any]

MOST_PER_COMMIT = 256
MOST_WAITING = 20_000
MOST_KNOWN = 100_000
PAUSE = 0.5
"""Seconds before what can wait is tried again, and before a store that was down is."""
PATIENCE = 8.0
"""Seconds that a request waits for its job: less than an answer has for its end."""
_DEADLOCKED = ("40001", "40P01")
"""PostgreSQL's states of a transaction that stood in another's way: the same once more may pass."""

_log = structlog.get_logger("ezat.store")


class StoreDown(Exception):
    """The store can't be written now."""


@dataclass(slots=True)
class _Waiting:
    work: Job | Record
    result: asyncio.Future[Any] | None
    """None for a job that nobody waits for: it is tried until it succeeds."""
    failures: int = field(default=0)
    since: float = field(default_factory=monotonic)


class Writer:
    """Runs jobs one batch after the other."""

    def __init__(self, engine: Engine, on_recorded: Callable[[UsageRow], None] = lambda row: None) -> None:
        """``on_recorded`` is told of each new row, once it is committed."""
        self._engine = engine
        self._on_recorded = on_recorded
        self._thread = ThreadPoolExecutor(1, "ezat-store")
        self._queue: deque[_Waiting] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._known: set[Budget] = set()
        self._writing: Sequence[_Waiting] = ()
        self.healthy = True
        """Whether the last batch was written."""

    def start(self) -> None:
        """Begin to write."""
        self._task = asyncio.get_running_loop().create_task(kept_up("the writer", self._run))

    @property
    def backlog(self) -> tuple[int, float]:
        """How many jobs aren't written yet, and the age of the oldest in seconds."""
        since = [waiting.since for waiting in (*self._writing, *self._queue)]
        return len(since), monotonic() - min(since) if since else 0.0

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
        try:
            async with asyncio.timeout(PATIENCE):
                return await result
        except TimeoutError:
            self.healthy = False  # until a batch is written
            raise StoreDown("the store takes too long") from None

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
            taken = [self._queue.popleft() for _ in range(min(len(self._queue), MOST_PER_COMMIT))]
            batch = [each for each in taken if each.result is None or not each.result.done()]  # else it was given up
            if not batch:
                continue
            self._writing = batch
            work = asyncio.get_running_loop().run_in_executor(self._thread, self._write, batch)
            for waiting, outcome in zip(batch, await asyncio.shield(work), strict=True):
                try:
                    self._settle(waiting, outcome)
                except Exception:  # nobody else's job suffers for it
                    _log.exception("the writer could not tell of a job")
            self._writing = ()
            if not self.healthy:
                if self._stopping:
                    return
                if all(waiting.work is not probe for waiting in self._queue):
                    self._queue.append(_Waiting(probe, None))
                await asyncio.sleep(PAUSE)

    def _settle(self, waiting: _Waiting, outcome: Any) -> None:
        failed = isinstance(outcome, _Failure)
        if isinstance(waiting.work, Record) and not failed and outcome:
            self._on_recorded(waiting.work.row)
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
                results = self._transact(batch)
                self.healthy = True
                return results
            except Exception as error:
                if _is_down(error):
                    if attempt == 1 and _may_pass_now(error):
                        continue
                    self.healthy = False
                    _log.error("the store can't be written", error=_name(error))
                    return [_Failure(error, is_down=True)] * len(batch)
                if len(batch) == 1:
                    return [_Failure(error, is_down=False)]
                break
        return self._write_apart(batch)

    def _transact(self, batch: list[_Waiting]) -> list[Any]:
        """A batch in one transaction; with care where it isn't as usual."""
        known = self._known
        try:
            with self._engine.begin() as connection:
                take_turns(connection)
                return _done(connection, batch, lambda connection, records: record_usual(connection, records, known))
        except NotAsUsual:
            with self._engine.begin() as connection:
                take_turns(connection)
                results = _done(connection, batch, record_all)
        charged = [waiting.work.charged for waiting in batch if isinstance(waiting.work, Record)]
        self._known = known.union(*charged) if len(known) < MOST_KNOWN else set()
        return results

    def _write_apart(self, batch: list[_Waiting]) -> list[Any]:
        """Each job in a transaction of its own; where the store goes down meanwhile, the rest fail with it."""
        results: list[Any] = []
        for waiting in batch:
            last = results[-1] if results else None
            results.append(last if isinstance(last, _Failure) and last.is_down else self._write([waiting])[0])
        return results


def _is_down(error: Exception) -> bool:
    """Whether the store is at fault: locked, full, read-only, broken, gone. Else it is the job."""
    return isinstance(error, OperationalError | InterfaceError | InternalError) or type(error) is DatabaseError


def _may_pass_now(error: Exception) -> bool:
    """After a deadlock, or on a new connection in place of a lost one."""
    if not isinstance(error, DatabaseError | InterfaceError):
        return False
    return error.connection_invalidated or getattr(error.orig, "sqlstate", None) in _DEADLOCKED


def _name(error: Exception) -> str:
    return type(error.orig if isinstance(error, DatabaseError | InterfaceError) else error).__name__


def _done(
    connection: Connection, batch: list[_Waiting], write: Callable[[Connection, Sequence[Record]], list[bool]]
) -> list[Any]:
    """The results of a batch in its order.

    Its records are written together, before the other jobs: what a request has cost must be charged before what it
    had reserved is given back, or another could reserve it.
    """
    records = [waiting.work for waiting in batch if isinstance(waiting.work, Record)]
    news = iter(write(connection, records) if records else ())
    return [next(news) if isinstance(waiting.work, Record) else waiting.work(connection) for waiting in batch]


@dataclass(frozen=True, slots=True)
class _Failure:
    error: Exception
    is_down: bool

"""The store of a running gateway: opened at start, looked after while it runs, closed at the end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import structlog
import uuid_utils
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from proxy.background import kept_up
from proxy.store import Budget, BudgetSpent, UsageRow
from proxy.store.admin_token import first_admin_token
from proxy.store.database import LOCK_TIMEOUT, MEMORY, READ_ONLY, lock, open_engine
from proxy.store.directory import Directory, now, read_if_newer
from proxy.store.ledger import Record, alive, gone, release_all, reserve, spent
from proxy.store.migrations import StoreTooNew, migrate
from proxy.store.writer import StoreDown, Writer

REFRESH = 2.0
"""Seconds between two looks whether keys or organizations were changed."""
STALE = 10.0
"""Seconds for which keys are known though the store can't be asked."""
HEARTBEAT = 10.0
DEAD = 40.0
"""Seconds of silence after which what a gateway has reserved is given back."""

T = TypeVar("T")
_log = structlog.get_logger("ezat.store")


class Store:
    """Keys, organizations, budgets and the ledger."""

    def __init__(self, url: str, on_recorded: Callable[[UsageRow], None] = lambda row: None) -> None:
        self._url = url
        self._engine = open_engine(url)
        self._writer = Writer(self._engine, on_recorded)
        self._reader = ThreadPoolExecutor(1, "ezat-reads")
        self._lock: int | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._read_at = 0.0
        self._reserving: set[str] = set()
        self.directory = Directory()
        """The keys and organizations of the database, as they were at the last look."""
        self.id = uuid_utils.uuid4().hex
        """This gateway, among those that share the store."""

    async def start(self) -> None:
        """Open the database and bring it to this version's schema. Raises StoreInUse, StoreDown."""
        self._lock = lock(self._url)
        try:
            await asyncio.get_running_loop().run_in_executor(self._reader, migrate, self._engine)
        except StoreTooNew as error:
            raise StoreDown(str(error)) from error
        except (SQLAlchemyError, OSError) as error:
            raise StoreDown(f"the store can't be opened: {type(error).__name__}") from error
        self._writer.start()
        # what a gateway that was killed has reserved in a file of its own can be given back at once
        await self._writer.submit(alive(self.id, now(), DEAD if self._lock is None else None))
        await self._refresh()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(kept_up("the look at the keys", self._keep_fresh)),
            loop.create_task(kept_up("the heartbeat", self._beat)),
        ]

    async def stop(self, seconds: float) -> None:
        """Write what waits, give back what is reserved, close."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            self._writer.later(gone(self.id))
        await self._writer.stop(seconds)
        idle = asyncio.get_running_loop().run_in_executor(self._reader, int)  # a read that still runs ends first
        await asyncio.wait({idle}, timeout=seconds)
        self._reader.shutdown(wait=False)
        self._engine.dispose()
        if self._lock is not None:
            os.close(self._lock)

    @property
    def is_ready(self) -> bool:
        """Whether it can be written, and its keys are fresh enough to judge by."""
        return self._writer.healthy and self.is_fresh

    async def first_admin_token(self) -> str | None:
        """Make the admin token where there is none: its text, which is not kept. Raises StoreDown."""
        text = await self._writer.submit(first_admin_token)
        await self._refresh()
        return text

    @property
    def backlog(self) -> tuple[int, float]:
        """How much waits to be written, and for how many seconds the oldest of it has waited."""
        return self._writer.backlog

    @property
    def is_fresh(self) -> bool:
        """Whether the directory was read lately."""
        return asyncio.get_running_loop().time() - self._read_at < STALE

    async def record(self, row: UsageRow, charged: Sequence[Budget]) -> None:
        """Write a row durably, charge its budgets and give back what was reserved. Raises StoreDown."""
        await self._writer.record(Record(row, charged))
        self._reserving.discard(row.request_id)

    def record_later(self, row: UsageRow, charged: Sequence[Budget]) -> None:
        """The same, where nobody waits for it."""
        self._writer.later(Record(row, charged))

    async def check(self, charged: Sequence[Budget]) -> None:
        """Whether anything is left of budgets. Raises BudgetSpent, StoreDown."""

        def job(connection: Connection) -> None:
            for budget in charged:
                if budget.limit is not None and spent(connection, budget)[0] >= budget.limit:
                    raise BudgetSpent(budget)

        await self.read(job)

    async def reserve(self, request_id: str, wanted: int, charged: Sequence[Budget]) -> int:
        """Reserve from budgets; the amount. Raises BudgetSpent, BudgetReserved, StoreDown."""
        self._reserving.add(request_id)
        amount = await self._writer.submit(reserve(request_id, wanted, charged, self.id))
        if isinstance(amount, Exception):
            self._reserving.discard(request_id)
            raise amount
        return amount

    def release_later(self, request_id: str) -> None:
        """Give back what a request has reserved; nothing where it was recorded."""
        if request_id not in self._reserving:
            return
        self._reserving.discard(request_id)
        self._writer.later(lambda connection: release_all(connection, [request_id]))

    async def write(self, job: Callable[[Connection], T]) -> T:
        """Run a job of one's own with the writer. Raises StoreDown."""
        return await self._writer.submit(job)

    async def read(self, job: Callable[[Connection], T]) -> T:
        """Run a job that only reads, beside the writer. Raises StoreDown."""
        if self._url == MEMORY:  # it has but one connection
            return await self._writer.submit(job)
        reading = asyncio.get_running_loop().run_in_executor(self._reader, self._read, job)
        try:
            async with asyncio.timeout(LOCK_TIMEOUT):
                return await asyncio.shield(reading)
        except SQLAlchemyError as error:
            raise StoreDown(type(error).__name__) from error
        except TimeoutError:
            raise StoreDown("the store takes too long") from None

    def _read(self, job: Callable[[Connection], T]) -> T:
        with self._engine.connect().execution_options(**READ_ONLY) as connection:
            return job(connection)

    async def _refresh(self) -> None:
        self.directory = await self.read(read_if_newer(self.directory))
        self._read_at = asyncio.get_running_loop().time()

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH)
            try:
                await self._refresh()
            except StoreDown:
                _log.error("the store can't be read")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT)
            self._writer.later(alive(self.id, now(), DEAD))

"""The writer: one thread, many requests in one commit, and nobody's trouble is another's."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, func, select, text
from sqlalchemy.exc import OperationalError

from proxy.store import writer as writer_module
from proxy.store.database import open_engine
from proxy.store.ledger import Record, record_all
from proxy.store.migrations import migrate
from proxy.store.schema import usage
from proxy.store.writer import MOST_PER_COMMIT, MOST_WAITING, StoreDown, Writer
from tests.process import eventually
from tests.store.rows import ACME, row


@pytest.fixture
async def engine(store_url: str) -> AsyncIterator[Engine]:
    engine = open_engine(store_url)
    migrate(engine)
    yield engine
    engine.dispose()


@pytest.fixture
async def writer(engine: Engine) -> AsyncIterator[Writer]:
    writer = Writer(engine)
    writer.start()
    yield writer
    await writer.stop(5)


def rows_of(connection: Connection) -> int:
    return int(connection.execute(select(func.count()).select_from(usage)).scalar_one())


class Holds:
    """A job that keeps the writer busy until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.let_go = threading.Event()

    def __call__(self, connection: Connection) -> None:
        self.begun.set()
        assert self.let_go.wait(30)


async def held(writer: Writer) -> tuple[Holds, asyncio.Task[None]]:
    """A writer that is busy: what comes now waits together."""
    holds = Holds()
    task = asyncio.create_task(writer.submit(holds))
    await asyncio.to_thread(holds.begun.wait)
    return holds, task


async def test_requests_that_wait_together_share_a_commit(engine: Engine, writer: Writer) -> None:
    """Group commit: however many wait, they are written in as many transactions as batches."""
    commits: list[Any] = []
    event.listen(engine, "commit", commits.append)
    holds, task = await held(writer)

    waiting = [asyncio.create_task(writer.record(Record(row(), [ACME]))) for _ in range(2 * MOST_PER_COMMIT)]
    await asyncio.sleep(0)
    holds.let_go.set()

    assert [True] * 2 * MOST_PER_COMMIT == await asyncio.gather(*waiting)
    await task
    assert 3 == len(commits)
    assert 2 * MOST_PER_COMMIT == await writer.submit(rows_of)


async def test_a_job_is_committed_when_it_is_told_so(store_url: str, writer: Writer) -> None:
    """What was acknowledged can be seen by any other connection."""
    await writer.record(Record(row(), [ACME]))

    other = open_engine(store_url)
    with other.connect() as connection:
        assert 1 == rows_of(connection)
    other.dispose()


class Bug(Exception):
    pass


async def test_one_bad_job_spoils_nobody_elses(writer: Writer) -> None:
    """A job that raises fails alone, with its own error; those that wait with it are done, once each."""
    holds, task = await held(writer)

    def bad(connection: Connection) -> None:
        record_all(connection, [Record(row(), [ACME])])
        raise Bug

    waiting = [
        asyncio.create_task(writer.record(Record(row(), [ACME]))),
        asyncio.create_task(writer.submit(bad)),
        asyncio.create_task(writer.record(Record(row(), [ACME]))),
    ]
    await asyncio.sleep(0)
    holds.let_go.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    await task

    assert [True, Bug, True] == [outcome if outcome is True else type(outcome) for outcome in outcomes]
    assert 2 == await writer.submit(rows_of)
    assert writer.healthy


async def test_jobs_are_done_in_their_order(writer: Writer) -> None:
    """Jobs that wait together are done as they came."""
    holds, task = await held(writer)
    done: list[int] = []

    def job(number: int) -> Callable[[Connection], None]:
        return lambda connection: done.append(number)

    waiting = [asyncio.create_task(writer.submit(job(number))) for number in range(20)]
    await asyncio.sleep(0)
    holds.let_go.set()
    await asyncio.gather(task, *waiting)

    assert [*range(20)] == done


async def test_what_was_given_up_before_its_turn_is_not_done(writer: Writer) -> None:
    """A request that ended in an error while its row still waited is not billed after all."""
    holds, task = await held(writer)
    waiting = asyncio.create_task(writer.record(Record(row(), [ACME])))
    await asyncio.sleep(0)

    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    holds.let_go.set()
    await task

    assert 0 == await writer.submit(rows_of)


async def test_tasks_that_are_cancelled_anywhere_leave_nothing_behind(engine: Engine, writer: Writer) -> None:
    """P9: a thousand tasks cancelled at random moments leave no connection taken and no lock held, and what is written
    afterwards is whole."""
    chance = random.Random(3)

    async def one() -> None:
        task = asyncio.create_task(writer.record(Record(row(), [ACME])))
        for _ in range(chance.randrange(5)):
            await asyncio.sleep(chance.choice([0, 0, 0.001]))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for _ in range(10):
        await asyncio.gather(*(one() for _ in range(100)))
    before = await writer.submit(rows_of)
    await writer.record(Record(row(), [ACME]))

    assert before + 1 == await writer.submit(rows_of)
    assert 0 == engine.pool.checkedout()  # type: ignore[attr-defined]
    assert 1 >= engine.pool.checkedin()  # type: ignore[attr-defined]
    total = await writer.submit(lambda connection: connection.execute(text("SELECT spent FROM budgets")).scalar())
    assert (before + 1) * 20 == total


async def test_nobody_waits_for_ever(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that hangs is down for whoever waits, in time."""
    monkeypatch.setattr(writer_module, "PATIENCE", 0.05)
    holds, task = await held(writer)

    with pytest.raises(StoreDown):
        await writer.submit(rows_of)

    holds.let_go.set()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_queue_that_is_too_long_is_refused(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is bounded: beyond that a request is told at once that the store is down."""
    monkeypatch.setattr(writer_module, "MOST_WAITING", 3)
    holds, task = await held(writer)
    waiting = [asyncio.create_task(writer.submit(rows_of)) for _ in range(3)]
    await asyncio.sleep(0)

    with pytest.raises(StoreDown):
        await writer.submit(rows_of)

    holds.let_go.set()
    await asyncio.gather(task, *waiting)
    assert MOST_WAITING >= 10_000


async def test_the_end_writes_what_waits(engine: Engine) -> None:
    """A stop lets no row go that somebody handed over, waited for or not."""
    writer = Writer(engine)
    writer.start()
    holds, task = await held(writer)
    waiting = asyncio.create_task(writer.record(Record(row(), [ACME])))
    writer.later(Record(row(), [ACME]))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(writer.stop(5))
    holds.let_go.set()

    await asyncio.gather(task, waiting, stopping)

    with engine.connect() as connection:
        assert 2 == rows_of(connection)
    with pytest.raises(StoreDown):
        await writer.submit(rows_of)


class Trouble:
    """A database that fails as told, then works again."""

    def __init__(self, engine: Engine, failures: int, error: Callable[[], Exception]) -> None:
        self.left = failures
        self.tried = 0
        self._error = error
        event.listen(engine, "commit", self)

    def __call__(self, connection: Connection) -> None:
        self.tried += 1
        if self.left:
            self.left -= 1
            raise self._error()


class _Deadlock(Exception):
    sqlstate = "40P01"


DOWN: dict[str, Callable[[], Exception]] = {
    "an operational error": lambda: OperationalError("COMMIT", None, Exception()),
    "a deadlock": lambda: OperationalError("COMMIT", None, _Deadlock()),
}


async def test_a_deadlock_is_tried_again(engine: Engine, writer: Writer) -> None:
    """A transaction that stood in another's way is done again at once: nobody is told."""
    trouble = Trouble(engine, 1, DOWN["a deadlock"])

    assert await writer.record(Record(row(), [ACME]))

    assert 2 == trouble.tried
    assert writer.healthy


async def test_a_store_that_is_down_is_noticed_and_tried_again(
    engine: Engine, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits is told; the writer is known to be down, and finds out by itself when it is not any more."""
    monkeypatch.setattr(writer_module, "PAUSE", 0.01)
    trouble = Trouble(engine, 5, DOWN["an operational error"])

    with pytest.raises(StoreDown):
        await writer.record(Record(row(), [ACME]))
    assert not writer.healthy
    await eventually(lambda: writer.healthy)  # nobody submits anything: it asks by itself

    assert 6 == trouble.tried
    assert 0 == await writer.submit(rows_of), "a row that was refused must not come back"


async def test_what_nobody_waits_for_outlives_a_store_that_is_down(
    engine: Engine, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of a client that left is written as soon as that can be, once."""
    monkeypatch.setattr(writer_module, "PAUSE", 0.01)
    trouble = Trouble(engine, 7, DOWN["an operational error"])

    writer.later(Record(row(), [ACME]))
    await eventually(lambda: trouble.tried == 8 and writer.healthy)

    assert 1 == await writer.submit(rows_of)


async def test_a_store_that_goes_down_within_a_batch_is_asked_once(
    engine: Engine, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs are tried apart where one of them is bad; where the store goes down meanwhile, not each waits for it."""
    monkeypatch.setattr(writer_module, "PAUSE", 0.01)
    Trouble(engine, 10**6, DOWN["an operational error"])
    tried: list[float] = []
    event.listen(engine, "begin", lambda connection: tried.append(time.monotonic()))
    holds, task = await held(writer)

    def bad(connection: Connection) -> None:
        raise Bug

    waiting = [asyncio.create_task(writer.submit(job)) for job in (bad, *[rows_of] * 50)]
    await asyncio.sleep(0)
    holds.let_go.set()
    await asyncio.gather(task, *waiting, return_exceptions=True)

    assert len(tried) < 10

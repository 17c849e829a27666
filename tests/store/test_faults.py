"""When the store or the limiter fails: requests are refused with a time to come back, nothing that was acknowledged is
lost, nothing that was refused is billed, and all is well again by itself when the fault is over.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path

import aiohttp
import psycopg
import pytest
from sqlalchemy import Connection, Engine, event

from proxy import redis_places
from proxy.errors import CannotStart
from proxy.store import database as database_module
from proxy.store import writer as writer_module
from proxy.store.database import StoreInUse, path_of
from proxy.store.store import Store
from proxy.store.writer import StoreDown
from proxy.testing import ScriptedUpstream
from tests.process import eventually
from tests.store import servers
from tests.store.gateways import (
    KEY,
    PATHS,
    ask,
    body,
    configured,
    gated_message,
    gated_stream,
    ledger,
    look,
    prepaid,
    reserved_units,
    serving,
)
from tests.store.processes import started
from tests.store.rows import row

Fault = Callable[[str], AbstractContextManager[None]]
MUCH = 10**12


@contextmanager
def locked_file(url: str) -> Iterator[None]:
    with closing(sqlite3.connect(path_of(url), isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        yield


@contextmanager
def full_file(url: str) -> Iterator[None]:
    """The file may not grow, and what it has is used up."""

    def limit(connection: Connection) -> None:
        connection.exec_driver_sql("PRAGMA max_page_count = 1")  # no less than it has

    values = "hex(randomblob(9)), 0, 0, '', NULL, NULL, '', '', NULL, 0, 0, 0, 0, 0, 0, 0, 0, '{}', '', ?, '{}'"
    with closing(sqlite3.connect(path_of(url), isolation_level=None)) as other:
        other.execute("PRAGMA max_page_count = 1")
        for size in (1000, 1):
            with suppress(sqlite3.OperationalError):
                while True:
                    other.execute(f"INSERT INTO usage SELECT {values}", ["x" * size])
        event.listen(Engine, "begin", limit)
        try:
            yield
        finally:
            event.remove(Engine, "begin", limit)
            event.listen(Engine, "begin", unlimited)
            other.execute("DELETE FROM usage WHERE key_id = ''")


def unlimited(connection: Connection) -> None:
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("PRAGMA max_page_count = 1000000")


@contextmanager
def file_taken_away(url: str) -> Iterator[None]:
    path = path_of(url)
    names = [name for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")) if name.exists()]
    for name in names:
        name.rename(f"{name}.away")
    try:
        yield
    finally:
        for name in names:
            Path(f"{name}.away").rename(name)


@contextmanager
def locked_tables(url: str) -> Iterator[None]:
    with psycopg.connect(url) as connection:
        connection.execute("LOCK TABLE usage, reservations, budgets, gateways IN ACCESS EXCLUSIVE MODE")
        yield


@contextmanager
def stopped_server(url: str) -> Iterator[None]:
    servers.postgres().stop()
    try:
        yield
    finally:
        servers.postgres().start()


@contextmanager
def hanging_server(url: str) -> Iterator[None]:
    """Every connection is kept open, and nothing comes back."""
    backends = servers.postgres().backends(url)
    for pid in backends:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in backends:
            os.kill(pid, signal.SIGCONT)


FAULTS: dict[str, tuple[str, Fault]] = {
    "SQLite is locked": ("sqlite", locked_file),
    "SQLite is full": ("sqlite", full_file),
    "the file is taken away": ("sqlite", file_taken_away),
    "PostgreSQL is locked": ("postgresql", locked_tables),
    "PostgreSQL is stopped": ("postgresql", stopped_server),
    "PostgreSQL hangs": ("postgresql", hanging_server),
}


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times as a test can wait for them."""
    monkeypatch.setattr(writer_module, "PATIENCE", 1.5)
    monkeypatch.setattr(writer_module, "PAUSE", 0.05)
    monkeypatch.setattr(database_module, "LOCK_TIMEOUT", 0.2)
    options = "-c lock_timeout=200 -c statement_timeout=400"
    monkeypatch.setattr(database_module, "_POSTGRES", {**database_module._POSTGRES, "options": options})


def store_of(kind: str, folder: Path) -> str:
    return f"sqlite:///{folder}/ezat.db" if kind == "sqlite" else servers.postgres().database()


async def first_text(session: aiohttp.ClientSession, url: str, path: str) -> aiohttp.ClientResponse:
    """A stream of which the first text has come."""
    answer = await session.post(url + path, json=body(stream=True), headers={"x-api-key": KEY})
    read = b""
    while b"Hello." not in read:
        read += await answer.content.readany()
    return answer


async def is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    return (await look(session, url, "/readyz")).status == 200


async def until_ready(session: aiohttp.ClientSession, url: str, expected: bool) -> None:
    deadline = time.monotonic() + 30
    while await is_ready(session, url) is not expected:
        assert time.monotonic() < deadline, f"readiness is never {expected}"
        await asyncio.sleep(0.01)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize(("kind", "fault"), FAULTS.values(), ids=FAULTS)
async def test_a_store_that_fails_and_comes_back(
    session: aiohttp.ClientSession, tmp_path: Path, kind: str, fault: Fault
) -> None:
    """P7: running answers end in an error instead of their tail and are not billed; new requests are a 503 with
    retry-after and reach no upstream; the row of a client that left meanwhile is written later; and when the fault is
    over the gateway serves again by itself, with every acknowledged row there and nothing reserved."""
    store_url = store_of(kind, tmp_path)
    gate = asyncio.Event()
    async with ScriptedUpstream() as upstream, serving(configured(store_url, upstream.url, auth=prepaid(MUCH))) as url:
        before = await ask(session, url)
        upstream.replies += [gated_stream(gate), gated_stream(gate), gated_stream(gate), gated_message(gate)]
        streams = [await first_text(session, url, path) for path in PATHS.values()]
        left = await first_text(session, url, PATHS["messages"])
        plain = asyncio.create_task(ask(session, url))
        await eventually(lambda: upstream.open == 4)

        with fault(store_url):
            left.close()
            await eventually(lambda: upstream.open == 3)
            gate.set()
            endings = [await answer.text() for answer in streams]
            refused = await plain
            await until_ready(session, url, False)
            reached = len(upstream.received)
            new = [await ask(session, url, path=path) for path in PATHS.values()]
            streamed = await ask(session, url, stream=True)
            known = await look(session, url, "/v1/models")

        await until_ready(session, url, True)
        after = await ask(session, url)
        await until_settled(store_url, count=3)

    assert [True, True] == [before.is_whole, after.is_whole]
    assert 'data: {"error":' in endings[0]
    assert '"finish_reason":"stop"' not in endings[0]
    assert '"type":"error"' in endings[1]
    assert "message_stop" not in endings[1]
    assert [503] * 4 == [each.status for each in (refused, *new, streamed)]
    assert {"5"} == {each.headers["retry-after"] for each in (refused, *new, streamed)}
    assert len(upstream.received) == reached + 1, "those that were refused went nowhere"
    assert 200 == known.status, "a static key is known all the same"
    rows = ledger(store_url)
    assert [("exact", before.id), ("estimated", left.headers["request-id"]), ("exact", after.id)] == [
        (row["exactness"], row["request_id"]) for row in rows
    ]
    assert (0, 0) == reserved_units(store_url)


async def until_settled(url: str, count: int) -> None:
    """Return when the ledger has so many rows and nothing is reserved."""
    deadline = time.monotonic() + 10
    while len(ledger(url)) < count or reserved_units(url) != (0, 0):
        assert time.monotonic() < deadline, "never settled"
        await asyncio.sleep(0.02)


LOCKS: dict[str, tuple[str, Fault]] = {
    "SQLite": ("sqlite", locked_file),
    "PostgreSQL": ("postgresql", locked_tables),
}


@pytest.mark.parametrize(("kind", "fault"), LOCKS.values(), ids=LOCKS)
async def test_a_short_lock_is_waited_for(
    session: aiohttp.ClientSession, tmp_path: Path, kind: str, fault: Fault
) -> None:
    """P7: a database that is locked for a second delays an answer by so much, and nobody is refused."""
    store_url = store_of(kind, tmp_path)
    async with ScriptedUpstream() as upstream, serving(configured(store_url, upstream.url)) as url:
        with fault(store_url):
            asked = asyncio.create_task(ask(session, url))
            _, waiting = await asyncio.wait({asked}, timeout=1)
            assert waiting, "it was answered before it could be recorded"
        answer = await asked

    assert answer.is_whole
    assert [answer.id] == [row["request_id"] for row in ledger(store_url)]


async def test_a_locked_file_can_be_read(session: aiohttp.ClientSession, sqlite_url: str) -> None:
    """P7: whoever only reads does not wait for those that write: what a key has left is told meanwhile."""
    async with ScriptedUpstream() as upstream, serving(configured(sqlite_url, upstream.url, auth=prepaid(MUCH))) as url:
        with locked_file(sqlite_url):
            told = await look(session, url, "/api/key")

    assert 200 == told.status


def emptied(path: Path) -> None:
    for each in (path, Path(f"{path}-wal")):
        os.truncate(each, 0)


@pytest.mark.usefixtures("_impatient")
async def test_a_file_that_lost_its_content_serves_nobody(session: aiohttp.ClientSession, sqlite_url: str) -> None:
    """P7: a database that is none any more is noticed: no answer passes that isn't recorded, and nothing hangs."""
    async with ScriptedUpstream() as upstream, serving(configured(sqlite_url, upstream.url)) as url:
        assert (await ask(session, url)).is_whole
        emptied(path_of(sqlite_url))

        answers = [await ask(session, url) for _ in range(3)]
        ready = await is_ready(session, url)

    assert [503] * 3 == [answer.status for answer in answers]
    assert not ready


async def test_a_header_that_was_overwritten_loses_nothing(sqlite_url: str) -> None:
    """P7: what was acknowledged before and after is there when the gateway has stopped."""
    store = Store(sqlite_url)
    await store.start()
    await store.record(row(), [])
    with path_of(sqlite_url).open("r+b") as file:
        file.write(b"\0" * 100)

    acknowledged = 1
    for _ in range(3):
        with suppress(StoreDown):
            await store.record(row(), [])
            acknowledged += 1
    await store.stop(5)

    assert acknowledged == len(ledger(sqlite_url))


@pytest.mark.slow
async def test_a_full_disk_is_survived(session: aiohttp.ClientSession, sqlite_url: str, tmp_path: Path) -> None:
    """P7: where the operating system itself refuses to let files grow, requests are refused, the process lives, and it
    goes on by itself when there is room again."""
    (tmp_path / "log").symlink_to("/dev/null")
    async with ScriptedUpstream() as upstream:
        with started(configured(sqlite_url, upstream.url), tmp_path) as gateway:
            before = await ask(session, gateway.url)
            unlimited = resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE, (4096, unlimited[1]))
            refused = [await ask(session, gateway.url) for _ in range(3)]
            resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE, unlimited)
            await until_ready(session, gateway.url, True)
            after = await ask(session, gateway.url)

    assert [503] * 3 == [answer.status for answer in refused]
    assert [before.id, after.id] == [row["request_id"] for row in ledger(sqlite_url)]


# Two on one file, and none at all


async def test_a_second_gateway_on_one_file_is_refused(store: Store, store_url: str) -> None:
    """P10: two gateways on one SQLite file would each spend the whole budget; on PostgreSQL they share it."""
    second = Store(store_url)
    try:
        if store_url.startswith("sqlite"):
            with pytest.raises(StoreInUse, match="another gateway serves from"):
                await second.start()
        else:
            await second.start()
            assert second.id != store.id
    finally:
        await second.stop(5)


async def test_a_file_is_free_again_when_its_gateway_has_stopped(sqlite_url: str) -> None:
    """P10: the lock goes with the gateway."""
    for _ in range(2):
        store = Store(sqlite_url)
        await store.start()
        await store.stop(5)


async def test_one_file_by_two_names_is_one_file(sqlite_url: str, tmp_path: Path) -> None:
    """P10: another way to write the path, or a link to the folder, is no way around."""
    (tmp_path / "link").symlink_to(tmp_path)
    store = Store(sqlite_url)
    await store.start()
    try:
        for other in (sqlite_url.replace("ezat.db", "./ezat.db"), sqlite_url.replace("ezat.db", "link/ezat.db")):
            second = Store(other)
            with pytest.raises(StoreInUse):
                await second.start()
            await second.stop(5)
    finally:
        await store.stop(5)


async def test_a_link_to_the_file_is_the_same_file(sqlite_url: str, tmp_path: Path) -> None:
    """P10: nor is a link to the file itself."""
    store = Store(sqlite_url)
    await store.start()
    (tmp_path / "other.db").symlink_to(tmp_path / "ezat.db")
    second = Store(f"sqlite:///{tmp_path}/other.db")
    try:
        with pytest.raises(StoreInUse):
            await second.start()
    finally:
        await second.stop(5)
        await store.stop(5)


UNREACHABLE = {
    "no server": "postgresql://nobody@127.0.0.1:1/none",
    "a folder in the file's place": "sqlite:///{folder}",
}


@pytest.mark.parametrize("url", UNREACHABLE.values(), ids=UNREACHABLE)
async def test_a_gateway_whose_store_cannot_be_opened_does_not_start(url: str, tmp_path: Path) -> None:
    """It says so in one sentence, in which no password stands."""
    async with ScriptedUpstream() as upstream:
        with pytest.raises(CannotStart, match="the store can't be opened: OperationalError"):
            async with serving(configured(url.format(folder=tmp_path), upstream.url)):
                pass


# The limiter


@contextmanager
def stopped_redis() -> Iterator[None]:
    servers.redis_server().stop()
    try:
        yield
    finally:
        servers.redis_server().start()


@contextmanager
def hanging_redis() -> Iterator[None]:
    servers.redis_server().pause()
    try:
        yield
    finally:
        servers.redis_server().go_on()


LIMITED = {"keys": [{"name": "one", "key": KEY, "requests_per_minute": 1000, "parallel_requests": 2}]}


@pytest.mark.parametrize("fault", [stopped_redis, hanging_redis], ids=["stopped", "hangs"])
async def test_a_limiter_that_fails_and_comes_back(
    session: aiohttp.ClientSession,
    sqlite_url: str,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[], AbstractContextManager[None]],
) -> None:
    """While Redis is gone, requests of limited keys are a 503 with retry-after and reach no upstream; a running answer
    ends well and is recorded; when it is back, they are served again, and no place is taken for good."""
    monkeypatch.setattr(redis_places, "REDIS_TIMEOUT", 0.2)
    gate = asyncio.Event()
    limiter = servers.redis_server().url
    async with (
        ScriptedUpstream(gated_message(gate)) as upstream,
        serving(configured(sqlite_url, upstream.url, auth=LIMITED, limiter=limiter)) as url,
    ):
        running = asyncio.create_task(ask(session, url))
        await eventually(lambda: upstream.open == 1)
        with fault():
            refused = [await ask(session, url, path=path) for path in PATHS.values()]
            view = await look(session, url, "/api/key")
            gate.set()
            ended = await running
        after = await ask(session, url)

    assert [503, 503, 503] == [each.status for each in (*refused, view)]
    assert ["5", "5", "5"] == [each.headers["retry-after"] for each in (*refused, view)]
    assert [True, True] == [ended.is_whole, after.is_whole]
    assert 2 == len(upstream.received) == len(ledger(sqlite_url))

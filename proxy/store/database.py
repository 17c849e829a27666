"""Opening the database: SQLite in one file for one gateway, PostgreSQL for several.

SQLite is written with FULL synchronisation (what was acknowledged survives a loss of power) in WAL mode. Two gateways
on one file would each believe that the budgets are theirs alone, so the second is refused. A file that is deleted or
exchanged while it is open would take all writes and lose them, so that is looked for before each transaction.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import StaticPool

from proxy.jsontext import encode

LOCK_TIMEOUT = 5.0
"""Seconds to wait for a locked database, and for a connection to one."""
MEMORY = "sqlite:///:memory:"
READ_ONLY = {"reads": True}
"""The execution options of a connection that only reads: it doesn't wait for those that write."""
_POSTGRES = {
    "connect_timeout": int(LOCK_TIMEOUT),
    "options": "-c lock_timeout=5000 -c statement_timeout=8000",
    # a server that has vanished without a word is noticed within about 10 s, too
    "tcp_user_timeout": 10_000,
    "keepalives_idle": 4,
    "keepalives_interval": 2,
    "keepalives_count": 3,
}
_JSON: dict[str, Any] = {"json_serializer": lambda value: encode(value).decode()}
"""A provider's own counts are kept digit for digit, as everything that is passed on."""


class StoreInUse(Exception):
    """Another gateway serves from this SQLite file."""


def open_engine(url: str) -> Engine:
    """The engine of a store's URL. Connects to nothing yet."""
    if url == MEMORY:
        engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}, **_JSON)
    elif url.startswith("sqlite:"):
        path_of(url).parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(url, connect_args={"timeout": LOCK_TIMEOUT}, **_JSON)
        event.listen(engine, "begin", _check_file)
    else:
        postgres = "postgresql+psycopg://" + url.partition("://")[2]
        return create_engine(postgres, pool_pre_ping=True, connect_args=_POSTGRES, **_JSON)
    event.listen(engine, "connect", _set_up_sqlite)
    event.listen(engine, "begin", _begin)
    return engine


def path_of(url: str) -> Path:
    """The file of an SQLite URL."""
    return Path(url.removeprefix("sqlite:///"))


def lock(url: str) -> int | None:
    """Keep other gateways off an SQLite file, until the descriptor is closed. Raises StoreInUse."""
    if url == MEMORY or not url.startswith("sqlite:"):
        return None
    path = path_of(url).resolve()  # by whatever name, it is one file
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise StoreInUse(f"another gateway serves from {path}; for several, set store: postgresql://…") from None
    return descriptor


def take_turns(connection: Connection) -> None:
    """Let no other gateway write until this transaction ends; SQLite does so by itself."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SELECT pg_advisory_xact_lock(775534)")


def _set_up_sqlite(connection: Any, record: object) -> None:
    connection.isolation_level = None  # transactions are begun below, not by the driver
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _check_file(connection: Connection) -> None:
    """Raises OperationalError where the path is not the file that is open."""
    path = connection.engine.url.database or ""
    opened = connection.info.setdefault("file", _file(path))
    if opened is None or opened != _file(path):
        connection.invalidate()
        raise OperationalError("BEGIN", None, sqlite3.OperationalError("the database file was taken away"))


def _file(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if found.st_size else None  # emptied is as bad as gone


def _begin(connection: Connection) -> None:
    reads = connection.get_execution_options().get("reads", False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

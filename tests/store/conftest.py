"""The stores and limiters that the same tests run on: SQLite and PostgreSQL, memory and Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from proxy.store.store import Store
from tests.store import servers


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty store that nobody else uses."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/ezat.db"
        return
    with servers.postgres().lent_database() as url:
        yield url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ezat.db"


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    """A running one."""
    store = Store(store_url)
    await store.start()
    yield store
    await store.stop(5)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """A client."""
    async with aiohttp.ClientSession() as session:
        yield session

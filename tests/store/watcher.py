"""A plugin that tells the client what its request had reserved: put it behind usage."""

from __future__ import annotations

from typing import ClassVar

from sqlalchemy import Connection, select

from proxy.exchange import Exchange
from proxy.plugin import Plugin, Services
from proxy.store.schema import reservations
from proxy.store.store import Store

HEADER = "x-reserved"
WATCHER = "tests.store.watcher:Watcher"


class Watcher(Plugin):
    """Adds the amount to the answer's headers, in units."""

    name: ClassVar[str] = "watcher"
    _store: Store

    async def start(self, services: Services) -> None:
        self._store = services.store

    async def on_send(self, exchange: Exchange) -> None:
        def amount(connection: Connection) -> int:
            query = select(reservations.c.amount).where(reservations.c.request_id == exchange.id)
            return int(connection.execute(query).scalar() or 0)

        exchange.answer_headers[HEADER] = str(await self._store.read(amount))

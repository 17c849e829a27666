"""A ledger in memory: sums and the newest rows, gone when the process ends."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from decimal import Decimal

from proxy.models import EXACT
from proxy.store import UsageRow

MOST_ROWS = 10_000


class MemoryLedger:
    """A Ledger for one process."""

    def __init__(self) -> None:
        self.rows: OrderedDict[str, UsageRow] = OrderedDict()
        """The newest rows by request id."""
        self._by_key: defaultdict[str, Decimal] = defaultdict(Decimal)
        self._by_organization: defaultdict[str, Decimal] = defaultdict(Decimal)

    async def record(self, row: UsageRow) -> None:
        self.record_later(row)

    def record_later(self, row: UsageRow) -> None:
        if row.request_id in self.rows:
            return
        self.rows[row.request_id] = row
        if len(self.rows) > MOST_ROWS:
            self.rows.popitem(last=False)
        self._by_key[row.key_id] = EXACT.add(self._by_key[row.key_id], row.cost_usd)
        if row.organization is not None:
            total = self._by_organization[row.organization]
            self._by_organization[row.organization] = EXACT.add(total, row.cost_usd)

    async def spent_by_key(self, key_id: str) -> Decimal:
        return self._by_key.get(key_id, Decimal(0))

    async def spent_by_organization(self, organization: str) -> Decimal:
        return self._by_organization.get(organization, Decimal(0))

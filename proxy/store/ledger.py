"""What is done to the ledger and the budgets, in jobs for the writer.

Rows and the sums that they change are written in one transaction, many at once, and a second row of the same request
changes nothing. A reservation never takes more than is left; it is given back when its request is recorded or fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

from sqlalchemy import Connection, Table, bindparam, delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from proxy.store import Budget, BudgetReserved, BudgetSpent, UsageRow
from proxy.store.database import take_turns
from proxy.store.schema import budgets, gateways, reservations, usage

DAY = 86400
_FIELDS = tuple(field.name for field in fields(UsageRow))
_values = attrgetter(*_FIELDS)
_COUNTED = {"preserve_rowcount": True}
PROBE = "probe"
PROBE_BYTES = 65536
_IS = (
    budgets.c.scope == bindparam("of_scope"),
    budgets.c.name == bindparam("of_name"),
    budgets.c.period == bindparam("of_period"),
)
# made once: SQLAlchemy takes longer to put a statement together than SQLite to execute it
_SUMS = select(budgets.c.spent, budgets.c.reserved).where(*_IS)
_RELEASE = (
    delete(reservations)
    .where(reservations.c.request_id.in_(bindparam("ids", expanding=True)))
    .returning(*reservations.c)
)
_ADD = (
    update(budgets)
    .where(*_IS)
    .values(spent=budgets.c.spent + bindparam("more_spent"), reserved=budgets.c.reserved + bindparam("more_reserved"))
)


class Record(NamedTuple):
    """A row, and the budgets that it is charged to."""

    row: UsageRow
    charged: Sequence[Budget]


class NotAsUsual(Exception):
    """A row was there already, or a budget was not: to be done again, with care."""


def record_usual(connection: Connection, records: Sequence[Record], known: set[Budget]) -> list[bool]:
    """``record_all`` for what is nearly always so: every row is new, and every budget among the ``known`` has a row.

    Raises NotAsUsual, and then the transaction must be given up.
    """
    insert: Any = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    rows = [_columns(each.row) for each in records]
    result = connection.execute(insert(usage).on_conflict_do_nothing(), rows, execution_options=_COUNTED)
    charges: Counter[Budget] = Counter()
    for each in records:
        for budget in each.charged:
            charges[budget] += each.row.cost
    if result.rowcount != len(rows) or not charges.keys() <= known:
        raise NotAsUsual
    changes = [(budget, cost, 0) for budget, cost in charges.items() if cost]
    if _add(connection, changes) != len(changes):
        raise NotAsUsual
    limited = [each.row.request_id for each in records if any(budget.limit is not None for budget in each.charged)]
    if limited:  # only these reserve
        release_all(connection, limited)
    return [True] * len(rows)


def record_all(connection: Connection, records: Sequence[Record]) -> list[bool]:
    """Write rows, charge their budgets, give back what their requests had reserved; which rows were new."""
    fresh = _insert_new(
        connection,
        usage,
        [_columns(each.row) for each in records],
        usage.c.request_id,
    )
    spent: Counter[Budget] = Counter()
    new: list[bool] = []
    for each in records:
        new.append(each.row.request_id in fresh)
        fresh.discard(each.row.request_id)  # a second one in this batch is a replay
        if new[-1]:
            for budget in each.charged:
                spent[replace(budget, limit=None)] += each.row.cost
    # one that is opened here counts the rows of this batch, too; not one that another gateway opened meanwhile
    counted = {budget for budget in _missing(connection, spent) if _open(connection, budget)}
    _add(connection, [(budget, cost, 0) for budget, cost in spent.items() if cost and budget not in counted])
    release_all(connection, [each.row.request_id for each in records])
    return new


Refused = BudgetSpent | BudgetReserved


def reserve(
    request_id: str, wanted: int, charged: Sequence[Budget], gateway: str
) -> Callable[[Connection], int | Refused]:
    """The job that reserves from every budget what a request may cost, never more than is left.

    It gives the amount that was reserved, or why there is none: nothing is left, or only others' reservations stand
    in the way. (A refusal is no failure of the store: raised, it would undo the whole batch.)
    """

    def job(connection: Connection) -> int | Refused:
        limited = [budget for budget in charged if budget.limit is not None]
        amount = wanted
        for budget in limited:
            room = _room(connection, budget)
            if not isinstance(room, int):
                return room
            amount = min(amount, room)
        _add(connection, [(budget, 0, amount) for budget in limited])
        rows = [{"request_id": request_id, "amount": amount, "gateway": gateway, **_key(budget)} for budget in limited]
        if rows:
            connection.execute(reservations.insert(), rows)
        return amount

    return job


def release_all(connection: Connection, request_ids: Sequence[str]) -> None:
    """Give back what these requests have reserved."""
    _take_back(connection, connection.execute(_RELEASE, {"ids": request_ids}).all())


def alive(gateway: str, now: float, stale_after: float | None) -> Callable[[Connection], None]:
    """The job that says that a gateway lives, and gives back what those reserved that don't any more.

    ``stale_after`` is in seconds; None says that no other lives, whatever the clock was when it was last seen.
    """

    def job(connection: Connection) -> None:
        row = {"id": gateway, "seen_at": now}
        if not _insert_new(connection, gateways, [row], gateways.c.id):
            connection.execute(update(gateways).where(gateways.c.id == gateway).values(seen_at=now))
        lives = gateways.c.id == gateway
        if stale_after is not None:
            lives |= gateways.c.seen_at >= now - stale_after
        living = select(gateways.c.id).where(lives)
        _release_where(connection, reservations.c.gateway.not_in(living))
        connection.execute(delete(gateways).where(gateways.c.id.not_in(living)))

    return job


def gone(gateway: str) -> Callable[[Connection], None]:
    """The job that says that a gateway ends: its reservations are given back."""

    def job(connection: Connection) -> None:
        _release_where(connection, reservations.c.gateway == gateway)
        connection.execute(delete(gateways).where(gateways.c.id == gateway))

    return job


def probe(connection: Connection) -> None:
    """Write as much as many rows take, and take it away again: nothing less finds out whether a disk is still full."""
    text = {"key_id": "", "model": "", "asked_model": "", "exactness": "", "reason": "x" * PROBE_BYTES}
    counts = dict.fromkeys(("at", "day", "input", "cache_read", "cache_write_5m", "cache_write_1h"), 0)
    more = {"output": 0, "thinking": 0, "cost": 0, "prices": {}, "raw": {}, "stream": False}
    connection.execute(usage.insert().values(request_id=PROBE, **text, **counts, **more))
    connection.execute(delete(usage).where(usage.c.request_id == PROBE))


def reopen(scope: str, name: str) -> Callable[[Connection], None]:
    """The job that counts anew what the periods of a budget have spent, after its limit was changed."""

    def job(connection: Connection) -> None:
        take_turns(connection)  # else a running gateway could charge a row that is about to go
        same = (budgets.c.scope == scope, budgets.c.name == name, budgets.c.period != "")
        connection.execute(delete(budgets).where(*same, budgets.c.reserved == 0))

    return job


def spent(connection: Connection, budget: Budget) -> tuple[int, int]:
    """What of a budget is spent and what is reserved, in units."""
    found = connection.execute(_SUMS, _of(budget)).first()
    return (int(found.spent), int(found.reserved)) if found is not None else (_counted(connection, budget), 0)


def _insert_new(connection: Connection, table: Table, rows: list[dict[str, Any]], key: Any) -> set[Any]:
    """Insert the rows whose keys are not there yet; the keys of these."""
    insert: Any = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = insert(table).on_conflict_do_nothing().returning(key)
    return set(connection.execute(statement, rows).scalars())


def _missing(connection: Connection, wanted: Any) -> list[Budget]:
    """Those of the budgets that have no row yet, in a fixed order, so that two gateways don't wait for each other."""
    in_order = sorted(wanted, key=lambda budget: (budget.scope, budget.name, budget.period))
    if not in_order:
        return []
    names = {budget.name for budget in in_order}
    known = connection.execute(
        select(budgets.c.scope, budgets.c.name, budgets.c.period).where(budgets.c.name.in_(names))
    )
    there = {tuple(row) for row in known}
    return [budget for budget in in_order if (budget.scope, budget.name, budget.period) not in there]


def _open(connection: Connection, budget: Budget) -> bool:
    """Make a budget's row, with what the ledger knows to be spent; False where there is one by now."""
    row = {**_key(budget), "spent": _counted(connection, budget), "reserved": 0}
    return bool(_insert_new(connection, budgets, [row], budgets.c.name))


def _counted(connection: Connection, budget: Budget) -> int:
    owner = usage.c.key_id if budget.scope == "key" else usage.c.organization
    total = select(func.coalesce(func.sum(usage.c.cost), 0)).where(owner == budget.name, usage.c.at >= budget.begins)
    return int(connection.execute(total).scalar_one())


def _room(connection: Connection, budget: Budget) -> int | Refused:
    """What is neither spent nor reserved. Writers take turns, so nobody changes it until the transaction ends."""
    found = connection.execute(_SUMS, _of(budget)).first()
    if found is None:
        _open(connection, budget)
        found = connection.execute(_SUMS, _of(budget)).one()
    used, reserved = found
    limit = budget.limit or 0
    if used >= limit:
        return BudgetSpent(budget)
    if used + reserved >= limit:
        return BudgetReserved(budget)
    return int(limit - used - reserved)


def _add(connection: Connection, changes: Sequence[tuple[Budget, int, int]]) -> int:
    """Add to what is spent and what is reserved; how many budgets there were to add to."""
    if changes:
        rows = [
            {**_of(budget), "more_spent": more_spent, "more_reserved": more_reserved}
            for budget, more_spent, more_reserved in sorted(changes, key=lambda change: change[0].name)
        ]
        return int(connection.execute(_ADD, rows).rowcount)
    return 0


def _columns(row: UsageRow) -> dict[str, Any]:
    columns = dict(zip(_FIELDS, _values(row), strict=True))
    columns["day"] = int(row.at // DAY)
    return columns


def _key(budget: Budget) -> dict[str, str]:
    return {"scope": budget.scope, "name": budget.name, "period": budget.period}


def _of(budget: Budget) -> dict[str, str]:
    return {"of_scope": budget.scope, "of_name": budget.name, "of_period": budget.period}


def _release_where(connection: Connection, condition: Any) -> None:
    _take_back(connection, connection.execute(delete(reservations).where(condition).returning(*reservations.c)).all())


def _take_back(connection: Connection, found: Sequence[Any]) -> None:
    """Subtract deleted reservations from their budgets."""
    _add(connection, [(Budget(each.scope, each.name, each.period), 0, -each.amount) for each in found])

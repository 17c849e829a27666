"""What the ledger says: sums by key, organization, end user, model or day, and against a provider's own export."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Literal

from sqlalchemy import Connection, case, func, select

from proxy.store.ledger import DAY
from proxy.store.schema import keys, usage

By = Literal["key", "organization", "end_user", "model", "day"]
TOKENS = ("input", "cache_read", "cache_write_5m", "cache_write_1h", "output")

COLUMNS = {
    "day": ("usage_date_utc", "date", "day", "usage_date", "start_time", "starting_at"),
    "model": ("model_version", "model", "model_id", "model_name"),
    "input": ("usage_input_tokens_no_cache", "uncached_input_tokens", "input_tokens_no_cache", "input_tokens", "input"),
    "cache_read": (
        "usage_input_tokens_cache_read",
        "cache_read_input_tokens",
        "input_tokens_cache_read",
        "cache_read",
    ),
    "cache_write_5m": (
        "usage_input_tokens_cache_write_5m",
        "input_tokens_cache_write_5m",
        "ephemeral_5m_input_tokens",
        "cache_creation_input_tokens",
        "cache_write_5m",
    ),
    "cache_write_1h": (
        "usage_input_tokens_cache_write_1h",
        "input_tokens_cache_write_1h",
        "ephemeral_1h_input_tokens",
        "cache_write_1h",
    ),
    "output": ("usage_output_tokens", "output_tokens", "output"),
}
"""The names under which providers export what the ledger calls so."""


def sums(
    connection: Connection, by: By, since: float | None = None, until: float | None = None
) -> list[dict[str, Any]]:
    """Requests, tokens and cost (in units) per group, the dearest first; days in their order."""
    group = _group(by)
    query = (
        select(
            group.label(by),
            func.count().label("requests"),
            *(func.sum(usage.c[name]).label(name) for name in TOKENS),
            func.sum(usage.c.cost).label("cost"),
            func.sum(case((usage.c.exactness.in_(("exact", "free")), 0), else_=1)).label("not_exact"),
        )
        .where(*_between(since, until))
        .group_by(group)
    )
    rows = [{name: _plain(value) for name, value in row.items()} for row in connection.execute(query).mappings()]
    if by == "day":
        for row in rows:
            row["day"] = datetime.fromtimestamp(row["day"] * DAY, UTC).date().isoformat()
        return sorted(rows, key=lambda row: str(row["day"]))
    if by == "key":
        names = {row.id: row.name for row in connection.execute(select(keys.c.id, keys.c.name))}
        for row in rows:
            row["key"] = names.get(row["key"], row["key"])
    return sorted(rows, key=lambda row: -row["cost"])


def _group(by: By) -> Any:
    return usage.c["key_id" if by == "key" else by]


def _between(since: float | None, until: float | None) -> list[Any]:
    conditions = []
    if since is not None:
        conditions.append(usage.c.at >= since)
    if until is not None:
        conditions.append(usage.c.at < until)
    return conditions


def _plain(value: Any) -> Any:
    """Counts as whole numbers: PostgreSQL sums them up as decimals."""
    return value if value is None or isinstance(value, str) else int(value)


@dataclass(frozen=True, slots=True)
class Difference:
    """What a provider counted and what the ledger did, for a day, a model at the provider and a kind of tokens."""

    day: str
    model: str
    kind: str
    provider: int
    ledger: int


class NoExport(Exception):
    """The file is no usage export."""


def differences(connection: Connection, text: str) -> list[Difference]:
    """Where a provider's export (CSV) and the ledger differ, by day and model. Raises NoExport.

    Only the days and models that stand in the export are compared; the ledger's model is the deployment's.
    """
    exported = _exported(text)
    counted = _counted(connection, sorted({day for day, _ in exported}))
    found = []
    for (day, model), theirs in sorted(exported.items()):
        ours = counted.get((day, model), {})
        found += [
            Difference(day, model, kind, count, ours.get(kind, 0))
            for kind, count in theirs.items()
            if count != ours.get(kind, 0)
        ]
    return found


def _exported(text: str) -> dict[tuple[str, str], dict[str, int]]:
    reader = csv.DictReader(io.StringIO(text))
    names = {name.strip().lower(): name for name in reader.fieldnames or ()}
    columns = {kind: names[each] for kind, known in COLUMNS.items() for each in reversed(known) if each in names}
    for needed in ("day", "model", "output"):
        if needed not in columns:
            raise NoExport(f"no column for {needed}; known are {', '.join(COLUMNS[needed])}")
    totals: dict[tuple[str, str], dict[str, int]] = {}
    for number, row in enumerate(reader, 2):
        try:
            day = date.fromisoformat(row[columns["day"]].strip()[:10]).isoformat()
            model = row[columns["model"]].strip()
            counts = {kind: int(row[columns[kind]] or 0) for kind in TOKENS if kind in columns}
        except (ValueError, AttributeError) as error:
            raise NoExport(f"line {number} can't be read: {error}") from None
        total = totals.setdefault((day, model), dict.fromkeys(counts, 0))
        for kind, count in counts.items():
            total[kind] += count
    return totals


def _counted(connection: Connection, days: list[str]) -> dict[tuple[str, str], dict[str, int]]:
    if not days:
        return {}
    first = datetime.fromisoformat(days[0]).replace(tzinfo=UTC).timestamp()
    last = datetime.fromisoformat(days[-1]).replace(tzinfo=UTC).timestamp() + DAY
    query = (
        select(usage.c.day, usage.c.deployment, *(func.sum(usage.c[name]).label(name) for name in TOKENS))
        .where(usage.c.at >= first, usage.c.at < last, usage.c.deployment.is_not(None))
        .group_by(usage.c.day, usage.c.deployment)
    )
    totals: dict[tuple[str, str], dict[str, int]] = {}
    for row in connection.execute(query).mappings():
        key = (datetime.fromtimestamp(int(row["day"]) * DAY, UTC).date().isoformat(), _model(row["deployment"]))
        total = totals.setdefault(key, dict.fromkeys(TOKENS, 0))
        for name in TOKENS:
            total[name] += int(row[name] or 0)
    return totals


def _model(deployment: str) -> str:
    return deployment.partition("/")[2]


def as_csv(rows: list[dict[str, Any]]) -> str:
    """Rows as CSV."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()

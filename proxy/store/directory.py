"""The keys and organizations of the database, kept in memory by whoever serves.

All of them are read at once, whenever the revision in the database has grown: then judging a key needs no database,
and a change takes effect within the time between two looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sqlalchemy import Connection, select

from proxy.exchange import NO_LIMITS, Limits
from proxy.store.periods import Period
from proxy.store.schema import keys, organizations, revisions, tokens

DIRECTORY = "directory"
ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Organization:
    """An organization; ``credit`` is what it has paid in, in units, None where it isn't prepaid."""

    name: str
    suspended: bool = False
    credit: int | None = None
    limits: Limits = NO_LIMITS


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key as it is kept: its digest and what it stands for. ``spend_limit`` is in units."""

    id: str
    name: str
    digest: bytes
    shown: str
    organization: str | None = None
    models: tuple[str, ...] | None = None
    limits: Limits = NO_LIMITS
    spend_limit: int | None = None
    spend_period: Period | None = None
    expires_at: float | None = None
    revoked_at: float | None = None


@dataclass(frozen=True, slots=True)
class Directory:
    """All keys by digest, all organizations by name, the operator's token, and the revision that they are of."""

    revision: int = -1
    keys: Mapping[bytes, StoredKey] = field(default_factory=dict)
    organizations: Mapping[str, Organization] = field(default_factory=dict)
    admin: bytes | None = None
    """The digest of the token of the operator's listener."""


def revision(connection: Connection) -> int:
    """How often the directory was changed."""
    found = connection.execute(select(revisions.c.revision).where(revisions.c.name == DIRECTORY)).scalar()
    return int(found or 0)


def read_if_newer(known: Directory) -> Callable[[Connection], Directory]:
    """The job that gives the directory as it is now; the known one where nothing was changed."""

    def job(connection: Connection) -> Directory:
        current = revision(connection)
        return known if current == known.revision else read(connection, current)

    return job


def read(connection: Connection, current: int) -> Directory:
    """The whole directory."""
    found = [
        StoredKey(
            id=row.id,
            name=row.name,
            digest=row.digest,
            shown=row.shown,
            organization=row.organization,
            models=None if row.models is None else tuple(row.models),
            limits=Limits(row.requests_per_minute, row.input_tokens_per_minute, row.parallel_requests),
            spend_limit=row.spend_limit,
            spend_period=row.spend_period,
            expires_at=row.expires_at,
            revoked_at=row.revoked_at,
        )
        for row in connection.execute(select(keys))
    ]
    named = [
        Organization(
            row.name,
            row.suspended,
            row.credit,
            Limits(row.requests_per_minute, row.input_tokens_per_minute, row.parallel_requests),
        )
        for row in connection.execute(select(organizations))
    ]
    admin = connection.execute(select(tokens.c.digest).where(tokens.c.name == ADMIN)).scalar()
    return Directory(current, {key.digest: key for key in found}, {each.name: each for each in named}, admin)


def now() -> float:
    """Seconds since 1970; the one clock of the store."""
    return time.time()

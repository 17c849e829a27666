"""What an operator does to keys and organizations, each as a job for the writer, or for a connection of its own.

Every change raises the directory's revision, so that running gateways see it at their next look.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import uuid_utils
from sqlalchemy import Connection, insert, select, update

from proxy.exchange import KEY_PREFIX
from proxy.store.directory import DIRECTORY, now
from proxy.store.ledger import reopen
from proxy.store.money import MOST_UNITS, usd
from proxy.store.schema import keys, organizations, revisions

SECRET_BYTES = 32
SHOWN = 4


class NotThere(Exception):
    """There is no such key or organization."""


class Taken(Exception):
    """The name is taken."""


class TooMuch(Exception):
    """More money than the database can count."""


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was just made: the only time that its text is known."""

    id: str
    text: str
    shown: str


def create_key(connection: Connection, name: str, **fields: Any) -> NewKey:
    """Make a key; ``fields`` are columns of the table. Raises Taken, NotThere for its organization."""
    if connection.execute(select(keys.c.id).where(keys.c.name == name)).first() is not None:
        raise Taken(f"there is a key named {name!r} already")
    if fields.get("organization") is not None:
        _organization(connection, fields["organization"])
    text = KEY_PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    new = NewKey(str(uuid_utils.uuid7()), text, f"{KEY_PREFIX}…{text[-SHOWN:]}")
    digest = hashlib.sha256(text.encode()).digest()
    connection.execute(
        insert(keys).values(id=new.id, name=name, digest=digest, shown=new.shown, created_at=now(), **fields)
    )
    changed(connection)
    return new


def change_key(connection: Connection, name: str, changes: Mapping[str, Any]) -> None:
    """Change columns of a key. Raises NotThere."""
    found = connection.execute(select(keys.c.id).where(keys.c.name == name)).scalar()
    if found is None:
        raise NotThere(f"there is no key named {name!r}")
    connection.execute(update(keys).where(keys.c.id == found).values(**changes))
    reopen("key", found)(connection)
    changed(connection)


def create_organization(connection: Connection, name: str, **fields: Any) -> None:
    """Make an organization. Raises Taken."""
    if connection.execute(select(organizations.c.name).where(organizations.c.name == name)).first() is not None:
        raise Taken(f"there is an organization named {name!r} already")
    connection.execute(insert(organizations).values(name=name, suspended=False, created_at=now(), **fields))
    changed(connection)


def change_organization(connection: Connection, name: str, changes: Mapping[str, Any]) -> None:
    """Change columns of an organization. Raises NotThere."""
    _organization(connection, name)
    connection.execute(update(organizations).where(organizations.c.name == name).values(**changes))
    changed(connection)


def add_credit(connection: Connection, name: str, amount: int) -> int:
    """Add to what an organization has paid in; the new sum, in units. Raises NotThere, TooMuch."""
    _organization(connection, name)
    column = organizations.c.credit
    statement = update(organizations).where(organizations.c.name == name)
    connection.execute(statement.where(column.is_(None)).values(credit=0))
    room = MOST_UNITS - amount
    raised = statement.where(column <= room).values(credit=column + amount)
    total = connection.execute(raised.returning(column)).scalar()
    if total is None:
        raise TooMuch(f"more than {usd(MOST_UNITS):f} USD can't be counted")
    changed(connection)
    return int(total)


def _organization(connection: Connection, name: str) -> None:
    if connection.execute(select(organizations.c.name).where(organizations.c.name == name)).first() is None:
        raise NotThere(f"there is no organization named {name!r}")


def changed(connection: Connection) -> None:
    column = revisions.c.revision
    changed = connection.execute(update(revisions).where(revisions.c.name == DIRECTORY).values(revision=column + 1))
    if not changed.rowcount:
        connection.execute(insert(revisions).values(name=DIRECTORY, revision=1))

"""The token of the operator's listener. Only its digest is kept, so it is shown once, when it is made."""

from __future__ import annotations

import hashlib
import secrets

from sqlalchemy import Connection, delete, insert, select

from proxy.store.administration import SECRET_BYTES, changed
from proxy.store.directory import ADMIN, now
from proxy.store.schema import tokens

PREFIX = "ezat_admin_"


def first_admin_token(connection: Connection) -> str | None:
    """Make the token where there is none; its text, None where there is one."""
    if connection.execute(select(tokens.c.name).where(tokens.c.name == ADMIN)).first() is not None:
        return None
    return new_admin_token(connection)


def new_admin_token(connection: Connection) -> str:
    """Make a token in place of the one that there is, which ends with the gateways' next look; its text."""
    text = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    connection.execute(delete(tokens).where(tokens.c.name == ADMIN))
    connection.execute(insert(tokens).values(name=ADMIN, digest=digest_of(text), created_at=now()))
    changed(connection)
    return text


def digest_of(token: str) -> bytes:
    """What is kept of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()

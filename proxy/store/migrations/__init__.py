"""Bringing a database to the schema that this version needs, by Alembic; looked after at every start.

Alembic is read only where there is something to bring: it takes more memory than all that the store does later.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, column, select, table
from sqlalchemy.exc import SQLAlchemyError

from proxy.store.database import READ_ONLY

NEWEST = "0002"
"""The last of the versions in this folder."""
_VERSION: Any = select(column("version_num")).select_from(table("alembic_version"))


class StoreTooNew(Exception):
    """A later version of the gateway has brought the database to its own schema."""


def migrate(engine: Engine) -> None:
    """Apply what is missing, in one transaction; several gateways that start together take turns.

    Raises StoreTooNew, SQLAlchemyError.
    """
    if _is_new(engine):
        return
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(775533)")
        _upgrade(connection)


def _is_new(engine: Engine) -> bool:
    """Whether there is nothing to do."""
    try:
        with engine.connect().execution_options(**READ_ONLY) as connection:
            return connection.execute(_VERSION).scalars().all() == [NEWEST]
    except SQLAlchemyError:
        return False


def _upgrade(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise StoreTooNew("the store was brought to a later version; start that version of the gateway") from error

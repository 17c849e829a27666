"""Bringing a database to the schema that this version needs, by Alembic; done at every start."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, Engine


class StoreTooNew(Exception):
    """A later version of the gateway has brought the database to its own schema."""


def migrate(engine: Engine) -> None:
    """Apply what is missing, in one transaction; several gateways that start together take turns.

    Raises StoreTooNew, SQLAlchemyError.
    """
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(775533)")
        try:
            _upgrade(connection)
        except CommandError as error:
            raise StoreTooNew("the store was brought to a later version; start that version of the gateway") from error


def _upgrade(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")

"""Alembic runs this for each command; the connection is handed over by ``migrate``."""

from alembic import context

from proxy.store.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()

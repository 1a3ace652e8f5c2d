"""Alembic's entry point. The connection, with its transaction and lock, is handed in by `tmd.ledger.revisions`."""

from alembic import context

from tmd.ledger.schema import metadata

connection = context.config.attributes.get("connection")
if connection is None:
    raise SystemExit("run revisions with `tmctl ledger upgrade`, which knows the database and takes the lock")
# SQLite can roll back a schema change as well; Alembic only has to be told.
context.configure(connection=connection, target_metadata=metadata, transactional_ddl=True)
context.run_migrations()

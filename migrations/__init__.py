"""Alembic revisions of the ledger's schema; installed as `tmd_migrations`. Run by the daemon at its start."""

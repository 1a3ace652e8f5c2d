"""Every row has a checksum, so that bytes overwritten on the disk are noticed. NULL for rows that were written before."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TABLES = ("events", "jobs", "meta", "migrations", "nodes", "ranks", "releases", "store", "store_replies")


def upgrade() -> None:
    for table in TABLES:
        op.add_column(table, sa.Column("checksum", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    for table in TABLES:
        op.drop_column(table, "checksum")

"""Where a node of a job was taken from, if from a pool. Empty for nodes that were recorded before: there was no pool."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("origin", sa.Text(), nullable=False, server_default=""))
    op.execute("UPDATE nodes SET checksum = NULL")


def downgrade() -> None:
    op.drop_column("nodes", "origin")
    op.execute("UPDATE nodes SET checksum = NULL")

"""How the state came to each joiner of a migration. Nullable: not known for migrations of before."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("migrations", sa.Column("handoffs", sa.JSON(none_as_null=True), nullable=True))
    _forget_checksums()


def downgrade() -> None:
    op.drop_column("migrations", "handoffs")
    _forget_checksums()


def _forget_checksums() -> None:
    """They cover the columns of before."""
    op.execute("UPDATE migrations SET checksum = NULL")

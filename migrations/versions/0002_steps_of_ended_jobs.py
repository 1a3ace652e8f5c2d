"""How far a job came is known after the daemon's next start, too. Nullable: unknown for jobs that ended before."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("steps", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "steps")

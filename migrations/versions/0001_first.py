"""The first schema: records of the core, the append-only log, the rendezvous store, what has still to be given back."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "events",
        sa.Column("event_id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("cause", sa.BigInteger(), nullable=False),
        sa.Column("time_s", sa.Double(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
    )
    op.create_index("events_by_job_id", "events", ["job_id"])
    op.create_index("events_by_subject", "events", ["subject"])
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.Text(), primary_key=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("nnodes", sa.BigInteger(), nullable=False),
        sa.Column("nproc_per_node", sa.BigInteger(), nullable=False),
        sa.Column("world_size", sa.BigInteger(), nullable=False),
        sa.Column("owner_uid", sa.BigInteger(), nullable=False),
        sa.Column("job_key", sa.LargeBinary(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("epoch_limit", sa.BigInteger(), nullable=False),
        sa.Column("poison_epoch", sa.BigInteger(), nullable=False),
        sa.Column("table", sa.JSON(), nullable=True),
        sa.Column("resolution", sa.JSON(), nullable=True),
        sa.Column("plan", sa.JSON(), nullable=True),
        sa.Column("armed", sa.Boolean(), nullable=False),
        sa.Column("plan_counter", sa.BigInteger(), nullable=False),
        sa.Column("incarnation_counter", sa.BigInteger(), nullable=False),
        sa.Column("restarts", sa.BigInteger(), nullable=False),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.Column("script_digest", sa.Text(), nullable=False),
        sa.Column("command", sa.JSON(), nullable=False),
        sa.Column("approximations", sa.JSON(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("exit_code", sa.BigInteger(), nullable=True),
        sa.Column("created_s", sa.Double(), nullable=False),
        sa.Column("updated_s", sa.Double(), nullable=False),
    )
    op.create_index("jobs_by_state", "jobs", ["state"])
    op.create_table(
        "meta",
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("value", sa.Text(), nullable=False),
    )
    op.create_table(
        "migrations",
        sa.Column("migration_id", sa.Text(), primary_key=True),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("leavers", sa.JSON(), nullable=False),
        sa.Column("joiners", sa.JSON(), nullable=False),
        sa.Column("from_nodes", sa.JSON(), nullable=False),
        sa.Column("to_nodes", sa.JSON(), nullable=False),
        sa.Column("plan_id", sa.BigInteger(), nullable=False),
        sa.Column("trigger", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("phases_s", sa.JSON(), nullable=False),
        sa.Column("downtime_s", sa.Double(), nullable=True),
        sa.Column("downtime_steps", sa.Double(), nullable=True),
        sa.Column("lost_time_s", sa.Double(), nullable=True),
        sa.Column("normal_step_s", sa.Double(), nullable=True),
        sa.Column("steps_redone", sa.BigInteger(), nullable=False),
        sa.Column("stayer_links_reopened", sa.BigInteger(), nullable=False),
        sa.Column("bytes_moved", sa.BigInteger(), nullable=False),
        sa.Column("record_origin", sa.Text(), nullable=False),
        sa.Column("started_s", sa.Double(), nullable=False),
        sa.Column("ended_s", sa.Double(), nullable=True),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
    )
    op.create_index("migrations_by_job_id", "migrations", ["job_id"])
    op.create_table(
        "nodes",
        sa.Column("node", sa.Text(), primary_key=True),
        sa.Column("job_id", sa.Text(), primary_key=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("use", sa.Text(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("agent_id", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("updated_s", sa.Double(), nullable=False),
    )
    op.create_table(
        "ranks",
        sa.Column("job_id", sa.Text(), primary_key=True),
        sa.Column("incarnation", sa.Text(), primary_key=True),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("agent_id", sa.Text(), nullable=False),
        sa.Column("local_rank", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("updated_s", sa.Double(), nullable=False),
    )
    op.create_index("ranks_by_agent_id", "ranks", ["agent_id"])
    op.create_table(
        "releases",
        sa.Column("job_id", sa.Text(), primary_key=True),
        sa.Column("node", sa.Text(), primary_key=True),
        sa.Column("reason", sa.Text(), nullable=False),
    )
    op.create_table(
        "store",
        sa.Column("job_id", sa.Text(), primary_key=True),
        sa.Column("key", sa.Text(), primary_key=True),
        sa.Column("value", sa.LargeBinary(), nullable=False),
    )
    op.create_table(
        "store_replies",
        sa.Column("job_id", sa.Text(), primary_key=True),
        sa.Column("incarnation", sa.Text(), primary_key=True),
        sa.Column("request_id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("reply", sa.LargeBinary(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("store_replies")
    op.drop_table("store")
    op.drop_table("releases")
    op.drop_table("ranks")
    op.drop_table("nodes")
    op.drop_table("migrations")
    op.drop_table("meta")
    op.drop_table("jobs")
    op.drop_table("events")

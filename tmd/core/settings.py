"""The deadlines and switches of the core, all in seconds. The descriptions become etc/tmd.toml and the tables of
docs/operators.md."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class CoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[core]`: deadlines, in seconds, and how often what is tried."""

    heartbeat_s: Annotated[
        float, Meta(description="Agents and ranks report at least this often. Raise it if the daemon is busy with many nodes.")
    ] = 0.5
    heartbeat_timeout_s: Annotated[
        float,
        Meta(
            description="An agent that was silent this long, in a job that makes no progress, is lost with its ranks. "
            "More than twice heartbeat_s; raise it if machines stall for seconds."
        ),
    ] = 5.0
    agent_grace_s: Annotated[
        float,
        Meta(
            description="An agent whose connection closed has this long to come back before its ranks count as lost, if "
            "the job stands still. Raise it if the network drops connections."
        ),
    ] = 2.0
    report_timeout_s: Annotated[
        float,
        Meta(
            description="A rank that has left a broken step has this long to report before it counts as lost. Raise it if "
            "machines stall for seconds."
        ),
    ] = 10.0
    install_timeout_s: Annotated[
        float,
        Meta(
            description="Opening the links of a new membership and copying the state to a joiner may take this long, from "
            "when the last survivor came out of its step; then it is tried again. Raise it for large states: "
            "the copy must fit in it."
        ),
    ] = 30.0
    plan_timeout_s: Annotated[
        float,
        Meta(
            description="A planned migration that has not switched over after this long is aborted, and the job goes on "
            "as before; also how long a standby is waited for. Raise it if standbys warm up slowly, or a step "
            "takes minutes."
        ),
    ] = 120.0
    migration_attempts: Annotated[int, Meta(description="How often the migration of a drained node is tried.")] = 3
    hold_limit_s: Annotated[
        float,
        Meta(
            description="How long the ranks of a job that lost a member wait without a standby, or without this daemon, "
            "before they exit with 75, so that the resource manager can start the job again; also how long "
            "the others wait for a rank that does not come out of its step. Raise it if spare machines take "
            "longer to come."
        ),
    ] = 600.0
    build_timeout_s: Annotated[float, Meta(description="How long ranks may build before the first step.")] = 600.0
    order_timeout_s: Annotated[
        float,
        Meta(
            description="With Slurm: an agent that was told to start another one on a node of the job, or to give a node "
            "back, has this long until that is seen; then it is tried again. Raise it if container images are unpacked first."
        ),
    ] = 90.0
    maintenance_lead_s: Annotated[
        float,
        Meta(
            description="With Slurm: ranks leave a node this long before a maintenance reservation begins there (FLAGS=MAINT). "
            "Raise it if standbys are scarce, so that there is time to get some."
        ),
    ] = 900.0
    restart_limit: Annotated[
        int,
        Meta(description="How often a job may start again from nothing because a rank was lost before the first committed step."),
    ] = 3
    step_attempts: Annotated[
        int,
        Meta(
            description="A step that was broken off this often in a row ends the job: whatever breaks it (a crash on that "
            "batch, ranks that call different collectives) is not cured by other machines. Raise it if links fail for minutes."
        ),
    ] = 5
    observe_only: Annotated[bool, Meta(description="Only watch, and say in the log what would be done.")] = False

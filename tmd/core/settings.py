"""The deadlines and switches of the core, all in seconds."""

from __future__ import annotations

import msgspec


class CoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: Agents and ranks report at least this often.
    heartbeat_s: float = 0.5
    #: An agent that was silent this long, in a job that makes no progress, is lost with its ranks.
    heartbeat_timeout_s: float = 5.0
    #: An agent whose connection closed has this long to come back before its ranks count as lost (if the job stands still).
    agent_grace_s: float = 2.0
    #: A poisoned rank has this long to report before it counts as lost.
    report_timeout_s: float = 10.0
    #: Installing an epoch may take this long before it is tried again under the next epoch.
    install_timeout_s: float = 30.0
    #: A planned migration that has not flipped after this long is aborted.
    plan_timeout_s: float = 120.0
    #: A drained node's migration is tried this often.
    migration_attempts: int = 3
    #: How long survivors wait without a standby, or without a daemon, before they exit so that Slurm can requeue.
    hold_limit_s: float = 600.0
    #: How long ranks may build before the first step.
    build_timeout_s: float = 600.0
    #: How often a job may start again from nothing because a rank was lost before the first committed step.
    restart_limit: int = 3
    #: Only watch and say what would be done.
    observe_only: bool = False

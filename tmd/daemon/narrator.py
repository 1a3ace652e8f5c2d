"""Says in the log what the core has decided: one line per event of the append-only log, with the ids to follow it by."""

from __future__ import annotations

import logging

from tmd.core.instructions import Persist
from tmd.core.records import LedgerSnapshot
from tmd.ledger.reading import JOB_ENDED

log = logging.getLogger("tmd.job")


class Narrator:
    """Knows each live job's epoch, so that every line can carry it."""

    def __init__(self, snapshot: LedgerSnapshot) -> None:
        self._epochs = {job.job_id: job.epoch for job in snapshot.jobs}

    def tell(self, persist: Persist) -> None:
        """Call once it is durable."""
        self._epochs |= {job.job_id: job.epoch for job in persist.jobs}
        migrations = {migration.migration_id for migration in persist.migrations}
        for event in persist.events:
            fields = {
                "job": event.job_id,
                "migration": event.subject if event.subject in migrations else None,
                "epoch": self._epochs.get(event.job_id),
                "event": event.event_id,
                "cause": event.cause or None,
            }
            about = "" if event.subject in (event.job_id, fields["migration"]) else f"{event.subject}: "
            log.info("%s%s: %s", about, event.kind, event.text, extra=fields)
        for job in persist.jobs:
            if job.state in JOB_ENDED:
                self._epochs.pop(job.job_id, None)

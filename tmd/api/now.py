"""What is under way: one sentence for each live object, with the job that it belongs to. What has ended is left out."""

from __future__ import annotations

from typing import Literal

import msgspec

from tmd.api.context import Caller
from tmd.core.daemon import DaemonCore
from tmd.ledger.reading import JOB_ENDED

#: Uses of a node that are not over.
_HELD = ("training", "standby")


class Now(msgspec.Struct, frozen=True, kw_only=True):
    """A node that several jobs use has a sentence in each."""

    job: str
    kind: Literal["job", "migration", "node", "standby"]
    object: str
    sentence: str


def under_way(core: DaemonCore, caller: Caller) -> list[Now]:
    """Of the jobs that the caller may see; of jobs of another ledger only operators hear."""
    jobs = [view for view in core.jobs() if view.record.state not in JOB_ENDED and caller.may_see(view.record)]
    live = {view.record.job_id for view in jobs}
    told = [Now(job=view.record.job_id, kind="job", object=view.record.job_id, sentence=view.sentence) for view in jobs]
    told += [
        Now(job=view.record.job_id, kind="migration", object=view.record.migration_id, sentence=view.sentence)
        for view in core.migrations()
        if view.record.job_id in live and view.record.ended_s is None
    ]
    told += [
        Now(job=view.record.job_id, kind="node", object=view.record.node, sentence=view.sentence)
        for view in core.nodes()
        if view.record.job_id in live and view.record.use in _HELD
    ]
    told += [
        Now(job=view.record.job_id, kind="standby", object=view.record.incarnation, sentence=view.sentence)
        for view in core.standbys()
        if view.record.job_id in live
    ]
    if caller.operator:
        strangers = {job_id: sentence for job_id, sentence in core.sentences().items() if core.stranger(job_id) is not None}
        told += [Now(job=job_id, kind="job", object=job_id, sentence=sentence) for job_id, sentence in strangers.items()]
    return told

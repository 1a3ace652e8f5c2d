"""The daemon itself: its version, its mode, its ledger, and whether its jobs have standbys that could step in now."""

from __future__ import annotations

from collections.abc import Iterator

from tmd import __version__
from tmd.doctor.facts import DaemonFacts, Facts
from tmd.doctor.findings import Finding, fault, ok, skipped, warning
from tmd.ledger.reading import JOB_ENDED
from tmd.nodes.slurm.allocations import asked_for
from tmd.nodes.slurm.records import SlurmJob


def check_daemon(facts: Facts) -> Iterator[Finding]:
    """That it answers is known already."""
    daemon = facts.daemon
    if daemon is None:
        return
    status = daemon.status
    yield _version(status["tmd_version"])
    configured = facts.config.daemon.resource_manager
    if status["resource_manager"] != configured:
        yield fault(
            "daemon",
            f"the daemon runs with resource_manager = {status['resource_manager']}, the configuration says {configured}",
            "start it again with this configuration: systemctl restart tmd, or name its own one with --config",
        )
    ledger = status["ledger"]
    if not ledger["healthy"]:
        yield fault("ledger", f"{ledger['url']} cannot be written: {ledger['error']}", "repair it; what waits goes on by itself")
    if status["observe_only"]:
        yield warning("mode", "the daemon only watches", "take observe_only out of [core] and start it again")
    elif status["paused"]:
        yield warning("mode", "planned migrations are paused", "tmctl unpause")


def _version(running: str) -> Finding:
    if running != __version__:
        seen = f"the daemon is tmd {running}, what is installed here is {__version__}"
        return warning("version", seen, "start the daemon again: systemctl restart tmd; jobs do not notice")
    return ok("version", f"tmd {running}, the daemon too")


def check_standbys(facts: Facts) -> Iterator[Finding]:
    if facts.daemon is None:
        yield skipped("standbys", "the daemon does not answer")
        return
    live = [job for job in facts.daemon.jobs if job["record"]["state"] not in JOB_ENDED]
    pooled = {job.job_id for job in (facts.slurm.jobs if facts.slurm is not None else ()) if asked_for(job)[1]}
    bare = [
        job
        for job in live
        if not any(standby["phase"] == "ready" for standby in job["standbys"])
        if job["record"]["job_id"].partition(".")[0] not in pooled
    ]
    for job in bare:
        name = job["record"]["job_id"]
        seen = f"job {name} has no ready standby ({len(job['standbys'])} not ready): a lost rank would have to wait"
        yield warning("standbys", seen, f"tmctl job show {name}; a job needs sbatch --standby=N from its start")
    if not bare:
        yield ok("standbys", f"live jobs: {len(live)}{', each with a ready standby or the pool' if live else ''}")
    if facts.slurm is not None:
        yield from _asked_of_slurm(facts.slurm.jobs, facts.daemon)


def _asked_of_slurm(jobs: tuple[SlurmJob, ...], daemon: DaemonFacts) -> Iterator[Finding]:
    """Jobs that were submitted with --standby."""
    # By nodes, as the elements of a job array go by other names in tmd.
    live = [each for each in daemon.jobs if each["record"]["state"] not in JOB_ENDED]
    reached = {node["node"] for each in live for node in each["nodes"] if node["use"] in ("training", "standby")}
    for job in jobs:
        if job.state != "RUNNING" or not asked_for(job)[0]:
            continue
        if reached.isdisjoint(job.nodes):
            yield warning(
                "standbys",
                f"job {job.job_id} was submitted with --standby, and no agent of it has reached the daemon",
                "it has to be started by srun tmd-run …; its output says what its agents wait for",
            )

"""The process in which pyslurm runs: `python -m tmd.nodes.slurm.pyslurm_bridge`.

Contract: a line of JSON on standard input, [call, arguments…], is answered by one line: {"ok": value}, {"error": Slurm's words}
or {"bug": traceback}. The first line, before any question, is {"ok": [major, minor]} of Slurm's version, or {"error": why pyslurm
cannot be used}.

It is a process of its own because pyslurm holds Python's lock while it waits for slurmctld, for as long as Slurm's own timeouts
last: in the daemon that would stop everything else, and no deadline could end it.
"""

from __future__ import annotations

import enum
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from tmd.nodes.slurm.hostlist import compress, expand
from tmd.nodes.slurm.parsing import parse_state, parse_version
from tmd.nodes.slurm.records import SlurmJob, SlurmNode, SlurmReservation

#: What pyslurm calls otherwise than Slurm's own commands do.
_RESERVATION_FLAGS = {
    "MAINTENANCE": "MAINT",
    "IGNORE_RUNNING_JOBS": "IGNORE_JOBS",
    "SPECIFIC_NODES": "SPEC_NODES",
    "PARTITION_NODES_ONLY": "PART_NODES",
    "STATIC_NODES": "STATIC",
}
#: A flag that pyslurm has no name for (RESERVE_FLAG_TIME_FLOAT in slurm.h).
_TIME_FLOAT = 1 << 17
#: A job that has ended, as squeue leaves it out of its list.
_ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"}
)


def main() -> None:
    # What the library prints to standard output must not get among the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    encoder = msgspec.json.Encoder()
    calls, greeting = _open()
    answers.write(encoder.encode(greeting) + b"\n")
    answers.flush()
    for line in sys.stdin if calls else ():
        name, *arguments = json.loads(line)
        answers.write(encoder.encode(_answer(calls[name], arguments)) + b"\n")
        answers.flush()


def _open() -> tuple[dict[str, Callable[..., Any]], dict[str, Any]]:
    try:
        import pyslurm  # type: ignore[import-not-found]

        version = parse_version(pyslurm.__version__)
        bridge = Bridge(pyslurm)
    except Exception as error:
        return {}, {"error": f"pyslurm cannot be used: {type(error).__name__}: {error}"}
    names = ("nodes", "node", "jobs", "job", "comment", "reservations", "set_drain", "set_resume", "set_job_nodes")
    return {name: getattr(bridge, name) for name in names}, {"ok": version}


def _answer(call: Callable[..., Any], arguments: list[Any]) -> dict[str, Any]:
    try:
        return {"ok": call(*arguments)}
    except Exception as error:
        if type(error).__name__ == "RPCError":
            return {"error": str(error)}
        return {"bug": traceback.format_exc()}


class Bridge:
    """pyslurm's answers as tmd's records. Raises pyslurm.RPCError."""

    def __init__(self, pyslurm: Any) -> None:
        self._pyslurm = pyslurm

    def nodes(self) -> list[SlurmNode]:
        return [_node(node) for node in self._pyslurm.Nodes.load().values()]

    def node(self, name: str) -> SlurmNode:
        # Of all nodes, as scontrol does: asked for one, slurmctld does not count anew which CPUs are in use, and MIXED hangs on
        # those.
        node = self._pyslurm.Nodes.load().get(name)
        if node is None:
            raise self._pyslurm.RPCError(msg=f"Node {name} does not exist")
        return _node(node)

    def jobs(self) -> list[SlurmJob]:
        return [_job(job) for job in self._pyslurm.Jobs.load().values() if job.state not in _ENDED]

    def job(self, job_id: str) -> SlurmJob:
        return _job(self._pyslurm.Job.load(int(job_id)))

    def comment(self, job_id: str) -> str:
        return self._pyslurm.Job.load(int(job_id)).comment or ""

    def reservations(self) -> list[SlurmReservation]:
        # By itself pyslurm fails on a reservation with a flag that it has no name for.
        self._pyslurm.ReservationFlags._boundary_ = enum.KEEP
        return [_reservation(each) for each in self._pyslurm.Reservations.load().values()]

    def set_drain(self, node: str, reason: str) -> None:
        self._pyslurm.Node(node).modify(self._pyslurm.Node(state="DRAIN", reason=reason))

    def set_resume(self, node: str) -> None:
        self._pyslurm.Node(node).modify(self._pyslurm.Node(state="RESUME"))

    def set_job_nodes(self, job_id: str, nodes: list[str]) -> None:
        changes = self._pyslurm.JobSubmitDescription(required_nodes=[compress(nodes)])
        self._pyslurm.Job(int(job_id)).modify(changes)


def _node(node: Any) -> SlurmNode:
    base, flags = parse_state(node.state)
    return SlurmNode(
        name=node.name,
        base=base,
        flags=flags,
        address=node.address or "",
        features=_words(node.available_features),
        reason=node.reason or "",
        reason_user=(node.reason_user or "") if node.reason else "",
        reason_s=_time(node.reason_time),
        boot_s=_time(node.boot_time),
    )


def _job(job: Any) -> SlurmJob:
    return SlurmJob(
        job_id=str(job.id),
        state=job.state,
        uid=int(job.user_id),
        user=job.user_name or "",
        restart_count=int(job.requeue_count or 0),
        end_s=_end(job),
        # Without a script Slurm calls the job's first node so.
        batch_host=(job.batch_host or "") if job.is_batch_job else "",
        nodes=expand(job.allocated_nodes or ""),
        reason="" if job.state_reason in (None, "None") else job.state_reason,
        admin_comment=job.admin_comment or "",
        reservation=job.reservation or "",
        preempted_s=_time(job.preempt_time),
    )


def _end(job: Any) -> float | None:
    end_s = _time(job.end_time)
    # Without a limit slurmctld gives a day in some distant year, until the job has ended.
    unlimited = not job.time_limit and end_s is not None and end_s > time.time()
    return None if unlimited or job.state == "PENDING" else end_s


def _reservation(found: Any) -> SlurmReservation:
    start_s, end_s = _time(found.start_time), _time(found.end_time)
    begun = start_s is not None and end_s is not None and start_s <= time.time() < end_s
    flags = [_RESERVATION_FLAGS.get(flag.name, flag.name) for flag in found.flags]
    return SlurmReservation(
        name=found.name,
        start_s=start_s or 0.0,
        end_s=end_s or 0.0,
        nodes=expand(found.nodes or ""),
        flags=(*flags, *(("TIME_FLOAT",) if found.flags.value & _TIME_FLOAT else ())),
        users=_words(found.users),
        accounts=_words(found.accounts),
        state="ACTIVE" if begun else "INACTIVE",
    )


def _words(values: Iterable[str] | None) -> tuple[str, ...]:
    return tuple(values or ())


def _time(value: Any) -> float | None:
    return float(value) if value else None


if __name__ == "__main__":
    main()

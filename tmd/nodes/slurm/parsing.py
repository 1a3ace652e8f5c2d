"""What Slurm's commands print, as values. Pure, and of one mind with 22.05 and 25.11.

Contract: what cannot be understood raises ValueError, so that nobody takes it for good news. Texts that users can write (names
and comments of jobs) are never on a line from which anything else is read: a job named "x UserId=root(0)" must not become root's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from tmd.nodes.slurm.hostlist import expand
from tmd.nodes.slurm.records import SlurmJob, SlurmNode, SlurmReservation

#: Between the fields of squeue's lines: in no name, state or number.
FIELD_END = "\x1f"
#: What is asked of squeue, in this order. What an administrator has written comes last: it may hold anything.
JOB_FIELDS = (
    "JobID",
    "State",
    "UserID",
    "UserName",
    "RestartCnt",
    "EndTime",
    "BatchFlag",
    "BatchHost",
    "NodeList",
    "Reservation",
    "PreemptTime",
    "Reason",
    "admin_comment",
)

_BASES = frozenset({"UNKNOWN", "DOWN", "IDLE", "ALLOCATED", "ERROR", "MIXED", "FUTURE"})
#: One word for a base state with a flag, as sinfo says it.
_WORDS = {
    "ALLOC": ("ALLOCATED",),
    "MIX": ("MIXED",),
    "UNK": ("UNKNOWN",),
    "DRAINED": ("IDLE", "DRAIN"),
    "DRAINING": ("ALLOCATED", "DRAIN"),
    "FAIL": ("IDLE", "FAIL"),
    "FAILING": ("ALLOCATED", "FAIL"),
    "COMPLETING": ("IDLE", "COMPLETING"),
    "MAINT": ("IDLE", "MAINTENANCE"),
    "RESERVED": ("IDLE", "RESERVED"),
    "PLANNED": ("IDLE", "PLANNED"),
    "REBOOT": ("IDLE", "REBOOT_REQUESTED"),
    "INVAL": ("IDLE", "INVALID_REG"),
    "BLOCKED": ("IDLE", "BLOCKED"),
    "POWERED_DOWN": ("IDLE", "POWERED_DOWN"),
    "POWERING_UP": ("IDLE", "POWERING_UP"),
    "POWERING_DOWN": ("IDLE", "POWERING_DOWN"),
}
#: Flags that some versions abbreviate.
_ALIASES = {
    "MAINT": "MAINTENANCE",
    "NO_RESPOND": "NOT_RESPONDING",
    "NORESP": "NOT_RESPONDING",
    "COMP": "COMPLETING",
    "RESV": "RESERVED",
    "REBOOT": "REBOOT_REQUESTED",
    "INVAL": "INVALID_REG",
}
#: What a character after the state means (man sinfo, NODE STATE CODES).
_SUFFIXES = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}
#: A reason and who gave it when. Another key or the end follows, or it is a bracket within the reason.
_REASON = re.compile(r"(?P<text>.*?) \[(?P<user>[^\s\[\]@]*)@(?P<time>[^\s\[\]]*)\](?=$| [A-Z]\w*=)", re.DOTALL)
_NEXT_KEY = re.compile(r" (?:Comment|Extra)=")
#: A line that does not begin with a job's number goes on with an administrator's comment.
_NEXT_JOB = re.compile(rf"\n(?=\d+{FIELD_END})")
_VERSION = re.compile(r"\b(\d+)\.(\d+)\.\d+")


@functools.lru_cache(maxsize=1024)
def parse_state(text: str) -> tuple[str, tuple[str, ...]]:
    """ "MIXED+DRAIN" is ("MIXED", ("DRAIN",)); so are "down*" and "draining@" told apart. Raises ValueError."""
    flags: list[str] = []
    base = ""
    for word in text.upper().split("+"):
        bare = word.rstrip("".join(_SUFFIXES))
        marks = [_SUFFIXES[character] for character in word[len(bare) :]]
        if not base:
            base, *implied = (bare,) if bare in _BASES else _WORDS.get(bare, ("",))
            flags += implied
        elif bare:
            flags.append(_ALIASES.get(bare, bare))
        flags += marks
        if not base:
            raise ValueError(f"no state of a node that tmd knows: {text[:80]!r}")
    return base, tuple(dict.fromkeys(flags))


def parse_nodes(text: str) -> list[SlurmNode]:
    """What `scontrol --oneliner show nodes` prints. Raises ValueError."""
    return list(parse_changed_nodes(text, {}).values())


def parse_changed_nodes(text: str, known: Mapping[str, SlurmNode]) -> dict[str, SlurmNode]:
    """As `parse_nodes`, by line. What is `known` of the same line is taken from there: of thousands of nodes few change between
    two looks. Raises ValueError."""
    lines = (line for line in text.split("\n") if line.startswith("NodeName="))
    return {line: known.get(line) or _parse_node(line) for line in lines}


def _parse_node(line: str) -> SlurmNode:
    base, flags = parse_state(_value(line, "State"))
    reason, user, time_s = _reason(line)
    return SlurmNode(
        name=line[len("NodeName=") :].partition(" ")[0],
        base=base,
        flags=flags,
        address=_value(line, "NodeAddr", ""),
        features=_list(_value(line, "AvailableFeatures", "")),
        reason=reason,
        reason_user=user,
        reason_s=time_s,
        boot_s=_seconds(_value(line, "BootTime", "")),
    )


def _reason(line: str) -> tuple[str, str, float | None]:
    _, found, rest = line.partition(" Reason=")
    if not found:
        return "", "", None
    if match := _REASON.match(rest):
        return match["text"], match["user"], _seconds(match["time"])
    return _NEXT_KEY.split(rest)[0], "", None


def parse_jobs(text: str) -> list[SlurmJob]:
    """What `squeue --noheader` prints with `job_format()`. Raises ValueError."""
    return [_parse_job(job) for job in _NEXT_JOB.split(text.removesuffix("\n")) if job]


def job_format() -> str:
    return ",".join(f"{field}:{FIELD_END}" for field in JOB_FIELDS)


def _parse_job(line: str) -> SlurmJob:
    parts = line.split(FIELD_END, len(JOB_FIELDS) - 1)
    if len(parts) != len(JOB_FIELDS):
        raise ValueError(f"not a job, {len(parts)} fields instead of {len(JOB_FIELDS)}: {line[:200]!r}")
    job_id, state, uid, user, restarts, end, batch, batch_host, nodes, reservation, preempted, reason, admin_comment = parts
    return SlurmJob(
        job_id=job_id,
        state=state,
        uid=int(uid),
        user=user,
        restart_count=int(restarts),
        end_s=None if state == "PENDING" else _seconds(end),
        # Of a job without a script squeue names the host that it was asked for on.
        batch_host="" if batch == "0" or batch_host in ("n/a", "(null)") else batch_host,
        nodes=expand(nodes),
        reason="" if reason == "None" else reason,
        admin_comment=_optional(admin_comment.removesuffix(FIELD_END)),
        reservation=_optional(reservation),
        preempted_s=_seconds(preempted),
    )


def parse_comment(text: str) -> str:
    """What `squeue --noheader` prints for one job and its comment alone: all of it is the comment."""
    return _optional(text.removesuffix("\n").removesuffix(FIELD_END))


def parse_reservations(text: str) -> list[SlurmReservation]:
    """What `scontrol --oneliner show reservation` prints. Raises ValueError."""
    return [_parse_reservation(line) for line in text.split("\n") if line.startswith("ReservationName=")]


def _parse_reservation(line: str) -> SlurmReservation:
    start_s, end_s = _seconds(_value(line, "StartTime")), _seconds(_value(line, "EndTime"))
    if start_s is None or end_s is None:
        raise ValueError(f"a reservation without its times: {line[:200]!r}")
    return SlurmReservation(
        name=line[len("ReservationName=") :].partition(" ")[0],
        start_s=start_s,
        end_s=end_s,
        nodes=expand(_value(line, "Nodes", "")),
        flags=_list(_value(line, "Flags", "")),
        users=_list(_value(line, "Users", "")),
        accounts=_list(_value(line, "Accounts", "")),
        state=_value(line, "State", ""),
    )


def parse_version(text: str) -> tuple[int, int]:
    """ "slurm 22.05.8" is (22, 5). Raises ValueError."""
    found = _VERSION.search(text)
    if found is None:
        raise ValueError(f"not a version of Slurm: {text[:80]!r}")
    return int(found[1]), int(found[2])


def _value(line: str, key: str, default: str | None = None) -> str:
    """Of the first such key, which comes before everything that somebody may have written. Raises ValueError without default."""
    _, found, rest = line.partition(f" {key}=")
    if not found:
        if default is None:
            raise ValueError(f"no {key} in what Slurm says: {line[:200]!r}")
        return default
    return _optional(rest.partition(" ")[0])


def _optional(text: str) -> str:
    return "" if text in ("(null)", "none") else text


def _list(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _seconds(text: str) -> float | None:
    """Of a time as seconds since 1970, which is how Slurm is asked to show it; None for "Unknown", "N/A" and the like."""
    return float(text) if text.isdecimal() else None

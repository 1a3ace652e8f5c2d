"""What Slurm's commands print is understood as it is meant, or not at all. The samples are of 22.05.8 and 25.11.7."""

from __future__ import annotations

import pytest

from tmd.core.records import NodeState
from tmd.nodes.slurm.nodes import node_reason, node_view
from tmd.nodes.slurm.parsing import (
    FIELD_END,
    parse_changed_nodes,
    parse_comment,
    parse_jobs,
    parse_nodes,
    parse_reservations,
    parse_state,
    parse_version,
)
from tmd.nodes.slurm.records import SlurmJob, SlurmNode, SlurmReservation

NODE_22 = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=4  CPUAlloc=1 CPUEfctv=4 CPUTot=4 CPULoad=4.24 AvailableFeatures=gpu,rack12 "
    "ActiveFeatures=gpu,rack12 Gres=(null) NodeAddr=127.0.0.11 NodeHostName=head Port=41815 Version=22.05.8 OS=Linux 6.1.0 "
    "#1 SMP PREEMPT_DYNAMIC @0  RealMemory=4000 AllocMem=0 FreeMem=17092 Sockets=1 Boards=1 State=MIXED+DRAIN ThreadsPerCore=1 "
    "TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=debug,other  BootTime=1795979922 SlurmdStartTime=1796029424 "
    "LastBusyTime=1796029424 CfgTRES=cpu=4,mem=4000M,billing=4 AllocTRES=cpu=1 CapWatts=n/a CurrentWatts=0 AveWatts=0 "
    "ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s"
)
NODE_25 = (
    "NodeName=n4 Arch=x86_64 CoresPerSocket=2  CPUAlloc=0 CPUEfctv=2 CPUTot=2 CPULoad=0.35 AvailableFeatures=(null) "
    "ActiveFeatures=(null) Gres=(null) NodeAddr=127.0.0.1 NodeHostName=head Port=17114 Version=25.11.7 OS=Linux 6.1.0 #1 SMP "
    "PREEMPT_DYNAMIC @0  RealMemory=4000 AllocMem=0 FreeMem=19649 Sockets=1 Boards=1 State=IDLE+DRAIN ThreadsPerCore=1 TmpDisk=0 "
    "Weight=1 Owner=N/A MCS_label=N/A Partitions=debug  BootTime=1795970853 SlurmdStartTime=1795974069 LastBusyTime=1795974069 "
    "ResumeAfterTime=None CfgTRES=cpu=2,mem=4000M,billing=2 AllocTRES= CurrentWatts=0 AveWatts=0 "
    'Reason=has "quotes [root@1795974173]'
)
#: After a restart of slurmctld, before the node has said a word.
NODE_UNKNOWN = (
    "NodeName=n1 CoresPerSocket=4  CPUAlloc=0 CPUEfctv=4 CPUTot=4 CPULoad=N/A AvailableFeatures=(null) ActiveFeatures=(null) "
    "Gres=(null) NodeAddr=127.0.0.11 NodeHostName=head Port=35789  RealMemory=4000 AllocMem=0 FreeMem=N/A Sockets=1 Boards=1 "
    "State=UNKNOWN ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=debug  BootTime=None "
    "SlurmdStartTime=None LastBusyTime=1 CfgTRES=cpu=4,mem=4000M,billing=4 AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0"
)


def with_reason(tail: str) -> SlurmNode:
    (node,) = parse_nodes(f"{NODE_22} Reason={tail}\n")
    return node


def test_a_node_of_22_05() -> None:
    assert parse_nodes(f"{NODE_22} Reason=bad DIMM [root@1796029427]\n\n") == [
        SlurmNode(
            name="n1",
            base="MIXED",
            flags=("DRAIN",),
            address="127.0.0.11",
            features=("gpu", "rack12"),
            reason="bad DIMM",
            reason_user="root",
            reason_s=1796029427.0,
            boot_s=1795979922.0,
        )
    ]


def test_only_what_has_changed_is_read_anew() -> None:
    known = parse_changed_nodes(f"{NODE_22}\n{NODE_25}\n", {})
    again = parse_changed_nodes(f"{NODE_22}\n{NODE_25.replace('IDLE', 'MIXED')}\n", known)
    first, second = again.values()
    assert first is known[NODE_22]
    assert (second.name, second.state) == ("n4", "MIXED+DRAIN")
    assert len(again) == 2


def test_a_node_of_25_11() -> None:
    (node,) = parse_nodes(NODE_25)
    assert (node.name, node.state, node.address, node.features) == ("n4", "IDLE+DRAIN", "127.0.0.1", ())
    assert (node.reason, node.reason_user, node.reason_s) == ('has "quotes', "root", 1795974173.0)


def test_a_node_that_slurmctld_has_not_heard_of_yet() -> None:
    (node,) = parse_nodes(NODE_UNKNOWN)
    assert (node.state, node.boot_s, node.reason) == ("UNKNOWN", None, "")
    assert node_view(node).meaning == "unknown"


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        ("my \"quoted\" reason=x [a@b] 'z' [root@1796029427]", "my \"quoted\" reason=x [a@b] 'z'"),
        ("x State=IDLE NodeName=n2 [slurm@1796029427]", "x State=IDLE NodeName=n2"),
        ("Not responding [slurm@2026-11-30T09:03:47]", "Not responding"),
        ("r1 x [root@1796029427] Comment=c1 State=DOWN [a@1] Extra=e1 Reason=q", "r1 x"),
        ("nobody has signed this", "nobody has signed this"),
        ("nobody has signed this Comment=c1", "nobody has signed this"),
        (" [root@1796029427]", ""),
    ],
)
def test_a_reason_is_what_somebody_wrote_and_nothing_else(tail: str, reason: str) -> None:
    node = with_reason(tail)
    assert (node.reason, node.state) == (reason, "MIXED+DRAIN")


@pytest.mark.parametrize(
    ("text", "state", "meaning"),
    [
        ("IDLE", "IDLE", "up"),
        ("ALLOCATED", "ALLOCATED", "up"),
        ("MIXED+NOT_RESPONDING", "MIXED+NOT_RESPONDING", "up"),
        ("IDLE+RESERVED", "IDLE+RESERVED", "up"),
        ("IDLE+MAINTENANCE+RESERVED", "IDLE+MAINTENANCE+RESERVED", "up"),
        ("IDLE+PLANNED", "IDLE+PLANNED", "up"),
        ("IDLE+COMPLETING", "IDLE+COMPLETING", "up"),
        ("IDLE+DRAIN", "IDLE+DRAIN", "drained"),
        ("MIXED+DRAIN", "MIXED+DRAIN", "draining"),
        ("IDLE+COMPLETING+DRAIN", "IDLE+COMPLETING+DRAIN", "draining"),
        ("UNKNOWN+DRAIN", "UNKNOWN+DRAIN", "draining"),
        ("ALLOCATED+FAIL", "ALLOCATED+FAIL", "draining"),
        ("ALLOCATED+REBOOT_REQUESTED", "ALLOCATED+REBOOT_REQUESTED", "draining"),
        ("DOWN+REBOOT_ISSUED", "DOWN+REBOOT_ISSUED", "down"),
        ("DOWN+NOT_RESPONDING", "DOWN+NOT_RESPONDING", "down"),
        ("DOWN*+DRAIN", "DOWN+NOT_RESPONDING+DRAIN", "down"),
        ("FUTURE", "FUTURE", "unknown"),
        ("ERROR", "ERROR", "unknown"),
        ("idle*", "IDLE+NOT_RESPONDING", "up"),
        ("idle~", "IDLE+POWERED_DOWN", "up"),
        ("mixed#", "MIXED+POWERING_UP", "up"),
        ("allocated$", "ALLOCATED+MAINTENANCE", "up"),
        ("mixed@", "MIXED+REBOOT_REQUESTED", "draining"),
        ("idle^*", "IDLE+REBOOT_ISSUED+NOT_RESPONDING", "drained"),
        ("mixed-", "MIXED+PLANNED", "up"),
        ("drained", "IDLE+DRAIN", "drained"),
        ("draining@", "ALLOCATED+DRAIN+REBOOT_REQUESTED", "draining"),
        ("maint", "IDLE+MAINTENANCE", "up"),
        ("reserved", "IDLE+RESERVED", "up"),
        ("failing", "ALLOCATED+FAIL", "draining"),
        ("MIXED+A_FLAG_OF_TOMORROW", "MIXED+A_FLAG_OF_TOMORROW", "up"),
    ],
)
def test_a_state_is_a_base_and_flags(text: str, state: str, meaning: NodeState) -> None:
    base, flags = parse_state(text)
    node = SlurmNode(name="n1", base=base, flags=flags)
    assert (node.state, node_view(node).meaning) == (state, meaning)


@pytest.mark.parametrize("text", ["", "*", "SPLENDID", "+DRAIN", "SPLENDID+DRAIN"])
def test_a_state_that_nobody_knows_is_no_state(text: str) -> None:
    with pytest.raises(ValueError, match="no state of a node"):
        parse_state(text)


def test_a_node_without_a_state_is_no_node() -> None:
    with pytest.raises(ValueError, match="no State"):
        parse_nodes("NodeName=n1 Arch=x86_64")


def test_a_reboot_without_a_reason_is_said_in_slurm_s_word() -> None:
    node = SlurmNode(name="n1", base="MIXED", flags=("REBOOT_REQUESTED",))
    assert node_reason(node) == "Slurm calls it MIXED+REBOOT_REQUESTED"
    assert node_reason(SlurmNode(name="n1", base="MIXED", flags=("PLANNED",))) == ""


def job_line(*fields: str) -> str:
    return FIELD_END.join(fields) + FIELD_END + "\n"


RUNNING = job_line(
    "1", "RUNNING", "999", "alice", "2", "1796030027", "1", "n1", "n[1-2]", "fans", "1796029900", "None", "tmd:standby=1 x=y"
)
PENDING = job_line(
    "2",
    "PENDING",
    "995",
    "bob",
    "0",
    "N/A",
    "1",
    "n/a",
    "",
    "(null)",
    "N/A",
    "ReqNodeNotAvail, UnavailableNodes:n[2-3]",
    "(null)",
)


def test_jobs() -> None:
    assert parse_jobs(RUNNING + PENDING) == [
        SlurmJob(
            job_id="1",
            state="RUNNING",
            uid=999,
            user="alice",
            restart_count=2,
            end_s=1796030027.0,
            batch_host="n1",
            nodes=("n1", "n2"),
            reason="",
            admin_comment="tmd:standby=1 x=y",
            reservation="fans",
            preempted_s=1796029900.0,
        ),
        SlurmJob(
            job_id="2",
            state="PENDING",
            uid=995,
            user="bob",
            restart_count=0,
            end_s=None,
            batch_host="",
            nodes=(),
            reason="ReqNodeNotAvail, UnavailableNodes:n[2-3]",
            admin_comment="",
        ),
    ]
    assert parse_jobs("") == []


def test_a_comment_may_hold_anything() -> None:
    text = f"two\nlines, one of them\n7 RUNNING, and a {FIELD_END}field"
    first = RUNNING.replace("tmd:standby=1 x=y", text)
    assert [job.admin_comment for job in parse_jobs(first + PENDING)] == [text, ""]
    assert parse_comment(f"{text}{FIELD_END}\n") == text
    assert parse_comment(f"(null){FIELD_END}\n") == ""


@pytest.mark.parametrize("state", ["PENDING", "COMPLETED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"])
def test_a_job_that_does_not_run_holds_no_node(state: str) -> None:
    (job,) = parse_jobs(RUNNING.replace("RUNNING", state))
    assert (job.nodes, job.held_nodes) == (("n1", "n2"), ())


@pytest.mark.parametrize("line", ["slurm_load_jobs error: something", RUNNING.replace("999", "alice"), "1 RUNNING"])
def test_what_is_no_job_is_not_taken_for_one(line: str) -> None:
    with pytest.raises(ValueError):
        parse_jobs(line)


def test_reservations() -> None:
    text = (
        "ReservationName=tmd StartTime=1796036368 EndTime=1796039968 Duration=01:00:00 Nodes=n[3-4] NodeCnt=2 CoreCnt=8 "
        "Features=(null) PartitionName=(null) Flags=MAINT,IGNORE_JOBS,SPEC_NODES TRES=cpu=8 Users=root,alice Groups=(null) "
        "Accounts=(null) Licenses=(null) State=INACTIVE BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)\n"
    )
    assert parse_reservations(text) == [
        SlurmReservation(
            name="tmd",
            start_s=1796036368.0,
            end_s=1796039968.0,
            nodes=("n3", "n4"),
            flags=("MAINT", "IGNORE_JOBS", "SPEC_NODES"),
            users=("root", "alice"),
            state="INACTIVE",
        )
    ]
    assert parse_reservations("No reservations in the system\n") == []


def test_versions() -> None:
    assert parse_version("slurm-wlm 22.05.8\n") == (22, 5)
    assert parse_version("slurm 25.11.7") == (25, 11)
    with pytest.raises(ValueError, match="not a version"):
        parse_version("scontrol: not found")

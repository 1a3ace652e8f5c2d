"""Node events out of slurmctld: what is told, and that nothing which befalls the receiver or slurmctld ends it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import SLURMCTLD, SlurmCluster
from tests.slurm.plugins import EVENT_DEADLINE_S, Events, wait_for_looks
from tmd.nodes.slurm.hints import HintSocket

#: From the order to drain to the datagram.
EVENT_LATENCY_MS = 200


@pytest.fixture
def events(standby_cluster: SlurmCluster, events_path: Path) -> Iterator[Events]:
    """Somebody listens, and the watcher knows all nodes: before its first look it can tell of no change."""
    listener = Events(events_path)
    try:
        wait_for_looks(standby_cluster)
        listener.waiting()  # what the clean-up before the test did
        yield listener
    finally:
        listener.close()


def drain(cluster: SlurmCluster, node: str, reason: str = "fan") -> None:
    cluster.run("scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}")


def resume(cluster: SlurmCluster, node: str) -> None:
    cluster.run("scontrol", "update", f"nodename={node}", "state=resume")


def test_a_drain_arrives_within_a_moment(
    standby_cluster: SlurmCluster, events: Events, record_property: pytest.RecordProperty
) -> None:
    """The best of five is held against what is promised: a busy machine makes any one of them late. The events carry the time at
    which they were noticed."""
    latencies_ms = []
    for number in range(5):
        asked = time.time()
        drain(standby_cluster, "n2", f"attempt {number}")
        event = events.wait(node="n2", flags=["DRAIN"])
        latencies_ms.append((time.time() - asked) * 1000)
        assert (event["event"], event["state"], event["reason"]) == ("node", "IDLE", f"attempt {number}")
        assert asked - 1 < event["time"] < time.time() + 1
        resume(standby_cluster, "n2")
        events.wait(node="n2", flags=[])
    assert min(latencies_ms) < EVENT_LATENCY_MS, f"drain to event, the command included: {latencies_ms} ms"
    record_property("drain_to_event_ms", [round(each, 1) for each in latencies_ms])


def test_a_change_is_looked_at_at_once_however_long_the_interval_is(
    standby_cluster: SlurmCluster, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A minute here: the event comes because slurmctld lets its plugins see that it has changed something."""
    with monkeypatch.context() as patch:
        patch.setenv("TMD_EVENTS_INTERVAL_MS", "60000")
        standby_cluster.restart(SLURMCTLD, signal.SIGKILL)
    events.wait(event="resync")
    drain(standby_cluster, "n2", "at once")
    events.wait(node="n2", reason="at once")
    standby_cluster.restart(SLURMCTLD, signal.SIGKILL)


def test_reasons_arrive_whatever_they_hold(standby_cluster: SlurmCluster, events: Events) -> None:
    for reason in ('fan "2" \\ slow', "Lüfter zu langsam ☃", "tab\there", "x" * 400):
        drain(standby_cluster, "n1", reason)
        assert events.wait(node="n1", flags=["DRAIN"])["reason"] == reason
        resume(standby_cluster, "n1")
        events.wait(node="n1", flags=[])
    drain(standby_cluster, "n1", "y" * 900)
    cut = events.wait(node="n1", flags=["DRAIN"])["reason"]
    assert set(cut) == {"y"}
    assert 400 < len(cut) < 900


def test_what_happens_to_a_node_of_a_job_is_told_until_it_is_given_back(standby_cluster: SlurmCluster, events: Events) -> None:
    job = standby_cluster.sbatch("sleep 1000", "-N1", "-w", "n3", "--exclusive")
    standby_cluster.wait_state("n3", "ALLOCATED")
    drain(standby_cluster, "n3")
    assert events.wait(node="n3", flags=["DRAIN"])["state"] == "ALLOCATED"
    standby_cluster.run("scancel", job)
    assert events.wait(node="n3", state="IDLE", flags=["DRAIN"])["reason"] == "fan"


def test_down_fail_and_maintenance_are_told(standby_cluster: SlurmCluster, events: Events) -> None:
    standby_cluster.run("scontrol", "update", "nodename=n4", "state=down", "reason=gone")
    assert events.wait(node="n4", state="DOWN")["reason"] == "gone"
    resume(standby_cluster, "n4")
    events.wait(node="n4", state="IDLE", flags=[])
    standby_cluster.run("scontrol", "update", "nodename=n4", "state=fail", "reason=ECC")
    assert "FAIL" in events.wait(node="n4", reason="ECC")["flags"]
    resume(standby_cluster, "n4")
    events.wait(node="n4", flags=[])
    standby_cluster.run(
        "scontrol",
        "create",
        "reservation=fans",
        "starttime=now",
        "duration=10",
        "nodes=n4",
        "users=root",
        "flags=maint,ignore_jobs",
    )
    events.wait(node="n4", flags=["MAINTENANCE"])
    standby_cluster.run("scontrol", "delete", "reservation=fans")
    events.wait(node="n4", flags=[])


def test_slurmctld_does_not_mind_that_nobody_listens(standby_cluster: SlurmCluster, events_path: Path) -> None:
    """What was missed is made up for by one event once somebody does."""
    assert not events_path.exists()
    for node in ("n1", "n2"):
        drain(standby_cluster, node)
        standby_cluster.wait_state(node, "IDLE+DRAIN")
    wait_for_looks(standby_cluster)
    listener = Events(events_path)
    try:
        listener.wait(event="resync")
        resume(standby_cluster, "n1")
        listener.wait(node="n1", flags=[])
    finally:
        listener.close()


def test_a_receiver_that_hangs_holds_nobody_up(standby_cluster: SlurmCluster, events: Events) -> None:
    """Its socket fills, slurmctld goes on; afterwards it is told how much it has missed."""
    # The kernel's limit of datagrams that wait in a socket.
    limit = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())
    rounds = limit // 4 + 2
    sent = 4 * rounds
    for number in range(rounds):
        standby_cluster.run("scontrol", "update", "nodename=n[1-4]", "state=drain", f"reason={number}", timeout_s=5)
        standby_cluster.wait_for(lambda n=number: _reasons(standby_cluster) == {str(n)}, "the reason to be there")
        wait_for_looks(standby_cluster)
    held = [event for event in events.waiting() if event["event"] == "node"]
    assert len(held) < sent
    resync = events.wait(event="resync")
    assert 0 < resync["lost"] <= sent
    resume(standby_cluster, "n2")
    events.wait(node="n2", flags=[])


def _reasons(cluster: SlurmCluster) -> set[str]:
    text = cluster.run("sinfo", "-h", "-N", "-o", "%E").stdout
    return set(text.split())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_restarted_slurmctld_says_so_and_goes_on(standby_cluster: SlurmCluster, events: Events, number: signal.Signals) -> None:
    standby_cluster.restart(SLURMCTLD, number)
    events.wait(event="resync", lost=0)
    # A reason of its own: one that is killed may have forgotten the last seconds, and begin with an older drain.
    drain(standby_cluster, "n2", f"after {number.name}")
    assert events.wait(node="n2", reason=f"after {number.name}")["flags"] == ["DRAIN"]


def test_reconfiguring_interrupts_nothing(standby_cluster: SlurmCluster, events: Events) -> None:
    for number in range(5):
        standby_cluster.reconfigure(standby_cluster.options.slurm_conf)
        drain(standby_cluster, "n2", f"after {number}")
        events.wait(node="n2", reason=f"after {number}")


def test_the_plugin_is_let_go_and_taken_up_again_while_slurmctld_runs(standby_cluster: SlurmCluster, events: Events) -> None:
    """`fini` cannot wait for the thread: slurmctld holds its locks, without which the thread gets no answer."""
    for number in range(3):
        standby_cluster.reconfigure(f"{standby_cluster.options.slurm_conf}\nJobSubmitPlugins=lua")
        drain(standby_cluster, "n1", f"unseen {number}")
        standby_cluster.reconfigure(standby_cluster.options.slurm_conf.replace("\nJobSubmitPlugins=lua", ""))
        events.wait(event="resync", lost=0)
        # On 25.11 this is a new slurmctld, which resumes no node before that has answered.
        standby_cluster.wait_state("n1", "IDLE+DRAIN")
        resume(standby_cluster, "n1")
        events.wait(node="n1", flags=[])


async def test_the_daemon_is_woken(standby_cluster: SlurmCluster, events_path: Path) -> None:
    woken = asyncio.Event()
    socket = HintSocket(events_path, woken.set)
    socket.open()
    try:
        await asyncio.to_thread(drain, standby_cluster, "n2")
        await asyncio.wait_for(woken.wait(), EVENT_DEADLINE_S)
    finally:
        socket.close()

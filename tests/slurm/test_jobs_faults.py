"""What is not there for a while (slurmctld, slurmdbd, tmd), and how jobs end: nothing is lost, nothing is left."""

from __future__ import annotations

import os
import signal
import time
from datetime import datetime

from tests.e2e.cluster import WORLD_SIZE, assert_unharmed, until
from tests.slurm.cluster import SLURMCTLD, SLURMDBD
from tests.slurm.plugins import fields
from tests.slurm.report import Report
from tests.slurm.stack import IDLE_PACE_MS, SlurmJob, SlurmStack, stopped

#: tmd takes a move for one of 10 s.
SOONER_THAN_A_MOVE_S = 8
#: heartbeat_timeout_s is 5.
LONGER_THAN_PATIENCE_S = 8.0
#: A job that outlives what slurmctld takes to write its state down, and to start again.
SLOW_PACE_MS = 300


def test_slurmctld_restarts_in_the_middle_of_a_move(stack: SlurmStack, reference: SlurmJob, report: Report) -> None:
    """1. a node is drained; 2. before the flip slurmctld is killed; 3. ranks move all the same; 4. slurmctld is back and gets the
    node."""
    job = stack.started(standby=1)
    job.set_pace(SLOW_PACE_MS)
    _, node = job.rank_off_the_batch_host()
    standby = job.wait_ready(1)[0]["pid"]
    with stopped(standby):
        job.drain(node)
        until(lambda: job.migrations(), f"a move off {node} begins")
        stack.slurm.save(job.id)
        stack.slurm.stop_part(SLURMCTLD, signal.SIGKILL)
    record = job.wait_move(node)
    job.wait_progress()
    stack.slurm.start_part(SLURMCTLD)
    job.wait_given_back(node)
    stack.slurm.wait_state(node, "IDLE+DRAIN")
    job.finish()
    assert_unharmed(job, reference)
    report.add("slurmctld restarted in the middle of a move", [record])


def test_a_move_without_slurmdbd(stack: SlurmStack, reference: SlurmJob, report: Report) -> None:
    job = stack.started(standby=1)
    _, node = job.rank_off_the_batch_host()
    stack.slurm.stop_part(SLURMDBD, signal.SIGKILL)
    job.drain(node)
    record = job.wait_move(node)
    job.wait_given_back(node)
    stack.slurm.start_part(SLURMDBD)
    job.finish()
    assert_unharmed(job, reference)
    report.add("slurmdbd down", [record])


def test_tmd_is_killed_in_the_middle_of_a_move(stack: SlurmStack, reference: SlurmJob, report: Report) -> None:
    job = stack.started(standby=1)
    _, node = job.rank_off_the_batch_host()
    standby = job.wait_ready(1)[0]["pid"]
    with stopped(standby):
        job.drain(node)
        until(lambda: job.migrations(), f"a move off {node} begins")
        stack.stack.kill()
    job.wait_written(5)
    stack.stack.start()
    moves = until(lambda: job.moves_off(node), f"{node} is emptied")
    job.wait_given_back(node)
    stack.slurm.wait_state(node, "IDLE+DRAIN")
    job.finish()
    assert_unharmed(job, reference)
    report.add("tmd killed -9 in the middle of a move", moves)  # what it cost nobody has measured


def test_tmd_is_killed_between_the_move_and_the_release(stack: SlurmStack, reference: SlurmJob) -> None:
    """The node is given back by whoever comes next."""
    job = stack.started(standby=1)
    _, node = job.rank_off_the_batch_host()
    job.drain(node)
    until(lambda: job.moves_off(node), f"{node} is emptied", every_s=0.005)
    stack.stack.kill()
    assert node in job.allocation(), "the release has still to be ordered"
    stack.stack.start()
    job.wait_given_back(node)
    job.finish()
    assert_unharmed(job, reference)


def test_a_killed_agent_is_started_again_as_a_standby(stack: SlurmStack, reference: SlurmJob) -> None:
    """Its node is sound, so the job has a standby again."""
    job = stack.started(standby=1)
    rank, node = job.rank_off_the_batch_host()
    os.kill(job.agent_pid(node), signal.SIGKILL)  # the kernel takes its rank along
    until(lambda: job.moves_off(node), f"rank {rank} is replaced: {job.view()['sentence']}")
    until(lambda: any(each["record"]["node"] == node for each in job.wait_ready(1)), f"{node} stands by", every_s=0.1)
    job.finish()
    assert_unharmed(job, reference, lines_lost={rank: 1})


def test_scancel_leaves_nothing(stack: SlurmStack, report: Report) -> None:
    job = stack.started(standby=1)
    stack.slurm.run("scancel", job.id)
    until(lambda: job.record()["state"] == "failed", "tmd knows that the job has ended")
    assert "its allocation has ended" in job.record()["reason"]
    job.wait_gone()
    until(lambda: set(stack.slurm.states().values()) == {"IDLE"}, "every node is free")
    assert not [node for node in job.view()["nodes"] if node["use"] in ("training", "standby")]
    report.add("scancel", [], bit_identical=None)


def test_the_time_limit_is_told_of_stops_moves_and_leaves_nothing(stack: SlurmStack, report: Report) -> None:
    """
    1. The job may take 15 minutes: its story says when it ends.
    2. Its time is cut to what it has had and less than 75 s more. Just before that is over a node is drained: nobody moves any
       more, and the operator sees why.
    3. Slurm ends it.
    """
    submitted_s = time.time()
    job = stack.started(standby=1, options=("--time=15",))
    job.set_pace(1000)
    until(lambda: any(each.startswith("the job's time ends in ") for each in notices(job)), "people are told of the end")
    minutes = int(time.time() - submitted_s + 15) // 60 + 1
    stack.slurm.run("scontrol", "update", f"jobid={job.id}", f"timelimit={minutes}")
    ends_s = datetime.fromisoformat(fields(stack.slurm, job.id)["EndTime"]).timestamp()
    until(lambda: time.time() > ends_s - SOONER_THAN_A_MOVE_S, f"the job's last {SOONER_THAN_A_MOVE_S} s have begun", every_s=0.1)
    _, node = job.rank_off_the_batch_host()
    job.drain(node)
    until(lambda: "the job's time ends in" in job.node_sentence(node), f"{node} is too late: {job.node_sentence(node)}")
    until(lambda: job.record()["state"] == "failed", "tmd knows that the job has ended")
    assert job.migrations() == []
    job.wait_gone()
    until(lambda: set(stack.slurm.states().values()) == {"IDLE", "IDLE+DRAIN"}, "every node is free")
    report.add("time limit", [], bit_identical=None)


def notices(job: SlurmJob) -> list[str]:
    return [event["text"] for event in job.story(job.id) if event["kind"] == "notice"]


def test_a_suspended_job_goes_on_as_if_nothing_had_been(stack: SlurmStack, reference: SlurmJob, report: Report) -> None:
    job = stack.started(standby=1)
    before = job.pids()
    stack.slurm.run("scontrol", "suspend", job.id)
    until(lambda: job.view()["sentence"].startswith("suspended"), "tmd knows that the job is suspended")
    since_s = time.monotonic()
    until(lambda: time.monotonic() - since_s > LONGER_THAN_PATIENCE_S, "an agent that is silent so long is lost otherwise")
    stack.slurm.run("scontrol", "resume", job.id)
    job.wait_progress()
    assert job.pids() == before
    assert job.migrations() == []
    job.finish()
    assert_unharmed(job, reference)
    report.add("suspend and resume", [])


def test_a_requeued_job_starts_a_new_life(stack: SlurmStack, report: Report) -> None:
    job = stack.started(standby=1, options=("--requeue",))
    job.set_pace(IDLE_PACE_MS)
    first = job.id
    stack.slurm.run("scontrol", "requeue", first)
    until(lambda: job.record()["state"] == "failed", "the first life is over")
    job.id = f"{first}.1"

    def lives() -> bool:
        # Slurm lets a requeued job wait for two minutes.
        stack.slurm.run("scontrol", "update", f"jobid={first}", "starttime=now", check=False)
        return stack.stack.job(job.id) is not None

    until(lives, "the second life is there", every_s=1.0)
    job.wait_ready(1)
    assert len(job.view()["ranks"]) == WORLD_SIZE
    job.set_pace(0)
    job.wait_state("done")
    job.wait_gone()
    report.add("requeue", [], bit_identical=None)

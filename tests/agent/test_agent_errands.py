"""Orders that fail, hang or are called off: the agent goes on and says why. Shell scripts stand in for Slurm's commands here,
since real ones do not fail on demand; tests/slurm runs those."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec

from tests.agent.agent_rig import JOB, RANK_PROGRAM, Agent, Rig, StandInDaemon, until
from tmd.protocol.agent import AgentDirective, JobOver, NodeOrder, OrderStatus

LAUNCH = NodeOrder(order_id="o1", kind="launch", nodes=("n5",))
RELEASE = NodeOrder(order_id="o2", kind="release", nodes=("n2",))


async def in_slurm(rig: Rig, daemon: StandInDaemon, **commands: str) -> Agent:
    """An agent of job 7 of a Slurm that has these commands: name -> script."""
    folder = rig.folder / "bin"
    folder.mkdir()
    for name, script in {"srun": "exit 1", "scontrol": "exit 1", "squeue": "exit 1", **commands}.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    place = {"SLURM_JOB_ID": "7", "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    shape = ("--nnodes", "1", "--daemon", daemon.address, "--job-id", JOB, "--node", "n1")
    agent = await rig.run(*shape, str(RANK_PROGRAM), environment=place)
    assert (await daemon.connected()).launches
    return agent


async def direct(daemon: StandInDaemon, *orders: NodeOrder, withdrawn: tuple[str, ...] = (), over: JobOver | None = None) -> None:
    daemon.sequence += 1
    directive = AgentDirective(generation=daemon.generation, sequence=daemon.sequence, orders=orders, job_over=over)
    await daemon.send(msgspec.structs.replace(directive, withdrawn=withdrawn))


async def became(daemon: StandInDaemon, order: NodeOrder, *states: str) -> OrderStatus:
    def look() -> OrderStatus | None:
        known = {status.order_id: status for status in (daemon.statuses[-1].orders if daemon.statuses else ())}
        status = known.get(order.order_id)
        return status if status is not None and status.state in states else None

    return await until(f"order {order.order_id} is {' or '.join(states)}", look)


async def test_an_agent_outside_slurm_says_that_it_can_start_nobody(rig: Rig, daemon: StandInDaemon) -> None:
    await rig.directed(daemon)
    assert not (await daemon.connected()).launches
    await direct(daemon, LAUNCH)
    assert "not to be had here" in (await became(daemon, LAUNCH, "failed")).reason


async def test_srun_s_own_words_are_the_reason(rig: Rig, daemon: StandInDaemon) -> None:
    script = "echo 'a rank says this' >&2; echo 'srun: error: Unable to create step' >&2; exit 1"
    agent = await in_slurm(rig, daemon, srun=script)
    await direct(daemon, LAUNCH)
    assert (await became(daemon, LAUNCH, "failed")).reason == "srun: error: Unable to create step"
    await until("what it printed is passed on", lambda: "a rank says this" in agent.err)


async def test_an_order_is_carried_out_once(rig: Rig, daemon: StandInDaemon) -> None:
    count = "echo once >> count; exit 1"
    await in_slurm(rig, daemon, srun=count)
    for _ in range(3):
        await direct(daemon, LAUNCH)
    await became(daemon, LAUNCH, "failed")
    await direct(daemon, LAUNCH)
    await direct(daemon, LAUNCH, RELEASE)
    await became(daemon, RELEASE, "failed")
    assert (rig.folder / "count").read_text().split() == ["once"]


async def test_a_withdrawn_launch_is_ended(rig: Rig, daemon: StandInDaemon) -> None:
    agent = await in_slurm(rig, daemon, srun="exec sleep 1000")
    await direct(daemon, LAUNCH)
    await became(daemon, LAUNCH, "running")
    await until("srun runs", lambda: any("sleep" in _command(pid) for pid in agent.session()))
    await direct(daemon, withdrawn=("o1",))
    await became(daemon, LAUNCH, "failed")


async def test_an_agent_whose_node_is_given_back_leaves_what_it_has_started(rig: Rig, daemon: StandInDaemon) -> None:
    """srun's watchman, which would end the step, is killed before srun."""
    script = "sleep 1000 & echo $! > watchman; echo $$ > srun; wait; sleep 1000"
    agent = await in_slurm(rig, daemon, srun=script)
    await direct(daemon, LAUNCH)
    await until("srun runs", lambda: (rig.folder / "srun").exists() and (rig.folder / "srun").read_text().strip())
    await direct(daemon)
    watchman = int((rig.folder / "watchman").read_text())
    await until("the watchman is gone", lambda: _ended(watchman))
    await direct(daemon, over=JobOver(exit_code=0, reason="node n1 is given back", node_only=True))
    async with asyncio.timeout(30):
        assert await agent.process.wait() == 0


async def test_a_node_leaves_the_job_and_the_others_stay(rig: Rig, daemon: StandInDaemon) -> None:
    scontrol = (
        'if [ "$1" = show ]; then printf "n1\\nn2\\nn3\\n"; else echo "$@" > asked; pwd >> asked; cp asked $TMD_TEST_FOLDER; fi'
    )
    await in_slurm(rig, daemon, squeue="echo '7|n[1-3]|n1'", scontrol=scontrol)
    await direct(daemon, RELEASE)
    await became(daemon, RELEASE, "done")
    asked, folder = (rig.folder / "asked").read_text().splitlines()
    assert asked == "update jobid=7 NodeList=n1,n3"
    assert folder != str(rig.folder), "scontrol leaves scripts where it runs"


async def test_a_node_that_has_left_already_is_none_to_give_back(rig: Rig, daemon: StandInDaemon) -> None:
    await in_slurm(rig, daemon, squeue="echo '7|n[1,3]|n1'", scontrol='[ "$1" = show ] && printf "n1\\nn3\\n"')
    await direct(daemon, RELEASE)
    await became(daemon, RELEASE, "done")


async def test_the_batch_host_is_not_even_tried(rig: Rig, daemon: StandInDaemon) -> None:
    await in_slurm(rig, daemon, squeue="echo '7|n[1-3]|n2'", scontrol='[ "$1" = show ] && printf "n1\\nn2\\nn3\\n"')
    await direct(daemon, RELEASE)
    assert "batch host" in (await became(daemon, RELEASE, "failed")).reason


async def test_slurm_s_refusal_is_the_reason(rig: Rig, daemon: StandInDaemon) -> None:
    scontrol = (
        'if [ "$1" = show ]; then printf "n1\\nn2\\n"; else echo "slurm_update error: Job is being resized" >&2; exit 1; fi'
    )
    await in_slurm(rig, daemon, squeue="echo '7|n[1-2]|n1'", scontrol=scontrol)
    await direct(daemon, RELEASE)
    assert (await became(daemon, RELEASE, "failed")).reason == "slurm_update error: Job is being resized"


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _ended(pid: int) -> bool:
    """A zombie, or gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# -------------------------------------------------------------------- nodes from a reservation

EXPAND = NodeOrder(order_id="o3", kind="expand", nodes=("n5",), reservation="standby")
COMPANION = NodeOrder(order_id="o4", kind="companion", nodes=("n5",), reservation="standby")
#: What `scontrol show job` says of the job, and what is asked of it otherwise goes to the file `asked`.
SHOWS = (
    'if [ "$1" = show ]; then printf "   Partition=gpu Account=lab QOS=(null)\\n   StdOut=/out\\n"; '
    'else echo "$@" > asked; cp asked $TMD_TEST_FOLDER; fi'
)
GRANTS = 'echo "$@" > salloc; echo "salloc: Granted job allocation 12" >&2'


def _words(path: Path) -> set[str]:
    return set(path.read_text().split())


async def test_a_node_comes_into_the_job_by_a_second_one_that_is_merged_into_it(rig: Rig, daemon: StandInDaemon) -> None:
    await in_slurm(rig, daemon, scontrol=SHOWS, salloc=GRANTS, sbatch="exit 1", scancel="exit 1")
    await direct(daemon, EXPAND)
    await became(daemon, EXPAND, "done")
    assert {"--nodelist=n5", "--reservation=standby", "--dependency=expand:7", "--partition=gpu", "--account=lab"} <= _words(
        rig.folder / "salloc"
    )
    assert "--comment=tmd:expander=7" in _words(rig.folder / "salloc")
    assert not [word for word in _words(rig.folder / "salloc") if word.startswith("--qos")]
    assert (rig.folder / "asked").read_text() == "update jobid=12 NumNodes=0\n"


async def test_what_was_granted_and_cannot_be_merged_is_ended(rig: Rig, daemon: StandInDaemon) -> None:
    scontrol = 'if [ "$1" = show ]; then echo "   Partition=p"; else echo "Unspecified error for job 12" >&2; exit 1; fi'
    scancel = 'echo "$@" > ended'
    await in_slurm(rig, daemon, scontrol=scontrol, salloc=GRANTS, sbatch="exit 1", scancel=scancel)
    await direct(daemon, EXPAND)
    assert (await became(daemon, EXPAND, "failed")).reason == "Unspecified error for job 12"
    assert (rig.folder / "ended").read_text() == "12\n"


async def test_a_job_with_devices_is_not_even_tried_to_be_merged(rig: Rig, daemon: StandInDaemon) -> None:
    """Slurm would refuse it half-way."""
    scontrol = 'echo "   Partition=p TresPerNode=gres:gpu:8"'
    await in_slurm(rig, daemon, scontrol=scontrol, salloc=GRANTS, sbatch="exit 1", scancel="exit 1")
    await direct(daemon, EXPAND)
    assert 'growth = "companion"' in (await became(daemon, EXPAND, "failed")).reason
    assert not (rig.folder / "salloc").exists()


async def test_slurm_s_refusal_of_a_reservation_is_the_reason(rig: Rig, daemon: StandInDaemon) -> None:
    words = "salloc: error: Job submit/allocate failed: Access denied to requested reservation"
    await in_slurm(rig, daemon, scontrol=SHOWS, salloc=f"echo '{words}' >&2; exit 1", sbatch="exit 1", scancel="exit 1")
    await direct(daemon, EXPAND)
    assert (await became(daemon, EXPAND, "failed")).reason == words


async def test_a_companion_job_runs_an_agent_of_this_job(rig: Rig, daemon: StandInDaemon) -> None:
    sbatch = 'echo "$@" > sbatch; cat > script; echo "$TMD_COMPANION_OF,$TMD_LAUNCHED,$SLURM_JOB_ID," > variables; echo 12'
    squeue = 'case "$*" in *%L*) echo 1:59:00;; *) echo "RUNNING|None";; esac'
    await in_slurm(rig, daemon, scontrol=SHOWS, squeue=squeue, sbatch=sbatch, salloc="exit 1", scancel="exit 1")
    await direct(daemon, COMPANION)
    await became(daemon, COMPANION, "done")
    asked = _words(rig.folder / "sbatch")
    assert {"--nodelist=n5", "--reservation=standby", "--time=1:59:00", "--comment=tmd:companion=7", "--output=/out"} <= asked
    assert "--no-requeue" in asked
    interpreter, command = (rig.folder / "script").read_text().splitlines()
    assert interpreter == "#!/bin/sh"
    assert command.startswith("exec srun --nodes=1 --ntasks=1 ")
    assert str(RANK_PROGRAM) in command
    assert (rig.folder / "variables").read_text() == "7,1,,\n"


async def test_a_companion_job_that_does_not_run_is_ended_once_it_is_not_wanted_any_more(rig: Rig, daemon: StandInDaemon) -> None:
    squeue = 'case "$*" in *%L*) echo UNLIMITED;; *) echo "PENDING|Resources"; touch waiting;; esac'
    scancel = 'echo "$@" > ended'
    await in_slurm(rig, daemon, scontrol=SHOWS, squeue=squeue, sbatch="cat >&2; echo 12", salloc="exit 1", scancel=scancel)
    await direct(daemon, COMPANION)
    await until("it waits", lambda: (rig.folder / "waiting").exists())
    await direct(daemon, withdrawn=("o4",))
    assert (await became(daemon, COMPANION, "failed")).reason == "called off"
    assert (rig.folder / "ended").read_text() == "12\n"


async def test_a_growth_that_is_called_off_again_and_again_still_ends_its_job(rig: Rig, daemon: StandInDaemon) -> None:
    """Each directive names the withdrawn order until it has ended; scancel takes its time here."""
    squeue = 'case "$*" in *%L*) echo UNLIMITED;; *) echo "PENDING|Resources"; touch waiting;; esac'
    scancel = 'touch ending; until [ -e go ]; do sleep 0.02; done; echo "$@" > ended'
    await in_slurm(rig, daemon, scontrol=SHOWS, squeue=squeue, sbatch="cat >&2; echo 12", salloc="exit 1", scancel=scancel)
    await direct(daemon, COMPANION)
    await until("it waits", lambda: (rig.folder / "waiting").exists())
    await direct(daemon, withdrawn=("o4",))
    await until("scancel runs", lambda: (rig.folder / "ending").exists())
    await direct(daemon, RELEASE, withdrawn=("o4",))
    await became(daemon, RELEASE, "done", "failed")
    (rig.folder / "go").touch()
    assert (await became(daemon, COMPANION, "failed")).reason == "called off"
    assert (rig.folder / "ended").read_text() == "12\n"


async def test_a_companion_job_that_ends_at_once_is_a_failure(rig: Rig, daemon: StandInDaemon) -> None:
    squeue = 'case "$*" in *%L*) echo UNLIMITED;; *) echo "FAILED|NonZeroExitCode";; esac'
    await in_slurm(rig, daemon, scontrol=SHOWS, squeue=squeue, sbatch="cat >&2; echo 12", salloc="exit 1", scancel="exit 0")
    await direct(daemon, COMPANION)
    assert "FAILED, NonZeroExitCode" in (await became(daemon, COMPANION, "failed")).reason

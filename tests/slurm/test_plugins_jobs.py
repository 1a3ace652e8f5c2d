"""What a job with standby nodes sees of itself, and that a job without sees no difference."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster
from tests.slurm.files import Options
from tests.slurm.plugins import environment, fields, finished, lua_files, plugstack
from tests.slurm.report import Report
from tests.slurm.users import ALICE

#: What differs between any two runs of a job.
OF_A_RUN = {
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "SLURM_JOB_SLUID",
    "SLURM_JOB_START_TIME",
    "SLURM_JOB_END_TIME",
    "SLURM_TASK_PID",
    "SLURM_LAUNCH_NODE_IPADDR",
    "SLURM_SRUN_COMM_PORT",
    "SLURM_STEP_LAUNCHER_PORT",
}
#: What a job with standby nodes has beside what any job has.
OF_STANDBY = {"SLURM_NO_KILL": "set", "SLURM_KILL_BAD_EXIT": "0", "SLURM_WAIT": "0"}

SHAPES = [
    "-N2",
    "-N2 -n3",
    "-N2 -n2 -c2",
    "-N2 --ntasks-per-node=2",
    "-N1-2 --ntasks-per-node=2",
    "-N2 -n5 --exclusive",
    "-N1 -n2 --mem=100",
]

#: Where the tasks are uneven.
EQUAL_SHARES = {"-N2 -n3": "2(x2)"}

#: The script's own environment, then that of each task of a plain srun.
TASK = "echo task $SLURM_PROCID of $SLURM_NTASKS on $SLURM_NNODES nodes, $SLURM_STEP_TASKS_PER_NODE here $SLURMD_NODENAME"
SHOW = f"env; echo ---; srun bash -c '{TASK}'"


def seen(printed: str) -> tuple[dict[str, str], list[str]]:
    """The script's environment, and what the tasks printed, in order; without what differs in each run."""
    own, _, tasks = printed.partition("---\n")
    return {name: value for name, value in environment(own).items() if name not in OF_A_RUN}, sorted(
        line for line in tasks.splitlines() if not line.startswith("srun: ")
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_script_and_plain_srun_see_what_the_user_asked_for(standby_cluster: SlurmCluster, shape: str) -> None:
    plain, plain_tasks = seen(finished(standby_cluster, SHOW, *shape.split()))
    job, job_tasks = seen(finished(standby_cluster, SHOW, *shape.split(), "--standby=1"))
    ours = {name: job.pop(name) for name in list(job) if name.startswith("TMD_") and name not in plain}
    assert {name: job.pop(name) for name in OF_STANDBY} == OF_STANDBY
    # Every node gets the processors that the fullest one needs: a standby node must be able to take any role.
    assert job.pop("SLURM_JOB_CPUS_PER_NODE") == EQUAL_SHARES.get(shape, plain["SLURM_JOB_CPUS_PER_NODE"])
    del plain["SLURM_JOB_CPUS_PER_NODE"]
    assert job == plain
    assert job_tasks == plain_tasks
    nodes = int(plain["SLURM_NNODES"])
    assert ours["TMD_STANDBY"] == "1"
    assert ours["TMD_NNODES"] == str(nodes)
    assert ours["TMD_ALLOC_NODES"] == str(nodes + 1)
    assert ours["TMD_STANDBY_NODELIST"] == f"n{nodes + 1}"
    assert ours["TMD_ALLOC_NODELIST"] == f"n[1-{nodes + 1}]"


def test_the_allocation_has_the_nodes_more_and_each_has_the_same_shape(standby_cluster: SlurmCluster) -> None:
    job = standby_cluster.sbatch("sleep 100", "-N2", "-n4", "-c2", "--standby=2")
    standby_cluster.wait_for(lambda: fields(standby_cluster, job)["JobState"] == "RUNNING", "the job to run")
    shown = fields(standby_cluster, job)
    assert (shown["NumNodes"], shown["NodeList"], shown["NumCPUs"]) == ("4", "n[1-4]", "16")
    assert shown["AdminComment"] == "tmd:standby=2;nodes=2"


def test_the_standby_node_is_there_for_who_names_it(standby_cluster: SlurmCluster) -> None:
    script = """
        srun -N 3 true
        srun -w $TMD_STANDBY_NODELIST -N1 -n1 bash -c 'echo named $SLURMD_NODENAME'
        env -u SLURM_JOB_NODELIST srun -N $TMD_ALLOC_NODES bash -c 'echo all $SLURMD_NODENAME'
    """
    printed = finished(standby_cluster, script, "-N2", "--standby=1")
    assert "Only allocated 2 nodes asked for 3" in printed
    assert set(printed.splitlines()) >= {"named n3", "all n1", "all n2", "all n3"}


def test_a_job_survives_the_loss_of_a_node_without_asking_for_it(standby_cluster: SlurmCluster) -> None:
    """--no-kill for the job (job_submit/tmd) and for a plain srun in its script (spank_tmd)."""
    beats = standby_cluster.places.shared / "beats"
    beats.mkdir(exist_ok=True)
    script = f"srun bash -c 'while sleep 0.1; do date +%s.%N > {beats}/$SLURMD_NODENAME; done'"
    job = standby_cluster.sbatch(script, "-N2", "--standby=1")
    standby_cluster.wait_for(lambda: {path.name for path in beats.iterdir()} == {"n1", "n2"}, "both tasks to beat")
    standby_cluster.kill_node("n2")
    standby_cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=lost")
    standby_cluster.wait_state("n2", "DOWN")
    before = (beats / "n1").read_text()
    standby_cluster.wait_for(lambda: (beats / "n1").read_text() not in ("", before), "the other task to go on")
    assert fields(standby_cluster, job)["JobState"] == "RUNNING"


def test_a_job_submitted_from_within_is_a_job_of_its_own(standby_cluster: SlurmCluster) -> None:
    inner = standby_cluster.places.shared / "inner.out"
    inner.unlink(missing_ok=True)
    finished(standby_cluster, f"sbatch -N1 -o {inner} --wait --wrap='env; scontrol show job $SLURM_JOB_ID'", "-N2", "--standby=1")
    found = environment(inner.read_text())
    of_the_tests = {"TMD_EVENTS_SOCKET", *os.environ}
    assert not [name for name in found if "TMD_" in name and name not in of_the_tests]
    assert not found.keys() & OF_STANDBY.keys()
    assert found["SLURM_NNODES"] == "1"
    assert "AdminComment" not in inner.read_text()


def test_the_flag_reaches_a_job_that_takes_no_environment_along(standby_cluster: SlurmCluster) -> None:
    found = environment(finished(standby_cluster, "env", "-N2", "--standby=1", "--export=NONE"))
    assert (found["TMD_STANDBY"], found["SLURM_NNODES"], found["TMD_ALLOC_NODES"]) == ("1", "2", "3")


def test_an_ordinary_user_needs_no_rights_for_it(standby_cluster: SlurmCluster) -> None:
    """Although only operators may change a job's AdminComment."""
    printed = finished(standby_cluster, "id -un; env; scontrol show job $SLURM_JOB_ID", "-N2", "--standby=1", user=ALICE)
    assert {ALICE, "SLURM_NNODES=2", "TMD_ALLOC_NODES=3"} <= set(printed.splitlines())
    assert "AdminComment=tmd:standby=1;nodes=2" in printed


def test_tasks_of_an_array_have_standby_nodes_each(standby_cluster: SlurmCluster) -> None:
    output = standby_cluster.places.shared / "array.%a"
    job = standby_cluster.sbatch("env", "-N1", "--standby=1", "--array=1-2", "-o", str(output))
    standby_cluster.wait_for(lambda: not standby_cluster.run("squeue", "-h", "-j", job, check=False).stdout, "the array to end")
    for task in "12":
        found = environment(output.with_name(f"array.{task}").read_text())
        assert (found["SLURM_NNODES"], found["TMD_ALLOC_NODES"]) == ("1", "2")


def test_a_requeued_job_sees_the_same_again(standby_cluster: SlurmCluster) -> None:
    output = standby_cluster.places.shared / "requeued.out"
    output.unlink(missing_ok=True)
    script = 'env; [ -n "$SLURM_RESTART_COUNT" ] || { scontrol requeue $SLURM_JOB_ID; sleep 100; }'
    job = standby_cluster.sbatch(script, "-N2", "--standby=1", "--requeue", "--open-mode=append", "-o", str(output))
    standby_cluster.wait_for(lambda: output.exists() and output.read_text().count("TMD_ALLOC_NODES=") == 1, "the first run")
    standby_cluster.wait_for(lambda: fields(standby_cluster, job)["JobState"] == "PENDING", "the job to be put back")
    # By itself Slurm waits two minutes; a start within the second of the end would be taken for one that was called off.
    standby_cluster.run("scontrol", "update", f"jobid={job}", "StartTime=now+2")
    standby_cluster.wait_for(lambda: output.read_text().count("TMD_ALLOC_NODES=3") == 2, "the second run")
    assert output.read_text().count("SLURM_NNODES=2\n") == 2


def described(cluster: SlurmCluster, shape: str) -> dict[str, object]:
    """All that can be seen of a job, without what differs in each run."""
    shown = cluster.places.shared / "shown"
    step = f"[ $SLURM_PROCID != 0 ] || env > {shown}.step"
    script = f"{SHOW}; srun bash -c '{step}'; scontrol show job $SLURM_JOB_ID > {shown}.job"
    own, tasks = seen(finished(cluster, script, *shape.split()))
    of_step = {name: value for name, value in environment(Path(f"{shown}.step").read_text()).items() if name not in OF_A_RUN}
    job = re.sub(
        r"(\w+Time|JobId|SLUID|LastSchedEval|Scheduler|Priority|AllocNode:Sid)=\S+|slurm-\d+",
        r"\1",
        Path(f"{shown}.job").read_text(),
    )
    return {"environment": own, "tasks": tasks, "step": of_step, "job": job.split()}


def test_a_job_without_the_flag_is_what_it_was_without_the_plugins(
    make_cluster: Callable[[Options], SlurmCluster], plugin_folder: Path, report: Report
) -> None:
    """Also: the plugins are taken up, and let go again, by `scontrol reconfigure`."""
    cluster = make_cluster(Options(plugin_dirs=(plugin_folder,), files=lua_files()))
    # A time limit, as without one it depends on which of Slurm's schedulers comes by first.
    shapes = ["-t5 -N2 -n3 --comment=mine", "-t5 -N1", "-t5 -n2"]
    without = [described(cluster, shape) for shape in shapes]
    (cluster.places.etc / "plugstack.conf").write_text(plugstack())
    cluster.reconfigure("JobSubmitPlugins=lua,tmd")
    assert fields(cluster, cluster.sbatch("true", "-H", "-N1", "--standby=1"))["NumNodes"] == "2-2"
    for shape, before in zip(shapes, without, strict=True):
        after = described(cluster, shape)
        for what, value in before.items():
            assert after[what] == value, f"{what} of {shape}"
    cluster.reconfigure("")
    assert fields(cluster, cluster.sbatch("true", "-H", "-N1", "--standby=1"))["NumNodes"] == "1-1"
    report.add("job without the flag: as without the plugins", [], bit_identical=None)

"""The commands with which an agent acts in Slurm, as text. tests/slurm runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tmd_worker.agent.growth import JobShape, companion, outside
from tmd_worker.agent.settings import SettingsRefused, resolve_job_id, resolve_node_index, resolve_step
from tmd_worker.agent.slurm import SlurmStep, own_step

STEP = SlurmStep(job_id="7", named="7", command=("python", "-m", "tmd_worker.agent", "train.py"), cwd="/work", nnodes=4)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH with Slurm's commands, as far as anybody looks."""
    for name in ("srun", "scontrol", "squeue"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    return str(tmp_path)


def test_an_agent_is_started_like_the_one_that_starts_it_and_dies_with_nobody() -> None:
    command = STEP.launch("n5")
    assert command[:2] == ["srun", "--jobid=7"]
    assert {"--nodelist=n5", "--nodes=1", "--ntasks=1", "--overlap", "--chdir=/work"} <= set(command)
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(command)
    assert command[-4:] == list(STEP.command)


def test_the_user_s_own_options_come_after_tmd_s_and_before_the_command(path: str) -> None:
    step = resolve_step(4, "--container-image='my image' --mpi=none", {"SLURM_JOB_ID": "7", "PATH": path})
    assert step is not None
    command = step.launch("n5")
    assert command[command.index("--container-image=my image") :][:2] == ["--container-image=my image", "--mpi=none"]
    assert command.index("--mpi=none") + 1 == len(command) - len(step.command)


def test_options_that_are_no_shell_are_refused(path: str) -> None:
    with pytest.raises(SettingsRefused, match="--srun-options"):
        resolve_step(4, "--x='", {"SLURM_JOB_ID": "7", "PATH": path})


def test_binding_and_cpus_are_those_of_the_agent_s_own_step_unless_they_are_of_its_node(path: str) -> None:
    place = {"SLURM_JOB_ID": "7", "PATH": path, "SLURM_CPUS_PER_TASK": "8"}
    bound = own_step({**place, "SLURM_CPU_BIND_TYPE": "cores"}, 4)
    masked = own_step({**place, "SLURM_CPU_BIND_TYPE": "mask_cpu:"}, 4)
    assert bound is not None
    assert masked is not None
    assert {"--cpus-per-task=8", "--cpu-bind=cores"} <= set(bound.launch("n5"))
    assert not [option for option in masked.launch("n5") if option.startswith("--cpu-bind")]


def test_what_belongs_to_one_step_or_node_is_left_out_of_the_environment() -> None:
    given = {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_GPUS_PER_TASK": "8",
        "SLURM_JOB_ID": "7",
        "TMD_DAEMON": "unix:/run/tmd.sock",
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_NTASKS": "4",
        "SLURM_NODEID": "2",
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "SLURMD_NODENAME": "n2",
        "SLURM_GPUS": "32",
        "PMIX_RANK": "2",
        "TMD_NODE": "n2",
        "TMD_HOST": "10.0.0.2",
    }
    kept = STEP.environment(given)
    assert kept == {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_GPUS_PER_TASK": "8",
        "SLURM_JOB_ID": "7",
        "TMD_DAEMON": "unix:/run/tmd.sock",
        "TMD_LAUNCHED": "1",
        "TMD_NNODES": "4",
    }
    assert resolve_node_index(None, {**kept, "SLURM_NODEID": "0"}) is None


def test_an_agent_outside_slurm_or_without_its_commands_can_start_nobody(path: str, tmp_path: Path) -> None:
    assert own_step({"PATH": path}, 4) is None
    assert own_step({"SLURM_JOB_ID": "7", "PATH": str(tmp_path / "empty")}, 4) is None
    assert own_step({"SLURM_JOB_ID": "7", "PATH": path}, 4) is not None


def test_the_command_is_the_process_s_own() -> None:
    """Whatever way tmd-run was started: the same interpreter with the same arguments."""
    script = "import os; from tmd_worker.agent.slurm import own_step; print(*own_step(os.environ, 1).command, sep='|')"
    environment = {"SLURM_JOB_ID": "7", "PYTHONPATH": ":".join(sys.path)}
    shim = "import shutil; shutil.which = lambda *a, **k: 'x'; "
    done = subprocess.run(
        [sys.executable, "-c", shim + script, "--nnodes", "4"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "|".join([sys.executable, "-c", shim + script, "--nnodes", "4"])


def test_a_task_of_an_array_is_named_by_its_number(path: str) -> None:
    """The array's own id would stand for all of its tasks."""
    environment = {"SLURM_JOB_ID": "100", "SLURM_ARRAY_JOB_ID": "100", "SLURM_ARRAY_TASK_ID": "3", "PATH": path}
    step = own_step(environment, 4)
    assert step is not None
    assert step.shrink(["n1", "n3"]) == ["scontrol", "update", "jobid=100_3", "NodeList=n1,n3"]
    assert step.answer("101|n[7-8]|n7\n100|n[1-3]|n1\n") == ("n[1-3]", "n1")


def test_a_job_that_is_not_listed_holds_nothing() -> None:
    with pytest.raises(LookupError, match="does not list job 7"):
        STEP.answer("")


def test_an_agent_of_a_companion_job_serves_the_other_job_and_leaves_orders_to_its_agents(path: str) -> None:
    environment = {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "0", "TMD_COMPANION_OF": "7.1", "PATH": path}
    assert resolve_job_id(None, environment) == "7.1"
    assert own_step(environment, 4) is None


def test_a_requeued_job_is_named_with_its_life() -> None:
    assert resolve_job_id(None, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}) == "7.2"
    assert resolve_job_id(None, {"SLURM_JOB_ID": "7"}) == "7"
    assert resolve_job_id("mine", {"SLURM_JOB_ID": "7"}) == "mine"
    assert resolve_job_id(None, {}) is None


def test_who_has_no_sbatch_takes_no_nodes(path: str, tmp_path: Path) -> None:
    environment = {"SLURM_JOB_ID": "7", "PATH": path}
    step = own_step(environment, 4)
    assert step is not None
    assert not step.grows
    for name in ("salloc", "sbatch", "scancel"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    step = own_step(environment, 4)
    assert step is not None
    assert step.grows
    assert step.life == "7"


def test_a_companion_s_node_is_like_the_job_s_others() -> None:
    shape = JobShape.read(
        "JobId=7 Account=lab QOS=high Partition=gpu TresPerNode=gres:gpu:8,gres:nic:1\n   StdOut=/out/a%b 7.txt\n"
    )
    command = companion(STEP, "n5", "standby", shape, "UNLIMITED")
    assert {"--partition=gpu", "--account=lab", "--qos=high", "--gres=gpu:8,nic:1", "--output=/out/a%%b 7.txt"} <= set(command)
    assert "--output=/dev/null" in companion(STEP, "n5", "standby", JobShape.read("JobId=7"), "1:00")


def test_variables_of_the_job_s_own_step_are_no_options_of_another_job() -> None:
    given = {
        "SLURM_CONF": "/c",
        "SLURM_NTASKS": "4",
        "SBATCH_RESERVATION": "x",
        "SPANK_X": "1",
        "PATH": "/bin",
        "TMD_DAEMON": "d",
    }
    assert outside(given) == {"SLURM_CONF": "/c", "PATH": "/bin", "TMD_DAEMON": "d"}

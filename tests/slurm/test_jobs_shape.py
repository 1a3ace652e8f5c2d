"""What a joiner finds on its node is what the user's own step has there: GPUs, processors, memory, devices, container options,
environment, directory, output."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.cluster import until
from tests.slurm import plugins
from tests.slurm.cluster import SlurmCluster
from tests.slurm.files import Options
from tests.slurm.head import opened_head
from tests.slurm.report import Report
from tests.slurm.stack import SlurmJob, SlurmStack
from tests.slurm.users import ALICE, user

#: A device number that no driver answers to: opening one gives ENXIO, unless a control group forbids it.
MAJOR = 240
GPUS = 2
CGROUPS = [Path("/sys/fs/cgroup", name) for name in ("freezer", "memory", "cpuset", "devices")]
OF_CGROUPS = "ProctrackType=proctrack/cgroup\nTaskPlugin=task/cgroup,task/affinity\nSelectTypeParameters=CR_Core_Memory"
CGROUP_CONF = "CgroupPlugin=cgroup/v1\nConstrainCores=yes\nConstrainDevices=yes\nConstrainRAMSpace=yes\n"


def may_make_cgroups() -> bool:
    """Version 1, as Slurm 22.05 can use them without systemd."""
    try:
        for folder in CGROUPS:
            (folder / "tmd-probe").mkdir()
            (folder / "tmd-probe").rmdir()
    except OSError:
        return False
    return True


@pytest.fixture
def no_cgroups_left() -> Iterator[None]:
    """Slurm leaves empty ones behind when it is killed."""
    yield
    for root in CGROUPS:
        for folder, _, _ in os.walk(root, topdown=False):
            if re.search(r"/slurm_n[123](/|$)", folder):
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()


@pytest.fixture
def confined(
    no_cgroups_left: None, make_cluster: Callable[[Options], SlurmCluster], plugin_folder: Path, public_folder: Path
) -> Iterator[SlurmCluster]:
    """Three nodes of two GPUs and two processors: steps are bound, and confined where this machine lets Slurm do so."""
    for number in range(GPUS):
        os.mknod(public_folder / f"gpu{number}", 0o666 | 0o020000, os.makedev(MAJOR, number))
    source, built = Path(__file__).with_name("container_flag.c"), public_folder / "container_flag.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", built, source], check=True, timeout=60)
    files = {**plugins.lua_files(), "gres.conf": f"Name=gpu File={public_folder}/gpu[0-{GPUS - 1}]\n"}
    conf = "GresTypes=gpu\n"
    if may_make_cgroups():
        files["cgroup.conf"], conf = CGROUP_CONF, conf + OF_CGROUPS
    else:
        conf += "TaskPlugin=task/affinity"
    options = plugins.loaded(plugin_folder, nodes=3, cpus_per_node=2, gres=f"gpu:{GPUS}", slurm_conf=conf, files=files)
    with plugins.events_go_to(plugin_folder / "hints.sock"):
        yield make_cluster(dataclasses.replace(options, plugstack=f"{options.plugstack}\nrequired {built}\n"))


@pytest.fixture
def stack(confined: SlurmCluster) -> Iterator[SlurmStack]:
    with opened_head(confined) as head:
        yield head


#: What the script tells its own srun, and tmd.
CONTAINER = "--container-image=train.sqsh --container-mounts=/data:/data"
SCRIPT = """
ulimit -Sn 4321
export SCRIPTS_OWN=exported TMD_SRUN_OPTIONS="{container} --output=more-%j-%s-%t --open-mode=append"
{exports}
srun --export=ALL {container} --output=out-%j-%t {command}
"""


def submitted(stack: SlurmStack) -> SlurmJob:
    """A job of one GPU and one processor for each of its two ranks, that takes nothing of its submitter's environment along."""
    job = stack.prepared(stack.slurm.places.shared / "shaped", steps=1000, pace_ms=400)
    needed = {"PYTHONPATH": os.environ["PYTHONPATH"], "OMP_NUM_THREADS": "1", "SLURM_CONF": str(stack.slurm.places.slurm_conf)}
    exports = "export " + " ".join(f"{name}={value}" for name, value in {**needed, **stack.environment()}.items())
    script = SCRIPT.format(container=CONTAINER, exports=exports, command=stack.command(str(job.out), job.steps))
    asked = ("-N2", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=1500M", "--gres=gpu:1", "--standby=1", "--export=NONE")
    places = (f"--chdir={job.out}", "--output=output")
    job.id = stack.slurm.sbatch(script, *asked, *places, user=ALICE, env={"SUBMITTERS_OWN": "left behind"})
    until(lambda: stack.stack.job(job.id), f"the daemon knows {job.id}: its folder is {job.out}", every_s=0.1)
    return job


def shape(pid: int, gpus: list[Path]) -> dict[str, Any]:
    """Of a rank: all that its step decides."""
    process = psutil.Process(pid)
    found = process.environ()
    kept = {name: value for name, value in found.items() if "GPU" in name or "CUDA" in name or name.startswith("TEST_")}
    return {
        "user": (process.uids().real, process.gids().real),
        "directory": process.cwd(),
        "processors": len(process.cpu_affinity() or ()),
        "open files": soft_limit(pid, "Max open files"),
        "environment": kept,
        "the script's": found.get("SCRIPTS_OWN"),
        "the submitter's": found.get("SUBMITTERS_OWN"),
        "control groups": {name: re.sub(r"slurm_n\d|step_\d+", "*", path) for name, path in control_groups(pid).items()},
        "memory": memory_limit(pid),
        "devices": [path.name for path in gpus if may_open(pid, path)],
    }


def soft_limit(pid: int, what: str) -> int:
    line = next(line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if line.startswith(what))
    return int(line.removeprefix(what).split()[0])


def control_groups(pid: int) -> dict[str, str]:
    """Of those that Slurm makes: name -> path."""
    rows = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    return {name: path for _, name, path in rows if "/slurm_" in path}


def memory_limit(pid: int) -> int | None:
    """In bytes, of the step; None where nothing is confined."""
    path = control_groups(pid).get("memory")
    if path is None:
        return None
    return int(Path(f"/sys/fs/cgroup/memory{path.partition('/task_')[0]}/memory.limit_in_bytes").read_text())


def may_open(pid: int, device: Path) -> bool:
    """As a process that joins this one's control group finds it."""
    path = control_groups(pid).get("devices")
    join = f"echo $$ > /sys/fs/cgroup/devices{path}/cgroup.procs && " if path else ""
    done = subprocess.run(["sh", "-c", f"{join}cat {device}"], capture_output=True, text=True, timeout=20, env={"LC_ALL": "C"})
    assert ("Operation not permitted" in done.stderr) != ("No such device or address" in done.stderr), done.stderr
    return "No such device or address" in done.stderr


def test_a_joiner_has_what_the_users_own_step_has(stack: SlurmStack, public_folder: Path, report: Report) -> None:
    job = submitted(stack)
    (standby,) = job.wait_ready(1)
    rank = next(rank for rank in (0, 1) if job.node_of(rank) != job.batch_host())
    leaver = job.node_of(rank)
    gpus = [public_folder / f"gpu{number}" for number in range(GPUS)]
    own, joiners = shape(job.pids()[rank], gpus), shape(standby["pid"], gpus)
    assert joiners == own
    confined = may_make_cgroups()
    assert own["user"] == (user(ALICE).uid, user(ALICE).gid)
    assert own["directory"] == str(job.out)
    assert (own["processors"], own["open files"]) == (1, 4321)
    assert own["environment"]["CUDA_VISIBLE_DEVICES"] == "0"
    assert own["environment"]["TEST_CONTAINER_IMAGE"] == "train.sqsh"
    assert own["environment"]["TEST_CONTAINER_MOUNTS"] == "/data:/data"
    assert (own["the script's"], own["the submitter's"]) == ("exported", None)
    assert own["devices"] == (["gpu0"] if confined else ["gpu0", "gpu1"])
    assert own["memory"] == (1500 << 20 if confined else None)
    assert own["control groups"].keys() == ({path.name for path in CGROUPS} if confined else set())
    launched = job.agent_pid(standby["record"]["node"])
    more = job.out / f"more-{job.id}-{psutil.Process(launched).environ()['SLURM_STEP_ID']}-0"
    assert os.readlink(f"/proc/{launched}/fd/1") == str(more), "Slurm writes it itself: it needs no other agent for that"
    assert more.owner() == ALICE
    assert {path.name for path in job.out.glob("out-*")} == {f"out-{job.id}-0", f"out-{job.id}-1"}

    job.drain(leaver)
    record = job.wait_move(leaver)
    assert job.pids()[rank] == standby["pid"]
    job.wait_given_back(leaver)
    stack.slurm.run("scancel", job.id, user=ALICE)
    job.wait_gone()
    until(lambda: set(stack.slurm.states().values()) == {"IDLE", "IDLE+DRAIN"}, "no node is held any more")
    for node in stack.slurm.options.node_names:
        assert [process.name() for process in stack.slurm.processes_of(node)] == ["slurmd"]
    name = "binding, GPUs, limits, container options and output of a joiner"
    # The stage's report says so where nothing can confine a job: not every machine lets root make control groups.
    report.add(name if confined else f"{name}, without control groups", [record])

"""The cluster that the other tests here stand on: real daemons, real jobs of real users, and nothing left afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.slurm.cluster import MUNGED, SLURMCTLD, SLURMDBD, SlurmCluster
from tests.slurm.files import Options
from tests.slurm.users import ALICE, BOB, user

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0


def test_jobs_run_as_their_users_on_nodes_of_their_own(cluster: SlurmCluster) -> None:
    jobs = {name: cluster.sbatch("srun bash -c 'id -un; echo $SLURMD_NODENAME'", "-N2", user=name) for name in (ALICE, BOB)}
    for name, job in jobs.items():
        output = cluster.places.shared / f"slurm-{job}.out"
        cluster.wait_for(
            lambda output=output: output.exists() and len(output.read_text().split()) == 4, f"the output of job {job}"
        )
        words = output.read_text().split()
        assert words.count(name) == 2
        assert len(set(words) - {name}) == 2
        assert output.stat().st_uid == user(name).uid


def test_a_killed_node_takes_its_slurmd_its_steps_and_their_children_along_and_comes_back(cluster: SlurmCluster) -> None:
    job = cluster.sbatch("srun --no-kill --kill-on-bad-exit=0 bash -c '(setsid sleep 1000 &) ; sleep 1000'", "-N2", "--no-kill")
    cluster.wait_for(lambda: _sleeps(cluster, "n1") == _sleeps(cluster, "n2") == 2, f"the steps of job {job}")
    victims = cluster.processes_of("n2")
    cluster.kill_node("n2")
    assert not any(victim.is_running() for victim in victims)
    assert _sleeps(cluster, "n1") == 2, "the other node is untouched"
    cluster.start_part("n2")
    cluster.wait_for(lambda: _sleeps(cluster, "n2") == 0 and "NOT_RESPONDING" not in cluster.states()["n2"], "n2 to answer")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_is_stopped_starts_again_and_knows_its_jobs(cluster: SlurmCluster, number: signal.Signals) -> None:
    job = cluster.sbatch("sleep 1000", user=ALICE)
    cluster.wait_for(lambda: _state(cluster, job) == "RUNNING", f"job {job} to run")
    cluster.save(job)
    for part in (SLURMCTLD, SLURMDBD, MUNGED, "n1"):
        cluster.restart(part, number)
    assert _state(cluster, job) == "RUNNING"
    assert cluster.run("sacctmgr", "-n", "list", "cluster", "format=cluster").stdout.split() == ["tmd"]


def test_settings_plugins_and_files_are_the_caller_s(
    make_cluster: Callable[[Options], SlurmCluster], public_folder: Path
) -> None:
    checked = public_folder / "checked"
    health_check = public_folder / "check"
    health_check.write_text(f'#!/bin/bash\necho "$SLURMD_NODENAME" >> {checked}\n')
    health_check.chmod(0o755)
    lua = 'function slurm_job_submit(d) d.comment = "seen" return slurm.SUCCESS end\n'
    lua += "function slurm_job_modify() return slurm.SUCCESS end\nreturn slurm.SUCCESS\n"
    cluster = make_cluster(
        Options(
            nodes=5,
            slurm_conf="SlurmdTimeout=17",
            job_submit_plugins="lua",
            files={"job_submit.lua": lua},
            plugstack="optional /nonexistent/plugin.so\n",
            plugin_dirs=(public_folder,),
            health_check=health_check,
            health_check_interval_s=1,
        )
    )
    config = cluster.run("scontrol", "show", "config").stdout
    assert "SlurmdTimeout           = 17 sec" in config
    assert f"PluginDir               = {public_folder}:" in config
    assert set(cluster.states()) == {"n1", "n2", "n3", "n4", "n5"}
    assert "Comment=seen" in cluster.run("scontrol", "show", "job", cluster.sbatch("true", user=BOB)).stdout
    cluster.wait_for(lambda: checked.exists() and set(checked.read_text().split()) == set(cluster.states()), "health checks")


def test_a_reconfigured_cluster_has_the_new_settings(make_cluster: Callable[[Options], SlurmCluster]) -> None:
    cluster = make_cluster(Options(nodes=1))
    cluster.reconfigure("SlurmdTimeout=33")
    assert "SlurmdTimeout           = 33 sec" in cluster.run("scontrol", "show", "config").stdout


_KILLED_HALFWAY = """
import os, signal, sys
from tests.slurm.cluster import SlurmCluster
cluster = SlurmCluster()
cluster.start()
cluster.sbatch("(setsid sleep 1000 &); sleep 1000")
cluster.wait_for(lambda: any(p.name() == "sleep" for p in cluster.processes_of("n1")), "the job")
print(cluster.folder, *(p.pid for p in cluster._running.below()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_outlives_a_killed_test_process(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    tmp_path.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", _KILLED_HALFWAY], env=env, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    assert done.returncode == -signal.SIGKILL
    folder, *pids = done.stdout.split()
    assert len(pids) >= 10
    of_the_cluster = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):  # gone already
            of_the_cluster.append(psutil.Process(int(pid)))
    assert psutil.wait_procs(of_the_cluster, timeout=DEADLINE_S)[1] == []
    assert Path(folder).parent == tmp_path


def test_a_person_s_cluster_is_up_until_it_is_taken_down() -> None:
    def ask(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "tests.slurm", *words], capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    ask("down")
    try:
        said = ask("up", "--nodes", "2")
        assert ask("up") == said, "asked again, it is the same one"
        conf = next(line for line in said.splitlines() if line.startswith("export SLURM_CONF=")).partition("=")[2]
        shell = ["bash", "-c", f"{said}sinfo -hN -o %N"]
        shown = subprocess.run(shell, capture_output=True, text=True, timeout=DEADLINE_S)
        assert shown.stdout.split() == ["n1", "n2"]
    finally:
        assert ask("down") == "the cluster is down\n"
    assert not Path(conf).exists()


def _sleeps(cluster: SlurmCluster, node: str) -> int:
    return sum(process.name() == "sleep" for process in cluster.processes_of(node))


def _state(cluster: SlurmCluster, job: str) -> str:
    return cluster.run("squeue", "-h", "-j", job, "-o", "%T").stdout.strip()

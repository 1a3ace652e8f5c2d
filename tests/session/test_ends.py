"""How a job ends when it is the script that fails, and how the same script runs without tmd."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.session.conftest import Lab
from tests.session.harness import SCRIPT
from tests.session.outcome import Outcome
from tests.session.zygote import ROOT
from tests.transports import BOTH
from tmd.core.settings import CoreSettings


@BOTH
def test_a_bug_in_one_rank_ends_the_job_with_its_traceback_and_uses_no_standby(lab: Lab) -> None:
    with lab.cluster("bug", nodes=3, standbys=1) as cluster:
        over = cluster.run()
        assert over.exit_code == 1
        assert "ValueError: a bug in the user's script" in over.reason
        assert "misbehave" in over.reason
        assert [len(cluster.started(rank)) for rank in range(3)] == [1, 1, 1]


def test_scripts_that_do_not_fit_together_end_the_job_and_use_no_standby(lab: Lab) -> None:
    """Another process in that place would come to the same end."""
    with lab.cluster("disagree", nodes=3, standbys=1) as cluster:
        over = cluster.run()
        assert over.exit_code == 1
        assert "the ranks call different collectives" in over.reason
        assert [len(cluster.started(rank)) for rank in range(3)] == [1, 1, 1]


def test_a_step_that_kills_whoever_runs_it_ends_the_job(lab: Lab) -> None:
    settings = CoreSettings(step_attempts=3)
    with lab.cluster("crash", nodes=2, standbys=4, settings=settings) as cluster:
        over = cluster.run()
        assert over.exit_code == 1
        assert "step 3 was broken off 3 times in a row, so replacing ranks does not help" in over.reason
        assert "killed by SIGSEGV" in over.reason
        assert len(cluster.started(1)) == 3


@BOTH
def test_a_script_that_exits_in_its_middle_is_a_failure_that_says_so(lab: Lab) -> None:
    with lab.cluster("exit", nodes=2, standbys=1) as cluster:
        over = cluster.run()
        assert over.exit_code == 1
        assert "sys.exit(0) before its last step" in over.reason.rstrip().splitlines()[-1]


def test_a_loop_that_is_left_early_is_a_failure_that_says_what_to_do(lab: Lab) -> None:
    with lab.cluster("break", nodes=2) as cluster:
        over = cluster.run()
        assert over.exit_code == 1
        assert "let the loop over session.steps run to its end" in over.reason


def test_a_collective_after_the_vote_is_refused_with_what_to_do(lab: Lab) -> None:
    with lab.cluster("careless", nodes=2) as cluster:
        over = cluster.run()
        assert over.exit_code == 1
        assert "session.log_only()" in over.reason


@BOTH
def test_collectives_after_the_last_step_are_those_of_pytorch(lab: Lab) -> None:
    with lab.cluster("evaluate", nodes=3) as cluster:
        assert cluster.run().exit_code == 0, cluster.report()
        assert len(Outcome.of(cluster.folder).digests) == 3


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_same_script_is_plain_pytorch_without_a_daemon(world_size: int, tmp_path: Path) -> None:
    """torchrun's variables suffice; alone, not even those are needed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'worker'}",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    processes = []
    try:
        for rank in range(world_size):
            role = {"RANK": str(rank), "WORLD_SIZE": str(world_size)} if world_size > 1 else {}
            command = [sys.executable, str(SCRIPT), str(tmp_path), "4", "batchnorm"]
            processes.append(subprocess.Popen(command, env=environment | role, stdin=subprocess.DEVNULL))
        assert [process.wait(120) for process in processes] == [0] * world_size
    finally:
        for process in processes:
            process.kill()
            process.wait()
    outcome = Outcome.of(tmp_path)
    assert sorted(outcome.losses) == [(rank, step) for rank in range(world_size) for step in range(4)]
    assert len(outcome.digests) == world_size


def test_under_tmd_the_losses_are_those_of_plain_pytorch(lab: Lab, tmp_path: Path) -> None:
    """The warm-up leaves no trace: a world of one computes what plain PyTorch computes, bit for bit."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'worker'}", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(tmp_path), "8", "batchnorm"]
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, timeout=120, check=True)
    Outcome.of(tmp_path).assert_same_as(lab.reference("batchnorm", nodes=1))

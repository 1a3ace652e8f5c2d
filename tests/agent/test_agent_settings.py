"""What tmd-run makes of its command line and environment; what it refuses says why."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tmd_worker.agent import main as command_line
from tmd_worker.agent.identity import cpu_capability, own_versions, rank_threads
from tmd_worker.agent.settings import (
    DaemonAddress,
    DirectedSettings,
    LogSettings,
    PlainSettings,
    SettingsRefused,
    StreamChoice,
    file_name,
    resolve_job_id,
    resolve_launch,
    resolve_nnodes,
    resolve_nproc,
)

SCRIPT = __file__


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command line up to the point where it would start; returns the settings it would start with."""
    for name in list(os.environ):
        if name.startswith(("TMD_", "SLURM")):
            monkeypatch.delenv(name)
    taken: list[DirectedSettings | PlainSettings] = []

    def take(chosen: DirectedSettings | PlainSettings, max_restarts: int) -> int:
        taken.append(chosen)
        return 0

    monkeypatch.setattr(command_line, "_run", take)

    def resolve(*arguments: str, **environment: str) -> DirectedSettings | PlainSettings:
        result = CliRunner().invoke(command_line.tmd_run, list(arguments), env=environment)
        assert result.exit_code == 0, result.output
        return taken[-1]

    return resolve


def refused(*arguments: str, **environment: str) -> str:
    """The message with which the command line is refused."""
    result = CliRunner().invoke(command_line.tmd_run, list(arguments), env=environment)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return result.output


# -------------------------------------------------------------------- accepted


def test_torchrun_command_lines_are_taken_as_they_are(settings: Any) -> None:
    torchrun = "--nnodes=4:8 --nproc_per_node=3 --rdzv_id=77 --rdzv_backend=c10d --rdzv_endpoint=host:1234 --max_restarts=3"
    rest = "--monitor_interval 5 --start-method spawn --role trainer --node-rank 2"
    chosen = settings(*torchrun.split(), *rest.split(), SCRIPT, "--nnodes", "-m")
    assert isinstance(chosen, PlainSettings)
    assert (chosen.nnodes, chosen.nproc_per_node, chosen.node_rank) == (4, 3, 2)
    assert (chosen.master_addr, chosen.master_port, chosen.run_id) == ("host", 1234, "77")
    assert chosen.launch.arguments == ("--nnodes", "-m")


def test_what_slurm_and_the_environment_say_is_enough(settings: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    environment = {
        "TMD_DAEMON": "unix:/run/tmd/tmd.sock",
        "TMD_HOST": "127.0.0.7",
        "TMD_STANDBY": "1",
        "TMD_LABELS": "rack=r1,zone=z1",
        "TMD_TOKEN_FILE": str(tmp_path / "token"),
        "SLURM_JOB_ID": "42",
        "SLURM_RESTART_COUNT": "2",
        "SLURM_NNODES": "17",
        "SLURM_NODEID": "5",
        "SLURMD_NODENAME": "n5",
    }
    chosen = settings("--nproc-per-node=8", SCRIPT, **environment)
    assert isinstance(chosen, DirectedSettings)
    assert (chosen.job_id, chosen.node, chosen.node_index, chosen.nnodes) == ("42.2", "n5", 5, 16)
    assert (chosen.host, chosen.token, chosen.labels) == ("127.0.0.7", "secret", {"rack": "r1", "zone": "z1"})


def test_the_command_line_beats_the_environment(settings: Any) -> None:
    environment = {"TMD_DAEMON": "unix:/a", "TMD_JOB_ID": "a", "TMD_NODE": "a", "TMD_NODE_INDEX": "1", "SLURM_NNODES": "9"}
    where = ["--daemon", "http://127.0.0.1:7070", "--job-id", "b", "--node", "b"]
    chosen = settings(*where, "--node-index=2", "--nnodes=3", "--label=rack=r2", SCRIPT, **environment)
    assert isinstance(chosen, DirectedSettings)
    assert (chosen.job_id, chosen.node, chosen.node_index, chosen.nnodes, chosen.labels) == ("b", "b", 2, 3, {"rack": "r2"})
    assert chosen.host == "127.0.0.1"


def test_standalone_means_one_node_and_no_daemon(settings: Any) -> None:
    chosen = settings("--standalone", "--nproc-per-node", "cpu", SCRIPT, TMD_DAEMON="unix:/a", SLURM_NNODES="9")
    assert isinstance(chosen, PlainSettings)
    assert (chosen.nnodes, chosen.node_rank, chosen.master_addr) == (1, 0, "127.0.0.1")
    assert chosen.nproc_per_node == len(os.sched_getaffinity(0))


def test_log_dir_alone_hides_nothing(settings: Any, tmp_path: Path) -> None:
    chosen = settings("--standalone", "--log-dir", str(tmp_path), "--rdzv-id", "r", SCRIPT)
    assert chosen.logs == LogSettings(tmp_path / "r", StreamChoice(0), StreamChoice(3))
    assert chosen.logs.sinks(0, 1) == (True, True)


def test_what_carries_the_collectives_is_chosen_and_told_to_the_daemon(settings: Any) -> None:
    assert settings(*DIRECTED, SCRIPT).transport == "delta"
    assert settings(*DIRECTED, SCRIPT, TMD_TRANSPORT="gloo").transport == "gloo"
    assert settings(*DIRECTED, "--transport", "delta", SCRIPT, TMD_TRANSPORT="gloo").transport == "delta"
    assert own_versions("1", "gloo")["transport"] == "gloo"


# -------------------------------------------------------------------- refused

DIRECTED = ["--daemon", "unix:/a", "--job-id", "1", "--host", "127.0.0.1"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--no-such-flag", SCRIPT], "No such option '--no-such-flag'"),
        ([], "no script given"),
        (["/no/such/train.py"], "cannot be read: No such file or directory"),
        (["--nproc-per-node", "0", SCRIPT], "starts no process"),
        (["--nproc-per-node", "many", SCRIPT], "say a number, auto, gpu or cpu"),
        (["--nproc-per-node", "gpu", SCRIPT], "no GPU is visible"),
        (["--nnodes", "0", SCRIPT], "a number of at least 1"),
        (["--nnodes", "2", SCRIPT], "give --master-addr"),
        (["--nnodes", "2", "--master-addr", "n0", SCRIPT], "give --node-rank"),
        (["--nnodes", "2", "--master-addr", "n0", "--node-rank", "2", SCRIPT], "beyond the last of 2 nodes"),
        (["--standalone", "--nnodes", "2", SCRIPT], "leave one of them out"),
        (["--standby", "1", SCRIPT], "standby nodes need a daemon"),
        (["--daemon", "unix:/run/tmd.sock", SCRIPT], "no job id"),
        (["--daemon", "tmd.sock", "--job-id", "1", SCRIPT], "daemon address 'tmd.sock' is not understood"),
        (["--daemon", "http://head", "--job-id", "1", SCRIPT], "not understood"),
        (["--daemon", "unix:/a", "--job-id", "1", "--label", "rack", SCRIPT], "label 'rack' is not understood"),
        (["--daemon", "unix:/a", "--job-id", "1", "--token-file", "/no/token", SCRIPT], "token file '/no/token' cannot be read"),
        (["--standalone", "--transport", "gloo", SCRIPT], "--transport is of no use without a daemon"),
        (["--port-range", "4000-4010", SCRIPT], "--port-range is of no use without a daemon"),
        ([*DIRECTED, "--token-file", "/dev/zero", SCRIPT], "holds no token"),
        ([*DIRECTED, "--token-file", sys.executable, SCRIPT], "holds no token"),
        ([*DIRECTED, "--transport", "carrier-pigeon", SCRIPT], "say delta (tmd's own links) or gloo"),
        ([*DIRECTED, "--transport", "nccl", SCRIPT], "there is nothing that NCCL could carry"),
        ([*DIRECTED, "--transport", "gloo", "--port-range", "40000-40009", SCRIPT], "exclude each other"),
        (["-m", "no_such_module_anywhere"], "is not on the Python path"),
        (["-m", "json"], "has no __main__.py"),
        (["--no-python", "no-such-program-anywhere"], "not an executable"),
        (["-m", "--no-python", "x"], "exclude each other"),
        (["--redirects", "4", SCRIPT], "--redirects '4' is not understood"),
        (["--log-dir", "/proc/none", SCRIPT], "--log-dir '/proc/none' cannot be used"),
        (["--rdzv-endpoint", "host:port", SCRIPT], "say host or host:port"),
    ],
)
def test_bad_input_is_refused_with_a_reason(arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMD_DAEMON", "TMD_JOB_ID", "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tmd_worker.agent.settings.count_gpus", lambda environment: 0)
    assert says in " ".join(refused(*arguments).split())


def test_an_unreadable_script_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    assert "cannot be read" in refused("--standalone", str(tmp_path / "folder.py"))


def test_help_has_examples() -> None:
    result = CliRunner().invoke(command_line.tmd_run, ["--help"])
    assert result.exit_code == 0
    assert "tmd-run --standalone --nproc-per-node 4 train.py" in result.output


# -------------------------------------------------------------------- parts


def test_slurm_that_leaves_no_node_to_train_is_refused() -> None:
    assert resolve_nnodes(None, 0, {}) == 1
    assert resolve_nnodes(None, 2, {"SLURM_NNODES": "4"}) == 2
    with pytest.raises(SettingsRefused, match="none is left to train"):
        resolve_nnodes(None, 2, {"SLURM_NNODES": "2"})


def test_gpus_decide_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmd_worker.agent.settings.count_gpus", lambda environment: 3)
    assert resolve_nproc("auto") == resolve_nproc("gpu") == 3


def test_a_requeued_slurm_job_is_another_job() -> None:
    assert resolve_job_id(None, {"SLURM_JOB_ID": "7"}) == "7"
    assert resolve_job_id(None, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}) == "7.1"
    assert resolve_job_id("mine", {"SLURM_JOB_ID": "7"}) == "mine"
    assert resolve_job_id(None, {}) is None


def test_streams_per_local_rank() -> None:
    choice = StreamChoice.parse("0:3,2:1", "--tee")
    assert [choice.has(rank, stream) for rank in (0, 1, 2) for stream in (1, 2)] == [True, True, False, False, True, False]


def test_module_digests_follow_the_file_that_runs() -> None:
    launch = resolve_launch(("json.tool",), module=True, no_python=False)
    assert launch.file is not None
    assert launch.file.name == "tool.py"
    assert len(launch.digest()) == 64


def test_names_cannot_leave_their_folder() -> None:
    assert file_name("../../etc/passwd") == "_.._etc_passwd"
    assert file_name("..") == "_"


def test_daemon_addresses() -> None:
    assert DaemonAddress.parse("unix:/run/x").unix_path == "/run/x"
    assert DaemonAddress.parse("http://[::1]:70/").url == "http://[::1]:70"


def test_cpu_capability_names_what_decides_kernels() -> None:
    info = "processor : 0\nvendor_id\t: GenuineIntel\nflags\t: fpu avx2 avx512f sse4_2 ht\nprocessor : 1\nflags : fpu\n"
    text = cpu_capability(info, {"ATEN_CPU_CAPABILITY": "avx2"})
    assert text.split()[1:] == ["GenuineIntel", "avx2", "avx512f", "sse4_2", "ATEN_CPU_CAPABILITY=avx2"]


def test_versions_and_threads() -> None:
    assert own_versions("1", "delta")["threads"] == "1"
    assert own_versions("", "delta")["threads"] == "unset"
    assert (rank_threads(2, {}), rank_threads(1, {}), rank_threads(2, {"OMP_NUM_THREADS": "4"})) == ("1", "", "4")

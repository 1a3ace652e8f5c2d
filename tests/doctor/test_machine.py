"""The head node's own files, sockets and port, and the daemon's word on itself and its jobs."""

from __future__ import annotations

import socket
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.fake_daemon import JOB, STANDBY, plain
from tests.doctor.sample import daemon, slurm
from tmd.config import Config, DaemonSettings
from tmd.core.records import NodeRecord
from tmd.core.views import JobView
from tmd.doctor.daemon import check_daemon, check_standbys
from tmd.doctor.facts import Facts, SlurmFacts
from tmd.doctor.findings import Finding
from tmd.doctor.machine import Seen, check_hint_socket, check_port, check_socket, in_the_way, judge_state_dir
from tmd.nodes.slurm.records import SlurmJob
from tmd.nodes.slurm.settings import SlurmSettings

STATE = Path("/var/lib/tmd")
DIRECTORY, FILE, SOCKET = stat.S_IFDIR, stat.S_IFREG, stat.S_IFSOCK
ON_SLURM = Config(daemon=DaemonSettings(resource_manager="slurm"))


def levels(findings: Any) -> list[str]:
    return [finding.level for finding in findings]


# -------------------------------------------------------------------- files and sockets


def test_a_state_directory_is_its_owner_s_alone() -> None:
    good = {STATE: Seen(DIRECTORY | 0o700, 990, 990), STATE / "secret": Seen(FILE | 0o600, 990, 990)}
    assert levels(judge_state_dir(STATE, good, 990)) == ["ok"]
    assert levels(judge_state_dir(STATE, good, None)) == ["ok"]


@pytest.mark.parametrize(
    ("name", "seen", "remedy"),
    [
        ("", Seen(DIRECTORY | 0o755, 0, 0), "chmod 0700 /var/lib/tmd"),
        ("secret", Seen(FILE | 0o640, 0, 0), "chmod 0600 /var/lib/tmd/secret"),
        ("ledger.db", Seen(FILE | 0o600, 1, 0), "chown -R root /var/lib/tmd"),
    ],
)
def test_what_others_may_read_or_own_there_is_a_fault(name: str, seen: Seen, remedy: str) -> None:
    files = {STATE: Seen(DIRECTORY | 0o700, 0, 0), STATE / name: seen}
    (finding,) = judge_state_dir(STATE, files, 0)
    assert (finding.level, finding.remedy) == ("fault", remedy)


def test_slurm_s_user_has_to_get_to_the_hint_socket() -> None:
    path = Path("/run/tmd/hints.sock")
    seen = {
        Path("/"): Seen(DIRECTORY | 0o755, 0, 0),
        Path("/run"): Seen(DIRECTORY | 0o755, 0, 0),
        Path("/run/tmd"): Seen(DIRECTORY | 0o750, 990, 980),
        path: Seen(SOCKET | 0o622, 990, 980),
    }
    assert in_the_way(path, 64030, frozenset({64030}), seen.__getitem__) == Path("/run/tmd")
    assert in_the_way(path, 64030, frozenset({64030, 980}), seen.__getitem__) is None
    assert in_the_way(path, 990, frozenset(), seen.__getitem__) is None
    assert in_the_way(path, 0, frozenset(), seen.__getitem__) is None
    seen[path] = Seen(SOCKET | 0o600, 990, 980)
    assert in_the_way(path, 64030, frozenset({980}), seen.__getitem__) == path


def test_a_hint_socket_that_a_daemon_has_left_behind_is_heard_by_nobody(tmp_path: Path) -> None:
    path = tmp_path / "hints.sock"
    config = Config(slurm=SlurmSettings(hint_socket=str(path)))
    root = slurm(SlurmUser="root(0)")
    assert levels(check_hint_socket(Facts(Config(), daemon()), root)) == []
    assert levels(check_hint_socket(Facts(config), root)) == ["skipped"]
    assert levels(check_hint_socket(Facts(config, daemon()), root)) == ["fault"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        assert levels(check_hint_socket(Facts(config, daemon()), root)) == ["ok"]
    (left,) = check_hint_socket(Facts(config, daemon()), root)
    assert left.seen == f"nobody listens on {path}"


def test_a_socket_that_anybody_may_use_is_told(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        tmp_path.chmod(0o755)
        path.chmod(0o666)
        assert levels(check_socket(Facts(Config()), path)) == ["warning"]
        path.chmod(0o660)
        assert levels(check_socket(Facts(Config()), path)) == ["ok"]


def test_a_port_is_wanted_with_slurm_and_has_to_be_free_for_a_daemon_that_does_not_run() -> None:
    assert levels(check_port(Facts(Config()))) == ["skipped"]
    assert levels(check_port(Facts(ON_SLURM))) == ["fault"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listening = msgspec.structs.replace(ON_SLURM, daemon=DaemonSettings(listen=f"127.0.0.1:{port}"))
        assert levels(check_port(Facts(listening))) == ["fault"]
    assert levels(check_port(Facts(listening))) == ["ok"]
    (finding,) = check_port(Facts(listening, daemon()))
    assert "does not answer on 127.0.0.1" in finding.seen


# -------------------------------------------------------------------- the daemon and its jobs


def test_a_daemon_that_is_not_what_is_installed_or_configured_is_told() -> None:
    def found(**changes: Any) -> dict[str, Finding]:
        return {finding.point: finding for finding in check_daemon(Facts(ON_SLURM, daemon(**changes)))}

    assert set(found()) == {"version"}
    assert found(tmd_version="0.0.9")["version"].level == "warning"
    assert found(resource_manager="local")["daemon"].level == "fault"
    assert found(paused=True)["mode"].remedy == "tmctl unpause"
    assert found(observe_only=True)["mode"].level == "warning"
    assert found(ledger={"url": "x", "healthy": False, "error": "disk full"})["ledger"].level == "fault"


def job(name: str, *phases: str, state: Any = "running", nodes: tuple[str, ...] = ()) -> dict[str, Any]:
    """As GET /v1/jobs gives it, with standbys in these phases."""
    view = JobView(
        record=msgspec.structs.replace(JOB.record, job_id=name, state=state),
        standbys=tuple(msgspec.structs.replace(STANDBY, phase=phase) for phase in phases),
        nodes=tuple(NodeRecord(node=node, job_id=name, state="up", use="training") for node in nodes),
    )
    value: dict[str, Any] = plain(view)
    return value


def test_every_job_that_has_not_ended_wants_a_ready_standby() -> None:
    covered = (job("1", "building", "ready"), job("2", state="done"))
    (finding,) = check_standbys(Facts(ON_SLURM, daemon(jobs=covered)))
    assert (finding.level, finding.seen) == ("ok", "live jobs: 1, each with a ready standby or the pool")
    (finding,) = check_standbys(Facts(ON_SLURM, daemon(jobs=(*covered, job("3", "building")))))
    assert finding.level == "warning"
    assert "job 3 has no ready standby (1 not ready)" in finding.seen
    (finding,) = check_standbys(Facts(ON_SLURM))
    assert finding.level == "skipped"


def test_jobs_of_slurm_that_count_on_tmd_in_vain_are_told() -> None:
    def submitted(comment: str, *, state: str = "RUNNING") -> list[str]:
        asked = SlurmJob(
            job_id="7",
            state=state,
            uid=1000,
            user="u",
            restart_count=0,
            end_s=None,
            batch_host="n1",
            nodes=("n1", "n2"),
            reason="",
            admin_comment=comment,
        )
        facts = Facts(ON_SLURM, daemon(jobs=(job("7_1", "ready", nodes=known),)), SlurmFacts(slurm().config, "", jobs=(asked,)))
        return [finding.seen for finding in check_standbys(facts) if finding.level == "warning"]

    known: tuple[str, ...] = ("n3",)
    assert ["no agent of it has reached" in seen for seen in submitted("tmd:standby=1;nodes=1")] == [True]
    assert ["no agent of it has reached" in seen for seen in submitted("site;tmd:standby=1;nodes=2;pool")] == [True]
    assert submitted("site") == []
    assert submitted("tmd:standby=1;nodes=1", state="PENDING") == []
    known = ("n1", "n2")
    assert submitted("tmd:standby=1;nodes=1") == []

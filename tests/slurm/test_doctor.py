"""`tmctl doctor` on a real installation: nothing to complain of where all is well, and each fault told with what ends it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.rig import Daemon
from tests.munge.munged import as_user
from tests.slurm import plugins
from tests.slurm.clients import daemon_settings
from tests.slurm.cluster import MUNGED, SLURMCTLD, SlurmCluster
from tests.slurm.users import BOB, user
from tmd.cli.client import ClientError

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def installed(plugin_folder: Path, events_path: Path) -> Iterator[SlurmCluster]:
    """Two nodes with all that tmd wants of Slurm. The health check only has tmd-health's name."""
    with tempfile.TemporaryDirectory(prefix="tmd-doctor-") as name:
        Path(name).chmod(0o755)
        health = Path(name) / "tmd-health"
        health.write_text("#!/bin/sh\n")
        health.chmod(0o755)
        options = plugins.loaded(plugin_folder, nodes=2, health_check=health, health_check_interval_s=60)
        with plugins.events_go_to(events_path), SlurmCluster(options) as cluster:
            cluster.run("sacctmgr", "-i", "add", "account", "staff")
            yield cluster


@pytest.fixture
def cluster(installed: SlurmCluster) -> Iterator[SlurmCluster]:
    """As it was in the beginning, afterwards too."""
    installed.settle()
    yield installed
    installed.settle()
    if installed.options.slurm_conf:
        installed.reconfigure("")


@pytest.fixture
def environ(cluster: SlurmCluster, events_path: Path) -> dict[str, str]:
    """What a daemon on this cluster is configured by."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return {
        **daemon_settings(cluster),
        "TMD_SLURM_HINT_SOCKET": str(events_path),
        "TMD_SLURM_QUERY_TIMEOUT_S": "3.0",
        "TMD_MUNGE_SOCKET": str(cluster.places.munge_socket),
        "TMD_LISTEN": f"127.0.0.1:{port}",
    }


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path)
    yield made
    made.clean_up()


class Told:
    """One run of `tmctl doctor --strict --json`, as root."""

    def __init__(self, daemon: Daemon, environ: dict[str, str]) -> None:
        command = [sys.executable, "-m", "tmd.cli.main", "--socket", str(daemon.socket), "doctor"]
        path = os.pathsep.join((str(ROOT), str(ROOT / "worker")))
        done = subprocess.run(
            [*command, "--state-dir", str(daemon.state_dir), "--strict", "--json"],
            env=os.environ | environ | {"TMD_RESOURCE_MANAGER": "slurm", "PYTHONPATH": path},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.stdout, done.stderr
        self.code = done.returncode
        self.findings: list[dict[str, Any]] = json.loads(done.stdout)["findings"]

    def wrong(self) -> dict[str, tuple[str, str]]:
        """Point -> level and remedy of what is not well."""
        return {each["point"]: (each["level"], each["remedy"]) for each in self.findings if each["level"] in ("warning", "fault")}


def test_where_all_is_well_there_is_nothing_to_complain_of(
    cluster: SlurmCluster, daemon: Daemon, environ: dict[str, str]
) -> None:
    daemon.start("--resource-manager", "slurm", environ=environ)
    told = Told(daemon, environ)
    assert (told.wrong(), told.code) == ({}, 0)
    assert {each["level"] for each in told.findings} == {"ok"}
    seen = {each["point"]: each["seen"] for each in told.findings}
    assert seen["slurm"].startswith("Slurm {}.{:02}.".format(*cluster.version))
    assert "a job has the standby nodes that --standby=N gave it" in seen["growth"]
    assert "sbatch on this machine has --standby" in seen["spank"]
    assert "the daemon answers on 127.0.0.1" in seen["port"]


def test_what_slurm_conf_lacks_is_told_line_by_line_and_gone_once_it_is_there(
    cluster: SlurmCluster, daemon: Daemon, environ: dict[str, str]
) -> None:
    daemon.start("--resource-manager", "slurm", environ=environ)
    cluster.reconfigure("JobSubmitPlugins=lua\nSchedulerParameters=bf_interval=5")
    told = Told(daemon, environ)
    assert told.code == 2
    assert set(told.wrong()) == {"job submit", "expansion"}
    level, remedy = told.wrong()["job submit"]
    assert (level, remedy.partition(",  ")[0].startswith("JobSubmitPlugins=lua,tmd, then scontrol reconfigure")) == (
        "fault",
        True,
    )
    level, remedy = told.wrong()["expansion"]
    wanted = f"SchedulerParameters=bf_interval=5,permit_job_expansion in {cluster.places.slurm_conf}, then scontrol reconfigure"
    assert (level, remedy) == ("fault", wanted)
    # As the remedies say.
    cluster.reconfigure("JobSubmitPlugins=lua,tmd\nSchedulerParameters=bf_interval=5,permit_job_expansion")
    assert Told(daemon, environ).wrong() == {}


def test_a_pool_that_is_not_there_is_told_and_made_as_the_remedy_says(
    cluster: SlurmCluster, daemon: Daemon, environ: dict[str, str]
) -> None:
    environ |= {"TMD_SLURM_STANDBY_RESERVATION": "standby"}
    daemon.start("--resource-manager", "slurm", environ=environ)
    told = Told(daemon, environ)
    assert set(told.wrong()) == {"pool"}
    level, remedy = told.wrong()["pool"]
    assert level == "fault"
    cluster.run(*remedy.replace("NODES", "n2").replace("ACCOUNTS", "staff").split())
    try:
        told = Told(daemon, environ)
        assert told.wrong() == {}
        seen = {each["point"]: each["seen"] for each in told.findings}
        assert seen["pool"] == "reservation standby has 1 node"
        assert "by expansion" in seen["growth"]
    finally:
        cluster.run("scontrol", "delete", "reservationname=standby")


def test_a_spank_plugin_that_is_not_named_or_cannot_be_loaded_is_told(
    cluster: SlurmCluster, daemon: Daemon, environ: dict[str, str], public_folder: Path
) -> None:
    daemon.start("--resource-manager", "slurm", environ=environ)
    plugstack = cluster.places.etc / "plugstack.conf"
    before = plugstack.read_text()
    broken = public_folder / "spank_tmd.so"
    broken.write_text("no plugin")
    try:
        plugstack.write_text("")
        unnamed = Told(daemon, environ)
        plugstack.write_text(f"optional {broken}\n")
        unloadable = Told(daemon, environ)
    finally:
        plugstack.write_text(before)
    assert {point: level for point, (level, _) in unnamed.wrong().items()} == {"spank": "fault"}
    assert "the line of etc/plugstack.conf" in unnamed.wrong()["spank"][1]
    assert {point: level for point, (level, _) in unloadable.wrong().items()} == {"spank": "fault"}
    assert "make plugins" in unloadable.wrong()["spank"][1]


def test_a_munged_that_is_stopped_is_told_and_stops_no_check(
    cluster: SlurmCluster, daemon: Daemon, environ: dict[str, str]
) -> None:
    daemon.start("--resource-manager", "slurm", environ=environ)
    cluster.stop_part(MUNGED)
    told = Told(daemon, environ)
    assert told.code == 2
    assert told.wrong()["munge"] == ("fault", "start it there: systemctl start munge")
    level, remedy = told.wrong()["slurm"]
    assert (level, "munge" in remedy) == ("fault", True)
    well = {each["point"] for each in told.findings if each["level"] == "ok"}
    assert {"configuration", "daemon", "version", "state directory", "socket", "port", "standbys"} <= well
    cluster.start_part(MUNGED)
    assert Told(daemon, environ).wrong() == {}


def test_a_slurmctld_that_hangs_is_told_by_the_deadline(cluster: SlurmCluster, daemon: Daemon, environ: dict[str, str]) -> None:
    daemon.start("--resource-manager", "slurm", environ=environ)
    cluster.signal_part(SLURMCTLD, signal.SIGSTOP)
    try:
        told = Told(daemon, environ)
    finally:
        cluster.signal_part(SLURMCTLD, signal.SIGCONT)
    assert {point: level for point, (level, _) in told.wrong().items()} == {"slurm": "fault"}
    (seen,) = [each["seen"] for each in told.findings if each["level"] == "fault"]
    assert seen == "scontrol has not answered in 3 s"


def test_a_daemon_whose_user_has_no_rights_in_slurm_is_told_until_it_has_them(
    cluster: SlurmCluster, daemon: Daemon, environ: dict[str, str]
) -> None:
    daemon.start("--resource-manager", "slurm", environ=environ, prefix=as_user(user(BOB).uid))

    def rights() -> tuple[str, str]:
        return Told(daemon, environ).wrong()["rights"]

    assert rights() == ("fault", f"sacctmgr add user {BOB} account=ACCOUNT adminlevel=Admin")
    with pytest.raises(ClientError, match="Invalid user id"):
        daemon.client.post("/v1/nodes/n1/drain", {"reason": "x"})
    cluster.run("sacctmgr", "-i", "add", "user", BOB, "account=staff")
    assert rights() == ("fault", f"sacctmgr modify user {BOB} set adminlevel=Admin")
    cluster.run("sacctmgr", "-i", "modify", "user", BOB, "set", "adminlevel=Operator")
    assert rights()[0] == "warning"
    cluster.run("sacctmgr", "-i", "modify", "user", BOB, "set", "adminlevel=Admin")
    told = Told(daemon, environ)
    assert (told.wrong(), told.code) == ({}, 0)


def test_a_daemon_that_does_not_run_is_told_and_slurm_is_looked_at_all_the_same(
    cluster: SlurmCluster, daemon: Daemon, environ: dict[str, str]
) -> None:
    told = Told(daemon, environ)
    assert told.code == 2
    assert set(told.wrong()) == {"daemon", "state directory"}
    seen = {each["point"]: each["level"] for each in told.findings}
    assert (seen["rights"], seen["hints"], seen["standbys"]) == ("skipped", "skipped", "skipped")
    assert (seen["port"], seen["job submit"], seen["munge"], seen["clock"]) == ("ok", "ok", "ok", "ok")

"""What a test cluster is configured by: slurm.conf and the files beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

#: Nodes are n1, n2, ... at 127.0.0.11, 127.0.0.12, ...: each has an address of its own on the loopback.
FIRST_ADDRESS = 11
#: Linux gives connections those from 32768.
PORTS = range(12000, 32000)
#: With which user and password slurmdbd comes to the database, and what that is called.
DATABASE_USER = DATABASE_PASSWORD = DATABASE = "slurm_acct"


def other_slurm() -> Path | None:
    """Where another Slurm than the machine's is installed, for all tests to run on: bin/, sbin/ and lib/slurm/ are below."""
    given = os.environ.get("TMD_TEST_SLURM_PREFIX")
    return Path(given) if given else None


def plugin_dir(prefix: Path | None) -> Path:
    """Where that Slurm, or the machine's, has its own plugins."""
    if prefix is not None:
        return prefix / "lib" / "slurm"
    found = sorted(Path("/usr/lib").glob("*/slurm-wlm"))
    assert found, "Slurm's plugins are missing: run scripts/setup-slurm"
    return found[0]


def installed_release(prefix: Path | None) -> str:
    """Of the Slurm there, or of the machine's: "22.05.8" for example."""
    folders = ([str(prefix / "sbin")] if prefix is not None else []) + [os.environ.get("PATH", ""), "/usr/sbin"]
    program = shutil.which("slurmctld", path=os.pathsep.join(folders))
    assert program is not None, "these tests need a real Slurm, slurmctld is missing: run scripts/setup-slurm"
    text = subprocess.run([program, "-V"], capture_output=True, text=True, timeout=20).stdout
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    assert found is not None, f"slurmctld -V says {text!r}"
    return found[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What may differ between clusters."""

    nodes: int = 4
    cpus_per_node: int = 4
    #: Gres of each node, as in "gpu:2"; gres.conf comes with `files`.
    gres: str = ""
    #: More lines of slurm.conf. A key that is already there is replaced by it.
    slurm_conf: str = ""
    #: plugstack.conf, as text: which SPANK plugins are loaded.
    plugstack: str = ""
    #: JobSubmitPlugins, as in "lua,tmd".
    job_submit_plugins: str = ""
    #: Folders of plugins that come before Slurm's own.
    plugin_dirs: tuple[Path, ...] = ()
    health_check: Path | None = None
    health_check_interval_s: int = 5
    #: More files beside slurm.conf, job_submit.lua for example: name -> text.
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: None: the machine's Slurm.
    prefix: Path | None = dataclasses.field(default_factory=other_slurm)

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Places:
    """Where the parts of one cluster are: folder and ports, free when they were chosen."""

    folder: Path
    slurmctld_port: int
    slurmdbd_port: int
    database_port: int
    slurmd_ports: tuple[int, ...]

    @property
    def etc(self) -> Path:
        return self.folder / "etc"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.folder / "munge" / "munge.socket"

    @property
    def shared(self) -> Path:
        """Anybody may write here: a shared file system, as far as jobs can tell."""
        return self.folder / "shared"

    def slurmd_log(self, node: str) -> Path:
        return self.log / f"slurmd.{node}.log"


def choose_places(folder: Path, options: Options) -> Places:
    ports = _free_ports(3 + options.nodes)
    return Places(
        folder=folder,
        slurmctld_port=ports[0],
        slurmdbd_port=ports[1],
        database_port=ports[2],
        slurmd_ports=ports[3:],
    )


def _free_ports(count: int) -> tuple[int, ...]:
    """Below those that the kernel gives to connections, as it might give one away before the daemon takes it."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            ports.append(port)
        if len(ports) == count:
            return tuple(ports)
    raise AssertionError(f"{count} free ports are wanted between {PORTS.start} and {PORTS.stop}, there are {len(ports)}")


def write_all(options: Options, places: Places, version: tuple[int, int]) -> None:
    """Makes the folders too."""
    for name in ("etc", "log", "run", "state", "spool", "munge", "shared"):
        (places.folder / name).mkdir(exist_ok=True)
    places.shared.chmod(0o1777)
    for name in options.node_names:
        (places.folder / "spool" / name).mkdir(exist_ok=True)
    places.slurm_conf.write_text(slurm_conf(options, places))
    # Nothing is confined, so that a container without control groups of its own will do.
    plugin = "disabled" if version >= (23, 11) else "cgroup/v1"
    (places.etc / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
    dbd = places.etc / "slurmdbd.conf"
    dbd.write_text(_slurmdbd_conf(places))
    dbd.chmod(0o600)
    if options.plugstack:
        (places.etc / "plugstack.conf").write_text(options.plugstack)
    for name, text in options.files.items():
        (places.etc / name).write_text(text)


def slurm_conf(options: Options, places: Places) -> str:
    host = socket.gethostname().partition(".")[0]
    keys = {
        "ClusterName": "tmd",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": places.slurmctld_port,
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={places.munge_socket}",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "StateSaveLocation": places.folder / "state",
        "SlurmdSpoolDir": places.folder / "spool" / "%n",
        "SlurmctldPidFile": places.folder / "run" / "slurmctld.pid",
        "SlurmdPidFile": places.folder / "run" / "slurmd.%n.pid",
        "SlurmctldLogFile": places.log / "slurmctld.log",
        "SlurmdLogFile": places.log / "slurmd.%n.log",
        "SlurmctldDebug": "verbose",
        "SlurmdDebug": "verbose",
        "LogTimeFormat": "iso8601_ms",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SchedulerType": "sched/backfill",
        # Without these a job that waits is looked at each half minute.
        "SchedulerParameters": "permit_job_expansion,bf_interval=5,sched_interval=5",
        "ReturnToService": 1,
        # The least that Slurm allows a node to be silent is long beside a test; what sees a loss sooner is tmd's own.
        "SlurmdTimeout": 10,
        "SlurmctldTimeout": 30,
        "InactiveLimit": 0,
        "KillWait": 5,
        "WaitTime": 0,
        "MessageTimeout": 10,
        "TCPTimeout": 2,
        "JobRequeue": 0,
        "TreeWidth": 65533,
        "SlurmdParameters": "config_overrides",
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": "127.0.0.1",
        "AccountingStoragePort": places.slurmdbd_port,
        "AccountingStoragePass": places.munge_socket,
        "PluginDir": ":".join(map(str, (*options.plugin_dirs, plugin_dir(options.prefix)))),
    }
    if options.job_submit_plugins:
        keys["JobSubmitPlugins"] = options.job_submit_plugins
    if options.health_check is not None:
        keys["HealthCheckProgram"] = options.health_check
        keys["HealthCheckInterval"] = options.health_check_interval_s
    replaced = {line.partition("=")[0].strip().lower() for line in options.slurm_conf.splitlines()}
    lines = [f"{key}={value}" for key, value in keys.items() if key.lower() not in replaced]
    shape = f"CPUs={options.cpus_per_node} CoresPerSocket={options.cpus_per_node} RealMemory=4000 State=UNKNOWN"
    shape += f" Gres={options.gres}" if options.gres else ""
    for index, (name, port) in enumerate(zip(options.node_names, places.slurmd_ports, strict=True)):
        address = f"127.0.0.{FIRST_ADDRESS + index}"
        lines.append(f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} {shape}")
    lines.append("PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO")
    return "\n".join((*lines, options.slurm_conf, ""))


def _slurmdbd_conf(places: Places) -> str:
    keys = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={places.munge_socket}",
        "DbdHost": socket.gethostname().partition(".")[0],
        "DbdAddr": "127.0.0.1",
        "DbdPort": places.slurmdbd_port,
        "SlurmUser": "root",
        "PidFile": places.folder / "run" / "slurmdbd.pid",
        "LogFile": places.log / "slurmdbd.log",
        "DebugLevel": "info",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "127.0.0.1",
        "StoragePort": places.database_port,
        "StorageUser": DATABASE_USER,
        "StoragePass": DATABASE_PASSWORD,
        "StorageLoc": DATABASE,
    }
    return "".join(f"{key}={value}\n" for key, value in keys.items())

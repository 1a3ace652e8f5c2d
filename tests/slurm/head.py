"""tmd as a site runs it: the daemon is a user of its own, an administrator in Slurm and nothing else; jobs and tmctl come over
TCP and prove who they are by munge."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.e2e.cluster import DEADLINE_S, ROOT
from tests.slurm.cluster import SlurmCluster
from tests.slurm.stack import Daemon, SlurmStack
from tests.slurm.users import ALICE, DAEMON
from tmd_worker.native import building


@contextlib.contextmanager
def opened_head(slurm: SlurmCluster, **settings: str) -> Iterator[Head]:
    """Whatever is started meanwhile has what it needs in its environment. `settings`: keys of [slurm] for this daemon."""
    # Another one may have been here before, to whom that was no news either.
    slurm.run("sacctmgr", "-i", "add", "account", "staff", check=False)
    slurm.run("sacctmgr", "-i", "add", "user", DAEMON, "account=staff", "adminlevel=Admin", check=False)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="tmd-slurm-daemon-") as name:
        patch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "worker"), sysconfig.get_path("purelib"))))
        patch.setenv("OMP_NUM_THREADS", "1")
        shutil.chown(name, DAEMON)
        with Head(slurm, Path(name), _python_for_all(slurm), settings) as head:
            _lend_library(slurm)
            yield head


def _lend_library(slurm: SlurmCluster) -> None:
    """ALICE has no home to compile the ranks' library into, so hers is a copy of this user's; BOB's ranks do without."""
    folder = slurm.places.shared / "cache" / "tmd"
    folder.mkdir(parents=True, exist_ok=True)
    copy = shutil.copy(building.cached(), folder)
    folder.chmod(0o700)
    for path in (folder, copy):
        shutil.chown(path, ALICE)


def _python_for_all(slurm: SlurmCluster) -> Path:
    """An interpreter that every user may run: this one may lie in somebody's home."""
    system = Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")
    for python in (Path(sys.executable), system):
        with contextlib.suppress(PermissionError, FileNotFoundError):
            command = (str(python), "-c", "import torch, tmd_worker")
            if slurm.run(*command, user=ALICE, check=False, timeout_s=DEADLINE_S).returncode == 0:
                return python
    raise AssertionError(
        f"{ALICE} can run neither {sys.executable} nor {system} with what is in {ROOT}: every user must be able to read it"
    )


class Head(SlurmStack):
    """The daemon as its own user; jobs and tmctl come over TCP."""

    def __init__(self, slurm: SlurmCluster, folder: Path, python: Path, of_slurm: Mapping[str, str]) -> None:
        self.python = python
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.munge = {"TMD_MUNGE_SOCKET": str(slurm.places.munge_socket)}
        listens = {"TMD_LISTEN": self.address, "TMD_TCP_AUTH": "munge", "TMD_SLURM_HINT_SOCKET": str(folder / "hints.sock")}
        settings = listens | self.munge | {f"TMD_SLURM_{name.upper()}": value for name, value in of_slurm.items()}
        daemon = Daemon(slurm, folder, user=DAEMON, settings=settings, python=python)
        of_jobs = {"TMD_DAEMON_USER": DAEMON, "XDG_CACHE_HOME": str(slurm.places.shared / "cache")}
        super().__init__(slurm, folder, daemon=daemon, settings=self.munge | of_jobs, python=python)

    def environment(self) -> dict[str, str]:
        return super().environment() | {"TMD_DAEMON": f"http://{self.address}"}

    def python_as(self, who: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A program of this tree as this user, with all that a job knows of the daemon."""
        return self.slurm.run(str(self.python), *arguments, user=who, env=self.environment(), check=False, timeout_s=DEADLINE_S)

    def tmctl_as(self, who: str, *arguments: str) -> tuple[int, str]:
        """From afar: its exit code and what it printed."""
        done = self.python_as(who, "-m", "tmd.cli.main", "--daemon", f"http://{self.address}", *arguments)
        return done.returncode, done.stdout + done.stderr

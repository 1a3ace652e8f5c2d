"""Asks the daemon and Slurm for the facts. Every question has a deadline; that nobody answers is a finding, no exception."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import struct
import subprocess
import time
from pathlib import Path

from tmd.cli.client import Client, ClientError
from tmd.doctor.facts import DaemonFacts, SlurmFacts, parse_clock
from tmd.doctor.findings import Finding, fault
from tmd.nodes.base import QueryFailed, ResourceManagerError
from tmd.nodes.slurm.choice import make_client
from tmd.nodes.slurm.client import failure
from tmd.nodes.slurm.commands import command_env
from tmd.nodes.slurm.configuration import parse_config
from tmd.nodes.slurm.records import SlurmJob, SlurmReservation
from tmd.nodes.slurm.settings import SlurmSettings

#: The daemon answers at once or not at all.
DAEMON_TIMEOUT_S = 10.0
_CREDENTIALS = struct.Struct("3i")


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """What a command has printed."""

    code: int
    text: str
    errors: str


def slurm_command(settings: SlurmSettings, program: str, *arguments: str) -> Output:
    """Runs one of Slurm's commands as tmd does. Raises QueryFailed if it is not there or has not ended at its deadline."""
    path = str(Path(settings.bin_dir, program)) if settings.bin_dir else program
    try:
        done = subprocess.run(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=settings.query_timeout_s,
            env=command_env(settings),
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        raise QueryFailed(
            f"{program} has not answered in {settings.query_timeout_s:g} s", "see that slurmctld and munged run: scontrol ping"
        ) from None
    except OSError as error:
        raise QueryFailed(f"{program}: {error}", "name the directory of Slurm's commands: bin_dir in [slurm]") from None
    return Output(done.returncode, done.stdout, done.stderr)


def ask_daemon(path: Path) -> DaemonFacts | Finding:
    """What the daemon at this socket says of itself, or that it does not."""
    client = Client(path, timeout_s=DAEMON_TIMEOUT_S)
    try:
        status = client.get("/v1/status")
        jobs = client.get("/v1/jobs?limit=1")["jobs"]
        return DaemonFacts(_owner(path), status, tuple(jobs))
    except ClientError as error:
        return fault("daemon", str(error), error.remedy)
    except OSError as error:
        return fault("daemon", f"the daemon at {path} went away: {error}", "try again; its log may say more")


def _owner(path: Path) -> int:
    """Whose process listens there, as the kernel knows it. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(DAEMON_TIMEOUT_S)
        connection.connect(str(path))
        _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def ask_slurm(settings: SlurmSettings) -> SlurmFacts | Finding:
    """What slurmctld says, asked as the daemon asks, or that it does not."""
    try:
        version = _said(slurm_command(settings, "scontrol", "--version"), "scontrol --version").strip()
        before_s = time.time()
        text = _said(slurm_command(settings, "scontrol", "show", "config"), "scontrol show config")
        after_s = time.time()
        client, jobs, reservations = asyncio.run(_through_client(settings))
    except ResourceManagerError as error:
        return fault("slurm", str(error), error.remedy or "see conf and bin_dir in [slurm], and that this works: scontrol ping")
    except ValueError as error:
        return fault("slurm", str(error), "see client, bin_dir and conf in [slurm]")
    return SlurmFacts(
        parse_config(text), client, version, tuple(jobs), parse_clock(text), (before_s, after_s), tuple(reservations)
    )


async def _through_client(settings: SlurmSettings) -> tuple[str, list[SlurmJob], list[SlurmReservation]]:
    """Raises ValueError if the configured way cannot be gone here, ResourceManagerError."""
    client = await make_client(settings)
    try:
        return client.description, await client.jobs(), await client.reservations()
    finally:
        await client.close()


def _said(output: Output, what: str) -> str:
    """Raises ResourceManagerError for a command that has failed."""
    if output.code != 0:
        raise failure(what, output.errors or output.text)
    return output.text

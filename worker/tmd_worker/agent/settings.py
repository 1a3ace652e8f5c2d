"""What the agent was told, resolved: command line first, then TMD_* variables, then what Slurm says, then the machine."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.machinery
import os
import re
import shutil
import socket
import sys
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tmd.protocol.control import TransportName
from tmd_worker.agent import slurm
from tmd_worker.agent.slurm import SlurmStep

if TYPE_CHECKING:
    from tmd_worker.agent.proof import MungeProof

_HASH_CHUNK_BYTES = 1 << 20
#: A token is much shorter.
_TOKEN_BYTES = 1024


class SettingsRefused(ValueError):
    """Something the user said cannot work; the text says what, why and what to do."""


# -------------------------------------------------------------------- what each rank runs


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """The user's program and its arguments."""

    kind: Literal["script", "module", "program"]
    target: str
    arguments: tuple[str, ...]
    #: The file behind `target`, if it can be told without running anything.
    file: Path | None

    def boot_arguments(self) -> list[str]:
        """As tmd_worker.boot takes them."""
        flag = {"script": [], "module": ["-m"], "program": ["--exec"]}[self.kind]
        return [*flag, self.target, *self.arguments]

    def digest(self) -> str:
        """SHA-256 of the file, empty if there is none to read."""
        if self.file is None:
            return ""
        sha256 = hashlib.sha256()
        with self.file.open("rb") as script:
            while chunk := script.read(_HASH_CHUNK_BYTES):
                sha256.update(chunk)
        return sha256.hexdigest()


def resolve_launch(command: tuple[str, ...], *, module: bool, no_python: bool) -> Launch:
    """Raises SettingsRefused if the program is not there, before any rank is started for nothing."""
    if not command:
        raise SettingsRefused("no script given; example: tmd-run --standalone --nproc-per-node 2 train.py")
    if module and no_python:
        raise SettingsRefused("--module and --no-python exclude each other; a module is always run by Python")
    target, arguments = command[0], command[1:]
    if module:
        return Launch("module", target, arguments, _find_module(target))
    if no_python:
        found = shutil.which(target)
        if found is None:
            raise SettingsRefused(f"program {target!r} is not an executable file on PATH; give its path")
        return Launch("program", target, arguments, Path(found))
    path = Path(target)
    if path.is_dir():
        path = path / "__main__.py"
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise SettingsRefused(
            f"script {target!r} cannot be read: {error.strerror}; check the path (relative to {os.getcwd()}) and its permissions"
        ) from None
    return Launch("script", target, arguments, path)


def _find_module(name: str) -> Path | None:
    """The file of a module, found without importing anything."""
    search = [os.getcwd(), *sys.path]
    spec: importlib.machinery.ModuleSpec | None = None
    parts = name.split(".")
    for depth in range(len(parts)):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: depth + 1]), search)
        if spec is None:
            break
        search = list(spec.submodule_search_locations or [])
    if spec is None:
        raise SettingsRefused(f"module {name!r} is not on the Python path of {sys.executable}; install it or set PYTHONPATH")
    if spec.submodule_search_locations:
        main = Path(next(iter(spec.submodule_search_locations))) / "__main__.py"
        if not main.is_file():
            raise SettingsRefused(f"package {name!r} has no __main__.py, so it cannot be run with -m; name one of its modules")
        return main
    return Path(spec.origin) if spec.origin and Path(spec.origin).is_file() else None


# -------------------------------------------------------------------- where the output goes


@dataclasses.dataclass(frozen=True, slots=True)
class StreamChoice:
    """torchrun's `0|1|2|3` for all local ranks, or `0:1,3:3` per local rank: bit 1 is stdout, bit 2 stderr."""

    default: int = 0
    by_local_rank: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, option: str) -> StreamChoice:
        """Raises SettingsRefused."""
        if re.fullmatch("[0-3]", text):
            return cls(int(text))
        if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
            return cls(0, {int(rank): int(bits) for rank, bits in (pair.split(":") for pair in text.split(","))})
        raise SettingsRefused(f"{option} {text!r} is not understood; say 0 (none), 1 (stdout), 2 (stderr), 3 (both), or 0:3,1:1")

    def has(self, local_rank: int, descriptor: int) -> bool:
        return bool(self.by_local_rank.get(local_rank, self.default) & descriptor)

    def any(self) -> bool:
        return bool(self.default) or any(self.by_local_rank.values())


@dataclasses.dataclass(frozen=True, slots=True)
class LogSettings:
    #: Folder of this run's files, None: no files.
    folder: Path | None = None
    redirects: StreamChoice = StreamChoice()
    tee: StreamChoice = StreamChoice()

    def sinks(self, local_rank: int, descriptor: int) -> tuple[bool, bool]:
        """(into a file, to the console) for stdout (1) or stderr (2) of this local rank."""
        if self.folder is None:
            return False, True
        teed = self.tee.has(local_rank, descriptor)
        redirected = self.redirects.has(local_rank, descriptor) and not teed
        return teed or redirected, not redirected

    def folder_of(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / file_name(name)


def file_name(text: str) -> str:
    """`text` with all that could leave its folder or trouble a shell replaced."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip(".") or "_"


# -------------------------------------------------------------------- how many, where, for whom


def resolve_nnodes(given: str | None, standby: int, environment: Mapping[str, str]) -> int:
    """Nodes that train. Slurm counts the standby nodes too. Raises SettingsRefused."""
    if given is not None:
        match = re.fullmatch(r"(\d+)(?::(\d+))?", given)
        if match is None or int(match[1]) < 1:
            raise SettingsRefused(f"--nnodes {given!r} is not understood; say a number of at least 1 (of N:M the N is taken)")
        return int(match[1])
    if "TMD_NNODES" in environment:
        return resolve_nnodes(environment["TMD_NNODES"], 0, {})
    slurm = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES")
    if slurm is None:
        return 1
    if int(slurm) - standby < 1:
        raise SettingsRefused(f"Slurm gave {slurm} nodes and {standby} are to be standby, so none is left to train; ask for more")
    return int(slurm) - standby


def resolve_nproc(given: str) -> int:
    """Processes per node. Raises SettingsRefused."""
    if re.fullmatch(r"-?\d+", given):
        if int(given) < 1:
            raise SettingsRefused(f"--nproc-per-node {given} starts no process; say at least 1, or auto, gpu or cpu")
        return int(given)
    gpus = count_gpus(os.environ)
    if given == "gpu" and gpus == 0:
        raise SettingsRefused("--nproc-per-node gpu: no GPU is visible on this node; say a number, or cpu")
    if given in ("gpu", "auto") and gpus:
        return gpus
    if given in ("cpu", "auto"):
        return len(os.sched_getaffinity(0))
    raise SettingsRefused(f"--nproc-per-node {given!r} is not understood; say a number, auto, gpu or cpu")


def count_gpus(environment: Mapping[str, str]) -> int:
    """NVIDIA GPUs that a rank would see, without loading torch."""
    folder = Path("/proc/driver/nvidia/gpus")
    present = len(list(folder.iterdir())) if folder.is_dir() else 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([device for device in visible.split(",") if device.strip() not in ("", "-1")]))


def resolve_job_id(given: str | None, environment: Mapping[str, str]) -> str | None:
    """Outside Slurm somebody has to give one."""
    return given or slurm.life(environment) or None


def resolve_node_index(given: int | None, environment: Mapping[str, str]) -> int | None:
    """A launched agent is a step of its own, whose numbers say nothing about its place in the job."""
    if given is None and "SLURM_NODEID" in environment and slurm.LAUNCHED not in environment:
        return int(environment["SLURM_NODEID"])
    return given


def resolve_step(nnodes: int, srun_options: str, environment: Mapping[str, str]) -> SlurmStep | None:
    """Raises SettingsRefused."""
    try:
        return slurm.own_step(environment, nnodes, srun_options)
    except ValueError as error:
        raise SettingsRefused(f"--srun-options {srun_options!r} are not understood ({error}); write them as in a shell") from None


def resolve_transport(name: str, port_range: tuple[int, int] | None) -> TransportName:
    """What carries the collectives. Raises SettingsRefused."""
    if name == "delta":
        return "delta"
    if name == "gloo":
        if port_range is not None:
            raise SettingsRefused(
                "--transport gloo and --port-range exclude each other: gloo takes whatever port is free; leave one of them out"
            )
        return "gloo"
    if name == "nccl":
        raise SettingsRefused(
            "--transport nccl: sessions keep their state on the CPU so far, so there is nothing that NCCL could carry; "
            "bench/gpu/inner_groups.py tries its groups on GPUs"
        )
    raise SettingsRefused(f"--transport {name!r} is not known; say delta (tmd's own links) or gloo")


@dataclasses.dataclass(frozen=True, slots=True)
class DaemonAddress:
    """Where the daemon listens: `unix:/path` or `http://host:port`."""

    text: str
    unix_path: str | None
    url: str

    @classmethod
    def parse(cls, text: str) -> DaemonAddress:
        """Raises SettingsRefused."""
        if text.startswith("unix:") and len(text) > len("unix:"):
            return cls(text, text.removeprefix("unix:"), "http://tmd")
        try:
            parts = urllib.parse.urlsplit(text)
            usable = parts.scheme == "http" and parts.hostname and parts.port and parts.path in ("", "/")
        except ValueError:
            usable = False
        if not usable:
            raise SettingsRefused(f"daemon address {text!r} is not understood; say unix:/run/tmd/tmd.sock or http://head:7070")
        return cls(text, None, text.rstrip("/"))

    def own_address(self) -> str:
        """This machine's address as seen on the way to the daemon: what peers on the same network can reach."""
        if self.unix_path is not None:
            return "127.0.0.1"
        parts = urllib.parse.urlsplit(self.url)
        try:
            family, kind, _, _, address = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            raise SettingsRefused(
                f"no address for this node's ranks: the daemon's host {parts.hostname!r} cannot be resolved or reached "
                f"({error}); give --host"
            ) from None


def read_token(path: str | None) -> str:
    """The proof of the job's owner. Raises SettingsRefused."""
    if path is None:
        return ""
    try:
        with Path(path).open("rb") as file:
            token = file.read(_TOKEN_BYTES + 1).decode("ascii").strip()
    except OSError as error:
        raise SettingsRefused(
            f"token file {path!r} cannot be read: {error}; without it the daemon cannot tell whose job this is"
        ) from None
    except UnicodeDecodeError:
        token = "\0"
    if len(token) > _TOKEN_BYTES or not token.isprintable():
        raise SettingsRefused(f"token file {path!r} holds no token; have the job's owner write it again: tmctl job token JOB")
    if not token:
        raise SettingsRefused(f"token file {path!r} is empty; have the job's owner write the token again")
    return token


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DirectedSettings:
    """An agent with a daemon."""

    launch: Launch
    logs: LogSettings
    daemon: DaemonAddress
    job_id: str
    node: str
    node_index: int | None
    #: A numeric address of this machine.
    host: str
    #: First and last port that its ranks may listen on; None: any.
    port_range: tuple[int, int] | None
    transport: TransportName
    nnodes: int
    nproc_per_node: int
    labels: Mapping[str, str]
    token: str
    #: Over TCP where there is munge.
    proof: MungeProof | None
    master_addr: str
    master_port: int
    #: It was started by another agent of its job, not by the job's own script.
    launched: bool = False
    #: What it starts others with; None: it cannot.
    step: SlurmStep | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlainSettings:
    """A launcher without a daemon."""

    launch: Launch
    logs: LogSettings
    run_id: str
    nnodes: int
    nproc_per_node: int
    node_rank: int
    master_addr: str
    master_port: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """One process that rehearses, and no job."""

    launch: Launch
    #: What the script is told.
    world_size: int
    as_json: bool

    def command(self) -> list[str]:
        """What this process becomes."""
        options = [*(["--json"] if self.as_json else []), "--world-size", str(self.world_size)]
        return [sys.executable, "-u", "-m", "tmd_worker.check", *options, *self.launch.boot_arguments()]


def default_run_id() -> str:
    return f"run-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"

"""Containers of real Linux namespaces, as container runtimes make them, without an image: mounts, pids, host name and System V
IPC of their own, an own empty /dev/shm and /run, and neither libmunge nor munged's socket anywhere.

A container ends with `kill`, whatever runs in it: the kernel kills all processes of a pid namespace with its first one.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
from pathlib import Path

import psutil

from tests.munge.munged import ROOT, environment

#: For what starts Python on a busy machine.
DEADLINE_S = 120.0
#: All have the same name, as copies of one image may.
HOST_NAME = "box"
#: The user as whom a process in a user namespace of its own sees itself; outside it is root.
USER_INSIDE = 54103
#: What hides is a mount, of which nobody outside knows. $1: folders with libmunge, by spaces; $2: munged's folder.
_FURNISH = """
set -eu
mount -t tmpfs none /dev/shm
mount -t tmpfs none /run
mount -t tmpfs none "$2"
mount -t tmpfs none /mnt
hostname box
number=0
for folder in $1; do
    number=$((number + 1))
    mkdir -p "/mnt/$number/upper" "/mnt/$number/work"
    mount -t overlay overlay -o "lowerdir=$folder,upperdir=/mnt/$number/upper,workdir=/mnt/$number/work" "$folder"
    rm "$folder"/libmunge.so*
done
shift 2
exec "$@"
"""


def library_folders() -> set[str]:
    """Where this machine has libmunge."""
    known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
    return {os.path.dirname(os.path.realpath(path)) for path in re.findall(r"=> (\S*/libmunge\.so\S*)", known)}


class Container:
    """One container, in which one command runs as the first process.

    `own_user`: in a user namespace of its own as well, without any right over this machine. `network`: its network namespace,
    the machine's without one.
    """

    def __init__(
        self, command: list[str], *, munged_folder: Path, log: Path, own_user: bool = False, network: Network | None = None
    ) -> None:
        self.log = log
        enter = ["ip", "netns", "exec", network.name] if network is not None else []
        spaces = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        furnish = ["sh", "-c", _FURNISH, "sh", " ".join(library_folders()), str(munged_folder)]
        user = ["unshare", "--user", f"--map-user={USER_INSIDE}", f"--map-group={USER_INSIDE}", "--"] if own_user else []
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*enter, *spaces, *furnish, *user, *command],
                cwd=ROOT,
                env=environment(OMP_NUM_THREADS="1", HOME=str(Path.home())),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def end(self) -> int:
        """The exit code of its first process, once that has ended by itself."""
        return self.process.wait(DEADLINE_S)

    def first(self) -> psutil.Process:
        """Its first process, as seen from outside."""
        (first,) = psutil.Process(self.process.pid).children()
        return first

    def pid_outside(self, pid: int) -> int:
        """The pid on this machine of the process that is `pid` in the container."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            inside = re.search(r"^NSpid:.*\s(\d+)$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
            if inside is not None and int(inside[1]) == pid:
                return process.pid
        raise AssertionError(f"no process {pid} in this container: {self.said}")

    def kill(self) -> None:
        """At once and as a whole, as if its machine had lost power."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(DEADLINE_S)


class Network:
    """A network namespace with one link to this machine, which has `outside` as its address there. Use as a context manager."""

    def __init__(self) -> None:
        self.name = f"tmd-{secrets.token_hex(4)}"
        self._link = f"tmd{secrets.token_hex(4)}"
        number = secrets.randbelow(1 << 15) * 4
        third, fourth = divmod(number % (1 << 16), 256)
        network = f"198.{18 + (number >> 16)}.{third}"  # kept for tests of networks (RFC 2544)
        self.outside, self.inside = f"{network}.{fourth + 1}", f"{network}.{fourth + 2}"

    def __enter__(self) -> Network:
        _ip("netns", "add", self.name)
        _ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _ip("addr", "add", f"{self.outside}/30", "dev", self._link)
        _ip("link", "set", self._link, "up")
        _ip("-n", self.name, "addr", "add", f"{self.inside}/30", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", self.name, "link", "set", device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        _ip("netns", "delete", self.name)  # the link ends with it


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=DEADLINE_S)


def shared_memory(pid: int) -> set[str]:
    """Inodes of the memory that this process shares by tmd's links."""
    return set(re.findall(r"(\d+) +/memfd:tmd-link", Path(f"/proc/{pid}/maps").read_text()))

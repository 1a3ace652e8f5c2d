"""Virtual machines with soft RoCE: a stock kernel, an initrd made here, and this machine's own files, read-only below an overlay.

Contract: pure emulation (`-accel tcg`), so it needs nothing of the machine; KVM is not used even where there is one, so that it
is the same everywhere. What happens inside is known by the lines on the serial console alone: qemu's exit code says nothing. The
virtual machines end with `close`, and with this process, however it ends. Their consoles are kept in out/rdma.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import lzma
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONSOLES = ROOT / "out/rdma"
KERNEL = CONSOLES / "kernel"
QEMU = "qemu-system-x86_64"
BUSYBOX = Path("/bin/busybox")
RESULT = "RESULT "
#: A machine that has ended may still be read to its last line.
ENDED_S = 10.0
MEMORY_MIB = 2048
#: Everything that can be emulated, but for string instructions: copies with them are emulated byte by byte.
CPU = "max,-erms,-fsrm"
#: What the guests need of the kernel, besides what these need themselves.
MODULES = (
    "virtio_pci",
    "virtio_net",
    "9pnet_virtio",
    "9p",
    "overlay",
    "virtio_rng",
    "crc32c_generic",
    "crc32_generic",
    "crc32_pclmul",
)
MODULES_RDMA = ("rdma_rxe", "ib_uverbs", "rdma_ucm")
_APPLETS = ("sh", "mount", "insmod", "mkdir", "switch_root", "cat", "echo", "poweroff")
_SETUP = "run scripts/setup-rdma"
_INIT = """#!/bin/sh
export PATH=/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
while read module; do insmod /modules/$module || echo "insmod $module failed"; done < /modules/order
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=1048576 host /host || poweroff -f
mount -t tmpfs -o size=80% over /over; mkdir -p /over/upper /over/work
mount -t overlay -o lowerdir=/host,upperdir=/over/upper,workdir=/over/work overlay /root || poweroff -f
mount -t proc proc /root/proc; mount -t sysfs sys /root/sys; mount -t devtmpfs dev /root/dev
mkdir -p /root/dev/shm /root/dev/pts; mount -t tmpfs shm /root/dev/shm; mount -t devpts pts /root/dev/pts
mount -t tmpfs run /root/run; mount -t tmpfs tmp /root/tmp
@MOUNT_CLONE@
exec switch_root /root /bin/sh -c 'exec "$START" </dev/console >/dev/console 2>&1'
"""


def kernel() -> tuple[Path, Path]:
    """(image, its modules' folder)."""
    images = sorted(KERNEL.glob("boot/vmlinuz-*"))
    assert images, f"there is no kernel in {KERNEL}: {_SETUP}"
    return images[-1], KERNEL / "lib/modules" / images[-1].name.removeprefix("vmlinuz-")


def modules_in_order(folder: Path, names: Iterable[str]) -> list[Path]:
    """The files to load, each after those that it needs. What is built into the kernel has none."""
    needs: dict[str, list[str]] = {}
    for line in (folder / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        needs[path] = rest.split()
    by_name = {Path(path).name.partition(".")[0].replace("-", "_"): path for path in needs}
    built_in = {Path(line).stem.replace("-", "_") for line in (folder / "modules.builtin").read_text().splitlines()}
    ordered: list[str] = []

    def add(path: str) -> None:
        for needed in reversed(needs[path]):
            if needed not in ordered:
                add(needed)
        if path not in ordered:
            ordered.append(path)

    for name in names:
        assert name in by_name or name in built_in, f"the kernel in {folder} has no module {name}"
        if name in by_name:
            add(by_name[name])
    return [folder / path for path in ordered]


class Archive:
    """A cpio archive as the kernel reads it (newc)."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._entries = 0

    def add(self, name: str, mode: int, content: bytes = b"") -> None:
        self._entries += 1
        encoded = name.encode() + b"\0"
        fields = (self._entries, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
        header = b"070701" + b"".join(b"%08X" % field for field in fields)
        for part in (header + encoded, content):
            self._parts.append(part + bytes(-len(part) % 4))

    def bytes(self) -> bytes:
        self.add("TRAILER!!!", 0)
        return b"".join(self._parts)


def write_initrd(target: Path, start: Path) -> None:
    """busybox, the modules, and an init that hands over to `start`, a program of this machine."""
    assert BUSYBOX.is_file(), f"{BUSYBOX} is missing: {_SETUP}"
    archive = Archive()
    for folder in ("bin", "modules", "proc", "sys", "dev", "host", "over", "root"):
        archive.add(folder, 0o40755)
    archive.add("bin/busybox", 0o100755, BUSYBOX.read_bytes())
    for applet in _APPLETS:
        archive.add(f"bin/{applet}", 0o120777, b"busybox")
    order = []
    for path in modules_in_order(kernel()[1], (*MODULES, *MODULES_RDMA)):
        content = path.read_bytes()
        content = lzma.decompress(content) if path.suffix == ".xz" else content
        archive.add(f"modules/{path.name.removesuffix('.xz')}", 0o100644, content)
        order.append(path.name.removesuffix(".xz"))
    archive.add("modules/order", 0o100644, "".join(f"{name}\n" for name in order).encode())
    # A checkout may lie in /tmp, which is another one inside.
    tmp = Path("/tmp")
    mounts = [f"mkdir -p /root{path}; mount --bind /host{path} /root{path}" for path in _below(tmp)]
    init = _INIT.replace("@MOUNT_CLONE@", "\n".join(mounts)).replace('"$START"', str(start))
    archive.add("init", 0o100755, init.encode())
    target.write_bytes(gzip.compress(archive.bytes(), compresslevel=1))


def _below(folder: Path) -> list[Path]:
    """The places that the guests need and that lie in it, each as a whole."""
    needed = {ROOT, Path(sys.prefix).resolve()}
    return sorted(path for path in needed if path.is_relative_to(folder) and ROOT not in path.parents)


class VirtualMachine:
    """One of two hosts. `host`: its number. `links`: its ends of socket pairs, one for each network device."""

    def __init__(self, host: int, initrd: Path, links: Sequence[socket.socket], arguments: dict[str, str]) -> None:
        assert shutil.which(QEMU), f"{QEMU} is missing: {_SETUP}"
        self.name = str(host)
        self.lines: list[str] = []
        self._changed = threading.Condition()
        # Emulated on a busy machine, the timers are so late that the kernel would take them for broken.
        words = ["quiet", "console=ttyS0", "panic=-1", "mitigations=off", "no_timer_check", "tsc=reliable", "nowatchdog"]
        words += [f"{key}={value}" for key, value in arguments.items()]
        argv = [
            *(QEMU, "-M", "q35", "-accel", "tcg,thread=multi", "-cpu", CPU, "-smp", "1", "-m", f"{MEMORY_MIB}M"),
            *("-nographic", "-no-reboot", "-nodefaults", "-serial", "stdio"),
            *("-kernel", str(kernel()[0]), "-initrd", str(initrd)),
            *("-append", " ".join(words)),
            *("-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"),
            *("-device", "virtio-9p-pci,fsdev=host,mount_tag=host", "-device", "virtio-rng-pci"),
        ]
        for number, link in enumerate(links):
            # Not `stream`: in qemu 7.2 its serving end waits when the socket is full, and the whole machine with it, for as long
            # as the other one's link is down.
            argv += ["-netdev", f"socket,id=n{number},fd={link.fileno()}"]
            address = f"52:54:00:00:{number:02x}:{host:02x}"
            argv += ["-device", f"virtio-net-pci,netdev=n{number},mac={address},host_mtu=9000,romfile="]
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=[link.fileno() for link in links],
            preexec_fn=_end_with_parent,
        )
        self._ended_s = 0.0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout, open(CONSOLES / f"console-{self.name}.log", "w", buffering=1) as log:
            for line in self._process.stdout:
                log.write(line)
                with self._changed:
                    self.lines.append(line.rstrip())
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """What the guest has reported so far, by name."""
        found = {}
        for line in self.lines:
            _, marked, text = line.partition(RESULT)
            if marked:
                report = json.loads(text)
                found[report.pop("name")] = report
        return found

    def wait_for(self, name: str, deadline_s: float, needs: VirtualMachine | None = None) -> None:
        """Until the guest has reported this, or it or the other machine that it `needs` has ended, after a panic for example.
        `deadline_s`: a moment of time.monotonic()."""
        with self._changed:
            while name not in self.results:
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, f"machine {self.name} did not report {name!r} in time; its console:\n{self.tail()}"
                for machine in (self, needs):
                    if machine is not None and machine.ended_for_s() > ENDED_S:
                        raise AssertionError(f"machine {machine.name} ended before {name!r}; its console:\n{machine.tail()}")
                self._changed.wait(min(left_s, 1.0))

    def ended_for_s(self) -> float:
        """Seconds since that was seen; 0 while it runs."""
        if self._process.poll() is None:
            return 0.0
        self._ended_s = self._ended_s or time.monotonic()
        return time.monotonic() - self._ended_s

    def tail(self) -> str:
        return "\n".join(self.lines[-60:])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

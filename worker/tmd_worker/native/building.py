"""Compiles the native core with the system's C compiler.

The options name no processor and allow no reordering of arithmetic: the bits of a result must be the same on every machine of
a job. This module needs the standard library alone, so that setup.py can load it by its path.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parent
#: In a wheel, beside the sources.
PACKAGED = SOURCES / "tmd_native.so"
COMPILE_S = 120.0
_OPTIONS = (
    "-std=c11",
    "-D_GNU_SOURCE",
    "-O3",
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
)


class NotBuilt(Exception):
    """There is no native core and there will be none; the text says why."""


def digest() -> str:
    """Of the sources and of how they are compiled."""
    sha256 = hashlib.sha256(" ".join((*_OPTIONS, platform.machine())).encode())
    for path in sorted((*SOURCES.glob("*.c"), *SOURCES.glob("*.h"))):
        sha256.update(path.name.encode() + b"\0" + path.read_bytes())
    return sha256.hexdigest()[:32]


def compiler() -> str:
    """Raises NotBuilt."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        path = shutil.which(name) if name else None
        if path is not None:
            return path
    raise NotBuilt("there is no C compiler (cc, gcc, clang) on PATH")


def compile_to(target: Path) -> None:
    """Writes the library, as a whole or not at all. Raises NotBuilt."""
    command = compiler()
    handle, unfinished = tempfile.mkstemp(dir=target.parent, prefix=".tmd_native-")
    os.close(handle)
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    stamp = f'-DTMD_DIGEST="{digest()}"'
    try:
        subprocess.run(
            [command, *_OPTIONS, stamp, *sources, "-o", unfinished], check=True, capture_output=True, text=True, timeout=COMPILE_S
        )
        os.chmod(unfinished, 0o755)
        os.replace(unfinished, target)
    except subprocess.CalledProcessError as error:
        raise NotBuilt(f"{command} failed: {error.stderr.strip()[-2000:]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(f"{command} failed: {error}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)


def cached() -> Path:
    """The library of these sources in the user's cache, compiled now if it is not there. Raises NotBuilt."""
    try:
        folder = _cache_folder()
        target = folder / f"tmd_native-{digest()}.so"
        if not target.exists():
            with _only_one(folder / "lock"):
                if not target.exists():
                    compile_to(target)
    except OSError as error:
        raise NotBuilt(f"there is no cache folder to compile into: {error}") from None
    return target


def _cache_folder() -> Path:
    """Nobody but this user may write there: what lies in it is executed. Raises OSError or NotBuilt."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "tmd"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise NotBuilt(f"{folder} belongs to somebody else or others may write to it: chmod 700 it, or set XDG_CACHE_HOME")
    return folder


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """The ranks of a node start together: one compiles, the others wait for it."""
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

"""The sandbox's audit hook: while a process rehearses, what its user's code does must stay inside it.

A process that rehearses is a standby without a role, or `tmd-run --check`. A member's own shadow steps are not guarded: it is
the real rank, which may do all that.

Refused: writing, deleting or renaming files outside scratch (temporary and cache directories, __pycache__, /dev/null and the
like), network connections, new programs (but not those that torch or triton start to compile). Reading, memory and forked
workers are free. It keeps an honest script honest; it is no jail: what a C library opens by itself is not seen, except
torch.save and safetensors, which are wrapped. Importing this module does nothing; the hook is installed by the first
`activate`, and costs one comparison per audited event when inactive.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import socket
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

#: Event -> for each path that it changes: the argument's index, and that of the directory descriptor it is relative to.
_CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.utime": ((0, 3),),
    "os.setxattr": ((0, None),),
    "os.removexattr": ((0, None),),
    "shutil.rmtree": ((0, 1),),
    "sqlite3.connect": ((0, None),),
}
_PROGRAMS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn"})
_CONNECTIONS = frozenset({"socket.connect", "socket.sendto", "socket.sendmsg"})
#: What the events are called in a message.
_SPOKEN = {
    "os.remove": "delete (os.remove)",
    "os.rmdir": "delete (os.rmdir)",
    "os.mkdir": "make the directory (os.mkdir)",
    "os.rename": "rename or replace (os.rename)",
    "os.link": "make the link (os.link)",
    "os.symlink": "make the link (os.symlink)",
    "os.truncate": "shorten (os.truncate)",
    "shutil.rmtree": "delete all of (shutil.rmtree)",
    "sqlite3.connect": "open the database (sqlite3.connect)",
}
#: Writers in C or Rust, by module and name; each takes the path as the argument of that index and name.
_BYPASSES = (
    ("torch.serialization", "_open_zipfile_writer", 0, "name_or_buffer"),
    ("torch.jit", "save", 1, "f"),
    ("torch.jit._script", "RecursiveScriptModule.save", 1, "f"),
    ("torch.package.package_exporter", "PackageExporter.__init__", 1, "f"),
    ("torch.export.pt2_archive._package", "PT2ArchiveWriter.__init__", 1, "archive_path_or_buffer"),
    ("safetensors.torch", "serialize_file", 1, "filename"),
    ("safetensors.numpy", "serialize_file", 1, "filename"),
)
_DEVICES = ("/dev/null", "/dev/tty", "/dev/zero", "/dev/stdout", "/dev/stderr")
_CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME", "HF_HOME")
_CACHE_DIRECTORIES = ("~/.cache", "~/.triton")


class SandboxRefused(PermissionError):
    """The user's code tried to reach the outside in a process that only rehearses."""


class _Exempt(threading.local):
    depth = 0


_exempt = _Exempt()
_role: int | None = None
_who = ""
#: One byte that all forks share: not 0 once the process that began to rehearse is live. A forked process (a pool that writes
#: checkpoints) may outlive the rehearsal, and nobody tells it.
_live: mmap.mmap | None = None
_installed = False
_scratch: tuple[str, ...] = ()


def activate(role: int, who: str = "a standby") -> None:
    """From now on this process, `who` in its messages, rehearses as rank `role`. A fork shares its fate."""
    global _role, _who, _live, _installed, _scratch
    _who, _live = who, mmap.mmap(-1, 1)
    _scratch = _scratch_directories()
    if not _installed:
        _installed = True
        sys.addaudithook(_hook)
    _wrap_bypasses()
    _role = role


def deactivate() -> None:
    """The process is live: everything is allowed, in its forked children too."""
    global _role
    _role = None
    if _live is not None:
        _live[0] = 1


@contextlib.contextmanager
def exempt() -> Iterator[None]:
    """What this thread does inside is tmd's own and allowed. It says nothing about other threads: each enters it itself."""
    _exempt.depth += 1
    try:
        yield
    finally:
        _exempt.depth -= 1


def _scratch_directories() -> tuple[str, ...]:
    named = [os.environ[name] for name in _CACHE_VARIABLES if os.environ.get(name)]
    caches = [os.path.expanduser(path) for path in _CACHE_DIRECTORIES]
    return tuple(os.path.realpath(path) for path in (tempfile.gettempdir(), "/dev/shm", *caches, *named))


# ---------------------------------------------------------------- the hook


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _role is None or _is_over():
        return
    if event == "open":
        path, _mode, flags = arguments
        if isinstance(flags, int) and flags & _WRITES:
            _check_path("open for writing", path)
    elif event in _CHANGES:
        for index, directory in _CHANGES[event]:
            _check_path(
                event, arguments[index], arguments[directory] if directory is not None and directory < len(arguments) else None
            )
    elif event in _CONNECTIONS:
        _check_connection(event, *arguments[:2])
    elif event in _PROGRAMS:
        if not _exempted() and not _compiles(sys._getframe(1)):
            _refuse("start the program", arguments[0])
    elif event == "import":
        _wrap_bypasses()


def _is_over() -> bool:
    return _live is not None and _live[0] != 0


def _exempted() -> bool:
    return bool(_exempt.depth)


def _check_path(action: str, path: Any, directory: int | None = None) -> None:
    """`directory`: the descriptor that a relative path starts from; None or -1: the working directory."""
    if isinstance(path, int) or path is None or _exempted():
        return
    name = os.fsdecode(path)
    if directory is not None and directory >= 0:
        name = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), name)
    if not _is_scratch(name):
        _refuse(action, name)


def _is_scratch(name: str) -> bool:
    if name in ("", ":memory:") or name in _DEVICES:
        return True
    parent, last = os.path.split(os.path.abspath(name))
    real = os.path.join(os.path.realpath(parent), last)
    if os.path.islink(real):
        real = os.path.realpath(real)
    return "__pycache__" in real.split(os.sep) or any(real == root or real.startswith(root + os.sep) for root in _scratch)


def _check_connection(event: str, sock: Any, address: Any = None) -> None:
    family = getattr(sock, "family", None)
    if address is None or family not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX) or _exempted():
        return
    if family == socket.AF_UNIX:
        name = os.fsdecode(address)
        if name.startswith("\0") or _is_scratch(name):
            return
    _refuse("connect to" if event == "socket.connect" else "send to", address)


def _compiles(frame: FrameType | None) -> bool:
    """True if the code nearest to the event, the standard library left aside, is torch's or triton's."""
    library = sysconfig.get_path("stdlib") + os.sep
    packages = os.path.join(library, "site-packages")
    while frame is not None:
        name = frame.f_code.co_filename
        outside = not name.startswith("<") and (not name.startswith(library) or name.startswith(packages))
        if outside and frame.f_globals.get("__name__") != __name__:
            return str(frame.f_globals.get("__name__")).partition(".")[0] in ("torch", "triton")
        frame = frame.f_back
    return False


def _refuse(action: str, what: Any) -> None:
    named = os.fsdecode(what) if isinstance(what, bytes) else what
    raise SandboxRefused(
        f"refused to {_SPOKEN.get(action, action)} {named!r}: this process is {_who} that rehearses as rank {_role}, and only "
        "the real rank may do that; put it under `if session.live:` (or, in the loop, under `if step.committed:`)"
    )


# ---------------------------------------------------------------- writers that raise no event


def _wrap_bypasses() -> None:
    """Wraps the writers whose modules have been loaded by now; each once."""
    for module_name, path, index, keyword in _BYPASSES:
        *owners, name = path.split(".")
        owner: Any = sys.modules.get(module_name)
        for part in owners:
            owner = getattr(owner, part, None)
        writer = None if owner is None else getattr(owner, name, None)
        if writer is not None and not hasattr(writer, "_tmd_guarded"):
            setattr(owner, name, _guarded(writer, index, keyword))


def _guarded(writer: Callable[..., Any], index: int, keyword: str) -> Callable[..., Any]:
    @functools.wraps(writer)
    def checked(*arguments: Any, **named: Any) -> Any:
        path = arguments[index] if len(arguments) > index else named.get(keyword)
        if _role is not None and not _is_over() and isinstance(path, (str, bytes, os.PathLike)):
            _check_path("open for writing", path)
        return writer(*arguments, **named)

    checked._tmd_guarded = True  # type: ignore[attr-defined]
    return checked

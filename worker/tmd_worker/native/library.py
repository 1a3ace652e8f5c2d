"""Loads the native core, once per process, and mirrors its structures (native.h) for ctypes."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
from pathlib import Path

from tmd_worker.native import building

HEADER_BYTES = 24


class LinkState(ctypes.Structure):
    """tmd_link: what Python and C both read and write of a link."""

    _fields_ = (
        ("fd", ctypes.c_int32),
        ("ending", ctypes.c_int32),
        ("sent", ctypes.c_uint64),
        ("received", ctypes.c_uint64),
        ("unsent", ctypes.c_uint64),
        ("timeout_ms", ctypes.c_int64),
        ("shared", ctypes.c_void_p),
        ("stopped", ctypes.c_int32),
    )
    fd: int
    ending: int
    sent: int
    received: int
    unsent: int
    timeout_ms: int
    shared: int | None
    stopped: int


class Frame(ctypes.Structure):
    """tmd_frame."""

    _fields_ = (("at", ctypes.c_void_p), ("bytes", ctypes.c_uint32), ("combine", ctypes.c_uint8), ("divide", ctypes.c_uint8))


class Piece(ctypes.Structure):
    """tmd_piece."""

    _fields_ = (("link", ctypes.c_void_p), ("at", ctypes.c_void_p), ("bytes", ctypes.c_uint64))


class Outcome(ctypes.Structure):
    """tmd_outcome."""

    _fields_ = (
        ("code", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("link", ctypes.c_uint64),
        ("expected_bytes", ctypes.c_uint32),
        ("stopped", ctypes.c_int32),
        ("header", ctypes.c_uint8 * HEADER_BYTES),
    )
    code: int
    error: int
    link: int
    expected_bytes: int
    stopped: int


@dataclasses.dataclass(frozen=True, slots=True)
class Core:
    """The loaded library, or None and why."""

    library: ctypes.CDLL | None
    #: For people: what is in use.
    description: str


_ADDRESS = ctypes.c_void_p
_INT = ctypes.c_int
_SIZE = ctypes.c_size_t
_U32, _U64 = ctypes.c_uint32, ctypes.c_uint64
_SIGNATURES = {
    "tmd_exchange": (_ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _SIZE, _U32, ctypes.c_uint8, _ADDRESS),
    "tmd_ring": (_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _INT, _INT, _INT, _INT, _INT, _INT, _U32, _ADDRESS),
    "tmd_exchange_all": (_ADDRESS, _SIZE, _ADDRESS, _SIZE, _U32, _ADDRESS),
    "tmd_tree": (_ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _U32, _INT, _INT, _INT, _INT, _U32, _ADDRESS),
    "tmd_broadcast": (_ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _U64, _U32, _ADDRESS),
    "tmd_write": (_ADDRESS, _ADDRESS, _SIZE),
    "tmd_read": (_ADDRESS, _ADDRESS, _SIZE, _INT),
    "tmd_wait": (_ADDRESS, _ADDRESS, _SIZE, ctypes.c_int64),
    "tmd_shared_create": (_U64, _ADDRESS),
    "tmd_shared_attach": (_INT, _U64, _ADDRESS),
    "tmd_shared_release": (_ADDRESS,),
    "tmd_vote": (_ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _U32, _ADDRESS, _ADDRESS, _ADDRESS),
    "tmd_hear_ward": (_ADDRESS, _INT, _ADDRESS, _SIZE, _U32, ctypes.c_int64, _ADDRESS),
    "tmd_combine_once": (_INT, _INT, _ADDRESS, _ADDRESS, _SIZE, _INT),
}


@functools.cache
def core() -> Core:
    """Loads it when first called; compiles it if no wheel brought it. Never fails: without it Python does the same, slower."""
    if os.environ.get("TMD_NATIVE", "1") == "0":
        return Core(None, "Python transport (TMD_NATIVE=0)")
    try:
        packaged = _load(building.PACKAGED) if building.PACKAGED.exists() else None
        if packaged is not None:
            return Core(packaged, "native transport (from the wheel)")
        path = building.cached()
        compiled = _load(path)
    except building.NotBuilt as error:
        return Core(None, f"Python transport, slower: {error}")
    if compiled is None:
        return Core(None, f"Python transport, slower: {path} cannot be loaded; delete it")
    return Core(compiled, f"native transport ({path})")


def _load(path: Path) -> ctypes.CDLL | None:
    """None if it was made from other sources, or for another machine."""
    try:
        library = ctypes.CDLL(str(path))
        stamp = library.tmd_digest
        stamp.restype = ctypes.c_char_p
        if stamp() != building.digest().encode():
            return None
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = _INT
    except (OSError, AttributeError):
        return None
    return library

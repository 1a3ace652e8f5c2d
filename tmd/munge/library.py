"""libmunge by ctypes: bytes in, a credential out, and back with the uid of whoever made it.

Contract: calls block (libmunge tries for some 10 s to reach a munged that does not answer), hold no lock of Python's meanwhile
and may be made from any thread. Everything that goes wrong is a MungeError that says what it means and what to do. The functions
and numbers are those of munge.h (munge 0.5).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
import functools
import os
from typing import Any

#: Where Debian's, Red Hat's and munge's own packages put it.
_NAMES = ("libmunge.so.2", "libmunge.so")
#: Where clients look if nobody says otherwise.
DEFAULT_SOCKET = "/run/munge/munge.socket.2"
#: A credential lives this long: time for a message to arrive and for clocks to differ, no more.
TTL_S = 60
#: Credentials of tmd have a few hundred bytes.
CREDENTIAL_LIMIT_BYTES = 8192

# Options of a context, and a cipher (munge.h).
_OPT_CIPHER_TYPE, _OPT_TTL, _OPT_SOCKET, _OPT_UID_RESTRICTION = 0, 4, 8, 9
_CIPHER_AES256 = 5
# Errors (munge.h).
_SUCCESS, _SOCKET, _TIMEOUT = 0, 6, 7
_BAD_FORMAT, _BAD_VERSION = 8, 9
#: Cipher, MAC, compression or realm that this munged does not know, or another key.
_FOREIGN = range(10, 15)
_EXPIRED, _REWOUND, _REPLAYED, _UNAUTHORIZED = 15, 16, 17, 18

_CLOCKS = "compare the clocks of both machines (chronyc tracking), then try again"
_KEYS = "both machines need the same /etc/munge/munge.key, and munged has to be started again after a change of it"
_WHY_REFUSED = {
    **dict.fromkeys((_BAD_FORMAT, _BAD_VERSION), ("malformed", "this is no munge credential", "send what munge has made")),
    **dict.fromkeys(_FOREIGN, ("foreign", "the credential comes from another realm: it was made with another munge key", _KEYS)),
    _EXPIRED: ("expired", "the credential has expired", _CLOCKS),
    _REWOUND: ("rewound", "the credential was made in the future", _CLOCKS),
    _REPLAYED: ("replayed", "the credential was used before", "each is good for one use; if nobody repeated it, it was copied"),
    _UNAUTHORIZED: ("wrong uid", "the credential is for another user's eyes", "read it as the user that it was made for"),
}


class MungeError(Exception):
    """Munge cannot be used, or a credential is no good; the text says which, `remedy` what to do."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy

    def whole(self) -> str:
        """What happened and what to do, in one line."""
        return f"{self}; {self.remedy}" if self.remedy else str(self)


class MungeAbsent(MungeError):
    """There is no libmunge on this machine."""


class MungeDown(MungeError):
    """This machine's munged does not answer: nobody can prove or check anything until it does."""


class CredentialRefused(MungeError):
    """The credential proves nothing. `kind`: expired, rewound, replayed, wrong uid, foreign, malformed or wrong purpose."""

    def __init__(self, kind: str, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.kind = kind


@dataclasses.dataclass(frozen=True, slots=True)
class Decoded:
    """What a good credential says, and who made it."""

    payload: bytes
    uid: int
    gid: int


@functools.cache
def _library() -> ctypes.CDLL:
    """Raises MungeAbsent."""
    for name in (*_NAMES, ctypes.util.find_library("munge")):
        if name is None:
            continue
        try:
            return _declared(ctypes.CDLL(name))
        except OSError:
            continue
    raise MungeAbsent(
        "libmunge is not installed on this machine", "install it (Debian: libmunge2, Red Hat: munge-libs), or use a job token"
    )


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    library.munge_ctx_create.restype = pointer
    library.munge_ctx_destroy.argtypes = [pointer]
    library.munge_ctx_destroy.restype = None
    library.munge_ctx_strerror.argtypes = [pointer]
    library.munge_ctx_strerror.restype = text
    library.munge_strerror.argtypes = [number]
    library.munge_strerror.restype = text
    out = ctypes.POINTER
    library.munge_encode.argtypes = [out(pointer), pointer, text, number]
    library.munge_decode.argtypes = [text, pointer, out(pointer), out(number), out(ctypes.c_uint32), out(ctypes.c_uint32)]
    # Declared by munge.h with variable arguments; what follows the option is said at each call.
    library.munge_ctx_set.restype = number
    return library


@functools.cache
def _free() -> Any:
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free.restype = None
    return free


class Munge:
    """One munged, by its socket ("" is libmunge's own choice)."""

    def __init__(self, socket: str = "") -> None:
        """Raises MungeAbsent."""
        self._library = _library()
        self.socket = socket

    def encode(self, payload: bytes, *, for_uid: int | None = None, ttl_s: int = TTL_S) -> str:
        """A credential of this process's effective user. Its payload is encrypted, and with `for_uid` only that user can read it.

        Raises MungeError, MungeDown.
        """
        with _Context(self._library, self.socket) as context:
            context.set(_OPT_CIPHER_TYPE, ctypes.c_int(_CIPHER_AES256))
            context.set(_OPT_TTL, ctypes.c_int(ttl_s))
            if for_uid is not None:
                context.set(_OPT_UID_RESTRICTION, ctypes.c_uint32(for_uid))
            credential = ctypes.c_void_p()
            code = self._library.munge_encode(ctypes.byref(credential), context.handle, payload, len(payload))
            content = _taken(credential, None)
            self._check(code, context)
            return content.decode("ascii")

    def decode(self, credential: str) -> Decoded:
        """Who made it and what it says; a credential can be decoded once. Raises MungeDown, CredentialRefused."""
        if not credential.isascii() or not credential.isprintable() or not 0 < len(credential) <= CREDENTIAL_LIMIT_BYTES:
            kind, meaning, remedy = _WHY_REFUSED[_BAD_FORMAT]
            raise CredentialRefused(kind, f"{meaning}: not text of 1 to {CREDENTIAL_LIMIT_BYTES} bytes", remedy)
        with _Context(self._library, self.socket) as context:
            payload, size = ctypes.c_void_p(), ctypes.c_int()
            uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
            where = [ctypes.byref(each) for each in (payload, size, uid, gid)]
            code = self._library.munge_decode(credential.encode(), context.handle, *where)
            content = _taken(payload, size.value)  # an expired or replayed one has a payload, too
            self._check(code, context)
            return Decoded(content, uid.value, gid.value)

    def _check(self, code: int, context: _Context) -> None:
        if code == _SUCCESS:
            return
        detail = context.error() or (self._library.munge_strerror(code) or b"").decode(errors="replace")
        if code in (_SOCKET, _TIMEOUT):
            raise MungeDown(
                f"munged at {self.socket or DEFAULT_SOCKET} does not answer ({detail})", "start it there: systemctl start munge"
            )
        if code in _WHY_REFUSED:
            kind, meaning, remedy = _WHY_REFUSED[code]
            raise CredentialRefused(kind, f"{meaning} (munge: {detail})", remedy)
        raise MungeError(f"munge failed with error {code}: {detail}", "see munged's log, /var/log/munge/munged.log")


class _Context:
    """A munge_ctx_t for as long as one call."""

    def __init__(self, library: ctypes.CDLL, socket: str) -> None:
        self._library = library
        self._socket = socket
        self.handle = ctypes.c_void_p()

    def __enter__(self) -> _Context:
        self.handle = ctypes.c_void_p(self._library.munge_ctx_create())
        if not self.handle:
            raise MemoryError("munge_ctx_create")
        if self._socket:
            self.set(_OPT_SOCKET, ctypes.c_char_p(os.fsencode(self._socket)))
        return self

    def __exit__(self, *_: object) -> None:
        self._library.munge_ctx_destroy(self.handle)

    def set(self, option: int, value: Any) -> None:
        """Raises MungeError."""
        code = self._library.munge_ctx_set(self.handle, ctypes.c_int(option), value)
        if code != _SUCCESS:
            raise MungeError(f"munge does not take option {option}: {self.error()}", "munge 0.5 or newer is needed")

    def error(self) -> str:
        text = self._library.munge_ctx_strerror(self.handle)
        return text.decode(errors="replace") if text else ""


def _taken(pointer: ctypes.c_void_p, size: int | None) -> bytes:
    """What libmunge has allocated, copied and freed; up to its final zero without a size."""
    if not pointer:
        return b""
    content = ctypes.string_at(pointer) if size is None else ctypes.string_at(pointer, size)
    _free()(pointer)
    return content

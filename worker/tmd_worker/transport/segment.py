"""Memory that the two ends of a link share: made by the dialer, sent along with its hello, mapped by the listener.

Contract: a segment belongs to one end and is released once, when nobody reads or writes there any more. A forked child does not
have it. Where there is none to be had (no native core, no memory, switched off) the link uses its socket alone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading

from tmd_worker.native import library

#: Of each direction. Larger ones leave the processor's cache, smaller ones wake the other side more often.
RING_BYTES = 512 << 10

_log = logging.getLogger(__name__)
_told = threading.Event()


class Segment:
    """One end of it. `address` is what the native core calls `tmd_shared`."""

    def __init__(self, core: ctypes.CDLL, address: int) -> None:
        self.core = core
        self.address = address
        self._owner_pid = os.getpid()
        self._released = False

    def __del__(self) -> None:
        """As a socket: whatever drops a link, in an exception of a signal's handler for one, does not keep its memory."""
        self.release()

    @classmethod
    def attach(cls, descriptor: int, ring_bytes: int) -> Segment | None:
        """What a dialer has sent, which remains the caller's; None if it cannot be used."""
        core = library.core().library
        if core is None:
            return None
        made = ctypes.c_void_p()
        error = -core.tmd_shared_attach(descriptor, ring_bytes, ctypes.addressof(made))
        if error or made.value is None:
            _tell(error)
            return None
        return cls(core, made.value)

    def release(self) -> None:
        if self._owner_pid == os.getpid() and not self._released:
            self._released = True
            self.core.tmd_shared_release(self.address)


class Offer:
    """A dialer's segment, made when it is first needed and kept from attempt to attempt until the peer takes it."""

    def __init__(self) -> None:
        self._tried = False
        self._segment: Segment | None = None
        self.descriptor = -1

    def make(self) -> bool:
        """False if there is nothing to offer."""
        core = library.core().library
        if core is not None and not self._tried:
            self._tried = True
            made = ctypes.c_void_p()
            self.descriptor = core.tmd_shared_create(RING_BYTES, ctypes.addressof(made))
            if self.descriptor < 0 or made.value is None:
                _tell(-self.descriptor)
            else:
                self._segment = Segment(core, made.value)
        return core is not None and self._segment is not None

    def taken(self) -> Segment:
        """The peer maps it, too: from now on it is the caller's."""
        assert self._segment is not None
        segment, self._segment = self._segment, None
        self._close()
        return segment

    def withdraw(self) -> None:
        """Nobody took it, if it still is here."""
        if self._segment is not None:
            self._segment.release()
            self._segment = None
            self._close()

    def _close(self) -> None:
        os.close(self.descriptor)
        self.descriptor = -1


def _tell(error: int) -> None:
    """Once: it is slower, not wrong."""
    if not _told.is_set():
        _told.set()
        _log.warning("no memory to share with ranks of this host (%s): their links use sockets alone, slower", os.strerror(error))

"""A datagram socket on which Slurm's plugin says that something has changed.

Contract: whatever comes calls `heard`, and nothing in it is believed or even read: any local user may send here. How often that
leads to a question is for whoever is called to bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

#: Taken off the socket in one go; the rest on the next turn of the loop.
BATCH = 100


class HintSocket:
    """Listens from `open` to `close`."""

    def __init__(self, path: Path, heard: Callable[[], None]) -> None:
        self._path = path
        self._heard = heard
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Takes the place of a socket that a daemon before this one has left. Raises OSError."""
        self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if self._path.is_socket():
            self._path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(str(self._path))
            # slurmctld runs as another user, and writing is all that sending needs.
            os.chmod(self._path, 0o622)
        except OSError:
            listener.close()
            raise
        self._socket = listener
        asyncio.get_running_loop().add_reader(listener, self._take)

    def close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _take(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError):
            for _ in range(BATCH):
                self._socket.recv(1)
        self._heard()

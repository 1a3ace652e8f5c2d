"""How the two hosts speak: with each other in lines of JSON over the control network, with the tests in lines on the console."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

CONTROL_NETWORK = "10.79.0."
SOURCES = f"{CONTROL_NETWORK}1"
CONTROL_PORT = 7000
DATA_NETWORK = "10.80.0."
ANSWER_TIMEOUT_S = 300.0


def report(name: str, **facts: Any) -> None:
    """One line on the console, in one write, so that two processes cannot mix theirs."""
    os.write(1, f"\nRESULT {json.dumps({'name': name, **facts})}\n".encode())


class Lines:
    """Messages over a socket. Raises ConnectionError when the other side is gone, TimeoutError when it does not answer."""

    def __init__(self, sock: socket.socket, timeout_s: float | None = ANSWER_TIMEOUT_S) -> None:
        sock.settimeout(timeout_s)
        self._file = sock.makefile("rw")
        sock.close()

    def send(self, message: dict[str, Any]) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def receive(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            raise ConnectionError("the other host's process has ended")
        return json.loads(line)

    def close(self) -> None:
        self._file.close()


def dial(deadline_s: float) -> Lines:
    """To a new process on the host with the sources; it may still be booting."""
    while True:
        try:
            return Lines(socket.create_connection((SOURCES, CONTROL_PORT), timeout=5.0))
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)

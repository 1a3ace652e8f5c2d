"""The first host: a process for each connection over the control network, which is a source and does what it is told."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import traceback
from pathlib import Path
from typing import Any

import msgspec

from tests.rdma.guest.lines import CONTROL_PORT, SOURCES, Lines, report
from tests.rdma.guest.tensors import Tensors
from tmd_worker.handoff import verbs
from tmd_worker.handoff.rdma import Rdma
from tmd_worker.handoff.rdma_ports import ports
from tmd_worker.handoff.tcp import Tcp
from tmd_worker.handoff.transfer import SourceEnd


class Source:
    """Methods are what the other host can ask for."""

    def __init__(self) -> None:
        self._tcp = Tcp()
        self._tensors = Tensors([], 0)
        self._ends: dict[str, SourceEnd] = {}
        self._programs: list[subprocess.Popen[bytes]] = []

    def hold(self, sizes: list[int], gap_bytes: int, seed: int) -> dict[str, Any]:
        self._tensors = Tensors(sizes, gap_bytes)
        self._tensors.fill(seed)
        return {"pid": os.getpid()}

    def accept(self, transport: str, hello: str, timeout_s: float) -> dict[str, Any]:
        end = self._ends[transport] = Rdma().source() if transport == "rdma" else self._tcp.source()
        end.prepare(self._tensors.memory)
        answer = end.accept(bytes.fromhex(hello), timeout_s)
        return {"answer": answer.hex(), "port": self._serve_tcp() if transport == "tcp" else 0}

    def _serve_tcp(self) -> int:
        listener = socket.create_server((SOURCES, 0))

        def serve(sock: socket.socket) -> None:
            size = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "big")
            self._tcp.serve(sock, msgspec.msgpack.decode(sock.recv(size, socket.MSG_WAITALL)))

        def listen() -> None:
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=listen, daemon=True).start()
        return listener.getsockname()[1]

    def export(self, transport: str) -> dict[str, Any]:
        return {"regions": [list(msgspec.to_builtins(region)) for region in self._ends[transport].export(self._tensors.memory)]}

    def checksums(self) -> dict[str, Any]:
        return {"checksums": self._tensors.checksums()}

    def close(self, transport: str) -> dict[str, Any]:
        self._ends.pop(transport).close()
        return {}

    def run(self, argv: list[str]) -> dict[str, Any]:
        subprocess.run(argv, check=True, timeout=30.0)
        return {}

    def start(self, argv: list[str], environ: dict[str, str] | None = None, log: str = os.devnull) -> dict[str, Any]:
        with open(log, "wb") as output:
            environ = {**os.environ, **(environ or {})}
            process = subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        self._programs.append(process)
        return {}

    def write(self, path: str, text: str) -> dict[str, Any]:
        """As a whole."""
        fresh = Path(f"{path}.new")
        fresh.write_text(text)
        fresh.replace(path)
        return {}

    def read(self, path: str) -> dict[str, Any]:
        """Nothing, if it is not there."""
        return {"text": Path(path).read_text(errors="replace") if Path(path).exists() else ""}

    def kill(self, pid: int) -> dict[str, Any]:
        os.kill(pid, signal.SIGKILL)
        return {}


def serve(lines: Lines) -> None:
    source = Source()
    while True:
        message = lines.receive()
        try:
            lines.send(getattr(source, message.pop("do"))(**message))
        except Exception as error:  # the scenario fails with its text
            lines.send({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    verbs.load()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.create_server((SOURCES, CONTROL_PORT))
    report("sources", ports=[f"{port} {port.state}" for port in ports()])
    while True:
        sock, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            try:
                serve(Lines(sock, timeout_s=None))  # for as long as it is asked
            except ConnectionError:
                pass  # the other host is done with it
            except BaseException:
                traceback.print_exc()  # on the console
            finally:
                os._exit(0)
        sock.close()


if __name__ == "__main__":
    main()

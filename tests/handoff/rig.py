"""A source and a joiner of `tcp` over real sockets in one process, and what may stand between them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.handoff.memory import Buffers
from tmd_worker.handoff.tcp import Tcp
from tmd_worker.handoff.transfer import Dial, Region, Work, split

DEADLINE_S = 30.0

#: Gets the joiner's socket of one connection and gives what the joiner uses instead.
Between = Callable[[int, socket.socket], socket.socket]


class Pair:
    """Both ends, connected; what they hold is the test's."""

    def __init__(
        self, contents: Sequence[bytes], *, between: Between = lambda _, sock: sock, streams: int = 2, tls: Any = None
    ) -> None:
        self.tcp = Tcp(streams, tls)
        self.source_memory = Buffers(contents)
        self.joiner_memory = Buffers.empty([len(content) for content in contents])
        self.source = self.tcp.source()
        self._between = between
        self._threads: list[threading.Thread] = []
        self._dialed = 0
        self.joiner = self.tcp.joiner(self.dial)
        self.regions: tuple[Region, ...] = ()

    def connect(self, timeout_s: float = DEADLINE_S) -> None:
        self.joiner.connect(self.source.accept(self.joiner.hello(), timeout_s), timeout_s)
        self.regions = self.source.export(self.source_memory.memory)

    def read(self, timeout_s: float = DEADLINE_S) -> Work:
        work = Work(split([part.size_bytes for part in self.joiner_memory.memory]))
        self.joiner.read(self.regions, self.joiner_memory.memory, work, timeout_s)
        return work

    def dial(self, fields: dict[str, Any], timeout_s: float) -> socket.socket:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            dialed = socket.create_connection(listener.getsockname(), timeout_s)
            served, _ = listener.accept()
        thread = threading.Thread(target=self._serve, args=(served, fields))
        thread.start()
        self._threads.append(thread)
        self._dialed += 1
        return self._between(self._dialed - 1, dialed)

    def _serve(self, sock: socket.socket, fields: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.tcp.serve(sock, fields)

    def close(self) -> None:
        self.joiner.close()
        self.source.close()
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


@contextlib.contextmanager
def connected(contents: Sequence[bytes], **options: Any) -> Iterator[Pair]:
    with contextlib.closing(Pair(contents, **options)) as pair:
        pair.connect()
        yield pair


def dial_port(port: int) -> Dial:
    """To tests.handoff.source_program."""

    def dial(fields: dict[str, Any], timeout_s: float) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", port), timeout_s)
        sock.sendall(fields["token"])
        return sock

    return dial

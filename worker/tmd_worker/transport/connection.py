"""What a handshake yields: an authenticated socket and, for some links within a host, memory that its two ends share."""

from __future__ import annotations

import dataclasses
import socket

from tmd_worker.transport.segment import Segment


@dataclasses.dataclass(slots=True, eq=False)
class Connection:
    """Whoever has it closes it, or makes a stream of it."""

    sock: socket.socket
    segment: Segment | None = None

    def close(self) -> None:
        self.sock.close()
        if self.segment is not None:
            self.segment.release()
            self.segment = None

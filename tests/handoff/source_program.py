"""A source in a process of its own, so that it can be killed: python source_program.py PARENT SEED SIZE... Serves until then.

Writes one line of JSON on stdout: its port and, in hexadecimal, its answers to the hellos of several joiners.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import threading

from tests.handoff.memory import Buffers
from tmd_worker import offspring
from tmd_worker.handoff.tcp import Tcp
from tmd_worker.handoff.transfer import Memory

JOINERS = 4


def contents(seed: int, sizes: list[int]) -> list[bytes]:
    generator = random.Random(seed)
    return [generator.randbytes(size) for size in sizes]


def main() -> None:
    offspring.end_with_parent(int(sys.argv[1]))
    seed, *sizes = (int(text) for text in sys.argv[2:])
    tcp = Tcp()
    buffers = Buffers(contents(seed, sizes))
    memory: list[Memory] = buffers.memory
    sources = [tcp.source() for _ in range(JOINERS)]
    answers = [source.accept(b"", 30.0) for source in sources]
    for source in sources:
        source.export(memory)
    listener = socket.create_server(("127.0.0.1", 0))
    print(json.dumps({"port": listener.getsockname()[1], "answers": [answer.hex() for answer in answers]}), flush=True)
    while True:
        sock, _ = listener.accept()
        token = sock.recv(16, socket.MSG_WAITALL)
        threading.Thread(target=tcp.serve, args=(sock, {"token": token}), daemon=True).start()


if __name__ == "__main__":
    main()

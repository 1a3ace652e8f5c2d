"""A rank that speaks the control protocol and does what its first argument says; all it hears goes to INCARNATION.jsonl."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import msgspec

from tmd.protocol.agent import StoreRequest
from tmd.protocol.codec import FROM_RANK, TO_RANK, FrameReader, frame
from tmd.protocol.control import FromRank, RankOrder, RankUpdate, RankWelcome, ToRank
from tmd.protocol.rank import Phase, RankStatus

HALF_GIB = 1 << 29


class Rank:
    def __init__(self) -> None:
        self.incarnation = os.environ["TMD_INCARNATION"]
        self.socket = socket.socket(fileno=int(os.environ["TMD_CONTROL_FD"]))
        self.reader: FrameReader[ToRank] = FrameReader(TO_RANK)
        self.backlog: list[ToRank] = []
        self.rank: int | None = None
        self.version = 0
        self.log = Path(os.environ["TMD_TEST_FOLDER"], f"{self.incarnation}.jsonl")

    def receive(self) -> ToRank:
        while not self.backlog:
            data = self.socket.recv(1 << 16)
            if not data:
                sys.exit("the agent is gone")
            self.backlog = self.reader.feed(data)
        message = self.backlog.pop(0)
        with self.log.open("ab") as log:
            log.write(msgspec.json.encode(message) + b"\n")
        return message

    def send(self, message: FromRank) -> None:
        self.socket.sendall(frame(FROM_RANK.encode(message)))

    def report(self, phase: Phase, *, incarnation: str | None = None, job_id: str = "j1", error: str = "") -> None:
        self.version += 1
        status = RankStatus(
            job_id=job_id,
            incarnation=incarnation or self.incarnation,
            version=self.version,
            rank=self.rank,
            phase=phase,
            error=error,
        )
        self.send(RankUpdate(status=status))


def main(mode: str) -> None:
    rank = Rank()
    welcome = rank.receive()
    assert isinstance(welcome, RankWelcome)
    rank.rank = welcome.rank
    memory = b"\1" * HALF_GIB if mode == "big" and welcome.rank == 0 else b""
    rank.report("running")
    print(f"{welcome.incarnation} runs as {welcome.rank} with {len(memory)} bytes")
    match mode:
        case "malformed" if welcome.rank == 0:
            rank.socket.sendall(frame(b"\xc1 no message"))
        case "impersonate" if welcome.rank == 0:
            rank.report("running", incarnation="i-other")
        case "other job" if welcome.rank == 0:
            rank.report("running", job_id="j2")
        case "oversize" if welcome.rank == 0:
            rank.report("failed", error="x" * 100_000)
        case "flood" if welcome.rank == 0:
            while True:
                rank.report("running")
        case "store":
            rank.send(StoreRequest(request_id=7, incarnation=rank.incarnation, operation="add", key="k", amount=1))
        case "finish" if welcome.rank == 0:
            rank.report("finished")
            sys.exit(0)
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("ignores SIGTERM")
        case "write":
            try:
                with open("/proc/self/comm", "w"):
                    print("write outside: done")
            except PermissionError as error:
                print("write outside:", type(error).__name__)
        case "last words":
            sys.stdout.write("".join(f"line {number}\n" for number in range(20_000)) + "no newline at the end")
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    while True:
        message = rank.receive()
        if isinstance(message, RankOrder) and message.directive.rank != rank.rank:
            rank.rank = message.directive.rank
            rank.report("running")
            time.sleep(0.05)
            print(f"{rank.incarnation} took role {rank.rank}")


main(sys.argv[1] if len(sys.argv) > 1 else "")

"""A rank listens where its agent tells it to, and says so if it cannot."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tmd.protocol.codec import FROM_RANK, PROTOCOL, TO_RANK, FrameReader, frame
from tmd.protocol.control import FromRank, RankUpdate, RankWelcome

#: A process that has to import torch first, on a busy machine.
TIMEOUT_S = 60.0
PROGRAM = "import sys; from tmd_worker.member import MemberEngine; MemberEngine.run(int(sys.argv[1]), print)"


@contextmanager
def rank_told(
    host: str, port_range: tuple[int, int] | None, protocol: tuple[int, int] = PROTOCOL
) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """A real rank process, and the agent's end of its control socket."""
    welcome = RankWelcome(
        job_id="j",
        incarnation="a",
        node="n0",
        host=host,
        rank=0,
        local_rank=0,
        world_size=1,
        nproc_per_node=1,
        job_key=b"k" * 32,
        hold_limit_s=TIMEOUT_S,
        heartbeat_s=1.0,
        port_range=port_range,
        protocol=protocol,
    )
    agent, its_own = socket.socketpair()
    command = [sys.executable, "-c", PROGRAM, str(its_own.fileno())]
    with agent, ExitStack() as ending:
        with its_own:
            process = subprocess.Popen(command, pass_fds=[its_own.fileno()], stderr=subprocess.PIPE, text=True)
        ending.enter_context(process)
        ending.callback(process.kill)
        agent.settimeout(TIMEOUT_S)
        agent.sendall(frame(TO_RANK.encode(welcome)))
        yield process, agent


def listens_at(agent: socket.socket) -> tuple[str, int]:
    reader: FrameReader[FromRank] = FrameReader(FROM_RANK)
    while True:
        data = agent.recv(1 << 16)
        assert data, "the rank has ended"
        for message in reader.feed(data):
            if isinstance(message, RankUpdate) and message.status.port:
                return message.status.host, message.status.port


def test_a_rank_takes_a_port_of_the_range_and_says_so_if_there_is_none() -> None:
    with socket.socket(socket.AF_INET6) as free:
        free.bind(("::1", 0))
        port = free.getsockname()[1]
    with rank_told("::1", (port, port)) as (_, agent):
        assert listens_at(agent) == ("::1", port)
        with rank_told("::1", (port, port)) as (late, _):
            _, said = late.communicate(timeout=TIMEOUT_S)
            assert late.returncode == 1
    assert said.startswith(
        f"tmd: no port of {port}-{port} on ::1 is free for this rank (Address already in use); give tmd-run a wider"
    )
    assert "Traceback" not in said


def test_a_rank_whose_agent_speaks_another_protocol_ends_with_the_reason() -> None:
    with rank_told("127.0.0.1", None, protocol=(2, 0)) as (rank, _):
        _, said = rank.communicate(timeout=TIMEOUT_S)
        assert rank.returncode == 1
    assert said.startswith("tmd: between this rank and its agent: protocol 2.0 is not served: this side speaks ")
    assert "Traceback" not in said

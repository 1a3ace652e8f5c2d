"""Real rank processes for the tests of the transport: forked, linked with one another, and gone when the test ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers and functional collectives import it when first used: once here, not in every rank process
import torch.distributed as dist

from tmd.protocol.control import TransportName
from tmd.protocol.membership import Member, Membership
from tmd_worker import faults
from tmd_worker.core.rank import Admission
from tmd_worker.transport import ports, shell
from tmd_worker.transport.fabric import Fabric

JOB_KEY = b"k" * 32
DEADLINE_S = 60.0
#: Tests that must hold whatever carries the collectives, and however tmd's own links do.
ALL_WAYS = pytest.mark.parametrize(
    ("transport", "links"), [("delta", "tcp"), ("delta", "unix"), ("delta", "shm"), ("gloo", "tcp")]
)
Body = Callable[["Rank"], Any]


class Events:
    """As the runtime's: a broken link poisons its epoch, and poison closes all links."""

    def __init__(self) -> None:
        self.fabric: Fabric
        self.broken: list[tuple[int, int, bool, str]] = []
        self.poisoned_epoch = -1
        self.run_epoch = 0
        self.voted = False
        self.died: list[BaseException] = []
        self.changed = threading.Condition()

    def link_broken(self, epoch: int, peer: int, *, orderly: bool, reason: str) -> None:
        with self.changed:
            self.broken.append((epoch, peer, orderly, reason))
        self.poison(epoch, reason)

    def poison(self, epoch: int, reason: str) -> None:
        with self.changed:
            self.poisoned_epoch = max(self.poisoned_epoch, epoch)
            self.fabric.close(epoch, reason)
            self.changed.notify_all()

    def admit(self, *, in_autograd: bool, log_only: bool) -> Admission:
        poisoned = self.run_epoch <= self.poisoned_epoch
        if self.voted and not log_only:
            return Admission.LOCAL if in_autograd else Admission.AFTER_VOTE
        if poisoned:
            return Admission.LOCAL if in_autograd or log_only else Admission.DISCARD
        return Admission.PROCEED

    def thread_died(self, error: BaseException) -> None:
        with self.changed:
            self.died.append(error)
            self.changed.notify_all()

    def wait_poisoned(self, epoch: int = 0) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.poisoned_epoch >= epoch, DEADLINE_S), "never poisoned"


class Rank:
    """What a test's body gets in a rank process."""

    def __init__(self, rank: int, size: int, pipe: Connection, host: str, store_path: str, transport: TransportName) -> None:
        self.rank = rank
        self.size = size
        self.events = Events()
        self.incarnation = f"inc-{rank}"
        self.fabric = Fabric(host=host, job_key=JOB_KEY, incarnation=self.incarnation, events=self.events, transport=transport)
        self.events.fabric = self.fabric
        self._pipe = pipe
        self._store_path = store_path

    def member(self) -> Member:
        return Member(incarnation=self.incarnation, node=f"n{self.rank}", host=self.fabric.host, port=self.fabric.port)

    def tell(self, message: Any) -> None:
        self._pipe.send(message)

    def hear(self) -> Any:
        assert self._pipe.poll(DEADLINE_S), "the test said nothing"
        return self._pipe.recv()

    def make_world(self) -> None:
        shell.register()
        store = dist.FileStore(  # type: ignore[attr-defined]
            self._store_path, self.size
        )
        dist.init_process_group("tmd", store=store, rank=self.rank, world_size=self.size)

    def go_live(self, membership: Membership) -> int:
        self.table = membership
        opened = self.fabric.open(membership, self.rank, DEADLINE_S)
        self.fabric.activate(membership.epoch)
        self.events.run_epoch = membership.epoch
        return opened


class Process:
    """The test's end of one rank process."""

    def __init__(self, rank: int, process: multiprocessing.process.BaseProcess, pipe: Connection) -> None:
        self.rank = rank
        self._process = process
        self._pipe = pipe

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def tell(self, message: Any) -> None:
        self._pipe.send(message)

    def hear(self, timeout_s: float = DEADLINE_S) -> Any:
        """The next message of the body; an exception in it is raised here."""
        assert self._pipe.poll(timeout_s), f"rank {self.rank} said nothing for {timeout_s} s"
        kind, value = self._pipe.recv()
        assert kind != "error", f"rank {self.rank}:\n{value}"
        return value

    def end(self) -> None:
        self._process.kill()
        self._process.join(DEADLINE_S)
        self._pipe.close()


@contextmanager
def ranks(
    size: int,
    body: Body,
    *,
    live: bool = True,
    setup: Callable[[Rank], None] | None = None,
    one_host: bool = False,
    address: str | None = None,
    transport: TransportName = "delta",
    links: str | None = None,
) -> Iterator[list[Process]]:
    """`size` processes that run `body(rank)`; what it returns is the last message of each. Killed at the end, whatever happens.

    `live`: linked in epoch 0 before the body begins, with the default group made. `setup` runs before anything else. `one_host`:
    all have the same address, `address` if it is given; otherwise each has its own, as on as many machines. `links`: "unix" or
    "shm", all on one host and linked in this way; "tcp", as on as many machines.
    """
    one_host = one_host or links in ("unix", "shm")
    context = multiprocessing.get_context("fork")
    started: list[Process] = []
    with tempfile.TemporaryDirectory() as directory:
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                host = address or f"127.0.0.{2 if one_host else rank + 2}"
                arguments = (rank, size, theirs, host, f"{directory}/store", body, live, setup, transport, links)
                process = context.Process(target=_run, args=arguments, daemon=True)
                process.start()
                theirs.close()
                started.append(Process(rank, process, ours))
            if live:
                members = {member.rank: member.hear() for member in started}
                for member in started:
                    member.tell(Membership(epoch=0, members=members))
            yield started
        finally:
            for member in started:
                member.end()


def run_ranks(size: int, body: Body, **options: Any) -> list[Any]:
    """What `body` returned on each rank."""
    with ranks(size, body, **options) as processes:
        return [process.hear() for process in processes]


class _Tagged:
    """Marks messages of the body, so that errors can be told from them."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.poll, self.recv = pipe.poll, pipe.recv

    def send(self, message: Any) -> None:
        self._pipe.send(("message", message))


def _run(
    rank: int,
    size: int,
    pipe: Connection,
    host: str,
    store_path: str,
    body: Body,
    live: bool,
    setup: Callable[[Rank], None] | None,
    transport: TransportName,
    links: str | None,
) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    torch.set_num_threads(1)
    if links is not None:
        os.environ[ports.LOCAL_LINKS] = links
    try:
        me = Rank(rank, size, _Tagged(pipe), host, store_path, transport)  # type: ignore[arg-type]
        faults.rank = rank
        if setup is not None:
            setup(me)
        me.fabric.set_role(rank, size, 1)
        if live:
            me.make_world()
            me.tell(me.member())
            me.go_live(me.hear())
        me.tell(body(me))
        me._pipe.poll(DEADLINE_S)  # stay until the test ends
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        time.sleep(DEADLINE_S)
    os._exit(0)

"""The calls between two members: send, receive from one or from any, and the barrier that says who is missing."""

from __future__ import annotations

import datetime
import time
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from tmd_worker.transport import sandbox
from tmd_worker.transport.calling import CallingGroup, each, listed
from tmd_worker.transport.collectives import LinkTable
from tmd_worker.transport.tensors import check
from tmd_worker.transport.work import Operation, TmdWork


class MessagingGroup(CallingGroup):
    """Ranks are group ranks, tags are not negative."""

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Work:
        """Raises ValueError for a rank or tag that cannot be."""
        self._check_peer("send", destination, tag)
        return self._send(listed(tensors)[0], destination, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Work:
        """Raises ValueError for a rank or tag that cannot be."""
        self._check_peer("recv", source, tag)
        return self._receive("recv", listed(tensors)[0], source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """The work's `_source_rank` says who it was."""
        self._check_tag("recv_anysource", tag)
        return self._receive("recv_anysource", listed(tensors)[0], None, tag)

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Returns once all have come; member 0 says who has not. Blocks for at most `timeout`, by default the group's.

        Raises RuntimeError; on member 0 it names who is missing (only the first one, unless `wait_all_ranks`). Who is missing may
        still come later: the next monitored barrier is not confused by that.
        """
        timeout_s = self._group.timeout_s if timeout is None else timeout.total_seconds()
        deadline_s = time.monotonic() + timeout_s
        if self._group.rank:
            self._report(deadline_s, timeout_s)
        else:
            self._count_in(deadline_s, timeout_s, wait_all_ranks)

    def _report(self, deadline_s: float, timeout_s: float) -> None:
        tag = self._barrier_tag(0)
        self._send(_nothing(), 0, tag)
        told = self._receive("monitored_barrier", _nothing(), 0, tag)
        if not told.ended_within(max(deadline_s - time.monotonic(), 0)):
            reason = (
                f"monitored_barrier: rank 0 of the group let nobody go within {timeout_s:.1f} s; its error names who is missing"
            )
            self._withdraw(told, reason)
        told.wait()

    def _count_in(self, deadline_s: float, timeout_s: float, wait_all_ranks: bool) -> None:
        tags = {place: self._barrier_tag(place) for place in range(1, self._group.size)}
        come = {place: self._receive("monitored_barrier", _nothing(), place, tag) for place, tag in tags.items()}
        missing: list[int] = []
        for place, work in come.items():
            if not work.ended_within(max(deadline_s - time.monotonic(), 0)):
                missing.append(place)
                if not wait_all_ranks:
                    break
        if missing:
            names = ", ".join(str(place) for place in missing)
            reason = f"ranks {names} of the group did not reach monitored_barrier within {timeout_s:.1f} s"
            for work in come.values():
                self._withdraw(work, reason)
            come[missing[0]].wait()
        for work in come.values():
            work.wait()
        for place, tag in tags.items():
            self._send(_nothing(), place, tag)

    def _barrier_tag(self, place: int) -> int:
        """Negative, unlike those of users; counted for each pair of ranks, whose links begin and end together."""
        table = self._group.table
        if table is None or self._fabric.sandbox:
            return -1  # nothing is sent
        channel = self._fabric.pairs.of(self._group, table.epoch).channel(place)
        channel.barriers += 1
        return -channel.barriers

    def _withdraw(self, work: TmdWork, reason: str) -> None:
        table = self._group.table
        if table is not None:
            self._fabric.pairs.of(self._group, table.epoch).withdraw(work, reason)

    # ---------------------------------------------------------------- on their way

    def _send(self, tensor: Tensor, destination: int, tag: int) -> TmdWork:
        check([tensor], "send")

        def dispatch(operation: Operation, table: LinkTable) -> None:
            self._fabric.pairs.of(self._group, table.epoch).send(operation, tensor, destination, tag)

        return self._pairwise("send", [], dispatch, lambda: None)

    def _receive(self, name: str, tensor: Tensor, source: int | None, tag: int) -> TmdWork:
        check([tensor], name, [tensor])
        unknown = sandbox.uninitialised()
        group = self._group

        def dispatch(operation: Operation, table: LinkTable) -> None:
            self._fabric.pairs.of(group, table.epoch).receive(operation, tensor, source, tag)

        def local() -> None:
            each(sandbox.none_pickled if unknown else sandbox.received, [tensor])

        likely = (group.rank - 1) % group.size if source is None else source
        return self._pairwise(name, [tensor], dispatch, local, likely)

    def _check_peer(self, name: str, place: int, tag: int) -> None:
        self._check_tag(name, tag)
        if place == self._group.rank:
            raise ValueError(f"{name} to or from this rank itself (rank {place} of group {self._group.name})")
        if not 0 <= place < self._group.size:
            raise ValueError(f"{name}: {place} is no rank of a group of {self._group.size}")

    @staticmethod
    def _check_tag(name: str, tag: int) -> None:
        if tag < 0:
            raise ValueError(f"{name}: a tag must not be negative, got {tag}")


def _nothing() -> Tensor:
    """On the CPU, whatever the script has made the default."""
    return torch.empty(0, device="cpu")

"""The rendezvous stores, one per job, kept in the ledger so that they outlive the daemon.

Contract: a reply is sent once what it says is durable; a repeated request (same incarnation and id) gets its first answer and
changes nothing. Requests that wait go into one transaction. The meaning of each operation is that of torch.distributed's
TCPStore; whoever waits for a key asks again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec

from tmd.ledger.errors import LedgerUnavailable
from tmd.ledger.ledger import Ledger, StoreChange
from tmd.protocol.agent import StoreReply, StoreRequest

log = logging.getLogger("tmd.daemon")

_Result = TypeVar("_Result")

KEYS_LIMIT = 4096
KEY_LIMIT_BYTES = 1024
VALUE_LIMIT_BYTES = 1 << 20
#: All values of one job together.
TOTAL_LIMIT_BYTES = 64 << 20
#: Replies to changes that are remembered for each incarnation: more than it may have open at once.
REPLIES_KEPT = 64
#: Stores written in one transaction.
_TURN_REQUESTS = 1024
_RETRY_S = 1.0

_CHANGES = frozenset({"set", "add", "compare_set", "delete"})
_REPLY = msgspec.msgpack.Decoder(StoreReply)


class JobStore:
    """One job's keys and the replies it remembers; no I/O. What changed is collected for the ledger."""

    def __init__(self, values: dict[str, bytes], replies: dict[tuple[str, int], bytes]) -> None:
        self._values = values
        self._size_bytes = sum(map(len, values.values()))
        self._replies: dict[str, dict[int, StoreReply]] = {}
        for (incarnation, request_id), reply in replies.items():
            self._replies.setdefault(incarnation, {})[request_id] = _REPLY.decode(reply)
        self.changed: dict[str, bytes | None] = {}
        self.answered: dict[tuple[str, int], StoreReply] = {}
        self.forgotten: list[tuple[str, int]] = []

    def apply(self, request: StoreRequest) -> StoreReply:
        """Carries the request out unless it was before. A request that is refused says why in `error`."""
        if request.operation not in _CHANGES:
            return self._carry_out(request)
        remembered = self._replies.setdefault(request.incarnation, {})
        if request.request_id in remembered:
            return remembered[request.request_id]
        reply = self._carry_out(request)
        remembered[request.request_id] = self.answered[request.incarnation, request.request_id] = reply
        while len(remembered) > REPLIES_KEPT:
            oldest = next(iter(remembered))
            del remembered[oldest]
            self.answered.pop((request.incarnation, oldest), None)
            self.forgotten.append((request.incarnation, oldest))
        return reply

    def _carry_out(self, request: StoreRequest) -> StoreReply:
        operation: Callable[[StoreRequest], StoreReply] = getattr(self, f"_{request.operation}")
        try:
            return operation(request)
        except ValueError as error:
            return _reply(request, found=False, error=f"store {request.operation} of {request.key[:80]!r} refused: {error}")

    def _set(self, request: StoreRequest) -> StoreReply:
        self._put(request.key, request.value)
        return _reply(request)

    def _get(self, request: StoreRequest) -> StoreReply:
        value = self._values.get(request.key)
        return _reply(request, found=value is not None, value=value or b"")

    def _add(self, request: StoreRequest) -> StoreReply:
        """Counters are decimal text, as in TCPStore."""
        before = self._values.get(request.key, b"0")
        try:
            number = int(before) + request.amount
        except ValueError:
            raise ValueError(f"it holds {before[:40]!r}, which is no number") from None
        self._put(request.key, str(number).encode())
        return _reply(request, number=number)

    def _compare_set(self, request: StoreRequest) -> StoreReply:
        """Replies what the key holds afterwards; of a key that is not there what was expected, unless nothing was."""
        before = self._values.get(request.key)
        if before == request.expected or (before is None and not request.expected):
            self._put(request.key, request.value)
            return _reply(request, value=request.value)
        return _reply(request, found=before is not None, value=request.expected if before is None else before)

    def _delete(self, request: StoreRequest) -> StoreReply:
        value = self._values.pop(request.key, None)
        if value is not None:
            self._size_bytes -= len(value)
            self.changed[request.key] = None
        return _reply(request, found=value is not None, number=int(value is not None))

    def _check(self, request: StoreRequest) -> StoreReply:
        return _reply(request, found=all(key in self._values for key in request.keys))

    def _num_keys(self, request: StoreRequest) -> StoreReply:
        return _reply(request, number=len(self._values))

    def _put(self, key: str, value: bytes) -> None:
        """Raises ValueError naming the limit."""
        before = self._values.get(key)
        grown_bytes = self._size_bytes + len(value) - len(before or b"")
        if not key or len(key.encode()) > KEY_LIMIT_BYTES:
            raise ValueError(f"a key has 1 to {KEY_LIMIT_BYTES} bytes")
        if len(value) > VALUE_LIMIT_BYTES:
            raise ValueError(f"the value has {len(value)} bytes, the limit is {VALUE_LIMIT_BYTES}")
        if before is None and len(self._values) >= KEYS_LIMIT:
            raise ValueError(f"the job has {KEYS_LIMIT} keys already; delete those that are not needed")
        if grown_bytes > TOTAL_LIMIT_BYTES:
            raise ValueError(f"the job's keys would hold more than {TOTAL_LIMIT_BYTES} bytes; delete those that are not needed")
        self._values[key] = self.changed[key] = value
        self._size_bytes = grown_bytes


def _reply(request: StoreRequest, *, found: bool = True, value: bytes = b"", number: int = 0, error: str = "") -> StoreReply:
    return StoreReply(
        request_id=request.request_id, incarnation=request.incarnation, found=found, value=value, number=number, error=error
    )


class RendezvousStores:
    """All jobs' stores, with one task (`run`) that carries out and writes."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._jobs: dict[str, JobStore] = {}
        self._waiting: list[tuple[str, StoreRequest, Callable[[StoreReply], None]]] = []
        self._some_job_ended = True
        self._bell = asyncio.Event()

    def request(self, job_id: str, request: StoreRequest, answer: Callable[[StoreReply], None]) -> None:
        """`answer` is called once the reply is durable, however long the ledger cannot be written."""
        self._waiting.append((job_id, request, answer))
        self._bell.set()

    def job_ended(self, job_id: str) -> None:
        """Call once that is in the ledger: nobody will ask again."""
        self._jobs.pop(job_id, None)
        self._some_job_ended = True
        self._bell.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._bell.wait()
            self._bell.clear()
            while self._waiting:
                turn, self._waiting = self._waiting[:_TURN_REQUESTS], self._waiting[_TURN_REQUESTS:]
                await self._take_turn(turn)
            if self._some_job_ended:
                self._some_job_ended = False
                await self._until_done(self._ledger.forget_ended_stores)

    async def _take_turn(self, turn: list[tuple[str, StoreRequest, Callable[[StoreReply], None]]]) -> None:
        replies = []
        for job_id, request, answer in turn:
            if job_id not in self._jobs:
                self._jobs[job_id] = JobStore(*await self._until_done(partial(self._ledger.store_contents, job_id)))
            replies.append((answer, self._jobs[job_id].apply(request)))
        change = self._collect({job_id for job_id, _, _ in turn})
        if change.values or change.replies or change.forgotten:
            await self._until_done(lambda: self._ledger.write_store(change))
        for answer, reply in replies:
            answer(reply)

    def _collect(self, job_ids: set[str]) -> StoreChange:
        values: dict[tuple[str, str], bytes | None] = {}
        replies: dict[tuple[str, str, int], bytes] = {}
        forgotten: list[tuple[str, str, int]] = []
        for job_id in job_ids:
            store = self._jobs[job_id]
            values |= {(job_id, key): value for key, value in store.changed.items()}
            replies |= {(job_id, *key): msgspec.msgpack.encode(reply) for key, reply in store.answered.items()}
            forgotten += [(job_id, *key) for key in store.forgotten]
            store.changed, store.answered, store.forgotten = {}, {}, []
        return StoreChange(values=values, replies=replies, forgotten=forgotten)

    async def _until_done(self, work: Callable[[], Awaitable[_Result]]) -> _Result:
        while True:
            try:
                return await work()
            except LedgerUnavailable as error:
                log.error("the rendezvous stores wait: %s; jobs that make a new group wait with them; trying again", error)
            await asyncio.sleep(_RETRY_S)

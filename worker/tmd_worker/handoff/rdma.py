"""The transport over RDMA: the joiner reads the source's memory, and no code of the source runs meanwhile.

Contract: see `transfer`. Each end of each handoff has a protection domain and queue pairs of its own, so a key that the source
gives out is good for this joiner alone, for reading alone, and until the source's end is closed or exports something else. The
device that is nearest to the memory is used (`rdma_ports`). Memory that was prepared stays registered; its key is not told before
`export`.

Every way in which it fails has a reason for people: no device, no address, no permission, the limit on locked memory, no route, a
port that goes down, a source that refuses or does not answer. The hello and its answer are msgpack; a peer that sends anything
else is refused.
"""

from __future__ import annotations

import ctypes
import mmap
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from tmd_worker.handoff import rdma_ports
from tmd_worker.handoff import verbs as v
from tmd_worker.handoff.rdma_memory import Registrations
from tmd_worker.handoff.rdma_queues import Device, Endpoint, Queues, Read
from tmd_worker.handoff.transfer import Chunk, Dial, Memory, Region, TransferFailed, Work

#: Chunks that are asked for at once: 16 MiB. Measured: 64 MiB overran the receiving side of soft RoCE, and were sent again.
CHUNKS_UNDER_WAY = 4
#: How long somebody sleeps between two looks for what has arrived: at least, and at most, so that trouble is seen soon.
_LOOK_S = 0.0002
_LONGEST_LOOK_S = 0.005
#: Of the time that a chunk takes: looking costs the CPU that soft RoCE needs itself, and the other chunks are on their way.
_LOOKS_PER_CHUNK = 4
_PROBE_BYTES = 1 << 20
_TRIAL_BYTES = 4096

_Message = TypeVar("_Message", bound=msgspec.Struct)


class Answer(msgspec.Struct, frozen=True):
    """What a source says to a joiner's hello: its end, and what reading the trial area must give."""

    endpoint: Endpoint
    trial: Region
    holds: bytes


class Rdma:
    """The transport, for all handoffs of a process. `gpu_pci`: the real path in /sys of the GPU whose memory it mostly moves."""

    name = "rdma"

    def __init__(self, gpu_pci: str = "") -> None:
        self._gpu_pci = gpu_pci

    def probe(self) -> str:
        page = _Area(_PROBE_BYTES)
        try:
            device = self.open()
            try:
                registrations = Registrations(device.verbs, device.domain, v.ACCESS_LOCAL_WRITE)
                try:
                    registrations.hold([page.memory])
                finally:
                    registrations.close()
            finally:
                device.close()
        except TransferFailed as error:
            return str(error).removeprefix("rdma: ")
        return ""

    def source(self) -> RdmaSource:
        return RdmaSource(self)

    def joiner(self, dial: Dial) -> RdmaJoiner:
        """It needs no connection besides its own."""
        return RdmaJoiner(self)

    def open(self) -> Device:
        """The nearest port that is up. Raises TransferFailed."""
        found = rdma_ports.ports()
        port = rdma_ports.best(found, gpu_pci=self._gpu_pci, numa_node=rdma_ports.own_numa_node())
        if port is None:
            raise TransferFailed(f"rdma: {rdma_ports.why_none(found)}")
        try:
            return Device(v.load(), port)
        except v.VerbsMissing as error:
            raise TransferFailed(f"rdma: {port} is up, but {error}") from error


class _End:
    """What the two ends share: a device, registrations and queue pairs, each made when it is first needed."""

    access: int

    def __init__(self, transport: Rdma) -> None:
        self._transport = transport
        self._trial = _Area(_TRIAL_BYTES)
        #: Held while anything below is used.
        self._using = threading.Lock()
        self._closed = False
        self._device: Device | None = None
        self._registrations: Registrations | None = None
        self._trial_registration: Registrations | None = None
        self._queues: Queues | None = None

    def prepare(self, memory: Sequence[Memory]) -> None:
        with self._using:
            self._hold(memory)

    def close(self) -> None:
        self._closed = True
        with self._using:
            self._end()

    def _opened(self) -> Device:
        if self._closed:
            raise TransferFailed("rdma: this end was closed")
        if self._device is None:
            self._device = self._transport.open()
        return self._device

    def _hold(self, memory: Sequence[Memory]) -> Registrations:
        device = self._opened()
        if self._registrations is None:
            self._registrations = Registrations(device.verbs, device.domain, self.access)
        self._registrations.hold(memory)
        return self._registrations

    def _make_queues(self, kind: str = "") -> Queues:
        """With an address of this kind, if one is named; and the trial area is registered."""
        device = self._opened()
        gid = rdma_ports.gid_for(device.port, kind)
        if gid is None:
            own = ", ".join(gid.kind for gid in device.port.gids)
            raise TransferFailed(f"rdma: the joiner's address is {kind}, {device.port} has {own}: no network carries both")
        self._queues = Queues(device, gid, self.access & v.ACCESS_REMOTE_READ)
        self._trial_registration = Registrations(device.verbs, device.domain, self.access)
        self._trial_registration.hold([self._trial.memory])
        return self._queues

    def _end(self) -> None:
        """Connections first: once they are gone, no byte is read or written."""
        for part in (self._queues, self._registrations, self._trial_registration, self._device):
            if part is not None:
                part.close()
        self._queues = self._registrations = self._trial_registration = self._device = None


class RdmaSource(_End):
    """A source's end. How much was read from it, its device does not say."""

    access = v.ACCESS_REMOTE_READ

    def accept(self, hello: bytes, timeout_s: float) -> bytes:
        deadline_s = time.monotonic() + timeout_s
        peer = _decode(hello, Endpoint)
        with self._using:
            queues = self._make_queues(peer.gid_kind)
            assert self._trial_registration is not None
            queues.connect(peer, deadline_s)
            holds = secrets.token_bytes(_TRIAL_BYTES)
            self._trial.fill(holds)
            key = self._trial_registration.of(self._trial.memory).rkey
            return msgspec.msgpack.encode(Answer(queues.endpoint, Region(*self._trial.memory, key), holds))

    def export(self, memory: Sequence[Memory]) -> tuple[Region, ...]:
        with self._using:
            registrations = self._hold(memory)
            regions = []
            for part in memory:
                registration = registrations.of(part)
                regions.append(Region(part.address + registration.shift, part.size_bytes, registration.rkey))
            return tuple(regions)


class RdmaJoiner(_End):
    """A joiner's end."""

    access = v.ACCESS_LOCAL_WRITE

    def hello(self) -> bytes:
        with self._using:
            return msgspec.msgpack.encode(self._make_queues().endpoint)

    def connect(self, answer: bytes, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        accepted = _decode(answer, Answer)
        with self._using:
            self._opened()
            if self._queues is None or self._trial_registration is None:
                raise TransferFailed("rdma: this end has not said hello")
            self._queues.connect(accepted.endpoint, deadline_s)
            key = self._trial_registration.of(self._trial.memory).lkey
            for ticket in range(len(accepted.endpoint.queues)):
                self._trial.fill(bytes(_TRIAL_BYTES))
                trial = accepted.trial
                read = Read(self._trial.memory.address, key, trial.address, trial.key, min(trial.size_bytes, _TRIAL_BYTES))
                self._queues.post(ticket, [read])
                while not self._queues.finished():
                    if time.monotonic() > deadline_s:
                        raise TransferFailed("rdma: a connection was made, but the bytes of the trial did not come in time")
                    time.sleep(_LOOK_S)
                if self._trial.bytes() != accepted.holds:
                    raise TransferFailed("rdma: the bytes of the trial arrived changed")

    def read(self, regions: Sequence[Region], memory: Sequence[Memory], work: Work, timeout_s: float) -> None:
        if [region.size_bytes for region in regions] != [part.size_bytes for part in memory]:
            raise TransferFailed("rdma: the source exports other sizes than are to be read")
        under_way: dict[int, tuple[Chunk, float]] = {}
        pace = _Pace()
        try:
            self.prepare(memory)
            while self._step(regions, memory, work, under_way, pace, timeout_s):
                pass
        except TransferFailed:
            self._closed = True
            with self._using:
                self._end()  # before anybody else writes to where a late byte could still go
            raise
        finally:
            for chunk, _ in reversed(under_way.values()):
                work.give_back(chunk)

    def _step(
        self,
        regions: Sequence[Region],
        memory: Sequence[Memory],
        work: Work,
        under_way: dict[int, tuple[Chunk, float]],
        pace: _Pace,
        timeout_s: float,
    ) -> bool:
        """Asks for what may be asked for, and takes what has arrived. False: nothing is left to do. Raises TransferFailed."""
        while len(under_way) < CHUNKS_UNDER_WAY and self._has_room():
            chunk = work.take(wait=not under_way)
            if chunk is None:
                break
            under_way[chunk.number] = chunk, time.monotonic() + timeout_s
            with self._using:
                self._ask(chunk, regions, memory)
        if not under_way:
            return False
        with self._using:
            arrived = self._connected().finished()
        for number in arrived:
            work.landed(under_way.pop(number)[0])
        for chunk, deadline_s in under_way.values():
            if time.monotonic() > deadline_s:
                raise TransferFailed(
                    f"rdma: {chunk.size_bytes} bytes did not come in {timeout_s} s: the source or the network is too slow or gone"
                )
            break  # the others were asked for later
        if arrived:
            pace.arrived(len(arrived))
        else:
            pace.wait()
        return True

    def _has_room(self) -> bool:
        with self._using:
            return self._connected().has_room

    def _ask(self, chunk: Chunk, regions: Sequence[Region], memory: Sequence[Memory]) -> None:
        queues = self._connected()
        assert self._registrations is not None
        reads: list[Read] = []
        for piece in chunk.pieces:
            registration = self._registrations.of(memory[piece.entry])
            address = memory[piece.entry].address + registration.shift + piece.offset
            region = regions[piece.entry]
            for offset, size in _pieces(piece.size_bytes, queues.message_bytes):
                source = region.address + piece.offset + offset
                reads.append(Read(address + offset, registration.lkey, source, region.key, size))
        queues.post(chunk.number, reads)

    def _connected(self) -> Queues:
        self._opened()
        if self._queues is None:
            raise TransferFailed("rdma: this end has no connection")
        return self._queues


class _Pace:
    """How often it pays to look whether something has arrived."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._look_s = _LOOK_S

    def arrived(self, chunks: int) -> None:
        now_s = time.monotonic()
        chunk_s = (now_s - self._since_s) / chunks
        self._since_s = now_s
        self._look_s = min(max(chunk_s / _LOOKS_PER_CHUNK, _LOOK_S), _LONGEST_LOOK_S)

    def wait(self) -> None:
        time.sleep(self._look_s)


class _Area:
    """A little memory of our own."""

    def __init__(self, size_bytes: int) -> None:
        self._map = mmap.mmap(-1, size_bytes)
        self.memory = Memory(ctypes.addressof(ctypes.c_char.from_buffer(self._map)), size_bytes)

    def fill(self, content: bytes) -> None:
        self._map[:] = content

    def bytes(self) -> bytes:
        return self._map[:]


def _pieces(size_bytes: int, most_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of the messages of which a piece is made."""
    for offset in range(0, size_bytes, most_bytes):
        yield offset, min(most_bytes, size_bytes - offset)


def _decode(message: bytes, kind: type[_Message]) -> _Message:
    try:
        return msgspec.msgpack.decode(message, type=kind)
    except msgspec.DecodeError as error:
        raise TransferFailed(f"rdma: the peer sent something that is no {kind.__name__}: {error}") from error

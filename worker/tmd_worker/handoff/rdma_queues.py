"""Reliable queue pairs between the two ends of one handoff, and one-sided reads over them.

Contract: `Device` is an opened port with a protection domain of its own; `Queues` are a few queue pairs on it. `endpoint` goes to
the peer, `connect` takes the peer's. `post` starts reads under a ticket, `finished` says which tickets' bytes are all in place.
Whatever fails is a TransferFailed and ends all of them. After `close` no byte is written into memory any more: the device has let
go of it.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tmd_worker.handoff import verbs as v
from tmd_worker.handoff.rdma_ports import ACTIVE, ETHERNET, Gid, Port, state_of
from tmd_worker.handoff.transfer import CHUNK_BYTES, CHUNK_PIECES, TransferFailed

#: More than one, since many devices and switches spread load by queue pair.
QUEUES = 2
#: Requests of one queue pair that have not been completed.
QUEUE_REQUESTS = 1024
#: Reads of one queue pair that the two devices carry out at once.
_READS = 16
#: 4.096 µs · 2**18 = 1.1 s without an answer, then again six times: a short flap of a link and a peer that is starved of CPU are
#: survived, a dead peer ends it in about 8 s (a device may take four times that). The control channel usually knows earlier, and
#: closes the end. Seven, the most, would be endless with soft RoCE.
ANSWER_EXPONENT = 18
_RETRIES = 6
_NOT_READY_TIMER = 12
_HOPS = 64
_PSN_BITS = 24
_COMPLETIONS_AT_ONCE = 32


class Endpoint(msgspec.Struct, frozen=True):
    """One end's queue pairs, as the other one needs to know them. `queues`: (number, first packet's number); `reads`: at once."""

    link_layer: str
    gid: str
    gid_kind: str
    lid: int
    mtu: int
    reads: int
    queues: tuple[tuple[int, int], ...]


class Read(NamedTuple):
    """Bytes of the source to be put into memory here; addresses as the two devices know them."""

    address: int
    lkey: int
    source: int
    rkey: int
    size_bytes: int


class Device:
    """See the module's contract. Raises TransferFailed."""

    def __init__(self, verbs: v.Verbs, port: Port) -> None:
        self.verbs = verbs
        self.port = port
        try:
            self.context = verbs.device.Context(name=port.device)
            self.domain = verbs.pd.PD(self.context)
            self.limits = self.context.query_device()
            self.attributes = self.context.query_port(port.number)
        except verbs.error as error:
            raise TransferFailed(f"rdma: {port} cannot be used: {v.error_reason(error)}") from error

    def reason(self, what: str) -> str:
        """`what` went wrong, and if this port is the cause, that."""
        state = state_of(self.port)
        return f"rdma: {what}" if state == ACTIVE else f"rdma: port {self.port} of this machine is {state or 'gone'} ({what})"

    def close(self) -> None:
        """What was made on it must be closed before."""
        for thing in (self.domain, self.context):
            with contextlib.suppress(self.verbs.error):
                thing.close()


class Queues:
    """See the module's contract. `access`: what the peer may do. Not for several threads at once. Raises TransferFailed."""

    def __init__(self, device: Device, gid: Gid, access: int, count: int = QUEUES) -> None:
        self._device = device
        self._gid = gid
        self._access = access
        self._pairs: list[Any] = []
        self._waiting = [0] * count  # requests under way, by queue pair
        self._tickets: dict[int, tuple[int, int]] = {}  # -> (queue pair, its requests)
        self._room: int = min(QUEUE_REQUESTS, device.limits.max_qp_wr)
        self.message_bytes: int = min(device.attributes.max_msg_sz, CHUNK_BYTES)
        self._chunk_requests: int = CHUNK_PIECES + CHUNK_BYTES // self.message_bytes  # at the most
        if self._room < self._chunk_requests:
            raise TransferFailed(f"rdma: {device.port} takes {self._room} requests at a time, which is too few")
        try:
            self._completions = device.verbs.cq.CQ(device.context, min(count * self._room, device.limits.max_cqe))
            for _ in range(count):
                self._pairs.append(self._make())
        except device.verbs.error as error:
            self.close()
            raise TransferFailed(device.reason(f"no queue pair can be made: {v.error_reason(error)}")) from error
        self._first = [secrets.randbits(_PSN_BITS) for _ in range(count)]

    def _make(self) -> Any:
        module = self._device.verbs.qp
        cap = module.QPCap(max_send_wr=self._room, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        init = module.QPInitAttr(qp_type=v.QPT_RC, scq=self._completions, rcq=self._completions, cap=cap, sq_sig_all=0)
        attributes = module.QPAttr(port_num=self._device.port.number)
        attributes.qp_access_flags = self._access  # only those given here ever arrive
        return module.QP(self._device.domain, init, attributes)

    @property
    def endpoint(self) -> Endpoint:
        attributes, limits = self._device.attributes, self._device.limits
        return Endpoint(
            link_layer=self._device.port.link_layer,
            gid=self._gid.address,
            gid_kind=self._gid.kind,
            lid=attributes.lid,
            mtu=int(attributes.active_mtu),
            reads=min(limits.max_qp_rd_atom, limits.max_qp_init_rd_atom, _READS),
            queues=tuple((pair.qp_num, first) for pair, first in zip(self._pairs, self._first, strict=True)),
        )

    def connect(self, peer: Endpoint, deadline_s: float) -> None:
        """Raises TransferFailed. The kernel looks for the peer's address meanwhile, by a deadline of its own of a second."""
        if len(peer.queues) != len(self._pairs) or peer.link_layer != self._device.port.link_layer:
            raise TransferFailed(
                f"rdma: the peer has {len(peer.queues)} queue pairs on {peer.link_layer}, this machine {len(self._pairs)} on "
                f"{self._device.port.link_layer}"
            )
        for pair, (number, first), own in zip(self._pairs, peer.queues, self._first, strict=True):
            if time.monotonic() > deadline_s:
                raise TransferFailed(self._device.reason("no connection was made in time"))
            try:
                pair.to_rts(self._attributes(peer, number, first, own))
            except self._device.verbs.error as error:
                raise TransferFailed(
                    self._device.reason(f"no connection from {self._gid.address} to {peer.gid}: {v.error_reason(error)}")
                ) from error

    def _attributes(self, peer: Endpoint, number: int, first: int, own: int) -> Any:
        modules, port = self._device.verbs, self._device.port
        attributes = modules.qp.QPAttr(port_num=port.number)
        attributes.qp_access_flags = self._access
        attributes.path_mtu = min(peer.mtu, int(self._device.attributes.active_mtu))
        attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn = number, first, own
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = max(1, min(peer.reads, self.endpoint.reads))
        attributes.timeout, attributes.retry_cnt = ANSWER_EXPONENT, _RETRIES
        attributes.rnr_retry, attributes.min_rnr_timer = _RETRIES, _NOT_READY_TIMER
        route = modules.addr.GlobalRoute(dgid=modules.addr.GID(peer.gid), sgid_index=self._gid.index, hop_limit=_HOPS)
        is_global = port.link_layer == ETHERNET or not peer.lid  # InfiniBand's own subnet goes by its local identifiers
        attributes.ah_attr = modules.addr.AHAttr(port_num=port.number, is_global=int(is_global), gr=route, dlid=peer.lid)
        return attributes

    @property
    def has_room(self) -> bool:
        """Whether one more chunk, whatever its pieces, may be posted."""
        return min(self._waiting) + self._chunk_requests <= self._room

    def post(self, ticket: int, reads: Sequence[Read]) -> None:
        """Starts them on the queue pair with the least to do; there must be room. The ticket is finished when all of them are."""
        place = min(range(len(self._pairs)), key=self._waiting.__getitem__)
        module = self._device.verbs.wr
        following = None
        kept: list[Any] = []  # the next request is known by its address alone
        for read in reversed(reads):
            request = module.SendWR(
                wr_id=ticket,
                opcode=v.WR_RDMA_READ,
                num_sge=1,
                sg=[module.SGE(read.address, read.size_bytes, read.lkey)],
                send_flags=0 if kept else v.SEND_SIGNALED,
                next_wr=following,
            )
            request.set_wr_rdma(read.rkey, read.source)
            kept.append(request)
            following = request
        try:
            self._pairs[place].post_send(following)
        except self._device.verbs.error as error:
            raise TransferFailed(self._device.reason(f"a read cannot be started: {v.error_reason(error)}")) from error
        self._waiting[place] += len(reads)
        self._tickets[ticket] = place, len(reads)

    def finished(self) -> list[int]:
        """The tickets whose bytes have all arrived since the last call. Raises TransferFailed; never waits."""
        try:
            _, completions = self._completions.poll(_COMPLETIONS_AT_ONCE)
        except self._device.verbs.error as error:
            raise TransferFailed(self._device.reason(f"the device cannot say what arrived: {v.error_reason(error)}")) from error
        tickets = []
        for completion in completions:
            if completion.status != v.WC_SUCCESS:
                raise TransferFailed(self._device.reason(v.completion_reason(completion.status)))
            place, requests = self._tickets.pop(completion.wr_id)
            self._waiting[place] -= requests
            tickets.append(completion.wr_id)
        return tickets

    def close(self) -> None:
        while self._pairs:
            with contextlib.suppress(self._device.verbs.error):
                self._pairs.pop().close()
        completions, self._completions = getattr(self, "_completions", None), None
        if completions is not None:
            with contextlib.suppress(self._device.verbs.error):
                completions.close()

"""The same transfers in C, one call each, without the GIL. The same frames, the same order of summation, the same bits.

Each function returns False if it cannot do the work here and nothing has been sent: there is no native core, the type or the
reduction is not one of its own, or a fault waits in the middle of a frame. Then the caller does it in Python. Memory is
contiguous and writable. All raise LinkEnded.
"""

from __future__ import annotations

import ctypes
import enum
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tmd_worker import faults
from tmd_worker.core.ballot import tree_children, tree_parent
from tmd_worker.native import library
from tmd_worker.native.library import Frame, Outcome, Piece
from tmd_worker.transport.link import BROKEN_OFF, Link, LinkEnded
from tmd_worker.transport.stream import why
from tmd_worker.transport.tensors import Reduction, size_bytes
from tmd_worker.transport.wire import Kind

if TYPE_CHECKING:
    from tmd_worker.transport.collectives import LinkTable

_STORE = -1
_OPERATIONS = {"SUM": 0, "AVG": 0, "MIN": 1, "MAX": 2, "PRODUCT": 3, "BAND": 4, "BOR": 5, "BXOR": 6}
_TYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
    torch.bool: 9,
}
_FLOATS = range(4)
_BITWISE = range(4, 7)
#: A float that is stored, not combined.
_NO_REDUCTION = (0, _STORE)
_MAX_TARGETS = 8
#: As in ward.c.
_NOT_SMALL = 2


class _Code(enum.IntEnum):
    """tmd_code."""

    DONE = 0
    ENDING = enum.auto()
    SEND_FAILED = enum.auto()
    HUNG_UP = enum.auto()
    NO_ROOM = enum.auto()
    STUCK = enum.auto()
    SILENT = enum.auto()
    RECEIVE_FAILED = enum.auto()
    CLOSED = enum.auto()
    OTHER_HEADER = enum.auto()
    NO_MEMORY = enum.auto()
    UNKNOWN = enum.auto()
    BROKEN_OFF = enum.auto()


def _usable() -> ctypes.CDLL | None:
    """A fault in the middle of a frame is the Python code's."""
    return None if faults.armed("frame") else library.core().library


def numbers(dtype: torch.dtype, kind: Reduction) -> tuple[int, int] | None:
    """(type, operation) as the core numbers them, or None."""
    number, operation = _TYPES.get(dtype), _OPERATIONS.get(kind.name)
    if number is None or operation is None or (number in _FLOATS and operation in _BITWISE):
        return None
    return number, operation


def exchange(out: Link, outgoing: Sequence[memoryview], source: Link, incoming: Sequence[memoryview], epoch: int) -> bool:
    """See transport.exchange, whose caller has the lock of `out`."""
    core = _usable()
    if core is None or any(view.readonly for view in outgoing):
        return False
    sends, receives = _frames(outgoing), _frames(incoming)
    outcome = Outcome()
    arguments = (out.address, sends, len(outgoing), source.address, receives, len(incoming), epoch)
    core.tmd_exchange(*arguments, Kind.DATA, ctypes.addressof(outcome))
    _conclude(outcome, epoch, (out, source))
    return True


def exchange_all(outgoing: Sequence[tuple[Link, Tensor]], incoming: Sequence[tuple[Link, Tensor]], epoch: int) -> bool:
    """See transport.exchange."""
    core = _usable()
    if core is None:
        return False
    targets, sources = [link for link, _ in outgoing], [link for link, _ in incoming]
    outcome = Outcome()
    with _Sending(targets):
        core.tmd_exchange_all(
            _pieces(outgoing), len(outgoing), _pieces(incoming), len(incoming), epoch, ctypes.addressof(outcome)
        )
    _conclude(outcome, epoch, [*targets, *sources])
    return True


def ring_allreduce(table: LinkTable, segments: Sequence[Tensor], kind: Reduction) -> bool:
    """Every member ends with all segments, reduced (and divided, if it is an average)."""
    divisor = table.size if kind is Reduction.AVG else 1
    return _ring(table, _tensors(segments), numbers(segments[0].dtype, kind), divisor, gather=True)


def ring_reduce(table: LinkTable, segments: Sequence[Tensor], kind: Reduction) -> bool:
    """Segment `rank` ends reduced here (an average is not divided yet)."""
    return _ring(table, _tensors(segments), numbers(segments[0].dtype, kind), 1, gather=False)


def ring_gather(table: LinkTable, blocks: Sequence[memoryview]) -> bool:
    """Every member ends with everybody's block."""
    return _ring(table, [(_address(block), len(block)) for block in blocks], _NO_REDUCTION, 1, gather=True)


def tree_allreduce(table: LinkTable, total: Tensor, kind: Reduction) -> bool:
    """One frame up the tree, combined with those of the children in their order, and down again."""
    divisor = table.size if kind is Reduction.AVG else 1
    return _tree(table, total.data_ptr(), size_bytes(total), numbers(total.dtype, kind), divisor)


def tree_reduce(table: LinkTable, total: Tensor, kind: Reduction) -> bool:
    """Up the tree alone: member 0 ends with the result, the others with partial sums."""
    divisor = table.size if kind is Reduction.AVG else 1
    return _tree(table, total.data_ptr(), size_bytes(total), numbers(total.dtype, kind), divisor, back=False)


def barrier(table: LinkTable) -> bool:
    """An empty frame up the tree, and down again."""
    return _tree(table, None, 0, _NO_REDUCTION, 1)


def broadcast(table: LinkTable, data: Tensor, source: int | None, targets: Sequence[int]) -> bool:
    """Frame by frame from one neighbour (None: the data is here) to the others."""
    core = _usable()
    if core is None or len(targets) > _MAX_TARGETS:
        return False
    links = [table.links[target] for target in targets]
    origin = None if source is None else table.links[source]
    outcome = Outcome()
    with _Sending(links):
        core.tmd_broadcast(
            None if origin is None else origin.address,
            _addresses(links),
            len(links),
            data.data_ptr(),
            size_bytes(data),
            table.epoch,
            ctypes.addressof(outcome),
        )
    _conclude(outcome, table.epoch, links if origin is None else [*links, origin])
    return True


def vote(table: LinkTable, ballot: bytearray) -> tuple[LinkEnded | None, bool, LinkEnded | None] | None:
    """Turns this member's packed ballot into the result.

    Returns None if it cannot be done here, also when any fault is armed. Else: what broke it, if anything; whether a frame of the
    ballot may have left; and who could not be told the result. Raises Desync, never LinkEnded."""
    core = library.core().library
    if core is None or not faults.none_armed():
        return None
    children, parent = _tree_links(table)
    links = children if parent is None else [*children, parent]
    place = (ctypes.c_uint8 * len(ballot)).from_buffer(ballot)
    sent, outcome, below = ctypes.c_int32(), Outcome(), Outcome()
    arguments = (_addresses(children), len(children), ctypes.addressof(place), table.epoch, ctypes.addressof(sent))
    with _Sending(links):
        core.tmd_vote(_address_of(parent), *arguments, ctypes.addressof(outcome), ctypes.addressof(below))
    from_above = parent is not None and outcome.link == parent.address
    broken = _how_it_ended(outcome, table.epoch, links, Kind.RESULT if from_above else Kind.BALLOT)
    return broken, bool(sent.value), _how_it_ended(below, table.epoch, children, Kind.RESULT)


def hear_ward(ward: Link, wake_fd: int, into: memoryview, lowest_epoch: int, timeout_s: float) -> tuple[int, bool] | None:
    """Takes what a ward has sent, in whole small messages up to its next record, which is waited for until `wake_fd` is readable
    or the time is up. Returns how many bytes of them are in `into` now, and False if what comes next is no such message; None if
    it cannot be done here."""
    core = library.core().library
    if core is None:
        return None
    taken = ctypes.c_uint64()
    place = (ctypes.c_uint8 * len(into)).from_buffer(into)
    timeout_ms = math.ceil(timeout_s * 1000)
    heard = core.tmd_hear_ward(ward.address, wake_fd, place, len(into), lowest_epoch, timeout_ms, ctypes.addressof(taken))
    return taken.value, heard != _NOT_SMALL


def _how_it_ended(outcome: Outcome, epoch: int, links: Sequence[Link], kind: Kind) -> LinkEnded | None:
    try:
        _conclude(outcome, epoch, links, kind)
    except LinkEnded as ended:
        return ended
    return None


def _ring(
    table: LinkTable, blocks: Sequence[tuple[int, int]], reduction: tuple[int, int] | None, divisor: int, *, gather: bool
) -> bool:
    """`blocks`: address and size."""
    core = _usable()
    if core is None or reduction is None:
        return False
    rank, size = table.rank, table.size
    following, previous = table.links[(rank + 1) % size], table.links[(rank - 1) % size]
    places = (ctypes.c_void_p * size)(*[place for place, _ in blocks])
    sizes = (ctypes.c_uint64 * size)(*[size_of for _, size_of in blocks])
    outcome = Outcome()
    arguments = (following.address, previous.address, places, sizes, rank, size, *reduction, divisor, gather, table.epoch)
    with following.tx_lock:
        core.tmd_ring(*arguments, ctypes.addressof(outcome))
    _conclude(outcome, table.epoch, (following, previous))
    return True


def _tree(
    table: LinkTable, place: int | None, size: int, reduction: tuple[int, int] | None, divisor: int, *, back: bool = True
) -> bool:
    core = _usable()
    if core is None or reduction is None:
        return False
    children, parent = _tree_links(table)
    links = children if parent is None else [*children, parent]
    outcome = Outcome()
    arguments = (_addresses(children), len(children), place, size, *reduction, divisor, back, table.epoch)
    with _Sending(links):
        core.tmd_tree(_address_of(parent), *arguments, ctypes.addressof(outcome))
    _conclude(outcome, table.epoch, links)
    return True


def _tree_links(table: LinkTable) -> tuple[list[Link], Link | None]:
    """To the children, in their order, and to the parent (None: this is the root)."""
    above = tree_parent(table.rank)
    children = [table.links[child] for child in tree_children(table.rank, table.size)]
    return children, None if above is None else table.links[above]


def _address_of(link: Link | None) -> int | None:
    return None if link is None else link.address


def _conclude(outcome: Outcome, epoch: int, links: Sequence[Link], kind: Kind = Kind.DATA) -> None:
    """Raises what the outcome is: LinkEnded, Desync or MemoryError."""
    if outcome.code == _Code.DONE:
        return
    code = _Code(outcome.code)
    if code is _Code.NO_MEMORY:
        raise MemoryError("the list of a collective's frames does not fit into memory")
    link = next(link for link in links if link.address == outcome.link)
    reason = why(outcome.error)
    patience = f"{link.timeout_s:.0f} s"
    orderly = bool(outcome.stopped)
    if code is _Code.ENDING:
        raise LinkEnded(link, "was closed by this side")
    if code is _Code.SEND_FAILED:
        raise link.ended(f"does not take data any more ({reason})")
    if code is _Code.HUNG_UP:
        raise link.ended("hung up")
    if code is _Code.BROKEN_OFF:
        raise LinkEnded(link, BROKEN_OFF)
    if code is _Code.NO_ROOM:
        raise LinkEnded(link, f"took no data for {patience}")
    if code is _Code.STUCK:
        raise LinkEnded(link, f"neither took nor sent data for {patience}")
    if code is _Code.SILENT:
        raise LinkEnded(link, f"was silent for {patience}")
    if code is _Code.RECEIVE_FAILED:
        raise LinkEnded(link, f"broke the connection ({reason})", orderly=orderly)
    if code is _Code.CLOSED:
        raise LinkEnded(link, "closed the connection", orderly=orderly)
    link.check(memoryview(outcome.header), kind, epoch, outcome.expected_bytes)
    raise AssertionError(f"the native core ended with {code.name} for no reason")


class _Sending:
    """With the locks of these links' senders. A generator would cost more than some collectives' bytes."""

    __slots__ = ("_links",)

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links

    def __enter__(self) -> None:
        for link in self._links:
            link.tx_lock.acquire()

    def __exit__(self, *_: object) -> None:
        for link in self._links:
            link.tx_lock.release()


def _tensors(blocks: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(block.data_ptr(), size_bytes(block)) for block in blocks]


def _addresses(links: Sequence[Link]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(links))(*[link.address for link in links])


def _pieces(moved: Sequence[tuple[Link, Tensor]]) -> ctypes.Array[Piece]:
    pieces = (Piece * len(moved))()
    for piece, (link, data) in zip(pieces, moved, strict=True):
        piece.link, piece.at, piece.bytes = link.address, data.data_ptr(), data.nbytes
    return pieces


def _frames(views: Sequence[memoryview]) -> ctypes.Array[Frame]:
    return (Frame * len(views))(*[Frame(_address(view), len(view)) for view in views])


def _address(view: memoryview) -> int:
    """Of its first byte; the view keeps the memory."""
    return int(torch.frombuffer(view, dtype=torch.uint8).data_ptr()) if len(view) else 0

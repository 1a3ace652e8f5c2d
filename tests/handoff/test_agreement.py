"""Two ends use the best transport that both can use, say why it is not a better one, and finish over tcp what another began."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator, Sequence

import pytest

from tests.handoff.memory import Buffers
from tests.handoff.rig import DEADLINE_S, Pair
from tmd.protocol.handoff import TransferMode
from tmd_worker.handoff.agreement import Agreed, Agreement, Half, Offer, propose
from tmd_worker.handoff.control import Control
from tmd_worker.handoff.digests import Digests
from tmd_worker.handoff.probe import Transports
from tmd_worker.handoff.pulling import Puller
from tmd_worker.handoff.tcp import Tcp
from tmd_worker.handoff.transfer import (
    CHUNK_BYTES,
    Chunk,
    Dial,
    Memory,
    Region,
    SharedChunks,
    TransferFailed,
    Transport,
    Work,
    split,
)
from tmd_worker.handoff.wire import view_of
from tmd_worker.state.receiving import make_sure


class Pretended:
    """Stands for `rdma`, which needs a device: moves bytes within this process, and has the trouble that a test wants."""

    name = "rdma"

    def __init__(
        self,
        *,
        obstacle: str = "",
        hello_fails: str = "",
        connect_fails: str = "",
        breaks_after: int = 1 << 30,
        brings: bytes = b"",
    ) -> None:
        self.obstacle = obstacle
        self.hello_fails, self.connect_fails = hello_fails, connect_fails
        #: Chunks.
        self.breaks_after = breaks_after
        #: Instead of the source's bytes.
        self.brings = brings
        self.closed = 0
        self.read_timeouts_s: list[float] = []

    def probe(self) -> str:
        return self.obstacle

    def source(self) -> Pretended:
        return self

    def joiner(self, dial: Dial) -> Pretended:
        return self

    def prepare(self, memory: Sequence[Memory]) -> None:
        pass

    def hello(self) -> bytes:
        if self.hello_fails:
            raise TransferFailed(self.hello_fails)
        return b"hello"

    def accept(self, hello: bytes, timeout_s: float) -> bytes:
        assert hello == b"hello"
        return b"answer"

    def connect(self, answer: bytes, timeout_s: float) -> None:
        assert answer == b"answer"
        if self.connect_fails:
            raise TransferFailed(self.connect_fails)

    def export(self, memory: Sequence[Memory]) -> tuple[Region, ...]:
        return tuple(Region(part.address, part.size_bytes, 7) for part in memory)

    def read(self, regions: Sequence[Region], memory: Sequence[Memory], work: Work, timeout_s: float) -> None:
        self.read_timeouts_s.append(timeout_s)
        theirs = Views([Memory(region.address, region.size_bytes) for region in regions])
        ours = Views(memory)
        moved = 0
        while (chunk := work.take()) is not None:
            if moved == self.breaks_after:
                work.give_back(chunk)
                raise TransferFailed("rdma: the port went down")
            for piece in chunk.pieces:
                data = self.brings or theirs.get(piece.entry, piece.offset, piece.size_bytes)
                ours.put(piece.entry, piece.offset, data)
            moved += 1
            work.landed(chunk)

    def close(self) -> None:
        self.closed += 1


class Views:
    def __init__(self, memory: Sequence[Memory]) -> None:
        self._views = [view_of(part) for part in memory]

    def get(self, entry: int, offset: int, size: int) -> bytes:
        return bytes(self._views[entry][offset : offset + size])

    def put(self, entry: int, offset: int, data: bytes) -> None:
        self._views[entry][offset : offset + len(data)] = data


class Ends:
    """A source and a joiner with a control connection between them, each with what a test gives it."""

    def __init__(self, contents: Sequence[bytes], theirs: Sequence[Transport], ours: Sequence[Transport]) -> None:
        self.pair = Pair(contents)
        self.contents = list(contents)
        self.agreed = Agreed(Transports([*theirs, self.pair.tcp]))
        self._transports = Transports([*ours, Tcp()])
        self._sockets = socket.socketpair()

    def agree(self, mode: TransferMode = "auto") -> tuple[Agreement | TransferFailed, TransferFailed | None]:
        """What the joiner got, and what went wrong on the source."""
        heard: list[TransferFailed | None] = [None]

        def answer() -> None:
            try:
                with Control(self._sockets[0], DEADLINE_S) as control:
                    self.agreed.agree(control, self.pair.source_memory.memory, DEADLINE_S)
            except TransferFailed as error:
                heard[0] = error

        answering = threading.Thread(target=answer)
        answering.start()
        got: Agreement | TransferFailed
        try:
            with Control(self._sockets[1], DEADLINE_S) as control:
                memory = self.pair.joiner_memory.memory
                got = propose(control, self._transports, mode, self.pair.dial, memory, DEADLINE_S)
        except TransferFailed as error:
            got = error
        answering.join(DEADLINE_S)
        assert not answering.is_alive()
        return got, heard[0]

    def move(self, agreement: Agreement) -> Puller:
        exports = {name: end.export(self.pair.source_memory.memory) for name, end in self.agreed.ends.items()}
        puller = Puller(agreement, exports, self.pair.joiner_memory.memory, lambda _: None, DEADLINE_S)
        puller.move(split([len(content) for content in self.contents]))
        return puller

    def close(self) -> None:
        self.agreed.close()
        self.pair.close()
        for sock in self._sockets:
            sock.close()


@contextlib.contextmanager
def ends(
    contents: Sequence[bytes] = (b"some bytes",), theirs: Sequence[Transport] = (), ours: Sequence[Transport] = ()
) -> Iterator[Ends]:
    with contextlib.closing(Ends(contents, theirs, ours)) as made:
        yield made


def test_the_best_that_both_have_is_taken_and_moves_everything() -> None:
    with ends(theirs=[Pretended()], ours=[Pretended()]) as both:
        agreement, _ = both.agree()
        assert isinstance(agreement, Agreement)
        with contextlib.closing(agreement):
            assert (agreement.transport, agreement.why) == ("rdma", "the best of rdma, tcp")
            puller = both.move(agreement)
            assert both.pair.joiner_memory.contents() == both.contents
            assert puller.bytes_by_transport == {"rdma": 10}
        assert set(both.agreed.ends) == {"rdma", "tcp"}


@pytest.mark.parametrize(
    ("theirs", "ours", "why"),
    [
        ([], [Pretended()], "rdma cannot be used on the source's node: this version does not have it"),
        ([Pretended()], [Pretended(obstacle="no device")], "rdma cannot be used on the joiner's node: no device"),
        ([Pretended(obstacle="port down")], [Pretended()], "rdma cannot be used on the source's node: port down"),
        ([Pretended()], [Pretended(hello_fails="memlock is 64 KiB")], "on the joiner's node: memlock is 64 KiB"),
        ([Pretended()], [Pretended(connect_fails="no route to the GID")], "rdma was tried and failed: no route to the GID"),
    ],
)
def test_auto_falls_back_to_tcp_and_says_why_and_an_explicit_rdma_fails_with_the_same_words(
    theirs: list[Transport], ours: list[Transport], why: str
) -> None:
    with ends(theirs=theirs, ours=ours) as both:
        agreement, heard = both.agree()
        assert isinstance(agreement, Agreement)
        with contextlib.closing(agreement):
            assert agreement.transport == "tcp"
            assert why in agreement.why
            assert heard is None
            both.move(agreement)
            assert both.pair.joiner_memory.contents() == both.contents
    with ends(theirs=theirs, ours=ours) as both:
        refused, heard = both.agree("rdma")
        assert isinstance(refused, TransferFailed)
        assert isinstance(heard, TransferFailed)
        assert why in str(refused)
        assert str(heard) == str(refused)


def test_an_offer_that_names_a_transport_twice_is_refused() -> None:
    with ends() as both:
        ours, theirs = socket.socketpair()
        with ours, theirs, Control(ours, DEADLINE_S) as joiner, Control(theirs, DEADLINE_S) as source:
            joiner.send("an offer of transports", Offer((Half("tcp"), Half("tcp"))))
            with pytest.raises(TransferFailed, match="names a transport twice: tcp, tcp"):
                both.agreed.agree(source, both.pair.source_memory.memory, DEADLINE_S)
        assert not both.agreed.ends


def test_tcp_alone_is_used_where_it_is_named() -> None:
    with ends(theirs=[Pretended()], ours=[Pretended()]) as both:
        agreement, _ = both.agree("tcp")
        assert isinstance(agreement, Agreement)
        with contextlib.closing(agreement):
            assert agreement.transport == "tcp"
        assert set(both.agreed.ends) == {"tcp"}


def test_what_a_broken_transport_leaves_goes_over_tcp() -> None:
    contents = [random.Random(3).randbytes(5 * CHUNK_BYTES + 1)]
    with ends(contents, theirs=[Pretended()], ours=[Pretended(breaks_after=2)]) as both:
        agreement, _ = both.agree("rdma")
        assert isinstance(agreement, Agreement)
        with contextlib.closing(agreement):
            puller = both.move(agreement)
        assert both.pair.joiner_memory.contents() == contents
        assert puller.bytes_by_transport == {"rdma": 2 * CHUNK_BYTES, "tcp": 3 * CHUNK_BYTES + 1}
        assert "rdma: the port went down; the rest, 4 chunks, went over tcp" in puller.why


def test_a_transport_that_stalls_is_given_up_while_the_source_still_waits() -> None:
    """The source hangs up after DEADLINE_S without a word: a stall, the dialing of tcp and tcp's first bytes fit into that."""
    stalling = Pretended(breaks_after=0)
    with ends(theirs=[Pretended()], ours=[stalling]) as both:
        dialing_s: list[float] = []
        dial = both.pair.dial
        both.pair.dial = lambda fields, timeout_s: dialing_s.append(timeout_s) or dial(fields, timeout_s)  # type: ignore
        agreement, _ = both.agree()
        assert isinstance(agreement, Agreement)
        with contextlib.closing(agreement):
            both.move(agreement)
        assert both.pair.joiner_memory.contents() == both.contents
    assert dialing_s
    assert stalling.read_timeouts_s == [DEADLINE_S / 3]
    assert max(dialing_s) <= DEADLINE_S / 3


class Stalling(Pretended):
    """Takes one chunk and sits on it until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.holds, self.may_end = threading.Event(), threading.Event()

    def read(self, regions: Sequence[Region], memory: Sequence[Memory], work: Work, timeout_s: float) -> None:
        chunk = work.take()
        assert chunk is not None
        self.holds.set()
        assert self.may_end.wait(DEADLINE_S)
        work.give_back(chunk)
        raise TransferFailed("rdma: this end was closed")

    def close(self) -> None:
        self.may_end.set()
        super().close()


def test_a_source_that_is_late_is_closed_by_the_other_s_thread_and_does_not_go_on_over_tcp() -> None:
    stalling = Stalling()
    with ends([bytes(2 * CHUNK_BYTES)], theirs=[Pretended()], ours=[stalling]) as both:
        agreement, _ = both.agree()
        assert isinstance(agreement, Agreement)
        shared = SharedChunks(split([2 * CHUNK_BYTES]), patience_s=0.05)
        puller = Puller(agreement, {"rdma": []}, both.pair.joiner_memory.memory, lambda _: None, DEADLINE_S)
        failed: list[str] = []

        def move() -> None:
            try:
                puller.move(shared)
            except TransferFailed as error:
                failed.append(str(error))

        late = threading.Thread(target=move)
        late.start()
        assert stalling.holds.wait(DEADLINE_S)
        other = Work(shared)
        for _ in range(2):
            chunk = other.take()
            assert chunk is not None
            other.landed(chunk)
        assert other.take() is None
        late.join(DEADLINE_S)
        assert not late.is_alive()
    assert len(failed) == 1
    assert failed[0].startswith("it was late")
    assert puller.bytes_by_transport == {}


def test_chunks_that_arrived_damaged_are_read_again_over_tcp() -> None:
    """A transport whose registration points to memory of before brings the same wrong bytes each time."""
    with ends(theirs=[Pretended()], ours=[Pretended(brings=b"stale, old")]) as both:
        agreement, _ = both.agree()
        assert isinstance(agreement, Agreement)
        with contextlib.closing(agreement):
            ours, theirs = both.pair.joiner_memory.memory, both.pair.source_memory.memory
            chunks = split([part.size_bytes for part in ours])
            digests = Digests(ours, chunks)
            exports = {name: end.export(theirs) for name, end in both.agreed.ends.items()}
            puller = Puller(agreement, exports, ours, digests.take, DEADLINE_S)
            puller.move(chunks)
            assert both.pair.joiner_memory.contents() == [b"stale, old"]
            make_sure(puller, digests, Digests(theirs, chunks).take_all(), ())
        assert "1 chunks arrived damaged and were read again over tcp" in puller.why
        assert both.pair.joiner_memory.contents() == both.contents
        assert puller.bytes_by_transport == {"rdma": 10, "tcp": 10}


def test_every_end_is_closed_in_the_end() -> None:
    source, joiner = Pretended(), Pretended(connect_fails="no")
    with ends(theirs=[source], ours=[joiner]) as both:
        agreement, _ = both.agree()
        assert isinstance(agreement, Agreement)
        agreement.close()
    assert source.closed
    assert joiner.closed


def test_a_digest_of_memory_tells_which_entries_differ() -> None:
    contents = [bytes(10), b"", bytes(CHUNK_BYTES), bytes(5)]
    chunks = split([len(content) for content in contents])
    theirs, ours = Buffers(contents), Buffers([contents[0], b"", contents[2][:-1] + b"\1", contents[3]])
    expected = Digests(theirs.memory, chunks).take_all()
    digests = Digests(ours.memory, chunks)
    digests.take_all()
    damaged: list[Chunk]
    damaged, entries = digests.differing(expected)
    assert entries == [2]
    assert [chunk.number for chunk in damaged] == [1]
    with pytest.raises(ValueError, match="digests came for"):
        digests.differing(expected[:-16])


def test_a_named_transport_that_cannot_be_used_here_is_known_before_anything_begins() -> None:
    transports = Transports([Pretended(obstacle="no RDMA device"), Tcp()])
    assert transports.obstacle("auto") == ""
    assert transports.obstacle("tcp") == ""
    assert transports.obstacle("rdma") == "rdma: no RDMA device"
    assert Transports([Tcp()]).obstacle("rdma") == "rdma is not a transport that this version has"

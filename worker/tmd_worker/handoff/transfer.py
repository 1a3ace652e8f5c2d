"""What every transport of a handoff does, in terms of addresses and lengths, and the work that its readers share.

Contract. The joiner reads; the source lets itself be read. For one handoff there is one `SourceEnd` on the source and one
`JoinerEnd` on the joiner, both of one transport. In order:

1. `Transport.probe` on each side: can it be used on this machine at all? Cheap, without a peer, never raises.
2. `prepare` on each end: memory that will probably take part is registered (pinned, touched). Before the pause, while the
   source trains. It is a hint: memory that was not prepared is read as well, only slower; it may be called again.
3. `JoinerEnd.hello` -> control channel -> `SourceEnd.accept` -> control channel -> `JoinerEnd.connect`: the data connections
   are made, and some bytes are read and compared. Before the pause. After it `read` can only fail because something broke.
4. In the pause: `SourceEnd.export` gives a `Region` for each entry of the manifest, in its order: where it lies and the key that
   lets this one peer read it, and nobody write it. Memory that is not exported cannot be read.
5. `JoinerEnd.read` moves chunks until its share of the `Work` is done. Entry n of the regions goes to entry n of the memory.
6. `close` on both ends, always, in whatever state: keys are void and connections gone when it returns. It may be called twice,
   and from another thread while `read` runs, which it ends.

Failure. Everything that goes wrong is a TransferFailed whose text a person understands (what, which peer, why). It ends this
transport in this handoff, not the handoff: what has landed stays, chunks that were taken and did not land have been given back
by the time `read` raises, and another end, of the same or another source or transport, moves them. Nothing else is raised.

Deadlines. `timeout_s` bounds every call but `read` as a whole, and in `read` every chunk from when it is asked for: one that is
not there in time fails the end, whether the peer is dead, stopped or only too slow. Nothing waits for ever.

Several sources. A joiner may have an end with each of some sources that hold the same bytes; each end reads its share of the
chunks. An end that is late with its last ones is closed by another's thread, which then moves them.

Digests are none of a transport's business: the source says over the control channel what each chunk should hold, and whoever
owns the `Work` compares. Threads: `prepare`, `hello`, `connect`, `read` are called by one thread at a time; `Work` by any.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from tmd_worker.handoff.sharing import Sharing

#: The most that is moved at once: small enough to share work and to repeat it, large enough not to cost.
CHUNK_BYTES = 4 << 20
#: The most pieces of a chunk: a state may have thousands of tiny entries.
CHUNK_PIECES = 256
#: How long a source that has nothing more to do waits for the last chunks of another before it moves them itself. A chunk takes
#: milliseconds; this is long enough for a process that gets no processor for a while.
PATIENCE_S = 2.0


#: Opens one more authenticated connection to the source's process, with these fields for its `serve`, by this many seconds from
#: now. Raises OSError. For transports whose data goes over sockets.
Dial = Callable[[dict[str, Any], float], socket.socket]


class TransferFailed(ConnectionError):
    """This end can move nothing more in this handoff."""


class Memory(NamedTuple):
    """Memory of this process. Whoever names it keeps it alive until the ends are closed. A length of 0 is allowed."""

    address: int
    size_bytes: int


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Memory of a source that this handoff's joiner may read. `key` means something to the transport alone."""

    address: int
    size_bytes: int
    key: int


class Piece(NamedTuple):
    """Part of an entry: at most CHUNK_BYTES, never empty."""

    entry: int
    offset: int
    size_bytes: int


class Chunk(NamedTuple):
    """What is moved, repeated and compared as a whole: at most CHUNK_BYTES in at most CHUNK_PIECES pieces."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)


def split(sizes: Sequence[int]) -> list[Chunk]:
    """All bytes of entries of these sizes, in order. The same on both sides. Entries of 0 bytes are in no chunk."""
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    filled = 0
    for entry, size in enumerate(sizes):
        offset = 0
        while offset < size:
            length = min(size - offset, CHUNK_BYTES - filled)
            pieces.append(Piece(entry, offset, length))
            offset, filled = offset + length, filled + length
            if filled == CHUNK_BYTES or len(pieces) == CHUNK_PIECES:
                chunks.append(Chunk(len(chunks), tuple(pieces)))
                pieces, filled = [], 0
    if pieces:
        chunks.append(Chunk(len(chunks), tuple(pieces)))
    return chunks


class SharedChunks:
    """The chunks of one handoff that several readers move, each with a `Work` of its own. See `sharing` for who gets which."""

    def __init__(self, chunks: Sequence[Chunk], patience_s: float = PATIENCE_S) -> None:
        self._chunks = {chunk.number: chunk for chunk in chunks}
        self._changed = threading.Condition()
        self._sharing = Sharing([chunk.number for chunk in chunks], patience_s)
        self._give_up: dict[int, Callable[[], None]] = {}

    def join(self, give_up: Callable[[], None]) -> int:
        """The number of one more reader. `give_up` is called when others have waited for it in vain: it ends the reader's end."""
        with self._changed:
            reader = self._sharing.join()
            self._give_up[reader] = give_up
            return reader

    def take(self, reader: int, *, wait: bool) -> Chunk | None:
        """See Work."""
        while True:
            with self._changed:
                chunk = self._sharing.take(reader, time.monotonic())
                if chunk is not None:
                    return self._chunks[chunk]
                if not wait or self._sharing.over(reader):
                    return None
                late = self._sharing.overdue(reader, time.monotonic())
                if not late:
                    due_s = self._sharing.next_due_s(reader)
                    # Those that hold chunks are bound by their own deadlines.
                    self._changed.wait(None if due_s is None else max(due_s - time.monotonic(), 0.0))
            for other in late:
                self._give_up[other]()

    def landed(self, reader: int, chunk: Chunk) -> None:
        with self._changed:
            self._sharing.landed(reader, chunk.number)
            self._changed.notify_all()

    def give_back(self, reader: int, chunk: Chunk) -> None:
        with self._changed:
            self._sharing.give_back(reader, chunk.number)
            self._changed.notify_all()

    @property
    def missing(self) -> int:
        """How many chunks have not landed."""
        with self._changed:
            return self._sharing.missing


class Work:
    """What one end has to do: the chunks that it alone moves, or its part of those that it shares. For all of its threads.

    Whoever has taken a chunk says `landed` or `give_back`, exactly once. `on_landed` is called in the thread that says it, before
    the chunk counts: it takes as long as a digest of the chunk, and does not raise. `give_up`: see SharedChunks.join.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk] | SharedChunks,
        on_landed: Callable[[Chunk], None] = lambda _: None,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._shared = chunks if isinstance(chunks, SharedChunks) else SharedChunks(chunks)
        self._reader = self._shared.join(give_up)
        self._on_landed = on_landed

    def take(self, *, wait: bool = True) -> Chunk | None:
        """The next chunk. None: nothing is left to take, now (`wait` False) or ever (`wait` True: others have moved the rest)."""
        return self._shared.take(self._reader, wait=wait)

    def landed(self, chunk: Chunk) -> None:
        """All of its bytes are in place."""
        self._on_landed(chunk)
        self._shared.landed(self._reader, chunk)

    def give_back(self, chunk: Chunk) -> None:
        """It did not come, or not whole: another has to move it."""
        self._shared.give_back(self._reader, chunk)

    @property
    def missing(self) -> int:
        """How many chunks have not landed, whoever moves them."""
        return self._shared.missing


class SourceEnd(Protocol):
    """A source's end of one handoff."""

    def prepare(self, memory: Sequence[Memory]) -> None:
        """See the module's contract. Memory of an earlier call that is not among this may be let go."""

    def accept(self, hello: bytes, timeout_s: float) -> bytes:
        """The joiner's hello; returns what `JoinerEnd.connect` needs."""
        ...

    def export(self, memory: Sequence[Memory]) -> tuple[Region, ...]:
        """One region for each, readable by this joiner from now on. An earlier export is void."""
        ...

    def close(self) -> None: ...


class JoinerEnd(Protocol):
    """A joiner's end of one handoff with one source."""

    def prepare(self, memory: Sequence[Memory]) -> None:
        """See the module's contract."""

    def hello(self) -> bytes:
        """For `SourceEnd.accept`."""
        ...

    def connect(self, answer: bytes, timeout_s: float) -> None:
        """Returns once bytes of the source were read and found right."""

    def read(self, regions: Sequence[Region], memory: Sequence[Memory], work: Work, timeout_s: float) -> None:
        """Returns when `work` has nothing more for it."""

    def close(self) -> None: ...


class Transport(Protocol):
    """One way to move bytes, as this process can use it."""

    @property
    def name(self) -> str: ...

    def probe(self) -> str:
        """Empty: it can be used here; else why not, and what to do about it."""
        ...

    def source(self) -> SourceEnd: ...

    def joiner(self, dial: Dial) -> JoinerEnd: ...

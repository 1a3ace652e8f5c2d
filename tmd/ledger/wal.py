"""SQLite's write-ahead log beside a ledger file, looked at before SQLite opens the two.

SQLite takes the log to end at the first wrong checksum, as a power cut in the middle of a transaction leaves it, and says nothing
of commits that stand behind it. Contract: a log from which an acknowledged commit would be dropped is told from one that a kill
or a power cut has left, and from one that another process is writing. Nothing is written, no lock is taken.

The format: https://www.sqlite.org/fileformat2.html, "The Write-Ahead Log"; that of the index, which is the file -shm:
https://www.sqlite.org/walformat.html.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: Magic number, format, bytes of a page, checkpoints so far, two salts, two words of checksum.
_HEADER = struct.Struct(">4I8s8s")
#: Page, pages of the database if a transaction ends here (else 0), two salts, two words of checksum.
_FRAME = struct.Struct(">2I8s8s")
#: What stands before the salts of a frame is in its checksum, the salts are not.
_FRAME_SUMMED = 8
_FRAME_SALTS = slice(8, 16)
_CHECKSUM_BYTES = 8
#: The magic number says in which order of bytes checksums are computed; here as struct writes it.
_ORDER_OF_MAGIC = {0x377F0682: "<", 0x377F0683: ">"}
_PAGE_SIZES = tuple(1 << power for power in range(9, 17))
#: Format, unused, changes, whether it is filled, order of bytes, bytes of a page, frames up to the last commit, pages of the
#: database, two words of that frame's checksum, the log's two salts, two words of checksum; in this machine's order of bytes.
#: It stands there twice, so that a reader can tell that nobody has written meanwhile.
_INDEX = struct.Struct("=3I2BH2I8s8s8s")
_WORD = 0xFFFFFFFF


class _Layout(NamedTuple):
    page_bytes: int
    order: str


class _Frame(NamedTuple):
    salts: bytes
    #: A transaction ends with it.
    commits: bool
    #: Its checksum goes on from the one that stands before it, so it is whole and was written after what stands there.
    follows: bool


class _Indexed(NamedTuple):
    #: Of the log that it is the index of.
    salts: bytes
    #: Of those that have been committed, the last.
    frame: int


class _Loss(NamedTuple):
    """The first frame that is not as it was written; 0: the header."""

    header: bytes
    frame: int
    layout: _Layout


def lost_commits(database: Path) -> str:
    """Why SQLite would drop acknowledged commits if it opened this file now, for people; empty if it would not.

    Raises OSError.
    """
    # A frame may be read while another process writes it, and those behind it a moment later. But frames are written one after
    # the other: once a later one has been seen, all before it are there, and a second look finds the same one damaged or none.
    real = database.resolve()
    log = real.with_name(f"{real.name}-wal")
    seen, loss = None, _look(real, log)
    while loss != seen:
        seen, loss = loss, _look(real, log)
    if loss is None:
        return ""
    what = "the header"
    if loss.frame:
        at = _HEADER.size + (loss.frame - 1) * (_FRAME.size + loss.layout.page_bytes)
        what = f"frame {loss.frame} (at byte {at})"
    return f"{what} of {log} is not as it was written, SQLite would drop it and all acknowledged commits after it without a word"


def _look(database: Path, log: Path) -> _Loss | None:
    # The index comes first: what it counts is in the log by then.
    indexed = _index(database.with_name(f"{database.name}-shm"))
    try:
        with log.open("rb", buffering=0) as file:
            while True:
                content = file.read()
                file.seek(0)
                # A log that begins anew gets a new header first: while it is the same, all that was read belongs together.
                if file.read(_HEADER.size) == content[: _HEADER.size]:
                    break
                file.seek(0)
    except FileNotFoundError:
        return None
    return _loss(content, indexed) if len(content) >= _HEADER.size else None


def _loss(log: bytes, indexed: _Indexed | None) -> _Loss | None:
    layout = _layout(log)
    if layout is not None:
        return _loss_behind_a_frame(log, layout, indexed)
    # The header is on the disk before the first frame is written. What it says of the others cannot be relied on.
    first = log[_HEADER.size : _HEADER.size + _FRAME.size]
    known = indexed is not None and indexed.frame > 0 and first[_FRAME_SALTS] == indexed.salts
    for layout in (_Layout(page_bytes, order) for page_bytes in _PAGE_SIZES for order in _ORDER_OF_MAGIC.values()):
        if known or any(frame.follows and frame.commits for frame in _frames(log, layout)):
            return _Loss(log[: _HEADER.size], 0, layout)
    return None


def _loss_behind_a_frame(log: bytes, layout: _Layout, indexed: _Indexed | None) -> _Loss | None:
    """The last transaction may be half written, in any of its frames. It has been acknowledged if another one follows it, since
    that is begun once it is on the disk, or if it is in the index, for the same reason."""
    *_, salts, _ = _HEADER.unpack_from(log)
    broken = committed = number = 0
    commits = False
    for number, frame in enumerate(_frames(log, layout), 1):
        # With other salts it was written before the last checkpoint, and has been left behind by it.
        sound = frame.follows and frame.salts == salts
        if broken and sound and commits:
            return _Loss(log[: _HEADER.size], broken, layout)
        if not broken and not sound:
            broken = number
        if not broken and frame.commits:
            committed = number
        commits = frame.commits
    if indexed is not None and indexed.salts == salts and indexed.frame > committed:
        return _Loss(log[: _HEADER.size], broken or number + 1, layout)
    return None


def _layout(log: bytes) -> _Layout | None:
    """None: the header is not as it was written."""
    magic, _, page_bytes, _, _, checksum = _HEADER.unpack_from(log)
    order = _ORDER_OF_MAGIC.get(magic)
    if order is None or page_bytes not in _PAGE_SIZES:
        return None
    right = _checksum(log[: _HEADER.size - _CHECKSUM_BYTES], order) == struct.unpack(">2I", checksum)
    return _Layout(page_bytes, order) if right else None


def _frames(log: bytes, layout: _Layout) -> Iterator[_Frame]:
    *_, salts_before, checksum_before = _HEADER.unpack_from(log)
    size = _FRAME.size + layout.page_bytes
    for offset in range(_HEADER.size, len(log) - size + 1, size):
        page, pages, salts, checksum = _FRAME.unpack_from(log, offset)
        follows = False
        if page and salts == salts_before:
            summed = log[offset : offset + _FRAME_SUMMED] + log[offset + _FRAME.size : offset + size]
            start = struct.unpack(">2I", checksum_before)
            follows = _checksum(summed, layout.order, start) == struct.unpack(">2I", checksum)
        yield _Frame(salts, pages != 0, follows)
        salts_before, checksum_before = salts, checksum


def _checksum(content: bytes, order: str, start: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    first, second = start
    words = iter(struct.unpack(f"{order}{len(content) // 4}I", content))
    for even, odd in zip(words, words, strict=True):
        first = (first + even + second) & _WORD
        second = (second + odd + first) & _WORD
    return first, second


def _index(path: Path) -> _Indexed | None:
    """None if it says nothing: it is not there, nobody had it open, somebody is just writing it, or it is damaged itself."""
    try:
        if _is_open_here(path):
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        first, second = (os.pread(descriptor, _INDEX.size, offset) for offset in (0, _INDEX.size))
    finally:
        os.close(descriptor)
    if len(first) < _INDEX.size or first != second:
        return None
    _, _, _, filled, _, _, frame, _, _, salts, checksum = _INDEX.unpack(first)
    order = "<" if sys.byteorder == "little" else ">"
    if not filled or _checksum(first[:-_CHECKSUM_BYTES], order) != struct.unpack("=2I", checksum):
        return None
    return _Indexed(salts, frame)


def _is_open_here(path: Path) -> bool:
    """Then closing another descriptor of it would give back the locks that SQLite has on it for this process."""
    wanted = path.stat()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(f"/proc/self/fd/{name}"), wanted):
                return True
    return False

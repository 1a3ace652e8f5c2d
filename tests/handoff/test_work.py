"""Every byte of a state is in exactly one chunk, and a chunk that somebody could not move is moved by somebody else."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from tmd_worker.handoff.transfer import CHUNK_BYTES, CHUNK_PIECES, Chunk, Work, split

DEADLINE_S = 30.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 300), st.integers(0, 3 * CHUNK_BYTES)), max_size=400))
def test_the_chunks_hold_every_byte_once_and_in_order(sizes: list[int]) -> None:
    chunks = split(sizes)
    reached = [0] * len(sizes)
    for number, chunk in enumerate(chunks):
        assert chunk.number == number
        assert 0 < chunk.size_bytes <= CHUNK_BYTES
        assert len(chunk.pieces) <= CHUNK_PIECES
        for piece in chunk.pieces:
            assert piece.size_bytes > 0
            assert piece.offset == reached[piece.entry]
            reached[piece.entry] += piece.size_bytes
    assert reached == sizes


def test_who_waits_for_work_gets_what_another_gives_back() -> None:
    landed: list[Chunk] = []
    work = Work(split([10]), landed.append)
    taken = work.take()
    assert taken is not None
    assert work.take(wait=False) is None
    heirs: list[Chunk | None] = []
    heir = threading.Thread(target=lambda: heirs.append(work.take()))
    heir.start()
    work.give_back(taken)
    heir.join(DEADLINE_S)
    assert heirs == [taken]
    assert work.missing == 1
    work.landed(taken)
    assert (landed, work.missing, work.take()) == ([taken], 0, None)


def test_who_waits_is_told_when_others_have_moved_the_rest() -> None:
    work = Work(split([10]))
    chunk = work.take()
    assert chunk is not None
    told: list[Chunk | None] = []
    waiting = threading.Thread(target=lambda: told.append(work.take()))
    waiting.start()
    work.landed(chunk)
    waiting.join(DEADLINE_S)
    assert told == [None]

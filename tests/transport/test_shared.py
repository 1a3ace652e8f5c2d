"""Links through memory: who gets one, what is read from it in the end, and that nothing which a peer does leads out of it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.transport.ends import FRAME, in_thread, link_to, swap, swap_into, two_ends
from tests.transport.mesh import Mesh, mesh, together, wait_until
from tests.transport.ranks import JOB_KEY, Rank, ranks, run_ranks
from tmd_worker import faults
from tmd_worker.native import library
from tmd_worker.transport import handshake, ports, segment
from tmd_worker.transport.exchange import exchange
from tmd_worker.transport.handshake import LINK, Hello, new_nonce
from tmd_worker.transport.link import Link, LinkEnded
from tmd_worker.transport.segment import RING_BYTES, Offer, Segment
from tmd_worker.transport.wire import HEADER, HEADER_BYTES, MAGIC, Kind


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """Before any process is forked: compiling takes a while."""
    loaded = library.core()
    assert loaded.library is not None, f"these tests need the native core: {loaded.description}"


@pytest.fixture(autouse=True)
def _shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ports.LOCAL_LINKS, "shm")


def in_c(link: Link, outgoing: list[int], incoming: list[int]) -> None:
    swap(link, outgoing, incoming)


def in_python(link: Link, outgoing: list[int], incoming: list[int]) -> None:
    """One direction after the other."""
    link.hold()
    try:
        for size in outgoing:
            link.send(Kind.DATA, 0, bytes(size))
        for size in incoming:
            link.receive(Kind.DATA, 0, memoryview(bytearray(size)))
    finally:
        link.release()


EITHER_WAY = pytest.mark.parametrize("move", [in_c, in_python])
Move = Callable[[Link, list[int], list[int]], None]


def quiet(made: Mesh) -> Mesh:
    """What happens to a link is asked of the link."""
    for node in made.nodes:
        node.events.link_broken = lambda *_, **__: None  # type: ignore[method-assign]
    return made


# -------------------------------------------------------------------- who gets one


def kinds(rank: Rank) -> dict[str, set[str]]:
    """After all that opens links was used."""
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    dist.all_to_all_single(torch.empty(rank.size), torch.ones(rank.size))
    if rank.rank:
        dist.send(tensor, 0)
    else:
        for peer in range(1, rank.size):
            dist.recv(tensor, peer)
    assert tensor.tolist() == [float(rank.size)] * 100_000
    found = rank.fabric.links().items()
    return {name if name.startswith("tmd.") else name[1:]: {link.kind for link in links.values()} for name, links in found}


def test_links_that_carry_collectives_go_through_memory_and_the_others_do_not() -> None:
    for found in run_ranks(3, kinds, links="shm"):
        assert found.pop("tmd.session") == found.pop("tmd.buddy") == {"unix"}
        assert sorted((name.partition("#")[2], kind) for name, kind in found.items()) == [
            ("", {"shm"}),
            ("direct", {"shm"}),
            ("pair", {"unix"}),
        ]


def only_sockets(rank: Rank) -> None:
    rank.fabric._ports.opener._shares = rank.fabric._ports.listener._shares = False


def no_core(rank: Rank) -> None:
    library.core = lambda: library.Core(None, "switched off by a test")  # type: ignore[assignment]


def no_memory(rank: Rank) -> None:
    """As where there is none: a file, which the memory is to the kernel, may not become that long."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (RING_BYTES, RING_BYTES))


@pytest.mark.parametrize("hindrance", [only_sockets, no_core, no_memory])
@pytest.mark.parametrize("hindered", [0, 1])
def test_an_end_that_cannot_gets_sockets_and_the_same_results(hindrance: Callable[[Rank], None], hindered: int) -> None:
    """Rank 1 dials rank 0. Memory is made by who dials, so the lack of it does not hinder who listens."""

    def setup(rank: Rank) -> None:
        if rank.rank == hindered:
            hindrance(rank)

    expected = "shm" if hindrance is no_memory and hindered == 0 else "unix"
    for found in run_ranks(2, kinds, setup=setup, links="shm"):
        assert set().union(*found.values()) == {expected, "unix"}


def test_the_lack_of_memory_is_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    segment._told.clear()
    monkeypatch.setattr(segment, "RING_BYTES", RING_BYTES - 1)  # the core refuses to make such a ring
    with mesh(2) as made:
        assert {link.kind for links in made.nodes[0].fabric.links().values() for link in links.values()} == {"unix"}
        Offer().make()
    assert [record.getMessage() for record in caplog.records if "no memory to share" in record.getMessage()] == [
        f"no memory to share with ranks of this host ({os.strerror(errno.EINVAL)}): their links use sockets alone, slower"
    ]


def test_a_descriptor_that_is_not_such_memory_is_not_mapped(tmp_path: Path) -> None:
    size = 4096 + 2 * RING_BYTES
    unsealed, short = os.memfd_create("a"), os.memfd_create("b", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, size)
    os.ftruncate(short, size - 1)
    fcntl.fcntl(short, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    read, write = os.pipe()
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    os.ftruncate(file, size)
    for descriptor in (unsealed, short, read, file):
        assert Segment.attach(descriptor, RING_BYTES) is None
    offer = Offer()
    assert offer.make()
    for ring_bytes in (0, 1000, RING_BYTES // 2, 1 << 40):
        assert Segment.attach(offer.descriptor, ring_bytes) is None
    offer.withdraw()
    for descriptor in (unsealed, short, read, write, file):
        os.close(descriptor)


def test_memory_goes_with_whoever_drops_it() -> None:
    """1. Both ends are there. 2. One is dropped without a word, the other one released and dropped."""
    before = mapped()
    offer = Offer()
    assert offer.make()
    attached = Segment.attach(offer.descriptor, RING_BYTES)
    assert attached is not None
    dropped = offer.taken()
    assert mapped() == before + 2
    attached.release()
    del attached, dropped
    assert mapped() == before


def test_descriptors_that_a_stranger_sends_are_closed() -> None:
    with mesh(1) as made:
        node = made.nodes[0]
        before = set(os.listdir("/proc/self/fd"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(handshake.nearby_name(JOB_KEY, node.fabric.host, node.fabric.port))
            greeted = stranger.recv(handshake.GREETING_BYTES)
            hello = Hello(kind=LINK, incarnation="x", peer_incarnation="inc-0", nonce=new_nonce(), ring_bytes=RING_BYTES)
            for byte in handshake.seal_hello(b"another key", greeted, hello):
                socket.send_fds(stranger, [bytes([byte])], [0, 1])
            assert stranger.recv(1) == b""
        wait_until(lambda: set(os.listdir("/proc/self/fd")) <= before)


# -------------------------------------------------------------------- what travels


def test_frames_of_odd_sizes_in_both_directions_arrive_whole_over_many_turns_of_the_rings() -> None:
    def body(rank: Rank) -> bool:
        link = link_to(rank, 1 - rank.rank)
        numbers = random.Random(7)
        right = True
        link.hold()
        for turn in range(40):
            sizes = [
                [numbers.choice([0, 1, 23, 4095, 65_537, RING_BYTES - 24, RING_BYTES, FRAME - 1]) for _ in range(9)] for _ in "ab"
            ]
            mine, theirs = (sizes, sizes[::-1])[rank.rank]
            if (turn + rank.rank) % 3 == 0:  # now and then one end, or both, without the native core
                faults.arm('[{"point": "frame", "action": "kill", "count": 1000000}]')
            outgoing = [memoryview(pattern(rank.rank, turn, number, size)) for number, size in enumerate(mine)]
            incoming = [memoryview(bytearray(size)) for size in theirs]
            exchange(link, outgoing, link, incoming, 0)
            faults.arm("[]")
            right &= all(
                bytes(got) == bytes(pattern(1 - rank.rank, turn, number, len(got))) for number, got in enumerate(incoming)
            )
        link.release()
        return right

    assert run_ranks(2, body, links="shm") == [True, True]


def pattern(sender: int, turn: int, number: int, size: int) -> bytearray:
    return bytearray(random.Random(f"{sender} {turn} {number}").randbytes(size))


def test_bells_are_no_frames_and_no_end() -> None:
    with mesh(2) as made:
        mine, theirs = two_ends(made)
        thread, result = in_thread(lambda: swap(mine, [], [10]))
        wait_until(lambda: sleeps(mine))
        assert not mine.hung_up()
        assert not mine.ends_in_order()
        swap(theirs, [10], [])
        thread.join(5)
        assert result == [bytearray(10)]
        assert not made.nodes[0].events.broken


def sleeps(link: Link) -> bool:
    """The reader has said that it wants a bell."""
    return bool(position(link, ring=1 - side(link), offset=READER_SLEEPS).value)


# -------------------------------------------------------------------- the death of a peer


@EITHER_WAY
def test_a_killed_peer_wakes_who_waits_for_the_rest_of_a_frame(move: Move) -> None:
    def body(rank: Rank) -> Any:
        rank.events.link_broken = lambda *_, **__: None  # type: ignore[method-assign]
        link = link_to(rank, 1 - rank.rank)
        if rank.rank == 1:
            link.stream.write([HEADER.pack(MAGIC, Kind.DATA, 0, 0, FRAME) + bytes(1000)])
            rank.tell("half a frame is out")
            rank.hear()
        with pytest.raises(LinkEnded) as caught:
            move(link, [], [FRAME])
        return caught.value.orderly

    with ranks(2, body, links="shm") as processes:
        assert processes[1].hear() == "half a frame is out"
        processes[1].kill()
        assert processes[0].hear(5) is False


@EITHER_WAY
def test_a_killed_peer_wakes_who_waits_for_room(move: Move) -> None:
    def body(rank: Rank) -> Any:
        rank.events.link_broken = lambda *_, **__: None  # type: ignore[method-assign]
        link = link_to(rank, 1 - rank.rank)
        if rank.rank == 1:
            rank.hear()
        thread, result = in_thread(lambda: move(link, [FRAME] * 40, []))
        wait_until(lambda: bool(position(link, ring=side(link), offset=WRITER_SLEEPS).value))
        rank.tell("no room")
        thread.join(5)
        assert isinstance(result[0], LinkEnded)
        return result[0].orderly

    with ranks(2, body, links="shm") as processes:
        assert processes[0].hear() == "no room"
        processes[1].kill()
        assert processes[0].hear(5) is False


@EITHER_WAY
def test_what_a_peer_wrote_before_it_was_killed_is_read(move: Move) -> None:
    def body(rank: Rank) -> Any:
        rank.events.link_broken = lambda *_, **__: None  # type: ignore[method-assign]
        link = link_to(rank, 1 - rank.rank)
        if rank.rank == 1:
            swap(link, [100, 0, 100_000], [])
            rank.tell("sent")
        rank.hear()
        wait_until(link.hung_up)
        move(link, [], [100, 0, 100_000])
        with pytest.raises(LinkEnded, match=r"rank 1 (closed the connection|hung up)"):
            move(link, [], [1])
        return "read"

    with ranks(2, body, links="shm") as processes:
        assert processes[1].hear() == "sent"
        processes[1].kill()
        processes[0].tell("go on")
        assert processes[0].hear(10) == "read"


@EITHER_WAY
def test_a_frozen_peer_is_given_up_after_the_links_timeout(move: Move) -> None:
    def body(rank: Rank) -> Any:
        rank.events.link_broken = lambda *_, **__: None  # type: ignore[method-assign]
        link = link_to(rank, 1 - rank.rank)
        rank.tell("linked")
        rank.hear()
        texts = []
        for outgoing, incoming in (([], [FRAME]), ([FRAME] * 40, [])):
            link.set_timeout(0.2)
            with pytest.raises(LinkEnded) as caught:
                move(link, outgoing, incoming)
            texts.append(str(caught.value))
        return texts

    with ranks(2, body, links="shm") as processes:
        assert [process.hear() for process in processes] == ["linked", "linked"]
        os.kill(processes[1].pid, signal.SIGSTOP)
        processes[0].tell("it is frozen")
        assert processes[0].hear(10) == ["rank 1 was silent for 0 s", "rank 1 took no data for 0 s"]


# -------------------------------------------------------------------- last words


@EITHER_WAY
@pytest.mark.parametrize("filled", [0, RING_BYTES // 2, RING_BYTES])
def test_a_stop_finds_room_however_full_the_ring_is(filled: int, move: Move) -> None:
    with mesh(2) as made:
        mine, theirs = two_ends(quiet(made))
        frames = [FRAME] if filled else []
        sent = (HEADER.pack(MAGIC, Kind.DATA, 0, 0, FRAME) + bytes(RING_BYTES))[:filled]
        assert theirs.stream.write([sent]) == filled if filled else True
        theirs.interrupt()
        theirs.say_stop()
        theirs.shut()
        assert mine.ends_in_order()
        with pytest.raises(LinkEnded) as caught:
            move(mine, [], frames or [10])
        assert caught.value.orderly
        assert mine.ends_in_order()


@EITHER_WAY
def test_a_stop_is_heard_by_who_waits_for_room(move: Move) -> None:
    with mesh(2) as made:
        mine, theirs = two_ends(quiet(made))
        thread, result = in_thread(lambda: move(mine, [FRAME] * 40, []))
        wait_until(lambda: bool(position(mine, ring=side(mine), offset=WRITER_SLEEPS).value))
        theirs.interrupt()
        theirs.say_stop()
        theirs.shut()
        thread.join(5)
        assert isinstance(result[0], LinkEnded)
        assert result[0].orderly


# -------------------------------------------------------------------- nonsense from the peer

#: Of a ring's positions and marks, in the front of the memory (shared.c).
PUT, WRITER_SLEEPS, TAKEN, READER_SLEEPS = 0, 8, 64, 72
RING_FRONT = 128


def side(link: Link) -> int:
    """Which of the two rings this end writes: the first if it dialed."""
    return 0 if link.peer == 0 else 1


def position(link: Link, *, ring: int, offset: int) -> ctypes.c_uint64 | ctypes.c_uint32:
    assert link.state.shared is not None
    memory = ctypes.c_uint64.from_address(link.state.shared).value
    kind = ctypes.c_uint64 if offset in (PUT, TAKEN) else ctypes.c_uint32
    return kind.from_address(memory + ring * RING_FRONT + offset)


@EITHER_WAY
@pytest.mark.parametrize("nonsense", [RING_BYTES + 1, 1 << 63, (1 << 64) - 1])
def test_an_impossible_position_ends_the_link_of_who_reads(nonsense: int, move: Move) -> None:
    with mesh(2) as made:
        mine, _ = two_ends(quiet(made))
        position(mine, ring=1 - side(mine), offset=PUT).value = nonsense
        with pytest.raises(LinkEnded, match="its positions in the shared memory are impossible") as caught:
            move(mine, [], [10])
        assert not caught.value.orderly


@EITHER_WAY
@pytest.mark.parametrize("nonsense", [1, 1 << 63, (1 << 64) - 1 - RING_BYTES])
def test_an_impossible_position_ends_the_link_of_who_writes(nonsense: int, move: Move, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmd_worker.transport.link.LAST_WORDS_S", 0.01)
    with mesh(2) as made:
        mine, _ = two_ends(quiet(made))
        position(mine, ring=side(mine), offset=TAKEN).value = nonsense
        with pytest.raises(LinkEnded, match="its positions in the shared memory are impossible") as caught:
            move(mine, [10], [])
        assert not caught.value.orderly


def test_a_position_that_becomes_impossible_wakes_who_waits() -> None:
    with mesh(2) as made:
        mine, theirs = two_ends(quiet(made))
        thread, result = in_thread(lambda: swap_into(mine, [], [10], bytearray(10)))
        wait_until(lambda: sleeps(mine))
        position(mine, ring=1 - side(mine), offset=PUT).value = 1 << 40
        theirs.stream.sock.send(b"\0")
        thread.join(5)
        assert "impossible" in str(result[0])


# -------------------------------------------------------------------- nothing is left


def mapped() -> int:
    """How many segments this process has."""
    return Path("/proc/self/maps").read_text().count("/memfd:tmd-link")


def test_epochs_that_come_and_go_leave_no_memory_and_no_descriptor() -> None:
    def reduced(node: Any) -> float:
        tensor = torch.ones(70_000)
        node.world.allreduce([tensor], dist.AllreduceOptions()).wait()
        return float(tensor.sum())

    assert mapped() == 0
    with mesh(3) as made:
        at_first = mapped()
        descriptors = len(os.listdir("/proc/self/fd"))
        assert at_first == 2 * 3
        for epoch in range(1, 25):
            made.nodes[epoch % 3].events.poison(epoch - 1, "test")
            for node in made.nodes:
                node.events.wait_poisoned(epoch - 1)
            made.go_live(made.table(epoch))
            assert together(made.nodes, reduced) == [210_000.0] * 3
        wait_until(lambda: mapped() == at_first and len(os.listdir("/proc/self/fd")) <= descriptors)
    wait_until(lambda: mapped() == 0)


def test_links_that_were_offered_and_not_opened_leave_no_memory() -> None:
    with mesh(2, live=False) as made:
        attempts = [in_thread(lambda: made.nodes[1].fabric.open(made.table(0), 1, 60.0))]
        wait_until(lambda: mapped() > 0)
        made.nodes[1].fabric.close(0, "test")
        attempts[0][0].join(5)
        assert mapped() == 0
        assert "are not wanted any more" in str(attempts[0][1][0])


def test_a_link_that_is_in_use_keeps_its_memory_until_it_is_released() -> None:
    with mesh(2) as made:
        mine, _ = two_ends(quiet(made))
        before = mapped()
        mine.hold()
        made.nodes[0].events.poison(0, "test")
        made.nodes[1].events.poison(0, "test")
        wait_until(lambda: mapped() == 1 < before)
        with pytest.raises(LinkEnded, match="closed the connection"):
            swap(mine, [], [10])
        mine.release()
        assert mapped() == 0
        with pytest.raises(LinkEnded, match="was closed by this side"):
            mine.receive_small(Kind.DATA, 0, 10)
        with pytest.raises(LinkEnded):
            swap(mine, [], [10])


def test_a_forked_child_has_no_part_in_it_and_does_not_keep_it_alive() -> None:
    def body(rank: Rank) -> Any:
        if rank.rank == 1:
            child = os.fork()
            if child == 0:
                link = link_to(rank, 0)
                link.close_copy()
                link.shut()
                os._exit(mapped())
            left = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            sleeper = os.fork()
            if sleeper == 0:
                time.sleep(20)
                os._exit(0)
            tensor = torch.ones(300_000)
            dist.all_reduce(tensor)
            rank.tell((left, sleeper, float(tensor[-1])))
            rank.hear()
        else:
            dist.all_reduce(torch.ones(300_000))
        rank.events.wait_poisoned()
        return rank.events.broken

    with ranks(2, body, links="shm") as processes:
        left, sleeper, total = processes[1].hear()  # the first child's maps, the second child, the sum
        try:
            assert (left, total) == (0, 2.0)
            processes[1].kill()
            broken = processes[0].hear(5)
            assert (broken[0][1], broken[0][2]) == (1, False)
        finally:
            os.kill(sleeper, signal.SIGKILL)


def test_positions_begin_where_the_tests_take_them_to_be() -> None:
    with mesh(2) as made:
        mine, theirs = two_ends(made)
        theirs.stream.write([bytes(HEADER_BYTES)])
        assert position(mine, ring=1 - side(mine), offset=PUT).value == HEADER_BYTES
        assert position(theirs, ring=side(theirs), offset=PUT).value == HEADER_BYTES
        assert position(theirs, ring=1 - side(theirs), offset=PUT).value == 0

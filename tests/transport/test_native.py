"""Members with the native core and members without it get the same bits, and it wakes up from whatever it waits for."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.transport.ends import FRAME, in_thread, swap, swap_into, two_ends
from tests.transport.mesh import mesh, wait_until
from tests.transport.ranks import Rank, ranks, run_ranks
from tmd_worker.native import building, library
from tmd_worker.transport import ports
from tmd_worker.transport.link import LinkEnded
from tmd_worker.transport.wire import HEADER, MAGIC, STOP_FRAME, Desync, Kind

#: Through the tree, around the ring with segments in one frame, with empty ones, and with several frames each.
SIZES = [1, 777, 16_384, 16_387, 150_001, 1_700_003]
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]
OPERATIONS = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX]


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """Before any process is forked: compiling takes a while."""
    loaded = library.core()
    assert loaded.library is not None, f"these tests need the native core: {loaded.description}"


@pytest.fixture(params=["unix", "shm"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the ranks of a mesh are linked."""
    monkeypatch.setenv(ports.LOCAL_LINKS, request.param)
    return str(request.param)


def without_core() -> library.Core:
    return library.Core(None, "switched off by a test")


def digests(rank: Rank) -> list[str]:
    """Of everything that goes through the native core."""
    found = []
    for number, elements in enumerate(SIZES):
        generator = torch.Generator().manual_seed(100 * number + rank.rank)
        own = torch.randn(elements, generator=generator, dtype=torch.float64) * 1000
        results = []
        for operation in OPERATIONS:
            dtype = TYPES[(number + len(results)) % len(TYPES)]
            if operation is dist.ReduceOp.AVG and not dtype.is_floating_point:
                dtype = torch.float32
            results.append(own.to(dtype))
            dist.all_reduce(results[-1], operation)
        results.append(own.clone())
        dist.broadcast(results[-1], rank.size - 1)
        gathered = [torch.empty_like(own) for _ in range(rank.size)]
        dist.all_gather(gathered, own)
        scattered = torch.empty(elements, dtype=torch.float32)
        dist.reduce_scatter(scattered, [(own + part).float() for part in range(rank.size)], dist.ReduceOp.AVG)
        dist.barrier()
        shared = [hash_of(result) for result in (*results, *gathered)]
        found += [*shared, hash_of(scattered), *(hash_of(result) for result in moved_by_parts(rank, own.float()))]
    return found


def moved_by_parts(rank: Rank, own: torch.Tensor) -> list[torch.Tensor]:
    """Of what has a root, and of an all-to-all."""
    last = rank.size - 1
    at_root = rank.rank == last
    total = own.clone()
    dist.reduce(total, last)
    gathered = [torch.empty_like(own) for _ in range(rank.size)] if at_root else None
    dist.gather(own, gathered, last)
    given = torch.empty_like(own)
    dist.scatter(given, [own + part for part in range(rank.size)] if at_root else None, last)
    exchanged = torch.empty(rank.size, own.numel())
    dist.all_to_all_single(exchanged, torch.stack([own * part for part in range(rank.size)]))
    return [total, *(gathered or []), given, exchanged]


def hash_of(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(("size", "links"), [(2, "tcp"), (2, "shm"), (3, "tcp"), (5, "tcp"), (5, "shm")])
def test_native_python_and_mixed_groups_get_the_same_bits(size: int, links: str) -> None:
    def with_core_on(native: Callable[[int], bool]) -> list[list[str]]:
        def setup(rank: Rank) -> None:
            if not native(rank.rank):
                library.core = without_core  # type: ignore[assignment]

        return run_ranks(size, digests, setup=setup, links=links)

    everywhere = with_core_on(lambda rank: True)
    assert everywhere == with_core_on(lambda rank: False)
    assert everywhere == with_core_on(lambda rank: rank % 2 == 0)


@pytest.mark.parametrize(("outgoing", "incoming"), [([], [1000]), ([FRAME] * 40, [FRAME]), ([FRAME] * 40, [])])
def test_another_thread_wakes_it_at_once(outgoing: list[int], incoming: list[int], links: str) -> None:
    """It waits for data, for both directions, or (behind what fills the connection) for room."""
    with mesh(2) as made:
        link, _ = two_ends(made)
        thread, result = in_thread(lambda: swap(link, outgoing, incoming))
        wait_until(lambda: link.tx_lock.locked() and (not outgoing or link.state.unsent > 0))
        made.nodes[0].events.poison(0, "test")
        thread.join(5)
        assert not thread.is_alive()
        assert isinstance(result[0], LinkEnded)


@pytest.mark.parametrize("links", ["tcp", "unix", "shm"])
def test_a_peer_that_is_killed_ends_an_exchange_at_once(links: str) -> None:
    def body(rank: Rank) -> Any:
        rank.events.link_broken = lambda *_, **__: None  # type: ignore[method-assign]
        table = next(group.table for name, group in rank.fabric._groups.items() if not name.startswith("tmd."))
        assert table is not None
        rank.tell("ready")
        if rank.rank == 1:
            rank.hear()
        with pytest.raises(LinkEnded) as caught:
            swap(table.links[1 - rank.rank], [], [FRAME])
        return time.monotonic(), caught.value.orderly, str(caught.value)

    with ranks(2, body, links=links) as processes:
        assert [process.hear() for process in processes] == ["ready", "ready"]
        killed_s = time.monotonic()
        processes[1].kill()
        noticed_s, orderly, text = processes[0].hear(10)
    assert noticed_s - killed_s < 5
    assert not orderly
    assert "rank 1" in text


@pytest.mark.parametrize("size", [100, 100_000])
def test_a_payload_behind_an_unexpected_header_reaches_no_memory(size: int, links: str) -> None:
    with mesh(2) as made:
        mine, theirs = two_ends(made)
        theirs.stream.write([HEADER.pack(MAGIC, Kind.DATA, 0, 0, size - 1) + b"\x7f" * (size - 1)])
        room = bytearray(b"\xaa" * size)
        with pytest.raises(Desync, match=f"got DATA frame 0 of {size - 1} bytes, expected DATA frame 0 of {size} bytes"):
            swap_into(mine, [], [size], room)
        assert set(room) == {0xAA}


def test_a_stale_epoch_ends_the_link(links: str) -> None:
    with mesh(2) as made:
        mine, theirs = two_ends(made)
        theirs.stream.write([HEADER.pack(MAGIC, Kind.DATA, 7, 0, 10) + bytes(10)])
        with pytest.raises(LinkEnded, match="sent a frame of epoch 7 in epoch 0"):
            swap(mine, [], [10])


@pytest.mark.parametrize("begun", [b"", HEADER.pack(MAGIC, Kind.DATA, 0, 0, 300_000) + bytes(1000)])
def test_a_stop_is_heard_between_frames_and_behind_half_a_frame(begun: bytes, links: str) -> None:
    with mesh(2) as made:
        mine, theirs = two_ends(made)
        for node in made.nodes:
            node.events.link_broken = lambda *_, **__: None  # type: ignore[method-assign]
        theirs.stream.write([begun + STOP_FRAME])
        theirs.shut()
        with pytest.raises(LinkEnded) as caught:
            swap(mine, [], [300_000])
        assert caught.value.orderly


def test_a_peer_that_stays_silent_is_given_up_after_the_links_timeout(links: str) -> None:
    with mesh(2) as made:
        link, _ = two_ends(made)
        link.set_timeout(0.05)
        with pytest.raises(LinkEnded, match="was silent for 0 s"):
            swap(link, [100], [100])


def test_nothing_follows_a_frame_that_was_broken_off(links: str) -> None:
    """It would be taken for that frame's rest."""
    with mesh(2) as made:
        link, _ = two_ends(made)
        link.set_timeout(0.05)
        with pytest.raises(LinkEnded, match=r"took no data|neither took nor sent"):
            swap(link, [FRAME] * 8, [])
        assert link.state.unsent
        for size in (0, 64, FRAME):
            with pytest.raises(LinkEnded, match="has got only a part of what was sent to it before"):
                swap(link, [size], [])
            with pytest.raises(LinkEnded, match="has got only a part of what was sent to it before"):
                link.send(Kind.DATA, 0, bytes(size))


def test_without_a_compiler_or_when_switched_off_python_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    missing = library.core.__wrapped__()
    assert missing.library is None
    assert "there is no C compiler" in missing.description
    monkeypatch.setenv("TMD_NATIVE", "0")
    assert library.core.__wrapped__().description == "Python transport (TMD_NATIVE=0)"


def test_it_is_compiled_once_into_a_folder_that_only_the_user_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    together_built = [in_thread(building.cached) for _ in range(3)]
    for thread, _ in together_built:
        thread.join(building.COMPILE_S)
    paths = {result[0] for _, result in together_built}
    assert paths == {tmp_path / "tmd" / f"tmd_native-{building.digest()}.so"}
    assert {path.name for path in (tmp_path / "tmd").iterdir()} == {"lock", *(path.name for path in paths)}
    (tmp_path / "tmd").chmod(0o777)
    with pytest.raises(building.NotBuilt, match="others may write to it"):
        building.cached()


def test_a_library_made_from_other_sources_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / "tmd_native.so"
    monkeypatch.setattr(building, "digest", lambda: "0" * 32)
    building.compile_to(stale)
    monkeypatch.undo()
    monkeypatch.setattr(building, "PACKAGED", stale)
    loaded = library.core.__wrapped__()
    assert loaded.library is not None
    assert "from the wheel" not in loaded.description


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no space left >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded = library.core.__wrapped__()
    assert loaded.library is None
    assert "no space left" in loaded.description

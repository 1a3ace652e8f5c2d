"""A disk without room, a real one: what cannot be written is said with the remedy, what was acknowledged stays, and it goes on
once there is room. Needs root, to mount it."""

from __future__ import annotations

import contextlib
import errno
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.daemon.databases import change
from tests.daemon.ledger_writer import round_of
from tests.daemon.rig import DEADLINE_S, Agent, Daemon, until
from tests.daemon.test_restart import serve
from tmd.ledger.engine import damage
from tmd.ledger.errors import LedgerUnavailable
from tmd.ledger.ledger import Ledger

SIZE_BYTES = 1 << 20
SAYS = "database or disk is full: free some space where it lies; `tmctl ledger prune` removes what is old"


class Disk:
    """A file system of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder / 'ledger.db'}"
        self._filling = folder / "filling"

    def fill(self) -> None:
        """To the last byte."""
        with self._filling.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        with pytest.raises(OSError, match=f"Errno {errno.ENOSPC}"), self._filling.open("ab", buffering=0) as file:
            file.write(b"x")

    def free(self) -> None:
        self._filling.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES},mode=0700", "tmd-test", str(folder)]
    subprocess.run(mount, check=True, timeout=DEADLINE_S)
    try:
        yield Disk(folder)
    finally:
        # Lazily: a test that failed may have left a file open.
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=DEADLINE_S)


async def refusal(ledger: Ledger, number: int) -> LedgerUnavailable | None:
    try:
        await ledger.write(round_of(number))
    except LedgerUnavailable as error:
        return error
    return None


async def acknowledged_is_there(ledger: Ledger, number: int) -> None:
    assert await ledger.job("j1") == round_of(number).jobs[0]
    assert [event.event_id for event in await ledger.events(limit=10_000)] == list(range(1, 2 * number + 1))
    assert sorted(each.attempt for each in await ledger.migrations(limit=10_000)) == list(range(1, number + 1))


async def test_a_ledger_that_fills_its_disk_loses_nothing_and_goes_on_once_there_is_room(disk: Disk) -> None:
    ledger = await Ledger.open(disk.url)
    (disk.folder / "filling").write_bytes(bytes(SIZE_BYTES // 4))
    number = 0
    while (refused := await refusal(ledger, number + 1)) is None:
        number += 1
    assert str(refused) == f"ledger {disk.url}: {SAYS}"
    assert number > 3
    disk.fill()
    await acknowledged_is_there(ledger, number)
    assert await refusal(ledger, number + 1) is not None
    disk.free()
    await ledger.write(round_of(number + 1))
    await acknowledged_is_there(ledger, number + 1)
    await ledger.close()
    assert await change(disk.url, damage) == []
    following = await Ledger.open(disk.url)
    await acknowledged_is_there(following, number + 1)
    await following.close()


async def test_no_room_for_a_new_ledger_is_said_and_leaves_nothing_half_made(disk: Disk) -> None:
    disk.fill()
    with pytest.raises(LedgerUnavailable, match="disk"):
        await Ledger.open(disk.url)
    disk.free()
    opened = await Ledger.open(disk.url)
    assert opened.generation == 1
    await opened.close()


async def test_a_daemon_decides_nothing_without_room_and_dies_without_a_loss(
    disk: Disk, make_daemon: Callable[..., Daemon], make_agent: Callable[..., Agent]
) -> None:
    """
    1. Job j1 is there. The disk fills up, and an agent of j2 comes: it is not welcomed, the daemon says why.
    2. The daemon is killed. Another one does not start, and says why.
    3. There is room again: it starts, j1 is there, j2 is welcomed.
    """
    daemon = make_daemon("--database", disk.url).start()
    first = await make_agent("j1", "n1").connect(daemon)
    assert first.welcome
    disk.fill()
    second = await make_agent("j2", "n2").dial(daemon)
    await second.send(second.hello)
    await until(lambda: not daemon.status()["ledger"]["healthy"], "the daemon says that it cannot write")
    assert SAYS in daemon.status()["ledger"]["error"]
    assert second.welcome is None
    daemon.end(signal.SIGKILL)
    refused = serve("--state-dir", str(daemon.state_dir), "--socket", str(daemon.socket), "--database", disk.url)
    assert refused.returncode == 1
    assert "cannot start: ledger" in refused.stderr
    assert "disk" in refused.stderr
    assert "Traceback" not in refused.stderr
    disk.free()
    daemon.start()
    assert [job["record"]["job_id"] for job in daemon.client.get("/v1/jobs")["jobs"]] == ["j1"]
    assert (await first.connect(daemon)).welcome
    assert (await second.connect(daemon)).welcome


async def test_a_daemon_goes_on_once_there_is_room(
    disk: Disk, make_daemon: Callable[..., Daemon], make_agent: Callable[..., Agent]
) -> None:
    daemon = make_daemon("--database", disk.url).start()
    disk.fill()
    agent = await make_agent().dial(daemon)
    await agent.send(agent.hello)
    await until(lambda: not daemon.status()["ledger"]["healthy"], "the daemon says that it cannot write")
    assert agent.welcome is None
    disk.free()
    await until(lambda: agent.welcome, "the welcome")
    assert daemon.status()["ledger"]["healthy"]
    assert daemon.status()["generation"] == 1

"""What stands in SQLite's log after a kill, a power cut, a checkpoint or a blow, and which of these is called damage."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import records
from tests.daemon.rig import DEADLINE_S
from tmd.core.instructions import Persist
from tmd.ledger import wal
from tmd.ledger.backup import backup
from tmd.ledger.check import check
from tmd.ledger.errors import LedgerDamaged
from tmd.ledger.ledger import Ledger, upgrade
from tmd.ledger.wal import lost_commits

PAGE_BYTES = 1024
HEADER_BYTES, FRAME_HEADER_BYTES = 32, 24
FRAME_BYTES = FRAME_HEADER_BYTES + PAGE_BYTES
NAMES = ("x.db", "x.db-wal", "x.db-shm")


class Written:
    """A database that SQLite has open, each commit of some frames, and copies of it as a kill would leave it."""

    def __init__(self, folder: Path) -> None:
        self._live = folder / "live"
        self._live.mkdir()
        self._folder = folder
        self.connection = sqlite3.connect(self._live / "x.db", isolation_level=None)
        for statement in (f"PRAGMA page_size = {PAGE_BYTES}", "PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL"):
            self.connection.execute(statement)
        self.connection.execute("CREATE TABLE rows (number INTEGER, filling BLOB)")
        #: Frames in the log after each commit.
        self.ends = [self._frames()]

    def commit(self) -> None:
        filling = os.urandom(3 * PAGE_BYTES)
        self.connection.execute("INSERT INTO rows VALUES (?, ?)", (len(self.ends), filling))
        self.ends.append(self._frames())

    def killed(self, name: str) -> Path:
        """The database's file."""
        copy = self._folder / name
        copy.mkdir()
        for each in NAMES:
            shutil.copy(self._live / each, copy / each)
        return copy / "x.db"

    def _frames(self) -> int:
        return (self._log_bytes() - HEADER_BYTES) // FRAME_BYTES

    def _log_bytes(self) -> int:
        return (self._live / "x.db-wal").stat().st_size


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Written]:
    written = Written(tmp_path)
    with contextlib.closing(written.connection):
        for _ in range(4):
            written.commit()
        yield written


def log_of(database: Path) -> Path:
    return database.with_name("x.db-wal")


def index_of(database: Path) -> Path:
    return database.with_name("x.db-shm")


def overwrite(path: Path, at: int, new: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(new)


def flip(path: Path, at: int) -> None:
    overwrite(path, at, bytes([path.read_bytes()[at] ^ 0x55]))


def frame_at(number: int) -> int:
    return HEADER_BYTES + (number - 1) * FRAME_BYTES


def numbers(database: Path) -> list[int]:
    """What SQLite finds; it changes the files."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
            return []
        return [number for (number,) in connection.execute("SELECT number FROM rows ORDER BY number")]


def test_a_whole_log_and_none_are_accepted(written: Written) -> None:
    whole = written.killed("whole")
    assert lost_commits(whole) == ""
    index_of(whole).unlink()
    assert lost_commits(whole) == ""
    for length in (HEADER_BYTES, HEADER_BYTES - 1, 0):
        os.truncate(log_of(whole), length)
        assert lost_commits(whole) == ""
    log_of(whole).unlink()
    assert lost_commits(whole) == ""


def test_a_power_cut_in_the_middle_of_the_last_commit_is_accepted(written: Written) -> None:
    """Any of its frames may be on the disk and any not; the index is that of before, or gone."""
    before = written.killed("before")
    written.commit()
    first, last = written.ends[-2] + 1, written.ends[-1]
    assert last - first >= 3
    for missing in range(1, 1 << (last - first + 1)):
        database = written.killed(f"cut{missing}")
        for number in range(first, last + 1):
            if missing & (1 << (number - first)):
                overwrite(log_of(database), frame_at(number), bytes(FRAME_BYTES))
        shutil.copy(index_of(before), index_of(database))
        assert lost_commits(database) == ""
        index_of(database).unlink()
        assert lost_commits(database) == ""
        assert numbers(database) == [1, 2, 3, 4]


@pytest.mark.parametrize("place", [0, 4, 8, 15, 16, 23, FRAME_HEADER_BYTES, FRAME_BYTES - 1])
def test_one_damaged_byte_of_any_frame_is_refused(written: Written, place: int) -> None:
    """Without the index it cannot be told of the last commit, nor, in the head of its last frame, of the one before."""
    untold = range(written.ends[-2] + (place >= FRAME_HEADER_BYTES), written.ends[-1] + 1)
    for number in range(1, written.ends[-1] + 1):
        database = written.killed(f"frame{number}")
        flip(log_of(database), frame_at(number) + place)
        assert f"frame {number} (at byte {frame_at(number)}) of {log_of(database)} is not" in lost_commits(database)
        index_of(database).unlink()
        assert number in untold or f"frame {number} (at" in lost_commits(database)
        if number not in untold:
            assert numbers(database) == list(range(1, sum(end < number for end in written.ends)))


@pytest.mark.parametrize("place", range(HEADER_BYTES))
def test_one_damaged_byte_of_the_header_is_refused(written: Written, place: int) -> None:
    database = written.killed("header")
    flip(log_of(database), place)
    assert f"the header of {log_of(database)} is not as it was written" in lost_commits(database)
    index_of(database).unlink()
    assert "the header of" in lost_commits(database)


def test_a_log_that_was_cut_off_between_two_commits_is_refused_as_long_as_the_index_is_there(written: Written) -> None:
    database = written.killed("cut")
    os.truncate(log_of(database), frame_at(written.ends[-2] + 1))
    assert f"frame {written.ends[-2] + 1} (at" in lost_commits(database)
    flip(index_of(database), 20)
    assert lost_commits(database) == "", "a damaged index says nothing"
    assert numbers(database) == [1, 2, 3]
    empty = written.killed("empty")
    os.truncate(log_of(empty), HEADER_BYTES)
    assert "frame 1 (at" in lost_commits(empty)


def test_what_stands_behind_from_before_a_checkpoint_is_accepted_damaged_or_not(written: Written) -> None:
    assert written.connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()[0] == 0
    written.connection.execute("INSERT INTO rows VALUES (5, NULL)")
    database = written.killed("restarted")
    frames = written.ends[-1]
    assert frames > 5, "one commit of a frame or two has not overwritten all"
    for number in range(5, frames + 1):
        assert lost_commits(database) == ""
        flip(log_of(database), frame_at(number) + 500)
    assert numbers(database) == [1, 2, 3, 4, 5]
    damaged = written.killed("damaged")
    flip(log_of(damaged), frame_at(1) + 500)
    assert "frame 1 (at" in lost_commits(damaged)


def test_what_a_transaction_that_was_rolled_back_has_written_is_accepted(written: Written) -> None:
    """It is overwritten by the next one as far as that reaches."""
    written.connection.execute("PRAGMA cache_size = 5")
    written.connection.execute("BEGIN")
    for _ in range(20):
        written.connection.execute("INSERT INTO rows VALUES (0, ?)", (os.urandom(3 * PAGE_BYTES),))
    written.connection.execute("ROLLBACK")
    written.commit()
    assert log_of(written.killed("x")).stat().st_size > frame_at(written.ends[-2] + 30)
    database = written.killed("rolled-back")
    assert lost_commits(database) == ""
    index_of(database).unlink()
    assert lost_commits(database) == ""
    assert numbers(database) == [1, 2, 3, 4, 5]


def test_a_ledger_behind_a_link_is_looked_at_where_sqlite_has_its_log(written: Written, tmp_path: Path) -> None:
    database = written.killed("real")
    flip(log_of(database), frame_at(1) + 500)
    (tmp_path / "linked.db").symlink_to(database)
    assert "frame 1" in lost_commits(tmp_path / "linked.db")


#: Commits without end, and a new log after every few of them.
BUSY = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)
connection.execute("PRAGMA journal_mode = WAL")
connection.execute("PRAGMA synchronous = OFF")
connection.execute("PRAGMA wal_autocheckpoint = 200")
connection.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, filling BLOB)")
print("began", flush=True)
for number in range(10**9):
    connection.execute("INSERT OR REPLACE INTO rows VALUES (?, ?)", (number % 7, bytes([number % 251]) * (number % 9 * 2000)))
    time.sleep(0.001)
"""


def test_beside_a_process_that_writes_nothing_is_ever_called_damage(tmp_path: Path) -> None:
    database = tmp_path / "x.db"
    process = subprocess.Popen([sys.executable, "-c", BUSY, str(database)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "began\n"
        deadline = time.monotonic() + DEADLINE_S
        logs = set()
        looks = 0
        while looks < 40 or len(logs) < 5:
            assert lost_commits(database) == ""
            logs.add(log_of(database).read_bytes()[:HEADER_BYTES])
            looks += 1
            assert time.monotonic() < deadline, f"only {looks} looks at {len(logs)} logs"
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)
    assert lost_commits(database) == "", "after a kill, either"


def test_a_frame_that_was_read_before_it_was_written_is_looked_at_again(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    1. The log is read while another process writes: an early frame is not there yet, those behind it are by then.
    2. It is read again: all of it is there.
    """
    database = written.killed("early")
    index_of(database).unlink()
    whole = log_of(database).read_bytes()
    overwrite(log_of(database), frame_at(2), bytes(FRAME_BYTES))
    look = wal._look
    losses = []

    def then_written(*arguments: Path) -> object:
        losses.append(look(*arguments))
        log_of(database).write_bytes(whole)
        return losses[-1]

    monkeypatch.setattr(wal, "_look", then_written)
    assert lost_commits(database) == ""
    assert losses[0] is not None


def test_a_look_leaves_the_locks_of_its_own_process_alone(written: Written, tmp_path: Path) -> None:
    """Whoever closes a descriptor of a file gives back all locks that the process has on it."""
    index = tmp_path / "live" / "x.db-shm"
    own = f" {os.getpid()} "

    def locks() -> list[str]:
        inode = f":{index.stat().st_ino} "
        lines = Path("/proc/locks").read_text().splitlines()
        return [line.split(":", 1)[1] for line in lines if inode in line and own in line]

    held = locks()
    assert held
    assert lost_commits(tmp_path / "live" / "x.db") == ""
    assert locks() == held


async def test_a_damaged_log_is_named_by_all_who_open_a_ledger_and_left_as_it_is(tmp_path: Path) -> None:
    live = tmp_path / "live"
    live.mkdir()
    ledger = await Ledger.open(f"sqlite:///{live / 'ledger.db'}")
    for epoch in range(1, 20):
        await ledger.write(Persist(jobs=(records.job(epoch=epoch),)))
    shutil.copytree(live, tmp_path / "killed")
    await ledger.close()
    log = tmp_path / "killed" / "ledger.db-wal"
    url = f"sqlite:///{tmp_path / 'killed' / 'ledger.db'}"
    flip(log, log.stat().st_size - 30_000)
    contents = log.read_bytes()
    says = rf"ledger {url} is damaged: frame \d+ .*ledger.db-wal is not as it was written.*: jobs train on meanwhile; stop the "
    for opening in (Ledger.open(url), upgrade(url), backup(url, tmp_path / "copy.db")):
        with pytest.raises(LedgerDamaged, match=says):
            await opening
    checked = await check(url)
    assert (len(checked.problems), checked.rows) == (1, {})
    assert "ledger.db-wal is not as it was written" in checked.problems[0]
    assert log.read_bytes() == contents
    with contextlib.closing(sqlite3.connect(tmp_path / "killed" / "ledger.db")) as accepting:
        accepting.execute("SELECT count(*) FROM jobs")
    assert not log.exists()
    ledger = await Ledger.open(url)
    job = await ledger.job("j1")
    await ledger.close()
    assert job is not None, "as operators.md says: what stands before the damage is a ledger"
    assert 1 <= job.epoch < 19

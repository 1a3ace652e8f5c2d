"""The ledger in a file: locked, read-only, on a full disk, unreadable for others. Unavailable is said with the remedy, and what
was written before stays."""

from __future__ import annotations

import os
import resource
import sqlite3
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import Connection

from tests.daemon import records
from tests.daemon.databases import change
from tests.daemon.rig import ROOT
from tmd.core.instructions import Persist
from tmd.ledger import ledger as ledger_module
from tmd.ledger.errors import LedgerUnavailable
from tmd.ledger.ledger import Ledger


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.db'}"


@pytest.fixture
async def ledger(url: str) -> AsyncIterator[Ledger]:
    opened = await Ledger.open(url)
    yield opened
    await opened.close()


async def test_a_locked_database_is_unavailable_and_nothing_of_the_write_is_there(
    ledger: Ledger, url: str, tmp_path: Path
) -> None:
    await ledger.close()
    impatient = await Ledger.open(f"{url}?timeout=0.05")
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerUnavailable, match="locked: another process holds its lock"):
        await impatient.write(records.everything())
    assert (await impatient.load_snapshot()).jobs == ()
    with pytest.raises(LedgerUnavailable, match="locked: another process holds its lock"):
        await Ledger.open(f"{url}?timeout=0.05")
    other.execute("COMMIT")
    other.close()
    await impatient.write(records.everything())
    assert await impatient.job("j1") == records.job()
    await impatient.close()


async def test_a_write_that_takes_too_long_is_unavailable(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ledger_module, "WRITE_TIMEOUT_S", 0.05)
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerUnavailable, match="no answer in time"):
        await ledger.write(Persist(paused=True))
    other.execute("COMMIT")
    other.close()


async def test_a_full_disk_is_unavailable_and_what_was_written_before_stays(ledger: Ledger, tmp_path: Path) -> None:
    await ledger.write(Persist(jobs=(records.job("j1"),)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.stat(tmp_path / "ledger.db-wal").st_size, before[1]))
    try:
        with pytest.raises(LedgerUnavailable, match="disk"):
            await ledger.write(Persist(jobs=(records.job("j2", reason="x" * 100_000),)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert await ledger.job("j1") == records.job("j1")
    assert await ledger.job("j2") is None
    await ledger.write(Persist(jobs=(records.job("j2"),)))
    assert await ledger.job("j2") == records.job("j2")


async def test_no_byte_to_spare_for_a_new_ledger_is_said_and_leaves_nothing_half_made(url: str, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(LedgerUnavailable, match="disk"):
            await Ledger.open(url)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    opened = await Ledger.open(url)
    assert opened.generation == 1
    await opened.close()


def as_root_without_its_privileges(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`tmd` by a user for whom the modes of files count, also where the tests run as root."""
    given_up = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    command = [*given_up, sys.executable, "-m", "tmd.daemon.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)


@pytest.mark.parametrize(
    ("file_mode", "folder_mode", "says"),
    [(0o400, 0o700, "Permission denied"), (0o600, 0o500, "unable to open|readonly database")],
)
async def test_a_file_or_folder_that_is_read_only_is_refused_with_the_remedy(
    ledger: Ledger, tmp_path: Path, file_mode: int, folder_mode: int, says: str
) -> None:
    await ledger.write(Persist(jobs=(records.job(),)))
    await ledger.close()
    state = tmp_path / "state"
    state.mkdir()
    file = (tmp_path / "ledger.db").rename(state / "ledger.db")
    file.chmod(file_mode)
    state.chmod(folder_mode)
    done = as_root_without_its_privileges("ledger", "upgrade", "--database", f"sqlite:///{file}")
    state.chmod(0o700)
    assert (done.returncode, done.stdout) == (1, "")
    assert "must be writable for the daemon's user" in done.stderr or "exist and be writable" in done.stderr, done.stderr
    assert any(part in done.stderr for part in says.split("|")), done.stderr
    assert "Traceback" not in done.stderr
    file.chmod(0o600)
    following = await Ledger.open(f"sqlite:///{file}")
    assert await following.job("j1") == records.job()
    await following.close()


async def test_a_ledger_that_cannot_be_opened_says_which(tmp_path: Path) -> None:
    with pytest.raises(LedgerUnavailable, match="nowhere"):
        await Ledger.open(f"sqlite:///{tmp_path / 'nowhere' / 'ledger.db'}")


async def test_nobody_else_can_read_the_job_keys(ledger: Ledger, tmp_path: Path) -> None:
    await ledger.write(records.everything())
    modes = {path.name: stat.S_IMODE(os.stat(path).st_mode) for path in (tmp_path / name for name in os.listdir(tmp_path))}
    assert modes == dict.fromkeys(("ledger.db", "ledger.db-wal", "ledger.db-shm"), 0o600)


async def test_commits_are_on_the_disk_when_the_write_returns(ledger: Ledger, url: str) -> None:
    def settings(connection: Connection) -> tuple[object, object]:
        return tuple(connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous"))

    full = 2
    assert await change(url, settings) == ("wal", full)
    await ledger.write(Persist(paused=True))
    assert ledger.writes == 1
    assert ledger.write_median_s is not None
    assert ledger.write_median_s > 0

"""`tmctl ledger backup`: a whole copy of one moment while a daemon writes, and nothing at all if it cannot be one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sqlite3
import stat
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.daemon import records
from tests.daemon.ledger_writer import round_of
from tests.daemon.postgres import Postgres, program
from tmd.cli.main import main
from tmd.ledger.backup import CannotBackUp, backup
from tmd.ledger.check import check
from tmd.ledger.errors import LedgerDamaged
from tmd.ledger.ledger import Ledger


@pytest.fixture
async def ledger(database_url: str) -> AsyncIterator[Ledger]:
    opened = await Ledger.open(database_url)
    await opened.write(records.whole_job("whole", first_event=1_000_000))
    yield opened
    await opened.close()


def restored(file: Path, postgres: Postgres) -> str:
    """URL of a database that holds what is in the copy."""
    if file.suffix == ".db":
        return f"sqlite:///{file}"
    url = postgres.fresh_database()
    done = subprocess.run(
        [program("pg_restore"), "--no-owner", f"--dbname={url}", str(file)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return url


async def test_a_copy_is_of_one_moment_while_the_daemon_writes(
    ledger: Ledger, database_url: str, postgres: Postgres, tmp_path: Path
) -> None:
    """
    1. A daemon writes round after round; a round is one transaction of several rows.
    2. A copy is made meanwhile. The daemon writes on.
    3. The copy has every round that was acknowledged before it began, whole, and of a later one all or nothing.
    """
    acknowledged = 0
    stop = asyncio.Event()

    async def write() -> None:
        nonlocal acknowledged
        while not stop.is_set():
            await ledger.write(round_of(acknowledged + 1))
            acknowledged += 1

    writing = asyncio.create_task(write())
    while acknowledged < 3:
        await asyncio.sleep(0.01)
    before = acknowledged
    file = tmp_path / ("copy.db" if database_url.startswith("sqlite") else "copy.dump")
    copied = await backup(database_url, file)
    stop.set()
    await writing
    assert (copied.file, copied.size_bytes) == (str(file), file.stat().st_size)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [name for name in os.listdir(tmp_path) if name.startswith("copy")] == [file.name]

    copy_url = restored(file, postgres)
    assert (await check(copy_url)).rows["jobs"] == 2
    copy = await Ledger.open(copy_url)
    job = await copy.job("j1")
    assert job is not None
    assert before <= job.epoch <= acknowledged
    assert job == round_of(job.epoch).jobs[0]
    rounds = [event.event_id for event in await copy.events(job_id="j1")]
    assert rounds == list(range(1, 2 * job.epoch + 1))
    assert copy.generation == ledger.generation + 1
    await copy.close()


async def test_nothing_is_overwritten(ledger: Ledger, database_url: str, tmp_path: Path) -> None:
    file = tmp_path / "copy"
    file.write_text("precious")
    with pytest.raises(CannotBackUp, match="is there already"):
        await backup(database_url, file)
    assert file.read_text() == "precious"


async def test_a_copy_that_cannot_be_written_leaves_nothing(ledger: Ledger, database_url: str, tmp_path: Path) -> None:
    with pytest.raises(CannotBackUp, match="No such file"):
        await backup(database_url, tmp_path / "nowhere" / "copy")
    folder = tmp_path / "folder"
    folder.mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(CannotBackUp):
            await backup(database_url, folder / "copy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(folder) == []
    await backup(database_url, folder / "copy")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_of_a_damaged_ledger_no_copy_is_kept(ledger: Ledger, database_url: str, tmp_path: Path) -> None:
    await ledger.close()
    with (tmp_path / "ledger.db").open("r+b") as file:
        file.seek(3 * 4096)
        file.write(b"\xff" * 4096)
    with pytest.raises(LedgerDamaged, match="damaged"):
        await backup(database_url, tmp_path / "copy.db")
    assert not (tmp_path / "copy.db").exists()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_copy_can_take_the_ledgers_place(ledger: Ledger, database_url: str, tmp_path: Path) -> None:
    before = await ledger.load_snapshot()

    def call() -> Result:
        return CliRunner().invoke(main, ["ledger", "backup", "--database", database_url, str(tmp_path / "copy.db")])

    result = await asyncio.to_thread(call)
    assert result.exit_code == 0, result.output
    assert f"copied to {tmp_path / 'copy.db'}" in result.stdout
    await ledger.close()
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / "copy.db").rename(tmp_path / "ledger.db")
    following = await Ledger.open(database_url)
    assert await following.load_snapshot() == before
    await following.close()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_ledger_that_somebody_keeps_locked_is_given_up(
    ledger: Ledger, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ledger.close()
    monkeypatch.setattr("tmd.ledger.backup.LOCK_TIMEOUT_S", 0.1)
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        other.execute("UPDATE meta SET value = value")
        with pytest.raises(Exception, match="locked"):
            await backup(f"{database_url}?timeout=0.1", tmp_path / "copy.db")
        other.execute("ROLLBACK")
    assert not (tmp_path / "copy.db").exists()


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
async def test_without_pg_dump_that_is_said(
    ledger: Ledger, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotBackUp, match="pg_dump, which is not installed") as refused:
        await backup(database_url, tmp_path / "copy")
    assert "postgresql-client" in refused.value.remedy

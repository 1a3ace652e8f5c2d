"""Bytes of a ledger's files that were overwritten or cut off: what is read is what was written, or the ledger is refused."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.daemon import records
from tests.daemon.ledger_writer import round_of
from tests.daemon.test_ledger_kills import Writer
from tmd.core.instructions import Persist, ReleaseNode
from tmd.ledger.errors import LedgerDamaged
from tmd.ledger.ledger import Ledger, StoreChange
from tmd.ledger.revisions import UnknownRevision

JOBS = 12
ATTEMPTS = 60
#: Of ledger.db-wal. One that is shorter is an empty one.
HEADER_BYTES = 32


async def everything(ledger: Ledger) -> tuple[object, ...]:
    """All that a daemon and its operators ever read."""
    stores = [await ledger.store_contents(f"j{number}") for number in range(JOBS)]
    return await ledger.load_snapshot(), await ledger.events(), await ledger.pending_releases(), stores


@pytest.fixture
async def whole(tmp_path: Path) -> tuple[Path, tuple[object, ...]]:
    """A ledger file of some hundred pages that no process has open, and what is in it."""
    path = tmp_path / "whole.db"
    ledger = await Ledger.open(f"sqlite:///{path}")
    for number in range(JOBS):
        job_id = f"j{number}"
        events = tuple(records.event(100 * number + each, cause=max(0, each - 1), job_id=job_id) for each in range(1, 90))
        ranks = tuple(records.rank(job_id=job_id, incarnation=f"{job_id}.{each}") for each in range(20))
        migrations = (records.migration(migration_id=f"m{number}", job_id=job_id),)
        job = records.job(job_id, reason="r" * 3000)
        await ledger.write(
            Persist(jobs=(job,), ranks=ranks, nodes=(records.node(job_id=job_id),), migrations=migrations, events=events),
            [ReleaseNode(job_id, "n1", "replaced")],
        )
        await ledger.write_store(StoreChange({(job_id, "key"): bytes(2000)}, {(job_id, "i1", 1): b"reply"}))
    await ledger.write(Persist(paused=True))
    contents = await everything(ledger)
    await ledger.close()
    return path, contents


async def reread(path: Path) -> tuple[object, ...]:
    """Raises LedgerDamaged, UnknownRevision."""
    ledger = await Ledger.open(f"sqlite:///{path}")
    try:
        return await everything(ledger)
    finally:
        await ledger.close()


async def test_overwritten_bytes_are_noticed_or_harmless(whole: tuple[Path, tuple[object, ...]], tmp_path: Path) -> None:
    """Spans of a few bytes, of a sector and of a page, anywhere: free space may be hit, a decision must not change."""
    path, contents = whole
    original = path.read_bytes()
    assert len(original) > 50 * 4096
    noticed = 0
    for seed in range(ATTEMPTS):
        chance = random.Random(seed)
        length = chance.choice([2, 16, 512, 4096])
        at = chance.randrange(len(original) - length)
        damaged = tmp_path / f"damaged{seed}.db"
        damaged.write_bytes(original[:at] + chance.randbytes(length) + original[at + length :])
        try:
            assert await reread(damaged) == contents, f"seed {seed}: {length} bytes at {at} changed what is read"
        except (LedgerDamaged, UnknownRevision):
            noticed += 1
        damaged.unlink()
    assert noticed > ATTEMPTS // 3


@pytest.mark.parametrize("cut_off", [False, True])
async def test_a_log_damaged_after_a_kill_is_refused_or_nothing_acknowledged_is_lost(tmp_path: Path, cut_off: bool) -> None:
    """The newest commits are in ledger.db-wal alone, until the next daemon starts."""
    killed = tmp_path / "killed"
    killed.mkdir()
    writer = Writer(f"sqlite:///{killed / 'ledger.db'}")
    try:
        acknowledged = writer.killed_after(30, 0.0)
    finally:
        writer.end()
    original = (killed / "ledger.db-wal").read_bytes()
    assert len(original) > 100 * 4096
    refused = 0
    for seed in range(ATTEMPTS):
        chance = random.Random(seed)
        length = chance.choice([2, 16, 512, 4096])
        # Now and then the first bytes or the last commit: elsewhere they would be hit too seldom.
        anywhere = chance.randrange(len(original) - length)
        at = chance.choice([anywhere, chance.randrange(64), len(original) - length - chance.randrange(64)])
        damaged = shutil.copytree(killed, tmp_path / f"damaged{seed}")
        behind = b"" if cut_off else chance.randbytes(length) + original[at + length :]
        (damaged / "ledger.db-wal").write_bytes(original[: max(at, HEADER_BYTES if cut_off else 0)] + behind)
        try:
            ledger = await Ledger.open(f"sqlite:///{damaged / 'ledger.db'}")
        except LedgerDamaged:
            refused += 1
        else:
            job = await ledger.job("j1")
            assert job is not None
            assert job.epoch >= acknowledged, f"seed {seed}: {length} bytes at {at} cost acknowledged commits"
            assert job == round_of(job.epoch).jobs[0]
            assert [event.event_id for event in await ledger.events(limit=10_000)] == list(range(1, 2 * job.epoch + 1))
            await ledger.close()
        shutil.rmtree(damaged)
    assert refused > ATTEMPTS // 2


@pytest.mark.parametrize("kept", [0.999, 0.5, 0.01])
async def test_a_file_that_was_cut_off_is_refused_with_the_remedy(
    whole: tuple[Path, tuple[object, ...]], tmp_path: Path, kept: float
) -> None:
    path, contents = whole
    copy = shutil.copy(path, tmp_path / "copy.db")
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * kept))
    with pytest.raises(LedgerDamaged, match=r"damaged.*jobs train on meanwhile; stop the daemon.*bring a backup"):
        await reread(path)
    shutil.copy(copy, path)
    assert await reread(path) == contents


async def test_another_kind_of_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_text("not a database, but somebody's notes\n" * 100)
    with pytest.raises(LedgerDamaged, match="file is not a database"):
        await Ledger.open(f"sqlite:///{path}")
    assert path.read_text().startswith("not a database")

"""The ledger: what is written comes back, whole, to the next daemon, and to no daemon that has been followed by another."""

from __future__ import annotations

import asyncio
import os
import resource
import sqlite3
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Table, create_engine

from tests.daemon import records
from tmd.core.instructions import Persist, ReleaseNode
from tmd.core.records import EventRecord, JobRecord, MigrationRecord, NodeRecord, RankRecord
from tmd.ledger import ledger as ledger_module
from tmd.ledger import schema
from tmd.ledger.engine import BadDatabaseUrl
from tmd.ledger.errors import LedgerTakenOver, LedgerUnavailable
from tmd.ledger.ledger import Ledger, StoreChange, upgrade
from tmd.ledger.revisions import UnknownRevision


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.db'}"


@pytest.fixture
async def ledger(url: str) -> AsyncIterator[Ledger]:
    opened = await Ledger.open(url)
    yield opened
    await opened.close()


@pytest.mark.parametrize(
    ("table", "record"),
    [
        (schema.jobs, JobRecord),
        (schema.ranks, RankRecord),
        (schema.nodes, NodeRecord),
        (schema.migrations, MigrationRecord),
        (schema.events, EventRecord),
    ],
)
def test_every_field_of_a_record_has_a_column(table: Table, record: type[msgspec.Struct]) -> None:
    assert [column.name for column in table.columns] == [field.name for field in msgspec.structs.fields(record)]


async def test_the_revisions_make_exactly_the_schema_that_the_code_uses(tmp_path: Path, url: str) -> None:
    """A field that was added to a record without a revision shows here."""
    assert await upgrade(url) == (None, "0002")
    engine = create_engine(f"sqlite:///{tmp_path / 'ledger.db'}")
    with engine.connect() as connection:
        difference = compare_metadata(MigrationContext.configure(connection), schema.metadata)
    engine.dispose()
    assert difference == []


async def test_every_record_comes_back_as_it_was_written_to_the_next_daemon(ledger: Ledger, url: str) -> None:
    written = records.everything()
    await ledger.write(written)
    await ledger.close()
    following = await Ledger.open(url)
    snapshot = await following.load_snapshot()
    assert snapshot.jobs == written.jobs
    assert set(map(repr, snapshot.ranks)) == set(map(repr, written.ranks))
    assert set(map(repr, snapshot.nodes)) == set(map(repr, written.nodes))
    assert set(map(repr, snapshot.migrations)) == set(map(repr, written.migrations))
    assert (snapshot.last_event_id, snapshot.paused) == (2, True)
    assert await following.events() == list(written.events)
    assert following.generation == ledger.generation + 1
    await following.close()


async def test_a_later_row_replaces_an_earlier_one_and_writing_twice_is_as_good_as_once(ledger: Ledger) -> None:
    await ledger.write(records.everything())
    later = Persist(jobs=(records.job(epoch=8, armed=False),), events=(records.event(2, cause=1), records.event(3)))
    await ledger.write(later)
    await ledger.write(later)
    assert await ledger.job("j1") == records.job(epoch=8, armed=False)
    assert [event.event_id for event in await ledger.events()] == [1, 2, 3]


async def test_what_was_not_named_stays(ledger: Ledger) -> None:
    await ledger.write(records.everything())
    await ledger.write(Persist(jobs=(records.job(epoch=9),)))
    snapshot = await ledger.load_snapshot()
    assert snapshot.paused
    assert len(snapshot.ranks) == 2


async def test_of_many_jobs_that_ended_a_restarted_daemon_knows_the_last(ledger: Ledger) -> None:
    ended = tuple(records.job(f"old{number}", state="done", updated_s=float(number)) for number in range(60))
    await ledger.write(Persist(jobs=(*ended, records.job("live", updated_s=0.0))))
    known = {job.job_id for job in (await ledger.load_snapshot()).jobs}
    assert known == {"live"} | {f"old{number}" for number in range(10, 60)}
    assert [job.job_id for job in await ledger.ended_jobs(2)] == ["old59", "old58"]


async def test_an_older_daemon_can_write_nothing_once_another_has_started(ledger: Ledger, url: str) -> None:
    following = await Ledger.open(url)
    await following.write(Persist(paused=True))
    with pytest.raises(LedgerTakenOver, match="another daemon has started"):
        await ledger.write(Persist(paused=False))
    assert (await following.load_snapshot()).paused
    await following.close()


async def test_a_locked_database_is_unavailable_and_nothing_of_the_write_is_there(
    ledger: Ledger, url: str, tmp_path: Path
) -> None:
    await ledger.close()
    impatient = await Ledger.open(f"{url}?timeout=0.05")
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerUnavailable, match="locked"):
        await impatient.write(records.everything())
    assert (await impatient.load_snapshot()).jobs == ()
    other.execute("COMMIT")
    other.close()
    await impatient.write(records.everything())
    assert await impatient.job("j1") == records.job()
    await impatient.close()


async def test_a_write_that_fails_halfway_leaves_nothing(ledger: Ledger) -> None:
    broken = msgspec.structs.replace(records.event(1), text=None)
    with pytest.raises(Exception, match="NOT NULL"):
        await ledger.write(Persist(jobs=(records.job(),), events=(broken,)))
    assert await ledger.job("j1") is None


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
        with pytest.raises(LedgerUnavailable):
            await ledger.write(Persist(jobs=(records.job("j2", reason="x" * 100_000),)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert await ledger.job("j1") == records.job("j1")
    assert await ledger.job("j2") is None
    await ledger.write(Persist(jobs=(records.job("j2"),)))
    assert await ledger.job("j2") == records.job("j2")


async def test_two_upgrades_at_once_both_succeed(url: str) -> None:
    assert sorted(await asyncio.gather(upgrade(url), upgrade(url)), key=str) == [("0002", "0002"), (None, "0002")]


async def test_a_ledger_of_the_first_revision_is_brought_up_to_date_with_its_jobs(
    ledger: Ledger, url: str, tmp_path: Path
) -> None:
    await ledger.write(Persist(jobs=(records.job(),)))
    await ledger.close()
    with sqlite3.connect(tmp_path / "ledger.db") as older:
        older.execute("ALTER TABLE jobs DROP COLUMN steps")
        older.execute("UPDATE alembic_version SET version_num = '0001'")
    older.close()
    following = await Ledger.open(url)
    assert await following.job("j1") == records.job(steps=None)
    await following.close()


async def test_a_ledger_of_a_newer_tmd_is_refused_with_the_remedy(ledger: Ledger, url: str, tmp_path: Path) -> None:
    await ledger.close()
    with sqlite3.connect(tmp_path / "ledger.db") as newer:
        newer.execute("UPDATE alembic_version SET version_num = '9999'")
    newer.close()
    with pytest.raises(UnknownRevision, match=r"9999.*newer tmd"):
        await Ledger.open(url)


@pytest.mark.parametrize("wrong", ["nonsense", "mysql://x/y", "sqlite://", "sqlite:///:memory:"])
async def test_a_url_that_is_no_ledger_is_refused(wrong: str) -> None:
    with pytest.raises(BadDatabaseUrl, match="database"):
        await Ledger.open(wrong)


async def test_a_ledger_that_cannot_be_opened_says_which(tmp_path: Path) -> None:
    with pytest.raises(LedgerUnavailable, match="nowhere"):
        await Ledger.open(f"sqlite:///{tmp_path / 'nowhere' / 'ledger.db'}")


async def test_nobody_else_can_read_the_job_keys(ledger: Ledger, tmp_path: Path) -> None:
    await ledger.write(records.everything())
    modes = {path.name: stat.S_IMODE(os.stat(path).st_mode) for path in (tmp_path / name for name in os.listdir(tmp_path))}
    assert modes == dict.fromkeys(("ledger.db", "ledger.db-wal", "ledger.db-shm"), 384)


async def test_commits_are_on_the_disk_when_the_write_returns(ledger: Ledger) -> None:
    def settings(connection: Connection) -> tuple[object, object]:
        return connection.exec_driver_sql("PRAGMA journal_mode").scalar(), connection.exec_driver_sql(
            "PRAGMA synchronous"
        ).scalar()

    assert await ledger._writer.run(settings) == ("wal", 2)
    await ledger.write(Persist(paused=True))
    assert ledger.writes == 1
    assert ledger.write_median_s is not None
    assert 0 < ledger.write_median_s < 1.0


async def test_a_story_has_the_causes_and_nothing_else(ledger: Ledger) -> None:
    told = (
        records.event(1, subject="n1", kind="drain"),
        records.event(2, cause=1, subject="m1"),
        records.event(3, subject="m9"),
        records.event(4, cause=2, subject="m1"),
    )
    await ledger.write(Persist(jobs=(records.job(),), events=told))
    assert [event.event_id for event in await ledger.story("m1")] == [1, 2, 4]
    assert [event.event_id for event in await ledger.story("j1")] == [1, 2, 3, 4]
    assert await ledger.story("nobody") == []
    assert [event.event_id for event in await ledger.events(job_id="j1", limit=2)] == [3, 4]


async def test_a_node_stays_due_until_it_was_given_back(ledger: Ledger, url: str) -> None:
    await ledger.write(Persist(), [ReleaseNode(job_id="j1", node="n1", reason="replaced")])
    await ledger.close()
    following = await Ledger.open(url)
    assert await following.pending_releases() == [("j1", "n1", "replaced")]
    await following.released("j1", "n1")
    assert await following.pending_releases() == []
    await following.close()


async def test_the_rendezvous_store_outlives_the_daemon_and_ends_with_its_job(ledger: Ledger) -> None:
    await ledger.write(Persist(jobs=(records.job("j1"), records.job("j2"))))
    values: dict[tuple[str, str], bytes | None] = {("j1", "a"): b"1", ("j1", "b"): b"\0", ("j2", "a"): b"2"}
    await ledger.write_store(StoreChange(values, {("j1", "i1", 1): b"x", ("j1", "i1", 2): b"y"}))
    await ledger.write_store(StoreChange({("j1", "a"): None}, {}, [("j1", "i1", 1)]))
    assert await ledger.store_contents("j1") == ({"b": b"\0"}, {("i1", 2): b"y"})
    await ledger.write(Persist(jobs=(records.job("j1", state="failed"),)))
    await ledger.forget_ended_stores()
    assert await ledger.store_contents("j1") == ({}, {})
    assert await ledger.store_contents("j2") == ({"a": b"2"}, {})

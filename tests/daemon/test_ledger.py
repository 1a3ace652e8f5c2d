"""The ledger: what is written comes back, whole, to the next daemon, and to no daemon that has been followed by another."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
import sqlalchemy.exc
from sqlalchemy import Table, text

from tests.daemon import records
from tests.daemon.databases import change
from tmd.core.instructions import Persist, ReleaseNode
from tmd.core.records import EventRecord, JobRecord, MigrationRecord, NodeRecord, RankRecord
from tmd.ledger import schema
from tmd.ledger.engine import BadDatabaseUrl
from tmd.ledger.errors import LedgerDamaged, LedgerTakenOver
from tmd.ledger.ledger import Ledger, StoreChange


@pytest.fixture
async def ledger(database_url: str) -> AsyncIterator[Ledger]:
    opened = await Ledger.open(database_url)
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
    assert [column.name for column in table.columns] == [*(field.name for field in msgspec.structs.fields(record)), "checksum"]


async def test_every_record_comes_back_as_it_was_written_to_the_next_daemon(ledger: Ledger, database_url: str) -> None:
    written = records.everything()
    await ledger.write(written)
    await ledger.close()
    following = await Ledger.open(database_url)
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


async def test_an_older_daemon_can_write_nothing_once_another_has_started(ledger: Ledger, database_url: str) -> None:
    following = await Ledger.open(database_url)
    await following.write(Persist(paused=True))
    with pytest.raises(LedgerTakenOver, match="another daemon has started"):
        await ledger.write(Persist(paused=False))
    assert (await following.load_snapshot()).paused
    await following.close()


async def test_a_write_that_fails_halfway_leaves_nothing(ledger: Ledger) -> None:
    broken = msgspec.structs.replace(records.event(1), text=None)
    with pytest.raises(sqlalchemy.exc.IntegrityError):
        await ledger.write(Persist(jobs=(records.job(),), events=(broken,)))
    assert await ledger.job("j1") is None


@pytest.mark.parametrize("wrong", ["nonsense", "mysql://x/y", "sqlite://", "sqlite:///:memory:"])
async def test_a_url_that_is_no_ledger_is_refused(wrong: str) -> None:
    with pytest.raises(BadDatabaseUrl, match="database"):
        await Ledger.open(wrong)


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


async def test_a_node_stays_due_until_it_was_given_back(ledger: Ledger, database_url: str) -> None:
    await ledger.write(Persist(), [ReleaseNode(job_id="j1", node="n1", reason="replaced")])
    await ledger.close()
    following = await Ledger.open(database_url)
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


async def test_text_that_a_database_cannot_hold_does_not_stop_the_daemon(ledger: Ledger) -> None:
    """A script's exception may say anything. Postgres refuses zero bytes in text, which would be tried again for ever."""
    await ledger.write(Persist(jobs=(records.job(reason="Error: \0 bad byte", command=("a\0b",), versions={"x\0": "\0"}),)))
    found = await ledger.job("j1")
    assert found is not None
    assert found.reason == "Error: \N{REPLACEMENT CHARACTER} bad byte"
    assert (found.command, found.versions) == (("a\0b",), {"x\0": "\0"}), "structured values are written as JSON, with escapes"


async def test_numbers_come_back_as_they_were_whatever_their_type(ledger: Ledger) -> None:
    written = records.migration(
        downtime_s=1, lost_time_s=0.1 + 0.2, normal_step_s=5e-324, started_s=1.7976931348623157e308, bytes_moved=2**63 - 1
    )
    await ledger.write(Persist(migrations=(written,)))
    assert await ledger.migration("m1") == written


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("UPDATE jobs SET epoch = epoch + 1", "row 'j1' of jobs differs from its checksum"),
        ("UPDATE events SET text = 'nothing happened' WHERE event_id = 2", "row '2' of events differs from its checksum"),
        ("UPDATE store SET key = 'other'", "row 'j1 other' of store differs from its checksum"),
        ("UPDATE meta SET value = 'false' WHERE name = 'paused'", "row 'paused' of meta differs from its checksum"),
        ("UPDATE releases SET reason = ''", "row 'j1 n1' of releases differs from its checksum"),
        ("UPDATE jobs SET state = 'sleeping', checksum = NULL", "row 'j1' of jobs is no JobRecord: Invalid enum value"),
    ],
)
async def test_a_row_that_tmd_has_not_written_is_never_taken_for_a_decision(
    ledger: Ledger, database_url: str, statement: str, says: str
) -> None:
    written = Persist(jobs=(records.job(),), events=(records.event(1), records.event(2)), paused=True)
    await ledger.write(written, [ReleaseNode("j1", "n1", "x")])
    await ledger.write_store(StoreChange({("j1", "k"): b"v"}, {("j1", "i1", 1): b"r"}))
    await change(database_url, lambda connection: connection.execute(text(statement)))

    async def read_all() -> None:
        await ledger.load_snapshot()
        await ledger.events()
        await ledger.store_contents("j1")
        await ledger.pending_releases()

    with pytest.raises(LedgerDamaged) as refused:
        await read_all()
    assert says in str(refused.value)
    assert "jobs train on meanwhile; stop the daemon" in refused.value.remedy


async def test_a_table_that_is_gone_is_damage_and_no_crash(ledger: Ledger, database_url: str) -> None:
    await change(database_url, lambda connection: connection.execute(text("DROP TABLE migrations")))
    with pytest.raises(LedgerDamaged, match="migrations"):
        await ledger.load_snapshot()
    with pytest.raises(LedgerDamaged, match="migrations"):
        await ledger.write(records.everything())

"""The schema, on both databases: every revision leads up and down, and the newest one is what the code uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text

from tests.daemon import records
from tests.daemon.databases import change
from tmd.core.instructions import Persist
from tmd.ledger import revisions, schema
from tmd.ledger.ledger import Ledger, upgrade
from tmd.ledger.revisions import UnknownRevision

NEWEST = "0005"


def differences(connection: Connection) -> list[object]:
    return list(compare_metadata(MigrationContext.configure(connection), schema.metadata))


def down(revision: str) -> Callable[[Connection], None]:
    return lambda connection: command.downgrade(revisions.settings(connection), revision)


async def test_up_down_to_nothing_and_up_again_ends_in_exactly_the_schema_that_the_code_uses(database_url: str) -> None:
    """A field that was added to a record without a revision shows here, and a revision that leaves something behind."""
    assert await upgrade(database_url) == (None, NEWEST)
    assert await change(database_url, differences) == []
    await change(database_url, down("base"))
    assert await change(database_url, lambda connection: inspect(connection).get_table_names()) == ["alembic_version"]
    assert await upgrade(database_url) == (None, NEWEST)
    assert await change(database_url, differences) == []


async def test_each_revision_can_be_left_and_taken_with_a_ledger_full_of_records(database_url: str) -> None:
    ledger = await Ledger.open(database_url)
    await ledger.write(records.everything())
    await ledger.close()

    def names(connection: Connection) -> list[str]:
        scripts = ScriptDirectory.from_config(revisions.settings(connection))
        return [script.revision for script in scripts.walk_revisions()]

    for revision in (await change(database_url, names))[1:]:
        await change(database_url, down(revision))
        assert await upgrade(database_url) == (revision, NEWEST)
        following = await Ledger.open(database_url)
        jobs = (await following.load_snapshot()).jobs
        assert [job.job_id for job in jobs] == ["j1", "j2"]
        assert len(await following.events()) == 2
        await following.close()


async def test_two_upgrades_at_once_both_succeed(database_url: str) -> None:
    outcomes = await asyncio.gather(upgrade(database_url), upgrade(database_url))
    assert sorted(outcomes, key=str) == [(NEWEST, NEWEST), (None, NEWEST)]


async def test_a_ledger_of_the_first_revision_is_brought_up_to_date_with_its_jobs(database_url: str) -> None:
    ledger = await Ledger.open(database_url)
    await ledger.write(Persist(jobs=(records.job(),)))
    await ledger.close()
    await change(database_url, down("0001"))
    following = await Ledger.open(database_url)
    assert await following.job("j1") == records.job(steps=None)
    await following.close()


async def test_a_ledger_of_a_newer_tmd_is_refused_with_the_remedy(database_url: str) -> None:
    await upgrade(database_url)
    await change(database_url, lambda connection: connection.execute(text("UPDATE alembic_version SET version_num = '9999'")))
    with pytest.raises(UnknownRevision, match=r"9999.*newer tmd"):
        await Ledger.open(database_url)

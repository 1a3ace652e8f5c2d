"""The ledger on a real Postgres server: away, frozen, read-only, forbidden; and what is promised of every commit."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator

import pytest
from sqlalchemy import text

from tests.daemon import records
from tests.daemon.databases import change
from tests.daemon.postgres import Postgres
from tmd.core.instructions import Persist
from tmd.ledger import ledger as ledger_module
from tmd.ledger import reading
from tmd.ledger.engine import BadDatabaseUrl
from tmd.ledger.errors import LedgerUnavailable
from tmd.ledger.ledger import Ledger, StoreChange


@pytest.fixture
def url(postgres: Postgres) -> Iterator[str]:
    with postgres.database() as url:
        yield url


@pytest.fixture
async def ledger(url: str) -> AsyncIterator[Ledger]:
    opened = await Ledger.open(url)
    yield opened
    await opened.close()


@pytest.fixture
def outage(postgres: Postgres, url: str) -> Iterator[Postgres]:
    """The server, which runs again after the test, and before its database is cleared."""
    yield postgres
    if not postgres.running:
        postgres.start()


async def test_it_is_reached_over_tcp_and_over_a_unix_socket(postgres: Postgres, url: str) -> None:
    first = await Ledger.open(url)
    second = await Ledger.open(postgres.socket_url(url.rpartition("/")[2]))
    assert (first.generation, second.generation) == (1, 2)
    await first.close()
    await second.close()


async def test_a_server_that_goes_away_and_comes_back_is_an_outage_and_loses_nothing(
    outage: Postgres, ledger: Ledger, url: str
) -> None:
    """It is stopped as in a crash, with the connections of the ledger open."""
    await ledger.write(records.everything())
    outage.stop()
    for _ in range(2):
        with pytest.raises(LedgerUnavailable, match="see that Postgres runs"):
            await ledger.write(Persist(jobs=(records.job(epoch=8),)))
    with pytest.raises(LedgerUnavailable, match="see that Postgres runs"):
        await ledger.job("j1")
    with pytest.raises(LedgerUnavailable, match="see that Postgres runs"):
        await Ledger.open(url)
    outage.start()
    assert await ledger.job("j1") == records.job()
    await ledger.write(Persist(jobs=(records.job(epoch=9),)))
    assert await ledger.job("j1") == records.job(epoch=9)


async def test_a_server_that_does_not_answer_is_given_up_after_the_deadline(
    postgres: Postgres, ledger: Ledger, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "WRITE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(reading, "READ_TIMEOUT_S", 0.2)
    monkeypatch.setattr(ledger_module, "OPEN_TIMEOUT_S", 0.2)
    with postgres.frozen():
        with pytest.raises(LedgerUnavailable, match="no answer in time"):
            await ledger.write(Persist(jobs=(records.job(),)))
        with pytest.raises(LedgerUnavailable, match="no answer in time"):
            await ledger.load_snapshot()
        with pytest.raises(LedgerUnavailable, match="no answer in time"):
            await Ledger.open(url)
    monkeypatch.undo()
    await ledger.write(Persist(jobs=(records.job(),)))
    assert await ledger.job("j1") == records.job()


async def test_a_server_without_room_is_unavailable_and_what_was_written_before_stays(postgres: Postgres, ledger: Ledger) -> None:
    await ledger.write(records.everything())
    size_bytes = 20 << 20
    large = StoreChange({("j1", "large"): os.urandom(size_bytes + (4 << 20))}, {})
    with postgres.no_file_larger_than(size_bytes), pytest.raises(LedgerUnavailable, match="could not extend file"):
        await ledger.write_store(large)
    assert await ledger.job("j1") == records.job()
    assert await ledger.store_contents("j1") == ({}, {})
    await ledger.write_store(large)
    assert (await ledger.store_contents("j1"))[0] == {"large": large.values["j1", "large"]}


@pytest.mark.parametrize(
    ("user", "database", "says"),
    [
        ("nobody", "postgres", 'role "nobody" does not exist: see that pg_hba.conf'),
        ("tmd", "nowhere", 'database "nowhere" does not exist: make the database'),
    ],
)
async def test_what_is_missing_is_named(postgres: Postgres, user: str, database: str, says: str) -> None:
    with pytest.raises(LedgerUnavailable, match=says):
        await Ledger.open(postgres.url(database, user=user))


async def test_a_user_without_rights_is_told_what_it_needs(postgres: Postgres, url: str) -> None:
    database = url.rpartition("/")[2]
    postgres.run_sql("DROP ROLE IF EXISTS guest; CREATE ROLE guest LOGIN", database)
    guest_url = postgres.url(database, user="guest")
    with pytest.raises(LedgerUnavailable, match=r"permission denied for schema.*owner of the database and of its tables"):
        await Ledger.open(guest_url)
    await (await Ledger.open(url)).close()
    with pytest.raises(LedgerUnavailable, match=r"permission denied for table.*owner of the database and of its tables"):
        await Ledger.open(guest_url)
    postgres.run_sql("REVOKE USAGE ON SCHEMA public FROM PUBLIC", database)
    with pytest.raises(LedgerUnavailable, match=r"no schema.*owner of the database and of its tables"):
        await Ledger.open(guest_url)


async def test_a_database_set_read_only_is_unavailable(postgres: Postgres, url: str) -> None:
    await (await Ledger.open(url)).close()
    database = url.rpartition("/")[2]
    postgres.run_sql(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
    with pytest.raises(LedgerUnavailable, match="read-only transaction: the server takes no writes"):
        await Ledger.open(url)
    postgres.run_sql(f"ALTER DATABASE {database} RESET default_transaction_read_only")
    await (await Ledger.open(url)).close()


async def test_commits_are_on_the_servers_disk_whatever_its_own_default_is(postgres: Postgres, url: str) -> None:
    postgres.run_sql(f"ALTER DATABASE {url.rpartition('/')[2]} SET synchronous_commit = off")
    setting = await change(url, lambda connection: connection.execute(text("SHOW synchronous_commit")).scalar())
    assert setting == "on"


async def test_what_is_read_at_once_is_from_one_moment(ledger: Ledger) -> None:
    async with ledger._reading() as connection:
        level = await connection.scalar(text("SHOW transaction_isolation"))
    assert level == "repeatable read"


async def test_without_its_driver_the_package_to_install_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    with pytest.raises(BadDatabaseUrl, match=r"asyncpg: pip install 'tmd\[head,postgres\]'"):
        await Ledger.open(url)

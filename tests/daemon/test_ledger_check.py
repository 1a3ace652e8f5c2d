"""`tmctl ledger check`: a sound ledger is called sound, and whatever is wrong with one is named; on both databases."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import text

from tests.daemon import records
from tests.daemon.databases import change
from tmd.cli.main import main
from tmd.core.instructions import Persist, ReleaseNode
from tmd.ledger.check import check
from tmd.ledger.existing import existing
from tmd.ledger.ledger import Ledger, StoreChange, upgrade


async def call(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, ["ledger", "check", *arguments])


@pytest.fixture
async def ledger(database_url: str) -> AsyncIterator[Ledger]:
    """A daemon's, which goes on, with one job that runs and one that has ended."""
    opened = await Ledger.open(database_url)
    await opened.write(records.whole_job("j1", first_event=1), [ReleaseNode("j1", "n9", "replaced")])
    await opened.write(records.whole_job("old", first_event=5, ended_s=100.0))
    await opened.write_store(StoreChange({("j1", "key"): b"value"}, {("j1", "j1.0", 1): b"reply"}))
    yield opened
    await opened.close()


async def test_a_sound_ledger_is_called_sound_while_its_daemon_goes_on(ledger: Ledger, database_url: str) -> None:
    checked = await check(database_url)
    assert checked.problems == []
    assert checked.revision == "0005"
    expected = {"jobs": 2, "ranks": 8, "nodes": 2, "migrations": 2, "events": 8, "releases": 1, "store": 1, "store_replies": 1}
    assert checked.rows == {**expected, "meta": 1}
    await ledger.write(Persist(paused=True))


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("UPDATE ranks SET state = 'lost' WHERE incarnation = 'old.1'", "row 'old old.1' of ranks differs from its checksum"),
        ("UPDATE events SET cause = 7 WHERE event_id = 3", "row '3' of events differs from its checksum"),
        ("UPDATE events SET cause = 7, checksum = NULL WHERE event_id = 3", "event 3: the event 7 that led to it is not there"),
        ("DELETE FROM events WHERE event_id = 2", "event 3: the event 2 that led to it is not there"),
        ("DELETE FROM jobs WHERE job_id = 'old'", "incarnation old.0: there is no record of its job old"),
        ("DELETE FROM jobs WHERE job_id = 'j1'", "releases: rows of job j1, of which there is no record"),
        ("DELETE FROM ranks WHERE incarnation = 'j1.2'", "its table names the incarnation j1.2, of which there is no record"),
        ("UPDATE jobs SET world_size = 3, checksum = NULL", "2 nodes with 1 ranks each are not 3 ranks"),
        ("UPDATE jobs SET epoch = 9, checksum = NULL", "job j1: epoch 9 was never given out, the last one was 5"),
        ("UPDATE jobs SET poison_epoch = 3, checksum = NULL", "job j1: it runs in epoch 3, which was called off"),
        ("UPDATE jobs SET epoch = 4, checksum = NULL", "job j1: it runs in epoch 4 without that epoch's table"),
        ("UPDATE jobs SET armed = NOT armed, checksum = NULL", "job j1: it is armed without a plan"),
        ("UPDATE jobs SET exit_code = NULL, checksum = NULL", "job old: it has ended without an exit code or a reason"),
        ("UPDATE ranks SET state = 'member', checksum = NULL", "job j1: 2 incarnations are members with rank 1"),
        ("UPDATE ranks SET rank = 7, checksum = NULL WHERE incarnation = 'j1.1'", "incarnation j1.1: rank 7 of 2"),
        ("UPDATE migrations SET ended_s = NULL, checksum = NULL", "migration m-j1: it is done, its end is None"),
        (
            "UPDATE migrations SET state = 'armed', ended_s = NULL, checksum = NULL",
            "migration m-old: it is armed, and its job old has ended",
        ),
        (
            "UPDATE migrations SET state = 'armed', ended_s = NULL, job_id = 'j1', checksum = NULL",
            "rank 1 of job j1 is moving in m-",
        ),
        ("UPDATE migrations SET job_id = 'j1', checksum = NULL", "no record of the incarnation old.1 in job j1"),
        ("UPDATE meta SET value = 'x', checksum = NULL", "how often a daemon has started is 'x', which is no number"),
        ("ALTER TABLE nodes DROP COLUMN labels", "the schema is not that of revision 0005, it needs: add column nodes labels"),
        ("DROP TABLE store", "the schema is not that of revision 0005, it needs: add table store"),
    ],
)
async def test_what_is_wrong_is_named(ledger: Ledger, database_url: str, statement: str, problem: str) -> None:
    await change(database_url, lambda connection: connection.execute(text(statement)))
    problems = (await check(database_url)).problems
    assert any(problem in each for each in problems), problems


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_the_command_says_it_in_words_in_json_and_by_its_exit_code(ledger: Ledger, database_url: str) -> None:
    await ledger.close()
    sound = await call("--database", database_url)
    assert (sound.exit_code, sound.output) == (0, f"{database_url}, revision 0005: ok; {sound.output.partition('; ')[2]}")
    await change(database_url, lambda connection: connection.execute(text("UPDATE jobs SET epoch = 1")))
    wrong = await call("--database", database_url)
    assert wrong.exit_code == 1
    assert "problem: row 'j1' of jobs differs from its checksum" in wrong.stdout
    assert "A damaged ledger" in wrong.stdout
    assert len(json.loads((await call("--database", database_url, "--json")).stdout)["problems"]) >= 2


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_damaged_file_is_a_finding(ledger: Ledger, database_url: str, tmp_path: Path) -> None:
    await ledger.close()
    with (tmp_path / "ledger.db").open("r+b") as file:
        file.seek(8192)
        file.write(bytes(4096))
    result = await call("--database", database_url)
    assert result.exit_code == 1
    assert "problem: " in result.stdout
    assert "Traceback" not in result.output


async def test_root_leaves_the_files_of_another_user_to_that_user(tmp_path: Path) -> None:
    """Else the daemon could not write any more what root has looked at."""
    path = tmp_path / "ledger.db"
    await upgrade(f"sqlite:///{path}")
    owner = 65534 if os.geteuid() == 0 else os.geteuid()
    os.chown(path, owner, -1)
    async with existing(f"sqlite:///{path}") as ledger, ledger.database.readers.connect() as connection:
        await connection.execute(text("SELECT count(*) FROM jobs"))
        owners = {name: os.stat(tmp_path / name).st_uid for name in os.listdir(tmp_path)}
    assert owners == dict.fromkeys(("ledger.db", "ledger.db-wal", "ledger.db-shm"), owner)


async def test_no_ledger_is_said_and_none_is_made(tmp_path: Path) -> None:
    result = await call("--state-dir", str(tmp_path))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"error: there is no ledger at {tmp_path / 'ledger.db'}\n"
        "  what to do: name the daemon's own --config, --state-dir or --database\n"
    )
    assert os.listdir(tmp_path) == []


async def test_an_older_ledger_is_left_as_it_is(database_url: str) -> None:
    await upgrade(database_url)
    await change(database_url, lambda connection: connection.execute(text("UPDATE alembic_version SET version_num = '0002'")))
    result = await call("--database", database_url)
    assert result.exit_code == 1
    assert "is at revision 0002, this tmd needs 0005" in result.stderr
    assert "tmctl ledger upgrade" in result.stderr

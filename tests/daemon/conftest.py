"""Daemons and agents that never outlive their test."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.postgres import Postgres
from tests.daemon.rig import Agent, Daemon

_JOBS = itertools.count(100)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A server that runs as long as the tests do; whoever stops it starts it again."""
    with Postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of each kind that a ledger can be on."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'ledger.db'}"
        return
    server: Postgres = request.getfixturevalue("postgres")
    with server.database() as url:
        yield url


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    made: list[Daemon] = []

    def make(*arguments: str) -> Daemon:
        folder = tmp_path / f"daemon{len(made)}"
        folder.mkdir()
        made.append(Daemon(folder, *arguments))
        return made[-1]

    yield make
    for each in made:
        each.clean_up()


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    return make_daemon().start()


@pytest.fixture(scope="session")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """For tests that leave the daemon as it is; each has a job of its own."""
    daemon = Daemon(tmp_path_factory.mktemp("shared"))
    try:
        yield daemon.start()
    finally:
        daemon.clean_up()


@pytest.fixture
def job_id() -> str:
    """A job id that no other test uses."""
    return f"j{next(_JOBS)}"


@pytest.fixture
async def make_agent() -> AsyncIterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def make(*arguments: Any, **changes: Any) -> Agent:
        made.append(Agent(*arguments, **changes))
        return made[-1]

    yield make
    for each in made:
        await each.leave()

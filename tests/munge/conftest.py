"""Munged and daemons that never outlive their test. Root starts them, because only root can start programs of other users."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.daemon.rig import Daemon
from tests.munge.munged import ALICE, Munged, python_as


@pytest.fixture(scope="session", autouse=True)
def can_run_here() -> None:
    assert os.geteuid() == 0, "these tests start programs as other users: run them as root"
    assert shutil.which("munged"), "these tests need munged: scripts/setup-munge installs it"
    assert python_as(ALICE, "import os; print(os.getuid())") == str(ALICE), "programs of other users can be started"


@pytest.fixture
def make_munged() -> Iterator[Callable[[], Munged]]:
    made: list[Munged] = []

    def make() -> Munged:
        made.append(Munged())
        return made[-1].start()

    yield make
    for each in made:
        each.clean_up()


@pytest.fixture
def munged(make_munged: Callable[[], Munged]) -> Munged:
    return make_munged()


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
